"""C++ implementation of ``decode_step``."""

from __future__ import annotations

import weakref

import torch

from kvpop_vllm.cache.pages import Prefix
from kvpop_vllm.kernels.dispatch import load_extension
from kvpop_vllm.kernels.ops import RetentionRule, StepOrderError

_C = load_extension()
_packed: dict[int, _C.Rule] = {}  # by id of a live rule


def _pack(rule: RetentionRule) -> _C.Rule:
    """Build the extension's form of a rule and cache it while the rule is alive."""
    scorer = rule.scorer
    weights = {name: value.detach() for name, value in vars(scorer).items() if isinstance(value, torch.Tensor)}
    roles = rule.sinks, rule.window, rule.decay_step
    options = {"uses_moment_correction": rule.moment_correction} | scorer.options()
    packed_rule = _C.Rule(*roles, rule.log_gamma.detach(), scorer.kernel, weights, **options)
    _packed[id(rule)] = packed_rule
    weakref.finalize(rule, _packed.pop, id(rule), None)
    return packed_rule


def packed(rule: RetentionRule) -> _C.Rule:
    """Return the rule in the extension's form, built on first use."""
    return _packed.get(id(rule)) or _pack(rule)


def check_dtype(k: torch.Tensor, pages) -> None:
    """Raise TypeError if the dtype of k differs from the cache's."""
    if k.dtype is not pages.layout.dtype:
        raise TypeError(f"k and v must have the cache's dtype {pages.layout.dtype}, got {k.dtype}")


def tensors_of(prefix: Prefix | None) -> tuple[torch.Tensor | None, ...] | None:
    """Return the tensors of a prefix in the extension's form."""
    return None if prefix is None else (prefix.pages.raw, prefix.table, prefix.tokens, prefix.biased)


def decode_step(
    q, k, v, pages, page_table, positions, budgets, *, rule, scale, gate_scores=None, prefix=None, keys=None, windows,
    sink_logits=None, out=None,
):  # fmt: skip
    """Implement :func:`kvpop_vllm.kernels.ops.decode_step`."""
    check_dtype(k, pages)
    layout = pages.layout
    place = pages.raw, layout.block_slots, layout.state_blocks, layout.drafts > 0
    requests = page_table, positions, budgets, windows
    try:
        optional = gate_scores, tensors_of(prefix), keys, sink_logits, out
        return _C.decode_step(q, k, v, *place, *requests, packed(rule), scale, *optional)
    except _C.StepOrder as error:
        raise StepOrderError(str(error)) from None
