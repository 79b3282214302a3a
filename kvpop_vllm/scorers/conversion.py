"""Conversion of a published scorer to the config and the tensors of our format.

Bad input raises a :class:`~kvpop_vllm.config.ConfigError` that names what to change.
"""

import math
import re
from collections.abc import Mapping

import torch

from kvpop_vllm.config import ConfigError
from kvpop_vllm.scorers import ScorerConfig, make_config
from kvpop_vllm.scorers.published_checkpoint import Checkpoint
from kvpop_vllm.scorers.tensor_map import MAP_NAME, Reading
from kvpop_vllm.scorers.tensor_matching import PIECES

_AT_THE_END = 40.0
"""Logit of the sigmoid that is 1 in float64."""


def convert(checkpoint: Checkpoint, reading: Reading) -> tuple[ScorerConfig, list[dict[str, torch.Tensor]]]:
    """Return a checkpoint's scorer config and, per layer, its tensors under the names of our format, float32."""
    source, formula = str(checkpoint.folder), reading.formula
    if unknown := [name for name, number in reading.budget.items() if number is None]:
        raise ConfigError(
            f"{source}: config.json does not say {' and '.join(unknown)}: write a map with 'kvpop inspect-checkpoint {source}', add"
            " them, and give it with --kv-map"
        )
    layers = [_layer(checkpoint, reading, i) for i in range(checkpoint.small.layers)]
    decay = {"step": formula["decay_step"], "min": formula["decay_min"], "max": formula["decay_max"]}
    if formula["decay"] in ("log", "gamma"):
        decay |= _logits(layers, formula["decay"], source)
    elif formula["decay"] == "constant":
        for tensors in layers:
            # any logit will do: both ends of the range are gamma
            tensors["decay_logit"] = torch.zeros(checkpoint.small.heads)
    config = make_config(
        checkpoint.sizes,
        "mlstm",
        source=source,
        decay=decay,
        norm="norm" in reading.pieces,
        skip="skip" in reading.pieces,
        **{name: formula[name] for name in ("feature_map", "gate_softcap", "delayed")},
        **reading.budget,
    )
    return config, layers


def _layer(checkpoint: Checkpoint, reading: Reading, layer: int) -> dict[str, torch.Tensor]:
    heads, dim = checkpoint.small.heads, checkpoint.small.dim
    tensors = {PIECES[p][0]: arranged(checkpoint, place, layer, PIECES[p][1]) for p, place in reading.pieces.items()}
    for name in ("igate.bias", "fgate.bias", "out.bias"):
        tensors.setdefault(name, torch.zeros(heads))
    if reading.formula["norm"] is not None and reading.formula["norm_weight"] == "1 + w":
        # our kernels multiply by the weight as it is
        tensors["norm.weight"] = 1 + tensors["norm.weight"]
    if reading.formula["inputs"] == "value key":
        for name in ("q_proj", "k_proj", "v_proj", "igate.weight", "fgate.weight", "skip.weight"):
            if name in tensors:
                # our inputs are [key; value]
                tensors[name] = tensors[name].roll(dim, 1)
    if reading.formula["norm"] == "layer":  # the readout is linear in the values: centred values give a centred readout
        identity = torch.cat([torch.zeros(dim, dim), torch.eye(dim)]).expand(heads, -1, -1)
        values = tensors.get("v_proj", identity)
        tensors["v_proj"] = values - values.mean(-1, keepdim=True)
    return {name: tensor.contiguous() for name, tensor in tensors.items()}


def arranged(checkpoint: Checkpoint, place: Mapping, layer: int, axes: tuple[str, ...]) -> torch.Tensor:
    """Return one layer's piece with the given axes, float32."""
    template, sizes = place["tensor"], checkpoint.small
    if "{head}" in template:
        heads = [template.replace("{head}", str(i)) for i in range(sizes.heads)]
        other_axes = tuple(axis for axis in axes if axis != "head")
        return torch.stack([_layer_tensor(checkpoint, place, name, layer, other_axes) for name in heads])
    return _layer_tensor(checkpoint, place, template, layer, axes)


