"""PyramidKV: SnapKV with more tokens in lower layers (Cai et al., 2024, arXiv 2406.02069)."""

from __future__ import annotations

from kvpop_vllm.policies.snapkv import SnapKV


class PyramidKV(SnapKV):
    """:class:`SnapKV` with the allocator ``pyramid``: lower layers keep more of the prompt, the last one a twentieth of the mean."""

    name = "pyramidkv"
    paper = "Cai et al. 2024, arXiv:2406.02069"
    default_allocator = "pyramid"
