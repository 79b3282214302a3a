"""SnapKV: what the end of the prompt attends to (Li et al., 2024, arXiv 2404.14469)."""

from __future__ import annotations

from dataclasses import replace

from kvpop_vllm.config import ConfigError
from kvpop_vllm.kernels.ops import PromptVotes
from kvpop_vllm.policies.base import Policy, Signal

OBSERVED = 32
"""Default window in tokens, which is also the paper's observation window."""
SAFE = 0.2
"""Share of its budget that every head keeps where heads divide them, as in kvpress."""


class SnapKV(Policy):
    """The prompt is held until its end. Then its last 32 queries vote once: their attention to each token, averaged over the queries,
    over the query heads of a KV head and over five neighbouring tokens. The last w tokens and the k tokens of most votes stay.

    The paper keeps all that is generated. Here the budget holds for that too: a token that leaves the window takes a free slot, else
    that of the prompt's token of fewest votes, and when none is left that of the oldest token. A later turn is another prompt.
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
        if self.settings.protect_prompt is not None:
            raise ConfigError(
                f"--kv-policy {self.name} holds the prompt until its end anyway: leave --kv-protect-prompt out"
            )
        if self.settings.max_protect is not None:
            raise ConfigError(
                f"--kv-policy {self.name} holds the prompt until its end anyway: leave --kv-max-protect out"
            )
        if self.corrects:
            raise ConfigError(f"--kv-policy {self.name} evicts from the prompt at once: leave --kv-correction out")

    @property
    def votes(self) -> PromptVotes:
        """Who votes, and how votes are averaged."""
        return PromptVotes(self.query_group, safe=SAFE if self.divides else None)

    @property
    def state_fields(self):
        return {"queries": self.votes.state_floats(self.model.head_dim)}

    @property
    def protect(self):
        return True

    def rule(self, layer, heads):
        return replace(self.training_free_rule(heads, None), votes=self.votes)
