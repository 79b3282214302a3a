"""The way into transformers' models: a registered attention function that hands every layer's q, k, v to the caller.

No modelling code is forked: Llama, Qwen2, Qwen3 and whatever else uses transformers' attention interface work as they are.
What attends is passed with the call, ``model(tokens, attend=...)``, so that nothing is attached to the model.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import torch
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM
from transformers.masking_utils import AttentionMaskInterface

from kvpop_vllm.config import ConfigError

NAME = "kvpop"
POSITIONS = 512
"""Positions whose logits over the whole vocabulary are in memory at once."""
RESCALED = (
    "final_logit_softcapping", "lm_head_multiplier", "logit_scale", "logits_scaling", "logits_soft_cap",
    "output_multiplier",
)  # fmt: skip
"""Settings of models that change logits behind the output layer, where nothing here looks."""
SCALED_BY_POSITION = "llama_4_scaling_beta", "attn_temperature_tuning"
"""Settings of models that scale queries by their position."""


class Attend(Protocol):
    """What a model's layers call in place of attention."""

    def __call__(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
    ) -> torch.Tensor:  # fmt: skip
        """``q [B, Hq, S, D]``, ``k, v [B, H, S, D]`` after QK-norm and RoPE -> ``out [B, Hq, S, D]``."""


def _attention(module, query, key, value, attention_mask, scaling=None, dropout=0.0, attend=None, **options):
    if attend is None:
        raise TypeError(f"a model loaded with attn_implementation={NAME!r} is called as model(tokens, attend=...)")
    window = options.get("sliding_window")
    if window is not None and window < query.shape[2]:
        raise ConfigError("the model has sliding-window layers of its own: kvpop cannot train scorers for it")
    for name in ("softcap", "s_aux"):
        if options.get(name) is not None:
            raise ConfigError(f"the model's attention has a {name} of its own: kvpop cannot train scorers for it")
    if dropout:
        raise ConfigError("attention dropout cannot be combined with retention: set attention_dropout to 0")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    query, key = query.to(value.dtype), key.to(value.dtype)  # autocast leaves them in float32 after RoPE
    return attend(module.layer_idx, query, key, value, scale).transpose(1, 2), None


def _no_mask(*args, attention_mask=None, **options):
    """Attention is causal over whole rows; a padding mask would be ignored, so it is refused."""
    if attention_mask is not None and not bool(attention_mask.all()):
        raise ConfigError("rows are packed to full length: padding cannot be masked out, leave attention_mask out")
    return None


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, _no_mask)


class Dense:
    """Causal attention over everything: the teacher."""

    def __call__(self, layer, q, k, v, scale):
        """See :class:`Attend`."""
        return torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        )


def load_model(folder: str | Path, dtype: torch.dtype = torch.bfloat16) -> torch.nn.Module:
    """A causal language model from a local folder, whose forward takes ``attend``.

    Raises:
        ConfigError: not a model folder, or a model whose attention cannot be handed over, or which rescales its logits.
    """
    if not (Path(folder) / "config.json").is_file():
        raise ConfigError(f"{folder} has no config.json: give the folder of a Hugging Face model")
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        _refuse_rescaled_logits(config.get_text_config(), folder)
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, attn_implementation=NAME, local_files_only=True
        )
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder} cannot be loaded: {str(error).splitlines()[0]}") from None
    if getattr(config, "is_encoder_decoder", False) or getattr(config, "num_attention_heads", None) is None:
        raise ConfigError(f"{folder} is not a decoder-only language model with attention layers: choose another model")
    model.config.use_cache = False
    return model


def check_positions(model: torch.nn.Module, positions: int) -> None:
    """The model attends by differences of positions only, so that a text may begin anywhere before ``positions``.

    Raises:
        ConfigError: no rotary embeddings, a rotation or attention that changes with the position, or too many positions.
    """
    config = model.config.get_text_config()
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = [rope] if "rope_type" in rope else [own for own in rope.values() if isinstance(own, dict)]
    moves = [own["rope_type"] for own in kinds if "dynamic" in own["rope_type"] or own["rope_type"] == "longrope"]
    moves += [name for name in SCALED_BY_POSITION if rope.get(name) or getattr(config, name, None)]
    if moves or not kinds:
        found = f"attends differently further out ({moves[0]})" if moves else "has no rotary embeddings"
        raise ConfigError(f"the model {found}, so its rows must begin at 0: set --positions to the value of --length")
    if positions > config.max_position_embeddings:
        raise ConfigError(f"the model has {config.max_position_embeddings} positions: lower --positions {positions}")


def _refuse_rescaled_logits(config, folder: str | Path) -> None:
    for name in RESCALED:
        if getattr(config, name, None) not in (None, 1.0):
            raise ConfigError(f"{folder} rescales its logits ({name}), which kvpop does not do: choose another model")
