"""KVzap: a gate predicts how much attention a token will get.

Source: Jegou and Jeblick, 2026, arXiv 2601.07891.
"""

import math

from kvpop_vllm.policies.base import Signal
from kvpop_vllm.policies.learned import Gated


class KVzap(Gated):
    """``r_t`` is the gate's output: the tokens with the highest scores stay.

    The gate reads the attention block's input. Scores do not decay.

    The paper bounds no cache: it evicts the tokens with scores below a threshold (-4 for the MLP of Qwen3-8B) when
    they leave the window. Here the k best stay, and with ``--kv-threshold`` tokens below it are evicted even if
    slots are free. The paper has a window of 128 and no sinks. Its code's window holds 128 tokens before the newest
    one, and reads a prompt with dense attention. Here the window of 128 includes the newest token, there are four
    sinks as under our other policies, and a prompt's queries see what the cache holds.
    """

    name, scorer_kind = "kvzap", "kvzap"
    paper = "Jegou and Jeblick 2026, arXiv:2601.07891"
    cost = "one [E, M] and one [M, H] product per layer, or one [E, H] product"
    signals = frozenset({Signal.HIDDEN})
    # the policy takes --kv-threshold, and has none by default
    default_threshold = -math.inf
