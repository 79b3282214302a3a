"""Triton ``begin_tail``: the chunkwise mLSTM kernels of prefill build the state, without waiting for the device."""

from __future__ import annotations

import torch
import triton
from kvpop_vllm.kernels.triton._prefill_plan import PIECE, ROWS
from kvpop_vllm.kernels.triton.delayed_mlstm import states_of_segments

from kvpop_vllm.cache.chunks import send


@torch.no_grad()
def begin_tail(pages, page_table, prefix, *, rule):
    """Implement :func:`kvpop_vllm.kernels.ops.begin_tail`.

    Requests are processed together, as many as :data:`PIECE` tokens allow.
    """
    device, ends = page_table.device, prefix.tokens.tolist()
    biased = [0] * len(ends) if prefix.biased is None else prefix.biased.tolist()
    counts_of = [min(end - first, rule.replay) for end, first in zip(ends, biased, strict=True)]
    begun = [r for r, end in enumerate(ends) if end]
    chunks = triton.cdiv(max([1, *counts_of]), ROWS)  # without tokens the state is empty
    batch, slots = max(1, PIECE // (chunks * ROWS)), prefix.pages.layout.block_slots
    index, heads = (torch.arange(n, device=device) for n in (chunks * ROWS, page_table.shape[1]))
    for first in range(0, len(begun), batch):
        chosen = begun[first : first + batch]
        r, end, counts = send([chosen, *([column[i] for i in chosen] for column in (ends, counts_of))], device).unbind()
        counts = counts.unsqueeze(1)
        token = end.unsqueeze(1) - counts + index.minimum(counts - 1)
        blocks = prefix.table[r].gather(1, token // slots).long()
        tokens = torch.cat([x[blocks, :, token % slots] for x in (prefix.pages.k, prefix.pages.v)], -1)
        tokens, none = tokens.flatten(0, 1).transpose(0, 1), (index >= counts).flatten()
        before = torch.arange(len(chosen) + 1, dtype=torch.int32, device=device) * chunks
        state = states_of_segments(rule.scorer, tokens, none, before)
        blocks = page_table[r, :, : pages.layout.state_blocks].long().transpose(0, 1).flatten(0, 1)
        pages.store_states(blocks, heads.repeat_interleave(len(r)), state)  # a head's requests together
