"""`prefill_chunk` on a GPU: correctness in low precision, and times at Qwen3-8B's shapes.

A prompt of 16,384 tokens is timed beside SDPA and FlexAttention. A rule whose tokens have decays of their own
and a rule that goes token by token are timed as well.

SDPA attends to all tokens before each query. FlexAttention gets the mask of the tokens that the policy keeps.
The floor of attention is SDPA's time multiplied by the share of logits that is visible.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from unittest.mock import patch

import torch
from gpu import Bench, within
from gpu_clock import bandwidth, paired, seconds
from gpu_training import compiled_flex
from kernels.factories import given_scores, poisoned_pages, random_rule, random_scorer
from kernels.problems import CLOSE, CLOSE_MASS, Problem

from kvpop_vllm.kernels import ops
from kvpop_vllm.kernels.ops import RetentionRule
from kvpop_vllm.kernels.pages import PageLayout

HEADS, KV_HEADS, SIZE = 32, 8, 128
"""Attention shape of Qwen3-8B."""
SINKS, WINDOW, LENGTH = 4, 256, 16384
CHUNK, ROUNDS = 256, 3
"""Tokens of a chunk that is processed token by token, and number of chunks whose median is taken."""

RIGHT = {
    "recency": dict(case="none", sinks=0, window=1, unequal=True),
    "linear": dict(case="linear", group=4, size=128),
    "mlstm": dict(case="mlstm-norm-skip", group=4, size=128),
    "mlstm, heads of 80": dict(case="mlstm", group=3, size=80),
    "own decays": dict(case="gate_scores-ages"),
    "mean mass": dict(case="mass-mean", group=3),
    "moments": dict(case="moment-corrected"),
}
FEW = "mlstm", "own decays"
"""Cases that run with interpreted kernels or under a sanitizer."""


def prefill_kernels(bench: Bench):
    """Yield cases; see :data:`gpu.Section`."""
    for name in FEW if bench.small or bench.watched else RIGHT:
        yield f"prefill_chunk is right, {name}", lambda name=name: chunk_right(bench, name)
    if bench.small or bench.watched:
        return
    needed = {f"prefill_chunk is right, {name}" for name in ("recency", "linear", "mlstm")}
    if wrong := sorted(needed & bench.wrong):
        bench.say(f"prefill_chunk: not timed, as it is wrong that {wrong[0]}")
        return
    for budget in (2048, 4096):
        yield f"prefill_chunk, S {LENGTH}, B {budget}", lambda budget=budget: prefill_times(bench, budget)
    for name, times in {"own decays": ages_times, "mean mass": mass_times}.items():
        if (case := f"prefill_chunk is right, {name}") in bench.wrong:
            bench.say(f"prefill_chunk, {name}: not timed, as it is wrong that {case}")
            continue
        yield f"prefill_chunk, {name}, B 2048", lambda times=times: times(bench, 2048)


def chunk_right(bench: Bench, name: str) -> Iterator[dict]:
    """Check a prompt in small pieces against the float64 loop and the reference.

    After each chunk the retained tokens must be those of the float64 loop, none of whose decisions may be
    close. Outputs must be as good as the reference's in the same precision.
    """
    from kvpop_vllm.kernels.triton import _prefill_attend, prefill_chunk

    chunks = (17, 8) if bench.small else (37, 1, 60, 22)
    options = dict(requests=1, heads=2, size=64, group=2, window=3, topk=13, slots=16) | RIGHT[name]
    reduced = dict(heads=1, size=32, group=2) if bench.small else {}
    p = Problem(**options | reduced | dict(dtype=bench.dtype, q_dtype=bench.dtype)).prepare()
    exact, rule = [p.exact(0, h) for h in range(p.heads)], p.rule.to(bench.device)
    reference, own = (poisoned_pages(p.layout, p.num_blocks) for _ in range(2))
    pages, start, found, closest = p.layout.view(own.raw.to(bench.device)), 0, [], torch.inf
    pieces = patch.multiple(prefill_chunk, PIECE=16), patch.multiple(_prefill_attend, LIST_BYTES=4 * 2 * 64)
    for count in chunks:
        q, k, v = p.inputs(range(count))
        eager = _chunk(p, p.rule, reference, start, q, k, v, "reference")
        wide, margin = _exact_chunk(p, exact, start, q, k, v)
        with pieces[0], pieces[1]:
            own = _chunk(p, rule, pages, start, q, k, v, "triton")
        closest, start = min(closest, margin), start + count
        assert closest > (CLOSE_MASS if rule.coupled else CLOSE), f"close decision before {start}: take another seed"
        on_host = p.layout.view(pages.raw.cpu())
        for h in range(p.heads):
            held = p.long_range(on_host, 0, h, start - 1).keys()
            expected = exact[h].long_range(start - 1).keys()
            assert held == expected, f"position {start - 1}, head {h}: {sorted(held ^ expected)} differ"
        found.append((own, wide, eager))
    yield bench.row("chunks with equal sets", len(found), "count")
    for i, what in enumerate(("out", "lse")):
        actual, wide, eager = (torch.cat([each[j][i].cpu() for each in found]) for j in range(3))
        yield from within(bench, actual, wide, eager, what, factor=3.0)


def _chunk(p: Problem, rule: RetentionRule, pages, start: int, q, k, v, impl: str):
    """Run a chunk of the only request on the device of its pages."""
    gate_scores, device = given_scores(p.rule, k), pages.raw.device
    q, k, v, table, budgets = (x.to(device) for x in (q, k, v, p.table[0], p.budgets[0]))
    return ops.prefill_chunk(
        q, k, v, pages, table, start, budgets, rule=rule, scale=p.scale, impl=impl,
        gate_scores=None if gate_scores is None else gate_scores.to(device),
    )  # fmt: skip


def _exact_chunk(p: Problem, exact, start: int, q, k, v):
    gate_scores, outs, lses, margins = given_scores(p.rule, k), [], [], []
    for i in range(len(q)):
        for h, one in enumerate(exact):
            own = None if gate_scores is None else gate_scores[i, h]
            rows = slice(h * p.group, (h + 1) * p.group)
            out, lse, _, margin = one.step(start + i, q[i, rows], k[i, h], v[i, h], p.scale, own)
            outs.append(out)
            lses.append(lse)
            margins.append(margin)
    return (torch.cat(outs).view(q.shape), torch.cat(lses).view(q.shape[:2])), min(margins)


def prefill_times(bench: Bench, budget: int) -> Iterator[dict]:
    """Yield times of a layer's prompt in one chunk, beside attention to all tokens and to the kept tokens.

    The chunk is timed with given scores, which is ordering and attention alone, and with KVpop's scorer.
    """
    draw, scale = torch.Generator().manual_seed(0), SIZE**-0.5
    rules = {
        "given scores": RetentionRule(SINKS, WINDOW, _no_decay(), scorer=ops.GateScore()),
        "kvpop": random_rule(random_scorer("mlstm", KV_HEADS, SIZE, draw, skip=True), KV_HEADS, SINKS, WINDOW, draw),
    }
    q, k, v = _tokens(bench, draw)
    gate_scores = torch.randn(LENGTH, KV_HEADS, generator=draw).to(bench.device)
    runs = {
        what: _prefill(bench, rule.to(bench.device), budget, q, k, v, gate_scores, scale)
        for what, rule in rules.items()
    }
    topk = budget - SINKS - WINDOW
    order = ops.running_topk(gate_scores.T[None], sinks=SINKS, window=WINDOW, topk=topk, impl="triton")
    flex, rows = compiled_flex(*order, LENGTH, WINDOW), [x.transpose(0, 1).unsqueeze(0) for x in (q, k, v)]
    runs["SDPA"] = lambda: torch.nn.functional.scaled_dot_product_attention(
        *rows, is_causal=True, scale=scale, enable_gqa=True
    )
    runs["FlexAttention"] = lambda: flex(*rows, scale)
    error = (runs["given scores"]().float() - runs["FlexAttention"]()[0].transpose(0, 1).float()).abs().max()
    assert error < 0.02, f"prefill_chunk and FlexAttention differ by {float(error):.3g}"
    assert bool(runs["kvpop"]().isfinite().all()), "kvpop: outputs are not finite"
    held = torch.arange(1, LENGTH + 1).clamp_max(budget).double().mean()
    share, times = float(held / ((LENGTH + 1) / 2)), paired(runs)
    for name, value in times.items():
        floor = 1e3 * times["SDPA"] * share if name in rules else None
        yield bench.row(f"{name}, a layer", 1e3 * value, "ms", floor)
    rest = 1e3 * (times["kvpop"] - times["given scores"])
    yield bench.row("scorer, a layer", rest, "ms")


def ages_times(bench: Bench, budget: int) -> Iterator[dict]:
    """Yield the time of a layer's prompt in one chunk, with tokens that have decays of their own."""
    draw = torch.Generator().manual_seed(0)
    rule = RetentionRule(SINKS, WINDOW, _no_decay(), scorer=ops.GateScore(ages=True)).to(bench.device)
    tokens = _tokens(bench, draw)
    gate_scores = -torch.exp(torch.randn(LENGTH, KV_HEADS, generator=draw) - 3).to(bench.device)
    run = _prefill(bench, rule, budget, *tokens, gate_scores, SIZE**-0.5)
    assert bool(run().isfinite().all()), "outputs are not finite"
    yield bench.row(f"a layer, S {LENGTH}", 1e3 * seconds(run, ROUNDS), "ms")


