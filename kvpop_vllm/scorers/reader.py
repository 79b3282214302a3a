"""Reader of full checkpoints of other authors: the only reading of the scorer that fits, or the one in a map.

Bad input raises a :class:`~kvpop_vllm.config.ConfigError` that names what to change.
"""

import functools
import itertools
import logging
from pathlib import Path

import torch

from kvpop_vllm.config import ConfigError
from kvpop_vllm.scorers import ScorerConfig
from kvpop_vllm.scorers.config_keys import DECAY_RANGE, budgets_of
from kvpop_vllm.scorers.conversion import arranged, convert
from kvpop_vllm.scorers.published_checkpoint import Checkpoint, open_checkpoint
from kvpop_vllm.scorers.tensor_map import MAP_NAME, Reading, describe_place, differences, read_map
from kvpop_vllm.scorers.tensor_matching import MOST, PIECES, Pieces, lacking, places, stacks

logger = logging.getLogger("vllm.kvpop_vllm")


def readings(checkpoint: Checkpoint) -> list[Reading]:
    """Return all readings that fit, up to :data:`kvpop_vllm.scorers.tensor_matching.MOST`."""
    sizes, source = checkpoint.small, str(checkpoint.folder)
    fitting = places(stacks(checkpoint.shapes, sizes, source), sizes, source)
    return [reading for pieces in fitting for reading in _with_formula(checkpoint, pieces)][:MOST]


def number_of(fitting: list[Reading]) -> str:
    """Return the number of readings that fit, as far as they are looked for."""
    return f"{len(fitting)}" if len(fitting) < MOST else f"at least {MOST}"


