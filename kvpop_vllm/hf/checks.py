"""Checks of models and inputs. Each error is one line that says what to change.

Bad input raises a :class:`~kvpop_vllm.config.ConfigError` that names what to change.
"""

import functools
import warnings
from typing import NoReturn

import torch
from transformers import PreTrainedModel

from kvpop_vllm.config import ConfigError
from kvpop_vllm.hf.devices import no_kernels
from kvpop_vllm.kernels import dispatch
from kvpop_vllm.model_hook import attention_blocks, decoder_of
from kvpop_vllm.model_shape import positions_of, rotations
from kvpop_vllm.policies import Policy
from kvpop_vllm.supported import LOCAL_LAYERS, POLICY_LAYERS, layer_kinds, recurrence, sliding_window, unserved

WRAPPERS = {
    "get_base_model": "get_base_model()",  # peft
    "_orig_mod": "_orig_mod",  # torch.compile
    "module": "module",  # DataParallel and its kin
}
"""Attributes of wrappers around a model, and how one gets the model from them."""


def check_model(model: torch.nn.Module, max_length: int | None = None) -> None:
    """Check that a fixed-size cache can replace the model's own for sequences of at most ``max_length`` tokens.

    By default that is the model's positions.
    """
    if not isinstance(model, PreTrainedModel):
        inner = [f"the model in it, model.{way}" for name, way in WRAPPERS.items() if hasattr(model, name)]
        remedy = next(iter(inner), "one of those")
        raise ConfigError(f"{type(model).__name__} is not a causal language model of transformers: give {remedy}")
    text = model.config.get_text_config()
    decoder = decoder_of(model) if hasattr(model, "get_decoder") else None
    blocks = attention_blocks(decoder)
    features = {
        "encoder-decoder": model.config.is_encoder_decoder,
        "MLA": any(hasattr(block, "kv_lora_rank") for block in blocks),
        **({} if recurrence(text) is None else {"recurrent": False}),
    }
    length, limit = positions_of(model.config) if max_length is None else max_length, long_rotation(model)
    tokens = length if isinstance(length, int) else positions_of(model.config)
    reasons = unserved(text, features, tokens)
    if not model._can_set_attn_implementation():
        reasons.append("attention that transformers cannot exchange")
    # last, because it says least about what the model has
    if not reasons and not _attends(decoder, blocks, text):
        reasons = ["no layers that have a self_attn of the decoder's config"]
    if reasons:
        refuse_model(model, reasons)
    if limit is not None and isinstance(length, int) and length > limit:
        raise ConfigError(
            f"{text.model_type} rotates keys differently in texts of more than {limit} tokens (LongRoPE), and cached keys stay"
            f" as they are: set max_length to at most {limit}"
        )


def _attends(decoder: torch.nn.Module, blocks: list[torch.nn.Module], text) -> bool:
    """Return whether as many layers of a decoder have an attention block of its config as the text config says."""
    kinds = layer_kinds(text, len(decoder.layers)) if blocks else ()
    attending = [kind for kind in kinds if kind in POLICY_LAYERS | LOCAL_LAYERS]
    shared = all(getattr(block, "config", None) is decoder.config for block in blocks)
    return len(blocks) > 0 and len(attending) == len(blocks) and shared


def refuse_model(model: torch.nn.Module, reasons: list[str]) -> NoReturn:
    """Raise the error for a model that a fixed-size cache cannot serve."""
    kind = model.config.get_text_config().model_type
    raise ConfigError(
        f"a fixed-size cache cannot serve {kind}, a model with {', '.join(reasons)}: choose another model"
    )


def long_rotation(model: torch.nn.Module) -> int | None:
    """Return the tokens of a text beyond which a model with LongRoPE rotates by other factors, or None."""
    text = model.config.get_text_config()
    kinds = list(rotations(text))
    if all(parameters.get("rope_type") != "longrope" for parameters in kinds):
        return None
    tokens = [fields.get("original_max_position_embeddings") for fields in (*kinds, vars(text))]
    return min(filter(None, tokens), default=text.max_position_embeddings)


def changes_attention_at(model: torch.nn.Module, policy: Policy) -> int | None:
    """Return the tokens of a text beyond which a model attends differently than its cache does, or None."""
    window = None if policy.model.kinds else sliding_window(model.config.get_text_config())
    return min(filter(None, (window, long_rotation(model))), default=None)


def warn_of_positions(lengths: list[int], new_lengths: list[int], positions: int | None) -> None:
    """Warn if a pass takes rows of given lengths to new lengths that are more than the positions of the model."""
    if positions is not None and max(lengths) <= positions < max(new_lengths):
        warnings.warn(
            f"a text of {max(new_lengths)} tokens goes beyond the model's {positions} positions, where it was not trained: shorten the"
            " prompt or lower max_new_tokens, or set max_length if this is meant",
            stacklevel=2,
        )


def check_inputs(decoder: torch.nn.Module, inputs: torch.Tensor) -> None:
    """Check the inputs ``[R, L, ..]`` of a pass.

    Raises:
        RuntimeError: gradients are required.
        ValueError: there are no new tokens.
    """
    if torch.is_grad_enabled() and (inputs.requires_grad or any(p.requires_grad for p in decoder.parameters())):
        raise RuntimeError("no gradients go through a KVpopCache: call the model under torch.no_grad()")
    if inputs.device.type not in ("cpu", "cuda", "meta"):
        raise ConfigError(no_kernels(inputs.device))
    if not inputs.shape[1]:
        raise ValueError(
            "no new tokens: a KVpopCache goes on with the whole text so far, give generate() all of it, or reset() the cache first"
        )


