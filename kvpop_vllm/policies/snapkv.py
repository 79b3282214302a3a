"""SnapKV: the last queries of a prompt select its tokens (Li et al., 2024, arXiv 2404.14469)."""

from kvpop_vllm.config import ConfigError
from kvpop_vllm.flags import FLAGS
from kvpop_vllm.kernels.ops import PromptMatching, PromptVotes
from kvpop_vllm.policies.base import Policy, Signal

OBSERVED = 32
"""Default window in tokens. It equals the paper's observation window."""
SAFE = 0.2
"""Fraction of the budget that every head keeps if heads divide it, as in kvpress."""


class SnapKV(Policy):
    """Hold the prompt until its end, then retain its last w tokens and the k tokens with the most votes.

    The last 32 queries of the prompt vote once. A token's votes are the attention to it, averaged over the
    queries, over the query heads of a KV head and over five neighbouring tokens.

    The paper keeps all generated tokens. Here the budget holds for them too. A token that leaves the window
    takes a free slot, otherwise the slot of the prompt token with the fewest votes, and when none is left,
    that of the oldest token. A later turn is a new prompt.
    """

    name = "snapkv"
    paper = "Li et al. 2024, arXiv:2404.14469"
    cost = "the prompt is held densely while it is prefilled; at its end the attention weights of 32 queries; then none"
    state = "32 x G x D float32, G query heads a KV head"
    signals = frozenset({Signal.MASS})
    default_sinks, default_window = 0, OBSERVED
    compresses = True

    def prepare(self):
        super().prepare()
        for name in ("protect_prompt", "max_protect"):
            if getattr(self.settings, name) is not None:
                raise ConfigError(
                    f"--kv-policy {self.name} holds the prompt until its end anyway: leave {FLAGS[name]} out"
                )
        if self.uses_moment_correction:
            raise ConfigError(f"--kv-policy {self.name} evicts from the prompt at once: leave --kv-correction out")

    @property
    def compression(self) -> PromptVotes | PromptMatching:
        """Settings of the votes: which queries vote, and how votes are averaged."""
        # heads that do not divide slots compare no votes
        return PromptVotes(self.query_group, safe=SAFE if self.adaptive_head_budgets else None)

    @property
    def protect(self):
        return True  # until its end the prompt lies in the prefix

    def rule(self, layer, heads):
        return self.training_free_rule(heads, None, compression=self.compression)
