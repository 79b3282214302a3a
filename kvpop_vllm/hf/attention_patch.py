"""Hand a transformers model's attention to a cache for the duration of a forward pass.

A hook before the decoder looks for a :class:`~kvpop_vllm.hf.cache.KVpopCache` in ``cache`` or
``past_key_values`` and has it prepare the step. The hook replaces the attention function, by name, by that of
:mod:`kvpop_vllm.model_hook`, which calls the step. A hook after the decoder restores the model's own
attention. Torch skips that hook after a KeyboardInterrupt in the pass. The attention is then restored by the
model's next pass or by the cache's ``reset()``. A copy restores its own in the same way. Passes without such a
cache are unchanged.

``generate()`` takes the cache under both names too, and checks after each token that the cache has taken part.
A method of the class is wrapped for this, because one of the model would keep the model in memory.

A pass is known by its step. Only the arguments of a running pass refer to it, so a weak reference says whether
another thread is still in the pass.

Bad input raises a :class:`~kvpop_vllm.config.ConfigError` that names what to change.
"""

import functools
import inspect
import threading
import weakref
from collections.abc import Hashable, Mapping

import torch
from transformers import DynamicCache, GenerationMixin, StoppingCriteria, StoppingCriteriaList

from kvpop_vllm.cache.step import StepPlan
from kvpop_vllm.config import ConfigError
from kvpop_vllm.hf.checks import refuse_model
from kvpop_vllm.hf.local_layers import parts_of_pass
from kvpop_vllm.local_attention import Part
from kvpop_vllm.model_hook import (
    CACHE_NAME,
    NAME,
    GateInputs,
    attention_blocks,
    borrow_channel,
    borrowed_share,
    decoder_of,
    full_blocks,
    show_hidden_states,
)
from kvpop_vllm.supported import FULL, RECURRENT

CACHE_NAMES = "cache", "past_key_values"
"""Arguments in which a cache is looked for. Transformers 5.24 renamed the second to the first."""
BUSY = "another thread has the model in a pass with a KVpopCache: one thread at a time, or a copy of the model for each"
"""Error message for a model that is used by another thread."""


class AttentionCache:
    """Base class of a cache that takes over attention. The hooks recognise caches by this class.

    Attributes:
        borrows: True if a query channel is removed from the queries in passes with this cache.
        recurrent: True if layers of the model have a recurrent state.
        passes: number of passes so far.
        columns: columns seen so far, pads included.
        text: ``[R, L]`` ids of the first columns, and of tokens that were not read yet, or None without ``generate()``.
        next_text: ``[R, L]`` ids of the text that a call of ``generate()`` goes on with, until its first pass.
        text_columns: number of columns of that text until the call ends, else 0.
    """

    borrows: bool
    recurrent: bool
    passes: int
    columns: int
    text: torch.Tensor | None
    next_text: torch.Tensor | None
    text_columns: int


def cache_in(named: Mapping[str, object]) -> AttentionCache | None:
    """Return the cache among the arguments of a model or of ``generate()``, or None."""
    caches = [named[name] for name in CACHE_NAMES if named.get(name) is not None]
    ours = [cache for cache in caches if isinstance(cache, AttentionCache)]
    if ours and len(caches) > 1:
        raise ConfigError("a KVpopCache and another cache are given, as cache and as past_key_values: leave one out")
    return ours[0] if ours else None


def with_cache(named: Mapping[str, object], cache: AttentionCache) -> dict[str, object]:
    """Return arguments with the cache under the name that this version of transformers uses."""
    return {name: value for name, value in named.items() if name not in CACHE_NAMES} | {CACHE_NAME: cache}


