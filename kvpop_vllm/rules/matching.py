"""Attention matching: keys, biases and values of a small cache that attends like a large one, without training.

A cache of T keys is replaced by P of its own keys, with a bias b that is added to the scaled logits and with new
values, so that for given queries both the mass ``sum exp(q.k * scale + b)`` and the attention output are kept.
Caches with the same mass and output are interchangeable next to any other keys.

Source: *Fast KV Compaction via Attention Matching*, arXiv:2602.16284. Two things differ from it. Masses are
matched relative to the full mass, which is 1 for every query of a model without attention sinks. Values are pulled
towards the kept tokens' own values, so that a slot without queries keeps its value.
"""

import math
from dataclasses import dataclass

import torch

NO_WEIGHT = -1e30
"""Bias of a slot that pads a head: finite in float32, and without weight next to any other key."""
OMP_STEPS = 256
"""Steps in which orthogonal matching pursuit chooses its keys, several keys a step."""


@dataclass(frozen=True)
class Matching:
    """Options of attention matching.

    Attributes:
        keys: ``highest`` keeps the keys of highest attention, ``omp`` those of a matching pursuit on the masses.
        score: what ranks the keys of ``highest``: ``rms`` or ``max`` of their weights over the queries.
        most_bias: bound on the size of a bias, in nats.
        ridge: strength of the pull towards the kept values, relative to a slot's mean squared weight.
        iterations: most iterations of the non-negative least squares.
    """

    keys: str = "highest"
    score: str = "rms"
    most_bias: float = 3.0
    ridge: float = 1e-2
    iterations: int = 500


