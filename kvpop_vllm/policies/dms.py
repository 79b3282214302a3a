"""DMS: each token carries the decision whether it is evicted when it leaves the window (Łańcucki et al., 2025, arXiv 2506.05345)."""

from __future__ import annotations

from kvpop_vllm.config import ConfigError
from kvpop_vllm.kernels.ops import GivenScore
from kvpop_vllm.policies.base import Signal
from kvpop_vllm.policies.learned import Gated


class DMS(Gated):
    """``r_t = -logit_t``, the eviction logit from a projection of the attention block's input or from a channel borrowed from
    the query: a token with a positive logit leaves with the window, though slots are free.

    The paper bounds no head's cache: of what its decisions leave over, a budget keeps the tokens of lowest logit. What a
    window of w means differs by one: the paper's holds w tokens beside the newest. Its code lets the logit of token t + 1 decide
    on token t, which a scorer's config may ask for (``shifted``). The window holds at least two tokens: the position word of
    slot 1 counts filled slots.
    """

    name, scorer_kind = "dms", "dms"
    paper = "Lancucki et al. 2025, arXiv:2506.05345"
    cost = "one [E, H] product per layer, or none"
    signals = frozenset({Signal.HIDDEN, Signal.PRE_ROPE})

    def check_retention(self, kept):
        if kept.window < 2:
            raise ConfigError(f"--kv-policy {self.name} needs a window of two tokens: set --kv-window to at least 2")

    @property
    def shifted(self):
        return self.config.shifted

    def rule(self, layer, heads):
        return self.training_free_rule(heads, GivenScore(threshold=0.0))
