"""Counter-based random numbers: independent of chunking, batch, rank and implementation.

``mix`` is the finalizer of SplitMix64 (Steele, Lea and Flood 2014), a bijection of 64-bit words; sums and
products wrap. With G = 0x9E3779B97F4A7C15, the draw of token t for an eviction at position q, for request r,
layer l and KV head h, is::

    key = mix(mix(seed_r + G) + (l << 32 | h))        per request and head
    draw = mix(mix(key + q) + t * G) >> 11            53 bits, exact in float64

The C++ and Triton kernels compute draws from keys by the same formula.
"""

import torch

GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
"""G as a signed 64-bit integer."""
_FIRST, _SECOND = 0xBF58476D1CE4E5B9 - (1 << 64), 0x94D049BB133111EB - (1 << 64)


def mix(x: torch.Tensor) -> torch.Tensor:
    """Return the finalizer of SplitMix64 of int64 words, interpreted as unsigned."""
    x = (x ^ _shift(x, 30)) * _FIRST
    x = (x ^ _shift(x, 27)) * _SECOND
    return x ^ _shift(x, 31)


def _shift(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the logical right shift of int64 words."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def head_lanes(layer: int, heads: slice, total: int) -> torch.Tensor:
    """Return the lanes ``l << 32 | h``, ``[H]`` int64, of a layer's KV heads.

    Args:
        layer: l, within the whole model.
        heads: KV heads h, a slice of the model's.
        total: number of KV heads of the model.
    """
    return (layer << 32) + torch.arange(*heads.indices(total))


def head_keys(seeds: torch.Tensor, lanes: torch.Tensor) -> torch.Tensor:
    """Return the keys ``[R, H]`` int64 of requests with ``seeds [R]`` and heads with ``lanes [H]``."""
    return mix(mix(seeds + GOLDEN).unsqueeze(-1) + lanes)


def draw(keys: torch.Tensor, q: torch.Tensor | int, t: torch.Tensor) -> torch.Tensor:
    """Return the draws of tokens t at positions q, float64 from 0 to 2**53 - 1. Arguments are broadcast.

    Args:
        keys: int64, from :func:`head_keys`.
        q: position of the eviction.
        t: int64, positions of the tokens.
    """
    return _shift(mix(mix(keys + q) + t * GOLDEN), 11).double()


def signed(x: int) -> int:
    """Return an integer modulo 2**64 as a signed 64-bit integer."""
    return (x + (1 << 63)) % (1 << 64) - (1 << 63)


def request_seed(server: int, request: int) -> int:
    """Return the seed of a request's draws as a signed 64-bit integer.

    Args:
        server: seed of the server, any integer.
        request: seed of the request, any integer.
    """
    return int(mix(torch.tensor(signed(server)) + GOLDEN) + signed(request))
