"""Ada-KV: SnapKV whose heads divide a layer's budget among them (Feng et al., 2024, arXiv 2407.11550)."""

from __future__ import annotations

from kvpop_vllm.policies.snapkv import SnapKV


class AdaKV(SnapKV):
    """:class:`SnapKV` with the allocator ``ada``: at the prompt's end a layer's tokens of most votes stay, whichever heads they are of.

    Every head keeps a fifth of the budget, its window counted. A head's share does not change afterwards; that of a prompt that fits
    its budget is the mean.
    """

    name = "adakv"
    paper = "Feng et al. 2024, arXiv:2407.11550"
    state = "32 x G x D + 1 float32, G query heads a KV head"
    default_allocator = "ada"
