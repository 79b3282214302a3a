"""DMS: a gate decides whether a token is evicted with the window.

Source: Łańcucki et al., 2025, arXiv 2506.05345.
"""

from __future__ import annotations

from kvpop_vllm.config import ConfigError
from kvpop_vllm.policies.base import Signal
from kvpop_vllm.policies.learned import Gated
from kvpop_vllm.supported import refused_borrowing


class DMS(Gated):
    """``r_t = -logit_t``: a token with a positive eviction logit is evicted when it leaves the window.

    The token is evicted even if slots are free. The logit is a projection of the attention block's input, or
    a channel borrowed from the query.

    The paper does not bound the cache of a head. Here, if more tokens remain than the budget allows, those
    with the lowest logits stay. The meaning of a window of w differs by one: the paper's window holds w
    tokens in addition to the newest one. In the authors' code the logit of token t + 1 decides about token t. A
    scorer's config may ask for this (``shifted``). The window must hold at least two tokens, because the
    position word of slot 1 stores the number of filled slots.
    """

    name, scorer_kind = "dms", "dms"
    paper = "Lancucki et al. 2025, arXiv:2506.05345"
    cost = "one [E, H] product per layer, or none"
    default_threshold = 0.0
    signals = frozenset({Signal.HIDDEN, Signal.PRE_ROPE})

    def prepare(self):
        super().prepare()
        if self.borrows and (reason := refused_borrowing(self.model.model_type)):
            raise ConfigError(f"{reason}: choose another scorer")

    @property
    def borrows(self):
        return self.config.reads == "query"

    @property
    def shifted(self):
        return self.config.shifted