class Step(GateInputs):
    """Attention of all layers in one pass, as :class:`kvpop_vllm.model_hook.Attend` has it.

    Args:
        cache: cache of the pass.
        positions: ``[R, L]`` int64, positions of the tokens, 0 for pads.
        starts: position of each row's first token in the pass, None if every row decodes one token.
        counts: number of tokens of each row. They are its last columns.
        recorded: True if the pass is recorded into a CUDA graph and not executed.

    Attributes:
        thread: thread of the pass.
        length: L.
        plans: plan of the pass, several if layers differ in their devices or numbers of blocks.
        parts: parts of the pass in layers with windows or chunks, made once for all layers of a kind on a device.
        kinds: kinds of the model's layers, empty if a policy acts on all.
        longest: tokens of the longest text.
        takes_sinks: True: it is called with the logits of a layer's attention sinks.
    """

    takes_sinks = True

    def __init__(
        self,
        cache: AttentionCache,
        positions: torch.Tensor,
        starts: list[int] | None,
        counts: list[int],
        recorded: bool,
    ):
        super().__init__()
        self.cache, self.positions, self.starts, self.counts, self.recorded = cache, positions, starts, counts, recorded
        self.thread, self.length = threading.get_ident(), positions.shape[1]
        self.plans: dict[Hashable, StepPlan] = {}
        self.parts: dict[Hashable, list[Part]] = {}
        self.kinds, self.longest = cache.policy.model.kinds, cache.policy.model.max_model_len

    @torch.compiler.disable  # the kernels cannot be compiled
    def __call__(self, layer, q, k, v, scale, sink_logits=None):
        """Return the layer's attention output. See :class:`kvpop_vllm.model_hook.Attend`.

        Args:
            layer, q, k, v, scale: as there.
            sink_logits: ``[Hq]`` logits of the layer's attention sinks, or None.

        Raises:
            RuntimeError: gradients are required.
        """
        if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
            raise RuntimeError("no gradients go through a KVpopCache: call the model under torch.no_grad()")
        cache, signals = self.cache, self.signals(layer, k, v)
        self._check_turn(layer)
        gate = cache.gates[layer]
        device = cache.device or q.device
        # the gate runs where the model is, and the kernels may run elsewhere
        gate_scores = None if gate is None else gate.to(k.device)(signals).to(device)
        model_device, (q, k, v) = q.device, (x.to(device) for x in (q, k, v))
        pages = cache.layer(layer, q, k, v, scale)
        # from here on the pages may hold tokens of a pass that is interrupted
        cache.attended.add(layer)
        batch = self._plan(pages).batch(pages.shares)
        return pages.attend(q, k, v, batch, gate_scores, sink_logits).to(model_device)

    @torch.compiler.disable
    def local(self, layer, q, k, v, scale, kind, size, sink_logits=None):
        """Return the attention of a layer with windows or chunks. See :class:`kvpop_vllm.model_hook.Attend`.

        Raises:
            RuntimeError: the pass is recorded into a CUDA graph.
        """
        if self.recorded:
            raise RuntimeError("a CUDA graph holds no layers with windows or chunks: leave graphs out")
        self._check_turn(turn := (kind, layer))
        self.cache.attended.add(turn)
        if (key := (kind, q.device)) not in self.parts:
            ends = self.ends.to(q.device)
            self.parts[key] = parts_of_pass(kind, size, self.cache.columns, self.length, ends)
        return self.cache.local_layer(layer, size).attend(q, k, v, scale, self.parts[key], sink_logits)

    @property
    def ends(self) -> torch.Tensor:
        """Tokens ``[R]`` of each row after the pass."""
        if self.starts is None:
            return self.positions[:, -1] + 1
        return torch.tensor([start + count for start, count in zip(self.starts, self.counts, strict=True)])

    @property
    def masks(self) -> dict[str, torch.Tensor | None] | None:
        """Masks of the pass by kinds of layers, as a model with recurrent layers takes them, None for other models.

        Recurrent layers take the mask ``[R, L]`` of tokens, None if there are no pads. Attention needs none.
        """
        if not self.cache.recurrent:
            return None
        mask = None
        if min(self.counts) < self.length:
            pads = self.length - torch.tensor(self.counts).unsqueeze(1)
            mask = (torch.arange(self.length) >= pads).to(self.positions.device)
        return {FULL: None, RECURRENT: mask}

    def _check_turn(self, layer: Hashable) -> None:
        """Check that a layer has not attended in this pass."""
        if layer in self.cache.attended:
            raise ConfigError(
                "the model's layers attend more than once, and a KVpopCache has pages for one: choose another model"
            )

    def _plan(self, pages) -> StepPlan:
        """Return the plan of the pass for a layer's pages, made once for all layers with the same block numbers."""
        if (key := pages.plan_key) not in self.plans:
            if self.starts is None:
                self.plans[key] = pages.plan_decode(self.cache.protected)
            else:
                self.plans[key] = pages.plan_prefill(self.starts, self.counts, self.length, self.cache.protected)
        return self.plans[key]


