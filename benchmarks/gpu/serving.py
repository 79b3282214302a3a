"""`decode_step` on a GPU: correctness in low precision, and times at Qwen3-8B's shapes.

The floor of a time is the bytes that a step has to move at the bandwidth of a large copy. For attention these
are the keys and values in use. For scorer and eviction they are the state, read and written, and the scores
and positions among which a victim is searched.
"""

from collections.abc import Callable, Iterator
from functools import partial
from unittest import SkipTest, mock

import torch
from full_pages import empty_pages, fill
from kernels.factories import random_rule, random_scorer

from gpu.clock import bandwidth, device_times, graph_of, milliseconds
from gpu.exact import CASES, serve_right
from gpu.full_size import steps_right
from gpu.sections import HEADS, KV_HEADS, SIZE, Bench, Case
from kvpop_vllm.cache.pages import PageLayout, Prefix, cdiv
from kvpop_vllm.kernels import ops
from kvpop_vllm.kernels.ops import RetentionRule

APART = mock.patch("kvpop_vllm.kernels.triton.decode_step._dependent", lambda device: False)
"""Makes each launch of a step begin when the one before has ended, as on a GPU without dependent launches."""
LAYERS = 36
SINKS, WINDOW, SEEN = 4, 256, 16384
PROTECTED = 8192
"""Tokens of a prompt that all requests of a step share."""
MOST_BYTES = 12 << 30
"""Maximum bytes of pages on any GPU."""

FULL = (("mlstm", 1), ("mlstm", 64), ("key norm", 1), ("key norm", 64))
"""Rules and requests that are checked at production's shapes; attention of 64 is not split among programs."""
PROFILED = 1, 8, 64
"""Batches whose kernels are timed one by one."""
DENSE = tuple((context, requests) for context in (16384, 65536) for requests in (1, 8, 64))
"""Contexts and batches of dense attention to a contiguous cache."""
FREE = 2 << 30
"""Bytes that must be free in addition to a dense cache."""
TAILS = "recency", "key norm", "mlstm", "mlstm read at once", "mean mass"
"""Cases after a prefix that a chunk begins in, and after one that a chunk ends in."""
FEW, FEW_FULL, FEW_TAILS = ("recency", "mlstm", "moments"), (("mlstm", 1),), ("mlstm",)
"""Cases that run with interpreted kernels or under a sanitizer."""


def cases(bench: Bench) -> Iterator[Case]:
    """Yield the cases of the section."""
    steps, sizes = [0] * 70, dict(requests=3)
    chunks, prefix_sizes = [61, 25, *[0] * 8], dict(protected=(70,), replay=48)
    if bench.small:
        steps, sizes = steps[:19], dict(requests=1, heads=1, size=32, topk=12)
        chunks, prefix_sizes = [9, *chunks[1:]], dict(protected=(18,), heads=1, size=32, group=1)
    for name in FEW if bench.few else CASES:
        yield Case(f"decode_step is right, {name}", partial(serve_right, name=name, steps=steps, **sizes))
    for kind, requests in FEW_FULL if bench.few else FULL:
        run = partial(steps_right, kind=kind, requests=requests)
        yield Case(f"decode_step is right at full size, {kind}, batch {requests}", run)
    for name in FEW_TAILS if bench.few else TAILS:
        run = partial(serve_right, name=name, steps=chunks, **prefix_sizes)
        yield Case(f"a prefix and its tail are right, {name}", run)
    needs = tuple(f"decode_step is right, {name}" for name in ("mlstm", "recency"))
    needs += tuple(f"decode_step is right at full size, {kind}, batch {requests}" for kind, requests in FULL)
    for requests in PROFILED:
        yield Case(f"kernels of a step, batch {requests}", partial(kernel_times, requests=requests), needs)
    for context, requests in DENSE:
        run = partial(dense_times, context=context, requests=requests)
        yield Case(f"dense attention, context {context}, batch {requests}", run, needs[:1])
    batches = [(budget, 1 << i, 0) for budget in (2048, 4096) for i in range(9)]
    for budget, requests, protected in (*batches, *((2048, requests, PROTECTED) for requests in (1, 16, 64))):
        name = f", behind {protected} shared tokens" if protected else ""
        times = partial(step_times, budget=budget, requests=requests, protected=protected)
        yield Case(f"decode_step, B {budget}, batch {requests}{name}", times, needs)


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
    attention, complete = (layer_step(bench, rule, budget, requests, protected) for rule in (recency(), kvpop))
    with APART:
        apart = layer_step(bench, kvpop, budget, requests, protected)
    keys = requests * KV_HEADS * (budget + protected) * 2 * SIZE * bench.dtype.itemsize
    state = requests * KV_HEADS * 4 * (2 * kvpop.state_floats(SIZE) + 2 * budget)
    yield bench.row("attention, a layer", attention, "ms", keys / bandwidth())
    yield bench.row("kvpop, a layer", complete, "ms", (keys + state) / bandwidth())
    yield bench.row("kvpop, launches apart, a layer", apart, "ms", (keys + state) / bandwidth())
    yield bench.row("scorer and eviction, a layer", complete - attention, "ms", state / bandwidth())


