"""Constants and checks of several kernels."""

from __future__ import annotations

import functools

import torch
import triton.language as tl

from kvpop_vllm.kernels.dispatch import TRITON_DTYPES, largest_head

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
PRECISION = tl.constexpr("tf32x3")  # three tensor core products per float32 product, error about 2**-22


def check_size(op: str, size: int, dtype: torch.dtype | None = None) -> None:
    """Raise ValueError if an op does not take heads of this size, in a dtype where that matters."""
    if size > (largest := largest_head(op, dtype)):
        raise ValueError(f"{op} in Triton takes heads of up to {largest}, got {size}: use impl='reference'")


def common_dtype(op: str, *tensors: torch.Tensor) -> torch.dtype:
    """Return the dtype to which an op of training converts its inputs; raise ValueError if it or D is not taken."""
    common = functools.reduce(torch.promote_types, (x.dtype for x in tensors))
    check_size(op, tensors[0].shape[-1], common)
    if common not in TRITON_DTYPES[op]:
        raise ValueError(f"{op} in Triton takes float32, float16 and bfloat16, got {common}: use impl='reference'")
    return common
