"""Empty pages for engines without a block allocator."""

import torch

from kvpop_vllm.cache.pages import PageLayout, Pages


def allocate_pages(
    layout: PageLayout,
    budget: int,
    *,
    length: int | None = None,
    requests: int = 1,
    device: torch.device | str = "cpu",
) -> tuple[Pages, torch.Tensor]:
    """Return empty pages of one layer for R requests, and their block table.

    Args:
        layout: page layout of the layer.
        budget: B, of the head with the most.
        length: longest sequence of a request, which may need less than B. None reserves B.
        requests: R.
        device: device of the pages.

    Returns:
        The pages, zeroed, and the table ``[R, H, P]`` int32: state blocks, slot blocks.
    """
    blocks = layout.blocks(budget if length is None else max(1, length), budget)
    raw = torch.zeros(requests * blocks, layout.num_kv_heads, layout.region_bytes, dtype=torch.uint8, device=device)
    rows = torch.arange(requests * blocks, dtype=torch.int32, device=device).view(requests, blocks)
    return layout.view(raw), rows.unsqueeze(1).expand(-1, layout.num_kv_heads, -1)
