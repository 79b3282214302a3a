"""How many of a request's tokens each head of each layer may hold; any goes with any policy, but for ada, which needs votes."""

from __future__ import annotations

from collections.abc import Callable

import torch

from kvpop_vllm.roles import Retention

STEEPNESS = 20
"""beta of PyramidKV: the last layer holds so many times fewer long-range tokens than the average one."""


def uniform(kept: Retention, layers: int, heads: int) -> torch.Tensor:
    """All the same."""
    return torch.full((layers, heads), kept.budget, dtype=torch.int32)


def pyramid(kept: Retention, layers: int, heads: int) -> torch.Tensor:
    """Fewer in deeper layers, in an arithmetic sequence (PyramidKV, Cai et al. 2024, arXiv:2406.02069, section 4).

    The last layer has ``k / beta`` long-range slots, the first ``2 k - k / beta``; sinks and window are the same everywhere.
    beta, which the paper varies, is 20 as in its code; its last step divides by the number of layers, here by one less, so
    that the last layer gets what it says. Rounded so that all layers together hold as much as equal ones.
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
"""``allocator(retention, layers, H) -> [layers, H]`` int32 budgets, by the name that ``--kv-allocator`` takes; B on average. Under ada heads
are the same until a prompt's end, where those of a layer divide their slots (:func:`kvpop_vllm.kernels.divided.divide`)."""
