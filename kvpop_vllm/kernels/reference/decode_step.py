"""Reference decode step over a fixed-budget paged cache, in plain torch.

It processes one (request, head) after another.
"""

from dataclasses import replace

import torch

from kvpop_vllm.kernels.draws import draw
from kvpop_vllm.kernels.ops import STATE_M_START, AttentionMass, MomentResidual, RetentionRule
from kvpop_vllm.kernels.reference.delayed_mlstm import readout_denominator
from kvpop_vllm.kernels.reference.moments import HeadMoments
from kvpop_vllm.kernels.reference.paging import HeadSlots, check_tokens_seen, protected


def decode_step(
    q, k, v, pages, page_table, positions, budgets, *, rule, scale, gate_scores=None, prefix=None, keys=None, windows,
    sink_logits=None,
):  # fmt: skip
    """Implement :func:`kvpop_vllm.kernels.ops.decode_step`."""
    requests, heads, _ = k.shape
    group = q.shape[1] // heads
    out, lse = torch.empty_like(q), torch.empty(q.shape[:2], dtype=torch.float32)
    starts, draw_keys = positions.tolist(), keys
    check_tokens_seen(pages, page_table, starts, prefix)
    for r, position in enumerate(starts):
        protect = protected(prefix, r)
        tail_rule = replace(rule, window=int(windows[r])).after_prefix(protect)
        before = k[r, :, None][:, :0], v[r, :, None][:, :0]  # no tokens
        if protect:
            before = prefix.gather(r, 0, min(protect, position + 1))
        biases = prefix.bias(r, position + 1) if protect else None
        for h in range(heads):
            rows, keys, values = slice(h * group, (h + 1) * group), before[0][h], before[1][h]
            bias = None if biases is None else biases[h]
            sinks = None if sink_logits is None else sink_logits[rows]
            if position < protect:
                out[r, rows], lse[r, rows], _ = _attend(q[r, rows], keys, values, scale, bias, sinks)
                continue
            slots = HeadSlots(pages, page_table[r, h], h, int(budgets[r, h]) - rule.sinks + tail_rule.sinks)
            inserted = 0.0 if gate_scores is None else float(gate_scores[r, h])
            token = q[r, rows], k[r, h], v[r, h], inserted
            key = None if draw_keys is None else draw_keys[r, h]
            options = (keys, values), bias, scale, key, sinks
            out[r, rows], lse[r, rows] = _step_head(slots, tail_rule, h, position, *token, *options)
    return out, lse


def _step_head(
    slots: HeadSlots, rule: RetentionRule, head: int, q: int, query, k, v, inserted, before, bias, scale, draw_key,
    sinks,
):  # fmt: skip
    """Advance one head by token q; return attention ``[G, D]`` of ``query`` and log-sum-exps ``[G]``.

    Args:
        inserted: score of the token at its insertion.
        before: keys and values ``[p, D]`` of the protected tokens.
        bias: ``[n]``, biases of the first n of them, or None.
        draw_key: key of the head's draws, or None.
        sinks: ``[G]`` logits of attention sinks, or None.
    """
    if rule.scorer.recurrent:
        inserted = _take_in(slots, torch.cat([k, v]).float(), q, rule.scorer, head)
    in_use, leaving, ring = slots.in_use(rule, q), q - rule.window, rule.ring_slot(q)
    moments = HeadMoments(slots, rule, q, in_use, scale) if rule.keeps_moments else None
    if leaving >= rule.first_evictable:
        score = _boundary_score(slots, ring, rule, head)
        in_use = _place(slots, q, in_use, rule, head, leaving, score, moments, draw_key)
    slots.write(ring, k, v, inserted, q)
    in_use = max(in_use, ring + 1)
    slots.set_counts(rule, q + 1, in_use)
    used_slots = torch.arange(in_use)
    keys, values = (torch.cat(pair) for pair in zip(before, slots.gather(used_slots), strict=True))
    out, lse, weights = _attend(query, keys, values, scale, bias, sinks)
    if rule.coupled:
        slots.put_mass(used_slots, weights[:, len(before[0]) :].mean(0), add=_mean(rule))
    return moments.correct(out, lse, query) if rule.moment_correction else out, lse


def _mean(rule: RetentionRule) -> bool:
    """Return whether the rule ranks tokens by their mean attention."""
    return isinstance(rule.scorer, AttentionMass) and rule.scorer.mean


def _place(
    slots: HeadSlots, q: int, in_use: int, rule: RetentionRule, head: int, leaving: int, score: float, moments, draw_key
):
    """Move the token leaving the window to a long-range slot or evict it; return the number of slots in use.

    The token takes a free slot, or replaces a token with a lower effective score.
    """
    ring, factors = rule.ring_slot(leaving), None
    if isinstance(rule.scorer, MomentResidual):
        factors = torch.ones(slots.budget, dtype=torch.float64)
        ranked = torch.tensor([ring, *range(rule.first_long, in_use)])
        factors[ranked] = moments.residuals(ranked).double()
    # below the threshold a token is evicted even while slots are free
    below = rule.threshold is not None and score < rule.threshold
    full = in_use >= slots.budget
    target = None if below else _victim(slots, score, leaving, q, rule, head, factors, draw_key) if full else in_use
    # an evicted token enters the moments before its slot is overwritten
    if moments is not None and (below or full):
        moments.take_in(ring if target is None else target)
    if target is None:
        return in_use
    slots.move(ring, target, score, leaving)
    return max(in_use, target + 1)