def mass_times(bench: Bench, budget: int) -> Iterator[dict]:
    """Yield the time of a token in consecutive chunks under mean attention mass.

    Every token evicts one. The host's launches count where they take longer than the GPU. The floor is the
    bytes that a token reads: keys, values, scores and positions of all retained tokens.
    """
    scale, starts = SIZE**-0.5, itertools.count(budget, CHUNK)
    rule = RetentionRule(SINKS, WINDOW, _no_decay(), scorer=ops.AttentionMass(mean=True)).to(bench.device)
    q, k, v = _tokens(bench, torch.Generator().manual_seed(0))
    pages, table, budgets = _empty(bench, rule, budget)

    def run(first: int | None = None, count: int = CHUNK):
        start = next(starts) if first is None else first
        cut = slice(start, start + count)
        return ops.prefill_chunk(
            q[cut], k[cut], v[cut], pages, table, start, budgets, rule=rule, scale=scale, impl="triton"
        )[0]

    run(0, budget)
    assert bool(run().isfinite().all()), "outputs are not finite"
    floor = KV_HEADS * budget * (2 * SIZE * bench.dtype.itemsize + 2 * 4) / bandwidth()
    yield bench.row("a token, a layer", 1e3 * seconds(run, ROUNDS) / CHUNK, "ms", 1e3 * floor)


