"""Ada-KV: SnapKV whose heads divide a layer's slots by votes (Feng et al., 2024, arXiv 2407.11550)."""

from kvpop_vllm.policies.snapkv import SnapKV


class AdaKV(SnapKV):
    """:class:`SnapKV` with the allocator ``ada``.

    At the prompt's end, a layer retains the tokens with the most votes over all its heads. Every head keeps
    at least a fifth of the budget, sinks and window included. The budgets of the heads do not change after
    that. If the prompt fits the budget, all heads have the mean budget.
    """

    name = "adakv"
    paper = "Feng et al. 2024, arXiv:2407.11550"
    state = "32 x G x D + 1 float32, G query heads a KV head"
    default_allocator = "ada"
