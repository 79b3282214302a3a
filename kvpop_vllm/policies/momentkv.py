"""MomentKV: evicted tokens are summarised by moments (Closing the Directional Gap in KV Cache Eviction)."""

from kvpop_vllm.kernels.ops import MomentResidual
from kvpop_vllm.policies.base import Order, Policy, Signal


class MomentKV(Policy):
    """Evict the token with the lowest product of attention and moment residual (eq. 10).

    The product is the attention of query q - 1, averaged over the query heads of a KV head, times ``|v - vb -
    scale Sig k|``, with the moments of the tokens evicted before q. The outputs are corrected with these
    moments (eqs. 9, 11, 12). ``--kv-correction none`` disables the correction.

    The paper scores once after the prompt, by attention summed over its last 32 queries. It merges neighbours
    into chunks of four, shares the budget among heads and accumulates raw moments. While decoding, it evicts
    whenever the cache is full. Here tokens are evicted one by one from the beginning, so that the budget is
    also a hard limit in the prompt. Mean and covariance are updated in place (Welford), and all heads have
    equal budgets. There is one sink, as in the paper. The paper's decoding has no window. Here the window is
    the newest token.
    """

    name = "momentkv"
    paper = "MomentKV: Closing the Directional Gap in KV Cache Eviction, sections 4.1, 4.2"
    cost = "a [k, D] x [D, D] product per head and step, one [G, D] x [D, D] product per output"
    state = "D x (D + 2) float32"
    signals = frozenset({Signal.KEY, Signal.VALUE, Signal.MASS})
    order = Order.COUPLED
    default_sinks, window_share = 1, 0.0
    default_correction = "moment"

    def rule(self, layer, heads):
        return self.training_free_rule(heads, MomentResidual())