def _no_decay() -> torch.Tensor:
    return torch.zeros(KV_HEADS, dtype=torch.float64)


def _tokens(bench: Bench, draw: torch.Generator) -> list[torch.Tensor]:
    """Return random queries, keys and values of a layer's prompt."""
    return [
        torch.randn(LENGTH, n, SIZE, generator=draw).to(bench.device, bench.dtype) for n in (HEADS, KV_HEADS, KV_HEADS)
    ]


def _prefill(bench: Bench, rule: RetentionRule, budget: int, q, k, v, gate_scores, scale: float):
    """Return a function that reads the whole prompt into pages of its own, which every call begins anew."""
    pages, table, budgets = _empty(bench, rule, budget)
    own = dict(
        rule=rule,
        scale=scale,
        impl="triton",
        gate_scores=gate_scores if isinstance(rule.scorer, ops.GateScore) else None,
    )
    return lambda: ops.prefill_chunk(q, k, v, pages, table, 0, budgets, **own)[0]


def _empty(bench: Bench, rule: RetentionRule, budget: int):
    """Return pages of one request, its table ``[H, P]`` and the budgets ``[H]``.

    The blocks are in random order.
    """
    layout = PageLayout(KV_HEADS, SIZE, bench.dtype, state_floats=rule.state_floats(SIZE))
    blocks = layout.blocks(budget, budget)
    raw = torch.zeros(blocks, KV_HEADS, layout.region_bytes, dtype=torch.uint8, device=bench.device)
    table = torch.randperm(blocks, device=bench.device).int().expand(KV_HEADS, -1)
    return layout.view(raw), table, torch.full((KV_HEADS,), budget, dtype=torch.int32, device=bench.device)
