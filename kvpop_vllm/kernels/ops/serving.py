"""Schemas of the ops of serving; axes in :mod:`kvpop_vllm.kernels.ops`."""

from __future__ import annotations

from dataclasses import replace

import torch

from kvpop_vllm.kernels.dispatch import resolve
from kvpop_vllm.kernels.draws import head_keys
from kvpop_vllm.kernels.ops.rules import GivenScore, RetentionRule
from kvpop_vllm.kernels.pages import Pages, Prefix


def decode_step(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    pages: Pages,
    page_table: torch.Tensor,
    positions: torch.Tensor,
    budgets: torch.Tensor,
    *,
    rule: RetentionRule,
    scale: float,
    given: torch.Tensor | None = None,
    prefix: Prefix | None = None,
    seeds: torch.Tensor | None = None,
    windows: torch.Tensor | None = None,
    impl: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Advance each of R requests by one token: state update, delayed readout, score, argmin, slot move, attention.

    In this order, per request and head, with q the token's position (DESIGN "Pages", KVpop Figure 3):
    the state takes in ``x_q = [k_q; v_q]``; ``u = q - w`` (if ``u >= s``) is scored with a state that includes q; it is
    copied from its ring slot into the first free long-range slot, or over the long-range token of lowest effective
    score, or dropped if it is itself the lowest; q is written into its sink slot, or into ring slot ``s + (q - s) % w``
    where u sat; attention runs over the slots in use, ``[0, min(q + 1, B))`` or fewer with a threshold. Before token 0 is
    taken in the state is initialised.

    Where scores come from attention, the query's weights are added to the score words, or written there, at the end.
    A score that is given lies in its token's score word from the start.

    A request with a protected prefix of p tokens attends to these first. Its slots are those of the tail
    (:class:`SlotRoles`), which begins afresh at ``q = p``: whatever lies there is forgotten, but for the scorer's state, which
    :func:`begin_tail` has built. A token below p lies in the prefix pages already; it attends to the tokens up to itself,
    and nothing is written.

    Args:
        q: ``[R, Hq, D]``, k, v: ``[R, H, D]`` in the cache's dtype. Last axis contiguous.
        pages: the layer's cache; written in place.
        page_table: ``[R, H, P]`` int32 block numbers, state blocks first; stride 0 over heads is fine.
        positions: ``[R]`` int64, position of each request's token.
        budgets: ``[R, H]`` int32, B of each head.
        rule: what is kept. scale: factor on q . k.
        given: ``[R, H]`` float32, scores of the tokens, where the rule's scorer is :class:`GivenScore`, else ignored.
        prefix: protected tokens of the R requests, or None where nobody has any.
        seeds: ``[R]`` int64, of each request's draws where the rule's scorer is :class:`RandomDraw`, else ignored.
        windows: ``[R]`` int32, w of each request; the rule's where not given.

    Returns:
        ``out [R, Hq, D]`` in q's dtype, corrected if the rule says so, and ``lse [R, Hq]`` float32, the natural log-sum-exp
        of the scaled logits over the retained tokens.

    Raises:
        StepOrderError: some request's ``positions`` differs from its ``tokens_seen``; nothing has been written. In Triton,
            which does not wait for the device, that request's outputs are NaN instead, its pages as before; and a position
            of -1 is padding.
        ValueError: given scores or seeds are missing where the rule needs them, or of another shape.
    """
    run = resolve("decode_step", impl, q)
    more = _inputs_of(rule, given, k.shape[:2], seeds, (len(k),))
    if windows is None:
        windows = torch.full((len(k),), rule.window, dtype=torch.int32, device=k.device)
    more["windows"] = windows
    return run(q, k, v, pages, page_table, positions, budgets, rule=rule, scale=scale, prefix=prefix, **more)


def _inputs_of(rule: RetentionRule, given, scores: tuple[int, ...], seeds, requests: tuple[int, ...]) -> dict:
    """Return what an implementation takes beside the tokens, None where the rule does not: ``given``, and ``keys [R, H]`` of draws.

    Raises:
        ValueError: it is missing, or of another shape.
    """
    for name, value, needed, shape in (
        ("given", given, isinstance(rule.scorer, GivenScore), scores),
        ("seeds", seeds, rule.draws, requests),
    ):
        if needed and (value is None or value.shape != shape):
            got = None if value is None else tuple(value.shape)
            raise ValueError(f"{name} must be {tuple(shape)} for {type(rule.scorer).__name__}, got {got}")
    return {
        "given": given if isinstance(rule.scorer, GivenScore) else None,
        "keys": head_keys(seeds, rule.scorer.lanes) if rule.draws else None,
    }


def prefill_chunk(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    pages: Pages,
    page_table: torch.Tensor,
    start: int,
    budgets: torch.Tensor,
    *,
    rule: RetentionRule,
    scale: float,
    given: torch.Tensor | None = None,
    prefix: Prefix | None = None,
    seed: int | None = None,
    window: int | None = None,
    impl: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """The L tokens ``[start, start + L)`` of one request; equals L decode steps to rounding (DESIGN "One step").

    Each query sees the slots retained before the chunk and the chunk's own tokens, under its own cutoff; afterwards the
    survivors are written into the slots. Memory is bounded by B slots plus the chunk. Where the rule is
    ``sequential`` the chunk's tokens are done one after another, as in L decode steps.

    Args:
        q: ``[L, Hq, D]``, k, v: ``[L, H, D]`` in the cache's dtype.
        page_table: ``[H, P]`` int32. start: position of the first token. budgets: ``[H]`` int32.
        given: ``[L, H]`` float32. prefix: of this request, R = 1, its ``tokens`` on the CPU. seed: of the
            request's draws. window: w of the request, the rule's where not given. The rest as in :func:`decode_step`.

    Returns:
        ``out [L, Hq, D]`` in q's dtype, ``lse [L, Hq]`` float32.

    Raises:
        StepOrderError: ``start`` differs from ``tokens_seen``; nothing has been written. In Triton too, which waits for the device
            for that.
        ValueError: as in :func:`decode_step`.
    """
    run = resolve("prefill_chunk", impl, q)
    seeds = None if seed is None else torch.tensor([seed], device=k.device)
    more = _inputs_of(rule, given, k.shape[:2], seeds, (1,))
    if window not in (None, rule.window):
        rule = replace(rule, window=window)
    return run(q, k, v, pages, page_table, start, budgets, rule=rule, scale=scale, prefix=prefix, **more)


def begin_tail(
    pages: Pages, page_table: torch.Tensor, prefix: Prefix, *, rule: RetentionRule, impl: str = "auto"
) -> None:
    """Build the scorer's state of R requests from the last ``rule.replay`` tokens of their protected prefixes.

    The state takes in tokens ``[max(0, p - R), p)`` and nothing is read out (DESIGN "A prefix and a tail"). To be called
    before the step that has token p; it may be called again. Requests without protected tokens, and rules without a
    recurrent scorer, are left alone.

    Args:
        pages: the tail's cache; state is written in place. page_table: ``[R, H, P]`` int32, state blocks first.
        prefix: of the R requests, all tokens below p written, its ``tokens`` on the CPU.
    """
    if rule.replays:
        resolve("begin_tail", impl, pages.k)(pages, page_table, prefix, rule=rule)


def online_topk(
    score: torch.Tensor,
    position: torch.Tensor,
    held: int,
    *,
    topk: int,
    window: int,
    log_gamma: torch.Tensor,
    decay_step: int = 1,
    ages: bool = False,
    keys: torch.Tensor | None = None,
    impl: str = "auto",
) -> torch.Tensor:
    """When each token is evicted from k long-range slots, arrivals one by one, evictions permanent.

    The first ``held`` tokens are in the slots already (any order); the others arrive in order of position, token t at
    ``q = t + window``; at each arrival, if more than k are held, the lowest effective score at q leaves.

    Args:
        score: ``[H, T]`` float32 raw scores. position: ``[H, T]`` int64; the arrivals' positions increase by one.
        log_gamma: ``[H]`` float64. ages: a token's effective score is its age times its score instead.
        keys: ``[H]`` int64, of draws that stand in place of the scores.

    Returns:
        ``evicted_at [H, T]`` int64: the query position at which a token is first missing, or ``torch.iinfo(int64).max``.

    Raises:
        ValueError: more tokens are held than there are, or than slots; window is not in [1, 2**29], so that times
            of the first 2**30 positions fit 31 bits, or decay_step is not in [1, 2**31 - 1].
    """
    if not 0 <= held <= min(topk, score.shape[-1]):
        raise ValueError(f"online_topk needs 0 <= held <= min(topk, T), got {held}, {topk} and {score.shape[-1]}")
    most = {"window": (window, 2**29), "decay_step": (decay_step, 2**31 - 1)}
    for name, (tokens, limit) in most.items():
        if not 1 <= tokens <= limit:
            raise ValueError(f"online_topk needs {name} in [1, {limit}], got {tokens}")
    run = resolve("online_topk", impl, score)
    return run(
        score,
        position,
        held,
        topk=topk,
        window=window,
        log_gamma=log_gamma,
        decay_step=decay_step,
        ages=ages,
        keys=keys,
    )
