"""Dense cache on the same pages: nothing is ever evicted."""

from kvpop_vllm.policies.streaming_llm import StreamingLLM


class Full(StreamingLLM):
    """Dense cache, ``B = max-model-len``.

    For tests, and for a dense baseline that runs the same kernels.
    """

    name = "full"
    paper = "-"
    keeps_all = True
