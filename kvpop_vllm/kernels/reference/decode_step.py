"""One decode step over a fixed-budget paged cache, plain torch, one (request, head) after another."""

from __future__ import annotations

import torch

from kvpop_vllm.kernels.ops import (
    STATE_M_START,
    AttentionMass,
    KeyNorm,
    LinearWeights,
    MLPWeights,
    MLSTMWeights,
    MomentResidual,
    RetentionRule,
)
from kvpop_vllm.kernels.reference import scoring
from kvpop_vllm.kernels.reference.moments import HeadMoments
from kvpop_vllm.kernels.reference.paging import HeadSlots, check_tokens_seen


def decode_step(q, k, v, pages, page_table, positions, valid, budgets, *, rule, scale):
    """See :func:`kvpop_vllm.kernels.ops.decode_step`."""
    requests, heads, size = k.shape
    group = q.shape[1] // heads
    out, lse = torch.empty_like(q), torch.empty(q.shape[:2], dtype=torch.float32)
    starts = positions.tolist()
    check_tokens_seen(pages, page_table, starts)
    for r in range(requests):
        for h in range(heads):
            slots = HeadSlots(pages, page_table[r, h], h, int(budgets[r, h]))
            moments = HeadMoments(slots, rule, starts[r], scale) if rule.keeps_moments else None
            held = _retain(slots, k[r, h], v[r, h], starts[r], int(valid[r, h]), rule, h, moments)
            seen = torch.arange(held)
            seen = seen[~rule.stale(seen, starts[r] + 1)]
            rows = slice(h * group, (h + 1) * group)
            plain, lse[r, rows], weights = _attend(q[r, rows], slots, seen, scale)
            out[r, rows] = moments.correct(plain, lse[r, rows], q[r, rows]) if rule.moment_correction else plain
            if rule.coupled:
                slots.put_mass(seen, weights.mean(0), add=_mean(rule))
    return out, lse


def _mean(rule: RetentionRule) -> bool:
    return isinstance(rule.scorer, AttentionMass) and rule.scorer.mean


def _retain(slots: HeadSlots, k, v, q: int, valid: int, rule: RetentionRule, head: int, moments=None) -> int:
    """Where decisions fall state updates, scores and evictions; then the write of token q. Returns how many slots are in use."""
    ring = rule.ring_slot(q)
    insertion_score = 0.0
    if rule.taken(q + 1) == q + 1:
        scored = []
        for t in range(q + 1 - rule.decide_every, q + 1):
            own, leaving = rule.ring_slot(t), t - rule.window
            x = torch.cat([k, v] if t == q else [slots.k(own), slots.v(own)]).float()
            insertion_score = _take_in(slots, x, t, rule, head)
            if t < q and not rule.coupled:
                slots.set_score(own, insertion_score)
            if leaving >= rule.sinks:
                scored.append((leaving, _boundary_score(slots, rule.ring_slot(leaving), rule, head)))
        factors = None
        if isinstance(rule.scorer, MomentResidual):  # as before the first of these evictions
            factors = torch.ones(slots.budget, dtype=torch.float64)
            ranked = [rule.ring_slot(t) for t, _ in scored] + list(range(rule.first_long, valid))
            factors[ranked] = moments.residuals(torch.tensor(ranked, dtype=torch.int64)).double()
        for leaving, score in scored:
            free = max(valid, rule.first_long)
            target = free if free < slots.budget else _victim(slots, score, leaving, q, rule, head, factors)
            if moments is not None and free >= slots.budget:
                moments.take_in(rule.ring_slot(leaving) if target is None else target)
            if target is not None and factors is not None:
                factors[target] = factors[rule.ring_slot(leaving)]
            if target is not None:
                slots.move(rule.ring_slot(leaving), target, score, leaving)
                valid = max(valid, target + 1)
    slots.write(ring, k, v, insertion_score, q)
    slots.set_tokens_seen(q + 1)
    return max(valid, ring + 1)


