"""Prefill chunk over a fixed-budget paged cache (DESIGN "One step", "Prefill in Triton").

A chunk is processed in pieces. The retained tokens of a piece's heads and the piece's own tokens are keys
with births and evictions. For each piece, scores are computed (:mod:`_prefill_scores`), then eviction times
(:mod:`online_topk`), then attention to the keys that each query sees (:mod:`_prefill_attend`). Finally the
survivors are written to the slots. Attention-coupled and other sequential rules are processed token by token
with the kernels of decode_step. Attention to a protected prefix uses torch's own kernels. The host never waits for
the device.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from kvpop_vllm.kernels.triton._prefill_attend import attend
from kvpop_vllm.kernels.triton._prefill_scores import Piece, Scores, State, oldest_in_window
from kvpop_vllm.kernels.triton.decode_step import check_step, kernel_config, take_step, weights_of
from kvpop_vllm.kernels.triton.online_topk import online_topk

from kvpop_vllm.kernels.ops import RetentionRule
from kvpop_vllm.kernels.pages import Prefix
from kvpop_vllm.kernels.prefix_attention import with_prefix

PIECE = 8192
"""Number of tokens whose scores, order and lists of keys are in memory at once."""
LAST = 2**31 - 1
NOWHERE = 2**30
"""Offset of positions behind those of any cache."""


@torch.no_grad()
def prefill_chunk(q, k, v, pages, page_table, start, budgets, *, rule, scale, gate_scores=None, prefix=None, keys=None):
    """Implement :func:`kvpop_vllm.kernels.ops.prefill_chunk`.

    All tensors, including those of the rule, are on q's device, but for ``budgets`` and the ``tokens`` of the prefix,
    which are on the CPU. A chunk that does not start at a head's ``tokens_seen`` raises no error: the head's pages
    stay unchanged, its outputs and log-sum-exps are NaN.

    Raises:
        NotImplementedError, TypeError, ValueError: as in :mod:`decode_step`.
    """
    if budgets.device.type != "cpu":
        raise ValueError(f"prefill_chunk takes budgets on the CPU, got {budgets.device}")
    weights, options = weights_of(rule.scorer, "prefill_chunk")
    check_step(q, k, v, pages, rule, weights, prefix, 1, "prefill_chunk")
    protected = 0 if prefix is None else int(prefix.tokens[0])
    own, shares = rule.behind(protected), budgets.tolist()
    if rule.sequential:
        config = kernel_config(pages, page_table, q.shape[1] // k.shape[1], rule, options, prefix is not None)
        run = partial(
            _token_by_token, config, pages, page_table, protected, shares, rule, weights, scale,
            _on_device(prefix, q), keys,
        )  # fmt: skip
    else:
        run = partial(
            _in_pieces, pages, page_table, [share - rule.sinks + own.sinks for share in shares], own, scale, keys
        )
    return with_prefix(run, q, k, v, start, gate_scores, prefix, scale, attends=rule.sequential)


def _empty(q) -> tuple[torch.Tensor, torch.Tensor]:
    """Return uninitialised outputs and log-sum-exps."""
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    return out, torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)


def _in_pieces(
    pages, page_table, shares, rule, scale, keys, q, k, v, start, gate_scores
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run tokens of a tail over its slots alone, heads of equal budget together.

    ``rule`` and ``shares``, the budgets, are those of the tail.
    """
    (out, lse), group = _empty(q), q.shape[1] // k.shape[1]
    for budget in sorted(set(shares)) if len(q) else ():
        own = [h for h, share in enumerate(shares) if share == budget]
        if len(own) == len(shares):
            _Heads(pages, page_table, None, budget, rule, scale, keys).run(q, k, v, start, gate_scores, out, lse)
            continue
        heads = _uploaded(own, q.device)
        rows = _uploaded([h * group + i for h in own for i in range(group)], q.device)
        drawn = None if keys is None else keys[:, heads]
        part = _Heads(pages, page_table[heads], heads, budget, rule.of_heads(heads), scale, drawn)
        some, some_lse = out.new_empty(len(q), len(rows), q.shape[2]), lse.new_empty(len(q), len(rows))
        scores = None if gate_scores is None else gate_scores[:, heads]
        part.run(q[:, rows], k[:, heads], v[:, heads], start, scores, some, some_lse)
        out[:, rows], lse[:, rows] = some, some_lse
    return out, lse


