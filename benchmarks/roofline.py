"""Time that bytes and operations allow on one core, beside the time of the CPU kernels.

The machine is measured first: bytes read per second, in one stream and in pages in random order, and
multiply-adds per second in float32 and bfloat16. Then come decode steps, whose caches exceed the processor's,
and prefill behind a full cache. For each the bytes that must be moved and the operations that must be done
are counted. The table gives the time that these need at least (the floor), the time measured, and their
ratio. Every round reads a stream and takes one step, and its ratios are to that round's bandwidth.

A step of attention alone has a free slot and no scorer. The additional time of a whole step is the share of
scorer and eviction. A scorer alone is measured as the difference between steps with and without it, for
requests that keep two tokens, so many that their states exceed the caches. Rows are appended to
benchmarks/results/roofline.csv.

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
from kvpop_vllm.kernels.pages import BLOCK_SLOTS, PageLayout
from kvpop_vllm.scorers import build, make_config

RESULTS = record.ROOT / "benchmarks" / "results" / "roofline.csv"
SINKS, WINDOW = 4, 64
CACHES = 256 << 20
"""Bytes of a working set that exceeds all caches."""


def main() -> int:
    """Run the benchmark and return its exit code."""
    options = parse_arguments()
    torch.set_num_threads(1)
    machine = Machine()
    for name, value in machine.rates.items():
        print(f"{name:24} {value / 1e9:8.1f} G/s")
    rows = []
    for size in options.sizes:
        machine.pages = machine.page_rate(size)
        print(f"{f'read, pages of D = {size}':24} {machine.pages / 1e9:8.1f} G/s")
        rows.append(scorer(size, options, machine))
        for budget in options.budgets:
            rows += decode(size, budget, options, machine)
            rows += prefill(size, budget, options, machine)
    print(report(rows))
    if not options.no_csv:
        record.append(RESULTS, rows)
    return 0


def parse_arguments():
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=[64, 128], help="D (default 64 128)")
    parser.add_argument("--budgets", type=int, nargs="*", default=[1024, 2048, 4096], help="B; none: a scorer alone")
    parser.add_argument("--heads", type=int, default=3, help="KV heads (default 3)")
    parser.add_argument("--group", type=int, default=3, help="query heads per KV head (default 3)")
    parser.add_argument("--rounds", type=int, default=9, help="paired repetitions, the median counts (default 9)")
    parser.add_argument("--isa", help=f"instruction set, of {', '.join(load_extension().isa_levels())}")
    parser.add_argument("--no-csv", action="store_true", help="do not append to benchmarks/results/roofline.csv")
    options = parser.parse_args()
    if options.isa:
        load_extension().set_isa(options.isa)
    return options


class Machine:
    """Rates of one thread in bytes or operations per second: the best of several tries."""

    def __init__(self):
        from torch.utils.cpp_extension import load

        source = Path(__file__).with_suffix(".cpp")
        self.native = load("kvpop_roofline", [str(source)], extra_cflags=["-O3", "-march=native"])
        self.memory, self.stream = torch.zeros(CACHES, dtype=torch.uint8), torch.arange(CACHES >> 20)
        self.float32 = max(self.native.float_rate(10_000_000) for _ in range(3))
        self.rates = {
            "read, one stream": max(self.read_rate() for _ in range(7)),
            "float32 operations": self.float32,
            "bfloat16 operations": max(self.native.bf16_rate(10_000_000) for _ in range(3)),
        }
        low = self.rates["bfloat16 operations"] if load_extension().current_isa().endswith("_bf16") else 0
        self.products = low or self.float32
        # prefill's products then; torch's are the best known
        tiles = load_extension().current_isa().startswith("amx")
        self.prefill_products = max(matrix_rate() for _ in range(5)) if tiles else self.products

    def page_rate(self, size: int) -> float:
        """Return the read rate of a head's pages in random order.

        The next page is fetched while one is read.
        """
        page = PageLayout(1, size, torch.bfloat16).region_bytes // 256 * 256
        order = torch.randperm(CACHES // page)
        return len(order) * page / min(self.native.read_once(self.memory, order, page, True) for _ in range(7))

    def read_rate(self) -> float:
        """Return the current read rate of one stream."""
        return CACHES / self.native.read_once(self.memory, self.stream, 1 << 20, False)


class Problem:
    """Full caches of R requests and one more token for each.

    ``free`` is the number of slots beyond the budget, so that nothing is evicted.
    """

    def __init__(self, size, budget, requests, heads, group, kind=None, *, free=0, sinks=SINKS, window=WINDOW):
        self.scorer = None
        if kind:
            shape = {"model_type": "llama", "num_layers": 1, "num_kv_heads": heads, "head_dim": size}
            slots = {"sinks": sinks, "window": window, "topk": budget - sinks - window}
            self.scorer = build(make_config(shape, kind, source="roofline", skip=True, **slots))
        weights = self.scorer.weights() if self.scorer else None
        log_gamma = torch.full((heads,), -1e-3, dtype=torch.float64)
        self.rule = RetentionRule(sinks, window, log_gamma, 1, weights)
        self.layout = PageLayout(heads, size, torch.bfloat16, state_floats=getattr(weights, "state_floats", 0))
        self.blocks = self.layout.blocks(budget + free, budget + free)
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
        self.budgets = torch.full((requests, heads), budget + free, dtype=torch.int32)

    def seconds(self) -> float:
        """Return the seconds of one step."""
        positions = torch.full((len(self.q),), self.at)
        begin = time.perf_counter()
        ops.decode_step(
            self.q, self.k, self.v, self.pages, self.table, positions, self.budgets,
            rule=self.rule, scale=0.1, impl="cpp",
        )  # fmt: skip
        self.at += 1
        return time.perf_counter() - begin


def decode(size: int, budget: int, options, machine: Machine) -> list[dict]:
    """Return the rows of decode steps: attention, scorer and eviction, and both together.

    Attention reads all keys and values. Eviction reads all scores and positions. A scorer reads its weights
    once and moves its state twice.
    """
    requests = max(1, CACHES // (options.heads * budget * 4 * size))
    shape = size, budget, requests, options.heads, options.group
    problems = {"attention": Problem(*shape, free=BLOCK_SLOTS), "decode": Problem(*shape, "mlstm")}
    times = []
    with torch.no_grad():
        for _ in range(options.rounds + 2):
            rate = machine.read_rate()
            times.append({"rate": rate} | {name: problem.seconds() for name, problem in problems.items()})
    times, lanes, weights = times[2:], requests * options.heads, problems["decode"].rule.scorer
    slots, products = 4 * size * budget * lanes, 4 * size * budget * options.group * lanes
    state = 2 * 4 * weights.state_floats * lanes + sum(t.numel() for t in problems["decode"].scorer.parameters()) * 4
    scoring = scorer_operations(weights, size) * lanes

    def told(op, moved, operations, seconds):
        return row(
            op, size, budget, requests, (moved, *operations), [t["rate"] for t in times], seconds, machine, options
        )

    rows = [told("attention", slots, (products, 0), [t["attention"] for t in times])]
    extra, moved = [t["decode"] - t["attention"] for t in times], state + 8 * budget * lanes
    rows.append(told("scorer and eviction", moved, (0, scoring), extra))
    rows.append(told("decode", slots + moved, (products, scoring), [t["decode"] for t in times]))
    return rows


def scorer(size: int, options, machine: Machine) -> dict:
    """Return the row of a scorer alone; the state is read and written, and the weights are read once."""
    probe = Problem(size, 2, 1, options.heads, options.group, "mlstm", sinks=0, window=1)
    floats = probe.rule.scorer.state_floats
    requests = max(1, CACHES // (options.heads * 4 * floats))
    problem, without = (
        Problem(size, 2, requests, options.heads, options.group, kind, sinks=0, window=1) for kind in ("mlstm", None)
    )
    lanes, rates, seconds = requests * options.heads, [], []
    with torch.no_grad():
        for _ in range(options.rounds + 2):
            rates.append(machine.read_rate())
            seconds.append(problem.seconds() - without.seconds())
    moved = 2 * 4 * floats * lanes + sum(t.numel() for t in problem.scorer.parameters()) * 4
    operations = 0, scorer_operations(problem.rule.scorer, size) * lanes
    return row("scorer alone", size, 2, requests, (moved, *operations), rates[2:], seconds[2:], machine, options)


def scorer_operations(weights, size: int) -> int:
    """Return the operations of one head and token: three projections, and the state written and read once."""
    columns, features, values = weights.q_proj.shape[2], weights.features, weights.value_size
    return 2 * 2 * size * (2 * columns + values) + 2 * 2 * features * values


def prefill(size: int, budget: int, options, machine: Machine) -> list[dict]:
    """Return the row of 2,048 tokens of one request behind a full cache.

    All of the cache is read at least once.
    """
    length, heads, group = 2048, options.heads, options.group
    times = []
    with torch.no_grad():
        problem = Problem(size, budget, 1, heads, group, "mlstm")
        q = torch.randn(length, heads * group, size, dtype=torch.bfloat16)
        k, v = torch.randn(2, length, heads, size, dtype=torch.bfloat16)
        for _ in range(4):
            rate, begin = machine.read_rate(), time.perf_counter()
            ops.prefill_chunk(
                q, k, v, problem.pages, problem.table[0], problem.at, problem.budgets[0],
                rule=problem.rule, scale=0.1, impl="cpp",
            )  # fmt: skip
            problem.at += length
            times.append((rate, time.perf_counter() - begin))
    products = 4 * size * budget * group * heads * length
    scoring = scorer_operations(problem.rule.scorer, size) * heads * length
    moved = heads * (budget + length) * 4 * size + 2 * length * heads * group * size * 2
    rates, seconds = zip(*times[1:], strict=True)
    needs, fast = (moved, products, scoring), machine.prefill_products
    return [row("prefill", size, budget, 1, needs, rates, seconds, machine, options, fast)]


def matrix_rate() -> float:
    """Return the operations per second of torch's product of bfloat16 matrices as wide as a model's."""
    a, b = torch.randn(2048, 576).bfloat16(), torch.randn(576, 1536).bfloat16()
    begin = time.perf_counter()
    a @ b
    return 2 * a.numel() * b.shape[1] / (time.perf_counter() - begin)


def row(op, size, budget, requests, needs, rates, seconds, machine: Machine, options, fast: float = 0) -> dict:
    """Return one row of the CSV file, with the median, least and largest ratio of the rounds.

    Args:
        op: name of the op.
        size: D.
        budget: B.
        requests: R.
        needs: bytes, operations with keys and values (in bfloat16 where the kernels can), operations in
            float32.
        rates: read rate of each round.
        seconds: time of each round.
        machine: the machine's rates.
        options: options of the command line.
        fast: rate of operations with keys and values; default: the machine's.
    """
    moved, products, scoring = needs
    compute = products / (fast or machine.products) + scoring / machine.float32
    floors = [max(moved / rate, compute) for rate in rates]
    ratios = [s / f for s, f in zip(seconds, floors, strict=True)]
    return {
        "isa": load_extension().current_isa(),
        "op": op,
        "head_size": size,
        "budget": budget,
        "requests": requests,
        "heads": options.heads,
        "group": options.group,
        "megabytes": f"{moved / 1e6:.2f}",
        "gigaoperations": f"{(products + scoring) / 1e9:.3f}",
        "floor_ms": f"{1e3 * statistics.median(floors):.3f}",
        "ms": f"{1e3 * statistics.median(seconds):.3f}",
        "ms_over_floor": f"{statistics.median(ratios):.2f}",
        "least": f"{min(ratios):.2f}",
        "largest": f"{max(ratios):.2f}",
        "stream_gb_s": f"{statistics.median(rates) / 1e9:.1f}",
        "best_stream_gb_s": f"{machine.rates['read, one stream'] / 1e9:.1f}",
        "pages_gb_s": f"{machine.pages / 1e9:.1f}",
        "products_g_s": f"{(fast or machine.products) / 1e9:.1f}",
        "float32_g_s": f"{machine.float32 / 1e9:.1f}",
    }


def report(rows: list[dict]) -> str:
    """Return the rows as a table."""
    names = ["op", "head_size", "budget", "requests", "megabytes", "gigaoperations", "floor_ms", "ms", "ms_over_floor"]
    names += ["least", "largest", "stream_gb_s"]
    table = [names] + [[str(r[name]) for name in names] for r in rows]
    widths = [max(len(line[i]) for line in table) for i in range(len(names))]
    return "\n".join("  ".join(c.rjust(w) for c, w in zip(line, widths, strict=True)) for line in table)


if __name__ == "__main__":
    sys.exit(main())