def match(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slots: int, scale: float, options: Matching
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return keys ``[H, P, D]``, values ``[H, P, D]`` and biases ``[H, P]`` of a cache that attends like k, v.

    If P is at least T, all tokens are kept as they are and the other slots have no weight.

    Args:
        q: reference queries ``[H, n, D]`` of each KV head, those of its query heads pooled.
        k: keys ``[H, T, D]``.
        v: values ``[H, T, D]``.
        slots: P.
        scale: factor on q . k.
        options: options of the fit.
    """
    chosen, values, bias = fit(q, k, v, min(slots, k.shape[1]), scale, options)
    return padded(_picked(k.float(), chosen), values, bias, slots)


def fit(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    slots: int,
    scale: float,
    options: Matching,
    sink_logits: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the indices ``[H, P]`` of the kept keys, oldest first, and the values and biases of :func:`match`.

    Arguments are those of :func:`match`, but for P = ``slots``, at most T, and ``sink_logits [H, n]`` of attention
    sinks, one for each query. With sinks, the mass of a query is its share of the softmax, so that queries count by it.
    """
    q, k, v = q.float(), k.float(), v.float()
    if slots == k.shape[1] or not slots:
        return torch.arange(slots, device=k.device).expand(len(k), -1), v[:, :slots], k.new_zeros(len(k), slots)
    weights = (scale * q) @ k.transpose(1, 2)  # in place from here on: this is the largest tensor of the fit
    # the largest exponent is 0, so that no weight overflows
    top = weights.amax(-1, keepdim=True)
    if sink_logits is not None:
        top = torch.maximum(top, sink_logits.unsqueeze(-1))
    weights, full = weights.sub_(top).exp_(), None
    total = weights.sum(-1, keepdim=True)
    if sink_logits is not None:
        sinks = (sink_logits.unsqueeze(-1) - top).exp()
        full, total = total / (total + sinks), total + sinks  # full: [H, n, 1], the mass of all tokens
    weights /= total
    output = weights @ v
    chosen = choose(weights, slots, options, full).sort(-1).values
    masses = weights.gather(2, chosen.unsqueeze(1).expand(-1, weights.shape[1], -1))
    del weights
    factors = fit_factors(masses, options, full)
    chosen_values = _picked(v, chosen)
    share = masses.mul_(factors.unsqueeze(1))
    share_sum = share.sum(-1, keepdim=True)
    if full is not None:
        share_sum += 1 - full  # of the sinks
    share /= share_sum.clamp_min(torch.finfo(share.dtype).tiny)
    values = chosen_values + ridge(share, output - share @ chosen_values, options.ridge)
    return chosen, values, factors.log()


def _picked(x: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """Return rows ``chosen [H, P]`` of ``x [H, T, D]``."""
    return x.gather(1, chosen.unsqueeze(-1).expand(-1, -1, x.shape[2]))


def padded(k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor, slots: int) -> tuple[torch.Tensor, ...]:
    """Return k, v ``[H, P, D]`` and bias ``[H, P]`` with slots up to P that hold zeros and have no weight."""
    missing = slots - k.shape[1]
    pad = torch.nn.functional.pad
    return pad(k, (0, 0, 0, missing)), pad(v, (0, 0, 0, missing)), pad(bias, (0, missing), value=NO_WEIGHT)


def choose(weights: torch.Tensor, slots: int, options: Matching, full: torch.Tensor | None = None) -> torch.Tensor:
    """Return the indices ``[H, P]`` of the kept keys; ``weights`` are ``[H, n, T]``, ``full`` as in :func:`fit_factors`."""
    if options.keys == "omp":
        return pursue(weights, slots, options, full)
    scores = weights.amax(1) if options.score == "max" else weights.square().mean(1)
    return scores.topk(slots, -1).indices


def fit_factors(masses: torch.Tensor, options: Matching, full: torch.Tensor | None = None) -> torch.Tensor:
    """Return factors ``[H, P]`` on ``masses [H, n, P]`` whose sums are nearest to ``full``, within the bounds.

    ``full [H, n, 1]`` is the mass of all tokens, 1 if it is None.
    """
    gram, target = masses.transpose(1, 2) @ masses, (masses if full is None else masses * full).sum(1)
    bound = math.exp(options.most_bias)
    start = torch.ones_like(target)
    return bounded_least_squares(gram, target, start, 1 / bound, bound, options.iterations)


def bounded_least_squares(
    gram: torch.Tensor,
    target: torch.Tensor,
    start: torch.Tensor,
    lower: float,
    upper: float,
    iterations: int,
    tolerance: float = 1e-5,
) -> torch.Tensor:
    """Return x ``[H, P]`` within bounds that minimises ``x' gram x / 2 - target' x``.

    An accelerated projected gradient (FISTA with restarts) on columns of unit norm. torch has no such solver. Each head
    restarts and ends by itself, so that its result does not depend on the others.

    Args:
        gram: ``[H, P, P]``, without negative entries.
        target: ``[H, P]``.
        start: ``[H, P]``, within the bounds.
        lower: lower bound, at least 0.
        upper: upper bound.
        iterations: most steps.
        tolerance: a projected gradient of less, relative to the head's largest target, ends its search.
    """
    norms = gram.diagonal(dim1=1, dim2=2).sqrt().clamp_min(1e-12)
    gram = gram / norms.unsqueeze(1) / norms.unsqueeze(2)
    target, low, high = target / norms, lower * norms, upper * norms
    x = (start * norms).clamp(low, high)
    step = 1 / _largest_eigenvalue(gram)
    ahead, momentum = x, torch.ones(len(x), 1, dtype=torch.float64, device=x.device)
    result, done = x, torch.zeros(len(x), 1, dtype=torch.bool, device=x.device)
    enough = tolerance * target.abs().amax(-1, keepdim=True).clamp_min(1e-30)
    for i in range(iterations):
        gradient = _times(gram, ahead) - target
        new = (ahead - step * gradient).clamp(low, high)
        moved = new - x
        if i % 10 == 9:
            ends = ((ahead - new) / step).abs().amax(-1, keepdim=True) < enough
            result, done = torch.where(done, result, new), done | ends
            if bool(done.all()):
                return result / norms
        # gradient restart (O'Donoghue and Candes, arXiv:1204.3982): momentum that leads uphill is dropped
        uphill = ((ahead - new) * moved).sum(-1, keepdim=True) > 0
        following = (1 + (1 + 4 * momentum**2).sqrt()) / 2
        ahead = torch.where(uphill, new, new + ((momentum - 1) / following).to(x.dtype) * moved)
        x, momentum = new, torch.where(uphill, 1.0, following)
    return torch.where(done, result, x) / norms


def _largest_eigenvalue(gram: torch.Tensor, iterations: int = 10) -> torch.Tensor:
    """Return an upper bound ``[H, 1]`` on the eigenvalues of matrices without negative entries.

    For such a matrix A and any positive x it is the largest ``(A x)_i / x_i`` (Collatz and Wielandt).
    """
    x = torch.ones_like(gram[:, 0])
    for _ in range(iterations):
        x = _times(gram, x)
        # the bound holds for any positive x, so that clamped entries only make it looser
        x = (x / x.amax(-1, keepdim=True).clamp_min(1e-30)).clamp_min(1e-6)
    return (_times(gram, x) / x).amax(-1, keepdim=True).clamp_min(1e-12)


def _times(matrix: torch.Tensor, vector: torch.Tensor) -> torch.Tensor:
    return (matrix @ vector.unsqueeze(-1)).squeeze(-1)


def pursue(weights: torch.Tensor, slots: int, options: Matching, full: torch.Tensor | None = None) -> torch.Tensor:
    """Return the indices ``[H, P]`` of keys whose masses, with factors, sum to ``full`` best (matching pursuit).

    A step takes the keys whose weights agree most with the mass that is missing, and fits all factors again.
    """
    heads, _, tokens = weights.shape
    gram, target = weights.transpose(1, 2) @ weights, (weights if full is None else weights * full).sum(1)
    per_step = math.ceil(slots / OMP_STEPS)
    chosen = torch.zeros(heads, 0, dtype=torch.int64, device=weights.device)
    # filled in place, since concatenation would copy all rows at every step
    rows = gram.new_empty(heads, slots, tokens)
    factors, missing = target.new_zeros(heads, 0), target.clone()
    bound = math.exp(options.most_bias)
    while (have := chosen.shape[1]) < slots:
        new = missing.scatter(1, chosen, -math.inf).topk(min(per_step, slots - have), -1).indices
        chosen = torch.cat([chosen, new], 1)
        rows[:, have : chosen.shape[1]] = gram.gather(1, new.unsqueeze(-1).expand(-1, -1, tokens))
        among = rows[:, : chosen.shape[1]]
        chosen_gram = among.gather(2, chosen.unsqueeze(1).expand(-1, chosen.shape[1], -1))
        # the former factors are a good start, so that 10 iterations are enough
        start = torch.cat([factors, torch.ones_like(new, dtype=factors.dtype)], 1)
        factors = bounded_least_squares(chosen_gram, target.gather(1, chosen), start, 1 / bound, bound, 10)
        missing = target - (factors.unsqueeze(1) @ among).squeeze(1)
    return chosen


def ridge(share: torch.Tensor, missing: torch.Tensor, strength: float) -> torch.Tensor:
    """Return the change ``[H, P, D]`` of the values that adds ``missing [H, n, D]`` under weights ``share [H, n, P]``.

    The normal equations are solved in float64.
    """
    gram = (share.transpose(1, 2) @ share).double()
    diagonal = gram.diagonal(dim1=1, dim2=2)
    # diagonal is a view: this adds to gram itself
    diagonal += (strength * diagonal.mean(-1, keepdim=True)).clamp_min(1e-12)
    factor = torch.linalg.cholesky(gram)
    return torch.cholesky_solve((share.transpose(1, 2) @ missing).double(), factor).to(share.dtype)
