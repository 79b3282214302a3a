"""KVpop and its three scorers.

Source: KVpop: Key-Value Cache Compression with Predictive Online Pruning (Hauzenberger et al.).
"""

from kvpop_vllm.kernels.ops import RetentionRule
from kvpop_vllm.policies.base import Order, Signal
from kvpop_vllm.policies.learned import Learned


class _Scored(Learned):
    """Learned policy that scores tokens from keys and values as cached."""

    signals = frozenset({Signal.KEY, Signal.VALUE})

    @property
    def order(self):
        # with a step of 1 all tokens of a head decay alike, and their order stays
        return Order.STATIC if self.config.decay.step == 1 else Order.AGED

    def rule(self, layer, heads):
        scorer, retention = self.module(layer, heads), self.retention
        return RetentionRule(
            retention.sinks, retention.window, scorer.log_gamma(), self.config.decay.step, scorer.weights()
        )


class KVpop(_Scored):
    """Delayed mLSTM scorer.

    Every token updates the state. A token's score is read out when it leaves the window.
    """

    name, scorer_kind = "kvpop", "mlstm"
    paper = "Hauzenberger et al., KVpop, sections 3.3, E.3, E.4"
    cost = "three [2D, D/2..D] projections and one pass over a D x D state per head"
    state = "D x (D + 1) + 1 float32"


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
