"""Bytes of the state that a recurrent layer keeps of a request, from a model's config.

Sizes are those of vLLM's ``get_mamba_state_shape_from_config`` (``tests/engine/test_plan_engine.py`` compares them).

Bad input raises a :class:`~kvpop_vllm.config.ConfigError` that names what to change.
"""

from typing import Any

import torch

from kvpop_vllm.config import ConfigError


def state_bytes(text: Any, dtype: torch.dtype, ranks: int = 1, state_dtype: torch.dtype | None = None) -> int:
    """Return the bytes of the convolution and the recurrent state of one layer on one tensor-parallel rank.

    Args:
        text: the model's text config, with its keys as attributes.
        dtype: dtype of the model.
        ranks: number of tensor-parallel ranks.
        state_dtype: dtype of the recurrent state, None for that of the config, else of the model.
    """
    try:
        convolution, state = _elements(text, ranks)
    except AttributeError as error:
        raise ConfigError(
            f"the size of this model's recurrent states is not known ({error}): choose another model"
        ) from None
    named = getattr(text, "mamba_ssm_cache_dtype", None) or getattr(text, "mamba_ssm_dtype", None)
    state_dtype = state_dtype or (getattr(torch, named) if isinstance(named, str) else dtype)
    return convolution * dtype.itemsize + state * state_dtype.itemsize


def _elements(text: Any, ranks: int) -> tuple[int, int]:
    """Return the numbers of elements of the convolution's and the recurrent state, on one rank."""
    if hasattr(text, "linear_num_value_heads"):  # gated delta nets
        keys = text.linear_key_head_dim * text.linear_num_key_heads
        # queries and keys, and values, pass the convolution
        channels = 2 * keys + text.linear_value_head_dim * text.linear_num_value_heads
        state = text.linear_num_value_heads // ranks * text.linear_value_head_dim * text.linear_key_head_dim
        # a convolution keeps all of its inputs but the newest
        return channels // ranks * (text.linear_conv_kernel_dim - 1), state
    if hasattr(text, "ssm_state_size"):  # Mamba2 of Nemotron-H
        heads, size, width, groups = text.mamba_num_heads, text.mamba_head_dim, text.ssm_state_size, text.n_groups
        kernel, inner = text.conv_kernel, heads * size
    else:  # Mamba2 of Granite 4, Falcon-H1 and Bamba
        heads, size, width, groups = text.mamba_n_heads, text.mamba_d_head, text.mamba_d_state, text.mamba_n_groups
        kernel, inner = text.mamba_d_conv, getattr(text, "mamba_d_ssm", None) or text.mamba_expand * text.hidden_size
    groups += 0 if groups % ranks == 0 else ranks - groups  # groups are replicated for the heads of each rank
    return (inner + 2 * groups * width) // ranks * (kernel - 1), heads // ranks * size * width
