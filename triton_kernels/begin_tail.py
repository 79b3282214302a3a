"""Triton ``begin_tail``: the chunkwise mLSTM kernels of prefill build the state.

It does not wait for the device.
"""

from __future__ import annotations

import torch
from kvpop_vllm.kernels.triton._prefill_scores import Scores
from kvpop_vllm.kernels.triton.delayed_mlstm import last_state


@torch.no_grad()
def begin_tail(pages, page_table, prefix, *, rule):
    """Implement :func:`kvpop_vllm.kernels.ops.begin_tail`.

    Requests are processed one by one, so workspaces hold ``rule.replay`` tokens of all heads.
    """
    scores, states = Scores(rule), page_table[..., : pages.layout.state_blocks].long()
    heads = torch.arange(page_table.shape[1], device=page_table.device)
    for r, end in enumerate(prefix.tokens.tolist()):
        if end:
            inputs = scores.inputs(*prefix.gather(r, max(0, end - rule.replay), end))
            pages.store_states(states[r], heads, last_state(*inputs))