def columns_of_tokens(
    mask: torch.Tensor | None, lengths: list[int], columns: int, length: int, look: bool
) -> list[int]:
    """Return the number of tokens of each row in a pass. The row's other columns are pads on the left.

    Args:
        mask: ``[R, columns + length]``, or None if all columns are tokens.
        lengths: tokens of each row in the earlier columns.
        columns: number of earlier columns.
        length: number of columns of the pass.
        look: True to read the mask. Otherwise each row has one token.

    Raises:
        ValueError: the mask has the wrong type or shape, contradicts ``lengths``, or has pads after tokens.
    """
    if mask is None:
        return [length] * len(lengths)
    shape = tuple(mask.shape) if isinstance(mask, torch.Tensor) else f"a {type(mask).__name__}"
    if shape != (expected := (len(lengths), columns + length)):
        raise ValueError(
            f"attention_mask is {shape} and must be a tensor of shape {expected}: a column for each token so far, pads too; for another"
            " text, reset() the KVpopCache first"
        )
    # decoding on an accelerator, where the mask is not read
    if not look:
        return [1] * len(lengths)
    real = mask.bool().cpu()
    # a zero after a one
    if bool((real[:, :-1] & ~real[:, 1:]).any()):
        raise ValueError(
            "attention_mask has zeros after a row's first token: pad on the left (padding_side='left'), and continue rows "
            "that ended early in caches of their own"
        )
    if (in_mask := real[:, :columns].sum(1).tolist()) != lengths:
        raise ValueError(
            f"attention_mask says that rows had {in_mask} tokens, and the KVpopCache has seen {lengths}: continue rows whose turns differ"
            " in length in caches of their own, or reset() this one for another text"
        )
    return real[:, columns:].sum(1).tolist()


def has_recurrent_bias(config) -> bool:
    """Return whether the inputs of recurrent layers have a bias, by the model's text config."""
    return bool(getattr(config, "mamba_proj_bias", False) or getattr(config, "use_bias", False))


def check_pads(counts: list[int], length: int, biased: bool) -> None:
    """Check that pads leave the recurrent states of a model alone, which transformers masks as inputs of their layers.

    Args:
        counts: number of tokens of each row in a pass.
        length: number of columns of the pass.
        biased: True if the inputs have a bias (:func:`has_recurrent_bias`).

    Raises:
        ValueError: they do not: a pass of one column is not masked, and a projection with a bias gives pads a value.
    """
    if min(counts) == length:
        return
    if length == 1:
        raise ValueError(
            "a pass of one column has a pad, which would enter the recurrent states: give more columns in the pass, or"
            " rows of equal length"
        )
    if biased:
        raise ValueError(
            "pads enter the recurrent states of this model, whose inputs have a bias: give rows of equal length"
        )


def check_positions(positions: torch.Tensor, expected: torch.Tensor, counts: list[int]) -> None:
    """Check that the caller's positions of tokens equal the cache's own, ``expected [R, L]``.

    Raises:
        ValueError: the shape differs, or the position of a token.
    """
    if positions.dim() != 2 or positions.shape[1] != expected.shape[1] or positions.shape[0] not in (1, len(expected)):
        raise ValueError(
            f"position_ids of shape {tuple(positions.shape)} for {tuple(expected.shape)} tokens: leave position_ids out"
        )
    length = expected.shape[1]
    real = torch.arange(length) >= length - torch.tensor(counts).unsqueeze(1)
    if bool(((positions != expected).cpu() & real).any()):
        raise ValueError(
            "the new tokens' positions do not follow those that the KVpopCache has seen: give generate() the whole text so far"
            " with its attention_mask (and use_cache on), rows whose turns differ in length in caches of their own, or reset() the cache first"
        )


def check_text(text: torch.Tensor, earlier: torch.Tensor, mask: torch.Tensor | None, columns: int) -> None:
    """Check that a text begins with the tokens that a cache has seen, where these are known.

    Args:
        text: ``[R, L]`` ids of the text.
        earlier: ``[R, L]`` ids of the text that the cache has seen.
        mask: ``[R, L]``, or None if all columns are tokens.
        columns: number of columns after which the text goes on.

    Raises:
        ValueError: it does not.
    """
    columns = min(columns, text.shape[1], earlier.shape[1])
    differs = text[:, :columns] != earlier[:, :columns].to(text.device)
    if mask is not None:
        differs = differs & mask[:, :columns].to(text.device).bool()
    if bool(differs.any()):
        raise ValueError(
            f"the text does not begin with the {columns} tokens that the KVpopCache has seen: give generate() the whole text so far,"
            " or reset() the cache for another text"
        )


def warn_of_reference(k: torch.Tensor) -> None:
    """Warn once if keys ``k [.., D]`` on a CPU have the slow reference kernels only."""
    if k.device.type == "cpu" and "reference" in {dispatch.select(op, k) for op in ("prefill_chunk", "decode_step")}:
        _warn_of_reference(k.dtype, k.shape[-1])


@functools.cache
def _warn_of_reference(dtype: torch.dtype, size: int) -> None:
    warnings.warn(
        f"a KVpopCache runs with the slow reference kernels: kvpop_vllm._C is not built, or has none for keys of {dtype} and size {size};"
        " it takes float32 and bfloat16, and sizes that 16 divides: change the model's dtype",
        stacklevel=2,
    )