def recency() -> RetentionRule:
    """Return a rule that keeps the most recent tokens."""
    return RetentionRule(SINKS, WINDOW, torch.full((KV_HEADS,), -1.0, dtype=torch.float64))


def kernel_times(bench: Bench, requests: int) -> Iterator[dict]:
    """Yield the time that each kernel of a layer's step takes, with KVpop's scorer and B = 4,096."""
    draw = torch.Generator().manual_seed(0)
    kvpop = random_rule(random_scorer("mlstm", KV_HEADS, SIZE, draw, skip=True), KV_HEADS, SINKS, WINDOW, draw)
    with APART:  # so that no kernel's time counts another's
        replay, layers, _ = layers_of_step(bench, kvpop, 4096, requests, 0)
    for name, time in device_times(replay).items():
        yield bench.row(f"{name}, a layer", time / layers, "ms")


def dense_times(bench: Bench, context: int, requests: int) -> Iterator[dict]:
    """Yield the time of SDPA of one query to a contiguous cache of a layer.

    Raises:
        SkipTest: the cache does not fit.
    """
    size = requests * KV_HEADS * context * 2 * SIZE * bench.dtype.itemsize
    if torch.cuda.mem_get_info()[0] < size + FREE:
        raise SkipTest(f"it needs {(size + FREE) / (1 << 30):.0f} GiB")
    q, k, v = (
        torch.randn(requests, heads, length, SIZE, dtype=bench.dtype, device=bench.device)
        for heads, length in ((HEADS, 1), (KV_HEADS, context), (KV_HEADS, context))
    )
    run = partial(torch.nn.functional.scaled_dot_product_attention, q, k, v, scale=SIZE**-0.5, enable_gqa=True)
    yield bench.row("SDPA, a layer", milliseconds(run), "ms", size / bandwidth())


def layer_step(bench: Bench, rule: RetentionRule, budget: int, requests: int, protected: int) -> float:
    """Return the milliseconds of a layer's step of :func:`layers_of_step`."""
    replay, layers, out = layers_of_step(bench, rule, budget, requests, protected)
    time = milliseconds(replay) / layers
    bench.check(bool(out.isfinite().all()), "outputs are not finite, as after a wrong start")
    return time


def layers_of_step(
    bench: Bench, rule: RetentionRule, budget: int, requests: int, protected: int
) -> tuple[Callable[[], object], int, torch.Tensor]:
    """Return a replay of a step's CUDA graph, with enough layers to exceed the GPU's cache, their number, and its outputs.

    The requests have seen :data:`SEEN` tokens.
    """
    rule, layout = rule.to(bench.device), PageLayout(KV_HEADS, SIZE, bench.dtype, state_floats=rule.state_floats(SIZE))
    ahead = cdiv(protected, layout.block_slots)
    blocks = requests * layout.blocks(budget, budget)
    size = (blocks + ahead) * KV_HEADS * layout.region_bytes
    layers = []
    with torch.device(bench.device):
        for _ in range(max(1, min(LAYERS, MOST_BYTES // size, cdiv(1 << 30, size)))):
            pages, table = empty_pages(layout, requests, budget, ahead)
            fill(pages, table, rule, budget, SEEN)
            shared = (blocks + torch.arange(ahead, dtype=torch.int32)).expand(requests, -1)
            prefix = Prefix(pages, shared, torch.full((requests,), protected)) if protected else None
            layers.append((pages, table, prefix))
        positions = torch.full((requests,), SEEN)
        budgets = torch.full((requests, KV_HEADS), budget, dtype=torch.int32)
        tokens = [torch.randn(requests, heads, SIZE, dtype=bench.dtype) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    out = torch.empty_like(tokens[0])

    def step():
        for pages, table, prefix in layers:
            place = pages, table, positions, budgets
            result, _ = ops.decode_step(*tokens, *place, rule=rule, scale=SIZE**-0.5, prefix=prefix, impl="triton")
        out.copy_(result)
        positions.add_(1)

    return graph_of(step), len(layers), out
