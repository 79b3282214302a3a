"""The dense cache on the same pages: nothing is ever evicted."""

from __future__ import annotations

from kvpop_vllm.policies.streaming_llm import StreamingLLM


class Full(StreamingLLM):
    """``B = max-model-len``. For tests, and for a dense comparison that runs the same kernels."""

    name = "full"
    paper = "-"
    keeps_all = True
