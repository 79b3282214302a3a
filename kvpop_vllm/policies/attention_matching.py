"""Attention matching at a prompt's end: fewer keys with biases and fitted values (2026, arXiv 2602.16284)."""

from kvpop_vllm.config import ConfigError
from kvpop_vllm.kernels.ops import PromptMatching
from kvpop_vllm.policies.snapkv import SnapKV

QUERIES = 256
"""Largest number of a prompt's last queries that slots are fitted to."""


class AttentionMatching(SnapKV):
    """Hold the prompt until its end, then make slots of it and keep its last w tokens.

    The paper makes a compact cache of a context before it is asked about. Here that is done once per prompt, with the
    prompt's own last queries, 256 or w of them. The tokens before the last w become ``B - w`` slots: keys of the tokens
    with the highest attention, with biases and values under which these queries see the mass and the output of all of
    them.

    Made slots are never evicted. A later token takes the place of the oldest one in the window. A prompt of at most B
    tokens is kept as it is, and the window has the slots that it leaves. A later turn is a new prompt.
    """

    name = "attention-matching"
    paper = "Fast KV Compaction via Attention Matching, 2026, arXiv:2602.16284"
    cost = "the prompt is held densely while it is prefilled; at its end a fit of B - w slots to 256 queries; then none"
    state = "min(256, w) x G x D float32 until the prompt's end, G query heads a KV head"
    # SnapKV's window is fixed, and this one is a share of the budget
    default_window = None
    window_share = 0.25

    def prepare(self):
        super().prepare()
        if self.allocator != "uniform":
            raise ConfigError(f"--kv-policy {self.name} makes as many slots for every head: leave --kv-allocator out")
        if self.settings.sinks:
            raise ConfigError(f"--kv-policy {self.name} makes slots of the first tokens too: leave --kv-sinks out")

    @property
    def compression(self) -> PromptMatching:
        """Settings of the fit: as many queries as the largest window of a request, at most 256."""
        return PromptMatching(self.query_group, min(QUERIES, self.max_window))
