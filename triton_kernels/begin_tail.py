"""Triton ``begin_tail``: the chunkwise mLSTM kernels of prefill build the state.

It does not wait for the device.
"""

from __future__ import annotations

import torch
from kvpop_vllm.kernels.triton._prefill_plan import PIECE, ROWS
from kvpop_vllm.kernels.triton._prefill_scores import mlstm_inputs
from kvpop_vllm.kernels.triton.delayed_mlstm import last_state

from kvpop_vllm.kernels.chunks import send


@torch.no_grad()
def begin_tail(pages, page_table, prefix, *, rule):
    """Implement :func:`kvpop_vllm.kernels.ops.begin_tail`.

    Requests are processed together, as many as :data:`PIECE` tokens allow.
    """
    device, ends = page_table.device, prefix.tokens.tolist()
    made = [0] * len(ends) if prefix.biased is None else prefix.biased.tolist()
    counts_of = [min(end - first, rule.replay) for end, first in zip(ends, made, strict=True)]
    begun = [r for r, end in enumerate(ends) if end]
    width = max([1, *counts_of])  # without tokens the state is empty
    some = max(1, PIECE // max(ROWS, width))
    for first in range(0, len(begun), some):
        chosen = begun[first : first + some]
        r, end, counts = send([chosen, *([of[i] for i in chosen] for of in (ends, counts_of))], device).unbind()
        counts = counts.unsqueeze(1)
        index = torch.arange(width, device=device)
        token = end.unsqueeze(1) - counts + index.minimum(counts - 1)
        slots = prefix.pages.layout.block_slots
        blocks = prefix.table[r].gather(1, token // slots).long()
        tokens = torch.cat([x[blocks, :, token % slots] for x in (prefix.pages.k, prefix.pages.v)], -1)
        inputs = mlstm_inputs(rule.scorer, tokens.flatten(0, 1).transpose(0, 1), (index >= counts).flatten())
        state = last_state(*(x.unflatten(1, (len(chosen), width)).flatten(0, 1) for x in inputs))
        places = page_table[r, :, : pages.layout.state_blocks].long().transpose(0, 1).flatten(0, 1)
        heads = torch.arange(page_table.shape[1], device=device).repeat_interleave(len(chosen))
        pages.store_states(places, heads, tuple(x.unsqueeze(0) for x in state))
