"""Hand a transformers model's attention to a cache for the duration of a forward pass.

A hook before the decoder looks for a :class:`~kvpop_vllm.hf.cache.KVpopCache` in ``past_key_values`` and has
it prepare the step. The hook replaces the attention function, by name, by that of
:mod:`kvpop_vllm.distill.hook`, which calls the step. A hook behind the decoder restores the model's own
attention. Torch skips that hook after a KeyboardInterrupt in the pass. The attention is then restored by the
model's next pass or by the cache's ``reset()``; that of a copy by the copy's. Passes without such a cache are
unchanged.
"""

from __future__ import annotations

import sys
import threading

import torch

from kvpop_vllm.config import ARCHITECTURES, FULL_CHECKPOINT_SUFFIX, ConfigError
from kvpop_vllm.distill.hook import NAME, borrow_channel, borrowed_share, show_hidden_states

BUSY = "another thread has the model in a pass with a KVpopCache: one thread at a time, or a copy of the model for each"
"""Error message for a model that is used by another thread."""


class AttentionCache:
    """Interface of a cache that takes over attention; the hooks recognise caches by this class.

    Attributes:
        borrows: True if a query channel is removed from the queries in passes with this cache.
    """

    borrows: bool

    def begin(self, decoder: torch.nn.Module, inputs: torch.Tensor, mask: torch.Tensor | None, positions):
        """Prepare one pass.

        Args:
            decoder: decoder of the model.
            inputs: ``[R, L, ..]``, token ids or embeddings.
            mask: attention mask as given by the caller, or None.
            positions: ``[R or 1, L]`` as given by the caller, or None.

        Returns:
            The step, an :class:`kvpop_vllm.distill.hook.Attend` with ``positions [R, L]`` int64 of its
            tokens.
        """
        raise NotImplementedError(f"{type(self).__name__} has no begin()")

    def end(self, failed: bool) -> None:
        """Finish the pass; ``failed`` is True if it raised."""
        raise NotImplementedError(f"{type(self).__name__} has no end()")


def register_hooks(model: torch.nn.Module, borrows: bool) -> torch.nn.Module:
    """Register the hooks of a model; may be called again.

    Args:
        model: a model that :func:`kvpop_vllm.hf.checks.check_model` accepts.
        borrows: True if a query channel is read and removed from the queries
            (:class:`kvpop_vllm.scorers.dms.DMSGate`).

    Returns:
        Its decoder.

    Raises:
        ConfigError: the channel cannot be borrowed from this type of model.
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


NOTE = "_kvpop_pass"
"""Attribute of a decoder during a pass; it is copied with the decoder.

It holds the thread, the attention before the pass, and the share of the channel that was borrowed from each
layer before it.
"""
_turn = threading.Lock()
"""Lock that is held while notes are read and changed."""


def _before(decoder, positional, named):
    if isinstance(named.get("past_key_values"), AttentionCache):
        return positional, named | _begin(decoder, positional, named)
    if getattr(decoder, NOTE, None) is not None:
        restore_attention(decoder)
    return None


def _after(decoder, positional, named, result):
    cache, step = named.get("past_key_values"), named.get("attend")
    if isinstance(cache, AttentionCache) and step is not None:  # otherwise the pass has not begun
        _end(decoder, cache, failed=result is None)


@torch.compiler.disable  # nothing to compile here
def _begin(decoder, positional, named):
    """Return the arguments that replace the caller's in a pass with a cache."""
    cache, inputs = named["past_key_values"], _inputs(decoder, positional, named)
    blocks = [layer.self_attn for layer in decoder.layers]
    with _turn:
        _put_back_interrupted(decoder)
        shares = [getattr(block, "borrowed", 0.0) for block in blocks]
        setattr(decoder, NOTE, (threading.get_ident(), decoder.config._attn_implementation, shares))
    try:
        step = cache.begin(decoder, *inputs)
    except BaseException:
        with _turn:
            _put_back(decoder)
        raise
    decoder.config._attn_implementation = NAME
    for block in blocks if cache.borrows else ():
        block.borrowed = 1.0
    return {"attend": step, "attention_mask": None, "position_ids": step.positions}


@torch.compiler.disable
def _end(decoder, cache, failed):
    with _turn:
        _put_back(decoder)
    cache.end(failed)


@torch.compiler.disable
def restore_attention(decoder: torch.nn.Module) -> None:
    """Restore a decoder's own attention after a pass that was interrupted from the keyboard.

    Raises:
        RuntimeError: the decoder is in a pass of another thread.
    """
    with _turn:
        _put_back_interrupted(decoder)


def _put_back_interrupted(decoder):
    """Restore the attention as :func:`restore_attention` does, with the lock held.

    A pass of the current thread cannot be running any more.
    """
    if (note := getattr(decoder, NOTE, None)) is None:
        return
    if note[0] != threading.get_ident() and _runs(note[0], decoder):
        raise RuntimeError(BUSY)
    _put_back(decoder)


def _runs(thread: int, decoder: torch.nn.Module) -> bool:
    """Return whether a thread is inside a call of the decoder."""
    frame = sys._current_frames().get(thread)
    while frame is not None:
        if frame.f_locals.get("self") is decoder:
            return True
        frame = frame.f_back
    return False


def _put_back(decoder):
    if (note := getattr(decoder, NOTE, None)) is None:
        return
    _, before, shares = note
    if decoder.config._attn_implementation == NAME:  # otherwise it was changed in the meantime
        decoder.config._attn_implementation = before
    for layer, share in zip(decoder.layers, shares, strict=True):
        if hasattr(layer.self_attn, "borrowed"):
            layer.self_attn.borrowed = share
    delattr(decoder, NOTE)


def _inputs(decoder, positional, named):
    """Return inputs, mask and positions of a pass.

    Raises:
        TypeError: more than one positional argument.
        ValueError: no inputs.
        ConfigError: attention weights are requested.
    """
    if len(positional) > 1:
        raise TypeError("with a KVpopCache, all inputs of the model but the first are given by name")
    if named.get("output_attentions", getattr(decoder.config, "output_attentions", False)):
        raise ConfigError("attention weights of a fixed-size cache are not kept: leave output_attentions out")
    inputs = positional[0] if positional else named.get("input_ids")
    inputs = named.get("inputs_embeds") if inputs is None else inputs
    if inputs is None:
        raise ValueError("the model needs input_ids or inputs_embeds")
    return inputs, named.get("attention_mask"), named.get("position_ids")