def _uploaded(values: list[int], device: torch.device, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """Return numbers of the host on a device, which the host does not wait for."""
    tensor = torch.tensor(values, dtype=dtype, device="cpu")
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def _on_device(prefix: Prefix | None, like: torch.Tensor) -> Prefix | None:
    """Return a prefix with its ``tokens`` on the device of ``like``, without waiting for the device."""
    if prefix is None:
        return None
    return replace(prefix, tokens=torch.full((1,), int(prefix.tokens[0]), dtype=torch.int64, device=like.device))


def _token_by_token(
    config, pages, table, protected, shares, rule, weights, scale, prefix, keys, q, k, v, start, gate_scores
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run L decode steps, whose positions are on the device from the start.

    If the first one does not start at ``tokens_seen``, they all get positions that no cache comes to.
    """
    out, lse = _empty(q)
    positions = torch.arange(start, start + len(q), device=q.device).unsqueeze(1)
    if start > protected:
        seen = pages.position[table[:, pages.layout.state_blocks].long(), torch.arange(len(table), device=q.device), 0]
        positions = torch.where((seen == start).all(), positions, positions + NOWHERE)
    positions = positions.repeat(1, 2)  # 16-byte alignment for every position: kernels compile once
    rows, own = table.unsqueeze(0), _uploaded(shares, q.device, torch.int32).unsqueeze(0)
    windows = torch.full((1,), rule.window, dtype=torch.int32, device=q.device)
    for i in range(len(q)):
        cut = slice(i, i + 1)
        told = positions[i, :1], own, windows, None if gate_scores is None else gate_scores[cut], prefix, keys
        step = (x[cut] for x in (q, k, v))
        take_step(config, *step, pages, rows, told, rule, weights, scale, out[cut], lse[cut])
    return out, lse


class _Heads:
    """Heads of one request that share one budget.

    These are all heads, or those numbered ``heads``, whose table, rule and keys ``[1, H]`` of draws are
    passed. Within this class positions are relative to ``rule.first``, the first token that has a slot.
    Positions in the pages are absolute.
    """

    def __init__(self, pages, table, heads, budget: int, rule: RetentionRule, scale: float, keys):
        self.pages, self.budget, self.rule, self.scale = pages, budget, rule, scale
        self.device, count = table.device, len(table)
        self.heads = torch.arange(count, device=self.device) if heads is None else heads
        self.topk, self.keys = budget - rule.first_long, None if keys is None else keys[0]
        states = pages.layout.state_blocks
        self.state_rows, self.slot_rows = table[:, :states].long(), table[:, states:].long()
        self.scores, self.right = Scores(rule), None

    def run(self, q, k, v, start: int, gate_scores, out, lse) -> None:
        """Process all pieces of a chunk."""
        if start > self.rule.first:  # a tail's first step may start on pages with any content
            self.right = self.pages.position[self._at(self._arange(0, 1))] == start
        for first in range(0, len(q), PIECE):
            cut = slice(first, first + PIECE)
            own = None if gate_scores is None else gate_scores[cut]
            piece = self._load(k[cut], v[cut], own, start - self.rule.first + first)
            self._finish(piece, q[cut], out[cut], lse[cut])
        if self.right is not None:
            wrong = ~self.right[:, 0].repeat_interleave(q.shape[1] // k.shape[1])
            out.masked_fill_(wrong.unsqueeze(-1), float("nan"))
            lse.masked_fill_(wrong, float("nan"))

    def _finish(self, piece: Piece, q, out, lse) -> None:
        """Compute scores, evictions and attention of a piece, and store the survivors."""
        before = self._load_state(piece.a)
        score, state = self.scores(piece, before)
        leaving = piece.leaving(self.rule)
        piece.score[:, leaving] = score
        gone = self._evictions(piece, leaving)
        attend(q, piece.keys, piece.values, gone, piece.held, self.budget, self.scale, out, lse)
        self._store(piece, *self._survivors(piece, leaving, gone))
        if state is not None:
            if self.right is not None:
                right = [self.right[:, 0].view(1, -1, *[1] * (x.dim() - 2)) for x in state]
                state = tuple(map(torch.where, right, state, before))
            self.pages.store_states(self.state_rows, self.heads, state)

    def _arange(self, start: int, end: int) -> torch.Tensor:
        return torch.arange(start, max(start, end), device=self.device)

    def _at(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the indices of slots of all heads in the arrays of the pages."""
        n = self.pages.layout.block_slots
        return self.slot_rows[:, slots // n], self.heads.unsqueeze(1), slots % n

    def _load(self, k, v, gate_scores, a: int) -> Piece:
        """Return the piece of tokens ``[a, a + len(k))`` and all tokens retained before a."""
        rule, pages, length, heads = self.rule, self.pages, len(k), k.shape[1]
        oldest, sinks = oldest_in_window(rule, a), min(rule.sinks, a)
        near = self._arange(oldest, a)
        long_range = self._arange(rule.first_long, min(a, self.budget))
        in_ring = rule.sinks + (near - rule.sinks) % rule.window
        at = self._at(torch.cat([long_range, self._arange(0, sinks), in_ring]))
        held = at[0].shape[1]
        keys = torch.empty(heads, held + length, k.shape[2], dtype=k.dtype, device=self.device)
        values, score = torch.empty_like(keys), torch.zeros(keys.shape[:2], dtype=torch.float32, device=self.device)
        for whole, array, new in ((keys, pages.k, k), (values, pages.v, v), (score, pages.score, gate_scores)):
            whole[:, :held] = array[at]
            if new is not None:
                whole[:, held:] = new.transpose(0, 1)
        told = torch.cat([self._arange(0, sinks), near, self._arange(a, a + length)]).expand(heads, -1)
        position = torch.cat([pages.position[self._at(long_range)].long() - rule.first, told], 1)
        first = len(long_range) + rule.sinks - oldest
        return Piece(keys, values, score, position, held, len(long_range), first, a, a + length)

    def _evictions(self, piece: Piece, leaving: slice) -> torch.Tensor:
        """Return ``[H, T]`` int32: the index of the first query that does not see a key."""
        rule, held = self.rule, piece.long_range
        gone = torch.full(piece.score.shape, LAST, dtype=torch.int32, device=self.device)
        ranked = [slice(0, held), leaving]
        score, position = (torch.cat([x[:, part] for part in ranked], 1) for x in (piece.score, piece.position))
        at = online_topk(  # draws depend on a token's absolute position
            score, position + rule.first, held, topk=self.topk, window=rule.window, log_gamma=rule.log_gamma,
            decay_step=rule.decay_step, ages=rule.ages, keys=self.keys,
        )  # fmt: skip
        at = (at - piece.a - rule.first).clamp_max(LAST).int()
        gone[:, :held], gone[:, leaving] = at[:, :held], at[:, held:]
        return gone

    def _survivors(self, piece: Piece, leaving: slice, gone: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return slots ``[n]`` to write, and the index ``[H, n]`` of the token for each of them.

        Long-range tokens keep their slots. Newcomers take free slots, the oldest one the first slot.
        """
        rule, heads, oldest = self.rule, len(self.heads), oldest_in_window(self.rule, piece.b)
        sinks = self._arange(min(rule.sinks, piece.a), min(rule.sinks, piece.b))
        near = self._arange(oldest, piece.b)
        filled = self._arange(0, min(oldest - rule.sinks, self.topk))
        slots = torch.cat([sinks, rule.sinks + (near - rule.sinks) % rule.window, rule.first_long + filled])
        fixed = (piece.first + torch.cat([sinks, near])).expand(heads, -1)
        if len(filled) == 0 or leaving.stop == leaving.start:
            return slots[: fixed.shape[1]], fixed
        stays = torch.zeros(heads, len(filled), dtype=torch.bool, device=self.device)
        stays[:, : piece.long_range] = gone[:, : piece.long_range] == LAST
        left = (gone[:, leaving] != LAST).byte()
        newcomers = leaving.start + left.argsort(dim=-1, stable=True)  # retained newcomers first, by age
        rank = ((~stays).cumsum(-1) - 1).clamp(0, left.shape[1] - 1)
        return slots, torch.cat([fixed, torch.where(stays, filled, newcomers.gather(1, rank))], 1)

    def _store(self, piece: Piece, slots: torch.Tensor, source: torch.Tensor) -> None:
        """Write tokens ``source [H, n]`` of a piece to slots ``slots [n]``."""
        pages, at, total = self.pages, self._at(slots), piece.keys.shape[1]
        rows = (source + total * torch.arange(len(source), device=self.device).unsqueeze(1)).flatten()
        for array, values in ((pages.k, piece.keys), (pages.v, piece.values)):
            self._put(array, at, values.flatten(0, 1).index_select(0, rows).view(*source.shape, -1))
        self._put(pages.score, at, piece.score.gather(1, source))
        self._put(pages.position, at, (piece.position.gather(1, source) + self.rule.first).int())
        seen = torch.full((len(source), 1), self.rule.first + piece.b, dtype=torch.int32, device=self.device)
        self._put(pages.position, self._at(self._arange(0, 1)), seen)  # tokens_seen is in slot 0

    def _put(self, array: torch.Tensor, at: tuple[torch.Tensor, ...], values: torch.Tensor) -> None:
        """Write values of heads whose start was right, and to the others what they have."""
        if self.right is not None:
            values = torch.where(self.right.view(-1, *[1] * (values.dim() - 1)), values, array[at])
        self.pages.put(array, at, values)

    def _load_state(self, a: int) -> State | None:
        """Return the state of an mLSTM that has processed tokens of the tail or a prefix, else None."""
        weights = self.rule.scorer
        if not weights.recurrent or self.rule.first + a == 0:
            return None
        return self.pages.load_states(self.state_rows, self.heads, weights)
