"""Prefill of sequential rules: one program per request and KV head goes through its chunk, token after token.

It calls the phases of a decode step. They read what other threads of the program have written, which is right because:

- A barrier stands between any two phases of which one reads what the other writes. It orders the accesses to global
  memory of all threads of a program, which run on one multiprocessor and share its cache. Asynchronous copies
  (``cp.async``) are reads that are issued after the barrier.
- The loop over tokens is not pipelined (``num_stages=1``), so that nothing is read ahead of its token. Loops that load
  ahead write nothing that they read, and wait for all loads at their end.
- Triton hoists loads only out of loops that write nothing.
"""

from __future__ import annotations

import triton
import triton.language as tl
from kvpop_vllm.kernels.triton import _serving_scores as scores
from kvpop_vllm.kernels.triton._serving_attend import add_masses, attend, correct, finish
from kvpop_vllm.kernels.triton._serving_pages import element_at, position_of, tail_of
from kvpop_vllm.kernels.triton._serving_retain import add_products, retain

NOWHERE = tl.constexpr(2**30)
"""Offset of positions beyond those of any cache."""
TOGETHER = tl.constexpr(512)  # slots whose masses are formed together; each block waits for its loads


@triton.jit
def _steps(
    step,
    tokens, counts,  # [R], first token of each chunk after its prefix, and the number of these tokens
    right,  # [R, H] int32, 0 if the chunk does not start where the cache ends
    P: tl.constexpr,
):  # fmt: skip
    """Run the decode steps of a chunk's tokens for one head.

    Grid: 1, H, R. 2.1 MB of keys and values a token, from the L2 cache through one multiprocessor: 21 us a token.
    """
    h, r, heads = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64), tl.num_programs(1)
    work = step.work + (r * heads + h) * P.work
    first, begin = tl.load(element_at(tokens, r, 0)).to(tl.int64), position_of(step, r)
    begin += tl.where(tl.load(right + r * heads + h) != 0, 0, NOWHERE)  # no cache has seen so many tokens
    for i in tl.range(0, tl.load(element_at(counts, r, 0)), num_stages=1):
        row, q = first + i, begin + i
        tail = tail_of(step, r, h, q, P)
        if tail.since >= 0:
            if P.parts > 0:
                lane = tl.arange(0, scores.ROWS)  # a tile of products, of which one row is used
                one = tl.where(lane == 0, q, -1)
                for part in range(P.parts):
                    scores.project(step, work + 0 * lane, row + 0 * lane, r + 0 * lane, h, one, part, P)
                tl.debug_barrier()
            if P.scorer == "mlstm":
                for column in range(0, P.values, scores.CELLS):
                    scores.update_cells(step, work, row, r, h, q, column, P)
                tl.debug_barrier()
            if P.residual:
                if tail.since >= tail.budget:
                    for slot in range(0, tail.budget, scores.SLOTS):
                        scores.residuals(step, work, r, h, tail, slot, P)
                    tl.debug_barrier()
        victim = scores.victim_of(step, work, r, h, q, P)
        used, evicted, gone, protected = retain(step, work, victim, row, r, h, q, P)
        tl.debug_barrier()
        if P.moments:
            if gone > 0:
                for channel in range(0, P.size, scores.DEPTH):
                    add_products(step, work, r, h, evicted, channel, P)
        head = (row * heads + h) * P.group
        sums = attend(step, work, row, r, h, used, protected, 0, 1, P)
        finish(step, work, head, h, sums, used, protected, P)
        tl.debug_barrier()
        if P.uses_moment_correction:
            for column in range(0, P.size, scores.COLUMNS):
                correct(step, work, head, row, r, h, evicted, column, P)
        if P.masses:
            for slot in range(0, used, TOGETHER):
                add_masses(step, work, head, r, h, used, slot, P, TOGETHER)
        tl.debug_barrier()
