"""Verification of drafts over a fixed-budget paged cache, in a few launches (docs/kernels.md)."""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
from kvpop_vllm.kernels.triton._serving_pages import MARKS, Step, view
from kvpop_vllm.kernels.triton._serving_scores import CELLS, ROWS
from kvpop_vllm.kernels.triton._tiles import DECODE, tile_of
from kvpop_vllm.kernels.triton._verify_attend import _attend_drafts
from kvpop_vllm.kernels.triton._verify_steps import (
    COUNTS,
    Staging,
    _advance,
    _collect,
    _draft_cells,
    _plan,
    _project_drafts,
    _stage,
)
from kvpop_vllm.kernels.triton.decode_step import (
    cache_of,
    check_step,
    floats,
    kernel_config,
    prefix_of,
    splits_of,
    weights_of,
)


def verify_step(
    q, k, v, pages, page_table, positions, first_tokens, drafts, budgets, *, rule, scale, gate_scores=None, prefix=None,
    keys=None, windows, sink_logits=None, out=None,
):  # fmt: skip
    """Implement :func:`kvpop_vllm.kernels.ops.verify_step`.

    As in decode_step, nothing waits for the device, launches depend on shapes and constants alone, requests out of
    order get NaN, and a position of -1 is padding. Drafts do not enter the pages: their victims are planned, and
    attention leaves these out. So no draft may leave the window: m is at most the rule's w, and a request with more
    drafts than its own window has room for is refused as one out of order is.

    Raises:
        NotImplementedError: a rule that reads attention, keeps queries or corrects outputs.
        ValueError: m exceeds the rule's w. Others as in decode_step.
    """
    # queries are stored by their row in the batch, which drafts of an earlier step have none in
    stores = rule.compression or rule.rounds
    keeps_queries = stores is not None and stores.queries > 0
    if rule.coupled or rule.moment_correction or keeps_queries:
        raise NotImplementedError(
            "verify_step in Triton takes no rule that reads attention, keeps queries or corrects outputs: use impl='reference'"
        )
    layout = pages.layout
    if not 1 <= layout.drafts <= rule.window:
        raise ValueError(f"verify_step in Triton takes 1 to w = {rule.window} drafts, got {layout.drafts}")
    weights, options = weights_of(rule.scorer, "verify_step")
    requests, heads, group = len(positions), k.shape[1], q.shape[1] // k.shape[1]
    check_step(q, k, v, pages, rule, weights, prefix, requests, rule.window, "verify_step")
    out = torch.zeros_like(q, memory_format=torch.contiguous_format) if out is None else out.zero_()
    lse = floats(q.device, *q.shape[:2])
    lse.fill_(-torch.inf)
    if not requests:
        return out, lse
    config, item = kernel_config(pages, page_table, q, rule, options), layout.dtype.itemsize
    before_score = (2 * layout.head_size * item + layout.draft_query_bytes) // 4
    before_positions = layout.block_slots * (2 * layout.head_size * item // 4 + 1)
    sizes = layout.draft_start, layout.draft_bytes, layout.region_bytes, item
    staging = Staging(layout.drafts, *sizes, before_score, before_positions)
    of_prefix = (None, None) if prefix is None else (prefix.tokens, prefix.biased)
    inputs = map(view, (q, k, v, gate_scores, positions, budgets, windows, keys, *of_prefix))
    flags = torch.empty(requests, heads, MARKS.value, dtype=torch.int32, device=q.device)
    counts = torch.empty(requests, heads, COUNTS.value, dtype=torch.int32, device=q.device)
    work = floats(q.device, requests * staging.drafts, heads, config.work)
    cache, before = cache_of(pages, page_table), prefix_of(prefix)
    step = Step(*inputs, cache, before, weights, rule.log_gamma, scale, out, lse, work, flags, sink_logits)
    new_k, new_v = (k.new_empty(requests * staging.steps, *k.shape[1:]) for _ in range(2))
    new_scores = None if gate_scores is None else floats(q.device, requests * staging.steps, heads)
    of_new = dict(zip(("k", "v", "gate_scores"), map(view, (new_k, new_v, new_scores)), strict=True))
    firsts, numbers = view(first_tokens), view(drafts)
    of_all = {"P": config, "S": staging, "launch_pdl": config.dependent, "num_warps": 4}
    exact = of_all | {"enable_fp_fusion": False}
    grid = 1, heads, requests
    _collect[grid](step, firsts, numbers, new_k, new_v, new_scores, counts, **of_all)
    _advance[grid](step._replace(**of_new), counts, **exact)
    if config.parts and (config.delayed or config.scorer != "mlstm"):
        lanes = requests * staging.drafts
        _project_drafts[triton.cdiv(lanes, ROWS.value), config.parts, heads](
            step, counts, firsts, numbers, work, lanes, **of_all
        )
    if config.scorer == "mlstm" and config.delayed:
        _draft_cells[triton.cdiv(config.values, CELLS.value), heads, requests](
            step, counts, firsts, numbers, work, **exact
        )
    gone = torch.empty(requests, heads, staging.drafts, dtype=torch.int32, device=q.device)
    _plan[grid](step, counts, firsts, numbers, work, gone, **exact)
    tile = tile_of(DECODE, config.wide, config.size)
    rows = max(tile.rows, triton.next_power_of_2(staging.steps * group))
    of_rows = replace(config, rows=rows)
    protected = 0 if prefix is None else before.table.shape[1] * config.slots
    splits, _ = splits_of(config, protected, requests * heads, q.device)
    values = tops = lse
    if splits > 1:
        shape = requests, heads, splits, rows
        values, tops = floats(q.device, *shape, config.size), floats(q.device, *shape, 2)
    _attend_drafts[splits, heads, requests](
        step, firsts, numbers, gone, values, tops, CUT=splits > 1, num_warps=tile.warps, num_stages=tile.stages,
        P=of_rows, S=staging, launch_pdl=config.dependent,
    )  # fmt: skip
    _stage[staging.drafts, heads, requests](step, counts, firsts, numbers, **of_all)
    return out, lse
