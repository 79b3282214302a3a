"""StreamingLLM: attention sinks and the most recent tokens (Xiao et al., 2023, arXiv 2309.17453)."""

from kvpop_vllm.policies.base import Policy


class StreamingLLM(Policy):
    """Rank long-range slots by recency.

    The policy equals a window of ``B - s``, whatever ``--kv-window`` is. The default window is the largest,
    ``w = B - s - 1``, which leaves one candidate per eviction.
    """

    name = "streaming-llm"
    paper = "Xiao et al. 2023, arXiv:2309.17453"
    cost = "none"

    def rule(self, layer, heads):
        # all tokens score 0, so that decay alone ranks them, the oldest lowest
        return self.training_free_rule(heads, None, log_gamma=-1.0)
