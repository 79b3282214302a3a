"""MomentKV: what evicted tokens would have said is kept in moments (Closing the Directional Gap in KV Cache Eviction)."""

from __future__ import annotations

from kvpop_vllm.kernels.ops import MomentResidual
from kvpop_vllm.policies.base import Order, Policy, Signal, moment_fields


class MomentKV(Policy):
    """The token with the lowest product of attention and moment residual leaves (eq. 10): attention of query q - 1, averaged
    over the query heads of a KV head, times ``|v - vb - scale Sig k|``, with the moments of what was evicted before q. Outputs
    are corrected by these moments (eqs. 9, 11, 12), which ``--kv-correction none`` switches off.

    The paper scores once after the prompt, by attention summed over its last 32 queries, merges neighbours into chunks of
    four and shares the budget among heads, and adds up raw moments; while decoding it evicts whenever the cache is full.
    Here tokens are evicted one by one from the beginning, so that a hard budget holds in the prompt too, means and
    covariance are updated in place (Welford), and shares are equal. One sink as in the paper; its decoding has no window, here
    the window is the newest token.
    """

    name = "momentkv"
    paper = "MomentKV: Closing the Directional Gap in KV Cache Eviction, sections 4.1, 4.2"
    cost = "a [k, D] x [D, D] product per head and step, one [G, D] x [D, D] product per output"
    state = "D x (D + 2) float32"
    signals = frozenset({Signal.KEY, Signal.VALUE, Signal.MASS})
    order = Order.COUPLED
    default_sinks, window_share = 1, 0.0
    default_correction = "moment"

    @property
    def state_fields(self):
        return moment_fields(self.model.head_dim)

    def rule(self, layer, heads):
        return self.training_free_rule(heads, MomentResidual())
