"""Allocators: how the budget of a request is distributed over layers and heads.

Any allocator works with any policy, except ``ada``, which needs the votes of a policy that compresses
prompts.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from kvpop_vllm.roles import Retention

STEEPNESS = 20
"""beta of PyramidKV: the last layer has ``1 / beta`` of the mean number of long-range slots."""


def uniform(kept: Retention, layers: int, heads: int) -> torch.Tensor:
    """Return equal budgets ``[layers, H]`` int32 for all heads."""
    return torch.full((layers, heads), kept.budget, dtype=torch.int32)


def pyramid(kept: Retention, layers: int, heads: int) -> torch.Tensor:
    """Return budgets ``[layers, H]`` int32 that decrease with depth in an arithmetic sequence.

    The last layer has ``k / beta`` long-range slots, the first ``2 k - k / beta``. Sinks and window are the
    same in all layers. beta varies in the paper; here it is 20, as in the authors' code. The authors' last
    step divides by the number of layers, here it divides by one less, so that the last layer has exactly ``k
    / beta``. Rounding preserves the total over all layers.

    Source: PyramidKV, Cai et al. 2024, arXiv:2406.02069, section 4.
    """
    least = kept.topk / STEEPNESS
    steps = torch.arange(layers, dtype=torch.float64) / max(1, layers - 1)
    sizes = (2 * kept.topk - least) - steps * 2 * (kept.topk - least) if layers > 1 else torch.tensor([kept.topk])
    ends = sizes.double().cumsum(0).round().long()
    long_range = ends.diff(prepend=torch.zeros(1, dtype=torch.int64))
    return (kept.first_long + long_range).int().unsqueeze(1).repeat(1, heads)


ALLOCATORS: dict[str, Callable[[Retention, int, int], torch.Tensor]] = {
    "uniform": uniform,
    "pyramid": pyramid,
    "ada": uniform,
}
"""Allocators by the name that ``--kv-allocator`` takes.

Each is called as ``allocator(retention, layers, H)`` and returns int32 budgets ``[layers, H]`` with mean B. Under
``ada`` the budgets are equal until the prompt's end, when the heads of a layer divide their slots by votes
(:func:`kvpop_vllm.kernels.divided.divide`).
"""
