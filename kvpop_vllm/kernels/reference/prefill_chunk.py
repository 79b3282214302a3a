"""Reference prefill chunk in plain torch, vectorised over heads and queries.

The chunk is processed in pieces of ``PIECE`` tokens. Within a piece, every retained slot and every new token
is a key with a time of birth and a time of eviction. Query q attends to the keys born by q and not evicted by
q.
"""

from __future__ import annotations

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
        own = rule.behind(protect).of_heads(heads)
        shown = None if before is None else tuple(x[heads] for x in before)
        bias = None if biases is None else biases[heads]
        drawn = None if keys is None else keys[0, heads]
        sinks = None if sink_logits is None else sink_logits[rows].view(-1, group)
        part = _Heads(pages, page_table, heads, budget - rule.sinks + own.sinks, own, scale, shown, bias, drawn, sinks)
        score = None if gate_scores is None else gate_scores[:, heads]
        out[:, rows], lse[:, rows] = part.run(q[:, rows], k[:, heads], v[:, heads], start, score)
    return out, lse


def _token_by_token(q, k, v, pages, page_table, start, budgets, gate_scores, **options):
    """Run L decode steps."""
    steps, table, own = [], page_table.unsqueeze(0), budgets.unsqueeze(0)
    window = torch.tensor([options["rule"].window], dtype=torch.int32)
    for i in range(len(q)):
        token, at = (x[i : i + 1] for x in (q, k, v)), torch.tensor([start + i])
        score = None if gate_scores is None else gate_scores[i : i + 1]
        steps.append(decode_step(*token, pages, table, at, own, windows=window, gate_scores=score, **options))
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
            own = None if gate_scores is None else gate_scores[cut].transpose(0, 1)
            out, lse, retained = self._piece(q[cut], keys, values, own, start + a, retained)
            outs.append(out)
            lses.append(lse)
        self._store(retained, start + len(q))
        return torch.cat(outs), torch.cat(lses)

    def _piece(self, q, k, v, gate_scores, a, held: Retained):
        b, rule = a + len(q), self.rule
        new = torch.arange(a, b)
        leaving = torch.arange(*(max(rule.first_evictable, end - rule.window) for end in (a, b)))
        keys, values = torch.cat([held.k, k], 1), torch.cat([held.v, v], 1)
        at = self._where(leaving, a, held.k.shape[1])
        score, own, state = self._score(keys, values, gate_scores, leaving, new, held)
        evicted_at = torch.full((len(self.heads), keys.shape[1]), NEVER)
        first = rule.first_long
        held_long = max(0, held.k.shape[1] - first)
        pool_score = torch.cat([held.score[:, first:], score], 1)
        pool_position = torch.cat([held.position[:, first:], leaving.expand(len(self.heads), -1)], 1)
        told = {name: getattr(rule, name) for name in ("window", "log_gamma", "decay_step", "ages")}
        gone = online_topk(pool_score, pool_position, held_long, topk=self.topk, keys=self.keys, **told)
        evicted_at[:, first : first + held_long] = gone[:, :held_long]
        evicted_at[:, at] = gone[:, held_long:]
        born = torch.cat([torch.full((held.k.shape[1],), -1), new])
        out, lse = self._attend(q, keys, values, born, evicted_at, new)
        scores = own.clone()
        scores[:, at] = score
        positions = torch.cat([held.position, new.expand(len(self.heads), -1)], 1)
        positions[:, at] = leaving  # slot 0 may be a ring slot, and its position field holds tokens_seen
        source = self._survivors(evicted_at, at, a, b, held.k.shape[1])
        kept = Retained(
            _pick(keys, source), _pick(values, source), scores.gather(1, source), positions.gather(1, source), state
        )
        return out, lse, kept

    def _where(self, tokens, a, held):
        """Return the indices of window and chunk tokens among [retained slots; tokens from a on]."""
        sinks, since = self.rule.sinks, tokens - self.rule.first
        slot = torch.where(since < sinks, since, sinks + (since - sinks) % self.rule.window)
        return torch.where(tokens < a, slot, tokens - a + held)

    def _score(self, keys, values, gate_scores, leaving, new, held):
        """Return raw scores of the leaving tokens, stored scores of all tokens, and the new state.

        The raw scores are ``[H, leaving]``. The stored scores follow the order [retained slots; tokens from a
        on] and include scores computed at insertion.
        """
        scorer, count, a = self.rule.scorer, keys.shape[1], int(new[0])
        own = torch.cat([held.score, torch.zeros(len(self.heads), count - held.k.shape[1])], 1)
        at, arrived = self._where(leaving, a, held.k.shape[1]), slice(held.k.shape[1], None)
        if scorer.takes_gate_scores:
            own[:, arrived] = gate_scores
            return own[:, at], own, None
        if scorer.draws:
            return torch.zeros(len(self.heads), len(leaving)), own, None
        if not scorer.recurrent:
            return scorer.scores(keys[:, at], values[:, at]), own, None
        state = held.state if a > 0 else None  # after a prefix, begin_tail has built the state
        x, x_new = (torch.cat([keys[:, where], values[:, where]], -1).float() for where in (at, arrived))
        score, state = self._score_mlstm(scorer, x, x_new, state)
        if scorer.delayed:
            return score, own, state
        own[:, arrived] = score
        return own[:, at], own, state

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
        more = self.scale, self.bias, self.sink_logits
        out, lse = masked_attention(rows, keys.float(), values.float(), visible, *more)
        return out.permute(2, 0, 1, 3).reshape(q.shape).to(q.dtype), lse.permute(2, 0, 1).reshape(length, -1)

    def _survivors(self, evicted_at, at, a, b, held):
        """Return, for each slot filled at b - 1, the index of its token: ``[H, slots]``.

        Indices count [retained slots; tokens from a on].
        """
        rule, heads = self.rule, len(self.heads)
        first, end = rule.first, rule.first_evictable
        near = torch.arange(max(end, b - rule.window), max(end, b))
        ring = torch.empty_like(near)
        ring[(near - end) % rule.window] = self._where(near, a, held)
        fixed = torch.cat([self._where(torch.arange(first, min(end, b)), a, held), ring]).expand(heads, -1)
        filled = min(b - first - rule.first_long, self.topk)
        if filled <= 0:
            return fixed
        slots = torch.arange(rule.first_long, rule.first_long + filled)
        inside = slots < held
        occupied = (evicted_at[:, slots.clamp_max(evicted_at.shape[1] - 1)] == NEVER) & inside
        left = (evicted_at[:, at] != NEVER).to(torch.uint8)
        newcomers = at[left.argsort(dim=-1, stable=True)]  # survivors first, by age
        rank = ((~occupied).cumsum(-1) - 1).clamp(0, max(0, len(at) - 1))
        filler = newcomers.gather(1, rank) if len(at) else slots.expand(heads, -1)
        return torch.cat([fixed, torch.where(occupied, slots, filler)], 1)

    def _load(self, start) -> Retained:
        pages, n = self.pages, self.pages.layout.block_slots
        slots = torch.arange(min(start - self.rule.first, self.budget))
        at = (self.slot_rows[:, slots // n], self.heads.unsqueeze(1), slots % n)
        weights, state = self.rule.scorer, None
        if weights.recurrent and start > 0:
            state = pages.load_states(self.state_rows, self.heads, weights)
        return Retained(pages.k[at], pages.v[at], pages.score[at], pages.position[at].long(), state)

    def _store(self, held: Retained, seen: int):
        pages, n = self.pages, self.pages.layout.block_slots
        slots = torch.arange(held.k.shape[1])
        at = (self.slot_rows[:, slots // n], self.heads.unsqueeze(1), slots % n)
        held.position[:, 0] = seen  # the position field of slot 0 holds tokens_seen
        arrays = (pages.k, held.k), (pages.v, held.v), (pages.score, held.score), (pages.position, held.position.int())
        for array, values in arrays:
            pages.put(array, at, values)
        if held.state is not None:
            pages.store_states(self.state_rows, self.heads, held.state)
