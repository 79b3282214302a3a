"""`prefill_chunk` on a GPU: correctness in low precision, and times at Qwen3-8B's shapes.

A prompt of 16,384 tokens is timed beside SDPA and FlexAttention. A rule whose tokens have decays of their own
and a rule that goes token by token are timed as well.

SDPA attends to all tokens before each query. FlexAttention gets the mask of the tokens that the policy keeps.
The floor of attention is SDPA's time multiplied by the share of logits that is visible.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial
from unittest.mock import patch

import torch
from gpu import HEADS, KV_HEADS, SIZE, Bench, Case
from gpu_clock import bandwidth, paired, seconds
from gpu_exact import Comparison
from gpu_training import check_same, compiled_flex, dense, visible_share
from kernels.factories import random_rule, random_scorer

from kvpop_vllm.kernels import ops
from kvpop_vllm.kernels.ops import RetentionRule
from kvpop_vllm.kernels.pages import PageLayout

SINKS, WINDOW, LENGTH = 4, 256, 16384
CHUNK, ROUNDS = 256, 3
"""Tokens of a chunk that is processed token by token, and number of chunks whose median is taken."""

RIGHT = {
    "recency": dict(case="none", sinks=0, window=1, unequal=True, seed=2),
    "linear": dict(case="linear", group=4, size=128),
    "mlstm": dict(case="mlstm-norm-skip", group=4, size=128),
    "mlstm, heads of 80": dict(case="mlstm", group=3, size=80),
    "own decays": dict(case="gate_scores-ages", unequal=True, seed=1),
    "mean mass": dict(case="mass-mean", group=3),
    "moments": dict(case="moment-corrected"),
}
FEW = "mlstm", "own decays"
"""Cases that run with interpreted kernels or under a sanitizer."""


def prefill_kernels(bench: Bench) -> Iterator[Case]:
    """Yield cases; see :data:`gpu.Section`."""
    right = "prefill_chunk is right, {}".format
    for name in FEW if bench.few else RIGHT:
        yield Case(right(name), partial(chunk_right, name=name))
    plain = right("linear"), right("mlstm"), right("recency")
    for budget in (2048, 4096):
        yield Case(f"prefill_chunk, S {LENGTH}, B {budget}", partial(prefill_times, budget=budget), plain)
    for name, times in {"own decays": ages_times, "mean mass": mass_times}.items():
        yield Case(f"prefill_chunk, {name}, B 2048", partial(times, budget=2048), (*plain, right(name)))


def chunk_right(bench: Bench, name: str) -> Iterator[dict]:
    """Check a prompt in small pieces against the float64 loop and the reference.

    After each chunk the retained tokens must be those of the float64 loop, none of whose decisions may be
    close. Outputs must be as good as the reference's in the same precision.
    """
    from kvpop_vllm.kernels.triton import _prefill_attend, prefill_chunk

    reduced = dict(heads=1, size=32, group=2) if bench.small else {}
    both, start = Comparison(bench, dict(requests=1) | RIGHT[name] | reduced), 0
    p, chunks = both.p, (17, 8) if bench.small else (37, 1, 60, 22)
    pieces = patch.multiple(prefill_chunk, PIECE=16), patch.multiple(_prefill_attend, LIST_BYTES=4 * 2 * 64)
    for count in chunks:
        q, k, v = p.inputs(range(count))
        reference = both.run_on(both.reference, ops.prefill_chunk, start, q, k, v, rule=p.rule, impl="reference")
        both.results["reference"].append(reference)
        for i in range(count):
            close = both.exact_step(start + i, *(x[i : i + 1] for x in (q, k, v)))
            assert not close, f"close decision at {start + i}: take another seed"
        with pieces[0], pieces[1]:
            both.results["kernel"].append(both.run(ops.prefill_chunk, start, q, k, v))
        start += count
        both.check_sets(start - 1)
    yield bench.row("chunks with equal sets", len(chunks), "count")
    yield from both.outputs()


def prefill_times(bench: Bench, budget: int) -> Iterator[dict]:
    """Yield times of a layer's prompt in one chunk, beside attention to all tokens and to the kept tokens.

    The chunk is timed with given scores, which is ordering and attention alone, and with KVpop's scorer.
    """
    draw = torch.Generator().manual_seed(0)
    rules = {
        "given scores": RetentionRule(SINKS, WINDOW, _no_decay(), scorer=ops.GateScore()),
        "kvpop": random_rule(random_scorer("mlstm", KV_HEADS, SIZE, draw, skip=True), KV_HEADS, SINKS, WINDOW, draw),
    }
    tokens = _tokens(bench, draw)
    gate_scores = torch.randn(LENGTH, KV_HEADS, generator=draw).to(bench.device)
    runs = {what: _reader(bench, rule, budget, tokens, gate_scores) for what, rule in rules.items()}
    topk = budget - SINKS - WINDOW
    order = ops.running_topk(gate_scores.T[None], sinks=SINKS, window=WINDOW, topk=topk, impl="triton")
    flex, rows = compiled_flex(*order, LENGTH, WINDOW), [x.transpose(0, 1).unsqueeze(0) for x in tokens]
    runs |= {"SDPA": lambda: dense(*rows), "FlexAttention": lambda: flex(*rows)}
    check_same("prefill_chunk", runs["given scores"](), runs["FlexAttention"]()[0].transpose(0, 1))
    assert bool(runs["kvpop"]().isfinite().all()), "kvpop: outputs are not finite"
    times = paired(runs)
    for name, value in times.items():
        floor = 1e3 * times["SDPA"] * visible_share(LENGTH, budget) if name in rules else None
        yield bench.row(f"{name}, a layer", 1e3 * value, "ms", floor)
    rest = 1e3 * (times["kvpop"] - times["given scores"])
    yield bench.row("scorer, a layer", rest, "ms")


def ages_times(bench: Bench, budget: int) -> Iterator[dict]:
    """Yield the time of a layer's prompt in one chunk, with tokens that have decays of their own."""
    draw = torch.Generator().manual_seed(0)
    rule, tokens = RetentionRule(SINKS, WINDOW, _no_decay(), scorer=ops.GateScore(ages=True)), _tokens(bench, draw)
    gate_scores = -torch.exp(torch.randn(LENGTH, KV_HEADS, generator=draw) - 3).to(bench.device)
    read = _reader(bench, rule, budget, tokens, gate_scores)
    assert bool(read().isfinite().all()), "outputs are not finite"
    yield bench.row(f"a layer, S {LENGTH}", 1e3 * seconds(read, ROUNDS), "ms")


