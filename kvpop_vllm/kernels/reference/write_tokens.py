"""Reference ``write_tokens`` in plain torch."""

from __future__ import annotations


def write_tokens(k, v, pages, tokens, blocks, slots):
    """Implement :func:`kvpop_vllm.kernels.ops.write_tokens`."""
    pages.write(k[tokens], v[tokens], blocks, slots)
