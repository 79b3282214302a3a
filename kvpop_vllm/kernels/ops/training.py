"""Schemas of the training ops; axes in :mod:`kvpop_vllm.kernels.ops`.

Tensors hold whole sequences, with the head axis before the position axis.
"""

from collections.abc import Sequence

import torch

from kvpop_vllm.kernels.dispatch import resolve


def _same(tensors: str, a, b) -> None:
    """Check that the shapes ``a`` and ``b`` are equal."""
    if tuple(a) != tuple(b):
        raise ValueError(f"{tensors} must have one shape, got {list(a)} and {list(b)}")


def _axes(op: str, name: str, x: torch.Tensor, axes: str) -> None:
    """Check that ``x`` has as many axes as ``axes`` names."""
    if x.dim() != len(axes.split()):
        raise ValueError(f"{op} needs {name} [{', '.join(axes.split())}], got {list(x.shape)}")


def _grouped(op: str, q: torch.Tensor, k: torch.Tensor, queries: str = "S") -> None:
    """Check that q is ``[B, Hq, S, D]``, or with another number of queries, and k ``[B, H, S, D]``, Hq a multiple of H."""
    fits = q.dim() == k.dim() == 4 and q.shape[1] >= k.shape[1] > 0 and q.shape[1] % k.shape[1] == 0
    axes = (0, 2, 3) if queries == "S" else (0, 3)
    if not fits or any(q.shape[axis] != k.shape[axis] for axis in axes):
        raise ValueError(
            f"{op} needs q [B, Hq, {queries}, D] and k [B, H, S, D], Hq a multiple of H, got {list(q.shape)} and"
            f" {list(k.shape)}"
        )


def _roles(op: str, sinks: int, window: int, topk: int) -> None:
    """Check that the numbers of sinks, window tokens and long-range slots are valid."""
    if window < 1 or sinks < 0 or topk < 0:
        raise ValueError(f"{op} needs window >= 1 and sinks, topk >= 0, got {window}, {sinks}, {topk}")


def _slots(op: str, topk: int | Sequence[int], heads: int) -> list[int]:
    """Return the number of long-range slots of each head, from one number for all or from those of the heads."""
    slots = [topk] * heads if isinstance(topk, int) else list(topk)
    if len(slots) != heads:
        raise ValueError(f"{op} needs topk, or one for each of {heads} heads, got {len(slots)}")
    return slots


