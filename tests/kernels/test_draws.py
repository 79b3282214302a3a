"""Random eviction: draws follow their definition in integers, and any cut retains the same tokens."""

from __future__ import annotations

import math

import pytest
import torch

from kvpop_vllm.attention.allocate import allocate_pages
from kvpop_vllm.kernels import draws, ops
from kvpop_vllm.kernels.pages import PageLayout, Prefix
from kvpop_vllm.kernels.retained import held_tokens

WORD = (1 << 64) - 1
HEADS, SIZE, BUDGET, SINKS, WINDOW, LENGTH, LAYER, SLOTS = 3, 16, 24, 2, 5, 90, 7, 16


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

    If there are too many, the token behind the window with the lowest draw is evicted.
    """
    held, after = [], []
    for q in range(LENGTH):
        held.append(q)
        behind = [t for t in held if sinks <= t <= q - WINDOW]
        if len(behind) > budget - sinks - WINDOW:
            held.remove(min(behind, key=lambda t: (drawn(seed, LAYER, head, q, t), t)))
        after.append(set(held))
    return after


def test_splitmix64_is_itself():
    """The first numbers of SplitMix64 with seed 1234567 are those that its authors' program prints."""
    golden, state, found = 0x9E3779B97F4A7C15, 1234567, []
    for _ in range(3):
        state = (state + golden) & WORD
        found.append(int(draws.mix(torch.tensor(state - (1 << 64) if state >> 63 else state))) & WORD)
    assert found == [6457827717110365317, 3203168211198807973, 9817491932198370423]


@pytest.mark.parametrize("seed", [0, 1, -5, 2**62, -(2**63)])
def test_draws_are_those_of_the_definition(seed):
    lanes = draws.head_lanes(LAYER, slice(1, 3), 3)
    keys = draws.head_keys(torch.tensor([seed, 3]), lanes)
    t = torch.tensor([0, 1, 2**31 - 1, 131_072])
    for q in (0, 77, 2**31 - 2):
        for h in range(2):
            found = draws.draw(keys[0, h], q, t).tolist()
            assert found == [float(drawn(seed, LAYER, 1 + h, q, each)) for each in t.tolist()]
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


def run(impl: str, cuts: list[int], seed: int, protected: int):
    """Return the tokens ``[H, LENGTH]`` retained in the end, and the outputs of a request cut this way."""
    rule = ops.RetentionRule(
        SINKS,
        WINDOW,
        torch.zeros(HEADS, dtype=torch.float64),
        scorer=ops.RandomDraw(draws.head_lanes(LAYER, slice(None), HEADS)),
    )
    layout = PageLayout(HEADS, SIZE, torch.float32, SLOTS)
    prefix_blocks = -(-protected // SLOTS)
    pages, table = allocate_pages(layout, BUDGET, length=LENGTH, protected=protected)
    pages.raw.fill_(0xFF)
    prefix = Prefix(pages, table[:, 0, :prefix_blocks].contiguous(), torch.tensor([protected])) if protected else None
    tail, outs = table[:, :, prefix_blocks:], []
    generator = torch.Generator().manual_seed(5)
    q, k, v = (torch.randn(LENGTH, heads, SIZE, generator=generator) for heads in (2 * HEADS, HEADS, HEADS))
    budgets = torch.full((HEADS,), BUDGET, dtype=torch.int32)
    for a, b in zip(cuts[:-1], cuts[1:], strict=True):
        if a < protected:
            t = torch.arange(a, min(b, protected))
            prefix.write(k[t], v[t], prefix.table[0][t // SLOTS].long(), t % SLOTS)
        told = {"rule": rule, "scale": 0.3, "prefix": prefix, "impl": impl}
        if b - a == 1:
            at, seeds = torch.tensor([a]), torch.tensor([seed])
            out, _ = ops.decode_step(q[a:b], k[a:b], v[a:b], pages, tail, at, budgets[None], seeds=seeds, **told)
        else:
            out, _ = ops.prefill_chunk(q[a:b], k[a:b], v[a:b], pages, tail[0], a, budgets, seed=seed, **told)
        outs.append(out)
    return held_tokens(pages, tail[0], LENGTH, rule, budgets, protected), torch.cat(outs)


@pytest.mark.parametrize("protected", [0, 1, 16, 21, 40])
@pytest.mark.parametrize("seed", [0, 12345])
def test_every_implementation_holds_what_the_definition_says(seed, protected):
    budget, sinks = (BUDGET - SINKS + protected, protected) if protected else (BUDGET, SINKS)
    expected = [held_by_definition(seed, head, sinks, budget)[-1] for head in range(HEADS)]
    assert len({frozenset(each) for each in expected}) == HEADS, "every head draws for itself"
    outputs = []
    for impl in ("reference", "cpp"):
        for cuts in ([0, LENGTH], [0, 7, 8, 64, LENGTH], [0, 21, 22, LENGTH], list(range(LENGTH + 1))):
            held, out = run(impl, cuts, seed, protected)
            assert [set(row.nonzero().flatten().tolist()) for row in held] == expected, (impl, cuts)
            outputs.append(out)
    assert max(float((out - outputs[0]).abs().max()) for out in outputs) < 1e-5


def test_another_seed_evicts_others():
    assert not torch.equal(run("cpp", [0, LENGTH], 1, 0)[0], run("cpp", [0, LENGTH], 2, 0)[0])


def test_seeds_are_asked_for():
    rule = ops.RetentionRule(
        0, 2, torch.zeros(1, dtype=torch.float64), scorer=ops.RandomDraw(torch.zeros(1, dtype=torch.int64))
    )
    layout = PageLayout(1, 16, torch.float32, SLOTS)
    pages, table = allocate_pages(layout, 8)
    token = torch.zeros(1, 1, 16)
    with pytest.raises(ValueError, match="seeds must be .1,. for RandomDraw, got None"):
        ops.decode_step(
            token,
            token,
            token,
            pages,
            table,
            torch.zeros(1, dtype=torch.int64),
            torch.tensor([[8]], dtype=torch.int32),
            rule=rule,
            scale=1.0,
        )


@pytest.mark.parametrize("seed", [2**63, 2**63 + 5, 2**64 - 1, -(2**63), 7])
def test_seeds_of_64_bits(seed):
    """Any seed is valid: vLLM takes signed and unsigned 64-bit seeds and adds a sample's number to them."""
    expected = (mix(5 + 0x9E3779B97F4A7C15) + seed) % 2**64
    assert draws.request_seed(5, seed) % 2**64 == draws.request_seed(5 + 2**64, seed) % 2**64 == expected
    assert -(2**63) <= draws.signed(seed) < 2**63
