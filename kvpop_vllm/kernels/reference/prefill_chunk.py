"""Reference prefill chunk in plain torch, vectorised over heads and queries.

The chunk is processed in pieces of ``PIECE`` tokens. Within a piece, every retained slot and every new token
is a key with a time of birth and a time of eviction. Query q attends to the keys born by q and not evicted by
q.
"""

from dataclasses import dataclass

import torch

from kvpop_vllm.kernels.one_by_one import one_by_one
from kvpop_vllm.kernels.reference.decode_step import decode_step
from kvpop_vllm.kernels.reference.delayed_mlstm import delayed_mlstm, empty_state
from kvpop_vllm.kernels.reference.masked_attention import masked_attention
from kvpop_vllm.kernels.reference.online_topk import NEVER, online_topk
from kvpop_vllm.kernels.reference.paging import check_tokens_seen, protected

PIECE = 256


@dataclass
class Retained:
    """Tokens that the heads retain between two pieces, in slot order.

    Attributes:
        k, v: ``[H, n, D]``.
        score: ``[H, n]`` float32.
        position: ``[H, n]`` int64.
        state: the scorer's state, or None.
    """

    k: torch.Tensor
    v: torch.Tensor
    score: torch.Tensor
    position: torch.Tensor
    state: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None


@one_by_one
def prefill_chunk(
    q, k, v, pages, page_table, start, budgets, *, rule, scale, gate_scores=None, prefix=None, keys=None,
    sink_logits=None,
):  # fmt: skip
    """Implement :func:`kvpop_vllm.kernels.ops.prefill_chunk`."""
    check_tokens_seen(pages, page_table.unsqueeze(0), [start], prefix)
    protect = protected(prefix, 0)
    if protect > start or rule.sequential:  # process token by token where this is simplest
        options = {"rule": rule, "scale": scale, "prefix": prefix, "keys": keys, "sink_logits": sink_logits}
        return _token_by_token(q, k, v, pages, page_table, start, budgets, gate_scores, **options)
    out, lse = torch.empty_like(q), torch.empty(q.shape[:2], dtype=torch.float32)
    group = q.shape[1] // k.shape[1]
    before = prefix.gather(0, 0, protect) if protect else None
    biases = prefix.bias(0, protect) if protect else None
    for budget in budgets.unique().tolist():
        heads = (budgets == budget).nonzero().flatten()
        rows = (heads.unsqueeze(1) * group + torch.arange(group)).flatten()
        tail_rule = rule.after_prefix(protect).of_heads(heads)
        shown = None if before is None else tuple(x[heads] for x in before)
        bias = None if biases is None else biases[heads]
        drawn = None if keys is None else keys[0, heads]
        sinks = None if sink_logits is None else sink_logits[rows].view(-1, group)
        tail_budget = budget - rule.sinks + tail_rule.sinks
        part = _Heads(pages, page_table, heads, tail_budget, tail_rule, scale, shown, bias, drawn, sinks)
        score = None if gate_scores is None else gate_scores[:, heads]
        out[:, rows], lse[:, rows] = part.run(q[:, rows], k[:, heads], v[:, heads], start, score)
    return out, lse


def _token_by_token(q, k, v, pages, page_table, start, budgets, gate_scores, **options):
    """Run L decode steps."""
    steps, table, head_budgets = [], page_table.unsqueeze(0), budgets.unsqueeze(0)
    window = torch.tensor([options["rule"].window], dtype=torch.int32)
    for i in range(len(q)):
        token, position = (x[i : i + 1] for x in (q, k, v)), torch.tensor([start + i])
        score = None if gate_scores is None else gate_scores[i : i + 1]
        row = pages, table, position, head_budgets
        steps.append(decode_step(*token, *row, windows=window, gate_scores=score, **options))
    outs, lses = zip(*steps, strict=True)
    return torch.cat(outs), torch.cat(lses)


