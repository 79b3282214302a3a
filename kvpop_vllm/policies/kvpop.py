"""KVpop: Key-Value Cache Compression with Predictive Online Pruning (Hauzenberger et al.), with its three scorers."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from kvpop_vllm.config import ConfigError, ScorerShape
from kvpop_vllm.kernels.ops import RetentionRule
from kvpop_vllm.policies.base import Order, Policy, Signal
from kvpop_vllm.scorers import from_tensors
from kvpop_vllm.scorers.checkpoint import ScorerConfig, check_model, read_scorer


@dataclass
class _Learned(Policy):
    """A policy whose raw scores come from a scorer folder or from the model's own checkpoint.

    Attributes:
        checkpoint: the scorer config of a full checkpoint, whose tensors arrive with the model's weights.
    """

    signals = frozenset({Signal.KEY, Signal.VALUE})

    checkpoint: ScorerConfig | None = None
    config: ScorerConfig = field(init=False)

    def prepare(self):
        if self.settings.scorer is not None:
            source = self.settings.scorer
            self.config, self._layers = read_scorer(source)
        elif self.checkpoint is not None:
            source = "the checkpoint's kvpop section"
            self.config, self._layers = self.checkpoint, [{} for _ in range(self.checkpoint.num_layers)]
        else:
            raise ConfigError(
                f"--kv-policy {self.name} needs a scorer: give --kv-scorer DIR (untrained ones come from 'kvpop init-scorer MODEL DIR')"
            )
        if self.config.scorer != self.scorer_kind:
            raise ConfigError(
                f"--kv-policy {self.name} needs a scorer of kind {self.scorer_kind!r}, {source} holds {self.config.scorer!r}: use --kv-policy {_BY_KIND[self.config.scorer].name}"
            )
        m = self.model
        check_model(
            self.config,
            model_type=m.model_type,
            num_layers=m.num_layers,
            num_kv_heads=m.num_kv_heads,
            head_dim=m.head_dim,
            source=source,
        )

    def scorer_shape(self) -> ScorerShape:
        return self.config.retention

    @property
    def order(self):
        return Order.STATIC if self.config.decay.step == 1 else Order.AGED

    def set_tensors(self, layer: int, tensors: dict[str, torch.Tensor]) -> None:
        """Hands over a full checkpoint's (checked) tensors of one layer, all heads, float32."""
        self._layers[layer] = tensors

    def rule(self, layer, heads):
        scorer = from_tensors(self.config, {name: t[heads] for name, t in self._loaded(layer).items()})
        kept = self.retention
        return RetentionRule(
            kept.sinks,
            kept.window,
            scorer.log_gamma(),
            self.config.decay.step,
            scorer.weights(),
            decide_every=kept.decide_every,
        )

    def _loaded(self, layer: int) -> dict[str, torch.Tensor]:
        if not self._layers[layer]:
            raise ConfigError(
                f"the checkpoint's weights brought no scorer tensors for layer {layer} (dummy weights bring none): give --kv-scorer DIR"
            )
        return self._layers[layer]


class KVpop(_Learned):
    """Delayed mLSTM scorer: state update with every token, readout for the token that leaves the window."""

    name, scorer_kind = "kvpop", "mlstm"
    paper = "Hauzenberger et al., KVpop, sections 3.3, E.3, E.4"
    cost = "three [2D, D/2..D] projections and one pass over a D x D state per head"
    state = "D x (D + 1) + 1 float32"

    @property
    def state_fields(self):
        features, values = self._widths()
        return {"C": features * values, "z": features, "m": 1}

    def _widths(self) -> tuple[int, int]:
        """Features and value size of the state, from the tensors: a full checkpoint's have arrived by the time vLLM asks
        for the cache's layout."""
        first, double = self._loaded(0), 2 if self.config.feature_map == "hedgehog" else 1
        return first["q_proj"].shape[-1] * double, first["out.weight"].shape[-1]


class KVpopMLP(_Learned):
    """Stateless MLP scorer on ``[k; v]``."""

    name, scorer_kind = "kvpop-mlp", "mlp"
    paper = "Hauzenberger et al., KVpop, section E.2"
    cost = "one [2D, M] projection per head"


class KVpopLinear(_Learned):
    """Stateless linear scorer on ``[k; v]``."""

    name, scorer_kind = "kvpop-linear", "linear"
    paper = "Hauzenberger et al., KVpop, section E.2"
    cost = "one dot product of length 2D per head"


_BY_KIND = {cls.scorer_kind: cls for cls in (KVpop, KVpopMLP, KVpopLinear)}
