"""Slots made of a prompt at its end by attention matching, found naively in float64, part of the naive oracle."""

import math
from typing import NamedTuple

import numpy as np
import torch

QUERIES, MOST_BIAS, RIDGE, SWEEPS = 256, 3.0, 1e-2, 1000


class MadeSlots(NamedTuple):
    """Slots of one KV head.

    Attributes:
        tokens: ``[P]``, tokens whose keys they have, oldest first.
        values: ``[P, D]``.
        biases: ``[P]``.
        margin: relative difference of the worst of these tokens' score and the best other one's, infinite if there is
            none.
        misfit: half of the squared differences of all queries' masses from those of all tokens, which are 1 without
            sinks.
    """

    tokens: np.ndarray
    values: np.ndarray
    biases: np.ndarray
    margin: float
    misfit: float


def sizes(prompt: int, budget: int, window: int) -> tuple[int, int]:
    """Return the number of made slots, and of tokens at the prompt's end that are kept as they are."""
    near = min(prompt, window)
    return min(prompt - near, budget - window), near


def made_slots(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    prompt: int,
    budget: int,
    window: int,
    biases: torch.Tensor | None = None,
    sink_logits: torch.Tensor | None = None,
) -> list[MadeSlots]:
    """Return the slots that are made for each KV head at a prompt's end.

    Args:
        query: ``[H * G, S, D]``.
        key: ``[H, S, D]``.
        value: ``[H, S, D]``.
        prompt: number of prompt tokens.
        budget: B.
        window: w.
        biases: ``[H, P]``, taken instead of the best ones if they are given.
        sink_logits: ``[H * G]``, logits of a further key of value 0 that every query sees, None for none.
    """
    count, near = sizes(prompt, budget, window)
    used, group, made_slots = min(QUERIES, near), len(query) // len(key), []
    for h in range(len(key)):
        k, v = (x[h, : prompt - near].double().numpy() for x in (key, value))
        # tokens first, and heads of the group within each
        rows = [query[h * group + g, t].double().numpy() for t in range(prompt - used, prompt) for g in range(group)]
        sinks = [-math.inf if sink_logits is None else float(sink_logits[h * group + g]) for g in range(group)] * used
        made_slots.append(_made_slots(rows, sinks, k, v, count, None if biases is None else biases[h].double().numpy()))
    return made_slots


def _made_slots(
    rows: list[np.ndarray], sinks: list[float], k: np.ndarray, v: np.ndarray, count: int, biases: np.ndarray | None
) -> MadeSlots:
    if count == len(k):
        return MadeSlots(np.arange(count), v, np.zeros(count), math.inf, 0.0)
    weights = []
    for row, sink in zip(rows, sinks, strict=True):
        # the sink is the last column
        logits = np.append(k @ row / math.sqrt(len(row)), sink)
        shares = np.exp(logits - logits.max())
        weights.append(shares / shares.sum())
    weights = np.stack(weights)
    weights, to_sinks = weights[:, :-1], weights[:, -1]
    scores = np.sqrt((weights**2).mean(0))
    # sorted() is stable, so that ties keep the older token
    ranked = sorted(range(len(k)), key=lambda t: -scores[t])
    tokens = np.array(sorted(ranked[:count]))
    full = 1 - to_sinks
    factors = _factors(weights[:, tokens], full) if biases is None else np.exp(biases)
    shares = weights[:, tokens] * factors
    shares /= shares.sum(1, keepdims=True) + to_sinks[:, None]
    gram = shares.T @ shares
    # relative to the mean of the diagonal
    gram += np.eye(count) * RIDGE * np.trace(gram) / count
    change = np.linalg.solve(gram, shares.T @ (weights @ v - shares @ v[tokens]))
    margin = 1 - scores[ranked[count]] / scores[ranked[count - 1]]
    misfit = ((weights[:, tokens] @ factors - full) ** 2).sum() / 2
    return MadeSlots(tokens, v[tokens] + change, np.log(factors), float(margin), float(misfit))


def _factors(masses: np.ndarray, full: np.ndarray) -> np.ndarray:
    """Return the factors within the bounds under which masses ``[n, P]`` sum to ``full [n]`` best, one coordinate at a time."""
    gram, target = masses.T @ masses, masses.T @ full
    x, low, high = np.ones(len(target)), math.exp(-MOST_BIAS), math.exp(MOST_BIAS)
    for _ in range(SWEEPS):
        before = x.copy()
        for j in range(len(x)):
            # the exact minimum along one coordinate, cut to the bounds
            x[j] = min(high, max(low, x[j] + (target[j] - gram[j] @ x) / gram[j, j]))
        if abs(x - before).max() < 1e-7:
            break
    return x


def outputs(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    slots: list[MadeSlots],
    prompt: int,
    budget: int,
    window: int,
    sink_logits: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the attention outputs ``[H * G, S, D]`` of all tokens, float64, given the made slots of each head.

    ``sink_logits`` are as in :func:`made_slots`.
    """
    count, near = sizes(prompt, budget, window)
    group, out = len(query) // len(key), torch.zeros(query.shape, dtype=torch.float64)
    for row in range(len(query)):
        h = row // group
        k, v = key[h].double().numpy(), value[h].double().numpy()
        for t in range(query.shape[1]):
            keys, values, bias = k[: t + 1], v[: t + 1], np.zeros(t + 1)
            if t >= prompt:
                # the ring has the slots that made ones leave
                first = max(prompt - near, t + 1 - (budget - count))
                keys = np.concatenate([k[slots[h].tokens], keys[first:]])
                values = np.concatenate([slots[h].values, values[first:]])
                bias = np.concatenate([slots[h].biases, bias[first:]])
            logits = keys @ query[row, t].double().numpy() / math.sqrt(query.shape[2]) + bias
            sink = -math.inf if sink_logits is None else float(sink_logits[row])
            # the largest exponent is 0
            shares = np.exp(np.append(logits, sink) - max(logits.max(), sink))
            out[row, t] = torch.from_numpy(shares[:-1] @ values / shares.sum())
    return out
