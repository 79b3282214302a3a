"""Attention of one layer over a fixed-budget paged cache, for any engine: runs a planned step."""

from collections.abc import Iterator
from dataclasses import replace

import torch

from kvpop_vllm.cache.chunks import Chunks
from kvpop_vllm.cache.divided_heads import load_page_table
from kvpop_vllm.cache.pages import PageLayout, Pages, Prefix
from kvpop_vllm.cache.shares import EqualHeads
from kvpop_vllm.cache.step import Between, StepBatch
from kvpop_vllm.kernels import dispatch, ops
from kvpop_vllm.kernels.ops import RetentionRule, StepOrderError
from kvpop_vllm.requests import RequestSlots
from kvpop_vllm.rules import compress, rounds


class FixedBudgetAttention:
    """Attention of one layer: writes the cache and attends (DESIGN "The rule" and "One step").

    Args:
        layout: page layout of the layer.
        rule: retention rule of the layer.
        scale: factor on q . k.
        impl: implementation of the kernels, see :mod:`kvpop_vllm.kernels.dispatch`.
        sink_logits: ``[Hq]`` float32, logits of the model's attention sinks, or None if it has none.
    """

    def __init__(
        self,
        layout: PageLayout,
        rule: RetentionRule,
        scale: float,
        impl: str = "auto",
        sink_logits: torch.Tensor | None = None,
    ):
        self.layout, self.rule, self.scale, self.impl = layout, rule, scale, impl
        self.sink_logits = sink_logits
        self._chosen: dict[str, str] = {}

    def _implementation(self, op: str, q: torch.Tensor) -> str:
        """Return the implementation of an op, chosen by the first queries: later ones have their dtype and device."""
        if op not in self._chosen:
            self._chosen[op] = dispatch.chosen(op, self.impl, q)
        return self._chosen[op]

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
        blocks, writes = blocks or pages, batch.writes
        writes_first = len(batch.chunks) + (batch.decodes > 0) > 1 or (writes is not None and len(writes[0]))
        if batch.starts is not None and writes_first:  # a single kernel checks its requests itself
            _check_starts(pages, batch)
        if writes is not None:
            ops.write_tokens(k, v, blocks, *writes, impl=self.impl if self.impl == "triton" else "auto")
        if not batch.late:
            self._begin_tails(pages, blocks, batch)
        if batch.decodes:
            self._decode(q, k, v, pages, blocks, batch, out, gate_scores)
        if batch.late:  # tails of chunks, whose prefix a decode row may have been computing
            self._begin_tails(pages, blocks, batch)
        together = self.rule.rounds is None and not batch.chunks.compresses
        for chunks in [batch.chunks] if together else batch.once("chunks", lambda: list(self._alone(batch.chunks))):
            if len(chunks):
                self._prefill(q, k, v, pages, blocks, chunks, out, gate_scores)

    def _begin_tails(self, pages: Pages, blocks: Pages, batch: StepBatch) -> None:
        """Begin the tails that begin in a step. Arguments are as in :meth:`forward`."""
        if (begun := batch.begun) is not None:
            ops.begin_tail(pages, begun.table, begun.prefix.on(blocks), rule=self.rule, impl=self.impl)

    def _decode(self, q, k, v, pages: Pages, blocks: Pages, batch: StepBatch, out, gate_scores) -> None:
        """Run the decode rows of a step, and the rounds that are due after them; arguments as in :meth:`forward`."""
        tokens, part = batch.tokens, batch.flat
        options = {
            "rule": self.rule,
            "scale": self.scale,
            "prefix": batch.prefix and batch.prefix.on(blocks),
            "sink_logits": self.sink_logits,
            "impl": self._implementation("decode_step" if batch.drafts is None else "verify_step", q),
            **batch.options,
        }
        if batch.drafts is None:
            scores, numbers = None if gate_scores is None else gate_scores[tokens], (batch.positions, batch.budgets)
            of_rows = q[tokens], k[tokens], v[tokens]
            if batch.late and options["impl"] != "triton":
                self._write_rows(*of_rows, pages, blocks, batch)
            into = out[tokens] if isinstance(tokens, slice) else None
            outputs, _ = ops.decode_step(
                *of_rows, pages, batch.table, *numbers, gate_scores=scores, out=into, **options
            )
            if into is None:
                out[tokens] = outputs
        else:  # outputs of chunks in this part are overwritten later
            numbers = batch.positions, tokens, batch.drafts, batch.budgets
            scores = None if gate_scores is None else gate_scores[part]
            of_rows = q, k, v, out
            *of_rows, into = of_rows if (part.start, part.stop) == (0, q.shape[0]) else (x[part] for x in of_rows)
            ops.verify_step(*of_rows, pages, batch.table, *numbers, gate_scores=scores, out=into, **options)
        if self.rule.rounds is not None and not batch.late:
            tokens, rows, due = batch.once("rounds", lambda: self._rounds_of_rows(batch))
            table, seeds = batch.table[rows], None if batch.seeds is None else batch.seeds[rows]
            rounds.run_due_rounds(q[part][tokens], pages, table, due, seeds, self.rule, self.scale, self.sink_logits)

    def _write_rows(self, q, k, v, pages: Pages, blocks: Pages, batch: StepBatch) -> None:
        """Write what Triton's kernel writes: protected tokens of decode rows, and queries for votes or rounds."""
        positions, rule, size = batch.positions, self.rule, pages.layout.block_slots
        ends = torch.zeros_like(positions) if batch.prefix is None else batch.prefix.tokens
        inside = (positions >= 0) & (positions < ends)
        if batch.prefix is not None:
            protected = positions[inside]
            places = (
                batch.prefix.table[inside].gather(1, (protected // size).unsqueeze(1)).squeeze(1).long(),
                protected % size,
            )
            blocks.write(k[inside], v[inside], *places)
        stores = rule.compression or rule.rounds
        if stores is not None and stores.queries:
            stored = inside & (positions >= ends - stores.queries) if rule.compresses else positions >= ends
            if not stored.any():
                return
            states, first = (
                batch.table[stored][..., : pages.layout.state_blocks],
                rule.first_query(pages.layout.head_size),
            )
            compress.store_queries(q[stored], pages, states, positions[stored] % stores.queries, first)

    def _rounds_of_rows(self, batch: StepBatch) -> tuple[slice | torch.Tensor, slice | torch.Tensor, rounds.Due]:
        """Return the work of rounds after each token of the decode rows of a step, drafts included.

        A round needs the queries of its newest tokens. Those of drafts are stored too: if a draft is refused, the token
        in its place overwrites them before the round.

        Returns:
            Indices of the tokens in the part of the flat batch, their rows, and the work.

        Raises:
            RuntimeError: a round is due after a token of a request with drafts.
        """
        prefixes = [0] * batch.decodes if batch.prefix is None else batch.prefix.tokens.tolist()
        sizes = (numbers.tolist() for numbers in (batch.numbers["budget"], batch.budgets, batch.windows))
        groups, ends = list(map(self._rounds_of, *sizes, prefixes)), batch.positions + 1
        if batch.drafts is None:
            return batch.tokens, slice(None), rounds.due(self.rule.rounds.queries, ends.tolist(), groups)
        rows, steps = batch.drafted
        ends = (ends[rows] + steps).tolist()
        due = rounds.due(self.rule.rounds.queries, ends, [groups[r] for r in rows.tolist()])
        if late := [i for i, _ in due.rounds if batch.drafts[rows[i]] > 0]:
            raise RuntimeError(f"a round is due after token {ends[late[0]] - 1} of a request with drafts in this step")
        return batch.tokens[rows] + steps, rows, due

    def _prefill(self, q, k, v, pages: Pages, blocks: Pages, chunks: Chunks, out, gate_scores) -> None:
        """Run chunks together, and what is due at the end of one that is alone. Arguments are as in :meth:`forward`."""
        if any(chunks.follows) and self.rule.compression.adaptive_head_budgets:
            budgets, table = load_page_table(pages, chunks.table, self.rule.compression)
            chunks = replace(chunks, budgets=budgets, table=table)
        tokens, prefix = chunks.tokens, chunks.prefix and chunks.prefix.on(blocks)
        into = out[tokens] if isinstance(tokens, slice) else None
        outputs, _ = ops.prefill_chunk(
            q[tokens],
            k[tokens],
            v[tokens],
            pages,
            chunks.table,
            chunks,
            rule=self.rule,
            scale=self.scale,
            gate_scores=None if gate_scores is None else gate_scores[tokens],
            prefix=prefix,
            seeds=chunks.seeds,
            sink_logits=self.sink_logits,
            out=into,
            impl=self._implementation("prefill_chunk", q),
        )
        if into is None:
            out[tokens] = outputs
        if chunks.compresses:
            self._compress(q[tokens], pages, chunks, prefix)
        if self.rule.rounds is not None:
            due = rounds.due(self.rule.rounds.queries, chunks.ends, [self._rounds_of_chunk(chunks, 0)])
            options = self.rule, self.scale, self.sink_logits
            rounds.run_due_rounds(q[tokens], pages, chunks.table, due, chunks.seeds, *options)

    def _rounds_of_chunk(self, chunks: Chunks, r: int) -> list[rounds.EqualRoles]:
        """Return the rounds of the request of chunk r."""
        slots = chunks.slots[r]
        return self._rounds_of(slots.budget, chunks.budgets[r].tolist(), slots.window, slots.prefix)

    def _rounds_of(self, budget: int, budgets: list[int], window: int, prefix: int) -> list[rounds.EqualRoles]:
        """Return the rounds of a request whose heads have ``budgets`` in this layer."""
        return rounds.layer_rounds(self.rule.rounds.every, budget, tuple(budgets), self.rule.sinks, window, prefix)

    def _alone(self, chunks: Chunks) -> Iterator[Chunks]:
        """Yield chunks one by one, cut where rounds are due."""
        for r, (start, end) in enumerate(zip(chunks.starts, chunks.ends, strict=True)):
            cuts = [end]
            if self.rule.rounds is not None:
                cuts = rounds.cuts(self._rounds_of_chunk(chunks, r), start, end)
            for begin, cut in zip([start, *cuts], cuts, strict=False):
                yield chunks.part(r, begin, cut)

    def _compress(self, q: torch.Tensor, pages: Pages, chunk: Chunks, prefix: Prefix) -> None:
        """Store the queries ``[L, Hq, D]`` of a chunk that will vote, and compress the prompt at its end."""
        queries, (start,), (end,), prompt = self.rule.compression.queries, chunk.starts, chunk.ends, int(prefix.tokens)
        row, (after,) = chunk.table[0], chunk.after
        first = max(start, prompt - queries)
        if first < end:
            voters = torch.arange(first, end, device=q.device)
            states = row[:, : pages.layout.state_blocks].expand(len(voters), -1, -1)
            compress.store_queries(q[first - start :], pages, states, voters % queries)
        if chunk.closes[0]:
            group = q.shape[1] // pages.layout.num_kv_heads
            self._compress_prompt(pages, row, prefix, chunk.budgets[0], after, chunk.made_table[0], group)

    def _compress_prompt(
        self, pages: Pages, row, prefix: Prefix, budgets, after: RequestSlots, made_row, group
    ) -> None:
        """Compress a prompt at its end. Arguments are as in :func:`kvpop_vllm.rules.compress.compress`."""
        options = {"group": group, "rule": self.rule, "scale": self.scale, "sink_logits": self.sink_logits}
        compress.compress(pages, row, prefix, budgets, after, made_row, **options)

    def between_steps(
        self, pages: Pages, blocks: Pages, shares: EqualHeads, layer: int, due: Between, group: int
    ) -> None:
        """Do what lies between two steps of some requests: compress the prompts that have ended, and run rounds.

        Args:
            pages: pages of the layer, by block or by region.
            blocks: the layer's pages by block.
            shares: how heads share slots.
            layer: index of the layer.
            due: the requests.
            group: G.
        """
        budgets, table = due.place(shares, layer)
        if self.rule.compresses:
            for i, after in enumerate(due.after):
                prefix = due.prefix.of(slice(i, i + 1)).on(blocks)
                self._compress_prompt(pages, table[i], prefix, budgets[i], after, due.blocks.made_blocks[i], group)
        if self.rule.rounds is not None:
            sizes = zip(due.slots, budgets.tolist(), strict=True)
            by_row = [self._rounds_of(slots.budget, heads, slots.window, slots.prefix) for slots, heads in sizes]
            work = rounds.due(self.rule.rounds.queries, due.starts, by_row)
            rounds.run_rounds(pages, table, work, due.seeds, self.rule, self.scale, group, self.sink_logits)


def _check_starts(pages: Pages, batch: StepBatch) -> None:
    """Check the starts of all requests before the first kernel writes; each kernel checks only its own.

    Raises:
        StepOrderError: a request's step does not start where its cache ends.
    """
    heads = torch.arange(pages.layout.num_kv_heads, device=batch.first_pages.device)
    tokens_seen, starts = pages.position[batch.first_pages[..., -1], heads, 0], batch.starts.unsqueeze(1)  # [n, H]
    staged = pages.staged(batch.first_pages, tokens_seen)
    wrong = ((starts < tokens_seen) | (starts > tokens_seen + staged)) & (starts > 0)
    if wrong.any():
        r, h = wrong.nonzero()[0].tolist()
        staged_drafts = f" and holds {int(staged[r, h])} staged drafts" if pages.layout.drafts else ""
        raise StepOrderError(
            f"request {batch.requests[r]}: step starts at position {int(batch.starts[r])},"
            f" but its cache has seen {int(tokens_seen[r, h])} tokens{staged_drafts}"
        )
