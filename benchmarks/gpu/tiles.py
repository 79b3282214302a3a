"""Tiles of attention on a GPU: candidates for the tables of ``triton_kernels/_tiles.py``, checked, then timed.

Times are those of a layer at Qwen3-8B's shapes. Decoding is with recency alone, prefill with given scores, which is
attention and ordering.
"""

from collections.abc import Callable, Iterator
from functools import partial
from unittest import SkipTest
from unittest.mock import patch

import torch

from gpu.clock import bandwidth, milliseconds
from gpu.exact import serve_right
from gpu.prefill import LENGTH, prompt, reader, rule_of
from gpu.sections import HEADS, KV_HEADS, SIZE, Bench, Case
from gpu.serving import layer_step, recency
from kvpop_vllm.kernels import ops

BUDGET, BATCHES = 4096, (1, 64)
DECODING = (16, 64, 4, 5), (16, 64, 4, 2), (16, 64, 8, 5), (16, 32, 4, 5), (16, 32, 4, 7)
PREFILLING = (128, 64, 8, 5), (128, 64, 8, 2), (128, 32, 8, 5), (64, 64, 4, 5), (64, 32, 4, 5), (64, 32, 8, 5)
"""Candidates: rows, keys, warps and stages, which name their cases."""


def cases(bench: Bench) -> Iterator[Case]:
    """Yield the cases of the section."""
    from kvpop_vllm.kernels.triton import _tiles

    kinds = {
        "decoding": (_tiles.DECODE, DECODING, dict(name="recency", steps=[180, *[0] * 8]), decoding_times),
        "prefill": (_tiles.PREFILL, PREFILLING, dict(name="linear", steps=[180, 70]), prefill_times),
    }
    sizes = dict(requests=1, topk=150, slots=64) | (dict(heads=1, size=32) if bench.small else dict(size=SIZE))
    for kind, (table, candidates, problem, times) in kinds.items():
        for candidate in candidates[: 1 if bench.few else None]:
            tile = _tiles.Tile(*candidate)
            about = "{}x{} w{} s{}".format(*tile)
            right = f"{kind} is right, {about}"
            check = partial(serve_right, **problem, **sizes)
            yield Case(right, partial(with_tile, table=table, tile=tile, run=check))
            yield Case(f"{kind}, {about}", partial(with_tile, table=table, tile=tile, run=times), (right,))


def with_tile(bench: Bench, table: dict, tile, run: Callable[[Bench], Iterator[dict]]) -> Iterator[dict]:
    """Yield rows of a run in which all entries of a table are one tile.

    Raises:
        SkipTest: a multiprocessor has too little memory for it.
    """
    from triton.runtime.errors import OutOfResources

    with patch.dict(table, dict.fromkeys(table, tile)):
        try:
            yield from run(bench)
        except OutOfResources as error:
            raise SkipTest(str(error)) from error


def decoding_times(bench: Bench) -> Iterator[dict]:
    """Yield the time of a layer's step without a scorer, by batch."""
    for requests in BATCHES:
        floor = requests * KV_HEADS * BUDGET * 2 * SIZE * bench.dtype.itemsize / bandwidth()
        yield bench.row(f"batch {requests}", layer_step(bench, recency(), BUDGET, requests, 0), "ms", floor)


def prefill_times(bench: Bench) -> Iterator[dict]:
    """Yield the time of a layer's prompt of :data:`LENGTH` tokens in one chunk."""
    draw = torch.Generator().manual_seed(0)
    scores = torch.randn(LENGTH, KV_HEADS, generator=draw).to(bench.device)
    run = reader(bench, rule_of(ops.GateScore()), BUDGET, prompt(bench, draw), scores)
    yield bench.row(f"S {LENGTH}, {HEADS} query heads", milliseconds(run), "ms")