def _take_in(slots, x, q, rule, head) -> float:
    """Updates the mLSTM state with ``x_q`` (eqs. 38, 39); returns the score a token gets at insertion, 0 for most scorers."""
    weights = rule.scorer
    if not isinstance(weights, MLSTMWeights):
        return 0.0
    w = _one_head(weights, head)
    state = slots.load_state(w.state_floats)
    if q == 0:
        state.zero_()
        state[-1] = STATE_M_START
    key, value, igate, fgate = (t[0] for t in scoring.mlstm_inputs(w, x.view(1, 1, -1)))
    c, z, m = _split_state(state, w)
    log_f = torch.nn.functional.logsigmoid(fgate[0])
    m_new = torch.maximum(log_f + m, igate[0])
    keep, gain = torch.exp(log_f + m - m_new), torch.exp(igate[0] - m_new)
    c.mul_(keep).add_(gain * torch.outer(key[0], value[0]))
    z.mul_(keep).add_(gain * key[0])
    state[-1] = m_new
    slots.store_state(state)
    return 0.0 if w.delayed else float(_read_out(w, state, x))


def _boundary_score(slots, ring, rule, head) -> float:
    """Raw score of the token in ring slot ``ring``, which leaves the window (eqs. 36, 41, 42)."""
    weights = rule.scorer
    if weights is None:
        return 0.0
    if rule.coupled:
        return slots.score(ring)
    if isinstance(weights, KeyNorm):
        return float(scoring.key_norm_score(slots.k(ring)))
    x = torch.cat([slots.k(ring), slots.v(ring)]).float()
    w = _one_head(weights, head)
    if isinstance(w, LinearWeights):
        return float(scoring.linear_score(w, x.view(1, 1, -1)))
    if isinstance(w, MLPWeights):
        return float(scoring.mlp_score(w, x.view(1, 1, -1)))
    return float(_read_out(w, slots.load_state(w.state_floats), x) if w.delayed else slots.score(ring))


def _read_out(w, state, x):
    c, z, m = _split_state(state, w)
    query = scoring.mlstm_query(w, x.view(1, 1, -1))[0, 0]
    h = (query @ c) / scoring.readout_denominator(query @ z, m)
    return scoring.mlstm_score(w, h.view(1, 1, -1), x.view(1, 1, -1))


def _split_state(state, w):
    cells = w.features * w.value_size
    return state[:cells].view(w.features, w.value_size), state[cells:-1], state[-1]


def _one_head(weights, head):
    cut = {name: t[head : head + 1] if isinstance(t, torch.Tensor) else t for name, t in vars(weights).items()}
    return type(weights)(**cut)


def _victim(slots, score, leaving, q, rule, head, factors=None) -> int | None:
    """The long-range slot whose token has the lowest effective score, None if that is the leaving token itself.

    factors: ``[B]`` float64 by slot, of raw scores.
    """
    first, log_gamma = rule.first_long, float(rule.log_gamma[head])
    scores, positions = slots.long_range(first)
    raw, own = scores.double(), score
    if _mean(rule):
        raw, own = raw / (q - positions), own / (q - leaving)
    if factors is not None:
        raw, own = raw * factors[first:], own * float(factors[rule.ring_slot(leaving)])
    effective = raw + ((q - positions) // rule.decay_step) * log_gamma
    own = own + ((q - leaving) // rule.decay_step) * log_gamma
    if len(effective) == 0 or own < float(effective.min()):
        return None  # of equal scores the older leaves, and every long-range token is older
    lowest = torch.where(effective == effective.min(), positions, torch.iinfo(torch.int64).max)
    return first + int(lowest.argmin())


def _attend(q, slots, seen, scale):
    """Softmax attention of ``q [G, D]`` over the slots ``seen [n]``, and its weights ``[G, n]``; all float32."""
    keys, values = slots.gather(seen)
    logits = q.float() @ keys.float().T * scale
    lse = logits.logsumexp(-1)
    weights = torch.exp(logits - lse.unsqueeze(-1))
    return weights @ values.float(), lse, weights