def register_hooks(model: torch.nn.Module, borrows: bool, kinds: tuple[str, ...]) -> torch.nn.Module:
    """Register the hooks of a model. It may be called again.

    Args:
        model: a model that :func:`kvpop_vllm.hf.checks.check_model` accepts.
        borrows: True if a query channel is read and removed from the queries
            (:class:`kvpop_vllm.scorers.dms.DMSGate`).
        kinds: kinds of the model's layers, empty if all have full attention.

    Returns:
        Its decoder.
    """
    show_hidden_states(model)
    _watch_generate()
    decoder = decoder_of(model)
    # another cache of this model may have registered them
    if _before not in decoder._forward_pre_hooks.values():
        with _turn(decoder):
            _restore(decoder)
            hands_on = _hands_on(decoder)
        if not hands_on:
            refuse_model(model, ["layers that hand no further arguments on to their attention"])
        decoder.register_forward_pre_hook(_before, with_kwargs=True)
        # always_call, so that a pass that raises gives the attention back
        decoder.register_forward_hook(_after, with_kwargs=True, always_call=True)
    if borrows:
        borrow_channel(model, borrowed_share(model), kinds)
    return decoder


class _TakesPart(StoppingCriteria):
    """Check of ``generate()`` that its cache takes part in every pass. It never stops.

    Some models set the cache aside, as those with LongRoPE do where the rotation changes.
    """

    def __init__(self, cache: AttentionCache):
        self.cache, self.passes = cache, cache.passes

    def __call__(self, input_ids, scores, **options):
        """Return no row as ended."""
        cache, text = self.cache, input_ids.shape[1] - 1  # the last token has not been read
        if cache.passes == self.passes or cache.columns < text:
            raise ConfigError(
                f"generate() went on without its KVpopCache, which has seen {cache.columns} of {text} tokens; models with LongRoPE do so"
                " at their original_max_position_embeddings: shorten the text, or choose another model"
            )
        self.passes = cache.passes
        cache.text = input_ids if cache.columns == text else None
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


@functools.cache
def _watch_generate() -> None:
    """Have ``generate()`` of all models take a KVpopCache under both names, and check that it is used as it should be."""
    original = GenerationMixin.generate
    signature = inspect.signature(original)

    @functools.wraps(original)
    def generate(model, *positional, **named):
        if (cache := cache_in(named)) is None:
            return original(model, *positional, **named)
        # positional arguments get their names, because the cache may be among them
        by_name = list(signature.bind_partial(model, *positional).arguments.items())[1:]
        named = with_cache(dict(by_name) | named, cache)
        cache.next_text = named.get("input_ids") if named.get("inputs") is None else named["inputs"]
        text = named.get("inputs_embeds") if cache.next_text is None else cache.next_text
        cache.text_columns = 0 if text is None else text.shape[1]
        criteria = [_TakesPart(cache), *(named.get("stopping_criteria") or ())]
        try:
            return original(model, **named | {"stopping_criteria": StoppingCriteriaList(criteria)})
        finally:
            cache.next_text, cache.text_columns = None, 0

    GenerationMixin.generate = generate


class _Reached(Exception):
    """The first layer has attended."""


