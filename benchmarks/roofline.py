"""Time that bytes and operations allow on one core, next to the time of the CPU kernels.

The machine is measured first: bytes read per second, in one stream and in pages in random order, and
multiply-adds per second in float32 and bfloat16. Then come decode steps, whose caches exceed the processor's,
and prefill after a full cache. For each the bytes that must be moved and the operations that must be done
are counted. The table gives the time that these need at least (the floor), the time measured, and their
ratio. Every round reads a stream and takes one step, and its ratios are to that round's bandwidth.

A step of attention alone has a free slot and no scorer. The additional time of a whole step is the share of
scorer and eviction. A scorer alone is measured as the difference between steps with and without it, for
requests that keep two tokens, so many that their states exceed the caches. Rows are appended to
benchmarks/results/roofline.csv.

    python benchmarks/roofline.py [--sizes 64 128] [--budgets 1024 2048 4096]
"""

import statistics
import sys
import time
from pathlib import Path

import record
import torch
from full_pages import empty_pages, fill

from kvpop_vllm.cache.pages import BLOCK_SLOTS, PageLayout
from kvpop_vllm.evaluation.output import format_table
from kvpop_vllm.kernels import ops
from kvpop_vllm.kernels.dispatch import load_extension
from kvpop_vllm.kernels.ops import RetentionRule
from kvpop_vllm.scorers import build, make_config

RESULTS = record.RESULTS / "roofline.csv"
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
    columns = (
        "op head_size budget requests megabytes gigaoperations floor_ms ms ms_over_floor least largest stream_gb_s"
    )
    print(format_table(rows, tuple(columns.split())))
    if not options.no_csv:
        record.append(RESULTS, rows)
    return 0


def parse_arguments():
    """Return the options of the command line."""
    parser = record.parser_of(__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=[64, 128], help="D")
    parser.add_argument("--budgets", type=int, nargs="*", default=[1024, 2048, 4096], help="B; none: a scorer alone")
    parser.add_argument("--heads", type=int, default=3, help="KV heads")
    parser.add_argument("--group", type=int, default=3, help="query heads per KV head")
    parser.add_argument("--rounds", type=int, default=9, help="paired repetitions, the median counts")
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

    @torch.no_grad()
    def rounds(self, count: int, skipped: int, *runs) -> list[list[float]]:
        """Return the read rates of ``count`` rounds and the seconds of each function of ``runs`` in them.

        In a round a stream is read and the functions, which return seconds, are called in turn. The first
        ``skipped`` rounds are not counted.
        """
        values = [[self.read_rate(), *(run() for run in runs)] for _ in range(skipped + count)]
        return [list(column) for column in zip(*values[skipped:], strict=True)]


class Problem:
    """Full caches of R requests and one more token for each.

    ``free`` is the number of slots beyond the budget, so that nothing is evicted.
    """

    def __init__(self, size, budget, requests, heads, group, kind=None, *, free=0, sinks=SINKS, window=WINDOW):
        self.lanes, self.scorer_bytes, weights = requests * heads, 0, None
        if kind:
            shape = {"model_type": "llama", "num_layers": 1, "num_kv_heads": heads, "head_dim": size}
            slots = {"sinks": sinks, "window": window, "topk": budget - sinks - window}
            scorer = build(make_config(shape, kind, source="roofline", skip=True, **slots))
            weights, self.scorer_bytes = scorer.weights(), 4 * sum(t.numel() for t in scorer.parameters())
            self.scorer_bytes += 2 * 4 * weights.state_floats * self.lanes
        log_gamma = torch.full((heads,), -1e-3, dtype=torch.float64)
        self.rule = RetentionRule(sinks, window, log_gamma, 1, weights)
        self.layout = PageLayout(heads, size, torch.bfloat16, state_floats=getattr(weights, "state_floats", 0))
        self.pages, self.table = empty_pages(self.layout, requests, budget + free)
        fill(self.pages, self.table, self.rule, budget + free, budget)
        self.position, self.budgets = budget, torch.full((requests, heads), budget + free, dtype=torch.int32)
        self.tokens = random_tokens(requests, heads, group, size)

    def seconds(self) -> float:
        """Return the seconds of one step."""
        place = self.table, torch.full((len(self.table),), self.position), self.budgets
        return self._timed(ops.decode_step, self.tokens, place, 1)

    def chunk_seconds(self, tokens: list[torch.Tensor]) -> float:
        """Return the seconds of a chunk of the only request."""
        return self._timed(ops.prefill_chunk, tokens, (self.table[0], self.position, self.budgets[0]), len(tokens[0]))

    def _timed(self, op, tokens: list[torch.Tensor], place: tuple, count: int) -> float:
        begin = time.perf_counter()
        op(*tokens, self.pages, *place, rule=self.rule, scale=0.1, impl="cpp")
        self.position += count
        return time.perf_counter() - begin


