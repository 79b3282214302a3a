"""Prefill of chunks over a fixed-budget paged cache (DESIGN "One step"; docs/kernels.md).

All requests of a call are processed together, in pieces of bounded size (:mod:`_prefill_plan`). The slots in use and a
piece's tokens are keys with births and evictions. For each piece, scores are computed (:mod:`_prefill_scores`), then
eviction times (:mod:`online_topk`), then attention to the keys that each query sees, protected ones included
(:mod:`_prefill_attend`). Finally the survivors are written to the slots (:mod:`_prefill_slots`). Attention-coupled and
other sequential rules are processed token by token with the kernels of decode_step. The host never waits for the device.
"""

from __future__ import annotations

import torch
import triton
from kvpop_vllm.kernels.triton._prefill_attend import attend
from kvpop_vllm.kernels.triton._prefill_plan import LAST, ROWS, Piece, segments_of
from kvpop_vllm.kernels.triton._prefill_scores import Rows, State, mlstm_scores, scores_of
from kvpop_vllm.kernels.triton._prefill_slots import _enter, _gather, _settle, _store
from kvpop_vllm.kernels.triton._serving_pages import view
from kvpop_vllm.kernels.triton.decode_step import cache_of, check_step, kernel_config, prefix_of, take_step, weights_of
from kvpop_vllm.kernels.triton.online_topk import eviction_times

from kvpop_vllm.kernels.chunks import Chunks, send
from kvpop_vllm.kernels.ops.rules import STATE_M_START
from kvpop_vllm.kernels.pages import Prefix

WIDTH = 1024
"""Entries that a program looks at together."""
NOWHERE = 2**30
"""Offset of positions behind those of any cache."""


