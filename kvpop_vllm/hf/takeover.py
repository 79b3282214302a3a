"""How a transformers model's attention is handed to a cache, for as long as a forward pass with that cache takes.

A hook before the decoder looks for a :class:`~kvpop_vllm.hf.cache.KVpopCache` in ``past_key_values``, has it lay out the step and
exchanges the attention function, by name, for the one of :mod:`kvpop_vllm.distill.hook`, which calls the step; a hook
behind the decoder puts the model's own back. Torch leaves that one out when a pass is interrupted from the keyboard: then the model's next
pass puts it back, or that of a copy the copy's, or the cache's ``reset()``. Passes without such a cache are as they were.
"""

from __future__ import annotations

import sys
import threading

import torch

from kvpop_vllm.config import ARCHITECTURES, FULL_CHECKPOINT_SUFFIX, ConfigError
from kvpop_vllm.distill.hook import NAME, borrow_channel, borrowed_share, show_hidden_states

BUSY = "another thread has the model in a pass with a KVpopCache: one thread at a time, or a copy of the model for each"


class Takes:
    """What a pass asks of a cache; it is known by this class.

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
        model: as :func:`kvpop_vllm.hf.checks.check_model` has it.
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


NOTE = "_kvpop_pass"
"""Attribute of a decoder in a pass, copied with it: the thread, the attention that it had before, what each layer gave up of its channel."""
_turn = threading.Lock()
"""Held while notes are looked at and changed."""


def _before(decoder, positional, named):
    if isinstance(named.get("past_key_values"), Takes):
        return positional, named | _begin(decoder, positional, named)
    if getattr(decoder, NOTE, None) is not None:
        put_back(decoder)
    return None


def _after(decoder, positional, named, result):
    cache, step = named.get("past_key_values"), named.get("attend")
    if isinstance(cache, Takes) and step is not None:  # else the pass has not begun
        _end(decoder, cache, failed=result is None)


@torch.compiler.disable  # nothing here is worth a graph
def _begin(decoder, positional, named):
    """What the decoder is given in a pass with a cache beside, or in place of, what the caller gives it."""
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
def put_back(decoder: torch.nn.Module) -> None:
    """A decoder's own attention, after a pass that was interrupted from the keyboard.

    Raises:
        RuntimeError: it is in a pass of another thread.
    """
    with _turn:
        _put_back_interrupted(decoder)


def _put_back_interrupted(decoder):
    """As :func:`put_back`; a pass of this thread is not running any more."""
    if (note := getattr(decoder, NOTE, None)) is None:
        return
    if note[0] != threading.get_ident() and _runs(note[0], decoder):
        raise RuntimeError(BUSY)
    _put_back(decoder)


def _runs(thread: int, decoder: torch.nn.Module) -> bool:
    """Whether a thread is in a call of the decoder."""
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
    if decoder.config._attn_implementation == NAME:  # else it has been set since
        decoder.config._attn_implementation = before
    for layer, share in zip(decoder.layers, shares, strict=True):
        if hasattr(layer.self_attn, "borrowed"):
            layer.self_attn.borrowed = share
    delattr(decoder, NOTE)


def _inputs(decoder, positional, named):
    """What a pass brings: inputs, mask and positions.

    Raises:
        TypeError, ValueError, ConfigError: there are none, or they are not where they are looked for, or more is asked for.
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
