"""TRIM-KV: a gate scores tokens at insertion, scores decay with age (Bui et al., 2025, arXiv 2512.03324)."""

from kvpop_vllm.kernels.ops import GateScore
from kvpop_vllm.policies.base import Order, Signal
from kvpop_vllm.policies.learned import Gated


class TrimKV(Gated):
    """``effective_t(q) = (q - t) log beta_t``: evict the token with the lowest ``beta_t^(q - t)``.

    Source: section 4.3. ``log beta`` is the output of a gate on the attention block's input, or on keys and
    values as cached.

    The paper appends a token, attends over M + 1 tokens and then evicts. The authors' code evicts every 128
    tokens, attends over M + 128, and has exponents larger by two. Here the cache never holds more than B
    tokens: the token evicted at q is removed before q attends. The paper has neither sinks nor a window,
    because the newest token's score is 1. Here the window is the newest token, unless the scorer's config
    sets a larger one. Decay affects evictions only: attention over the retained tokens is unchanged.

    DBTrimKV (arXiv:2605.09649) ranks the tokens of all heads of all layers by this score, under one budget. Here each
    head ranks its own.
    """

    name, scorer_kind = "trimkv", "trimkv"
    paper = "Bui et al. 2025, arXiv:2512.03324"
    cost = "one [E, M] and one [M, H] product per layer"
    signals = frozenset({Signal.HIDDEN, Signal.KEY, Signal.VALUE})
    order = Order.AGED

    def rule(self, layer, heads):
        return self.training_free_rule(heads, GateScore(ages=True))  # log beta times a token's age