@torch.no_grad()
def prefill_chunk(q, k, v, pages, page_table, chunks, *, rule, scale, gate_scores=None, prefix=None, keys=None):
    """Implement :func:`kvpop_vllm.kernels.ops.prefill_chunk`.

    All tensors, including those of the rule, are on q's device, but for the budgets of ``chunks`` and the ``tokens`` and
    ``biased`` of the prefix, which are on the CPU. A chunk that does not start at a head's ``tokens_seen`` raises no error:
    the head's pages stay unchanged, its outputs and log-sum-exps are NaN.

    Raises:
        NotImplementedError, TypeError, ValueError: as in :mod:`decode_step`.
    """
    if chunks.budgets.device.type != "cpu":
        raise ValueError(f"prefill_chunk takes budgets on the CPU, got {chunks.budgets.device}")
    if min(chunks.windows) < 1:
        raise ValueError(f"a window holds at least the newest token, got {min(chunks.windows)}")
    weights, options = weights_of(rule.scorer, "prefill_chunk")
    check_step(q, k, v, pages, rule, weights, prefix, len(chunks), "prefill_chunk")
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    run = _Prefill(pages, page_table, chunks, rule, scale, prefix, q.shape[1] // k.shape[1])
    run.in_pieces(q, k, v, gate_scores, keys, out, lse)
    if rule.sequential:
        config = kernel_config(pages, page_table, run.config.group, rule, options)
        run.token_by_token(config, weights, q, k, v, gate_scores, keys, out, lse)
    return out, lse


def _where(mask: torch.Tensor, state: State, other: tuple) -> State:
    """Return the states of the heads of ``mask [n]``, and ``other`` for all others."""
    pairs = zip(state, other, strict=True)
    return tuple(torch.where(mask.view(1, -1, *[1] * (x.dim() - 2)), x, y) for x, y in pairs)


class _Prefill:
    """Chunks of one call and the pages that they go to."""

    def __init__(self, pages, table, chunks: Chunks, rule, scale: float, prefix: Prefix | None, group: int):
        self.pages, self.table, self.chunks = pages, table, chunks
        self.protected = self.biased = [0] * len(chunks)
        if prefix is not None:
            self.protected = prefix.tokens.tolist()
        if prefix is not None and prefix.biased is not None:
            self.biased = prefix.biased.tolist()
        self.rule, self.scale, self.prefix, self.device = rule, scale, prefix, table.device
        self.config = kernel_config(pages, table, group, rule, {"scorer": "none"})
        self.cache, self.before = cache_of(pages, table), prefix_of(prefix)
        self.heads = torch.arange(table.shape[1], device=table.device)
        self.right = self._right()

    def _once(self, what: str, make):
        """Return what all layers of a step have in common."""
        return self.chunks.once((what, self.rule.sinks, *self.protected, *self.biased, self.device), make)

    def _right(self) -> torch.Tensor:
        """Return 1 where a chunk starts where a head's cache ends, else 0, ``[R, H]`` int32; a tail may begin on any pages."""
        starts = self.chunks.starts
        told = [starts, [int(start <= p) for start, p in zip(starts, self.protected, strict=True)]]
        start, begins = self._once("starts", lambda: send(told, self.device)).unsqueeze(-1).unbind()
        first = self.table[:, :, self.pages.layout.state_blocks].long()
        return ((self.pages.position[first, self.heads, 0] == start) | (begins > 0)).int()

    def in_pieces(self, q, k, v, gate_scores, keys, out, lse) -> None:
        """Process all chunks, several tokens of each at a time, or if the rule is sequential, those of prefixes."""
        within = self.rule.sequential
        for piece in self._once(("pieces", within), lambda: self._pieces(within)):
            self._run(piece, q, (view(k), view(v)), gate_scores, keys, out, lse)

    def _pieces(self, within: bool) -> list[Piece]:
        segments = segments_of(self.chunks, self.rule, self.protected, self.biased, within=within)
        return [Piece(parts, self.device) for parts in segments]

    def _run(self, piece: Piece, q, tokens, gate_scores, keys, out, lse) -> None:
        """Compute scores, evictions and attention of a piece, and store the survivors."""
        gone = torch.full((len(self.heads), piece.keys), LAST.value, dtype=torch.int32, device=self.device)
        of_attention = piece, self.config, q, tokens, self.cache, self.before, gone, self.right, self.scale, out, lse
        if not piece.rows:  # all tokens are protected
            return attend(*of_attention)
        weights, made = self.rule.scorer, None
        if weights.takes_gate_scores:
            made = gate_scores[piece.tail_rows[0]].T.contiguous()
        if weights.recurrent:
            before, new = self._load_states(piece, weights), self._rows(piece, tokens, None, False)
            if not weights.delayed:
                made, state = mlstm_scores(weights, piece, new, new, before)
        left = self._rows(piece, tokens, made, True)
        if weights.recurrent and weights.delayed:
            score, state = mlstm_scores(weights, piece, left, new, before)
        else:
            score = scores_of(weights, left)
        slot_of = self._evict(piece, score, keys, gone)
        attend(*of_attention)
        _store[len(piece.blocks()), len(self.heads)](
            tokens, made, left.keys, left.values, score, slot_of, self.cache, piece.segments, piece.blocks(),
            self.right, piece.rows, P=self.config, ROWS=ROWS, num_warps=4,
        )  # fmt: skip
        if weights.recurrent:
            self._store_states(piece, before, state)

    def _rows(self, piece: Piece, tokens, made, leaves: bool) -> Rows:
        """Copy the new token of each tail row, or the one that leaves the window with it."""
        heads, k = len(self.heads), tokens[0].base
        keys = torch.empty(heads, piece.rows, k.shape[2], dtype=k.dtype, device=self.device)
        score = None if made is None else torch.empty_like(made)
        rows = Rows(keys, torch.empty_like(keys), score)
        _gather[len(piece.blocks()), heads](
            tokens, made, self.cache, piece.segments, piece.blocks(), *rows, piece.rows,
            P=self.config, ROWS=ROWS, LEAVES=leaves, num_warps=4,
        )  # fmt: skip
        return rows

    def _evict(self, piece: Piece, score, keys, gone) -> torch.Tensor:
        """Write the eviction times of keys, and return the slots of tokens that leave the window, -1 for evicted ones."""
        slot_of = torch.full((len(self.heads), piece.rows), -1, dtype=torch.int32, device=self.device)
        if not piece.entries:
            return slot_of
        heads, rule, of = len(self.heads), self.rule, (piece.segments, piece.topk)
        scores = torch.empty(heads, piece.entries, dtype=torch.float32, device=self.device)
        positions, free = (torch.empty_like(scores, dtype=torch.int32) for _ in range(2))
        _enter[triton.cdiv(piece.most_entries, WIDTH), len(piece), heads](
            score, self.cache, *of, scores, positions, piece.rows, piece.entries, P=self.config, WIDTH=WIDTH
        )
        told = {"log_gamma": rule.log_gamma, "decay_step": rule.decay_step, "ages": rule.ages, "keys": keys}
        leaves = eviction_times(piece, scores, positions, **told)
        sizes = piece.rows, piece.keys, piece.entries
        _settle[len(piece), heads](leaves, *of, free, gone, slot_of, *sizes, WIDTH=WIDTH, num_warps=4)
        return slot_of

    def _states_of(self, piece: Piece) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return requests ``[S']``, state pages ``[H * S', pages]`` and heads ``[H * S']`` of a piece's tails."""
        requests = piece.numbers("request")[piece.tails]
        rows = self.table[requests, :, : self.pages.layout.state_blocks].long().transpose(0, 1)
        return requests, rows.flatten(0, 1), self.heads.repeat_interleave(len(requests))

    def _load_states(self, piece: Piece, weights) -> State:
        """Return the states before the tails of a piece, empty ones where a tail has none."""
        _, *place = self._states_of(piece)
        begun = ~piece.begins.repeat(len(self.heads))
        return _where(begun, self.pages.load_states(*place, weights), (0.0, 0.0, STATE_M_START))

    def _store_states(self, piece: Piece, before: State, state: State) -> None:
        """Write the states behind the tails of a piece, of heads whose start was right."""
        requests, *place = self._states_of(piece)
        self.pages.store_states(*place, _where(self.right[requests].T.flatten() > 0, state, before))

    def token_by_token(self, config, weights, q, k, v, gate_scores, keys, out, lse) -> None:
        """Run decode steps, in which each chunk has one token behind its prefix until it has no more.

        A chunk that does not start at the ``tokens_seen`` of all heads gets positions that no cache comes to.
        """
        counts, order, tokens, positions, rows, protected, biased, windows, budgets = self._once("steps", self._steps)
        positions = torch.where((self.right[order] > 0).all(1)[rows], positions, positions + NOWHERE)
        positions = positions.unsqueeze(1).repeat(1, 2)  # 16-byte alignment for every position: kernels compile once
        table, draws, first = self.table[order], None if keys is None else keys[order], 0
        if self.prefix is not None:
            biased = None if self.prefix.biased is None else biased
            before = Prefix(self.prefix.pages, self.prefix.table[order], protected, biased)
        for count in counts:
            at, position = tokens[first : first + count], positions[first : first + count, 0]
            given = None if gate_scores is None else gate_scores[at]
            prefix = None if self.prefix is None else before.of(slice(count))
            drawn = None if draws is None else draws[:count]
            own = position, budgets[:count], windows[:count], given, prefix, drawn
            found = out.new_empty(count, *out.shape[1:]), lse.new_empty(count, lse.shape[1])
            step = config, q[at], k[at], v[at], self.pages, table[:count], own, self.rule, weights, self.scale
            take_step(*step, *found)
            out[at], lse[at] = found
            first += count

    def _steps(self) -> tuple:
        """Return what the steps consist of.

        These are the number of tokens of each step; the requests, those with most tokens first; for the tokens of all
        steps the index in the batch, the position, and the index of the request in that order; and of the requests in
        that order p, the number of tokens that have a bias, w and the budgets.
        """
        parts, first = [], 0
        for r, (start, length) in enumerate(zip(self.chunks.starts, self.chunks.lengths, strict=True)):
            inside = min(max(self.protected[r] - start, 0), length)
            parts.append((length - inside, r, first + inside, start + inside))
            first += length
        parts.sort(key=lambda part: -part[0])
        steps = range(parts[0][0])
        counts = [sum(length > i for length, *_ in parts) for i in steps]
        tokens = [part[2] + i for i in steps for part in parts[: counts[i]]]
        positions = [part[3] + i for i in steps for part in parts[: counts[i]]]
        rows = [row for i in steps for row in range(counts[i])]
        order = [r for _, r, *_ in parts]
        sizes = self.protected, self.biased, self.chunks.windows, self.chunks.budgets.tolist()
        protected, biased, windows, budgets = ([of[r] for r in order] for of in sizes)
        wide = (send(values, self.device) for values in (order, tokens, positions, rows, protected, biased))
        return counts, *wide, *(send(values, self.device, torch.int32) for values in (windows, budgets))
