"""What leaves the window is ranked, the loser evicted, the winner moved, and the new token written; one program per head."""

from __future__ import annotations

import triton
import triton.language as tl
from kvpop_vllm.kernels.triton._lowest_score import FAR, lower_of, lowest_of, none_yet
from kvpop_vllm.kernels.triton._serving_pages import (
    MARKS,
    PADDING,
    REFUSED,
    decided_before,
    decides_at,
    phase_of,
    ring_slot,
    row_at,
    stabiliser_at,
    start_of,
    state_at,
    word_at,
    word_of_share,
)
from kvpop_vllm.kernels.triton._serving_scores import features_of

GENERATED = tl.constexpr(2.0**100)
EPS = tl.constexpr(1e-6)


@triton.jit
def _effective(raw, t, q, log_gamma, factor, P: tl.constexpr):
    """How tokens t rank at q, float64; launched without fused multiply-adds, so that every operation rounds as in the
    reference."""
    score = raw.to(tl.float64)
    age = q - t
    if P.mean:
        score = score / age.to(tl.float64)
    if P.ages:
        score = score * age.to(tl.float64)
    if P.residual:
        score = score * factor.to(tl.float64)
    return score + (age // P.decay_step).to(tl.float64) * log_gamma


@triton.jit
def _lowest(cache, factors, r, h, used, q, log_gamma, P: tl.constexpr, BLOCK: tl.constexpr):
    """Lowest effective score of the long-range slots and the slot that has it, of equal ones the oldest token's; slot -1
    where there is none that is a number."""
    best, oldest, where = none_yet(BLOCK)
    for start in range(P.first_long, used, BLOCK):
        slot = start + tl.arange(0, BLOCK)
        inside = slot < used
        at = word_at(cache, r, h, tl.where(inside, slot, 0), P)
        raw = tl.load(cache.score + at, mask=inside, other=0.0)
        token = tl.load(cache.position + at, mask=inside, other=0)
        factor = raw
        if P.residual:
            factor = tl.load(factors + slot, mask=inside, other=0.0)
        token = tl.where(inside, token, q - 1)
        effective = _effective(raw, token, q, log_gamma, factor, P)
        best, oldest, where = lower_of(best, oldest, where, effective, token, slot, inside)
    lowest, slot = lowest_of(best, oldest, where)
    return lowest, tl.where(slot == FAR, -1, slot)


@triton.jit
def _dot(x_key, x_value, weight, h, column, fits, P: tl.constexpr):
    """``[k; v] . weight[h]``."""
    at = 2 * h * P.size + column
    keys = tl.load(weight + at, mask=fits, other=0.0)
    values = tl.load(weight + at + P.size, mask=fits, other=0.0)
    return tl.sum(x_key * keys, 0) + tl.sum(x_value * values, 0)


@triton.jit
def _silu(x):
    return x / (1.0 + tl.exp(-x))


@triton.jit
def _read_mlstm(projected, numerator, z, m, weights, h, x_key, x_value, column, fits, P: tl.constexpr):
    """Score of the token whose read features are ``projected``, out of the state's products with them."""
    c = tl.arange(0, P.padded_values)
    inside = c < P.values
    bounded = tl.minimum(tl.maximum(m, -60.0), 60.0)
    denominator = tl.sum(features_of(projected, P) * z, 0) + EPS * tl.exp(-bounded)
    hidden = tl.load(numerator + c, mask=inside, other=0.0) / denominator
    if P.norm:
        rms = tl.sqrt_rn(tl.sum(hidden * hidden, 0) / P.values + EPS)
        hidden = hidden / rms * tl.load(weights.norm_weight + h * P.values + c, mask=inside, other=0.0)
    out = tl.load(weights.out_weight + h * P.values + c, mask=inside, other=0.0)
    score = tl.sum(_silu(hidden) * out, 0) + tl.load(weights.out_bias + h)
    if P.skip:
        score += _dot(x_key, x_value, weights.skip_weight, h, column, fits, P)
    return score


@triton.jit
def _stateless(projected, weights, h, x_key, x_value, parked, column, fits, P: tl.constexpr):
    """Score of a token that leaves the window, of scorers without a state. projected: an MLP's hidden sums."""
    score = parked
    if P.scorer == "none":
        score = tl.full([], 0.0, tl.float32)
    if P.scorer == "key_norm":
        wide = x_key.to(tl.float64)
        score = -tl.sqrt(tl.sum(wide * wide, 0)).to(tl.float32)
    if P.scorer == "linear":
        score = _dot(x_key, x_value, weights.skip_weight, h, column, fits, P) + tl.load(weights.out_bias + h)
    if P.scorer == "mlp":
        i = tl.arange(0, P.padded_columns)
        inside = i < P.columns
        hidden = tl.load(projected + i, mask=inside, other=0.0)
        hidden += tl.load(weights.hidden_bias + h * P.columns + i, mask=inside, other=0.0)
        out = tl.load(weights.out_weight + h * P.columns + i, mask=inside, other=0.0)
        score = tl.sum(_silu(hidden) * out, 0) + tl.load(weights.out_bias + h)
    return score


@triton.jit
def _score_leaving(
    cache, asked, weights, projected, numerators, r, h, q, generated, inserted,
    P: tl.constexpr,
):  # fmt: skip
    """What leaves the window scores lies in its score word afterwards; z and m of an mLSTM have taken the last e tokens in. Returns
    the score of the new token at its insertion, ``inserted`` where there is none. projected, numerators: of this head."""
    column = tl.arange(0, P.padded)
    fits = column < P.size
    if P.scorer == "mlstm":
        f = tl.arange(0, P.padded_features)
        z_inside = f < P.features
        z_at = state_at(cache, r, h, P.features * P.values + f, z_inside, P)
        m_at = stabiliser_at(cache, r, h, P)
        begun = q + 1 > P.every
        z = tl.load(cache.state + z_at, mask=f < tl.where(begun, P.features, 0), other=0.0)
        m = tl.where(begun, tl.load(cache.state + m_at), -1e30)
    for i in range(P.every):
        t = q + 1 - P.every + i
        u = t - P.window
        leaves = u >= P.sinks
        source = ring_slot(tl.maximum(u, 0), P)
        row, word = row_at(cache, r, h, source, P), word_at(cache, r, h, source, P)
        if P.scorer == "mlstm":
            igate = tl.load(projected + 2 * P.columns + P.values)
            old = tl.load(projected + 2 * P.columns + P.values + 1) + m
            m = tl.maximum(old, igate)
            z = z * tl.exp(old - m) + features_of(projected + P.columns, P) * tl.exp(igate - m)
            if P.delayed:
                if leaves:
                    x_key = tl.load(cache.k + row + column, mask=fits, other=0.0).to(tl.float32)
                    x_value = tl.load(cache.v + row + column, mask=fits, other=0.0).to(tl.float32)
                    raw = _read_mlstm(projected, numerators, z, m, weights, h, x_key, x_value, column, fits, P)
                    tl.store(cache.score + word, raw)
            else:
                at = ring_slot(t, P)
                old_row = row_at(cache, r, h, at, P)
                own_key = asked.k + r * asked.k_request + h * asked.k_head + column
                own_value = asked.v + r * asked.v_request + h * asked.v_head + column
                x_key, x_value = tl.load(own_key, mask=fits, other=0.0), tl.load(own_value, mask=fits, other=0.0)
                if t < q:
                    x_key = tl.load(cache.k + old_row + column, mask=fits, other=0.0)
                    x_value = tl.load(cache.v + old_row + column, mask=fits, other=0.0)
                x_key, x_value = x_key.to(tl.float32), x_value.to(tl.float32)
                inserted = _read_mlstm(projected, numerators, z, m, weights, h, x_key, x_value, column, fits, P)
                if P.every > 1:
                    tl.store(cache.score + word_at(cache, r, h, at, P), inserted, mask=t < q)
        else:
            if leaves:
                x_key = tl.load(cache.k + row + column, mask=fits, other=0.0).to(tl.float32)
                x_value = tl.load(cache.v + row + column, mask=fits, other=0.0).to(tl.float32)
                raw = _stateless(projected, weights, h, x_key, x_value, tl.load(cache.score + word), column, fits, P)
                if P.votes:
                    raw = tl.where(generated, GENERATED, raw)
                if P.scorer != "parked" or P.votes:
                    tl.debug_barrier()  # the word has been read by all
                    tl.store(cache.score + word, raw)
        projected += P.projected
        numerators += P.values
    tl.debug_barrier()
    if P.scorer == "mlstm":
        tl.store(cache.state + z_at, z, mask=z_inside)
        tl.store(cache.state + m_at, m)
    return inserted


@triton.jit
def _place_leaving(
    cache, factors, moved, gamma, r, h, q, used, budget, evicted_before,
    P: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Tokens that leave the window go into free slots, over worse ones, or nowhere. Returns slots in use, and how many tokens have
    been evicted. factors, moved: of this head."""
    column = tl.arange(0, P.padded)
    fits = column < P.size
    evicted = evicted_before
    if P.moments:
        key_at = state_at(cache, r, h, P.state_words + column, fits, P)
        value_at = state_at(cache, r, h, P.state_words + P.size + column, fits, P)
        kept = column < tl.where(evicted > 0, P.size, 0)
        mean_key = tl.load(cache.state + key_at, mask=kept, other=0.0)
        mean_value = tl.load(cache.state + value_at, mask=kept, other=0.0)
    for i in range(P.every):
        u = q + 1 - P.every + i - P.window
        if u >= P.sinks:
            source = ring_slot(u, P)
            row, word = row_at(cache, r, h, source, P), word_at(cache, r, h, source, P)
            key = tl.load(cache.k + row + column, mask=fits, other=0.0)
            value = tl.load(cache.v + row + column, mask=fits, other=0.0)
            raw = tl.load(cache.score + word)
            factor = raw
            if P.residual:
                factor = tl.load(factors + source)
            target = tl.maximum(used, P.first_long)
            gone = target >= budget
            if gone:
                lowest, victim = _lowest(cache, factors, r, h, used, q, gamma, P, BLOCK)
                target = tl.where(_effective(raw, u, q, gamma, factor, P) < lowest, -1, victim)
            if P.threshold is not None:
                below = raw.to(tl.float64) < P.threshold
                target = tl.where(below, -1, target)
                gone = gone | below
            if P.moments:
                if gone:
                    at = row_at(cache, r, h, tl.where(target < 0, source, target), P)
                    x_key = tl.load(cache.k + at + column, mask=fits, other=0.0).to(tl.float32)
                    x_value = tl.load(cache.v + at + column, mask=fits, other=0.0).to(tl.float32)
                    evicted += 1
                    deviation = x_value - mean_value
                    mean_key += (x_key - mean_key) / evicted
                    mean_value += deviation / evicted
                    tl.store(moved + column, x_key - mean_key, mask=fits)
                    tl.store(moved + P.size + column, deviation, mask=fits)
                    moved += 2 * P.size
            tl.debug_barrier()  # all that is overwritten has been read
            if target >= 0:
                at, to = row_at(cache, r, h, target, P), word_at(cache, r, h, target, P)
                tl.store(cache.k + at + column, key, mask=fits)
                tl.store(cache.v + at + column, value, mask=fits)
                tl.store(cache.score + to, raw)
                tl.store(cache.position + to, u)
                if P.residual:
                    tl.store(factors + target, factor)
                used = tl.maximum(used, target + 1)
            tl.debug_barrier()  # and seen when the next token is ranked
    if P.moments:
        if evicted > evicted_before:
            tl.store(cache.state + key_at, mean_key, mask=fits)
            tl.store(cache.state + value_at, mean_value, mask=fits)
    return used, evicted


@triton.jit
def _write_new(cache, asked, inserted, r, h, q, used, P: tl.constexpr):
    """The new token into its ring slot, and what the pages say of themselves."""
    column = tl.arange(0, P.padded)
    fits = column < P.size
    slot = ring_slot(q, P)
    row, word = row_at(cache, r, h, slot, P), word_at(cache, r, h, slot, P)
    own_key = asked.k + r * asked.k_request + h * asked.k_head + column
    own_value = asked.v + r * asked.v_request + h * asked.v_head + column
    tl.store(cache.k + row + column, tl.load(own_key, mask=fits), mask=fits)
    tl.store(cache.v + row + column, tl.load(own_value, mask=fits), mask=fits)
    zero, filled = word_at(cache, r, h, 0, P), tl.maximum(used - P.first_long, 0).to(tl.float32)
    if P.threshold is None:
        tl.store(cache.score + word, inserted)
    else:
        tl.store(cache.score + word, inserted, mask=slot > 0)
        tl.store(cache.score + zero, filled)
    if P.shares:
        tl.store(cache.state + word_of_share(cache, r, h, 1, P), filled)
    tl.store(cache.position + word, q, mask=slot > 0)
    tl.store(cache.position + zero, q + 1)  # tokens_seen


@triton.jit
def _retain(
    cache, asked, weights,
    log_gamma,  # [H] float64
    projected,  # [R, H, e, P.projected], of a learned scorer
    numerators,  # [R, H, e, Dv], of an mLSTM
    factors,  # [R, H, slots], of residuals
    moved,  # [R, H, e, 2, D]: of each evicted token, where moments are kept, what enters the products
    marks,  # [R, H, MARKS] int32
    parked,  # [R, H] float32: scores at insertion, between the two parts where they are two launches
    heads,
    P: tl.constexpr, BLOCK: tl.constexpr, SCORES: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    """SCORES of what leaves the window, and PLACES for it and the new token: evictions and slot moves of one head."""
    h, r = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    head = r * heads + h
    q = start_of(cache, asked, r, h, P)
    marks += head * MARKS
    if q < 0:
        if PLACES:
            tl.store(marks, tl.where(q == -1, PADDING, REFUSED))
            tl.store(marks + 1, 0)
            tl.store(marks + 2, 0)
        return
    phase = phase_of(asked, r, P)
    decides = decides_at(q, phase, P)
    generated = q < 0
    if P.votes:
        generated = q > tl.load(asked.prompts + r * asked.prompts_request)
    inserted = tl.full([], 0.0, tl.float32)
    if SCORES:
        if P.given:
            inserted = tl.load(asked.given + r * asked.given_request + h * asked.given_head).to(tl.float32)
        if decides:
            projected += head * P.every * P.projected
            numerators += head * P.every * P.values
            inserted = _score_leaving(cache, asked, weights, projected, numerators, r, h, q, generated, inserted, P)
        if not PLACES:
            tl.store(parked + head, inserted)
    else:
        inserted = tl.load(parked + head)
    if PLACES:
        decided = decided_before(q, phase, P)
        budget = tl.load(asked.budgets + r * asked.budgets_request + h * asked.budgets_head)
        if P.threshold is None:
            used = tl.load(asked.valid + r * asked.valid_request + h * asked.valid_head)
        else:
            used = q
            if decided > P.sinks:
                used = P.first_long + tl.load(cache.score + word_at(cache, r, h, 0, P)).to(tl.int32)
        used = tl.minimum(used, budget)
        evicted_before = tl.maximum(decided - P.sinks - tl.maximum(used - P.first_long, 0), 0)
        evicted = evicted_before
        if decides:
            gamma = tl.load(log_gamma + h)
            factors += head * P.most_slots
            moved += head * P.every * 2 * P.size
            used, evicted = _place_leaving(
                cache, factors, moved, gamma, r, h, q, used, budget, evicted_before, P, BLOCK
            )
        tl.debug_barrier()  # all have read tokens_seen, and the token whose ring slot this is
        _write_new(cache, asked, inserted, r, h, q, used, P)
        tl.store(marks, tl.maximum(used, ring_slot(q, P) + 1))
        tl.store(marks + 1, evicted_before)
        tl.store(marks + 2, evicted - evicted_before)


@triton.jit
def _products(
    cache,
    moved, marks, heads,
    P: tl.constexpr, BLOCK_X: tl.constexpr,
):  # fmt: skip
    """A block of rows of the moments' products takes in what has been evicted."""
    first, h, r = tl.program_id(0) * BLOCK_X, tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    head = r * heads + h
    before, gone = tl.load(marks + head * MARKS + 1), tl.load(marks + head * MARKS + 2)
    if gone == 0:
        return
    place, column = first + tl.arange(0, BLOCK_X), tl.arange(0, P.padded)
    inside = (place < P.size)[:, None] & (column < P.size)[None, :]
    at = state_at(cache, r, h, P.state_words + (2 + place)[:, None] * P.size + column[None, :], inside, P)
    there = (place < tl.where(before > 0, P.size, 0))[:, None] & (column < P.size)[None, :]
    products = tl.load(cache.state + at, mask=there, other=0.0)
    moved += head * P.every * 2 * P.size
    for _ in range(gone):
        key = tl.load(moved + place, mask=place < P.size, other=0.0)
        deviation = tl.load(moved + P.size + column, mask=column < P.size, other=0.0)
        products += key[:, None] * deviation[None, :]
        moved += 2 * P.size
    tl.debug_barrier()
    tl.store(cache.state + at, products, mask=inside)
