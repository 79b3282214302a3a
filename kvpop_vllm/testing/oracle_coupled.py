"""Attention under masks, and policies that rank tokens by the attention they received, part of the naive oracle."""

import math

import torch

from .oracle_online import Decisions, Rank, Ranking, retained_by_ranking
from .oracle_scores import MEAN_MASS, MOMENT_RESIDUAL


def moments(key: torch.Tensor, value: torch.Tensor) -> tuple[int, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return number n, mean key, mean value and value-key covariance of tokens.

    The covariance ``[D, D]`` is computed from deviations, so that it is exactly zero for one token or several
    equal ones.

    Args:
        key: ``[n, D]``, n at least 1.
        value: ``[n, D]``.
    """
    key_mean, value_mean = key.mean(0), value.mean(0)
    return len(key), key_mean, value_mean, (value - value_mean).T @ (key - key_mean) / len(key)


def masked_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    visible: torch.Tensor,
    added: torch.Tensor | None = None,
    sink_logits: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return dense softmax attention under a boolean mask.

    Args:
        query: ``[H * G, S, D]``.
        key: ``[H, S, D]``.
        value: ``[H, S, D]``.
        visible: ``[H, S, S]``.
        added: ``[H, n]``, biases that are added to the scaled logits of the first n tokens, None for none.
        sink_logits: ``[H * G]``, logits of a further key of value 0, that every query sees, None for none.

    Returns:
        ``[S, H * G * D]``.
    """
    weights = _masked_logits(query, key, visible, added, sink_logits).softmax(-1)[..., : key.shape[1]]
    mixed = weights @ value.repeat_interleave(len(query) // len(key), dim=0)
    return mixed.transpose(0, 1).reshape(query.shape[1], -1)


def masked_lse(
    query: torch.Tensor,
    key: torch.Tensor,
    visible: torch.Tensor,
    added: torch.Tensor | None = None,
    sink_logits: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the log-sum-exp of each query's logits over the tokens it sees and its sink, ``[S, H * G]``.

    Arguments are those of :func:`masked_attention`.
    """
    return _masked_logits(query, key, visible, added, sink_logits).logsumexp(-1).T


def _masked_logits(query, key, visible, added, sink_logits) -> torch.Tensor:
    group = query.shape[0] // key.shape[0]
    # query heads of a KV head are neighbours
    key, visible = (t.repeat_interleave(group, dim=0) for t in (key, visible))
    logits = query @ key.transpose(1, 2) / math.sqrt(query.shape[-1])
    if added is not None:
        logits[..., : added.shape[1]] += added.repeat_interleave(group, dim=0).unsqueeze(1)
    logits = logits.masked_fill(~visible, -math.inf)
    if sink_logits is None:
        return logits
    return torch.cat([logits, sink_logits.to(logits).view(-1, 1, 1).expand(*logits.shape[:2], 1)], -1)


def corrected_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    visible: torch.Tensor,
    added: torch.Tensor | None = None,
    sink_logits: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return :func:`masked_attention` corrected by the moments of the evicted tokens.

    Those are the earlier tokens that a query does not see. Source: MomentKV, eq. 12.
    """
    (heads, length, size), group = key.shape, len(query) // len(key)
    scale = 1 / math.sqrt(size)
    out = masked_attention(query, key, value, visible, added, sink_logits)
    mass = masked_lse(query, key, visible, added, sink_logits)
    for h in range(heads):
        rows = slice(h * group, (h + 1) * group)
        for q in range(length):
            gone = ~visible[h, q]
            # later tokens are not seen either, and have not been evicted
            gone[q + 1 :] = False
            if gone.any():
                count, key_mean, value_mean, covariance = moments(key[h, gone], value[h, gone])
                evicted = value_mean + scale * query[rows, q] @ covariance.T
                evicted_mass = math.log(count) + scale * query[rows, q] @ key_mean
                shares = torch.stack([mass[q, rows], evicted_mass]).softmax(0).unsqueeze(-1)
                # a view of out, which is written in place
                retained = out[q].view(-1, size)[rows]
                retained.copy_(shares[0] * retained + shares[1] * evicted)
    return out


class Masses(Ranking):
    """Attention masses of one KV head's tokens."""

    def __init__(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, added, sink_logits, kind: str, scale: float
    ) -> None:
        """Begin without any mass.

        ``query [G, S, D]``, ``key [S, D]``, ``value [S, D]``, ``added [S]`` and ``sink_logits [G]`` are the head's.
        """
        self.query, self.key, self.value, self.added, self.kind = query, key, value, added, kind
        self.sink_logits, self.scale = sink_logits, scale
        self.total = self.newest = torch.zeros(len(key), dtype=key.dtype)

    def ranks(self, q: int, candidates: set[int], visible: list[int]) -> dict[int, Rank]:
        """Return the scores of MEAN_MASS, NEWEST_MASS or MOMENT_RESIDUAL."""
        tokens = torch.tensor(list(candidates))
        # queries t to q - 1 have seen token t
        mass = (self.total[tokens] / (q - tokens) if self.kind == MEAN_MASS else self.newest[tokens]).double()
        if self.kind == MOMENT_RESIDUAL:
            present = torch.zeros(q, dtype=torch.bool)
            present[visible] = True
            mass = mass * _residuals(self.key[:q], self.value[:q], present, self.scale)[tokens].double()
        return {t: (0, token_mass) for t, token_mass in zip(tokens.tolist(), mass.tolist(), strict=True)}

    def attend(self, q: int, visible: list[int], retained: set[int]) -> float:
        """Add the masses that the query gives, and return no bound."""
        tokens = torch.tensor(visible, dtype=torch.long)
        logits = self.query[:, q] @ self.key[tokens].T / math.sqrt(self.key.shape[1]) + self.added[tokens]
        self.newest = torch.zeros_like(self.newest)
        # the sink takes its share, and no token has that
        logits = torch.cat([logits, self.sink_logits.to(logits).unsqueeze(-1)], -1)
        self.newest[tokens] = logits.softmax(-1)[:, :-1].mean(0)
        self.total = self.total + self.newest
        return math.inf


def retained_by_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    kind: str,
    *shape: int,
    added: torch.Tensor | None = None,
    sink_logits: torch.Tensor | None = None,
    scale: float | None = None,
    **options: object,
) -> Decisions:
    """Return the retained sets of the online rule with scores from attention mass.

    The mass of a token from a query is its softmax weight over the tokens that the query sees and its sink, averaged
    over the query heads of the KV head. At query ``q`` tokens are ranked by the mass from ``q - 1`` (TOVA), by the mean
    over ``t .. q - 1`` (H2O), or by the former times ``|v - vb - scale Sig k|`` with the moments of the tokens evicted
    before ``q`` (MomentKV, eq. 10).

    Args:
        query: ``[H * G, S, D]``.
        key: ``[H, S, D]``.
        value: ``[H, S, D]``.
        kind: NEWEST_MASS, MEAN_MASS or MOMENT_RESIDUAL.
        shape: sinks, ``w`` and ``k``.
        added: see :func:`masked_attention`.
        sink_logits: see :func:`masked_attention`.
        scale: the model's factor of logits, by default ``1 / sqrt(D)``. Queries of a model with another one are given
            multiplied, so that their logits have the default factor.
        options: arguments of :func:`retained_by_ranking` by name.
    """
    added = torch.zeros(key.shape[:2], dtype=key.dtype) if added is None else added
    # of weight 0
    sink_logits = torch.full((len(query),), -math.inf) if sink_logits is None else sink_logits
    query, sink_logits = (x.unflatten(0, (len(key), -1)) for x in (query, sink_logits))
    heads = zip(query, key, value, added, sink_logits, strict=True)
    scale = 1 / math.sqrt(key.shape[-1]) if scale is None else scale
    rankings = [Masses(*head, kind, scale) for head in heads]
    return retained_by_ranking(rankings, key.shape[1], key.dtype, *shape, **options)


def _residuals(key: torch.Tensor, value: torch.Tensor, present: torch.Tensor, scale: float) -> torch.Tensor:
    """Return the distance of each value from its prediction by the moments of the tokens that are not seen.

    Args:
        key: ``[n, D]``.
        value: ``[n, D]``.
        present: ``[n]`` booleans, True for the tokens that are seen.
        scale: the model's factor of logits.

    Returns:
        ``[n]``.
    """
    if present.all():
        return value.norm(dim=-1)
    _, _, value_mean, covariance = moments(key[~present], value[~present])
    return (value - value_mean - scale * key @ covariance.T).norm(dim=-1)
