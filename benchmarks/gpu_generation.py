"""Decoding of a model of Qwen3-8B's shape with `KVpopCache` and transformers' static cache (KVpop Figure 4).

Weights are random. There is no prefill: caches are written in the state after the context, with random keys,
values and scores and, for KVpop, with position words, token counts and positions that its own reader accepts;
the scorers' states are those after one token. Time and memory do not depend on which tokens are held.

The static cache is attended to in two ways: as transformers does it in a graph, with a mask and with keys
repeated for each query head, and without either, which is correct if the cache is full, and faster. A pass is
one greedy token of every row, from embedding to argmax. Its floor is the bytes of weights and cache that it
has to read, at the bandwidth of a large copy.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from gpu import Bench, Case, ops_take
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
"""Contexts; the shortest and the longest come first, in case time runs out."""
COMPRESSION, FIXED = 4, 4096
"""Tokens per retained token, and a budget that does not grow."""
ROUNDS = 30
ROOM = 4 << 30
"""Bytes that must be free beside a cache."""
GIB = 1 << 30
FLAT = 1.05
"""Maximum growth of latency from the first context to the last that is called flat."""
DENSE = "dense", "dense, no mask"
KVPOP = "kvpop, 75% off", f"kvpop, B {FIXED}"
RIGHT = {
    "a captured pass is right, kvpop": (KVPOP, kvpop_right),
    "a captured pass is right, dense": (DENSE, dense_right),
    "caches that are written go on, kvpop": (KVPOP, lambda bench: written_right(bench, {"half": 2, "a quarter": 1})),
    "caches that are written go on, dense": (DENSE, lambda bench: written_right(bench, dict.fromkeys(DENSE, 0))),
}
"""Case -> the caches that are not timed if it fails, and the check."""


def generation(bench: Bench) -> Iterator[Case]:
    """Yield cases; see :data:`gpu.Section`."""
    for case, (_, check) in RIGHT.items():
        yield Case(case, check)
    wrong = {name: case for case, (names, _) in RIGHT.items() if case in bench.wrong for name in names}
    for name, case in wrong.items():
        bench.say(f"generation, {name}: not timed, as it is wrong that {case}")
    timed = [name for name in (*DENSE, *KVPOP) if name not in wrong]
    if bench.few or not timed:
        return
    bench.say(f"generation: {' '.join(__doc__.split(chr(10) * 2)[1].split())}")
    results: dict[int, dict[str, Timed]] = {}
    with Drawn(bench, QWEN3_8B) as drawn:
        for requests, context, kept in (*((1, each, results) for each in CONTEXTS), (32, CONTEXTS[0], {})):
            run = partial(times, drawn=drawn, requests=requests, context=context, names=timed, results=kept)
            yield Case(f"generation, batch {requests}, context {context}", run)
    for line in in_short(results):
        bench.say(line)


# Checks


def written_right(bench: Bench, quarters: dict[str, int]) -> Iterator[dict]:
    """Check written caches of a tiny model: passes are finite, and caches stay as full as they should.

    Args:
        bench: see :class:`gpu.Bench`.
        quarters: name -> quarters of the tokens that a cache holds, 0 for a dense one; with interpreted
            kernels the first budget is enough.
    """
    shape, window, requests, context = (TINIER, 4, 1, 40) if bench.small else (TINY, 16, 2, 400)
    budgets = {name: context * held // 4 for name, held in quarters.items()}
    if bench.small and any(quarters.values()):
        budgets = dict([*budgets.items()][:1])
    with Drawn(bench, shape, window=window) as drawn, ops_take("triton" if bench.small else None):
        caches = timed_caches(bench, drawn, requests, context, budgets)
        for name, timed in caches.items():
            assert isinstance(timed, Timed), f"{name}: {timed}"
            for _ in range(1 if bench.small else 3):
                timed.replay()
            timed.check()
    yield bench.row("caches that go on", len(caches), "count")


# Times


@dataclass
class Timed:
    """Cache with its pass.

    Attributes:
        replay: runs a pass.
        cache: bytes of the cache.
        read: bytes of the cache that a pass reads or writes.
        peak: bytes of weights, cache and everything else that a pass needs; a prefill would need another
            number.
        check: raises AssertionError if a pass failed.
        seconds: time of a pass.
    """

    replay: Callable[[], object]
    cache: int
    read: int
    peak: int
    check: Callable[[], None]
    seconds: float = 0.0


@dataclass
class Missing:
    """Cache that is not timed.

    Attributes:
        needed: bytes that must be free for it, if there are too few.
        wrong: the error, else empty.
    """

    needed: int
    wrong: str = ""


def times(
    bench: Bench, drawn: Drawn, requests: int, context: int, names: list[str], results: dict[int, dict[str, Timed]]
) -> Iterator[dict]:
    """Yield rows of a pass with every cache, in turn, and the memory that caches which do not fit would need.

    Args:
        bench: device and dtype.
        drawn: the model.
        requests: rows of a batch.
        context: tokens that have been seen.
        names: names of the caches.
        results: context -> timed caches; this call adds its own.

    Raises:
        AssertionError: a cache could not be made, or is wrong after its passes. The rows of the others come
            before.
    """
    budget_of = dict(zip((*DENSE, *KVPOP), (0, 0, context // COMPRESSION, FIXED), strict=True))
    budgets = {name: budget for name, budget in budget_of.items() if name in names}
    speed, made = bandwidth(), timed_caches(bench, drawn, requests, context, budgets)
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
    timed = results[context] = {name: each for name, each in made.items() if isinstance(each, Timed)}
    for name, each in timed.items():
        floor = 1e3 * (drawn.read + each.read) / speed
        yield bench.row(f"{name}, a token", 1e3 * each.seconds, "ms", floor)
        yield bench.row(f"{name}, tokens a second", requests / each.seconds, "1/s")
        yield bench.row(f"{name}, cache", each.cache / GIB, "GiB")
        yield bench.row(f"{name}, peak memory while decoding", each.peak / GIB, "GiB")
    for each in distinct.values():
        each.replay = each.check = None  # frees the memory
    del distinct
    empty(bench)
    wrong = {name: each.wrong for name, each in made.items() if isinstance(each, Missing) and each.wrong}
    assert not wrong, "; ".join(f"{name}: {what}" for name, what in wrong.items())


def attempt(bench: Bench, what: str, run: Callable[[], object], needed: int = 0):
    """Return the result of ``run``, or :class:`Missing` with the reason in the log.

    Errors are not kept, because they would keep the memory of the frames that they left.

    Args:
        bench: the log.
        what: name for the log.
        run: makes a cache or checks it.
        needed: bytes that ``run`` needs, if there may be too few; else 0.
    """
    try:
        return run()
    except Exception as error:  # noqa: BLE001  what one cache does must not cost the others
        if needed and isinstance(error, torch.OutOfMemoryError):
            bench.say(f"{what}: skipped, {str(error).splitlines()[0]}")
            return Missing(needed)
        bench.say(f"{what}: WRONG")
        bench.say(traceback.format_exc())
        return Missing(0, f"{type(error).__name__}: {error}")


def timed_caches(
    bench: Bench, drawn: Drawn, requests: int, context: int, budgets: dict[str, int]
) -> dict[str, Timed | Missing]:
    """Return name -> timed cache, for as many as fit in memory together, small ones first.

    Caches of equal budgets are shared.
    """
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
        place = bench, drawn, requests, context
        run = partial(kvpop_timed, *place, budget) if budget else partial(dense_timed, *place, name, dense)
        made[key] = attempt(bench, what, run, needed)
    return {name: made[budget or name] for name, budget in budgets.items()}


def dense_timed(bench, drawn, requests, context, name: str, dense: list) -> Timed:
    """Return a timed static cache; ``dense`` holds the cache once it has been made."""
    if not dense:
        dense += full_cache(drawn.model, requests, context)
    cache, before = dense
    size = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    options = {"attention_mask": {"full_attention": None}} if name == DENSE[1] else {}
    decoding, replay, more = captured(bench, drawn, cache, requests, before=before, **options)
    return Timed(replay, size, size, drawn.weights + size + more, lambda: check_finite(name, decoding))


def kvpop_timed(bench, drawn, requests, context, budget: int) -> Timed:
    """Return a timed KVpop cache; a pass reads its tokens, and reads and writes its states."""
    cache = written_cache(drawn, requests, context, budget)
    layer, name = cache._layers[0], f"kvpop, B {budget}"
    heads, size = layer.pages.layout.num_kv_heads, layer.pages.layout.head_size
    head = budget * layer.pages.layout.slot_bytes + 8 * layer.rule.state_floats(size)
    weights = (weight for each in cache._layers.values() for weight in vars(each.rule.scorer).values())
    scorers = sum(weight.nbytes for weight in weights if isinstance(weight, torch.Tensor))
    decoding, replay, more = captured(bench, drawn, cache, requests)

    def check():
        check_finite(name, decoding)
        (clock,) = cache._lengths_by_device.values()
        if passes := int(clock.positions[0]) - cache.lengths[0]:
            cache.replayed(passes)
        check_held(cache, budget)

    held, read = cache.allocated_bytes(), requests * heads * len(cache) * head + scorers
    return Timed(replay, held, read, drawn.weights + held + scorers + more, check)


def captured(bench: Bench, drawn: Drawn, cache, requests: int, **options) -> tuple[Decoding, Callable[[], object], int]:
    """Return a decoding, a function that repeats its pass, and the bytes that a pass needs beside weights and cache.

    The workspace that matrix products keep is not counted.
    """
    first = torch.zeros(requests, 1, dtype=torch.int64, device=bench.device)
    decoding = Decoding(drawn.model, cache, first, **options)
    if bench.device != "cuda":
        return decoding, decoding.captured(bench), 0
    with torch.cuda.stream(side_stream()):
        torch.mm(*torch.ones(2, 16, 16, dtype=bench.dtype, device=bench.device))
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    replay = decoding.captured(bench)
    return decoding, replay, torch.cuda.max_memory_allocated() - before


def check_finite(name: str, decoding: Decoding) -> None:
    """Check that no step was refused, which would give NaN.

    Raises:
        AssertionError: a logit is not finite.
    """
    assert bool(decoding.logits.isfinite().all()), f"{name}: logits are not finite"


def free(bench: Bench) -> float:
    """Return the bytes of memory that are free for tensors."""
    empty(bench)
    return torch.cuda.mem_get_info()[0] if bench.device == "cuda" else torch.inf


def in_short(results: dict[int, dict[str, Timed]]) -> Iterator[str]:
    """Yield lines that summarise Figure 4's claims.

    They say how caches grow, whether latency grows, and from which context on KVpop is faster than the faster
    dense cache.
    """
    for name in (*DENSE, *KVPOP):
        there = {context: timed[name] for context, timed in sorted(results.items()) if name in timed}
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
        start, compared = None, False
        for context, timed in sorted(results.items()):
            dense = [timed[other].seconds for other in DENSE if other in timed]
            if dense and name in timed:
                compared, ahead = True, timed[name].seconds < min(dense)
                start = (start or context) if ahead else None
        if not compared:
            yield f"{name}: not compared with dense"
        elif start:
            yield f"{name}: ahead of dense from {start} tokens on"
        else:
            yield f"{name}: not ahead of dense at the longest context measured"
