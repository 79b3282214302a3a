"""Attention of one layer over a fixed-budget paged cache, for any engine.

Decode rows run together, and so do prefill chunks.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from kvpop_vllm.attention.prefill_chunks import ChunkGroup, PrefillChunk, as_kernels_count, made_of
from kvpop_vllm.kernels import compress, divided, ops, rounds
from kvpop_vllm.kernels.divided import DividedRegions
from kvpop_vllm.kernels.ops import PromptMatching, PromptVotes, RetentionRule, StepOrderError
from kvpop_vllm.kernels.pages import PageLayout, Pages, Prefix, cdiv
from kvpop_vllm.kernels.regions import RegionMap
from kvpop_vllm.roles import Retention


@dataclass(frozen=True)
class RequestSettings:
    """Settings of the requests of a step, one entry per request.

    None stands for the server's budget, window or no protection.

    Attributes:
        protected: p, tokens of the protected prefix.
        budgets: B of each request, or ``[requests, H]``.
        windows: w of each request.
        seeds: ``[requests]`` int64 on the CPU, seeds of the draws, None if nothing is drawn.
        compression: way in which prompts are compressed, if the prefixes are prompts that are held until their end; p is
            then the whole prompt, and budgets are one per request.
        made: number of each prefix's first tokens that are slots of cartridges.
    """

    protected: list[int] | None = None
    budgets: list[int] | torch.Tensor | None = None
    windows: list[int] | None = None
    seeds: torch.Tensor | None = None
    compression: PromptVotes | PromptMatching | None = None
    made: list[int] | None = None


@dataclass(frozen=True)
class Protection:
    """Work that protected prompts add to a step.

    Attributes:
        table: ``[R, F]`` int32, prefix blocks of the decoded requests.
        tokens: ``[R]`` int64, p of each decoded request.
        written: ``[n]`` int64, indices of the protected tokens in the flat batch.
        blocks: ``[n]`` int64, block of each protected token.
        slots: ``[n]`` int64, slot of each protected token in its block.
        begun: ``[B, H, P]`` int32, tail pages of requests whose tail begins in this step.
        begun_table: ``[B, F]`` int32, their prefix blocks.
        begun_tokens: ``[B]`` int64, their p.
        made: ``[R]`` int64, slots of cartridges of each decoded request, None if no request has any.
        begun_made: ``[B]`` int64 on the CPU, the same of the requests whose tail begins.
    """

    table: torch.Tensor
    tokens: torch.Tensor
    written: torch.Tensor
    blocks: torch.Tensor
    slots: torch.Tensor
    begun: torch.Tensor
    begun_table: torch.Tensor
    begun_tokens: torch.Tensor
    made: torch.Tensor | None = None
    begun_made: torch.Tensor | None = None


@dataclass(frozen=True)
class StepBatch:
    """One engine step, shared by all layers. Requests with one token are decoded together.

    Attributes:
        decodes: R, number of decoded requests.
        tokens: indices of their tokens in the flat batch; a slice if they come first.
        table: ``[R, H, P]`` int32, pages of their tails.
        positions: ``[R]`` int64, positions of their tokens.
        budgets: ``[R, H]`` int32, B of each head.
        windows: ``[R]`` int32, w of each request.
        prefills: chunks of the other requests, in order.
        starts: ``[n]`` int64, first position of each request with tokens, in order; 0 if it is at most p,
            because the tail then begins anew. None if the host must not wait for it, or if another layer has
            checked them; each kernel then checks its own requests.
        slot_zero: ``[n, H]`` int64, page of each head's slot 0, which stores ``tokens_seen``; None as for
            ``starts``.
        protection: work for protected prefixes, None if no request has one.
        seeds: ``[R]`` int64, seeds of the draws, None if nothing is drawn.
    """

    decodes: int
    tokens: slice | torch.Tensor
    table: torch.Tensor
    positions: torch.Tensor
    budgets: torch.Tensor
    windows: torch.Tensor
    prefills: tuple[PrefillChunk, ...]
    starts: torch.Tensor | None
    slot_zero: torch.Tensor | None
    protection: Protection | None = None
    seeds: torch.Tensor | None = None

    @cached_property
    def group(self) -> ChunkGroup:
        """All prefill chunks, of which there is one at least."""
        return ChunkGroup.of(self.prefills)


class StepPlan:
    """One engine step as the host knows it. The batch of each layer is made from it, since pages may differ by layer.

    Args:
        layout: page layout of the layers.
        retention: budget, sinks and window of all heads and layers.
        query_lens: tokens of each request in this step.
        seq_lens: ``[requests]``, lengths including them.
        block_table: ``[requests, W]`` int32, blocks of each request's prefix, state and tail.
        sizes: settings of each request.
    """

    def __init__(
        self,
        layout: PageLayout,
        retention: Retention,
        query_lens: list[int],
        seq_lens: torch.Tensor,
        block_table: torch.Tensor,
        sizes: RequestSettings = RequestSettings(),  # noqa: B008
    ):
        requests, lengths = len(query_lens), seq_lens.tolist()
        starting = [length - count for length, count in zip(lengths, query_lens, strict=True)]
        protected, windows = sizes.protected or [0] * requests, sizes.windows or [retention.window] * requests
        made, drawn = sizes.made or [0] * requests, [None] * requests if sizes.seeds is None else sizes.seeds.tolist()
        self.layout, self.otherwise = layout, retention.budget
        self.asked = [retention.budget] * requests if sizes.budgets is None else sizes.budgets
        behind = [start >= p for start, p in zip(starting, protected, strict=True)]
        self.compressed = torch.tensor(behind, dtype=torch.bool)
        whole, prefixes = [False] * requests, block_table
        first = [cdiv(p, layout.block_slots) for p in protected]  # column of each tail
        if sizes.compression is not None:
            told = zip(protected, self.asked, windows, strict=True)
            after, whole = [sizes.compression.after(*each) for each in told], (~self.compressed).tolist()
            made_rows = from_columns(block_table, first)
            first = [column + cdiv(own.made, layout.block_slots) for column, own in zip(first, after, strict=True)]
            self.asked = [budget - own.made for budget, own in zip(self.asked, after, strict=True)]
            windows = [own.window for own in after]
            starting, protected, made = as_kernels_count(after, starting, protected)
            prefixes = torch.where(self.compressed.unsqueeze(1), made_rows, block_table)
        self.tails = from_columns(block_table, first) if any(first) else block_table
        firsts = list(itertools.accumulate(query_lens, initial=0))
        singles, self.chunks = [], []
        for i, count in enumerate(query_lens):
            if count == 1 and not whole[i]:
                singles.append(i)
            elif count:
                told = windows[i], protected[i], prefixes[i], drawn[i]
                chunk = PrefillChunk(firsts[i], firsts[i + 1], starting[i], None, None, *told, made=made[i])
                parts = chunk.cut_at_prompts_end(after[i], made_rows[i]) if whole[i] else [chunk]
                self.chunks += [(i, part) for part in parts]
        at = [firsts[i] for i in singles]
        together = at == singles == list(range(len(singles)))
        self.chosen = slice(0, len(singles)) if together else torch.tensor(singles)
        self.rows = {
            "decodes": len(singles),
            "tokens": self.chosen if together else torch.tensor(at),
            "positions": torch.tensor(starting, dtype=torch.int64)[self.chosen],
            "windows": torch.tensor(windows, dtype=torch.int32)[self.chosen],
            "seeds": None if sizes.seeds is None else sizes.seeds[self.chosen],
        }
        busy = [i for i, count in enumerate(query_lens) if count]
        self.busy, self.protection = torch.tensor(busy, dtype=torch.int64), None
        starts = [starting[i] if starting[i] > protected[i] else 0 for i in busy]
        self.starts = torch.tensor(starts, dtype=torch.int64)
        if any(protected):
            spans, which = list(zip(firsts, starting, query_lens, strict=False)), torch.arange(requests)
            those = prefixes, which, self.chosen
            self.protection = protection_of(layout.block_slots, spans, protected, *those, made=made)

    def batch(self, regions: RegionMap | DividedRegions | None = None, layer: int = 0) -> StepBatch:
        """Return the batch of a layer, or that of all layers if all heads have equal shares.

        Args:
            regions: map to the pages of heads with unequal budgets, or None.
            layer: layer in ``regions``.
        """
        if regions is None:
            budgets, rows = _equal_heads(self.layout, self.asked, self.tails, self.otherwise)
        else:
            budgets, rows = regions.place(layer, self.tails, self.compressed)
        protection = self.protection
        if protection is not None:
            protection = replace(protection, begun=rows[protection.begun])
        return StepBatch(
            table=rows[self.chosen],
            budgets=budgets[self.chosen],
            prefills=tuple(replace(chunk, row=rows[i], budgets=budgets[i]) for i, chunk in self.chunks),
            starts=self.starts,
            slot_zero=rows[self.busy, :, self.layout.state_blocks].long(),
            protection=protection,
            **self.rows,
        )


def _equal_heads(
    layout: PageLayout, asked: list[int] | torch.Tensor, tails: torch.Tensor, otherwise: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the budgets and pages of requests whose heads have the same pages.

    Args:
        layout: page layout of the layer.
        asked: B of each request, or ``[requests, H]``.
        tails: ``[requests, W]`` int32.
        otherwise: B if there is no request.

    Returns:
        Budgets ``[requests, H]`` int32 and pages ``[requests, H, P]``.
    """
    heads, requests = layout.num_kv_heads, len(asked)
    budgets = torch.as_tensor(asked, dtype=torch.int32)
    budgets = (budgets.unsqueeze(1) if budgets.dim() == 1 else budgets).expand(-1, heads)
    most = int(budgets.max()) if requests else otherwise
    return budgets, tails[:, : layout.blocks(most, most)].unsqueeze(1).expand(-1, heads, -1)


