"""L2-norm: tokens whose keys have a low norm are retained (Devoto et al., 2024, arXiv 2406.11430)."""

from kvpop_vllm.kernels.ops import KeyNorm
from kvpop_vllm.policies.base import Policy, Signal


class L2Norm(Policy):
    """``r = -|k|_2`` of the key as cached, without decay: the token with the largest key norm is evicted.

    The paper prunes with and without a prompt's first layers, and does not specify sinks or a window during
    generation. Here all layers prune, at every token. By default there are no sinks and the window is the
    newest token. ``--kv-sinks`` and ``--kv-window`` change this.

    Rotation does not change a norm. In a model's first layer, equal tokens therefore tie, up to the rounding
    of the rotated key, and the older one is evicted.
    """

    name = "l2norm"
    paper = "Devoto et al. 2024, arXiv:2406.11430"
    cost = "one norm of length D per head"
    signals = frozenset({Signal.KEY})
    default_sinks, window_share = 0, 0.0  # a share of 0 is a window of one token

    def rule(self, layer, heads):
        return self.training_free_rule(heads, KeyNorm())