def _take_in(slots, x, q, weights, head) -> float:
    """Update the head's state with ``x_q [2D]`` and return the token's score at insertion (0 if delayed)."""
    w = weights.of_heads(slice(head, head + 1))
    state = slots.load_state(w.state_floats)
    if q == 0:
        clear(state)
    take_in(state, x, w)
    slots.store_state(state)
    return 0.0 if w.delayed else float(_read_out(w, state, x))


def take_in(state: torch.Tensor, x: torch.Tensor, w) -> None:
    """Update a flat mLSTM state of one head with ``x [2D]`` (eqs. 38, 39)."""
    key, value, igate, fgate = (t[0] for t in w.inputs(x.view(1, 1, -1)))
    c, z, m = _split_state(state, w)
    log_f = torch.nn.functional.logsigmoid(fgate[0])
    m_new = torch.maximum(log_f + m, igate[0])  # keeps both exponents at most 0
    keep, gain = torch.exp(log_f + m - m_new), torch.exp(igate[0] - m_new)
    c.mul_(keep).add_(gain * torch.outer(key[0], value[0]))
    z.mul_(keep).add_(gain * key[0])
    state[-1] = m_new


def clear(state: torch.Tensor) -> None:
    """Reset a flat mLSTM state ``[floats]`` to the empty state."""
    state.zero_()
    state[-1] = STATE_M_START


def _boundary_score(slots, ring, rule, head) -> float:
    """Return the raw score of the token in ring slot ``ring``, which leaves the window (eqs. 36, 41, 42)."""
    scorer = rule.scorer
    if scorer.coupled or scorer.takes_gate_scores or (scorer.recurrent and not scorer.delayed):
        return slots.score(ring)
    if scorer.draws:
        return 0.0
    w, k, v = scorer.of_heads(slice(head, head + 1)), slots.k(ring), slots.v(ring)
    if scorer.recurrent:
        return float(_read_out(w, slots.load_state(w.state_floats), torch.cat([k, v]).float()))
    return float(w.scores(k.view(1, 1, -1), v.view(1, 1, -1)))


def _read_out(w, state, x):
    """Return the mLSTM score of the token ``x [2D]`` (eqs. 41, 42)."""
    c, z, m = _split_state(state, w)
    query = w.query(x.view(1, 1, -1))[0, 0]
    h = (query @ c) / readout_denominator(query @ z, m)
    return w.score(h.view(1, 1, -1), x.view(1, 1, -1))


def _split_state(state, w):
    """Return views of C ``[F, Dv]``, z ``[F]`` and m in a flat state."""
    cells = w.features * w.value_size
    return state[:cells].view(w.features, w.value_size), state[cells:-1], state[-1]


def _victim(slots, score, leaving, q, rule, head, factors, draw_key) -> int | None:
    """Return the long-range slot whose token is evicted, or None if the leaving token itself is evicted.

    The victim has the lowest effective score.

    Args:
        factors: ``[B]`` float64 factors of the raw scores by slot, or None.
    """
    first, log_gamma = rule.first_long, float(rule.log_gamma[head])
    scores, positions = slots.long_range(first)
    raw, leaving_score = scores.double(), score
    if rule.draws:
        raw, leaving_score = draw(draw_key, q, positions), float(draw(draw_key, q, torch.tensor(leaving)))
    if _mean(rule):
        raw, leaving_score = raw / (q - positions), leaving_score / (q - leaving)
    if rule.ages:
        raw, leaving_score = raw * (q - positions), leaving_score * (q - leaving)
    if factors is not None:
        raw, leaving_score = raw * factors[first:], leaving_score * float(factors[rule.ring_slot(leaving)])
    effective = raw + ((q - positions) // rule.decay_step) * log_gamma
    leaving_score = leaving_score + ((q - leaving) // rule.decay_step) * log_gamma
    if len(effective) == 0 or leaving_score < float(effective.min()):
        return None  # of equal scores the older is evicted, and every long-range token is older
    lowest = torch.where(effective == effective.min(), positions, torch.iinfo(torch.int64).max)
    return first + int(lowest.argmin())


def _attend(q, keys, values, scale, bias, sinks):
    """Return softmax attention of ``q [G, D]`` over ``keys, values [n, D]``, in float32.

    ``bias`` is added to the logits of the first ``len(bias)`` keys, unless it is None. A sink is one more key of value
    0, with the logits ``sinks [G]``, unless they are None.

    Returns:
        Outputs ``[G, D]``, log-sum-exps ``[G]`` and weights ``[G, n]``.
    """
    logits = q.float() @ keys.float().T * scale
    if bias is not None:
        logits[:, : len(bias)] += bias
    if sinks is not None:
        logits = torch.cat([logits, sinks.unsqueeze(-1)], -1)
    weights = logits.softmax(-1)[:, : len(keys)]  # from a log-sum-exp far from 0 they would be wrong
    return weights @ values.float(), logits.logsumexp(-1), weights
