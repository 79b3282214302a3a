"""One decode step over a fixed-budget paged cache, plain torch, one (request, head) after another."""

from __future__ import annotations

import torch

from kvpop_vllm.kernels.ops import (
    FLOOR,
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
from kvpop_vllm.kernels.reference.shared_heads import SharedHeads, divide


def decode_step(q, k, v, pages, page_table, positions, valid, budgets, *, rule, scale, given=None, prompts=None):
    """See :func:`kvpop_vllm.kernels.ops.decode_step`."""
    requests, heads, size = k.shape
    group = q.shape[1] // heads
    out, lse = torch.empty_like(q), torch.empty(q.shape[:2], dtype=torch.float32)
    starts = positions.tolist()
    check_tokens_seen(pages, page_table, starts)
    for r in range(requests):
        prompt = None if prompts is None else int(prompts[r])
        own = rule.for_prompt(prompt)
        steps = [
            _HeadStep(own, h, starts[r], prompt, scale, k[r, h], v[r, h], None if given is None else float(given[r, h]))
            for h in range(heads)
        ]
        if rule.share_pages:
            _divide(steps, SharedHeads(pages, page_table[r], own, int(budgets[r, 0])))
        else:
            for h, step in enumerate(steps):
                step.begin(HeadSlots(pages, page_table[r, h], h, int(budgets[r, h])), int(valid[r, h]))
        for h, step in enumerate(steps):
            rows = slice(h * group, (h + 1) * group)
            out[r, rows], lse[r, rows] = step.finish(q[r, rows])
    return out, lse


class _HeadStep:
    """The step of one head: what it scores, what it evicts, and its attention, one after another."""

    def __init__(self, rule, head, q, prompt, scale, k, v, given):
        self.rule, self.head, self.q, self.prompt, self.scale = rule, head, q, prompt, scale
        self.k, self.v, self.inserted = k, v, given or 0.0
        self.share = None

    @property
    def generated(self) -> bool:
        """Whether votes are over: what leaves the window ranks above them."""
        return self.rule.prompt_grid and self.q > self.prompt

    def begin(self, slots: HeadSlots, in_use: int) -> None:
        """Takes tokens into the state and scores those that leave the window, where decisions fall."""
        rule, q = self.rule, self.q
        self.slots, self.in_use = slots, slots.in_use(rule, q) if rule.threshold is not None else in_use
        self.leaving = []
        if rule.taken(q + 1) != q + 1:
            return
        if rule.prompt_grid and not self.generated:
            _pool_votes(slots, rule, q, self.in_use)
        for t in range(max(0, q + 1 - rule.decide_every), q + 1):
            own, u = rule.ring_slot(t), t - rule.window
            if isinstance(rule.scorer, MLSTMWeights):
                x = torch.cat([self.k, self.v] if t == q else [slots.k(own), slots.v(own)]).float()
                self.inserted = _take_in(slots, x, t, rule.scorer, self.head)
                if t < q:
                    slots.set_score(own, self.inserted)
            if u >= rule.sinks:
                score = GENERATED if self.generated else _boundary_score(slots, rule.ring_slot(u), rule, self.head)
                self.leaving.append((u, score))

    def finish(self, query):
        """Evictions, the write of token q, attention ``[G, D]`` of ``query`` and its log-sum-exps ``[G]``."""
        rule, slots, q = self.rule, self.slots, self.q
        moments = HeadMoments(slots, rule, q, self.in_use, self.scale) if rule.keeps_moments else None
        in_use = _place(slots, q, self.in_use, rule, self.head, self.leaving, moments)
        ring = rule.ring_slot(q)
        slots.write(ring, self.k, self.v, self.inserted, q)
        slots.set_tokens_seen(q + 1)
        filled = max(0, in_use - rule.first_long)
        if rule.threshold is not None:
            slots.set_score(0, filled)
        if self.share is not None:
            self.share.set_filled(self.head, filled)
        seen = torch.arange(max(in_use, ring + 1))
        seen = seen[~rule.stale(seen, q + 1)]
        out, lse, weights = _attend(query, slots, seen, self.scale)
        if rule.prompt_grid and q < self.prompt:  # votes since the last decision
            slots.put_mass(seen, weights.mean(0), add=rule.taken(q + 1) != q + 1)
        elif rule.coupled and not rule.prompt_grid:
            slots.put_mass(seen, weights.mean(0), add=_mean(rule))
        return moments.correct(out, lse, query) if rule.moment_correction else out, lse

    def effective(self) -> list[tuple[float, int]]:
        """Effective scores and positions of what is ranked at q."""
        scores, positions = self.slots.long_range(self.rule.first_long)
        held = range(max(0, self.in_use - self.rule.first_long))
        ranked = [(float(scores[i]), int(positions[i])) for i in held] + [(score, u) for u, score in self.leaving]
        return [(_effective(self.rule, self.head, self.q, t, score), t) for score, t in ranked]

    def shrink(self, count: int) -> None:
        """Evicts the ``count`` lowest of the long-range tokens; the last ones move into their slots."""
        rule, slots, first = self.rule, self.slots, self.rule.first_long
        moments = HeadMoments(slots, rule, self.q, self.in_use, self.scale) if rule.keeps_moments else None
        for _ in range(count):
            scores, positions = slots.long_range(first)
            ranked = [
                (_effective(rule, self.head, self.q, int(positions[i]), float(scores[i])), int(positions[i]), first + i)
                for i in range(self.in_use - first)
            ]
            victim, last = min(ranked)[2], self.in_use - 1
            if moments is not None:
                moments.take_in(victim)
            if victim != last:
                slots.move(last, victim, float(scores[last - first]), int(positions[last - first]))
            self.in_use -= 1


def _divide(steps: list[_HeadStep], shared: SharedHeads) -> None:
    """Begins the heads of one request with the shares that they have and, where that is decided at q, gives them new ones."""
    first = steps[0]
    if first.q == 0:
        shared.start()
    for h, step in enumerate(steps):
        long_range = shared.filled(h) if first.rule.decided(first.q) > first.rule.sinks else None
        step.share = shared
        step.begin(shared.head(h), first.q if long_range is None else first.rule.first_long + long_range)
    if first.rule.taken(first.q + 1) != first.q + 1 or first.q > first.prompt:
        return
    capacities = divide([step.effective() for step in steps], shared.topk, FLOOR)
    if capacities is None:
        return
    for step, capacity in zip(steps, capacities, strict=True):
        step.shrink(max(0, step.in_use - step.rule.first_long - capacity))
    shared.set_capacities(capacities)
    for h, step in enumerate(steps):
        step.slots = shared.head(h)


def _mean(rule: RetentionRule) -> bool:
    return isinstance(rule.scorer, AttentionMass) and rule.scorer.mean


def _place(slots: HeadSlots, q: int, valid: int, rule: RetentionRule, head: int, scored, moments) -> int:
    """Tokens that leave the window go into free slots, over worse ones, or nowhere. Returns how many slots are in use."""
    factors = None
    if isinstance(rule.scorer, MomentResidual) and scored:  # as before the first of these evictions
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
    return valid


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


def _effective(rule: RetentionRule, head: int, q: int, t: int, score: float) -> float:
    """How token t ranks at q."""
    raw = score / (q - t) if _mean(rule) else score * (q - t) if rule.ages else score
    return raw + ((q - t) // rule.decay_step) * float(rule.log_gamma[head])


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
