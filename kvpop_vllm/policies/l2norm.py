"""L2-norm: tokens whose keys have a low norm stay (Devoto et al., 2024, arXiv 2406.11430)."""

from __future__ import annotations

from kvpop_vllm.kernels.ops import KeyNorm
from kvpop_vllm.policies.base import Policy, Signal


class L2Norm(Policy):
    """``r = -|k|_2`` of the key as cached, without decay: the token of largest key norm leaves.

    The paper prunes with and without a prompt's first layers and says nothing of sinks or a window while tokens are
    generated. Here all layers prune, at every token; by default there are no sinks and the window is the newest token;
    ``--kv-sinks`` and ``--kv-window`` give others.

    Rotation does not change a norm, so in a model's first layer equal tokens tie (the older leaves), up to the rounding of
    the rotated key.
    """

    name = "l2norm"
    paper = "Devoto et al. 2024, arXiv:2406.11430"
    cost = "one norm of length D per head"
    signals = frozenset({Signal.KEY})
    default_sinks, window_share = 0, 0.0

    def rule(self, layer, heads):
        return self.training_free_rule(heads, KeyNorm())
