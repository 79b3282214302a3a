"""Ada-KV: SnapKV's votes, counted over all heads of a layer (Feng et al., 2024, arXiv 2407.11550)."""

from __future__ import annotations

from kvpop_vllm.policies.snapkv import SnapKV


class AdaKV(SnapKV):
    """:class:`SnapKV` with the allocator ``ada``: the heads of a layer divide ``H k`` long-range tokens by their votes.

    At every decision up to the first generated token the best ``H k`` of all heads are counted; a head may keep
    a fifth of k (the paper's safeguard alpha) and, of the rest, as many as it has among them. The paper does so once, after a
    prompt kept whole; here shares move with the prompt, at constant memory, and stay as they are after it. The allocator
    goes with other policies too (``--kv-allocator ada``), by their own scores; a tensor-parallel rank divides among its own
    heads.
    """

    name = "adakv"
    paper = "Feng et al. 2024, arXiv:2407.11550"
    cost = "as snapkv, and a selection over all heads of a layer every e tokens of the prompt"
    default_allocator = "ada"
