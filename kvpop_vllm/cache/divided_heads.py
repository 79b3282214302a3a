"""Heads that divide a layer's slots at the end of a prompt, and their pages (DESIGN "Compression at a prompt's end")."""

import torch

from kvpop_vllm.cache.pages import PageLayout, Pages, cdiv
from kvpop_vllm.cache.shares import EqualHeads, page_numbers
from kvpop_vllm.requests import Compression


class SharesByVotes(EqualHeads):
    """Heads that divide a layer's slots when the prompt is compressed (Ada-KV, arXiv:2407.11550).

    A request holds as many blocks of a layer as with equal heads, and up to one more. Regions are assigned within one
    layer. The budget of each head is stored in its state, so that the page table can be derived from the blocks.

    Args:
        blocks: pages of the layer, indexed by block.
        compression: way in which prompts are compressed.
        budget: B, the mean budget of the heads.
    """

    by_layer = True

    def __init__(self, blocks: Pages, compression: Compression, budget: int):
        self.pages, self.compression, self.budget = blocks.by_region(), compression, budget
        layout = blocks.layout
        self.blocks = layout.state_blocks + divided_blocks(layout.num_kv_heads, budget, layout.block_slots)

    def place(self, layer, tails, compressed, budgets, windows):
        """Return what :meth:`EqualHeads.place` does.

        If the prompt of a request has not been compressed yet, its heads are equal and all its blocks are listed.
        Where ``compressed`` is a tensor, the host does not wait for it: a head has room for the slots of all.
        """
        layout, device = self.pages.layout, tails.device
        heads = torch.arange(layout.num_kv_heads, device=device)
        rows = tails.unsqueeze(1) * layout.num_kv_heads + heads.unsqueeze(1)
        on_host = not isinstance(compressed, torch.Tensor)
        if on_host and not any(compressed):  # equal heads: all that is held
            shares = torch.full(rows.shape[:2], self.budget, dtype=torch.int32, device=budgets.device)
            return shares, rows[..., : self.blocks].int()
        divided = torch.as_tensor(compressed, device=device).unsqueeze(1)
        # heads of other requests have stored nothing, and their values are replaced below
        stored, _ = load_page_table(self.pages, rows, self.compression, 1)
        shares = torch.where(divided, stored, self.budget)
        largest = int(shares.max()) if on_host else layout.num_kv_heads * self.budget
        width = max(self.blocks, layout.blocks(largest, largest))
        _, table = build_page_table(layout, rows, shares, width)
        plain = rows[..., torch.arange(width, device=device).clamp_max(rows.shape[2] - 1)].int()
        return shares.to(budgets.device), torch.where(divided.unsqueeze(2), table, plain)


def store_budgets(pages: Pages, row: torch.Tensor, budgets: torch.Tensor, compression: Compression) -> None:
    """Write ``budgets [H]`` to a request's state.

    Args:
        pages: pages of the layer, indexed by region.
        row: ``[H, W]`` regions of the request's blocks, as for equal heads.
        budgets: B of each head.
        compression: way in which prompts are compressed, which determines the offset in the state.
    """
    column, word = _place(pages.layout, compression)
    heads = torch.arange(len(row), device=row.device)
    pages.put(pages.state, (row[:, column].long(), heads, torch.full_like(heads, word)), budgets.float())


def load_page_table(
    pages: Pages, rows: torch.Tensor, compression: Compression, width: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the budgets ``[R, H]`` and pages ``[R, H, P]``, int32, of requests with compressed prompts.

    Args:
        pages: pages of the layer, indexed by region.
        rows: ``[R, H, W]`` regions of the requests' blocks, as for equal heads.
        compression: way in which prompts are compressed, which determines the offset in the state.
        width: P, by default that of the head with the most pages.
    """
    column, word = _place(pages.layout, compression)
    words = pages.state[:, 0][rows[:, :, column].long(), word]  # regions of all heads are the same memory
    limit = rows.shape[1] * rows.shape[2] * pages.layout.block_slots  # padding rows may hold any value
    return build_page_table(pages.layout, rows, words.nan_to_num(1).clamp(1, limit).int(), width)


def build_page_table(
    layout: PageLayout, rows: torch.Tensor, budgets: torch.Tensor, width: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``budgets [R, H]`` and the pages ``[R, H, P]`` int32 of heads with these budgets.

    Args:
        layout: page layout of the layer.
        rows: as in :func:`load_page_table`.
        budgets: ``[R, H]`` int32.
        width: as in :func:`load_page_table`.
    """
    full = layout.state_blocks + (budgets + layout.block_slots - 1) // layout.block_slots
    heads, number = rows.shape[1], page_numbers(full, int(full.max()) if width is None else width).transpose(1, 2)
    columns = (number // heads).clamp_max(rows.shape[2] - 1)
    request = torch.arange(len(rows), device=rows.device).view(-1, 1, 1)
    return budgets, rows[request, number % heads, columns].int()


def _place(layout: PageLayout, compression: Compression) -> tuple[int, int]:
    """Return the state page that holds a head's budget, and the offset within that page."""
    return divmod(compression.state_floats(layout.head_size) - 1, layout.region_bytes // 4)


def divided_blocks(heads: int, budget: int, size: int) -> int:
    """Return the largest number of blocks of heads that divide ``heads * budget`` slots among them.

    The last page of each head may be partially filled.

    Args:
        heads: H.
        budget: mean budget per head.
        size: slots per block.
    """
    return cdiv(heads * (budget + size - 1) // size, heads)