def _with_formula(checkpoint: Checkpoint, pieces: Pieces) -> list[Reading]:
    facts, source = checkpoint.facts, f"{checkpoint.folder / 'config.json'}"
    for key, piece in (("norm", "norm"), ("skip", "skip"), ("value_projection", "value")):
        says = facts[key]
        if says is not None and bool(says) != (piece in pieces):
            verb = "is no such tensor" if says else "is one"
            raise ConfigError(f"{source}: {facts.names[key]} is {says!r}, and there {verb}: one of the two is wrong")
    columns, values = (
        arranged(checkpoint, pieces[piece], 0, PIECES[piece][1]).shape[-1] for piece in ("query", "score")
    )
    low, high = facts["decay_range"] or (facts["decay_min"] or DECAY_RANGE[0], facts["decay_max"] or DECAY_RANGE[1])
    dim = checkpoint.small.dim
    # Hedgehog has D / 2 columns by default, softmax D
    by_size = {dim // 2: ["hedgehog"], dim: ["softmax"]}.get(columns, ["hedgehog", "softmax"])
    feature_maps = [facts["feature_map"]] if facts["feature_map"] else by_size
    fitting = []
    for feature_map, norm, decay in itertools.product(
        feature_maps, _norms(checkpoint, pieces), _decays(checkpoint, pieces)
    ):
        features = columns * (2 if feature_map == "hedgehog" else 1)
        # a state of F x Dv numbers takes as many as these tokens' keys and values
        budgets = budgets_of(facts, features * values // (2 * dim), source)
        ends = (facts["gamma"], facts["gamma"]) if decay == "constant" else (low, high)
        formula = {
            "inputs": "key value",
            "feature_map": feature_map,
            "gate_softcap": facts["gate_softcap"] or None,
            "delayed": facts["delayed"] is not False,
            "norm": norm[0],
            "norm_weight": norm[1],
            "decay": decay,
            "decay_min": ends[0],
            "decay_max": ends[1],
            "decay_step": facts["decay_step"] or 1,
        }
        fitting += [Reading(pieces, formula, budget) for budget in budgets]
    return fitting


def _norms(checkpoint: Checkpoint, pieces: Pieces) -> list[tuple[str | None, str]]:
    """Return the norms that fit, with how their weights are meant."""
    if "norm" not in pieces:
        return [(None, "w")]
    name, says = pieces["norm"]["tensor"].lower(), checkpoint.facts["norm"]
    kinds = [says] if isinstance(says, str) else ["rms"] if "rms" in name else ["layer"] if "layernorm" in name or "layer_norm" in name else ["rms", "layer"]  # fmt: skip
    means = [arranged(checkpoint, pieces["norm"], i, ("head", "out")).mean() for i in range(checkpoint.small.layers)]
    # weights around 1 are factors, and weights around 0 are added to 1
    return [(kind, "w" if float(torch.stack(means).mean()) > 0.5 else "1 + w") for kind in kinds]


def _decays(checkpoint: Checkpoint, pieces: Pieces) -> list[str]:
    """Return the meanings of the decay that its name, the config and its values allow."""
    facts, source = checkpoint.facts, str(checkpoint.folder)
    if "decay" not in pieces:
        if facts["gamma"] is None:
            raise ConfigError(
                f"{source}: no tensor is the decay, and config.json says none: see 'kvpop inspect-checkpoint {source}'"
            )
        return ["constant"]
    name = pieces["decay"]["tensor"].rsplit(".", 1)[-1].lower()
    # the last word of a name says nothing here
    if name in ("weight", "param"):
        name = pieces["decay"]["tensor"].rsplit(".", 2)[-2].lower()
    by_name = next((kind for hint, kind in (("logit", "logit"), ("alpha", "logit"), ("log", "log"), ("gamma", "gamma")) if hint in name), None)  # fmt: skip
    named = facts["decay"] or by_name
    values = torch.stack([arranged(checkpoint, pieces["decay"], i, ("head",)) for i in range(checkpoint.small.layers)])
    # any number is a logit, a logarithm is at most 0, and a factor is in (0, 1]
    able = {"logit": True, "log": bool((values <= 0).all()), "gamma": bool(((values > 0) & (values <= 1)).all())}
    if named and not able[named]:
        raise ConfigError(
            f"{source}: {pieces['decay']['tensor']} is called {named}, and its values are none: one of the two is wrong"
        )
    return [named] if named else [kind for kind, fits in able.items() if fits]


def reading_of(checkpoint: Checkpoint, map_file: str | Path | None = None) -> Reading:
    """Return the reading in a map, or the only one that fits."""
    if map_file is not None:
        return read_map(map_file)
    # contradictions in the config are never resolved by a guess
    if checkpoint.facts.findings:
        raise ConfigError(
            f"{checkpoint.facts.findings[0]}; or give a map (--kv-map), which 'kvpop inspect-checkpoint' writes"
        )
    fitting, folder = readings(checkpoint), checkpoint.folder
    if len(fitting) == 1:
        for line in assumed(checkpoint, fitting[0]):
            _warn_once(line)
        return fitting[0]
    if not fitting:
        raise ConfigError(f"{folder}: {why_none(checkpoint)}: see 'kvpop inspect-checkpoint {folder}'")
    raise ConfigError(
        f"{folder}: its scorer can be read in {number_of(fitting)} ways ({'; '.join(differences(fitting))}): run 'kvpop inspect-checkpoint"
        f" {folder}', mend the {MAP_NAME} that it writes, and give it with --kv-map"
    )


def assumed(checkpoint: Checkpoint, reading: Reading) -> list[str]:
    """Return a line of what neither the tensors nor the config say about a reading's formula, none if they say all."""
    facts, formula = checkpoint.facts, reading.formula
    names = [name for name in ("feature_map", "gate_softcap", "delayed", "decay_step") if facts[name] is None]
    if formula["decay"] == "logit" and facts["decay_range"] is None:
        names += [name for name in ("decay_min", "decay_max") if facts[name] is None]
    listed = ", ".join(f"{name} {formula[name]}" for name in names)
    return [f"{checkpoint.folder}: assumed, because config.json does not say it: {listed}"] if names else []


# a checkpoint is read several times, and says this once
@functools.cache
def _warn_once(line: str) -> None:
    logger.warning("%s", line)


def why_none(checkpoint: Checkpoint) -> str:
    """Return why no reading fits."""
    missing = lacking(stacks(checkpoint.shapes, checkpoint.small, str(checkpoint.folder)), checkpoint.small)
    if missing:
        return f"no tensor of its scorer can be the {missing[0]}"
    return "its scorer's tensors do not make a scorer together, by their names and sizes"


def describe(checkpoint: Checkpoint, reading: Reading) -> list[str]:
    """Return a reading in a few lines."""
    lines = [f"{checkpoint.folder}: the scorer is read as"]
    lines += [f"  {piece}: {describe_place(place)}" for piece, place in reading.pieces.items()]
    lines.append("  " + ", ".join(f"{name} {value}" for name, value in reading.formula.items() if value is not None))
    lines.append("  " + ", ".join(f"{name} {value}" for name, value in reading.budget.items()))
    if checkpoint.facts.unread:
        names = ", ".join(sorted(checkpoint.facts.unread)[:12])
        lines.append(f"  not read in config.json: {names}")
    return lines


def read_published(
    folder: str | Path, map_file: str | Path | None = None
) -> tuple[ScorerConfig, list[dict[str, torch.Tensor]]]:
    """Return the config and tensors of a full checkpoint's scorer. See :func:`kvpop_vllm.scorers.conversion.convert`."""
    checkpoint = open_checkpoint(folder)
    return convert(checkpoint, reading_of(checkpoint, map_file))
