"""`decode_step` on a GPU: correctness in low precision, and times at Qwen3-8B's shapes.

The floor of a time is the bytes that a step has to move at the bandwidth of a large copy. For attention these
are the keys and values in use. For scorer and eviction they are the state, read and written, and the scores
and positions among which a victim is searched.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from full_pages import empty_pages, fill
from gpu import HEADS, KV_HEADS, SIZE, Bench, Case
from gpu_clock import bandwidth, graph_of, milliseconds
from gpu_exact import serve_right
from kernels.factories import random_rule, random_scorer

from kvpop_vllm.kernels import ops
from kvpop_vllm.kernels.ops import RetentionRule
from kvpop_vllm.kernels.pages import PageLayout, Prefix, cdiv

LAYERS = 36
SINKS, WINDOW, SEEN = 4, 256, 16384
PROTECTED = 8192
"""Tokens of a prompt that all requests of a step share."""
MOST_BYTES = 12 << 30
"""Maximum bytes of pages on any GPU."""

RIGHT = "recency", "key norm", "threshold", "mlp", "mlstm", "mlstm, corrected", "mean mass", "moments"
BEHIND = "recency", "key norm", "mlstm", "mlstm read at once", "mean mass"
"""Cases behind a prefix that a chunk begins in, and behind one that a chunk ends in."""
FEW, FEW_BEHIND = ("recency", "mlstm", "moments"), ("mlstm",)
"""Cases that run with interpreted kernels or under a sanitizer."""


def cases(bench: Bench) -> Iterator[Case]:
    """Yield the cases of the section."""
    steps, own = [0] * 70, dict(requests=3)
    chunks, behind = [61, 25, *[0] * 8], dict(protected=(70,), replay=48)
    if bench.small:
        steps, own = steps[:19], dict(requests=1, heads=1, size=32, topk=12)
        chunks, behind = [9, *chunks[1:]], dict(protected=(18,), heads=1, size=32, group=1)
    for name in FEW if bench.few else RIGHT:
        yield Case(f"decode_step is right, {name}", partial(serve_right, name=name, steps=steps, **own))
    for name in FEW_BEHIND if bench.few else BEHIND:
        run = partial(serve_right, name=name, steps=chunks, **behind)
        yield Case(f"a prefix and its tail are right, {name}", run)
    needs = tuple(f"decode_step is right, {name}" for name in ("mlstm", "recency"))
    batches = [(budget, 1 << i, 0) for budget in (2048, 4096) for i in range(9)]
    for budget, requests, protected in (*batches, *((2048, requests, PROTECTED) for requests in (1, 16, 64))):
        behind = f", behind {protected} shared tokens" if protected else ""
        times = partial(step_times, budget=budget, requests=requests, protected=protected)
        yield Case(f"decode_step, B {budget}, batch {requests}{behind}", times, needs)


def step_times(bench: Bench, budget: int, requests: int, protected: int) -> Iterator[dict]:
    """Yield the time of a layer's step with recency alone, which is attention, and with KVpop's scorer.

    The difference is the cost of scores and evictions.

    Args:
        bench: device and dtype.
        budget: B.
        requests: R.
        protected: tokens of a prefix that all requests share; in the floor each request reads all of them.
    """
    draw = torch.Generator().manual_seed(0)
    kvpop = random_rule(random_scorer("mlstm", KV_HEADS, SIZE, draw, skip=True), KV_HEADS, SINKS, WINDOW, draw)
    attention, whole = (layer_step(bench, rule, budget, requests, protected) for rule in (recency(), kvpop))
    keys = requests * KV_HEADS * (budget + protected) * 2 * SIZE * bench.dtype.itemsize
    state = requests * KV_HEADS * 4 * (2 * kvpop.state_floats(SIZE) + 2 * budget)
    yield bench.row("attention, a layer", attention, "ms", keys / bandwidth())
    yield bench.row("kvpop, a layer", whole, "ms", (keys + state) / bandwidth())
    yield bench.row("scorer and eviction, a layer", whole - attention, "ms", state / bandwidth())


def recency() -> RetentionRule:
    """Return a rule that keeps the most recent tokens."""
    return RetentionRule(SINKS, WINDOW, torch.full((KV_HEADS,), -1.0, dtype=torch.float64))


def layer_step(bench: Bench, rule: RetentionRule, budget: int, requests: int, protected: int) -> float:
    """Return the milliseconds of a layer's step in a CUDA graph of enough layers to exceed the GPU's cache.

    The requests have seen :data:`SEEN` tokens.

    Raises:
        AssertionError: outputs are not finite, as behind a wrong start.
    """
    rule, layout = rule.to(bench.device), PageLayout(KV_HEADS, SIZE, bench.dtype, state_floats=rule.state_floats(SIZE))
    ahead = cdiv(protected, layout.block_slots)
    own = requests * layout.blocks(budget, budget)
    size = (own + ahead) * KV_HEADS * layout.region_bytes
    layers = []
    with torch.device(bench.device):
        for _ in range(max(1, min(LAYERS, MOST_BYTES // size, cdiv(1 << 30, size)))):
            pages, table = empty_pages(layout, requests, budget, ahead)
            fill(pages, table, rule, budget, SEEN)
            shared = (own + torch.arange(ahead, dtype=torch.int32)).expand(requests, -1)
            prefix = Prefix(pages, shared, torch.full((requests,), protected)) if protected else None
            layers.append((pages, table, prefix))
        positions = torch.full((requests,), SEEN)
        budgets = torch.full((requests, KV_HEADS), budget, dtype=torch.int32)
        tokens = [torch.randn(requests, heads, SIZE, dtype=bench.dtype) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    out = torch.empty_like(tokens[0])

    def step():
        for pages, table, prefix in layers:
            place = pages, table, positions, budgets
            own, _ = ops.decode_step(*tokens, *place, rule=rule, scale=SIZE**-0.5, prefix=prefix, impl="triton")
        out.copy_(own)
        positions.add_(1)

    time = milliseconds(graph_of(step)) / len(layers)
    assert bool(out.isfinite().all()), "outputs are not finite"
    return time