def delayed_mlstm(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    igate: torch.Tensor,
    fgate: torch.Tensor,
    *,
    delay: int,
    state: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
    chunk: int = 64,
    impl: str = "auto",
) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Run a chunkwise mLSTM with a time-shifted readout (KVpop eqs. 38-41).

    Args:
        q, k: ``[B, H, S, F]`` features (after the feature map).
        v: ``[B, H, S, Dv]``.
        igate, fgate: ``[B, H, S]`` gate pre-activations; ``i = exp``, ``f = sigmoid``.
        delay: token ``u`` is read out at position ``u + delay``. With ``delay=0``, row q of ``q`` is read out
            at q; to continue from a ``state``, pass the features of the tokens to read out there.
        state: ``(C [B, H, F, Dv], z [B, H, F], m [B, H])`` float32, or None for the empty state.
        chunk: tokens per chunk.
        impl: implementation.

    Returns:
        ``h [B, H, S, Dv]`` float32, zero where ``u + delay >= S``, and the state after S tokens.

    Raises:
        ValueError: a state together with ``delay > 0``, shapes that do not match, no tokens, or
            ``delay < 0``.
    """
    _axes("delayed_mlstm", "k", k, "B H S F")
    _same("q and k", q.shape, k.shape)
    _same("v and k, but for the last axis,", v.shape[:-1], k.shape[:-1])
    _same("igate and k, but for the last axis,", igate.shape, k.shape[:-1])
    _same("fgate and igate", fgate.shape, igate.shape)
    if state is not None:
        lead = (*k.shape[:2], k.shape[3])
        for name, tensor, shape in zip("Czm", state, ((*lead, v.shape[3]), lead, lead[:2]), strict=True):
            _same(f"the state's {name} and what k and v ask for", tensor.shape, shape)
    if delay < 0 or chunk < 1 or k.shape[2] < 1:
        raise ValueError(
            f"delayed_mlstm needs delay >= 0, chunk >= 1 and tokens, got {delay}, {chunk} and {k.shape[2]} tokens"
        )
    run = resolve("delayed_mlstm", impl, q)
    return run(q, k, v, igate, fgate, delay=delay, state=state, chunk=chunk)


class NotFinite(ValueError):
    """Scores or what they are learned from are infinite or NaN, so training must stop."""


def check_priorities(priority: torch.Tensor) -> None:
    """Check that no priority of :func:`running_topk` on a CPU is NaN; a GPU is not waited for.

    Raises:
        NotFinite: one is.
    """
    if priority.device.type == "cpu" and priority.isnan().any():
        raise NotFinite("running_topk got a NaN priority: the scores are not finite")


def running_topk(
    priority: torch.Tensor, *, sinks: int, window: int, topk: int | Sequence[int], impl: str = "auto"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ranks under a static order and, for every query, the rank of the k-th best eligible key.

    KVpop algorithm 2. Key t of ``E(q) = {t : s <= t <= q - w}`` is retained if and only if
    ``rank[t] <= cutoff[q]``. Time is O(S log S) and memory O(S) per head. The order must not change with q.
    For decay steps n > 1 use :func:`online_topk`, whose ``evicted_at`` gives
    ``rank = S - min(evicted_at, S)`` and ``cutoff[q] = S - 1 - q``.

    Args:
        priority: ``[B, H, S]``; higher is retained, of equal priorities the newer. float32, or float64 for
            priorities that must not be rounded: ``r_t - t * log gamma`` at position 131,072 is accurate to
            1e-2 only in float32.
        sinks: s.
        window: w >= 1.
        topk: k, or k of each of the H heads.
        impl: implementation.

    Returns:
        ``rank [B, H, S]`` int32, 0 for the best of all S tokens; and ``cutoff [B, H, S]`` int32: S - 1 while
            ``E(q)`` holds at most k tokens, -1 throughout for k = 0.

    Raises:
        NotFinite: a priority on a CPU is NaN. A GPU is not waited for.
        ValueError: w < 1, s or k negative, or not one k for each head.
    """
    slots = _slots("running_topk", topk, priority.shape[-2])
    _roles("running_topk", sinks, window, min(slots))
    run = resolve("running_topk", impl, priority)
    return run(priority.detach(), sinks=sinks, window=window, topk=slots)


