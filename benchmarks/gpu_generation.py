"""Decoding from end to end, as KVpop's Figure 4 has it: a model of Qwen3-8B's shape through `KVpopCache`, beside transformers' static cache.

Weights are drawn. No prefill is paid: caches are written in the state that so many tokens leave behind, random keys, values and scores, and
for KVpop the position words, token counts and clocks that its own reader takes for valid; the scorers' states are those of one token. Time and
memory do not depend on what is held.

The static cache is attended to twice: as transformers does it in a graph, with a mask and keys repeated for each query head, and without
either, which is right where the cache is full, and the faster one. A pass is one greedy token of every row, from embedding to argmax. The floor is
the bytes that it has to read, weights and cache, at the bandwidth of a large copy.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from gpu import Bench, ops_take
from gpu_caches import (
    QWEN3_8B,
    TINIER,
    TINY,
    Decoding,
    Drawn,
    check_held,
    empty,
    full_cache,
    written_cache,
)
from gpu_clock import bandwidth, paired, side_stream
from gpu_generation_checks import dense_right, kvpop_right

CONTEXTS = 16384, 131072, 65536, 32768
"""The ends first, in case that time runs short."""
COMPRESSION, FIXED = 4, 4096
"""Tokens per token held, and a budget that does not grow."""
ROUNDS = 30
ROOM = 4 << 30
"""Bytes that must be free beside a cache."""
GIB = 1 << 30
FLAT = 1.05
"""Latency that grows by no more from the first context to the last is called flat."""
DENSE = "dense", "dense, no mask"
KVPOP = "kvpop, 75% off", f"kvpop, B {FIXED}"
PARTS = {"half": 2, "a quarter": 1}
"""Caches of the tiny model -> quarters of the tokens that they hold."""
RIGHT = {
    "a captured pass is right, kvpop": (KVPOP, kvpop_right),
    "a captured pass is right, dense": (DENSE, dense_right),
    "caches that are written go on, kvpop": (
        KVPOP,
        lambda bench: written_right(bench, list(PARTS)[: 1 if bench.small else 2]),
    ),
    "caches that are written go on, dense": (DENSE, lambda bench: written_right(bench, DENSE)),
}
"""Case -> what is not timed where it is wrong, and the check."""


def generation(bench: Bench):
    """Cases; see :data:`gpu.Section`."""
    if bench.watched:
        return
    for case, (_, check) in RIGHT.items():
        yield case, lambda check=check: check(bench)
    if bench.small:
        return
    wrong = {name: case for case, (names, _) in RIGHT.items() if case in bench.wrong for name in names}
    for name, case in wrong.items():
        bench.say(f"generation, {name}: not timed, as it is wrong that {case}")
    timed = [name for name in (*DENSE, *KVPOP) if name not in wrong]
    if not timed:
        return
    bench.say(f"generation: {' '.join(__doc__.split(chr(10) * 2)[1].split())}")
    found: dict[int, dict[str, Timed]] = {}
    with Drawn(bench, QWEN3_8B) as drawn:
        for context in CONTEXTS:
            name = f"generation, batch 1, context {context}"
            yield name, lambda context=context: times(bench, drawn, 1, context, timed, found)
        name = f"generation, batch 32, context {CONTEXTS[0]}"
        yield name, lambda: times(bench, drawn, 32, CONTEXTS[0], timed, {})
    for line in in_short(found):
        bench.say(line)


# what is right


def written_right(bench: Bench, names: Sequence[str]) -> Iterator[dict]:
    """What is timed later, of a tiny model: passes are finite, and caches stay as full as they should."""
    shape, window, requests, context = (TINIER, 4, 1, 40) if bench.small else (TINY, 16, 2, 400)
    budgets = {name: context * PARTS.get(name, 0) // 4 for name in names}
    with Drawn(bench, shape, window=window) as drawn, ops_take("triton" if bench.small else None):
        found = contenders(bench, drawn, requests, context, budgets)
        for name, timed in found.items():
            assert isinstance(timed, Timed), f"{name}: {timed}"
            for _ in range(1 if bench.small else 3):
                timed.replay()
            timed.check()
    yield bench.row("caches that go on", len(found), "count")


# times


@dataclass
class Timed:
    """A cache and its pass. cache: its bytes. read: bytes of it that a pass reads or writes. peak: bytes of weights,
    cache and what else a pass needs, which is not what a prefill would. check: raises AssertionError where a pass was
    none. seconds: of a pass."""

    replay: Callable[[], object]
    cache: int
    read: int
    peak: int
    check: Callable[[], None]
    seconds: float = 0.0


@dataclass
class Missing:
    """A cache that is not timed. needed: bytes that it would have to find free, if that is why. wrong: what went wrong,
    else nothing."""

    needed: int
    wrong: str = ""


def budgets_at(context: int) -> dict[str, int]:
    """Name -> B, 0 of dense ones."""
    return dict.fromkeys(DENSE, 0) | dict(zip(KVPOP, (context // COMPRESSION, FIXED), strict=True))


def times(
    bench: Bench, drawn: Drawn, requests: int, context: int, names: list[str], found: dict[int, dict[str, Timed]]
) -> Iterator[dict]:
    """A pass with every cache, in turn, and what those need that do not fit; names: of the caches. found: what each
    context gave.

    Raises:
        AssertionError: one could not be made, or is not right after its passes; the rows of the others come before.
    """
    budgets = {name: budget for name, budget in budgets_at(context).items() if name in names}
    speed, made = bandwidth(), contenders(bench, drawn, requests, context, budgets)
    distinct = {id(each): each for each in made.values() if isinstance(each, Timed)}
    seconds = paired({key: each.replay for key, each in distinct.items()}, ROUNDS) if distinct else {}
    for key, each in distinct.items():
        each.seconds = seconds[key]
        shared = [name for name in made if made[name] is each]
        if wrong := attempt(bench, f"{' and '.join(shared)}, after its passes", each.check):
            made |= dict.fromkeys(shared, wrong)
    for name, each in made.items():
        if isinstance(each, Missing) and not each.wrong:
            yield bench.row(f"{name}, skipped, memory that must be free", each.needed / GIB, "GiB")
    timed = found[context] = {name: each for name, each in made.items() if isinstance(each, Timed)}
    for name, each in timed.items():
        floor = 1e3 * (drawn.read + each.read) / speed
        yield bench.row(f"{name}, a token", 1e3 * each.seconds, "ms", floor)
        yield bench.row(f"{name}, tokens a second", requests / each.seconds, "1/s")
        yield bench.row(f"{name}, cache", each.cache / GIB, "GiB")
        yield bench.row(f"{name}, peak memory while decoding", each.peak / GIB, "GiB")
    for each in distinct.values():
        each.replay = each.check = None  # gives the memory back
    del distinct
    empty(bench)
    wrong = {name: each.wrong for name, each in made.items() if isinstance(each, Missing) and each.wrong}
    assert not wrong, "; ".join(f"{name}: {what}" for name, what in wrong.items())


def attempt(bench: Bench, what: str, run: Callable[[], object], needed: int = 0):
    """What ``run`` gives, or what is missing, with the reason in the log; needed: bytes, more than 0 where there may be
    too few. Errors are not kept, which would keep the memory of what they interrupted."""
    try:
        return run()
    except Exception as error:  # noqa: BLE001  what one cache does must not cost the others
        if needed and isinstance(error, torch.OutOfMemoryError):
            bench.say(f"{what}: skipped, {str(error).splitlines()[0]}")
            return Missing(needed)
        bench.say(f"{what}: WRONG")
        bench.say(traceback.format_exc())
        return Missing(0, f"{type(error).__name__}: {error}")


def contenders(
    bench: Bench, drawn: Drawn, requests: int, context: int, budgets: dict[str, int]
) -> dict[str, Timed | Missing]:
    """Name -> what is timed, for as many as fit in memory together, small ones first; equal budgets are one."""
    made: dict[object, Timed | Missing] = {}
    config, dense = drawn.model.config, []
    slot = config.num_hidden_layers * config.num_key_value_heads * 2 * config.head_dim * bench.dtype.itemsize
    for name, budget in sorted(budgets.items(), key=lambda item: item[1] or context):
        key, what = budget or name, f"batch {requests}, context {context}, {name}"
        if key in made:
            continue
        needed = ROOM + (0 if dense and not budget else requests * (budget or context) * slot)
        if (left := free(bench)) < needed:
            bench.say(f"{what}: skipped, it needs {needed / GIB:.1f} GiB and {left / GIB:.1f} are free")
            made[key] = Missing(needed)
            continue

        made[key] = attempt(
            bench,
            what,
            lambda name=name, budget=budget: (
                kvpop_timed(bench, drawn, requests, context, budget)
                if budget
                else dense_timed(bench, drawn, requests, context, name, dense)
            ),
            needed,
        )
    return {name: made[budget or name] for name, budget in budgets.items()}


def dense_timed(bench, drawn, requests, context, name: str, dense: list) -> Timed:
    """``dense``: the static cache, where it has been made."""
    if not dense:
        dense += full_cache(drawn.model, requests, context)
    cache, before = dense
    size = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    options = {"attention_mask": {"full_attention": None}} if name == DENSE[1] else {}
    first = torch.zeros(requests, 1, dtype=torch.int64, device=bench.device)
    decoding = Decoding(drawn.model, cache, first, before, **options)
    replay, more = with_peak(bench, decoding)
    return Timed(replay, size, size, drawn.weights + size + more, lambda: check_finite(name, decoding))


def kvpop_timed(bench, drawn, requests, context, budget: int) -> Timed:
    """The cache reads what it has of tokens, and reads and writes its states."""
    cache = written_cache(drawn, requests, context, budget)
    layer, name = cache._layers[0], f"kvpop, B {budget}"
    heads, size = layer.pages.layout.num_kv_heads, layer.pages.layout.head_size
    head = budget * layer.pages.layout.slot_bytes + 8 * layer.rule.state_floats(size)
    scorers = sum(
        x.nbytes
        for each in cache._layers.values()
        for x in vars(each.rule.scorer).values()
        if isinstance(x, torch.Tensor)
    )
    first = torch.zeros(requests, 1, dtype=torch.int64, device=bench.device)
    decoding = Decoding(drawn.model, cache, first)
    replay, more = with_peak(bench, decoding)

    def check():
        check_finite(name, decoding)
        (clock,) = cache._clocks.values()
        if passes := int(clock.positions[0]) - cache.lengths[0]:
            cache.replayed(passes)
        check_held(cache, budget)

    held, read = cache.allocated_bytes(), requests * heads * len(cache) * head + scorers
    return Timed(replay, held, read, drawn.weights + held + scorers + more, check)


def with_peak(bench: Bench, decoding: Decoding) -> tuple[Callable[[], object], int]:
    """What repeats a pass, and how many bytes a pass takes at most beside weights and cache, without the workspace that
    matrix products keep; a prefill would take others."""
    if bench.device != "cuda":
        return decoding.captured(bench), 0
    with torch.cuda.stream(side_stream()):
        few = torch.ones(16, 16, dtype=bench.dtype, device=bench.device)
        torch.mm(few, few)
        del few
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    replay = decoding.captured(bench)
    return replay, torch.cuda.max_memory_allocated() - before


def check_finite(name: str, decoding: Decoding) -> None:
    """Raises AssertionError where a step was refused, which gives no numbers."""
    assert bool(decoding.logits.isfinite().all()), f"{name}: logits are not finite"


def free(bench: Bench) -> float:
    """Bytes of memory that a tensor may take."""
    empty(bench)
    return torch.cuda.mem_get_info()[0] if bench.device == "cuda" else torch.inf


def in_short(found: dict[int, dict[str, Timed]]) -> Iterator[str]:
    """What Figure 4 says: how caches grow, whether latency does, and from which context on KVpop is ahead of the faster dense one."""
    for name in (*DENSE, *KVPOP):
        there = {context: timed[name] for context, timed in sorted(found.items()) if name in timed}
        if len(there) < 2:
            yield f"{name}: {len(there)} contexts measured, which says nothing of growth"
            continue
        (first, a), *_, (last, b) = there.items()
        slower = b.seconds / a.seconds
        yield (
            f"{name}: from {first} to {last} tokens the cache grows {b.cache / a.cache:.2f} times, latency {slower:.2f} times: "
            f"{'flat' if slower <= FLAT else 'not flat'}"
        )
    for name in KVPOP:
        both = {context: pair for context, timed in sorted(found.items()) if (pair := of_both(timed, name))}
        if not both:
            yield f"{name}: not compared with dense"
        elif start := ahead_from(both):
            yield f"{name}: ahead of dense from {start} tokens on"
        else:
            yield f"{name}: not ahead of dense at the longest context measured"


def of_both(timed: dict[str, Timed], name: str) -> tuple[float, float] | None:
    """Seconds of a cache and of the faster dense one, None where one was not measured."""
    dense = [timed[other].seconds for other in DENSE if other in timed]
    return (timed[name].seconds, min(dense)) if dense and name in timed else None


def ahead_from(both: dict[int, tuple[float, float]]) -> int | None:
    """The first context from which on the first number is below the second; contexts rise."""
    start = None
    for context, (own, other) in both.items():
        start = (context if start is None else start) if own < other else None
    return start
