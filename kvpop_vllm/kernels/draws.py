"""Random numbers that depend on nothing but their place: the same for any chunking, batch, rank and implementation.

``mix`` is the finalizer of SplitMix64 (Steele, Lea and Flood 2014), a bijection of 64-bit words; sums and products wrap. With
G = 0x9E3779B97F4A7C15 the draw of token t when one is evicted at position q is, of request r, layer l and KV head h::

    key = mix(mix(seed_r + G) + (l << 32 | h))        per request and head
    draw = mix(mix(key + q) + t * G) >> 11            53 bits, exact in float64

The kernels in C++ and Triton compute draws from keys by the same formula.
"""

from __future__ import annotations

import torch

GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
"""G as a signed 64-bit integer."""
_FIRST, _SECOND = 0xBF58476D1CE4E5B9 - (1 << 64), 0x94D049BB133111EB - (1 << 64)


def mix(x: torch.Tensor) -> torch.Tensor:
    """Return the finalizer of SplitMix64 of int64 words, taken as unsigned."""
    x = (x ^ _shift(x, 30)) * _FIRST
    x = (x ^ _shift(x, 27)) * _SECOND
    return x ^ _shift(x, 31)


def _shift(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Return a logical right shift of int64 words."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def head_lanes(layer: int, heads: slice, total: int) -> torch.Tensor:
    """Return ``l << 32 | h`` of these KV heads of a model's ``total``: ``[H]`` int64."""
    return (layer << 32) + torch.arange(*heads.indices(total))


def head_keys(seeds: torch.Tensor, lanes: torch.Tensor) -> torch.Tensor:
    """Return the keys ``[R, H]`` of requests with ``seeds [R]`` and heads with ``lanes [H]``, int64."""
    return mix(mix(seeds + GOLDEN).unsqueeze(-1) + lanes)


def draw(keys: torch.Tensor, q: torch.Tensor | int, t: torch.Tensor) -> torch.Tensor:
    """Return the draws of tokens t at positions q, float64 from 0 to 2**53 - 1; int64 arguments are broadcast."""
    return _shift(mix(mix(keys + q) + t * GOLDEN), 11).double()


def signed(x: int) -> int:
    """Return a whole number modulo 2**64 as a signed 64-bit integer."""
    return (x + (1 << 63)) % (1 << 64) - (1 << 63)


def request_seed(server: int, own: int) -> int:
    """Return the seed of a request's draws, signed 64 bits: of the server's seed and the request's own, whole numbers."""
    return int(mix(torch.tensor(signed(server)) + GOLDEN) + signed(own))