def random_tokens(count: int, heads: int, group: int, size: int) -> list[torch.Tensor]:
    """Return random queries, keys and values."""
    return [torch.randn(count, n, size, dtype=torch.bfloat16) for n in (heads * group, heads, heads)]


def decode(size: int, budget: int, options, machine: Machine) -> list[dict]:
    """Return the rows of decode steps: attention, scorer and eviction, and both together.

    Attention reads all keys and values. Eviction reads all scores and positions. A scorer reads its weights
    once and moves its state twice.
    """
    requests = max(1, CACHES // (options.heads * budget * 4 * size))
    shape = size, budget, requests, options.heads, options.group
    plain, complete = Problem(*shape, free=BLOCK_SLOTS), Problem(*shape, "mlstm")
    rates, attention, together = machine.rounds(options.rounds, 2, plain.seconds, complete.seconds)
    slots, products = 4 * size * budget * plain.lanes, 4 * size * budget * options.group * plain.lanes
    scoring, moved = scorer_operations(complete) * plain.lanes, complete.scorer_bytes + 8 * budget * plain.lanes
    extra = [b - a for a, b in zip(attention, together, strict=True)]
    needs = {
        "attention": ((slots, products, 0), attention),
        "scorer and eviction": ((moved, 0, scoring), extra),
        "decode": ((slots + moved, products, scoring), together),
    }
    place = size, budget, requests
    return [row(op, *place, need, rates, seconds, machine, options) for op, (need, seconds) in needs.items()]


def scorer(size: int, options, machine: Machine) -> dict:
    """Return the row of a scorer alone; the state is read and written, and the weights are read once."""
    shape, roles = (options.heads, options.group), {"sinks": 0, "window": 1}
    floats = Problem(size, 2, 1, *shape, "mlstm", **roles).rule.scorer.state_floats
    requests = max(1, CACHES // (options.heads * 4 * floats))
    problem, plain = (Problem(size, 2, requests, *shape, kind, **roles) for kind in ("mlstm", None))
    rates, seconds = machine.rounds(options.rounds, 2, lambda: problem.seconds() - plain.seconds())
    needs = problem.scorer_bytes, 0, scorer_operations(problem) * problem.lanes
    return row("scorer alone", size, 2, requests, needs, rates, seconds, machine, options)


def scorer_operations(problem: Problem) -> int:
    """Return the operations of one head and token: three projections, and the state written and read once."""
    weights, size = problem.rule.scorer, problem.layout.head_size
    columns, features, values = weights.q_proj.shape[2], weights.features, weights.value_size
    return 2 * 2 * size * (2 * columns + values) + 2 * 2 * features * values


def prefill(size: int, budget: int, options, machine: Machine) -> list[dict]:
    """Return the row of 2,048 tokens of one request after a full cache.

    All of the cache is read at least once.
    """
    length, heads, group = 2048, options.heads, options.group
    problem = Problem(size, budget, 1, heads, group, "mlstm")
    tokens = random_tokens(length, heads, group, size)
    rates, seconds = machine.rounds(3, 1, lambda: problem.chunk_seconds(tokens))
    products = 4 * size * budget * group * heads * length
    moved = heads * (budget + length) * 4 * size + 2 * length * heads * group * size * 2
    needs = moved, products, scorer_operations(problem) * heads * length
    return [row("prefill", size, budget, 1, needs, rates, seconds, machine, options, machine.prefill_products)]


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


if __name__ == "__main__":
    sys.exit(main())
