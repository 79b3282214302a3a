"""Allocators: how the budget of a request is distributed over layers and heads.

Any allocator works with any policy, but for ``ada``, which needs the votes of a policy that compresses prompts.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from kvpop_vllm.roles import Retention

Allocator = Callable[[Retention, int, int], torch.Tensor]
"""Function ``(retention, layers, H) -> budgets [layers, H]`` int32 with mean B."""

CALIBRATED = "the calibration's shares"
"""Name of the allocator of a calibration with unequal shares, in logs and records."""
STEEPNESS = 20
"""beta of PyramidKV: the last layer has ``1 / beta`` of the mean number of long-range slots."""


def uniform(retention: Retention, layers: int, heads: int) -> torch.Tensor:
    """Return equal budgets ``[layers, H]`` int32 for all heads."""
    return torch.full((layers, heads), retention.budget, dtype=torch.int32)


def pyramid(retention: Retention, layers: int, heads: int) -> torch.Tensor:
    """Return budgets ``[layers, H]`` int32 that decrease with depth in an arithmetic sequence.

    The last layer has ``k / beta`` long-range slots, the first ``2 k - k / beta``. Sinks and window are the
    same in all layers. beta varies in the paper. Here it is 20, as in the authors' code. The authors' last
    step divides by the number of layers, here it divides by one less, so that the last layer has exactly ``k
    / beta``. Rounding preserves the total over all layers.

    Source: PyramidKV, Cai et al. 2024, arXiv:2406.02069, section 4.
    """
    last_layer = retention.topk / STEEPNESS
    steps = torch.arange(layers, dtype=torch.float64) / max(1, layers - 1)
    sizes = (
        # arithmetic sequence with mean k, from 2 k - k / beta down to k / beta
        (2 * retention.topk - last_layer) - steps * 2 * (retention.topk - last_layer)
        if layers > 1
        else torch.tensor([retention.topk])
    )
    return (retention.first_long + _rounded(sizes.double())).int().unsqueeze(1).repeat(1, heads)


def proportional(shares: Sequence[Sequence[float]], retention: Retention, layers: int, heads: int) -> torch.Tensor:
    """Return budgets ``[layers, H]`` int32 whose long-range slots are proportional to ``shares [layers][H]``.

    Sinks and window are the same for all heads. Rounding preserves the total.
    """
    weights = torch.tensor(shares, dtype=torch.float64)
    # one sequence over all layers and heads, so that rounding preserves the model's total
    slots = _rounded((weights / weights.sum()).flatten() * (retention.topk * layers * heads))
    return (retention.first_long + slots).int().view(layers, heads)


@dataclass(frozen=True)
class Proportional:
    """Allocator :func:`proportional` with measured ``shares [layers][H]``."""

    shares: tuple[tuple[float, ...], ...]

    def __call__(self, retention: Retention, layers: int, heads: int) -> torch.Tensor:
        """Return the budgets ``[layers, H]`` int32."""
        return proportional(self.shares, retention, layers, heads)


def _rounded(sizes: torch.Tensor) -> torch.Tensor:
    """Return ``sizes`` rounded to integers in a way that preserves their sum."""
    # differences of rounded sums add up to the rounded sum of all
    return sizes.cumsum(0).round().long().diff(prepend=torch.zeros(1, dtype=torch.int64))


ALLOCATORS: dict[str, Allocator] = {
    "uniform": uniform,
    "pyramid": pyramid,
    "ada": uniform,
}
"""Allocators by the name that ``--kv-allocator`` takes.

Under ``ada`` the budgets are equal until the prompt's end, when the heads of a layer divide their slots by votes
(:func:`kvpop_vllm.rules.compress.divide`).
"""
