"""`prefill_chunk` on a GPU: correctness in low precision, and times at Qwen3-8B's shapes.

A prompt of 16,384 tokens is timed next to SDPA and FlexAttention. A rule whose tokens have decays of their own
and a rule that goes token by token are timed as well.

SDPA attends to all tokens before each query. FlexAttention gets the mask of the tokens that the policy keeps.
The floor of attention is SDPA's time multiplied by the share of logits that is visible.
"""

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from unittest.mock import patch

import torch
from full_pages import empty_pages
from kernels.factories import random_rule, random_scorer

from gpu.clock import bandwidth, device_times, milliseconds, wall_milliseconds
from gpu.exact import CASES, serve_right
from gpu.sections import HEADS, KV_HEADS, SIZE, Bench, Case
from gpu.training import check_same, compiled_flex, dense, visible_share
from kvpop_vllm.cache.chunks import Chunks
from kvpop_vllm.cache.pages import PageLayout
from kvpop_vllm.kernels import ops
from kvpop_vllm.kernels.ops import RetentionRule

SINKS, WINDOW, LENGTH = 4, 256, 16384
LAYERS, LARGE = 36, 4096
PROMPTS = (1, 16384), (1, 32768), (32, 500)
"""Number of prompts of a step, and their tokens."""
CHUNK = 256
"""Tokens of a chunk that is processed token by token."""

FEW = "mlstm", "own decays"
"""Cases that run with interpreted kernels or under a sanitizer."""


def cases(bench: Bench) -> Iterator[Case]:
    """Yield the cases of the section."""
    right = "prefill_chunk is right, {}".format
    for name in FEW if bench.few else CASES:
        yield Case(right(name), partial(chunk_right, name=name))
    plain = right("linear"), right("mlstm"), right("recency")
    for budget in (2048, 4096):
        yield Case(f"prefill_chunk, S {LENGTH}, B {budget}", partial(prefill_times, budget=budget), plain)
    for requests, length in PROMPTS:
        run = partial(step_times, requests=requests, length=length)
        yield Case(f"prefill of {requests} x {length} tokens, B {LARGE}", run, plain)
    for name, times in {"own decays": ages_times, "mean mass": mass_times}.items():
        yield Case(f"prefill_chunk, {name}, B 2048", partial(times, budget=2048), (*plain, right(name)))


def chunk_right(bench: Bench, name: str) -> Iterator[dict]:
    """Check a prompt in chunks, which are worked off in small pieces."""
    from kvpop_vllm.kernels.triton import _prefill_attend, _prefill_plan

    reduced = dict(heads=1, size=32, group=2) if bench.small else {}
    pieces = patch.multiple(_prefill_plan, PIECE=16), patch.multiple(_prefill_attend, LIST_BYTES=4 * 2 * 64)
    with pieces[0], pieces[1]:
        yield from serve_right(
            bench, name, [17, 8] if bench.small else [37, 1, 60, 22], requests=1 if bench.small else 3, **reduced
        )


def prefill_times(bench: Bench, budget: int) -> Iterator[dict]:
    """Yield times of a layer's prompt in one chunk, next to attention to all tokens and to the kept tokens.

    The chunk is timed with given scores, which is ordering and attention alone, and with KVpop's scorer.
    """
    draw = torch.Generator().manual_seed(0)
    rules = {
        "given scores": rule_of(ops.GateScore()),
        "kvpop": random_rule(random_scorer("mlstm", KV_HEADS, SIZE, draw, skip=True), KV_HEADS, SINKS, WINDOW, draw),
    }
    tokens, gate_scores = prompt(bench, draw), torch.randn(LENGTH, KV_HEADS, generator=draw).to(bench.device)
    runs = {name: reader(bench, rule, budget, tokens, gate_scores) for name, rule in rules.items()}
    topk = budget - SINKS - WINDOW
    order = ops.running_topk(gate_scores.T[None], sinks=SINKS, window=WINDOW, topk=topk, impl="triton")
    flex, rows = compiled_flex(*order, LENGTH, WINDOW), [x.transpose(0, 1).unsqueeze(0) for x in tokens]
    runs |= {"SDPA": lambda: dense(*rows), "FlexAttention": lambda: flex(*rows)}
    check_same(bench, "prefill_chunk", runs["given scores"](), runs["FlexAttention"]()[0].transpose(0, 1))
    check_finite(bench, runs["kvpop"]())
    times = {name: milliseconds(run) for name, run in runs.items()}
    for name, value in times.items():
        floor = times["SDPA"] * visible_share(LENGTH, budget) if name in rules else None
        yield bench.row(f"{name}, a layer", value, "ms", floor)
    yield bench.row("scorer, a layer", times["kvpop"] - times["given scores"], "ms")


