"""C++ implementation of ``begin_tail``."""

import torch

from kvpop_vllm.kernels.cpp.decode_step import packed, tensors_of
from kvpop_vllm.kernels.dispatch import load_extension

_C = load_extension()


def begin_tail(pages, page_table, prefix, *, rule):
    """Implement :func:`kvpop_vllm.kernels.ops.begin_tail`."""
    layout, bf16 = pages.layout, pages.layout.dtype is torch.bfloat16
    slots, state = layout.block_slots, layout.state_blocks
    _C.begin_tail(pages.raw, slots, state, page_table, packed(rule), rule.replay, bf16, tensors_of(prefix))
