"""``kvpop inspect-checkpoint``: what a full checkpoint of other authors holds, and how its scorer can be read.

Bad input raises a :class:`~kvpop_vllm.config.ConfigError` that names what to change.
"""

from pathlib import Path

from kvpop_vllm.config import ConfigError
from kvpop_vllm.hub import local_folder
from kvpop_vllm.scorers import reader
from kvpop_vllm.scorers.checkpoint import check_tensors
from kvpop_vllm.scorers.config_keys import DECAY_RANGE
from kvpop_vllm.scorers.conversion import convert
from kvpop_vllm.scorers.published_checkpoint import Checkpoint, open_checkpoint
from kvpop_vllm.scorers.tensor_map import Reading, differences, read_map, write_map
from kvpop_vllm.scorers.tensor_matching import REQUIRED, stacks, uses_of

_DEFAULTS = {
    "inputs": "key value", "feature_map": "hedgehog", "gate_softcap": None, "delayed": True, "norm": None,
    "norm_weight": "w", "decay": "logit", "decay_min": DECAY_RANGE[0], "decay_max": DECAY_RANGE[1], "decay_step": 1,
}  # fmt: skip


def inspect_checkpoint(name: str | Path, out: str | Path, map_file: str | Path | None = None) -> list[str]:
    """Write a map of a checkpoint's scorer, and return what to print.

    Args:
        name: folder, or name of the hub.
        out: file of the map. It holds the first reading that fits, or what is sure if none does.
        map_file: a map to check instead. Nothing is then written.
    """
    out = Path(out)
    if map_file is None and out.exists():
        raise ConfigError(f"{out} exists: name another file with --out")
    checkpoint = open_checkpoint(local_folder(name))
    lines = [f"{name}: {checkpoint.sizes['model_type']} of {checkpoint.small.layers} layers, {checkpoint.small.heads} KV heads of size {checkpoint.small.dim}"]  # fmt: skip
    lines += _tensors(checkpoint)
    lines += [
        f"config.json: {key} {value} ({checkpoint.facts.names[key]})" for key, value in checkpoint.facts.values.items()
    ]
    if checkpoint.facts.unread:
        lines.append(f"config.json, not read: {', '.join(sorted(checkpoint.facts.unread))}")
    lines += checkpoint.facts.findings
    if map_file is not None:
        reading = read_map(map_file)
        check_tensors(*convert(checkpoint, reading), str(checkpoint.folder))
        return [*lines, *reader.describe(checkpoint, reading), f"{map_file} fits"]
    try:
        fitting, reason = reader.readings(checkpoint), ""
    except ConfigError as error:
        fitting, reason = [], str(error)
    reading = fitting[0] if fitting else draft(checkpoint)
    if fitting:
        lines += [*reader.describe(checkpoint, reading), *reader.assumed(checkpoint, reading)]
    if len(fitting) > 1:
        lines += [
            f"{reader.number_of(fitting)} readings fit, of which this is one; they differ in",
            *(f"  {text}" for text in differences(fitting)),
        ]
    elif not fitting:
        lines.append(f"no reading fits: {reason or reader.why_none(checkpoint)}")
    if unknown := [key for key, tokens in reading.budget.items() if tokens is None]:
        lines.append(f"config.json does not say {', '.join(unknown)}: add them to the map")
    write_map(out, reading)
    use = (
        "serve it as it is, or change the map and give it with --kv-map"
        if len(fitting) == 1 and not unknown and not checkpoint.facts.findings
        else "mend it, and give it with --kv-map"
    )
    return [*lines, f"wrote {out}: {use}"]


def _tensors(checkpoint: Checkpoint) -> list[str]:
    all_stacks = stacks(checkpoint.shapes, checkpoint.small, str(checkpoint.folder))
    lines = [f"{len(checkpoint.shapes)} tensors are not the base model's:"]
    for stack in all_stacks:
        able = dict.fromkeys(piece for pieces, _ in uses_of(stack, checkpoint.small) for piece in pieces)
        lines.append(f"  {stack.template} {list(stack.shape)}: {' or '.join(able) or 'no piece of a scorer'}")
    return lines


def draft(checkpoint: Checkpoint) -> Reading:
    """Return a map to complete: each piece where one tensor alone can be it, with the first order of its axes."""
    all_stacks, pieces = stacks(checkpoint.shapes, checkpoint.small, str(checkpoint.folder)), {}
    for stack in all_stacks:
        for places, _ in uses_of(stack, checkpoint.small)[:1]:
            pieces = places | pieces
    pieces |= {piece: {"tensor": "?", "axes": "head in"} for piece in REQUIRED if piece not in pieces}
    formula = dict(_DEFAULTS)
    for key in ("feature_map", "gate_softcap", "decay_min", "decay_max", "decay_step"):
        if checkpoint.facts[key]:
            formula[key] = checkpoint.facts[key]
    if "norm" in pieces:
        formula["norm"] = "rms"
    if "decay" not in pieces:
        formula["decay"] = "constant"
    budget = {key: checkpoint.facts[key] for key in ("sinks", "window", "topk")}
    return Reading(pieces, formula, budget)