def step_times(bench: Bench, requests: int, length: int) -> Iterator[dict]:
    """Yield the time of a step of prompts in :data:`LAYERS` layers with KVpop's scorer, by the host's clock and the GPU's."""
    draw = torch.Generator().manual_seed(0)
    rule = random_rule(random_scorer("mlstm", KV_HEADS, SIZE, draw, skip=True), KV_HEADS, SINKS, WINDOW, draw)
    rule, budget = rule.to(bench.device), min(LARGE, length)
    with torch.device(bench.device):
        layout = PageLayout(KV_HEADS, SIZE, bench.dtype, state_floats=rule.state_floats(SIZE))
        pages, table = empty_pages(layout, requests, LARGE)
        q, k, v = (torch.randn(requests * length, n, SIZE, dtype=bench.dtype) for n in (HEADS, KV_HEADS, KV_HEADS))
    options = dict(rule=rule, scale=SIZE**-0.5, impl="triton")

    def step() -> torch.Tensor:
        budgets = torch.full((requests, KV_HEADS), LARGE, dtype=torch.int32, device="cpu")
        chunks = Chunks([0] * requests, [length] * requests, budgets, [WINDOW] * requests)
        for _ in range(LAYERS):
            out, _ = ops.prefill_chunk(q, k, v, pages, table, chunks, **options)
        return out

    check_finite(bench, step())
    products = 4 * HEADS * SIZE * requests * LAYERS * (budget * length - budget**2 / 2)
    yield bench.row("host's clock", wall_milliseconds(step), "ms")
    yield bench.row("GPU's clock", sum(device_times(step).values()), "ms")
    yield bench.row("products of attention", products / 1e12, "TFLOP")


def ages_times(bench: Bench, budget: int) -> Iterator[dict]:
    """Yield the time of a layer's prompt in one chunk, with tokens that have decays of their own."""
    draw = torch.Generator().manual_seed(0)
    gate_scores = -torch.exp(torch.randn(LENGTH, KV_HEADS, generator=draw) - 3).to(bench.device)
    read = reader(bench, rule_of(ops.GateScore(ages=True)), budget, prompt(bench, draw), gate_scores)
    check_finite(bench, read())
    yield bench.row(f"a layer, S {LENGTH}", milliseconds(read), "ms")


def mass_times(bench: Bench, budget: int) -> Iterator[dict]:
    """Yield the time of a token in consecutive chunks under mean attention mass.

    Every token evicts one. A chunk is one launch, in which a program for each head goes through its tokens on one
    multiprocessor (reckoned at 100 GB/s, docs/kernels.md). The floor is that of the whole GPU, for the bytes that a
    token reads: keys, values, scores and positions of all retained tokens.
    """
    starts, tokens = itertools.count(budget, CHUNK), prompt(bench, torch.Generator().manual_seed(0))
    read = reader(bench, rule_of(ops.AttentionMass(mean=True)), budget, tokens)

    def chunk() -> torch.Tensor:
        return read(next(starts), CHUNK)

    read(0, budget)
    check_finite(bench, chunk())
    floor = KV_HEADS * budget * (2 * SIZE * bench.dtype.itemsize + 2 * 4) / bandwidth()
    yield bench.row("a token, a layer", milliseconds(chunk) / CHUNK, "ms", floor)


def rule_of(scorer) -> RetentionRule:
    """Return a rule without decay."""
    return RetentionRule(SINKS, WINDOW, torch.zeros(KV_HEADS, dtype=torch.float64), scorer=scorer)


def prompt(bench: Bench, draw: torch.Generator) -> list[torch.Tensor]:
    """Return random queries, keys and values of a layer's prompt."""
    return [
        torch.randn(LENGTH, n, SIZE, generator=draw).to(bench.device, bench.dtype) for n in (HEADS, KV_HEADS, KV_HEADS)
    ]


def reader(
    bench: Bench, rule: RetentionRule, budget: int, tokens: list[torch.Tensor], gate_scores: torch.Tensor | None = None
) -> Callable[..., torch.Tensor]:
    """Return a function that reads ``count`` tokens at position ``start`` into the pages of one request.

    After the last token of the prompt come its first ones again. A call with ``start`` 0, the default, begins the
    request again.
    """
    rule = rule.to(bench.device)
    with torch.device(bench.device):
        layout = PageLayout(KV_HEADS, SIZE, bench.dtype, state_floats=rule.state_floats(SIZE))
        pages, table = empty_pages(layout, 1, budget)
        budgets = torch.full((KV_HEADS,), budget, dtype=torch.int32, device="cpu")

    def read(start: int = 0, count: int = LENGTH) -> torch.Tensor:
        cut = slice(start % LENGTH, start % LENGTH + count)
        q, k, v = (x[cut] for x in tokens)
        chunk_scores = gate_scores[cut] if isinstance(rule.scorer, ops.GateScore) else None
        options = dict(rule=rule, scale=SIZE**-0.5, gate_scores=chunk_scores, impl="triton")
        return ops.prefill_chunk(
            q, k, v, pages, table, Chunks.of_request(start, len(q), budgets, rule.window), **options
        )[0]

    return read


def check_finite(bench: Bench, out: torch.Tensor) -> None:
    """Check that outputs are finite, which they are not after a wrong start."""
    bench.check(bool(out.isfinite().all()), "outputs are not finite")
