"""Random eviction: draws follow their definition in integers, and any cut retains the same tokens."""

import math
from dataclasses import replace

import pytest
import torch
from kernels.problems import Problem
from kernels.served import INTERPRETED, Pool, Served, check_same, serve

from kvpop_vllm.kernels import draws, ops

WORD = (1 << 64) - 1
HEADS, SIZE, BUDGET, SINKS, WINDOW, LENGTH, LAYER = 3, 16, 24, 2, 5, 90, 7


def mix(x: int) -> int:
    """Return the result of SplitMix64's finalizer, on Python integers."""
    x &= WORD
    x = ((x ^ x >> 30) * 0xBF58476D1CE4E5B9) & WORD
    x = ((x ^ x >> 27) * 0x94D049BB133111EB) & WORD
    return x ^ x >> 31


def drawn(seed: int, layer: int, head: int, q: int, t: int) -> int:
    """Return the draw of token t for an eviction at q."""
    golden = 0x9E3779B97F4A7C15
    key = mix(mix(seed + golden) + (layer << 32 | head))
    return mix(mix(key + q) + t * golden) >> 11


def held_by_definition(seed: int, head: int, sinks: int, budget: int) -> list[set[int]]:
    """Return the tokens that a head retains after each step.

    If there are too many, the token with the lowest draw among those older than the window is evicted.
    """
    retained, after = [], []
    for q in range(LENGTH):
        retained.append(q)
        evictable = [t for t in retained if sinks <= t <= q - WINDOW]
        if len(evictable) > budget - sinks - WINDOW:
            retained.remove(min(evictable, key=lambda t: (drawn(seed, LAYER, head, q, t), t)))
        after.append(set(retained))
    return after


def test_splitmix64_is_itself():
    """The first numbers of SplitMix64 with seed 1234567 are those that its authors' program prints."""
    golden, state, numbers = 0x9E3779B97F4A7C15, 1234567, []
    for _ in range(3):
        state = (state + golden) & WORD
        numbers.append(int(draws.mix(torch.tensor(state - (1 << 64) if state >> 63 else state))) & WORD)
    assert numbers == [6457827717110365317, 3203168211198807973, 9817491932198370423]


@pytest.mark.parametrize("seed", [0, 1, -5, 2**62, -(2**63)])
def test_draws_are_those_of_the_definition(seed):
    lanes = draws.head_lanes(LAYER, slice(1, 3), 3)
    keys = draws.head_keys(torch.tensor([seed, 3]), lanes)
    t = torch.tensor([0, 1, 2**31 - 1, 131_072])
    for q in (0, 77, 2**31 - 2):
        for h in range(2):
            numbers = draws.draw(keys[0, h], q, t).tolist()
            assert numbers == [float(drawn(seed, LAYER, 1 + h, q, token)) for token in t.tolist()]
    assert draws.head_keys(torch.tensor([seed]), lanes).tolist() == keys[:1].tolist()


def test_draws_are_uniform_and_unrelated():
    """Each of 30 candidates is the lowest equally often; neighbours in any coordinate agree by chance."""
    keys, t = draws.head_keys(torch.arange(40), draws.head_lanes(0, slice(0, 4), 4)).flatten(), torch.arange(100, 130)
    q = torch.arange(200, 450)
    lowest = draws.draw(keys.view(-1, 1, 1), q.view(-1, 1), t).argmin(-1)  # [keys, q]
    counts = torch.bincount(lowest.flatten(), minlength=30).double()
    expected = lowest.numel() / 30
    chi2 = float(((counts - expected) ** 2 / expected).sum())
    assert chi2 < 29 + 6 * math.sqrt(2 * 29), counts
    for same in (lowest[:, 1:] == lowest[:, :-1], lowest[1:] == lowest[:-1]):
        share, spread = float(same.double().mean()), math.sqrt(1 / 30 * 29 / 30 / same.numel())
        assert abs(share - 1 / 30) < 6 * spread


def request(seed: int, protected: int, **options) -> Problem:
    """Return a problem of one request under random eviction."""
    sizes = dict(heads=HEADS, size=SIZE, sinks=SINKS, window=WINDOW, topk=BUDGET - SINKS - WINDOW, length=LENGTH)
    p = Problem("none", requests=1, protected=(protected,) if protected else (), **(sizes | options)).prepare()
    lanes = draws.head_lanes(LAYER, slice(None), p.heads)
    p.rule = replace(p.rule, scorer=ops.RandomDraw(lanes), log_gamma=torch.zeros(p.heads, dtype=torch.float64))
    p.seeds = torch.tensor([seed])
    return p


def held_at_the_end(seed: int, protected: int) -> list[set[int]]:
    budget, sinks = (BUDGET - SINKS + protected, protected) if protected else (BUDGET, SINKS)
    return [held_by_definition(seed, head, sinks, budget)[-1] for head in range(HEADS)]


def sets(served: Served) -> list[set[int]]:
    return [set(row.nonzero().flatten().tolist()) for row in served.retained[LENGTH]]


@pytest.mark.parametrize("protected", [0, 1, 16, 21, 40])
@pytest.mark.parametrize("seed", [0, 12345])
def test_every_implementation_holds_what_the_definition_says(seed, protected):
    expected, p, outs = held_at_the_end(seed, protected), request(seed, protected), []
    assert len({frozenset(tokens) for tokens in expected}) == HEADS, "every head draws for itself"
    for impl in ("reference", "cpp"):
        for chunks in ([LENGTH], [7, 0, 56, LENGTH], [21, 0, LENGTH], [0]):
            served = serve(p, chunks, impl)
            assert sets(served) == expected, (impl, chunks)
            outs.append(served.out)
    assert max(float((out - outs[0]).abs().max()) for out in outs) < 1e-5


class TestTriton:
    """Random draws follow from integers alone, so Triton holds what the definition says, too."""

    __test__ = INTERPRETED

    def test_steps_and_chunks(self, seed=-(2**63), protected=18):
        p = request(seed, protected)
        expected, steps = serve(p, [0]), Pool(p)
        assert sets(expected) == held_at_the_end(seed, protected)
        steps.chunk(0, LENGTH - 8, "cpp")
        check_same(steps.serve([0], "triton"), expected.after(LENGTH - 8))
        check_same(serve(p, [30, LENGTH], "triton"), expected)


def test_seeds_are_asked_for():
    p = request(0, 0)
    with pytest.raises(ValueError, match="seeds must be .1,. for RandomDraw, got None"):
        token, place = (x[0][:1] for x in p.texts), (p.table, torch.tensor([0]), p.budgets)
        ops.decode_step(*token, Pool(p).pages, *place, rule=p.rule, scale=1.0)


@pytest.mark.parametrize("seed", [2**63, 2**63 + 5, 2**64 - 1, -(2**63), 7])
def test_seeds_of_64_bits(seed):
    """Any seed is valid: vLLM takes signed and unsigned 64-bit seeds and adds a sample's number to them."""
    expected = (mix(5 + 0x9E3779B97F4A7C15) + seed) % 2**64
    assert draws.request_seed(5, seed) % 2**64 == draws.request_seed(5 + 2**64, seed) % 2**64 == expected
    assert -(2**63) <= draws.signed(seed) < 2**63
