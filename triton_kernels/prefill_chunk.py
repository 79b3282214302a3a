"""Prefill of chunks over a fixed-budget paged cache, piece after piece (DESIGN "One step"; docs/kernels.md).

The host never waits for the device.
"""

from __future__ import annotations

import torch
import triton
from kvpop_vllm.kernels.triton._prefill_attend import attend
from kvpop_vllm.kernels.triton._prefill_plan import LAST, ROWS, Piece, pieces_of
from kvpop_vllm.kernels.triton._prefill_slots import _enter, _gather, _settle, _store
from kvpop_vllm.kernels.triton._prefill_steps import _steps
from kvpop_vllm.kernels.triton._serving_pages import Step, View, state_places, view
from kvpop_vllm.kernels.triton._tiles import DECODE, LARGE, tile_of
from kvpop_vllm.kernels.triton.decode_step import cache_of, check_step, kernel_config, prefix_of, weights_of
from kvpop_vllm.kernels.triton.delayed_mlstm import mlstm_of_segments
from kvpop_vllm.kernels.triton.online_topk import eviction_times

from kvpop_vllm.cache.chunks import Chunks, send
from kvpop_vllm.cache.pages import Prefix
from kvpop_vllm.kernels.ops.rules import STATE_M_START


@torch.no_grad()
def prefill_chunk(
    q, k, v, pages, page_table, chunks, *, rule, scale, gate_scores=None, prefix=None, keys=None, sink_logits=None,
    out=None,
):  # fmt: skip
    """Implement :func:`kvpop_vllm.kernels.ops.prefill_chunk`.

    All tensors, including those of the rule, are on q's device, but for the budgets of ``chunks`` and the ``tokens``
    and ``biased`` of the prefix, which are on the CPU. A chunk that does not start at a head's ``tokens_seen`` raises
    no error: the head's pages stay unchanged, its outputs and log-sum-exps are NaN.

    Raises:
        NotImplementedError, TypeError, ValueError: as in :mod:`decode_step`.
    """
    if chunks.budgets.device.type != "cpu":
        raise ValueError(f"prefill_chunk takes budgets on the CPU, got {chunks.budgets.device}")
    weights, options = weights_of(rule.scorer, "prefill_chunk")
    check_step(q, k, v, pages, rule, weights, prefix, len(chunks), min(chunks.windows), "prefill_chunk")
    run = _Prefill(q, k, v, pages, page_table, chunks, rule, scale, gate_scores, prefix, keys, sink_logits, out)
    for piece in run.pieces():
        run.process(piece)
    if rule.sequential:
        run.in_steps(kernel_config(pages, page_table, q, rule, options), weights)
    return run.out, run.lse


def _where(mask: torch.Tensor, state: tuple, other: tuple) -> tuple:
    """Return the states of the heads of ``mask [n]``, and ``other`` for all others."""
    pairs = zip(state, other, strict=True)
    return tuple(torch.where(mask.view(1, -1, *[1] * (x.dim() - 2)), x, y) for x, y in pairs)


