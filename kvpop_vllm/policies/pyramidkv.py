"""PyramidKV: SnapKV's choice, more tokens in lower layers (Cai et al., 2024, arXiv 2406.02069)."""

from __future__ import annotations

from kvpop_vllm.policies.snapkv import SnapKV


class PyramidKV(SnapKV):
    """:class:`SnapKV` with the allocator ``pyramid``: B is what a head holds on average over layers.

    The allocator goes with any other policy too (``--kv-allocator pyramid``), and this one with another.
    """

    name = "pyramidkv"
    paper = "Cai et al. 2024, arXiv:2406.02069"
    default_allocator = "pyramid"