def from_columns(block_table: torch.Tensor, first: list[int]) -> torch.Tensor:
    """Return the entries of ``block_table [requests, W]`` int32 from column ``first[i]`` of row i on.

    Beyond the end of a row, its last entry is repeated.
    """
    columns = torch.arange(block_table.shape[1]) + torch.tensor(first, dtype=torch.int64).unsqueeze(1)
    return block_table.gather(1, columns.clamp_max(block_table.shape[1] - 1))


def protection_of(
    size: int,
    spans: list[tuple[int, int, int]],
    protected: list[int],
    table: torch.Tensor,
    tails: torch.Tensor,
    chosen: slice | torch.Tensor,
    ahead: int = 0,
    made: Sequence[int] = (),
) -> Protection:
    """Return the work that protected prompts add to a step.

    Args:
        size: N, slots per block.
        spans: (first token in the flat batch, its position, tokens) of each request.
        protected: p of each request.
        table: ``[requests, F]`` int32, prefix blocks.
        tails: ``[requests, H, P]`` int32, pages of the tails, or another tensor of ``begun`` for each request.
        chosen: the decoded requests.
        ahead: 0 if a tail begins in the step that has token p; 1 if it begins in the step of the token
            before.
        made: slots of cartridges of each request; none if it is empty.
    """
    begun = []
    written, blocks, slots = ([torch.empty(0, dtype=torch.int64, device=table.device)] for _ in range(3))
    for i, (first, start, count) in enumerate(spans):
        if count and start < protected[i]:
            t = torch.arange(start, min(start + count, protected[i]), device=table.device)
            written.append(first + t - start)
            blocks.append(table[i, t // size].long())
            slots.append(t % size)
        if count and 0 < protected[i] and start <= protected[i] < start + count + ahead:
            begun.append(i)
    tokens = torch.tensor(protected)
    places = (torch.cat(parts) for parts in (written, blocks, slots))
    of_rows, of_begun = (table[chosen], tokens[chosen].to(table.device)), (tails[begun], table[begun], tokens[begun])
    if (counts := made_of(made)) is None:
        return Protection(*of_rows, *places, *of_begun)
    return Protection(*of_rows, *places, *of_begun, counts[chosen].to(table.device), counts[begun])


class FixedBudgetAttention:
    """Attention of one layer: writes the cache and attends (DESIGN "The rule" and "One step").

    Args:
        layout: page layout of the layer.
        rule: retention rule of the layer.
        scale: factor on q . k.
        impl: implementation of the kernels, see :mod:`kvpop_vllm.kernels.dispatch`.
    """

    def __init__(self, layout: PageLayout, rule: RetentionRule, scale: float, impl: str = "auto"):
        self.layout, self.rule, self.scale, self.impl = layout, rule, scale, impl

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        pages: Pages,
        batch: StepBatch,
        out: torch.Tensor,
        gate_scores: torch.Tensor | None = None,
        blocks: Pages | None = None,
    ) -> None:
        """Run one step for all requests of the batch.

        All protected tokens of the step are written before anything is read, because a request may share
        blocks that another request of the same step is computing.

        Args:
            q: ``[T, Hq, D]``, queries of the flat batch of tokens.
            k: ``[T, H, D]``, keys.
            v: ``[T, H, D]``, values.
            pages: pages of the layer, modified in place.
            batch: the step.
            out: ``[T, Hq, D]``, written in place.
            gate_scores: ``[T, H]`` float32, scores of the tokens, if the rule takes them.
            blocks: the layer's pages by block, if ``pages`` are regions.

        Raises:
            StepOrderError: a request's step does not start where its cache ends; nothing has been written. A
                step that starts at position 0 is a new start by definition, whatever its cache has seen.
        """
        blocks, protection, prefix = blocks or pages, batch.protection, None
        writes_first = len(batch.prefills) + (batch.decodes > 0) > 1 or (
            protection is not None and len(protection.written)
        )
        if batch.starts is not None and writes_first:  # a single kernel checks its requests itself
            _check_starts(pages, batch)
        if protection is not None:
            prefix = Prefix(blocks, protection.table, protection.tokens, protection.made)
            prefix.write(k[protection.written], v[protection.written], protection.blocks, protection.slots)
            begun = Prefix(blocks, protection.begun_table, protection.begun_tokens, protection.begun_made)
            if len(begun.tokens):
                ops.begin_tail(pages, protection.begun, begun, rule=self.rule, impl=self.impl)
        if batch.decodes:
            self._decode(q, k, v, pages, batch, prefix, out, gate_scores)
        if self.rule.rounds is None and not any(chunk.after is not None for chunk in batch.prefills):
            if batch.prefills:
                self._prefill(q, k, v, pages, blocks, batch.group, out, gate_scores)
            return
        for chunk in itertools.chain.from_iterable(map(self._between_rounds, batch.prefills)):
            self._prefill_alone(q, k, v, pages, blocks, chunk, out, gate_scores)

    def _decode(self, q, k, v, pages: Pages, batch: StepBatch, prefix: Prefix | None, out, gate_scores) -> None:
        """Run the decode rows of a step, and the rounds that are due after them; arguments as in :meth:`forward`."""
        at = batch.tokens
        out[at], _ = ops.decode_step(
            q[at],
            k[at],
            v[at],
            pages,
            batch.table,
            batch.positions,
            batch.budgets,
            rule=self.rule,
            scale=self.scale,
            gate_scores=None if gate_scores is None else gate_scores[at],
            prefix=prefix,
            seeds=batch.seeds,
            windows=batch.windows,
            impl=self.impl,
        )
        if self.rule.rounds is not None:
            protected = [0] * batch.decodes if prefix is None else prefix.tokens.tolist()
            ends, sizes = (batch.positions + 1).tolist(), (batch.budgets[:, 0].tolist(), batch.windows.tolist())
            rows = rounds.Rows(pages, batch.table, ends, *sizes, protected, batch.seeds)
            rounds.run_due_rounds(q[at], rows, self.rule, self.scale)

    def _prefill(self, q, k, v, pages: Pages, blocks: Pages, group: ChunkGroup, out, gate_scores) -> None:
        """Run chunks together; arguments as in :meth:`forward`."""
        at = group.tokens
        out[at], _ = ops.prefill_chunk(
            q[at],
            k[at],
            v[at],
            pages,
            group.table,
            group.chunks,
            rule=self.rule,
            scale=self.scale,
            gate_scores=None if gate_scores is None else gate_scores[at],
            prefix=group.prefix(blocks),
            seeds=group.seeds,
            impl=self.impl,
        )

    def _prefill_alone(self, q, k, v, pages: Pages, blocks: Pages, chunk: PrefillChunk, out, gate_scores) -> None:
        """Run a chunk, and the compression or round that is due at its end; arguments as in :meth:`forward`."""
        if chunk.follows and self.rule.compression.adaptive_head_budgets:
            (budgets,), (row,) = divided.load_page_table(pages, chunk.row.unsqueeze(0), self.rule.compression)
            chunk = replace(chunk, budgets=budgets, row=row)
        group = ChunkGroup.of([chunk])
        self._prefill(q, k, v, pages, blocks, group, out, gate_scores)
        if chunk.after is not None:
            self._compress(q[group.tokens], pages, chunk, group.prefix(blocks))
        if self.rule.rounds is not None:
            sizes = group.chunks.budgets[:, 0].tolist(), [chunk.window], [chunk.protected], group.seeds
            rows = rounds.Rows(pages, group.table, [chunk.end], *sizes)
            rounds.run_due_rounds(q[group.tokens], rows, self.rule, self.scale)

    def _between_rounds(self, chunk: PrefillChunk) -> Iterator[PrefillChunk]:
        """Yield the parts of a chunk, cut where rounds are due."""
        if self.rule.rounds is None:
            yield chunk
            return
        kept = Retention(int(chunk.budgets[0]), self.rule.sinks, chunk.window).behind(chunk.protected)
        start = chunk.start
        for end in rounds.cuts(self.rule, kept, start, chunk.end):
            first = chunk.first + start - chunk.start
            yield replace(chunk, first=first, last=first + end - start, start=start)
            start = end

    def _compress(self, q: torch.Tensor, pages: Pages, chunk: PrefillChunk, prefix: Prefix) -> None:
        """Store the queries ``[L, Hq, D]`` of a chunk that will vote, and compress the prompt at its end."""
        queries = self.rule.compression.queries
        first = max(chunk.start, chunk.protected - queries)
        if first < chunk.end:
            voters = torch.arange(first, chunk.end)
            states = chunk.row[:, : pages.layout.state_blocks].expand(len(voters), -1, -1)
            compress.store_queries(q[first - chunk.start :], pages, states, voters % queries)
        if chunk.end == chunk.protected:
            told = {"group": q.shape[1] // pages.layout.num_kv_heads, "rule": self.rule, "scale": self.scale}
            compress.compress(pages, chunk.row, prefix, chunk.budgets, chunk.after, chunk.made_row, **told)


def _check_starts(pages: Pages, batch: StepBatch) -> None:
    """Check the starts of all requests before the first kernel writes; each kernel checks only its own.

    Raises:
        StepOrderError: a request's step does not start where its cache ends.
    """
    heads = torch.arange(pages.layout.num_kv_heads, device=batch.slot_zero.device)
    seen = pages.position[batch.slot_zero, heads, 0]  # [n, H]
    wrong = (seen != batch.starts.unsqueeze(1)) & (batch.starts.unsqueeze(1) > 0)
    if wrong.any():
        r, h = wrong.nonzero()[0].tolist()
        raise StepOrderError(
            f"request {r}: step starts at position {int(batch.starts[r])}, but its cache has seen {int(seen[r, h])} tokens"
        )
