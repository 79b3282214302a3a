"""How a transformers model's attention is handed to a cache, for as long as a forward pass with that cache takes.

A hook before the decoder looks for a :class:`~kvpop_vllm.hf.cache.KVpopCache` in ``past_key_values``, has it lay out the step and
exchanges the attention function, by name, for the one of :mod:`kvpop_vllm.distill.hook`, which calls the step; a hook
behind the decoder puts the model's own back. Passes without such a cache are as they were.
"""

from __future__ import annotations

import weakref

import torch
from transformers import PreTrainedModel

from kvpop_vllm.config import ARCHITECTURES, FULL_CHECKPOINT_SUFFIX, ConfigError
from kvpop_vllm.distill.hook import NAME, borrow_channel, borrowed_share, show_hidden_states


class Takes:
    """What the hooks ask of a cache; they know it by this class.

    Attributes:
        borrows: a channel of the queries is no part of them in its passes.
    """

    borrows: bool

    def begin(self, decoder: torch.nn.Module, inputs: torch.Tensor, mask: torch.Tensor | None, positions):
        """Lays out one pass: inputs ``[R, L, ..]``, mask as the caller gave it, positions ``[R or 1, L]`` if he did.

        Returns:
            The step, an :class:`kvpop_vllm.distill.hook.Attend` with ``positions [R, L]`` int64 of its tokens.
        """
        raise NotImplementedError(f"{type(self).__name__} has no begin()")

    def end(self, failed: bool) -> None:
        """After the pass."""
        raise NotImplementedError(f"{type(self).__name__} has no end()")


def take_over(model: torch.nn.Module, borrows: bool) -> torch.nn.Module:
    """Makes a model ready for caches; may be called again.

    Args:
        model: as :func:`check_model` has it.
        borrows: a channel of the queries is read, and is no part of them (:class:`kvpop_vllm.scorers.gates.DMSGate`).

    Returns:
        Its decoder.

    Raises:
        ConfigError: it is not known how the channel is borrowed.
    """
    show_hidden_states(model)
    decoder = model.get_decoder()
    if borrows and decoder.config.model_type.removesuffix(FULL_CHECKPOINT_SUFFIX) not in ARCHITECTURES:
        raise ConfigError(
            f"the gate borrows a channel of the queries, which is known where it is in {' and '.join(ARCHITECTURES)} models only: choose another scorer"
        )
    if _before not in decoder._forward_pre_hooks.values():
        decoder.register_forward_pre_hook(_before, with_kwargs=True)
        decoder.register_forward_hook(_after, with_kwargs=True, always_call=True)
    if borrows:
        borrow_channel(model, borrowed_share(model))
    return decoder


def check_model(model: torch.nn.Module) -> None:
    """A fixed-size cache can stand in for the model's own.

    Raises:
        ConfigError: it cannot, with the first reasons.
    """
    if not isinstance(model, PreTrainedModel):
        raise ConfigError(f"{type(model).__name__} is no causal language model of transformers: give one of those")
    text = model.config.get_text_config()
    kinds = set(getattr(text, "layer_types", None) or ["full_attention"])
    window = getattr(text, "sliding_window", None) is not None and getattr(text, "use_sliding_window", True)
    reasons = {
        "an encoder": model.config.is_encoder_decoder,
        "attention that transformers cannot exchange": not model._can_set_attn_implementation(),
        "layers other than full attention": kinds != {"full_attention"} or window,
        "chunked attention": getattr(text, "attention_chunk_size", None),
        "attention in both directions": not getattr(text, "is_causal", True),
        "cross-layer KV sharing": getattr(text, "num_kv_shared_layers", 0),
        "logit soft-capping in attention": getattr(text, "attn_logit_softcapping", None),
        "attention sinks of its own": text.model_type == "gpt_oss",
    }
    if found := [what for what, there in reasons.items() if there]:
        raise ConfigError(f"a fixed-size cache cannot serve a model with {', '.join(found)}: choose another model")
    decoder = getattr(model, "get_decoder", lambda: None)()
    blocks = [getattr(layer, "self_attn", None) for layer in getattr(decoder, "layers", ())]
    if not blocks or any(getattr(block, "config", None) is not decoder.config for block in blocks):
        raise ConfigError("the model has no layers with a self_attn of the decoder's config: choose another model")


_own: weakref.WeakKeyDictionary[torch.nn.Module, tuple[str, list[float]]] = weakref.WeakKeyDictionary()
"""Decoder in a pass -> the attention that it had before, and what each layer gave up of its channel."""


def _before(decoder, positional, named):
    _restore(decoder)  # hooks behind a pass are left out when it is interrupted from the keyboard
    cache = named.get("past_key_values")
    if not isinstance(cache, Takes):
        return None
    if len(positional) > 1:
        raise TypeError("with a KVpopCache, all inputs of the model but the first are given by name")
    if named.get("output_attentions", getattr(decoder.config, "output_attentions", False)):
        raise ConfigError("attention weights of a fixed-size cache are not kept: leave output_attentions out")
    inputs = positional[0] if positional else named.get("input_ids")
    inputs = named.get("inputs_embeds") if inputs is None else inputs
    if inputs is None:
        raise ValueError("the model needs input_ids or inputs_embeds")
    step = cache.begin(decoder, inputs, named.get("attention_mask"), named.get("position_ids"))
    more = {"attend": step, "attention_mask": None, "position_ids": step.positions}
    blocks = [layer.self_attn for layer in decoder.layers]
    _own[decoder] = decoder.config._attn_implementation, [getattr(block, "borrowed", 0.0) for block in blocks]
    decoder.config._attn_implementation = NAME
    for block in blocks if cache.borrows else ():
        block.borrowed = 1.0
    return positional, named | more


def _after(decoder, positional, named, result):
    cache, step = named.get("past_key_values"), named.get("attend")
    if isinstance(cache, Takes) and step is not None:  # else the pass has not begun
        _restore(decoder)
        cache.end(failed=result is None)


def _restore(decoder):
    if decoder not in _own:
        return
    before, shares = _own.pop(decoder)
    if decoder.config._attn_implementation == NAME:  # else it has been set since
        decoder.config._attn_implementation = before
    for layer, share in zip(decoder.layers, shares, strict=True):
        if hasattr(layer.self_attn, "borrowed"):
            layer.self_attn.borrowed = share
