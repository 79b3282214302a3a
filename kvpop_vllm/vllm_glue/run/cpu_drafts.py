"""Sampling with drafts on a CPU, where vLLM loses temperature, top-k and top-p.

Each draft is judged under the numbers of its request. vLLM 0.32 copies them by a kernel that takes int64 only: numbers
of other types are converted before, and the result stays in the converted copy. The draft is then judged under whatever
lay in memory.
"""

import torch


def expand_batch_to_tokens(original, x, cu_num_tokens, num_tokens, replace_from=0, replace_to=0):
    """Wrap the copying of one number of each request to its drafts: ``x [R]`` becomes ``[num_tokens]``."""
    if x.device.type != "cpu":
        return original(x, cu_num_tokens, num_tokens, replace_from, replace_to)
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    return x.masked_fill(x == replace_from, replace_to).repeat_interleave(counts, output_size=num_tokens)
