"""Error budgets accept correct rounding in any summation order, and reject small faults."""

import math

import pytest
import torch
from kernels.naive import kept_sets, masked_attention

from kvpop_vllm.testing import DisturbedSums, ErrorBudget, assert_within_budget, eager_runs

F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16
LENGTH, SIZE, QUERY = 64, 64, 40


class Attention:
    """Sparse attention and its gradients by definition, with terms of sums in any order."""

    def __init__(self, seed: int = 0):
        draw = torch.Generator().manual_seed(seed)
        self.q, self.grad = (torch.randn(1, 4, LENGTH, SIZE, generator=draw) for _ in range(2))
        self.k, self.v = (torch.randn(1, 2, LENGTH, SIZE, generator=draw) for _ in range(2))
        self.visible = kept_sets(torch.randn(1, 2, LENGTH, generator=draw), 2, 8, 9)

    def run(self, dtype=F32, visible=None, keys=slice(None), channels=slice(None)):
        """Return output, log-sum-exp and gradients. ``keys`` and ``channels`` permute the terms of sums."""
        visible = self.visible if visible is None else visible
        leaves = [x.to(dtype, copy=True).requires_grad_() for x in (self.q, self.k, self.v)]
        q, k, v = leaves[0][..., channels], leaves[1][..., keys, :][..., channels], leaves[2][..., keys, :]
        out, lse = masked_attention(q, k, v, visible[..., keys], SIZE**-0.5)
        return [x.detach() for x in (out, lse, *torch.autograd.grad(out, leaves, self.grad.to(dtype)))]

    def budgets(self) -> list[ErrorBudget]:
        return [ErrorBudget(*pair) for pair in zip(self.run(F64), eager_runs(lambda: tuple(self.run())), strict=True)]


def largest_share(budgets, results) -> float:
    return max(budget.share(result) for budget, result in zip(budgets, results, strict=True))


@pytest.mark.parametrize("seed", range(4))
def test_any_order_of_sums_is_allowed_and_small_faults_are_not(seed):
    """Other orders use at most half of the allowed error. One key that one query misses exceeds it."""
    attention, draw = Attention(seed), torch.Generator().manual_seed(seed)
    budgets = attention.budgets()
    orders = [[torch.randperm(n, generator=draw) for n in (LENGTH, SIZE)] for _ in range(8)]
    assert max(largest_share(budgets, attention.run(keys=keys, channels=channels)) for keys, channels in orders) <= 0.5
    for query, key in ((QUERY, QUERY - 7), (QUERY, QUERY - 8), (slice(48, 64), 0)):
        wrong = attention.visible.clone()
        wrong[:, 0, query, key] ^= True
        assert largest_share(budgets, attention.run(visible=wrong)) > 1
    assert largest_share(budgets, [x.float() for x in attention.run(BF16)]) > 1


def test_budgets_do_not_hang_on_seeds():
    """Budgets from other seeds are between 2/3 and 3/2 of these, so no budget depends on a processor."""
    attention, other_outputs = Attention(), []
    for seed in range(100, 104):
        with DisturbedSums(seed):
            other_outputs.append(attention.run())
    for budget, eager in zip(attention.budgets(), zip(*other_outputs, strict=True), strict=True):
        assert 2 / 3 < ErrorBudget(budget.reference, eager).allowed / budget.allowed < 3 / 2


def test_nothing_is_disturbed_twice_for_nothing():
    """Sums of 16-bit and of float64 numbers get one run. Float32 sums get four runs, all different."""
    draw = torch.Generator().manual_seed(0)
    a, b = torch.randn(5, 30, generator=draw), torch.randn(30, 5, generator=draw)
    for dtype, count in ((F64, 1), (BF16, 1), (F32, 4)):
        runs = eager_runs(lambda dtype=dtype: a.to(dtype) @ b.to(dtype))
        assert len(runs) == count == len({tuple(run.flatten().tolist()) for run in runs})


@pytest.mark.parametrize(
    "actual, message",
    [
        ([-math.inf, 1.0], None),
        ([-math.inf, math.nan], "wrongly NaN or infinite"),
        ([-math.inf, math.inf], "wrongly NaN or infinite"),
        ([-9.0, 1.0], "wrongly finite"),
        ([-math.inf, 1.1], r"result: error .* at \(1,\)"),
        ([[-math.inf, 1.0]], "shape"),
    ],
)
def test_wrong_values_are_named(actual, message):
    """Infinities must be where they are expected, and nowhere else."""
    reference = torch.tensor([-math.inf, 1.0], dtype=F64)
    if message is None:
        return assert_within_budget(torch.tensor(actual), reference, reference.float())
    with pytest.raises(AssertionError, match=message):
        assert_within_budget(torch.tensor(actual), reference, reference.float())
