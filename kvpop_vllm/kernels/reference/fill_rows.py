"""Reference ``fill_rows`` in plain torch."""

from __future__ import annotations

import torch

from kvpop_vllm.cache.device_rows import NULL_BLOCK, PADDING, DeviceRows


def fill_rows(rows: DeviceRows, count, lengths, block_table, slot_mapping, firsts=None, decodes=None):
    """Implement :func:`kvpop_vllm.kernels.ops.fill_rows`."""
    size, state_blocks, table = rows.layout.block_slots, rows.layout.state_blocks, block_table[:count]
    prefixes, places, decoded = rows.numbers["prefix"][:count], slot_mapping[:count], None
    steps = torch.arange(1 + rows.layout.drafts, device=table.device)
    starts, drafts = lengths[:count] - 1, 0
    if firsts is not None:
        tokens, counts = firsts[:count].long(), firsts[1 : count + 1] - firsts[:count]
        starts = lengths[:count] - counts
        decoded = torch.arange(count, device=table.device) < (count if decodes is None else decodes)
        places = slot_mapping[tokens.clamp_max(len(slot_mapping) - 1)]
        drafts = torch.where(decoded, counts - 1, -1)
        starts = torch.where((counts > 0) & (decoded | (starts > prefixes)), starts, PADDING)
    left = torch.zeros_like(prefixes)
    if rows.compression is not None:
        left = rows.numbers["left"][:count]
        starts = starts - rows.numbers["shift"][:count]
        rows.compressed[:count].copy_((left > 0) & (starts >= prefixes))
    tails = _columns(table, _blocks(prefixes, size) + _blocks(left, size), rows.table.shape[1])
    block = tails[:, state_blocks]
    if rows.protects:
        ahead = _blocks(left * rows.compressed[:count], size)  # before the blocks of slots that are made
        rows.prefix_table[:count].copy_(_columns(table, ahead, rows.prefix_table.shape[1]))
        positions = starts.unsqueeze(1) + steps
        inside = positions < prefixes.unsqueeze(1)
        prefix_blocks = table.gather(1, (positions // size).clamp(0, table.shape[1] - 1).long())
        block = torch.where(inside[:, 0], prefix_blocks[:, 0], block)
    real = (places >= 0) & (block != NULL_BLOCK)
    positions = ends = rows.positions[:count].copy_(torch.where(real, starts, PADDING))
    if firsts is not None:
        rows.tokens[:count].copy_(tokens)
        drafts = rows.drafts[:count].copy_(torch.where(positions < 0, -1, drafts))
        ends = positions + drafts.clamp_min(0)
    in_use = torch.arange(tails.shape[1], device=table.device) < _blocks_in_use(rows, positions, ends).unsqueeze(1)
    rows.table[:count].copy_(torch.where(in_use, tails, NULL_BLOCK))
    if rows.protects and firsts is not None:
        inside &= (steps <= (ends - positions).unsqueeze(1)) & (decoded & (positions >= 0)).unsqueeze(1)
        rows.written[:count].copy_(torch.where(inside, tokens.unsqueeze(1) + steps, 0))
        rows.token_blocks[:count].copy_(torch.where(inside, prefix_blocks, NULL_BLOCK))
        rows.token_slots[:count].copy_(torch.where(inside, (starts.unsqueeze(1) + steps) % size, 0))


def _blocks(tokens: torch.Tensor, size: int) -> torch.Tensor:
    """Return the number of blocks of ``size`` slots that hold so many tokens each."""
    return (tokens + size - 1) // size


def _columns(table: torch.Tensor, firsts: torch.Tensor, width: int) -> torch.Tensor:
    """Return ``width`` entries of each row of ``table [R, W]`` from column ``firsts [R]`` on, its last one beyond its end."""
    columns = firsts.unsqueeze(1) + torch.arange(width, device=table.device)
    return table.gather(1, columns.clamp_max(table.shape[1] - 1))


def _blocks_in_use(rows: DeviceRows, positions: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Return an upper bound ``[R]`` of the blocks of state and slots of requests up to their tokens at ``ends [R]``."""
    count, state_blocks = len(positions), rows.layout.state_blocks
    since = ends - rows.numbers["prefix"][:count]
    budgets, heads = rows.numbers["budget"][:count, :1], torch.ones(1, dtype=torch.int64, device=positions.device)
    if rows.shared_budgets is not None:
        budgets, heads = rows.shared_budgets
    pages = _blocks((since + 1).unsqueeze(1).minimum(budgets), rows.layout.block_slots) + state_blocks
    # all heads share the regions of a block, so that only the sum is rounded up
    blocks = torch.where(since < 0, 0, _blocks((pages * heads).sum(1), heads.sum()))
    if (compression := rows.compression) is None:
        return blocks
    if compression.adaptive_head_budgets:
        blocks = torch.where(rows.compressed[:count] & (positions >= 0), rows.table.shape[1], blocks)
    votes = (since < 0) & (since >= -compression.queries) & (positions >= 0)  # its query is stored
    return torch.where(votes, state_blocks, blocks)
