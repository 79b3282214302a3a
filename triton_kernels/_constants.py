"""Constants of several kernels."""

from __future__ import annotations

import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
PRECISION = tl.constexpr("tf32x3")  # three tensor core products per float32 product, error about 2**-22