def _hands_on(decoder: torch.nn.Module) -> bool:
    """Return whether the first layer's attention receives a keyword argument, by a pass of one token up to it."""

    def attend(*_, **options):
        raise _Reached

    attend.local, attend.takes_sinks = attend, True
    device = decoder.get_input_embeddings().weight.device
    token = torch.zeros(1, 1, dtype=torch.int64, device="cpu" if device.type == "meta" else device)  # offloaded
    original, decoder.config._attn_implementation = decoder.config._attn_implementation, NAME
    try:
        with torch.no_grad():
            cache = DynamicCache(config=decoder.config)  # without one, some look at positions
            decoder(token, attend=attend, **{CACHE_NAME: cache})
    except _Reached:
        return True
    except TypeError:  # no such argument, or the attention function misses it
        return False
    finally:
        decoder.config._attn_implementation = original
    return False


NOTE = "_kvpop_pass"
"""Attribute of a decoder during a pass. It is copied with the decoder.

It holds the attention before the pass, and the share of the channel that was borrowed from each layer before
it.
"""
_running = weakref.WeakValueDictionary()
"""Step of each decoder's pass, by the decoder's id. Only the arguments of a pass refer to its step.

The traceback of an interrupted pass holds them too, until the thread's next pass or the cache's ``reset()``.
"""
_turns = weakref.WeakKeyDictionary()
"""Lock of each decoder, held while its note is read and changed."""
_all_turns = threading.Lock()


def _turn(decoder):
    """Return the lock of a decoder."""
    with _all_turns:
        return _turns.setdefault(decoder, threading.Lock())


def _before(decoder, positional, named):
    if (cache := cache_in(named)) is not None:
        return positional, with_cache(named, cache) | _begin(decoder, cache, positional, named)
    if hasattr(decoder, NOTE):
        restore_attention(decoder)
    return None


def _after(decoder, positional, named, result):
    if isinstance(step := named.get("attend"), Step):  # otherwise no pass with a cache has begun
        _end(decoder, step.cache, step, failed=result is None)


@torch.compiler.disable  # nothing to compile here
def _begin(decoder, cache, positional, named):
    """Return the arguments that replace the caller's in a pass with a cache."""
    inputs = _inputs(decoder, positional, named)
    blocks = attention_blocks(decoder)
    with _turn(decoder):
        _restore(decoder)
        step = cache.begin(decoder, *inputs)
        _running[id(decoder)] = step
        shares = [getattr(block, "borrowed", 0.0) for block in blocks]
        setattr(decoder, NOTE, (decoder.config._attn_implementation, shares))
        decoder.config._attn_implementation = NAME
        for block in full_blocks(decoder, cache.policy.model.kinds) if cache.borrows else ():
            block.borrowed = 1.0
    return {"attend": step, "attention_mask": step.masks, "position_ids": step.positions}


@torch.compiler.disable
def _end(decoder, cache, step, failed):
    restore_attention(decoder)
    cache.end(step, failed)


@torch.compiler.disable
def restore_attention(decoder: torch.nn.Module) -> None:
    """Restore a decoder's own attention, if a pass has replaced it.

    Raises:
        RuntimeError: the decoder is in a pass of another thread.
    """
    with _turn(decoder):
        _restore(decoder)


def _restore(decoder):
    """Restore the attention as :func:`restore_attention` does, with the lock held."""
    if not hasattr(decoder, NOTE):
        return
    step = _running.get(id(decoder))
    # a step of this thread is over: its pass was interrupted
    if step is not None and step.thread != threading.get_ident():
        raise RuntimeError(BUSY)
    original, shares = getattr(decoder, NOTE)
    if decoder.config._attn_implementation == NAME:  # otherwise it was changed in the meantime
        decoder.config._attn_implementation = original
    for block, share in zip(attention_blocks(decoder), shares, strict=True):
        if hasattr(block, "borrowed"):
            block.borrowed = share
    delattr(decoder, NOTE)


def _inputs(decoder, positional, named):
    """Return inputs, mask and positions of a pass.

    Raises:
        TypeError: more than one positional argument.
        ValueError: no inputs.
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
