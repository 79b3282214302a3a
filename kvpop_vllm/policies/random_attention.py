"""Random eviction, the control for all other policies (Random Attention, 2026, arXiv 2609.03430)."""

from kvpop_vllm.kernels.draws import head_lanes
from kvpop_vllm.kernels.ops import RandomDraw
from kvpop_vllm.policies.base import Order, Policy


class RandomAttention(Policy):
    """Evict a uniformly random token among those before the window, drawn separately for each KV head.

    Prompts are protected by default, as in the paper, so that only generated tokens are evicted. The
    probability that a token survives decreases geometrically with its age. A draw depends only on the
    request's seed, the layer, the KV head, the token and the step (:mod:`kvpop_vllm.kernels.draws`). Half of
    the budget is the window unless ``--kv-window`` is given.
    """

    name = "random"
    paper = "Random Attention, arXiv:2609.03430"
    cost = "one hash per long-range token and head"
    order = Order.AGED
    draws = True
    window_share = 0.5
    default_protect = True

    def rule(self, layer, heads):
        # numbered within the whole model, so that ranks draw what one device would
        return self.training_free_rule(heads, RandomDraw(head_lanes(layer, heads, self.model.num_kv_heads)))