def mass_times(bench: Bench, budget: int) -> Iterator[dict]:
    """Yield the time of a token in consecutive chunks under mean attention mass.

    Every token evicts one. The host's launches count where they take longer than the GPU. The floor is the
    bytes that a token reads: keys, values, scores and positions of all retained tokens.
    """
    starts = itertools.count(budget, CHUNK)
    rule = RetentionRule(SINKS, WINDOW, _no_decay(), scorer=ops.AttentionMass(mean=True))
    read = _reader(bench, rule, budget, _tokens(bench, torch.Generator().manual_seed(0)))

    def chunk() -> torch.Tensor:
        return read(next(starts), CHUNK)

    read(0, budget)
    assert bool(chunk().isfinite().all()), "outputs are not finite"
    floor = KV_HEADS * budget * (2 * SIZE * bench.dtype.itemsize + 2 * 4) / bandwidth()
    yield bench.row("a token, a layer", 1e3 * seconds(chunk, ROUNDS) / CHUNK, "ms", 1e3 * floor)


def _no_decay() -> torch.Tensor:
    return torch.zeros(KV_HEADS, dtype=torch.float64)


def _tokens(bench: Bench, draw: torch.Generator) -> list[torch.Tensor]:
    """Return random queries, keys and values of a layer's prompt."""
    return [
        torch.randn(LENGTH, n, SIZE, generator=draw).to(bench.device, bench.dtype) for n in (HEADS, KV_HEADS, KV_HEADS)
    ]


def _reader(bench: Bench, rule: RetentionRule, budget: int, tokens, gate_scores: torch.Tensor | None = None):
    """Return a function that reads tokens ``[start, start + count)`` of a prompt into the pages of one request.

    The blocks are in random order. A call with ``start`` 0, the default, begins the request anew.
    """
    rule, device = rule.to(bench.device), bench.device
    layout = PageLayout(KV_HEADS, SIZE, bench.dtype, state_floats=rule.state_floats(SIZE))
    blocks = layout.blocks(budget, budget)
    pages = layout.view(torch.zeros(blocks, KV_HEADS, layout.region_bytes, dtype=torch.uint8, device=device))
    table = torch.randperm(blocks, device=device).int().expand(KV_HEADS, -1)
    budgets = torch.full((KV_HEADS,), budget, dtype=torch.int32, device=device)

    def read(start: int = 0, count: int = LENGTH) -> torch.Tensor:
        q, k, v = (x[start : start + count] for x in tokens)
        given = gate_scores[start : start + count] if isinstance(rule.scorer, ops.GateScore) else None
        own = dict(rule=rule, scale=SIZE**-0.5, gate_scores=given, impl="triton")
        return ops.prefill_chunk(q, k, v, pages, table, start, budgets, **own)[0]

    return read
