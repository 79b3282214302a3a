"""One decode step over a fixed-budget paged cache, plain torch, one (request, head) after another."""

from __future__ import annotations

import torch

from kvpop_vllm.kernels.ops import (
    GENERATED,
    STATE_M_START,
    AttentionMass,
    GivenScore,
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


def decode_step(q, k, v, pages, page_table, positions, valid, budgets, *, rule, scale, given=None, prompts=None):
    """See :func:`kvpop_vllm.kernels.ops.decode_step`."""
    requests, heads, size = k.shape
    group = q.shape[1] // heads
    out, lse = torch.empty_like(q), torch.empty(q.shape[:2], dtype=torch.float32)
    starts = positions.tolist()
    check_tokens_seen(pages, page_table, starts)
    for r in range(requests):
        prompt = None if prompts is None else int(prompts[r])
        own = rule if prompt is None else rule.for_prompt(prompt)
        for h in range(heads):
            slots = HeadSlots(pages, page_table[r, h], h, int(budgets[r, h]))
            in_use = int(valid[r, h])
            if rule.threshold is not None:
                in_use = slots.in_use(rule, starts[r])
            moments = HeadMoments(slots, own, starts[r], in_use, scale) if rule.keeps_moments else None
            score = None if given is None else float(given[r, h])
            held = _retain(slots, k[r, h], v[r, h], starts[r], in_use, own, h, moments, score, prompt)
            seen = torch.arange(held)
            seen = seen[~own.stale(seen, starts[r] + 1)]
            rows = slice(h * group, (h + 1) * group)
            plain, lse[r, rows], weights = _attend(q[r, rows], slots, seen, scale)
            out[r, rows] = moments.correct(plain, lse[r, rows], q[r, rows]) if rule.moment_correction else plain
            if prompt is not None and starts[r] < prompt:  # votes since the last decision
                slots.put_mass(seen, weights.mean(0), add=own.taken(starts[r] + 1) != starts[r] + 1)
            elif rule.coupled and prompt is None:
                slots.put_mass(seen, weights.mean(0), add=_mean(rule))
    return out, lse


def _mean(rule: RetentionRule) -> bool:
    return isinstance(rule.scorer, AttentionMass) and rule.scorer.mean


def _retain(slots: HeadSlots, k, v, q: int, valid: int, rule: RetentionRule, head: int, moments, given, prompt) -> int:
    """Where decisions fall state updates, scores and evictions; then the write of token q. Returns how many slots are in use."""
    ring = rule.ring_slot(q)
    insertion_score = given or 0.0
    if rule.taken(q + 1) == q + 1:
        scored = []
        if prompt is not None and q <= prompt:
            _pool_votes(slots, rule, q, valid)
        for t in range(max(0, q + 1 - rule.decide_every), q + 1):
            own, leaving = rule.ring_slot(t), t - rule.window
            if isinstance(rule.scorer, MLSTMWeights):
                x = torch.cat([k, v] if t == q else [slots.k(own), slots.v(own)]).float()
                insertion_score = _take_in(slots, x, t, rule.scorer, head)
                if t < q:
                    slots.set_score(own, insertion_score)
            if leaving >= rule.sinks:
                score = _boundary_score(slots, rule.ring_slot(leaving), rule, head)
                scored.append((leaving, GENERATED if prompt is not None and q > prompt else score))
        factors = None
        if isinstance(rule.scorer, MomentResidual):  # as before the first of these evictions
            factors = torch.ones(slots.budget, dtype=torch.float64)
            ranked = [rule.ring_slot(t) for t, _ in scored] + list(range(rule.first_long, valid))
            factors[ranked] = moments.residuals(torch.tensor(ranked, dtype=torch.int64)).double()
        for leaving, score in scored:
            free = max(valid, rule.first_long)
            if rule.threshold is not None and score < rule.threshold:
                target, gone = None, True
            else:
                target = free if free < slots.budget else _victim(slots, score, leaving, q, rule, head, factors)
                gone = free >= slots.budget
            if moments is not None and gone:
                moments.take_in(rule.ring_slot(leaving) if target is None else target)
            if target is not None and factors is not None:
                factors[target] = factors[rule.ring_slot(leaving)]
            if target is not None:
                slots.move(rule.ring_slot(leaving), target, score, leaving)
                valid = max(valid, target + 1)
    slots.write(ring, k, v, insertion_score, q)
    slots.set_tokens_seen(q + 1)
    if rule.threshold is not None:
        slots.set_score(0, max(0, valid - rule.first_long))
    return max(valid, ring + 1)


def _pool_votes(slots: HeadSlots, rule: RetentionRule, q: int, valid: int) -> None:
    """Replaces the votes of all that is ranked at q by their means over neighbours."""
    leaving = range(max(rule.sinks, q + 1 - rule.decide_every - rule.window), q - rule.window + 1)
    _, positions = slots.long_range(rule.first_long)
    ranked = [(int(positions[slot - rule.first_long]), slot) for slot in range(rule.first_long, valid)]
    order = [slot for _, slot in sorted(ranked)] + [rule.ring_slot(t) for t in leaving]
    votes = torch.tensor([slots.score(slot) for slot in order], dtype=torch.float32)
    pool = rule.scorer.pool
    if order:
        pooled = torch.nn.functional.avg_pool1d(votes.view(1, -1), pool, stride=1, padding=pool // 2)[0]
        for slot, mean in zip(order, pooled.tolist(), strict=True):
            slots.set_score(slot, mean)


def _take_in(slots, x, q, weights, head) -> float:
    """Updates the mLSTM state with ``x_q`` (eqs. 38, 39); returns the score a token gets at insertion, if any."""
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
    if rule.coupled or isinstance(weights, GivenScore):
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
    if rule.ages:
        raw, own = raw * (q - positions), own * (q - leaving)
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