def _pick(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Gather rows ``index [H, n]`` of ``x [H, T, D]`` into ``[H, n, D]`` with one copy."""
    heads, length, size = x.shape
    rows = index + length * torch.arange(heads).unsqueeze(1)
    return x.reshape(-1, size).index_select(0, rows.flatten()).view(heads, -1, size)


class _Heads:
    """Heads of one request that share one budget.

    Args:
        before: keys and values ``[H, p, D]`` of the protected tokens, or None.
        bias: ``[H, n]``, biases of the first n of them, or None.
        keys: ``[H]`` keys of the heads' draws, or None.
        sink_logits: ``[H, G]``, logits of attention sinks, or None.
    """

    def __init__(self, pages, page_table, heads, budget, rule, scale, before, bias, keys, sink_logits):
        self.pages, self.heads, self.budget, self.rule, self.scale = pages, heads, budget, rule, scale
        self.topk, self.before, self.bias, self.keys = budget - rule.first_long, before, bias, keys
        self.sink_logits = sink_logits
        table = page_table[heads].long()
        self.state_rows, self.slot_rows = table[:, : pages.layout.state_blocks], table[:, pages.layout.state_blocks :]

    def run(self, q, k, v, start, gate_scores):
        retained = self._load(start)
        outs, lses = [], []
        for a in range(0, len(q), PIECE):
            cut = slice(a, a + PIECE)
            keys, values = k[cut].transpose(0, 1), v[cut].transpose(0, 1)
            inserted = None if gate_scores is None else gate_scores[cut].transpose(0, 1)
            out, lse, retained = self._piece(q[cut], keys, values, inserted, start + a, retained)
            outs.append(out)
            lses.append(lse)
        self._store(retained, start + len(q))
        return torch.cat(outs), torch.cat(lses)

    def _piece(self, q, k, v, gate_scores, a, retained: Retained):
        b, rule = a + len(q), self.rule
        new = torch.arange(a, b)
        leaving = torch.arange(*(max(rule.first_evictable, end - rule.window) for end in (a, b)))
        keys, values = torch.cat([retained.k, k], 1), torch.cat([retained.v, v], 1)
        leaving_index = self._indices(leaving, a, retained.k.shape[1])
        score, stored, state = self._score(keys, values, gate_scores, leaving, new, retained)
        evicted_at = torch.full((len(self.heads), keys.shape[1]), NEVER)
        first = rule.first_long
        held_long = max(0, retained.k.shape[1] - first)
        pool_score = torch.cat([retained.score[:, first:], score], 1)
        pool_position = torch.cat([retained.position[:, first:], leaving.expand(len(self.heads), -1)], 1)
        options = {name: getattr(rule, name) for name in ("window", "log_gamma", "decay_step", "ages")}
        gone = online_topk(pool_score, pool_position, held_long, topk=self.topk, keys=self.keys, **options)
        evicted_at[:, first : first + held_long] = gone[:, :held_long]
        evicted_at[:, leaving_index] = gone[:, held_long:]
        born = torch.cat([torch.full((retained.k.shape[1],), -1), new])
        out, lse = self._attend(q, keys, values, born, evicted_at, new)
        scores = stored.clone()
        scores[:, leaving_index] = score
        positions = torch.cat([retained.position, new.expand(len(self.heads), -1)], 1)
        positions[:, leaving_index] = leaving  # slot 0 may be a ring slot, and its position field holds tokens_seen
        source = self._survivors(evicted_at, leaving_index, a, b, retained.k.shape[1])
        survivors = Retained(
            _pick(keys, source), _pick(values, source), scores.gather(1, source), positions.gather(1, source), state
        )
        return out, lse, survivors

    def _indices(self, tokens, a, num_retained):
        """Return the indices of window and chunk tokens among [retained slots; tokens from a on]."""
        sinks, since = self.rule.sinks, tokens - self.rule.first
        slot = torch.where(since < sinks, since, sinks + (since - sinks) % self.rule.window)
        return torch.where(tokens < a, slot, tokens - a + num_retained)

    def _score(self, keys, values, gate_scores, leaving, new, retained):
        """Return raw scores of the leaving tokens, stored scores of all tokens, and the new state.

        The raw scores are ``[H, leaving]``. The stored scores follow the order [retained slots; tokens from a
        on] and include scores computed at insertion.
        """
        scorer, count, a = self.rule.scorer, keys.shape[1], int(new[0])
        stored = torch.cat([retained.score, torch.zeros(len(self.heads), count - retained.k.shape[1])], 1)
        leaving_index, arrived = self._indices(leaving, a, retained.k.shape[1]), slice(retained.k.shape[1], None)
        if scorer.takes_gate_scores:
            stored[:, arrived] = gate_scores
            return stored[:, leaving_index], stored, None
        if scorer.draws:
            return torch.zeros(len(self.heads), len(leaving)), stored, None
        if not scorer.recurrent:
            return scorer.scores(keys[:, leaving_index], values[:, leaving_index]), stored, None
        state = retained.state if a > 0 else None  # after a prefix, begin_tail has built the state
        x, x_new = (torch.cat([keys[:, index], values[:, index]], -1).float() for index in (leaving_index, arrived))
        score, state = self._score_mlstm(scorer, x, x_new, state)
        if scorer.delayed:
            return score, stored, state
        stored[:, arrived] = score
        return stored[:, leaving_index], stored, state

    def _score_mlstm(self, weights, x, x_new, state):
        """Return mLSTM scores and the state after the new tokens ``x_new``.

        A delayed scorer scores the leaving tokens ``x``, otherwise the new tokens are scored.
        """
        key, value, igate, fgate = (t.unsqueeze(0) for t in weights.inputs(x_new))
        count = x_new.shape[1]
        if weights.delayed:
            reads, x_read = slice(count - x.shape[1], count), x  # token u is read out at u + w
        else:
            reads, x_read = slice(0, count), x_new
        query = torch.zeros_like(key)
        query[0, :, reads] = weights.query(x_read)
        state = state if state is not None else empty_state(key, value)
        h, state = delayed_mlstm(query, key, value, igate, fgate, delay=0, state=state)
        return weights.score(h[0, :, reads], x_read), state

    def _attend(self, q, keys, values, born, evicted_at, new):
        """Return softmax attention of ``q [l, Hq, D]`` under the births and evictions, in float32."""
        heads, length = len(self.heads), len(q)
        visible = (born <= new.unsqueeze(1)) & (new.view(1, -1, 1) < evicted_at.unsqueeze(1))  # [H, l, T]
        if self.before is not None:
            keys, values = (torch.cat(pair, 1) for pair in zip(self.before, (keys, values), strict=True))
            visible = torch.nn.functional.pad(visible, (self.before[0].shape[1], 0), value=True)
        rows = q.view(length, heads, -1, q.shape[-1]).permute(1, 2, 0, 3).float()
        options = self.scale, self.bias, self.sink_logits
        out, lse = masked_attention(rows, keys.float(), values.float(), visible, *options)
        return out.permute(2, 0, 1, 3).reshape(q.shape).to(q.dtype), lse.permute(2, 0, 1).reshape(length, -1)

    def _survivors(self, evicted_at, leaving_index, a, b, num_retained):
        """Return, for each slot filled at b - 1, the index of its token: ``[H, slots]``.

        Indices count [retained slots; tokens from a on].
        """
        rule, heads = self.rule, len(self.heads)
        first, end = rule.first, rule.first_evictable
        near = torch.arange(max(end, b - rule.window), max(end, b))
        ring = torch.empty_like(near)
        ring[(near - end) % rule.window] = self._indices(near, a, num_retained)
        fixed = torch.cat([self._indices(torch.arange(first, min(end, b)), a, num_retained), ring]).expand(heads, -1)
        filled = min(b - first - rule.first_long, self.topk)
        if filled <= 0:
            return fixed
        slots = torch.arange(rule.first_long, rule.first_long + filled)
        inside = slots < num_retained
        occupied = (evicted_at[:, slots.clamp_max(evicted_at.shape[1] - 1)] == NEVER) & inside
        left = (evicted_at[:, leaving_index] != NEVER).to(torch.uint8)
        newcomers = leaving_index[left.argsort(dim=-1, stable=True)]  # survivors first, by age
        rank = ((~occupied).cumsum(-1) - 1).clamp(0, max(0, len(leaving_index) - 1))
        filler = newcomers.gather(1, rank) if len(leaving_index) else slots.expand(heads, -1)
        return torch.cat([fixed, torch.where(occupied, slots, filler)], 1)

    def _slots(self, count: int) -> tuple[torch.Tensor, ...]:
        """Return the indices of the heads' first ``count`` slots: blocks ``[H, count]``, heads and slots."""
        slots, n = torch.arange(count), self.pages.layout.block_slots
        return self.slot_rows[:, slots // n], self.heads.unsqueeze(1), slots % n

    def _load(self, start) -> Retained:
        pages, index = self.pages, self._slots(min(start - self.rule.first, self.budget))
        weights, state = self.rule.scorer, None
        if weights.recurrent and start > 0:
            state = pages.load_states(self.state_rows, self.heads, weights)
        return Retained(pages.k[index], pages.v[index], pages.score[index], pages.position[index].long(), state)

    def _store(self, retained: Retained, tokens_seen: int):
        pages, index = self.pages, self._slots(retained.k.shape[1])
        retained.position[:, 0] = tokens_seen  # the position field of slot 0 holds tokens_seen
        for name in ("k", "v", "score", "position"):
            array = getattr(pages, name)
            pages.put(array, index, getattr(retained, name).to(array.dtype))
        if retained.state is not None:
            pages.store_states(self.state_rows, self.heads, retained.state)
