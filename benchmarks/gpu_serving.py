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
from functools import partial
from pathlib import Path

import torch
from gpu import HEADS, KV_HEADS, SIZE, Bench, Case, Skipped
from gpu_clock import bandwidth, graph_of, paired
from gpu_exact import Comparison
from kernels.factories import random_rule, random_scorer

from kvpop_vllm.kernels import ops
from kvpop_vllm.kernels.ops import RetentionRule
from kvpop_vllm.kernels.pages import PageLayout, Pages, Prefix, cdiv

LAYERS = 36
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
    "recency": dict(case="none", sinks=0, window=1, unequal=True, seed=2),
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


def serving_kernels(bench: Bench) -> Iterator[Case]:
    """Yield cases; see :data:`gpu.Section`."""
    for name in FEW if bench.few else RIGHT:
        yield Case(f"decode_step is right, {name}", partial(step_right, name=name))
    for name in FEW_BEHIND if bench.few else BEHIND:
        yield Case(f"a prefix and its tail are right, {name}", partial(prefix_right, name=name))
    needs = tuple(f"decode_step is right, {name}" for name in ("mlstm", "recency"))
    for budget in (2048, 4096):
        for requests in (1, 2, 4, 8, 16, 32, 64, 128, 256):
            times = partial(step_times, budget=budget, requests=requests)
            yield Case(f"decode_step, B {budget}, batch {requests}", times, needs)
    for requests in (1, 16, 64):
        name = f"decode_step, B 2048, batch {requests}, behind {PROTECTED} shared tokens"
        yield Case(name, partial(step_times, budget=2048, requests=requests, protected=PROTECTED), needs)


def sanitizers(bench: Bench) -> Iterator[Case]:
    """Yield cases; see :data:`gpu.Section`."""
    for tool in () if bench.few else TOOLS:
        yield Case(f"decode_step and prefill_chunk under {tool}", partial(sanitized, tool=tool))


def step_right(bench: Bench, name: str) -> Iterator[dict]:
    """Check decode steps against the float64 loop and the reference.

    The retained tokens after every step must be those of the float64 loop, until one of its decisions is too
    close. Outputs must be as good as the reference's in the same precision.
    """
    reduced = dict(requests=1, heads=1, size=32, topk=12) if bench.small else {}
    both = Comparison(bench, dict(requests=3) | RIGHT[name] | reduced)
    p, results = both.p, both.results
    active = list(range(p.requests))
    for position in range(19 if bench.small else 70):
        tokens = p.inputs(active)
        if both.exact_step(position, *tokens):
            results["exact"].pop()
            break
        results["reference"].append(p.run(both.reference, active, [position] * p.requests, *tokens, "reference"))
        results["kernel"].append(both.run(ops.decode_step, torch.full((p.requests,), position), *tokens))
        both.check_sets(position)
    compared = len(results["kernel"])
    assert compared >= 12, f"the data have a close decision at position {compared}: take another seed"
    yield bench.row("steps with equal sets", compared, "count")
    yield from both.outputs()


def prefix_right(bench: Bench, name: str) -> Iterator[dict]:
    """Check a prefix, its tail and steps behind it against the float64 loop and the reference.

    The prompt comes in chunks, whose attention to the prefix is torch's own. The retained tokens must be
    those of the float64 loop, and outputs as good as the reference's in the same precision.
    """
    reduced = dict(heads=1, size=32, group=1, protected=(18,)) if bench.small else {}
    both = Comparison(bench, dict(protected=(70,)) | BEHIND[name] | reduced)
    p, results = both.p, both.results
    (protected,), device = p.protected, bench.device
    length, ends = protected + 24, (protected - 9, protected + 16)
    q, k, v = p.inputs([0] * length)
    for t in range(length):
        token = [x[t : t + 1] for x in (q, k, v)]
        results["reference"].append(p.run(both.reference, [0], [t], *token, "reference"))
        assert not both.exact_step(t, *token), "the data have a close decision: take another seed"
    prefix = Prefix(both.pages, p.prefix_table.to(device), p.tokens)
    at = torch.arange(protected, device=device)
    keys, values = (x[:protected].to(device) for x in (k, v))
    prefix.write(keys, values, prefix.table[0, at // p.slots].long(), at % p.slots)
    ops.begin_tail(both.pages, p.table.to(device), prefix, rule=both.rule, impl="triton")
    for start, end in zip((0, *ends[:-1]), ends, strict=True):
        chunk = (x[start:end] for x in (q, k, v))
        results["kernel"].append(both.run(ops.prefill_chunk, start, *chunk, prefix=prefix))
    there = Prefix(both.pages, prefix.table, p.tokens.to(device))
    for t in range(ends[-1], length):
        token = (x[t : t + 1] for x in (q, k, v))
        results["kernel"].append(both.run(ops.decode_step, torch.full((1,), t), *token, prefix=there))
    both.check_sets(length - 1)
    yield from both.outputs()


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
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}  # else memory beside a tensor is valid as well
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    with subprocess.Popen(command, **pipes, start_new_session=True, env=environment) as process:
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
    seconds = paired({what: graph.replay for what, graph in graphs.items()})
    times = {what: 1e3 * seconds[what] / graph.layers for what, graph in graphs.items()}
    for what, graph in graphs.items():  # a step from a wrong start gives NaN
        assert bool(graph.out.isfinite().all()), f"{what}: outputs are not finite"
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
        size = (requests * blocks + cdiv(protected, layout.block_slots)) * KV_HEADS * layout.region_bytes
        self.layers = max(1, min(LAYERS, MOST_BYTES // (2 * size), cdiv(1 << 30, size)))
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

        self.replay = graph_of(step).replay

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
            part.normal_()
        table = torch.randperm(requests * blocks, device=device).int().view(requests, 1, blocks)
        slots = torch.arange((blocks - layout.state_blocks) * layout.block_slots, device=device)
        of_blocks = table[:, 0, layout.state_blocks :].long()  # [R, slot blocks]
        positions = (slots % (SEEN - WINDOW)).int().view(1, -1, 1, layout.block_slots)
        pages.position[of_blocks] = positions.expand(requests, -1, KV_HEADS, -1)
        pages.position[of_blocks[:, 0], :, 0] = SEEN
        pages.state[table[:, 0, : layout.state_blocks].long()] = 0.0
        prefix = None
        if ahead:
            shared = requests * blocks + torch.arange(ahead, dtype=torch.int32, device=device).expand(requests, -1)
            prefix = Prefix(pages, shared, torch.full((requests,), self.protected, device=device))
        return pages, table.expand(-1, KV_HEADS, -1), prefix
