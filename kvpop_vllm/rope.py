"""Rotary embeddings of a model: their parameters, and keys turned to other positions.

Bad input raises a :class:`~kvpop_vllm.config.ConfigError` that names what to change.
"""

import math
from collections.abc import Mapping

import torch

from kvpop_vllm.config import ConfigError
from kvpop_vllm.supported import SCALED_BY_POSITION

STATIC = ("default", "linear", "llama3", "yarn", "proportional")
"""Rotations by an angle in proportion to the position, so that a turned key is the key of another position."""
UNROTATED = "unrotated_layers"
"""Key of the indices of layers without rotary embeddings, next to the rope parameters of the others."""
DEFAULT_THETA = 10000.0
"""Base of the wavelengths where a model's config gives none, as in transformers."""


def rope_of(config: Mapping) -> dict:
    """Return the rope parameters in a model's config under transformers' names.

    ``rope_type`` and ``rope_theta`` are always there, other fields if the config has them. The older keys
    ``rope_theta`` and ``rope_scaling`` are read too. UNROTATED lists the layers that do not rotate, if there are any,
    and a setting that scales queries by their position is there too.

    Args:
        config: the model's resolved config, since a ``config.json`` may leave to its model type which layers rotate, or
            ``{"rope_parameters": ...}`` of an earlier result.
    """
    parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(parameters, Mapping) or any(isinstance(value, Mapping) for value in parameters.values()):
        raise ConfigError("layers of this model have rotary embeddings of their own each: choose another model")
    rope = {name: value for name, value in parameters.items() if value is not None}
    # older configs say type
    older = rope.pop("type", "default")
    rope.setdefault("rope_type", older)
    theta = rope.get("rope_theta", config.get("rope_theta"))
    rope["rope_theta"] = DEFAULT_THETA if theta is None else theta
    factor = rope.pop("partial_rotary_factor", config.get("partial_rotary_factor"))
    # a factor of 1 is the default, which must not make two configs differ
    if factor not in (None, 1):
        rope["partial_rotary_factor"] = factor
    if unrotated := [i for i, rotates in enumerate(config.get("no_rope_layers") or ()) if not rotates]:
        rope[UNROTATED] = unrotated
    rope |= {name: config[name] for name in SCALED_BY_POSITION if config.get(name)}
    if rope["rope_type"] in ("llama3", "yarn") and config.get("max_position_embeddings"):
        # as transformers does where a config leaves it out
        rope.setdefault("original_max_position_embeddings", config["max_position_embeddings"])
    # 10000 and 10000.0 in config.json are the same rotation
    return {name: float(value) if type(value) is int else value for name, value in sorted(rope.items())}


def model_rope(config: Mapping) -> dict | None:
    """Return :func:`rope_of` of a config, None if its layers rotate in different ways."""
    try:
        return rope_of(config)
    except ConfigError:
        return None


def check_rope(rope: object, source: str) -> None:
    """Check that rope parameters are complete and rotate by angles in proportion to the position."""
    if not isinstance(rope, Mapping) or not isinstance(rope.get("rope_type"), str):
        raise ConfigError(f"{source}: rope must be an object with a rope_type: write the file again")
    kind = rope["rope_type"]
    if kind not in STATIC:
        raise ConfigError(
            f"{source}: rotary embeddings of type {kind!r} change with the length of a text, and keys cannot be"
            f" turned: choose a model with one of {', '.join(STATIC)}"
        )
    needed = {
        "default": (),
        "proportional": (),
        "linear": ("factor",),
        "yarn": ("factor", "original_max_position_embeddings"),
    }
    llama3 = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    for name in ("rope_theta", *needed.get(kind, llama3)):
        value = rope.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise ConfigError(f"{source}: {name} of rope is {value!r}, not a number above 0: write the file again")
    part = rope.get("partial_rotary_factor", 1.0)
    if isinstance(part, bool) or not isinstance(part, int | float) or not 0 < part <= 1:
        raise ConfigError(f"{source}: partial_rotary_factor of rope is {part!r}, not above 0 and at most 1")
    layers = rope.get(UNROTATED, [])
    if not isinstance(layers, list) or any(type(layer) is not int or layer < 0 for layer in layers):
        raise ConfigError(f"{source}: {UNROTATED} of rope is {layers!r}, not a list of layers: write the file again")
    if scaled := [name for name in SCALED_BY_POSITION if rope.get(name)]:
        raise ConfigError(
            f"{source}: queries are scaled by their position ({scaled[0]}), so that slots cannot stand elsewhere: choose"
            " another model"
        )


def rope_at(rope: Mapping, layer: int) -> dict | None:
    """Return the rope parameters of one layer, None if it does not rotate.

    Args:
        rope: rope parameters of the model, see :func:`rope_of`.
        layer: index of the layer.
    """
    if layer in rope.get(UNROTATED, ()):
        return None
    return {name: value for name, value in rope.items() if name != UNROTATED}


def inverse_frequencies(rope: Mapping, head_dim: int) -> torch.Tensor:
    """Return the angles per position ``[r / 2]`` (radians, float32) of the first r channels of a head."""
    check_rope(rope, "these keys")
    width = int(head_dim * rope.get("partial_rotary_factor", 1.0))
    if rope["rope_type"] == "default":
        return 1.0 / rope["rope_theta"] ** (torch.arange(0, width, 2, dtype=torch.float32) / width)
    from transformers import PretrainedConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    # a config of one head, since the functions take sizes from it
    config = PretrainedConfig(head_dim=head_dim, hidden_size=head_dim, num_attention_heads=1)
    config.max_position_embeddings = int(rope.get("original_max_position_embeddings", 2048))
    config.rope_parameters = dict(rope)
    return ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, "cpu")[0].float()


def turned(k: torch.Tensor, shift: int | torch.Tensor, rope: Mapping | None) -> torch.Tensor:
    """Return rotated keys of one layer as they would be ``shift`` positions later (earlier if it is negative).

    The halves of the rotated channels are paired, as in Llama and Qwen. Factors on the rotation, as those of
    YaRN, are in the keys already and stay. The rotation is computed in float64.

    Args:
        k: ``[.., D]``.
        shift: number of positions, or one for each of the keys ``[T]``, if they are ``[.., T, D]``.
        rope: rope parameters of the layer(:func:`rope_at`). None returns the keys as they are.
    """
    if rope is None:
        return k
    assert UNROTATED not in rope, "these are the rope parameters of a model: take those of a layer"
    frequencies = inverse_frequencies(rope, k.shape[-1]).to(k.device).double()
    # unchanged bits, which float64 arithmetic would round
    if isinstance(shift, int) and not shift:
        return k
    angles = shift.unsqueeze(-1) * frequencies if isinstance(shift, torch.Tensor) else shift * frequencies
    half = len(frequencies)
    a, b, unrotated = k.double().split([half, half, k.shape[-1] - 2 * half], -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([a * cos - b * sin, b * cos + a * sin, unrotated], -1).to(k.dtype)


def band_norms(x: torch.Tensor, pairs: int) -> torch.Tensor:
    """Return the norms ``[.., F]`` of vectors ``[.., D]`` in each band, ``F = D - pairs``.

    The first ``2 * pairs`` channels rotate, channel i with channel ``pairs + i``. The others are bands of their own.
    """
    a, b, unrotated = x.split([pairs, pairs, x.shape[-1] - 2 * pairs], -1)
    return torch.cat([torch.hypot(a, b), unrotated.abs()], -1)
