"""KVpop and its three scorers.

Source: KVpop: Key-Value Cache Compression with Predictive Online Pruning (Hauzenberger et al.).
"""

from __future__ import annotations

from kvpop_vllm.kernels.ops import RetentionRule
from kvpop_vllm.policies.base import Order, Signal
from kvpop_vllm.policies.learned import Learned
from kvpop_vllm.scorers import from_tensors
from kvpop_vllm.scorers.checkpoint import of_heads


class _Scored(Learned):
    """Learned policy that scores tokens from keys and values as cached."""

    signals = frozenset({Signal.KEY, Signal.VALUE})

    @property
    def order(self):
        return Order.STATIC if self.config.decay.step == 1 else Order.AGED

    def rule(self, layer, heads):
        scorer = from_tensors(self.config, of_heads(self.loaded(layer), heads))
        kept = self.retention
        return RetentionRule(kept.sinks, kept.window, scorer.log_gamma(), self.config.decay.step, scorer.weights())


class KVpop(_Scored):
    """Delayed mLSTM scorer.

    Every token updates the state. A token's score is read out when it leaves the window.
    """

    name, scorer_kind = "kvpop", "mlstm"
    paper = "Hauzenberger et al., KVpop, sections 3.3, E.3, E.4"
    cost = "three [2D, D/2..D] projections and one pass over a D x D state per head"
    state = "D x (D + 1) + 1 float32"

    @property
    def state_fields(self):
        features, values = self._widths()
        return {"C": features * values, "z": features, "m": 1}

    def _widths(self) -> tuple[int, int]:
        """Return the number of features and the value size of the state.

        They are read from the tensors. A full checkpoint's tensors are loaded before vLLM asks for the cache
        layout.
        """
        first, double = self.loaded(0), 2 if self.config.feature_map == "hedgehog" else 1
        return first["q_proj"].shape[-1] * double, first["out.weight"].shape[-1]


class KVpopMLP(_Scored):
    """Stateless MLP scorer on ``[k; v]``."""

    name, scorer_kind = "kvpop-mlp", "mlp"
    paper = "Hauzenberger et al., KVpop, section E.2"
    cost = "one [2D, M] projection per head"


class KVpopLinear(_Scored):
    """Stateless linear scorer on ``[k; v]``."""

    name, scorer_kind = "kvpop-linear", "linear"
    paper = "Hauzenberger et al., KVpop, section E.2"
    cost = "one dot product of length 2D per head"
