"""PyramidKV: SnapKV with more tokens in lower layers (Cai et al., 2024, arXiv 2406.02069)."""

from kvpop_vllm.policies.snapkv import SnapKV


class PyramidKV(SnapKV):
    """:class:`SnapKV` with the allocator ``pyramid``.

    Lower layers retain more of the prompt. The last layer has a twentieth of the mean number of long-range
    slots.
    """

    name = "pyramidkv"
    paper = "Cai et al. 2024, arXiv:2406.02069"
    default_allocator = "pyramid"
