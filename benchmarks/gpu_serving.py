"""`decode_step` on a GPU: correctness in low precision, sanitizers, and times at Qwen3-8B's shapes.

The floor of a time is the bytes that a step has to move at the bandwidth of a large copy. For attention these
are the keys and values in use. For scorer and eviction they are the state, read and written, and the scores
and positions among which a victim is searched.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from gpu import Bench, Skipped, within
from gpu_clock import bandwidth, graph_of, paired
from kernels.behind import Behind
from kernels.factories import given_scores, poisoned_pages, random_rule, random_scorer
from kernels.problems import CLOSE, CLOSE_MASS, Problem

from kvpop_vllm.kernels import ops
from kvpop_vllm.kernels.ops import RetentionRule
from kvpop_vllm.kernels.pages import PageLayout, Pages, Prefix, cdiv

HEADS, KV_HEADS, SIZE, LAYERS = 32, 8, 128, 36
"""Attention shape of Qwen3-8B."""
SINKS, WINDOW, SEEN = 4, 256, 16384
PROTECTED = 8192
"""Tokens of a prompt that all requests of a step share."""
MOST_BYTES = 24 << 30
"""Maximum bytes of pages on any GPU."""
TOOLS = "memcheck", "racecheck"
"""Tools of compute-sanitizer; racecheck watches shared memory only, not what several warps write to pages."""
FOUND = re.compile(r"=========\s+(Invalid|Error|Race|Program hit)")
LEAST = 45.0
"""Seconds that must be left for a tool to begin."""

RIGHT = {
    "recency": dict(case="none", sinks=0, window=1, unequal=True),
    "key norm": dict(case="key-norm", group=4),
    "threshold": dict(case="gate_scores-threshold"),
    "mlp": dict(case="mlp"),
    "mlstm": dict(case="mlstm-norm-skip", group=4, size=128),
    "mlstm, corrected": dict(case="mlstm-corrected"),
    "mean mass": dict(case="mass-mean", group=3),
    "moments": dict(case="moment-corrected"),
}
BEHIND = {
    "recency": dict(case="none"),
    "key norm": dict(case="key-norm", group=4),
    "mlstm": dict(case="mlstm-norm-skip", group=4, size=128, replay=48),
    "mlstm read at once": dict(case="mlstm-immediate"),
    "mean mass": dict(case="mass-mean"),
}
"""Cases behind a prefix that a chunk begins in, and behind one that a chunk ends in."""
FEW_BEHIND = ("mlstm",)
FEW = "recency", "mlstm", "moments"
"""Cases that run with interpreted kernels or under a sanitizer."""


def serving_kernels(bench: Bench):
    """Yield cases; see :data:`gpu.Section`."""
    for name in FEW if bench.small or bench.watched else RIGHT:
        yield f"decode_step is right, {name}", lambda name=name: step_right(bench, name)
    for name in FEW_BEHIND if bench.small or bench.watched else BEHIND:
        yield f"a prefix and its tail are right, {name}", lambda name=name: prefix_right(bench, name)
    if bench.small or bench.watched:
        return
    needed = {f"decode_step is right, {name}" for name in ("recency", "mlstm")}
    if wrong := sorted(needed & bench.wrong):
        bench.say(f"decode_step: not timed, as it is wrong that {wrong[0]}")
        return
    for budget in (2048, 4096):
        for requests in (1, 2, 4, 8, 16, 32, 64, 128, 256):
            name = f"B {budget}, batch {requests}"
            yield (
                f"decode_step, {name}",
                lambda budget=budget, requests=requests: step_times(bench, budget, requests),
            )
    for requests in (1, 16, 64):
        yield (
            f"decode_step, B 2048, batch {requests}, behind {PROTECTED} shared tokens",
            lambda requests=requests: step_times(bench, 2048, requests, PROTECTED),
        )


def sanitizers(bench: Bench):
    """Yield cases; see :data:`gpu.Section`."""
    for tool in () if bench.small or bench.watched else TOOLS:
        yield f"decode_step and prefill_chunk under {tool}", lambda tool=tool: sanitized(bench, tool)


def step_right(bench: Bench, name: str) -> Iterator[dict]:
    """Check decode steps against the float64 loop and the reference.

    The retained tokens after every step must be those of the float64 loop, until one of its decisions is too
    close. Outputs must be as good as the reference's in the same precision.
    """
    steps = 6 if bench.small else 40
    options = dict(requests=3, heads=2, size=64, group=2, window=3, topk=13, slots=16) | RIGHT[name]
    reduced = dict(requests=1, heads=1, size=32, topk=12) if bench.small else {}
    p = Problem(**options | reduced | dict(dtype=bench.dtype, q_dtype=bench.dtype)).prepare()
    exact = [[p.exact(r, h) for h in range(p.heads)] for r in range(p.requests)]
    reference, rule, active = poisoned_pages(p.layout, p.num_blocks), p.rule.to(bench.device), list(range(p.requests))
    pages, found, compared = p.layout.view(poisoned_pages(p.layout, p.num_blocks).raw.to(bench.device)), [], 0
    for position in range(steps + (13 if bench.small else 30)):
        inputs, now = p.inputs(active), [position] * p.requests
        eager = p.run(reference, active, now, *inputs, "reference")
        wide, margins = _exact_step(p, exact, position, *inputs)
        own = _step(bench, p, rule, pages, position, *inputs)
        if min(margins) <= (CLOSE_MASS if rule.coupled else CLOSE):
            break
        on_host = p.layout.view(pages.raw.cpu())
        for r in active:
            for h in range(p.heads):
                held = p.long_range(on_host, r, h, position).keys()
                expected = exact[r][h].long_range(position).keys()
                assert held == expected, f"position {position}, request {r}, head {h}: {sorted(held ^ expected)} differ"
        compared += 1
        found.append((own, wide, eager))
    assert compared >= 12, f"the data have a close decision at position {compared}: take another seed"
    yield bench.row("steps with equal sets", compared, "count")
    for i, what in enumerate(("out", "lse")):
        actual, wide, eager = (torch.stack([each[j][i].cpu() for each in found]) for j in range(3))
        yield from within(bench, actual, wide, eager, what, factor=3.0)


def prefix_right(bench: Bench, name: str) -> Iterator[dict]:
    """Check a prefix, its tail and steps behind it against the float64 loop and the reference.

    The prompt comes in chunks, whose attention to the prefix is torch's own. The retained tokens must be
    those of the float64 loop, and outputs as good as the reference's in the same precision.
    """
    options = dict(heads=2, size=64, group=2, window=3, topk=13, slots=16, protected=(70,)) | BEHIND[name]
    reduced = dict(heads=1, size=32, group=1, protected=(18,)) if bench.small else {}
    p = Behind(**options | reduced | dict(dtype=bench.dtype, q_dtype=bench.dtype)).prepare()
    (protected,), exact = p.protected, [p.exact(0, h) for h in range(p.heads)]
    length, found, ends = protected + 24, [], (protected - 9, protected + 16)
    q, k, v = p.inputs([0] * length)
    reference, rule = poisoned_pages(p.layout, p.num_blocks), p.rule.to(bench.device)
    pages = p.layout.view(poisoned_pages(p.layout, p.num_blocks).raw.to(bench.device))
    wide, eager, margins = [], [], []
    for t in range(length):
        token = [x[t : t + 1] for x in (q, k, v)]
        eager.append(p.run(reference, [0], [t], *token, "reference"))
        one, least = _exact_step(p, [exact], t, *token)
        wide.append(one)
        margins.append(min(least))
    close = CLOSE_MASS if rule.coupled else CLOSE
    assert min(margins) > close, "the data have a close decision: take another seed"
    q, k, v, table, budgets = (x.to(bench.device) for x in (q, k, v, p.table, p.budgets))
    prefix = Prefix(pages, p.prefix_table.to(bench.device), p.tokens)
    at = torch.arange(protected, device=bench.device)
    prefix.write(k[:protected], v[:protected], prefix.table[0, at // p.slots].long(), at % p.slots)
    own = dict(rule=rule, scale=p.scale, impl="triton")
    ops.begin_tail(pages, table, prefix, rule=rule, impl="triton")
    for start, end in zip((0, *ends[:-1]), ends, strict=True):
        cut = slice(start, end)
        found.append(
            ops.prefill_chunk(q[cut], k[cut], v[cut], pages, table[0], start, budgets[0], prefix=prefix, **own)
        )
    there = Prefix(pages, prefix.table, p.tokens.to(bench.device))
    for t in range(ends[-1], length):
        cut, position = slice(t, t + 1), torch.full((1,), t, device=bench.device)
        found.append(ops.decode_step(q[cut], k[cut], v[cut], pages, table, position, budgets, prefix=there, **own))
    on_host = p.layout.view(pages.raw.cpu())
    for h in range(p.heads):
        held, expected = p.long_range(on_host, 0, h, length - 1).keys(), exact[h].long_range(length - 1).keys()
        assert held == expected, f"head {h}: {sorted(held ^ expected)} differ"
    for i, what in enumerate(("out", "lse")):
        parts = (torch.cat([each[i].cpu() for each in part]) for part in (found, wide, eager))
        yield from within(bench, *parts, what, factor=3.0)


def _exact_step(p: Problem, exact, position: int, q, k, v):
    gate_scores, rows = given_scores(p.rule, k), [slice(h * p.group, (h + 1) * p.group) for h in range(p.heads)]
    steps = [
        exact[r][h].step(
            position, q[r, rows[h]], k[r, h], v[r, h], p.scale, None if gate_scores is None else gate_scores[r, h]
        )
        for r in range(p.requests)
        for h in range(p.heads)
    ]
    wide = torch.cat([s[0] for s in steps]).view(q.shape), torch.cat([s[1] for s in steps]).view(q.shape[:2])
    return wide, [s[3] for s in steps]


def _step(bench: Bench, p: Problem, rule: RetentionRule, pages: Pages, position: int, q, k, v):
    """Run a decode step of the kernel on its device."""
    gate_scores = given_scores(p.rule, k)
    told = q, k, v, torch.full((p.requests,), position), p.budgets, p.table
    q, k, v, positions, budgets, table = (x.to(bench.device) for x in told)
    return ops.decode_step(
        q, k, v, pages, table, positions, budgets, rule=rule, scale=p.scale, impl="triton",
        gate_scores=None if gate_scores is None else gate_scores.to(bench.device),
    )  # fmt: skip


def sanitized(bench: Bench, tool: str) -> Iterator[dict]:
    """Run the few cases under compute-sanitizer, which reports errors in the log.

    Raises:
        Skipped: the tool does not exist, or there is not enough time.
    """
    program = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not Path(program).exists():
        raise Skipped("compute-sanitizer is not on this machine")
    if (left := bench.left()) < LEAST:
        raise Skipped(f"{left:.0f} s are left, and it needs {LEAST:.0f}")
    script = Path(__file__).with_name("gpu.py")
    with tempfile.TemporaryDirectory() as folder:
        command = [program, "--tool", tool, "--error-exitcode", "9", sys.executable, str(script)]
        command += ["--sections", "serving-kernels", "prefill-kernels", "--watched", "--out", folder]
        limit = max(LEAST, left - LEAST) if tool == TOOLS[0] else left
        code, said = output_of(command, limit)
    if code is None:
        assert not FOUND.search(said), f"{tool}, ended before it was done: {said[-1500:]}"
        raise Skipped(f"not done in the {limit:.0f} s that it had")
    assert code == 0, f"{tool}: {said[-1500:]}"
    yield bench.row(f"errors under {tool}", 0, "count")


def output_of(command: list[str], limit: float) -> tuple[int | None, str]:
    """Return a program's exit code and output.

    After ``limit`` seconds the program and its children are killed, and the code is None.
    """
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env=os.environ
        | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},  # otherwise memory beside a tensor would be valid as well
    ) as process:
        try:
            said, _ = process.communicate(timeout=limit)
        except BaseException as error:
            os.killpg(process.pid, signal.SIGKILL)
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            return None, process.communicate()[0]
    return process.returncode, said


def step_times(bench: Bench, budget: int, requests: int, protected: int = 0) -> Iterator[dict]:
    """Yield the time of a layer's step in a CUDA graph of several layers, which exceed the GPU's cache.

    A step is timed with recency alone, which is attention, and with KVpop's scorer. The difference is the
    cost of scores and evictions.

    Args:
        bench: device and dtype.
        budget: B.
        requests: R.
        protected: tokens of a prefix that all requests share; in the floor each request reads all of them.
    """
    generator = torch.Generator().manual_seed(0)
    rules = {
        "attention": RetentionRule(SINKS, WINDOW, torch.full((KV_HEADS,), -1.0, dtype=torch.float64)),
        "kvpop": random_rule(
            random_scorer("mlstm", KV_HEADS, SIZE, generator, skip=True), KV_HEADS, SINKS, WINDOW, generator
        ),
    }
    graphs = {what: Replayed(bench, rule, budget, requests, protected) for what, rule in rules.items()}
    layers = {what: graph.layers for what, graph in graphs.items()}
    times = {
        what: 1e3 * value / layers[what] for what, value in paired({w: g.replay for w, g in graphs.items()}).items()
    }
    for what, graph in graphs.items():
        graph.check(what)
    speed = bandwidth()
    keys = requests * KV_HEADS * (budget + protected) * 2 * SIZE * bench.dtype.itemsize
    state = requests * KV_HEADS * 4 * (2 * rules["kvpop"].state_floats(SIZE) + 2 * budget)
    yield bench.row("attention, a layer", times["attention"], "ms", 1e3 * keys / speed)
    yield bench.row("kvpop, a layer", times["kvpop"], "ms", 1e3 * (keys + state) / speed)
    rest = times["kvpop"] - times["attention"]
    yield bench.row("scorer and eviction, a layer", rest, "ms", 1e3 * state / speed)


class Replayed:
    """CUDA graph of one decode step in each of several layers.

    The requests have seen :data:`SEEN` tokens.

    Args:
        bench: device and dtype.
        rule: rule of all layers, on the CPU.
        budget: B.
        requests: R.
        protected: tokens of a prefix that all requests share.

    Attributes:
        layers: number of layers, enough to exceed a GPU's cache.
    """

    def __init__(self, bench: Bench, rule: RetentionRule, budget: int, requests: int, protected: int = 0):
        device, self.rule, self.protected = bench.device, rule.to(bench.device), protected
        layout = PageLayout(KV_HEADS, SIZE, bench.dtype, state_floats=rule.state_floats(SIZE))
        blocks = layout.blocks(budget, budget)
        own = (requests * blocks + cdiv(protected, layout.block_slots)) * KV_HEADS * layout.region_bytes
        self.layers = max(1, min(LAYERS, MOST_BYTES // (2 * own), -(-(1 << 30) // own)))
        self.positions = torch.full((requests,), SEEN, device=device)
        budgets = torch.full((requests, KV_HEADS), budget, dtype=torch.int32, device=device)
        tokens = [torch.randn(requests, n, SIZE, device=device).to(bench.dtype) for n in (HEADS, KV_HEADS, KV_HEADS)]
        filled = [self._pages(layout, budget, requests, blocks, device) for _ in range(self.layers)]

        def step():
            for pages, table, prefix in filled:
                self.out, _ = ops.decode_step(
                    *tokens, pages, table, self.positions, budgets, rule=self.rule, scale=SIZE**-0.5, prefix=prefix,
                    impl="triton",
                )  # fmt: skip
            self.positions.add_(1)

        self.graph = graph_of(step)
        self.replay = self.graph.replay

    def _pages(
        self, layout: PageLayout, budget: int, requests: int, blocks: int, device
    ) -> tuple[Pages, torch.Tensor, Prefix | None]:
        """Return full pages of random tokens, their table, and the shared prefix or None.

        The blocks are in random order.
        """
        ahead = cdiv(self.protected, layout.block_slots)
        raw = torch.zeros(
            requests * blocks + ahead, KV_HEADS, layout.block_slots, layout.slot_bytes, dtype=torch.uint8, device=device
        )
        pages = layout.view(raw)
        for part in (pages.k, pages.v, pages.score):
            part.copy_(
                torch.randn(part.shape, device=device, dtype=torch.float32 if part is pages.score else part.dtype)
            )
        table = torch.randperm(requests * blocks, device=device).int().view(requests, 1, blocks)
        slots = torch.arange((blocks - layout.state_blocks) * layout.block_slots, device=device)
        of_blocks = table[:, 0, layout.state_blocks :].long()  # [R, slot blocks]
        told = (slots % (SEEN - WINDOW)).int().view(1, -1, 1, layout.block_slots)
        pages.position[of_blocks] = told.expand(requests, -1, KV_HEADS, -1)
        pages.position[of_blocks[:, 0], :, 0] = SEEN
        pages.state[table[:, 0, : layout.state_blocks].long()] = 0.0
        prefix = None
        if ahead:
            shared = requests * blocks + torch.arange(ahead, dtype=torch.int32, device=device).expand(requests, -1)
            prefix = Prefix(pages, shared, torch.full((requests,), self.protected, device=device))
        return pages, table.expand(-1, KV_HEADS, -1), prefix

    def check(self, what: str) -> None:
        """Check that steps were taken; a wrong start does not raise.

        Raises:
            AssertionError: an output is not finite.
        """
        assert bool(self.out.isfinite().all()), f"{what}: outputs are not finite"
