"""Eviction times against a list of retained tokens, by the reference, C++ and Triton.

Triton's kernels are interpreted (test_triton_interpreted).
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernels.served import INTERPRETED

from kvpop_vllm.kernels import ops
from kvpop_vllm.kernels.dispatch import load_extension

NEVER = torch.iinfo(torch.int64).max
IMPLS = ["triton"] if INTERPRETED else ["reference", "cpp"]


def naive(score, position, count_held, topk, window, log_gamma, step, ages):
    """Return the eviction times of one head, by definition."""
    evicted_at, alive = [NEVER] * len(score), list(range(count_held))
    for arrival in range(count_held, len(score)):
        alive.append(arrival)
        if len(alive) <= topk:
            continue
        q = position[arrival] + window
        raw = {i: score[i] * (q - position[i]) if ages else score[i] for i in alive}
        victim = min(alive, key=lambda i: (raw[i] + (q - position[i]) // step * log_gamma, position[i]))
        evicted_at[victim] = q
        alive.remove(victim)
    return evicted_at


def draw_tokens(generator, heads=2, count_held=4, arrivals=5, coarse=0.0):
    """Return scores and positions; held tokens are older than arrivals, in any order.

    With ``coarse``, scores are dyadic and up to that, so that with dyadic decays many tie exactly.
    """
    score = torch.randn(heads, count_held + arrivals, generator=generator) * 3
    if coarse:
        score = (score.round() / 4).clamp(-coarse, coarse)
    start = 2 * count_held + 5
    old = torch.stack([torch.randperm(start, generator=generator)[:count_held] for _ in range(heads)])
    return score, torch.cat([old, torch.arange(start, start + arrivals).expand(heads, -1)], 1)


@settings(max_examples=12 if INTERPRETED else 150, deadline=None, derandomize=True)
@given(
    heads=st.integers(1, 4),
    topk=st.integers(0, 20),
    count_held=st.integers(0, 20),
    arrivals=st.integers(0, 60),
    window=st.integers(1, 9),
    step=st.sampled_from([1, 1, 2, 5, 64, 10**9]),
    ages=st.sampled_from([False, False, True]),
    coarse=st.sampled_from([0.0, 0.5, 2.0]),
    seed=st.integers(0, 2**30),
)
def test_equals_the_definition(heads, topk, count_held, arrivals, window, step, ages, coarse, seed):
    generator, count_held = torch.Generator().manual_seed(seed), min(count_held, topk)
    score, position = draw_tokens(generator, heads, count_held, arrivals, coarse)
    log_gamma = -torch.rand(heads, generator=generator, dtype=torch.float64)
    if coarse:
        log_gamma = (log_gamma * 4).round() / 4
    rows = [
        naive(score[h].tolist(), position[h].tolist(), count_held, topk, window, float(log_gamma[h]), step, ages)
        for h in range(heads)
    ]
    expected = torch.tensor(rows, dtype=torch.int64).view(heads, -1)
    for impl in IMPLS:
        rule = dict(topk=topk, window=window, log_gamma=log_gamma, decay_step=step, ages=ages)
        got = ops.online_topk(score, position, count_held, **rule, impl=impl)
        assert got.dtype == torch.int64 and torch.equal(got, expected), impl


def test_strided_inputs():
    generator = torch.Generator().manual_seed(1)
    score, position = draw_tokens(generator, 3, 4, 50)
    log_gamma = torch.full((3,), -0.01, dtype=torch.float64)
    wide = torch.stack([score, score], -1)[..., 0]
    for impl in IMPLS:
        a, b = (
            ops.online_topk(s, position, 4, topk=6, window=3, log_gamma=log_gamma, impl=impl) for s in (score, wide)
        )
        assert torch.equal(a, b)


@pytest.mark.parametrize("count_held, topk, window", [(7, 6, 3), (-1, 6, 3), (4, 3, 3), (4, 6, 0)])
def test_the_extension_itself_refuses_what_it_would_overrun(count_held, topk, window):
    score, position = draw_tokens(torch.Generator().manual_seed(1))
    with pytest.raises(ValueError, match="need 0 <= held"):
        load_extension().online_topk(
            score, position, count_held, topk, window, torch.zeros(2, dtype=torch.float64), 1, False, None
        )


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("largest", [{"window": 2**29}, {"decay_step": 2**31 - 1}], ids=str)
@pytest.mark.parametrize("ages", [False, True])
def test_the_largest_numbers_are_right(impl, largest, ages):
    """Expected results come from Python integers, which cannot overflow."""
    score, position = draw_tokens(torch.Generator().manual_seed(1))
    position += 2**30 - 1 - position.max()
    options = {"topk": 6, "window": 3, "decay_step": 3, "log_gamma": torch.full((2,), -0.01).double(), "ages": ages}
    rule = options | largest
    naive_args = 4, 6, rule["window"], -0.01, rule["decay_step"], ages
    expected = torch.tensor([naive(score[h].tolist(), position[h].tolist(), *naive_args) for h in range(2)])
    assert torch.equal(ops.online_topk(score, position, 4, impl=impl, **rule), expected)


@pytest.mark.parametrize("impl", IMPLS)
def test_bad_arguments_are_refused(impl):
    score, position = draw_tokens(torch.Generator().manual_seed(1))
    right = {"retained": 4, "topk": 6, "window": 3, "log_gamma": torch.zeros(2, dtype=torch.float64)}
    for wrong, named in (
        *(({"retained": retained}, "retained") for retained in (7, -1)),
        ({"topk": 3}, "retained"),
        *(({"window": window}, "window") for window in (0, 2**29 + 1, 2**63 - 1)),
        *(({"decay_step": step}, "decay_step") for step in (0, 2**31)),
    ):
        with pytest.raises(ValueError, match=f"online_topk needs .*{named}"):
            ops.online_topk(score, position, impl=impl, **right | wrong)
    for error, wrong_score in ((ValueError, score[0]), (TypeError, score.double())):
        with pytest.raises(error):
            ops.online_topk(wrong_score, position, impl="cpp", **right)
