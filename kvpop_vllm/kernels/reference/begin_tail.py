"""Reference ``begin_tail`` in plain torch, one (request, head) after another."""

import torch

from kvpop_vllm.kernels.reference.decode_step import clear, take_in
from kvpop_vllm.kernels.reference.paging import HeadSlots, protected


def begin_tail(pages, page_table, prefix, *, rule):
    """Implement :func:`kvpop_vllm.kernels.ops.begin_tail`."""
    for r in range(len(page_table)):
        end = protected(prefix, r)
        if not end:
            continue
        begin = 0 if prefix.biased is None else int(prefix.biased[r])
        keys, values = prefix.gather(r, max(begin, end - rule.replay), end)
        for h in range(keys.shape[0]):
            weights, slots = rule.scorer.of_heads(slice(h, h + 1)), HeadSlots(pages, page_table[r, h], h, 0)
            state = slots.load_state(weights.state_floats)
            clear(state)
            for x in torch.cat([keys[h], values[h]], -1).float():
                take_in(state, x, weights)
            slots.store_state(state)