class _Prefill:
    """Arguments and outputs of one call."""

    def __init__(
        self,
        q,
        k,
        v,
        pages,
        table,
        chunks: Chunks,
        rule,
        scale,
        gate_scores,
        prefix: Prefix | None,
        keys,
        sink_logits,
        out,
    ):
        self.sink_logits = sink_logits
        self.q, self.tokens, self.gate_scores, self.keys = q, (view(k), view(v)), gate_scores, keys
        self.pages, self.table, self.chunks = pages, table, chunks
        self.protected = self.biased = [0] * len(chunks)
        if prefix is not None:
            self.protected = prefix.tokens.tolist()
        if prefix is not None and prefix.biased is not None:
            self.biased = prefix.biased.tolist()
        self.rule, self.scale, self.device = rule, scale, table.device
        self.config = kernel_config(pages, table, q, rule, {})
        self.cache, self.before = cache_of(pages, table), prefix_of(prefix)
        self.out = torch.empty_like(q, memory_format=torch.contiguous_format) if out is None else out
        self.lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        self.heads = self._once("heads", lambda: torch.arange(table.shape[1], device=table.device))
        self.numbers = self._once("numbers", self._numbers)
        self.right = self._once("right", self._starts_right)  # all layers have seen the same tokens

    def _once(self, name: str, make):
        """Return what all layers of a step have in common."""
        return self.chunks.once((name, self.rule.sinks, *self.protected, *self.biased, self.device), make)

    def _starts_right(self) -> torch.Tensor:
        """Return ``[R, H]`` int32, 0 for a wrong start; a tail may begin on any pages."""
        start, protected, *_ = self.numbers.unsqueeze(1).unbind(2)
        tokens_seen = self.pages.position[self.table[:, :, self.pages.layout.state_blocks].long(), self.heads, 0]
        return ((tokens_seen == start) | (start <= protected)).int()

    def pieces(self) -> list[Piece]:
        """Return the pieces of all tokens, or if the rule is sequential, of those of prefixes."""
        arguments = self.chunks, self.rule, self.protected, self.biased, self.device
        return self._once(("pieces", self.rule.sequential), lambda: pieces_of(*arguments))

    def process(self, piece: Piece) -> None:
        """Compute scores, evictions and attention of a piece, and store the survivors."""
        gone = torch.full((len(self.heads), piece.keys), LAST.value, dtype=torch.int32, device=self.device)
        pages = self.tokens, self.cache, self.before
        results = self.scale, self.out, self.lse, self.sink_logits
        of_attention = piece, self.config, self.q, *pages, gone, self.right, *results
        if not piece.rows:  # all tokens are protected
            return attend(*of_attention)
        weights, (k, v), (index, none), inserted = self.rule.scorer, self.tokens, piece.tail_rows, None
        if weights.takes_gate_scores:
            inserted = self.gate_scores[index].T.contiguous()
        if weights.recurrent:
            ends, segment_of, requests, begins = piece.states
            place, begun, right = self.chunks.once(("states", piece), lambda: self._states(requests, begins))
            before = None
            if piece.goes_on:
                before = _where(begun, self.pages.load_states(*place, weights), (0.0, 0.0, STATE_M_START))
            new = torch.cat([k.base, v.base], -1).transpose(0, 1)[:, index]
            if not weights.delayed:
                inserted, state = mlstm_of_segments(weights, new, none, ends, before, new, segment_of)
        left = k.base.new_empty(len(self.heads), piece.rows, 2 * k.base.shape[2])
        score = None if inserted is None else torch.empty_like(inserted)
        of_blocks = {"P": self.config, "ROWS": ROWS, "num_warps": 4}
        _gather[len(piece.blocks()), len(self.heads)](
            self.tokens, inserted, self.cache, piece.segments, piece.blocks(), left, score, piece.rows, **of_blocks
        )
        if weights.recurrent and weights.delayed:
            score, state = mlstm_of_segments(weights, new, none, ends, before, left, segment_of)
        elif inserted is None and not weights.draws and weights.kernel != "none":
            score = weights.scores(*left.chunk(2, -1))
        slot_of = self._evict(piece, score, gone)
        attend(*of_attention)
        _store[len(piece.blocks()), len(self.heads)](
            self.tokens, inserted, left, score, slot_of, self.cache, piece.segments, piece.blocks(), self.right,
            piece.rows, **of_blocks,
        )  # fmt: skip
        if weights.recurrent:  # of a wrong start the state stays
            self.pages.store_states(*place, state if before is None else _where(right, state, before))

    def _states(self, requests: torch.Tensor, begins: torch.Tensor) -> tuple:
        """Return the pages of states, and masks ``[H * n]``: heads with a state before the piece, and right starts."""
        places = state_places(self.pages, self.table, self.heads, requests)
        return places, ~begins.repeat(len(self.heads)), self.right[requests].T.flatten() > 0

    def _evict(self, piece: Piece, score, gone) -> torch.Tensor:
        """Write the eviction times of keys, and return the slots of tokens that leave the window, -1 if evicted."""
        slot_of = torch.full((len(self.heads), piece.rows), -1, dtype=torch.int32, device=self.device)
        if not piece.entries:
            return slot_of
        heads, rule, arrays = len(self.heads), self.rule, (piece.segments, piece.topk)
        scores = torch.empty(heads, piece.entries, dtype=torch.float32, device=self.device)
        positions, free = (torch.empty_like(scores, dtype=torch.int32) for _ in range(2))
        _enter[triton.cdiv(piece.most_entries, piece.width), len(piece), heads](
            score, self.cache, *arrays, scores, positions, piece.rows, piece.entries, P=self.config, WIDTH=piece.width
        )
        order = {"log_gamma": rule.log_gamma, "decay_step": rule.decay_step, "ages": rule.ages, "keys": self.keys}
        leaves = eviction_times(piece, scores, positions, **order)
        sizes = piece.rows, piece.keys, piece.entries
        _settle[len(piece), heads](leaves, *arrays, free, gone, slot_of, *sizes, WIDTH=piece.width, num_warps=4)
        return slot_of

    def in_steps(self, config, weights) -> None:
        """Run decode steps for the tokens after the prefixes, one after another in each request."""
        columns = (View(column, self.numbers.shape[1]) for column in self.numbers.T[1:7])
        protected, biased, windows, positions, tokens, counts = columns
        protected = View() if self.before.table is None else protected
        biased = View() if self.before.score is None else biased
        of_tokens = view(self.q), *self.tokens, view(self.gate_scores)
        of_requests = positions, view(self.numbers[:, 7:]), windows, view(self.keys), protected, biased
        work = torch.empty(*self.right.shape, config.work, dtype=torch.float32, device=self.device)
        of_layer = self.cache, self.before, weights, self.rule.log_gamma, self.scale
        step = Step(*of_tokens, *of_requests, *of_layer, self.out, self.lse, work, sink_logits=self.sink_logits)
        stages = tile_of(DECODE, config.wide, config.size).stages
        if config.residual and config.size > LARGE:  # no block of 64 KiB of products is loaded ahead
            stages = 2
        options = {"P": config, "num_warps": 8, "num_stages": stages}
        _steps[(1, *self.right.T.shape)](step, tokens, counts, self.right, **options, enable_fp_fusion=False)

    def _numbers(self) -> torch.Tensor:
        """Return numbers of each request, ``[R, 7 + H]`` int32.

        They are its start, p, the number of tokens that have a bias, w; the position of the first token of the chunk
        after the prefix, its index in the batch, the number of these tokens; and the budgets.
        """
        lines, first = [], 0
        of_chunks = self.chunks.starts, self.chunks.lengths, self.chunks.windows, self.chunks.budgets.tolist()
        for start, length, window, budgets, p, biased in zip(*of_chunks, self.protected, self.biased, strict=True):
            inside = min(max(p - start, 0), length)
            lines.append([start, p, biased, window, start + inside, first + inside, length - inside, *budgets])
            first += length
        return send(lines, self.device, torch.int32)
