"""TriAttention: retain the keys with the largest expected logits of future queries (Mao et al., 2026, arXiv 2604.04921)."""

from dataclasses import dataclass, field

import torch

from kvpop_vllm.calibration.statistics import QueryStatistics, read_statistics
from kvpop_vllm.config import ConfigError
from kvpop_vllm.kernels.ops import ExpectedLogits
from kvpop_vllm.policies.base import Order, Policy, Signal
from kvpop_vllm.rope import band_norms

RECENT = 128
"""Default window in tokens, that of the authors' plugin for vLLM."""
DISTANCES = 2.0 ** torch.arange(17, dtype=torch.float64)
"""Distances of future queries: 1, 2, 4, ..., 65,536 tokens."""


@dataclass
class TriAttention(Policy):
    """Retain the keys with the largest expected logits of future queries, from statistics of the model's queries.

    Every 128 tokens the tokens before the window are ranked. A key's value for a query head is the logit of the mean
    query, averaged over distances of 1, 2, 4, ..., 65,536 tokens ahead, plus the key's norm in each band times what
    the mean norm of queries exceeds the norm of their mean by. It is standardised over the ranked tokens. A KV head
    takes the largest value of its G query heads.

    The authors' published runs average these values over layers, so that all layers retain the same tokens, and
    drop 128 tokens at once in each round. Here each layer ranks by its own values, which is an option of their code,
    and the lowest-ranked tokens are evicted one per step until the next round (DESIGN "Rounds"). The window is that
    of their plugin for vLLM. The four sinks are ours. Channels that do not rotate count as bands with an angle of 0
    per position.

    Attributes:
        statistics: statistics of the model's queries.
    """

    name = "triattention"
    paper = "Mao et al. 2026, arXiv:2604.04921"
    cost = "every 128 tokens the logits of one query for each query head, and the norms of all keys"
    signals = frozenset({Signal.KEY})
    order = Order.ROUNDS
    default_window = RECENT
    calibrated = True

    statistics: QueryStatistics = field(init=False, repr=False)

    def prepare(self):
        super().prepare()
        folder = self.settings.calibration
        if folder is None:
            raise ConfigError(
                f"--kv-policy {self.name} needs statistics of the model's queries: give --kv-calibration DIR, which 'kvpop"
                " calibrate' writes"
            )
        self.statistics = read_statistics(folder)
        names = ("model_type", "num_layers", "num_heads", "num_kv_heads", "head_dim", "layers", "rope", "wide_window")
        self.statistics.check_model(folder, **{name: getattr(self.model, name) for name in names})

    def rule(self, layer, heads):
        mean, norm = self.statistics.mean[layer].double(), self.statistics.norm[layer].double()
        frequencies = self.statistics.frequencies(layer)
        pairs = len(frequencies)
        # rounding may put the norm of a mean above the mean norm
        excess = (norm - band_norms(mean, pairs)).clamp_min(0)
        a, b, unrotated = mean.split([pairs, pairs, mean.shape[1] - 2 * pairs], -1)
        # a rotation is linear, so that distances average into one complex factor per pair
        ahead = torch.polar(torch.ones_like(frequencies), frequencies * DISTANCES.unsqueeze(1)).mean(0)
        turned = torch.complex(a, b) * ahead
        # [H, G, D] and [H, G, F]
        by_head = (
            x.float().unflatten(0, (self.model.num_kv_heads, -1))[heads].contiguous()
            for x in (torch.cat([turned.real, turned.imag, unrotated], -1), excess)
        )
        return self.training_free_rule(heads, None, rounds=ExpectedLogits(*by_head, frequencies))
