"""What the bytes and the operations allow on one core, beside what the CPU kernels take.

First the machine: bytes read per second, in one stream and in blocks of a page in random order, and multiply-adds per
second in float32 and bfloat16. Then decode steps, their caches well beyond the processor's, and prefill behind a full
cache: bytes that must be moved and operations that must be done, counted; the time these allow at least (the floor), the time
measured, and their ratio. A decode step is paired with the same step without a scorer; what it takes longer can come out
below the scorer's own floor, as it overlaps with the rest. Rows go to benchmarks/results/roofline.csv.

    python benchmarks/roofline.py [--sizes 64 128] [--budgets 1024 2048 4096]
"""

import argparse
import statistics
import sys
import time
from pathlib import Path

import record
import torch

from kvpop_vllm.kernels import ops
from kvpop_vllm.kernels.dispatch import load_extension
from kvpop_vllm.kernels.ops import RetentionRule
from kvpop_vllm.kernels.pages import PageLayout
from kvpop_vllm.scorers import ScorerConfig, build

RESULTS = record.ROOT / "benchmarks" / "results" / "roofline.csv"
SINKS, WINDOW = 4, 64
CACHES = 256 << 20
"""Bytes of a working set that no cache holds."""


def main() -> int:
    options = parse_arguments()
    torch.set_num_threads(1)
    machine = measure_machine()
    for name, value in machine.items():
        print(f"{name:24} {value / 1e9:8.1f} G/s")
    rows = []
    for size in options.sizes:
        for budget in options.budgets:
            rows += decode(size, budget, options, machine)
            rows += prefill(size, budget, options, machine)
    print(report(rows))
    if not options.no_csv:
        record.append(RESULTS, rows)
    return 0


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=[64, 128], help="D (default 64 128)")
    parser.add_argument("--budgets", type=int, nargs="+", default=[1024, 2048, 4096], help="B")
    parser.add_argument("--heads", type=int, default=3, help="KV heads (default 3)")
    parser.add_argument("--group", type=int, default=3, help="query heads per KV head (default 3)")
    parser.add_argument("--rounds", type=int, default=9, help="paired repetitions, the median counts (default 9)")
    parser.add_argument("--isa", help=f"instruction set, of {', '.join(load_extension().isa_levels())}")
    parser.add_argument("--no-csv", action="store_true", help="do not append to benchmarks/results/roofline.csv")
    options = parser.parse_args()
    if options.isa:
        load_extension().set_isa(options.isa)
    return options