def _layer_tensor(checkpoint: Checkpoint, place: Mapping, name: str, layer: int, axes: tuple[str, ...]) -> torch.Tensor:
    # a tensor of all layers has no {layer} in its name
    stacked = "{layer}" not in name
    name = name.replace("{layer}", str(layer))
    if name not in checkpoint.shapes:
        raise ConfigError(f"{checkpoint.folder} has no tensor {name}, which {MAP_NAME} names: mend the map")
    tensor, sizes = checkpoint.tensor(name), checkpoint.small
    counts = {"layer": sizes.layers, "head": sizes.heads, "in": 2 * sizes.dim}
    # axes in parentheses share one axis of the tensor
    groups = [group.strip("()").split() for group in re.findall(r"\([^)]*\)|\S+", place["axes"])]
    words = [axis for group in groups for axis in group if axis != "1"]
    if "rows" in place:
        if not tensor.dim() or place["rows"][1] > len(tensor):
            raise _misfit(checkpoint, name, tensor, place)
        tensor = tensor[slice(*place["rows"])]
    if len(groups) != tensor.dim():
        raise _misfit(checkpoint, name, tensor, place)
    lengths = []
    for group, length in zip(groups, tensor.shape, strict=True):
        # 0 stands for the size of out, which the tensor shows
        sizes_of_axes = [counts.get(axis, 0) for axis in group if axis != "1"]
        fixed = math.prod(size for size in sizes_of_axes if size)
        unknown = sizes_of_axes.count(0)
        if length % fixed or unknown > 1 or (not unknown and fixed != length):
            raise _misfit(checkpoint, name, tensor, place)
        lengths += [size or length // fixed for size in sizes_of_axes]
    tensor = tensor.reshape(lengths)
    # axes to select from first, then ours
    order = [axis for axis in ("layer", "part", *axes) if axis in words]
    if sorted(order) != sorted(words):
        raise _misfit(checkpoint, name, tensor, place)
    tensor = tensor.permute([words.index(axis) for axis in order])
    if "layer" in words and stacked:
        tensor = tensor[layer]
    if "part" in words:
        if place["part"] >= tensor.shape[0]:
            raise _misfit(checkpoint, name, tensor, place)
        tensor = tensor[place["part"]]
    if "slice" in place:
        first, end = place["slice"]
        if end > tensor.shape[-1]:
            raise _misfit(checkpoint, name, tensor, place)
        tensor = tensor[..., first:end]
    for i, axis in enumerate(axes):  # left out: of length 1, or shared by all heads
        if axis not in words:
            tensor = tensor.unsqueeze(i).expand(
                *tensor.shape[:i], counts["head"] if axis == "head" else 1, *tensor.shape[i:]
            )
    return tensor


def _misfit(checkpoint: Checkpoint, name: str, tensor: torch.Tensor, place: Mapping) -> ConfigError:
    shape = list(checkpoint.shapes[name])
    return ConfigError(
        f"{checkpoint.folder}: tensor {name} is {shape}, which axes {place['axes']!r} do not describe: mend the map"
    )


def _logits(layers: list[dict[str, torch.Tensor]], kind: str, source: str) -> dict[str, float]:
    """Replace decays that are given themselves by logits. Return the range of gamma that they are of."""
    raw = torch.stack([tensors["decay_logit"] for tensors in layers]).double()
    if kind == "gamma" and not bool(((raw > 0) & (raw <= 1)).all()):
        raise ConfigError(f"{source}: the decay is said to be gamma, and has values outside 0 to 1: mend the map")
    logs = raw.log() if kind == "gamma" else raw
    if not bool((logs <= 0).all()) or not bool((logs > -20).all()):
        raise ConfigError(f"{source}: the decay is said to be {kind}, and has values that are none: mend the map")
    # the range is wider than the values, so that their logits are finite
    slack = max(float(logs.max() - logs.min()), 1e-6)
    low, high = float(logs.min()) - slack, min(0.0, float(logs.max()) + slack)
    share = ((logs - low) / (high - low)).clamp(0, 1)
    for tensors, row in zip(layers, share, strict=True):
        # a gamma of 1 is the end of the range, whose logit is infinite
        tensors["decay_logit"] = torch.logit(row).clamp(-_AT_THE_END, _AT_THE_END).float()
    return {"min": math.exp(low), "max": math.exp(high)}
