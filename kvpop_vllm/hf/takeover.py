"""How a transformers model's attention is handed to a cache, for as long as a forward pass with that cache takes.

The decoder's ``forward`` of a model that has had a :class:`~kvpop_vllm.hf.cache.KVpopCache` looks for one in ``past_key_values``, has it
lay out the step, exchanges the attention function, by name, for the one of :mod:`kvpop_vllm.distill.hook`, which calls the step, and puts
the model's own back however the pass ends. Passes without such a cache are as they were.
"""

from __future__ import annotations

import copy
import inspect
import threading
import weakref

import torch

from kvpop_vllm.config import ARCHITECTURES, FULL_CHECKPOINT_SUFFIX, ConfigError
from kvpop_vllm.distill.hook import NAME, borrow_channel, borrowed_share, show_hidden_states


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
    if not isinstance(decoder.forward, _Forward):
        decoder.forward = _Forward(decoder)
    for layer in decoder.layers:
        if _hand_step not in layer.self_attn._forward_pre_hooks.values():
            layer.self_attn.register_forward_pre_hook(_hand_step, prepend=True, with_kwargs=True)
    if borrows:
        borrow_channel(model, borrowed_share(model))
    return decoder


_thread = threading.local()
"""What attends in the pass that this thread is in: ``step``."""


def _hand_step(block, positional, named):
    """Not by way of the decoder, since not all layers hand on to their attention what they do not know."""
    step = getattr(_thread, "step", None)
    return None if step is None else (positional, named | {"attend": step})


class _Forward:
    """A decoder's ``forward`` that may be given a cache. Hooks would not do: those behind a pass are left out when it is interrupted
    from the keyboard. The decoder is held weakly, or a model would stay in memory after its last use until Python collects cycles."""

    def __init__(self, decoder: torch.nn.Module, own=None):
        self._decoder = weakref.ref(decoder)
        self._own = own or vars(decoder).get("forward")  # set there by accelerate, if it spreads the model
        self._taken = threading.Lock()
        self.__signature__ = inspect.signature(decoder.forward)

    def __call__(self, *positional, **named):
        decoder, cache = self._decoder(), named.get("past_key_values")
        own = self._own or type(decoder).forward.__get__(decoder)
        inside = (
            getattr(_thread, "step", None) is not None
        )  # accelerate came between two of these: the outer one has begun
        if inside or not isinstance(cache, Takes):
            if not inside and decoder.config._attn_implementation == NAME and self._taken.locked():
                raise RuntimeError(BUSY)
            return own(*positional, **named)
        if not self._taken.acquire(blocking=False):
            raise RuntimeError(BUSY)
        try:
            return self._with_cache(cache, own, decoder, positional, named)
        finally:
            self._taken.release()

    def _with_cache(self, cache, own, decoder, positional, named):
        blocks = [layer.self_attn for layer in decoder.layers]
        shares = [getattr(block, "borrowed", 0.0) for block in blocks]
        before, failed = decoder.config._attn_implementation, True
        step = cache.begin(decoder, *_inputs(decoder, positional, named))
        named = named | {"attention_mask": None, "position_ids": step.positions}
        try:
            decoder.config._attn_implementation, _thread.step = NAME, step
            for block in blocks if cache.borrows else ():
                block.borrowed = 1.0
            result = own(*positional, **named)
            failed = False
        finally:
            _thread.step = None
            if decoder.config._attn_implementation == NAME:  # else it has been set since
                decoder.config._attn_implementation = before
            for block, share in zip(blocks, shares, strict=True):
                if hasattr(block, "borrowed"):
                    block.borrowed = share
            cache.end(failed)
        return result

    def __deepcopy__(self, memo):
        """Of a model that is copied: the copy's."""
        return _Forward(memo[id(self._decoder())], copy.deepcopy(self._own, memo))

    def __reduce__(self):
        """Of a model that is pickled: its own."""
        return getattr, (self._decoder(), "forward")


BUSY = "another thread has the model in a pass with a KVpopCache: one thread at a time, or a copy of the model for each"


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
