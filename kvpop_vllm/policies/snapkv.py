"""SnapKV: the tokens that the end of the prompt attended to (Li et al., 2024, arXiv 2404.14469)."""

from __future__ import annotations

from kvpop_vllm.kernels.ops import AttentionVotes
from kvpop_vllm.policies.base import Decide, Order, Policy, Signal

OBSERVED = 32
"""Default size of the observation window in tokens."""
NEIGHBOURS = 5
"""Over how many tokens votes are averaged; zeros beyond the ends count."""


class SnapKV(Policy):
    """``r_t``: attention of the last e queries of the prompt to token t, averaged over the query heads of a KV head and over
    five neighbours.

    ``--kv-decide-every`` is e, the paper's observation window, 32 by default; as in the paper its tokens always stay, so that
    the window is e + 1 (they and the first generated token) and there are no sinks. The paper evicts once, after a prompt that it
    keeps whole. A budget that holds during the prompt too needs more decisions: every e tokens, so placed that one falls on
    the first generated token, each by the e queries before it. A prompt that fits until then is treated as in the paper,
    which pools by the largest of seven in some experiments and by the mean elsewhere; the mean is taken here. It says
    nothing of generated tokens, and keeps them all: here those that leave the window rank above the
    prompt's, by recency.
    """

    name = "snapkv"
    paper = "Li et al. 2024, arXiv:2404.14469"
    cost = "in the prompt the attention weights once more, every e tokens a sort; then none"
    signals = frozenset({Signal.MASS})
    order = Order.COUPLED
    decide = Decide.PROMPT_END
    default_sinks, default_decide_every = 0, OBSERVED

    def default_window(self, decide_every):
        return decide_every + 1

    def rule(self, layer, heads):
        return self.training_free_rule(heads, AttentionVotes(NEIGHBOURS))
