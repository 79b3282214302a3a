"""TRIM-KV: a retention gate scores a token when it comes in, and its score decays (Bui et al., 2025, arXiv 2512.03324)."""

from __future__ import annotations

from kvpop_vllm.kernels.ops import GivenScore
from kvpop_vllm.policies.base import Order, Signal
from kvpop_vllm.policies.learned import Gated


class TrimKV(Gated):
    """``effective_t(q) = (q - t) log beta_t`` with ``log beta`` from a gate on the attention block's input, or on keys and
    values as cached: the token of lowest ``beta_t^(q - t)`` leaves (section 4.3).

    The paper appends, attends over M + 1 tokens and then evicts; its code does so every 128 tokens, over M + 128, with
    exponents larger by two. Here the cache never holds more than B: the victim at q leaves before q attends. It has neither
    sinks nor a window, as the newest token's score is 1; the window is that token, unless the scorer's config says more.
    Decay acts on nothing but evictions: attention over what is left is plain.
    """

    name, scorer_kind = "trimkv", "trimkv"
    paper = "Bui et al. 2025, arXiv:2512.03324"
    cost = "one [E, M] and one [M, H] product per layer"
    signals = frozenset({Signal.HIDDEN, Signal.KEY, Signal.VALUE})
    order = Order.AGED

    def rule(self, layer, heads):
        return self.training_free_rule(heads, GivenScore(ages=True))