def sparse_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    rank: torch.Tensor,
    cutoff: torch.Tensor,
    *,
    sinks: int,
    window: int,
    scale: float,
    impl: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute attention under the fixed-budget mask of training (KVpop eq. 26) without an S x S array.

    Query q sees ``t < s``, ``q - w < t`` and the ``t <= q - w`` with ``rank[t] <= cutoff[q]``, all with
    ``t <= q``. Differentiable in q, k and v.

    Args:
        q: ``[B, Hq, S, D]``, any float dtype.
        k, v: ``[B, H, S, D]``, any float dtype.
        rank, cutoff: ``[B, H, S]`` int32, as from :func:`running_topk`.
        sinks: s.
        window: w.
        scale: factor on q . k.
        impl: implementation.

    Returns:
        ``out [B, Hq, S, D]`` in q's dtype; and ``lse [B, Hq, S]``, float32 (float64 for float64), the natural
            log-sum-exp of the scaled visible logits, without gradient.

    Raises:
        ValueError: shapes that do not match, w < 1 or s < 0.
    """
    _grouped("sparse_attention", q, k)
    _same("k and v", k.shape, v.shape)
    _same("rank and k, but for the last axis,", rank.shape, k.shape[:-1])
    _same("cutoff and rank", cutoff.shape, rank.shape)
    _roles("sparse_attention", sinks, window, 0)
    run = resolve("sparse_attention", impl, q)
    return run(q, k, v, rank, cutoff, sinks=sinks, window=window, scale=scale)


def future_attention_mass(
    q: torch.Tensor,
    k: torch.Tensor,
    lse: torch.Tensor,
    *,
    window: int,
    scale: float,
    lookahead: int | None = None,
    first: int = 0,
    impl: str = "auto",
) -> torch.Tensor:
    """Return the log of the attention mass that each key receives from some queries after it left the window.

    The transposed pass of KVpop eqs. 31, 33: ``logsumexp over d of (scale * q_d . k_t - lse_d)`` over the queries
    ``first <= d < first + Q`` with ``t + w <= d``, and ``d <= t + w + L`` for a look-ahead L. The result is not divided
    by the count ``N_t``; that is a variant of the target (``kvpop_vllm.distill.targets``). It carries no gradient.

    Args:
        q: ``[B, Hq, Q, D]``.
        k: ``[B, H, S, D]``.
        lse: ``[B, Hq, Q]``, log-normalisers of the queries, from sparse or dense attention.
        window: w.
        scale: factor on q . k.
        lookahead: L in tokens, or None for all later queries.
        first: position of the first query, where the first key has position 0.
        impl: implementation.

    Returns:
        ``[B, Hq, S]``, float32 (float64 for float64); -inf for a key without such a query.

    Raises:
        ValueError: shapes that do not match, w < 1, L < 0 or first < 0.
    """
    _grouped("future_attention_mass", q, k, "Q")
    _same("lse and q, but for the last axis,", lse.shape, q.shape[:-1])
    if window < 1 or (lookahead is not None and lookahead < 0) or first < 0:
        raise ValueError(
            f"future_attention_mass needs window >= 1, lookahead >= 0 and first >= 0, got {window}, {lookahead} and {first}"
        )
    run = resolve("future_attention_mass", impl, q)
    return run(q.detach(), k.detach(), lse.detach(), window=window, scale=scale, lookahead=lookahead, first=first)


def boundary_loss(
    pred: torch.Tensor,
    target: torch.Tensor,
    log_gamma: torch.Tensor,
    *,
    sinks: int,
    window: int,
    topk: int | Sequence[int],
    step: int,
    tau: float,
    samples: int | torch.Tensor,
    margin: tuple[float, float] | None,
    balance: tuple[float, float] | None,
    generator: torch.Generator | None = None,
    impl: str = "auto",
) -> torch.Tensor:
    """Compute the pairwise logistic loss at the teacher's retention boundary.

    Sources: KVpop eqs. 5-7, 22-25; DESIGN "Training". At query q the token ``t_new = q - w`` becomes
    eligible. The teacher keeps the k tokens with the best effective targets. The label is ``y = +1`` if t_new
    is among them, else -1. The boundary token ``t_bnd`` is the lowest-ranked token that the teacher keeps. If
    that is t_new itself, the pair would compare t_new with itself; then ``t_bnd`` is the best dropped token,
    which the teacher evicts at q. The loss of a pair is ``softplus(-y (pred_new(q) - pred_bnd(q)) / tau)``,
    weighted, with predicted effective scores ``pred_t + floor((q - t) / step) * log_gamma``.

    Args:
        pred: ``[B, H, S]`` predicted raw scores.
        target: ``[B, H, S]`` raw targets.
        log_gamma: ``[H]``, shared by teacher and student. Gradients reach pred and log_gamma through the
            predicted effective scores alone.
        sinks: s.
        window: w.
        topk: k, or k of each of the H heads.
        step: decay step n.
        tau: temperature.
        samples: number of positions ``q >= s + w + k`` drawn for each sequence and head, half uniformly and
            half with a linearly rising density; or the positions themselves, int64, broadcastable to
            ``[B, H, N]``.
        margin: ``(w_min, tau_w)`` of the margin weight (eq. 23), or None.
        balance: ``(c_min, c_max)``, clip of the headwise keep/drop balance (eq. 24), normalised to mean 1
            over all examples; or None.
        generator: random generator of the drawn positions, on any device.
        impl: implementation.

    Returns:
        Mean over sequences, samples and the heads that have any, a scalar in pred's dtype. A head has none if k = 0 or
            no position qualifies; the loss is 0 if no head has any.

    Raises:
        ValueError: shapes that do not match, positions before ``s + w + k`` or beyond the sequence, w < 1, n
            < 1, s or k negative, not one k for each head, or tau not above 0.
    """
    _axes("boundary_loss", "pred", pred, "B H S")
    _same("pred and target", pred.shape, target.shape)
    _same("log_gamma and the heads of pred", log_gamma.shape, pred.shape[1:2])
    slots = _slots("boundary_loss", topk, pred.shape[1])
    _roles("boundary_loss", sinks, window, min(slots))
    if step < 1 or not tau > 0 or (not isinstance(samples, torch.Tensor) and samples < 0):
        raise ValueError(f"boundary_loss needs step >= 1, tau > 0 and samples >= 0, got {step}, {tau} and {samples}")
    # there is one implementation, but the ops that it uses for ordering have fast ones
    order = {"order": "auto"} if impl == "auto" else {}
    return resolve("boundary_loss", impl, pred)(
        pred, target, log_gamma, sinks=sinks, window=window, topk=slots, step=step, tau=tau, samples=samples,
        margin=margin, balance=balance, generator=generator, **order,
    )  # fmt: skip