def measure_machine() -> dict[str, float]:
    """Bytes or operations per second of one thread, the best of some tries: what the machine can do when undisturbed."""
    from torch.utils.cpp_extension import load

    source = Path(__file__).with_suffix(".cpp")
    native = load("kvpop_roofline", [str(source)], extra_cflags=["-O3", "-march=native"])
    memory = torch.zeros(CACHES, dtype=torch.uint8)
    page = PageLayout(1, 64, torch.bfloat16).region_bytes // 256 * 256
    stream, pages = torch.arange(CACHES // (1 << 20)), torch.randperm(CACHES // page)
    return {
        "read, one stream": CACHES / min(native.read_once(memory, stream, 1 << 20) for _ in range(7)),
        "read, pages shuffled": len(pages) * page / min(native.read_once(memory, pages, page) for _ in range(7)),
        "float32 operations": max(native.float_rate(10_000_000) for _ in range(3)),
        "bfloat16 operations": max(native.bf16_rate(10_000_000) for _ in range(3)),
    }


class Problem:
    """Full caches of R requests and one more token for each."""

    def __init__(self, size: int, budget: int, requests: int, heads: int, group: int, kind: str | None):
        self.scorer = None
        if kind:
            config = ScorerConfig("llama", 1, heads, size, kind, SINKS, WINDOW, budget - SINKS - WINDOW, skip=True)
            self.scorer = build(config)
        weights = self.scorer.weights() if self.scorer else None
        log_gamma = torch.full((heads,), -1e-3, dtype=torch.float64)
        self.rule = RetentionRule(SINKS, WINDOW, log_gamma, 1, weights)
        self.layout = PageLayout(heads, size, torch.bfloat16, state_floats=getattr(weights, "state_floats", 0))
        self.blocks = self.layout.blocks(budget, budget)
        raw = torch.zeros(requests * self.blocks, heads, self.layout.region_bytes, dtype=torch.uint8)
        self.pages = self.layout.view(raw)
        self.pages.k.normal_(), self.pages.v.normal_(), self.pages.score.normal_()
        self.pages.position.random_(0, budget)
        order = torch.randperm(requests * self.blocks).int().view(requests, 1, self.blocks)
        self.table = order.expand(-1, heads, -1)
        if weights is not None and self.layout.state_blocks:
            self.pages.state[order[:, 0, : self.layout.state_blocks].flatten().long()] = 0.01
        slot_zero = order[:, 0, self.layout.state_blocks].long()
        self.pages.position[slot_zero, :, 0] = budget
        self.at = budget
        self.q = torch.randn(requests, heads * group, size, dtype=torch.bfloat16)
        self.k, self.v = torch.randn(2, requests, heads, size, dtype=torch.bfloat16)
        self.budgets = torch.full((requests, heads), budget, dtype=torch.int32)

    def step(self) -> float:
        positions = torch.full((len(self.q),), self.at)
        begin = time.perf_counter()
        ops.decode_step(
            self.q, self.k, self.v, self.pages, self.table, positions, self.budgets, self.budgets,
            rule=self.rule, scale=0.1, impl="cpp",
        )  # fmt: skip
        self.at += 1
        return time.perf_counter() - begin


def decode(size: int, budget: int, options, machine: dict) -> list[dict]:
    """A step without a scorer reads all keys, values, scores and positions; with one, also weights and the state, twice."""
    heads, group = options.heads, options.group
    requests = max(1, CACHES // (heads * budget * 4 * size))
    plain = Problem(size, budget, requests, heads, group, None)
    scored = Problem(size, budget, requests, heads, group, "mlstm")
    pairs = []
    with torch.no_grad():
        for _ in range(options.rounds + 2):
            pairs.append((plain.step(), scored.step()))
    alone, both = (statistics.median(column) for column in zip(*pairs[2:], strict=True))
    extra = statistics.median(b - a for a, b in pairs[2:])
    lanes = requests * heads
    weights = sum(t.numel() for t in scored.scorer.parameters()) * 4
    state = 2 * 4 * scored.rule.scorer.state_floats * lanes
    slots, products = (4 * size + 8) * budget * lanes, 4 * size * budget * group * lanes
    scoring = state + weights, scorer_operations(scored.rule.scorer, size) * lanes
    kinds = [
        ("without a scorer", slots, products, 0, alone),
        ("scorer's share", scoring[0], 0, scoring[1], extra),
        ("with a scorer", slots + scoring[0], products, scoring[1], both),
    ]
    return [row("decode " + n, size, budget, requests, b, (p, o), t, machine, options) for n, b, p, o, t in kinds]


def scorer_operations(weights, size: int) -> int:
    """Of one head and token: three projections, and the state written and read once."""
    columns, features, values = weights.q_proj.shape[2], weights.features, weights.value_size
    return 2 * 2 * size * (2 * columns + values) + 2 * 2 * features * values


def prefill(size: int, budget: int, options, machine: dict) -> list[dict]:
    """2,048 tokens of one request behind a full cache."""
    length, heads, group = 2048, options.heads, options.group
    times = []
    with torch.no_grad():
        problem = Problem(size, budget, 1, heads, group, "mlstm")
        q = torch.randn(length, heads * group, size, dtype=torch.bfloat16)
        k, v = torch.randn(2, length, heads, size, dtype=torch.bfloat16)
        for _ in range(3):
            begin = time.perf_counter()
            ops.prefill_chunk(
                q, k, v, problem.pages, problem.table[0], problem.at, problem.budgets[0],
                rule=problem.rule, scale=0.1, impl="cpp",
            )  # fmt: skip
            problem.at += length
            times.append(time.perf_counter() - begin)
    products = 4 * size * budget * group * heads * length
    scoring = scorer_operations(problem.rule.scorer, size) * heads * length
    return [row("prefill", size, budget, 1, 0, (products, scoring), statistics.median(times), machine, options)]


def row(op, size, budget, requests, bytes_moved, operations, seconds, machine, options) -> dict:
    """``operations``: those with keys and values, in bfloat16 where the kernels can, and those in float32."""
    isa, stream = load_extension().current_isa(), machine["read, one stream"]
    low = machine["bfloat16 operations" if isa == "avx512_bf16" else "float32 operations"]
    floor = max(bytes_moved / stream, operations[0] / low + operations[1] / machine["float32 operations"])
    return {
        "isa": isa,
        "op": op,
        "head_size": size,
        "budget": budget,
        "requests": requests,
        "heads": options.heads,
        "group": options.group,
        "megabytes": f"{bytes_moved / 1e6:.2f}",
        "gigaoperations": f"{sum(operations) / 1e9:.3f}",
        "floor_ms": f"{1e3 * floor:.3f}",
        "ms": f"{1e3 * seconds:.3f}",
        "ms_over_floor": f"{seconds / floor:.2f}",
        "stream_gb_s": f"{stream / 1e9:.1f}",
    }


def report(rows: list[dict]) -> str:
    names = ["op", "head_size", "budget", "requests", "megabytes", "gigaoperations", "floor_ms", "ms", "ms_over_floor"]
    table = [names] + [[str(r[name]) for name in names] for r in rows]
    widths = [max(len(line[i]) for line in table) for i in range(len(names))]
    return "\n".join("  ".join(c.rjust(w) for c, w in zip(line, widths, strict=True)) for line in table)


if __name__ == "__main__":
    sys.exit(main())
