"""Pages of one layer for all rows of a batch."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch.nn.functional import pad

from kvpop_vllm.attention.layer import FixedBudgetAttention
from kvpop_vllm.attention.shifted_scores import shift
from kvpop_vllm.cache.allocate import allocate_pages
from kvpop_vllm.cache.pages import PageLayout, Prefix, cdiv
from kvpop_vllm.cache.shares import EqualHeads, SharesByVotes, divided_blocks
from kvpop_vllm.cache.step import DecodeRows, RequestBlocks, Span, StepBatch, StepPlan
from kvpop_vllm.config import ConfigError
from kvpop_vllm.kernels import dispatch
from kvpop_vllm.kernels.draws import request_seed
from kvpop_vllm.kernels.ops import RetentionRule
from kvpop_vllm.requests import RequestSlots
from kvpop_vllm.rules.retained import held_behind_prompt, held_tokens


class SequenceLengths:
    """Progress of R rows on one device. Decode steps advance it there, without synchronising with the host.

    Attributes:
        positions: ``[R]`` int64, position of each row's next token.
        protected: ``[R]`` int64, p of each row.
        seeds: ``[R]`` int64, seed of the draws of each row.
        row_seeds: the same seeds, on the host.
        made: ``[R]`` int64, slots of cartridges with which each row begins, or None.
    """

    def __init__(self, seeds: list[int], device: torch.device, made: int = 0):
        self.row_seeds, self.seeds = seeds, torch.tensor(seeds, device=device)
        self.positions, self.protected = (torch.full_like(self.seeds, made) for _ in range(2))
        self.made = self.positions.clone() if made else None

    def advance(self, counts: list[int]) -> None:
        """Advance row r by ``counts[r]`` tokens."""
        one = all(count == 1 for count in counts)
        self.positions.add_(1 if one else torch.tensor(counts, device=self.positions.device))

    def restart(self) -> None:
        """Set all positions and all p to where the rows begin."""
        for each in (self.positions, self.protected):
            each.zero_() if self.made is None else each.copy_(self.made)


class LayerPages:
    """Caches of R rows in one layer.

    Args:
        rule: retention rule of the layer.
        budgets: ``[R, H]`` int32, on the CPU.
        windows: w of each row.
        like: keys ``[R, H, L, D]``, for sizes, dtype and device.
        scale: factor on q . k.
        sequence_lengths: progress of the rows on the device.
        shifted: True if the score given with token t + 1 belongs to token t.
    """

    def __init__(
        self,
        rule: RetentionRule,
        budgets: torch.Tensor,
        windows: list[int],
        like: torch.Tensor,
        scale: float,
        sequence_lengths: SequenceLengths,
        shifted: bool = False,
    ):
        rows, heads, _, size = like.shape
        self.sequence_lengths, self.shifted, self.budgets = sequence_lengths, shifted, budgets
        self.rule = rule = rule.to(like.device)
        layout, most = PageLayout(heads, size, like.dtype, state_floats=rule.state_floats(size)), int(budgets.max())
        self.divided = rule.compresses and rule.compression.adaptive_head_budgets
        if self.divided:
            most = max(most, divided_blocks(heads, most, layout.block_slots) * layout.block_slots)
        if rule.compresses and rule.compression.makes_slots:
            most += layout.block_slots  # the last blocks are those of made slots, and neither part need fill its own
        self.pages, self.table = allocate_pages(layout, most, requests=rows, device=like.device)
        self.prefix_table = torch.empty(rows, 0, dtype=torch.int32, device=like.device)
        self._budgets = budgets.contiguous().to(like.device)
        self._windows = torch.tensor(windows, dtype=torch.int32, device=like.device)
        self.attention = FixedBudgetAttention(layout, rule, scale)
        sizes = zip(budgets.amax(1).tolist(), windows, sequence_lengths.row_seeds, strict=True)
        self.slots = [RequestSlots(0, 0, *size) for size in sizes]  # prefixes are those of the last prefill

    def place(self, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor) -> None:
        """Have all rows begin with the same slots, before anything else is in their prefixes.

        Args:
            k: ``[H, P, D]``, keys.
            v: ``[H, P, D]``, values.
            bias: ``[H, P]``, biases of their logits.
        """
        rows, first, size = len(self.table), self.pages.num_blocks, self.pages.layout.block_slots
        count = k.shape[1] // size
        self._extend(count)
        for array, values in ((self.pages.k, k), (self.pages.v, v), (self.pages.score, bias)):
            array[first:] = values.to(array).unflatten(1, (count, size)).transpose(0, 1)
        blocks = torch.arange(first, first + count, dtype=torch.int32, device=k.device)
        self.prefix_table = blocks.expand(rows, -1).contiguous()
        self.slots = [slots._replace(made=k.shape[1]) for slots in self.slots]

    def _extend(self, blocks: int) -> None:
        """Add blocks behind the existing ones, which are moved."""
        raw = self.pages.raw
        self.pages = self.pages.layout.view(torch.cat([raw, raw.new_zeros(blocks, *raw.shape[1:])]))

    @property
    def prefix_room(self) -> int:
        """Number of protected tokens of a row for which pages are allocated."""
        return self.prefix_table.shape[1] * self.pages.layout.block_slots

    def protect(self, tokens: int) -> None:
        """Allocate pages for prefixes of ``tokens`` tokens in every row. Existing pages are moved.

        If the rule compresses prompts, 0 tokens free the pages of the prompts that it has compressed.
        """
        rows, have = self.prefix_table.shape
        if self.rule.compresses and not tokens and have:
            self.pages = self.pages.layout.view(self.pages.raw[: self.table[:, 0].numel()].clone())
            self.prefix_table = self.prefix_table[:, :0].clone()
        if tokens <= self.prefix_room:
            return
        more, first = cdiv(tokens, self.pages.layout.block_slots) - have, self.pages.num_blocks
        self._extend(rows * more)
        blocks = torch.arange(first, first + rows * more, dtype=torch.int32, device=self.pages.raw.device)
        self.prefix_table = torch.cat([self.prefix_table, blocks.view(rows, more)], 1)

    def decode(self, protected: list[int]) -> StepBatch:
        """Return the step of one token for every row. The rows' tails have begun.

        ``protected`` is p of each row; a rule that compresses prompts has compressed them.
        """
        rows, clock = len(self.table), self.sequence_lengths
        positions, budgets, windows, prefix = clock.positions, self._budgets, self._windows, None
        if any(protected):
            prefix = Prefix(None, self.prefix_table, clock.protected, clock.made)
        if self.rule.compresses:
            after = [slots.behind_prompt(self.rule.compression) for slots in self.slots]
            shift, made, windows = torch.tensor([(own.shift, own.made, own.window) for own in after]).unbind(1)
            positions, budgets, windows = positions - shift, budgets - made.int().unsqueeze(1), windows.int()
            prefix = Prefix(None, self._made_table, made, made) if any(made) else None
        numbers = {"budget": budgets, "window": windows, "seed": clock.seeds}
        decoded = DecodeRows(slice(0, rows), self.table[:, 0], positions, numbers, [True] * rows, prefix)
        return self._plan([], rows=decoded, checks=False).batch(self._shares)

    def prefill(self, starts: list[int], counts: list[int], length: int, protected: list[int]) -> StepBatch:
        """Return the step of the last ``counts[r]`` of the ``length`` tokens of each row r.

        Args:
            starts: position of each row's first token.
            counts: number of tokens of each row.
            length: number of columns.
            protected: p of each row. A rule that compresses prompts does so behind token p - 1.
        """
        # a rule that compresses prompts keeps the number of their tokens, which the cache forgets
        kept = [self.rule.compresses and start >= p for start, p in zip(starts, protected, strict=True)]
        told = zip(self.slots, protected, kept, strict=True)
        self.slots = [slots if past else slots._replace(prefix=p) for slots, p, past in told]
        spans = [
            Span(r, (r + 1) * length - count, start, count, slots)
            for r, (start, count, slots) in enumerate(zip(starts, counts, self.slots, strict=True))
        ]
        none = self.sequence_lengths.positions[:0]
        decoded = DecodeRows(slice(0, 0), self.table[:0, 0], none, {"budget": self._budgets[:0]})
        # tails begin one token early, because the next token may be part of a CUDA graph
        return self._plan(spans, rows=decoded, budgets=self.budgets, ahead=1).batch(self._shares)

    def _plan(self, spans: list[Span], **options) -> StepPlan:
        """Return the plan of a step; ``options`` are those of :class:`StepPlan`."""
        prefixes, made = self.prefix_table, None
        if self.rule.compresses:
            width = max(table.shape[1] for table in (prefixes, self._made_table))
            prefixes, made = (pad(x, (0, width - x.shape[1])) for x in (prefixes, self._made_table))
        blocks = RequestBlocks(self.table[:, 0], prefixes, made)
        return StepPlan(self.pages.layout, spans, blocks, self.rule.compression, **options)

    def _after_prompt(self, row: int) -> RequestSlots:
        """Return what a row is after the end of its prompt, under a rule that compresses prompts."""
        return self.slots[row].behind_prompt(self.rule.compression)

    @property
    def _made_table(self) -> torch.Tensor:
        """Blocks ``[R, P]`` of the slots that are made of the rows' prompts: those of the tails, from the last one on."""
        return self.table[:, 0].flip(1)

    @property
    def _shares(self) -> EqualHeads:
        """Shares of the heads in the slots."""
        if self.divided:
            return SharesByVotes(self.pages, self.rule.compression, int(self.budgets[0, 0]))
        return EqualHeads(self.pages.layout.num_kv_heads)

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: StepBatch, gate_scores=None
    ) -> torch.Tensor:
        """Run a step and return the attention output.

        Args:
            q: ``[R, Hq, L, D]``.
            k: ``[R, H, L, D]``.
            v: ``[R, H, L, D]``.
            batch: the step.
            gate_scores: ``[R, L, H]``, scores of the tokens, or None.

        Returns:
            ``[R, Hq, L, D]``, 0 for pads.
        """
        rows, _, length, _ = q.shape
        q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
        gate_scores = None if gate_scores is None else gate_scores.flatten(0, 1)
        pages = self.pages.by_region() if self.divided else self.pages
        if self.shifted:
            gate_scores = shift(gate_scores, pages, batch, self.rule.sinks)
        out = torch.empty_like(q) if batch.decodes else torch.zeros_like(q)
        with torch.cuda.device_of(q):  # Triton launches on the current GPU
            self.attention.forward(q, k, v, pages, batch, out, gate_scores, self.pages)
        return out.unflatten(0, (rows, length)).transpose(1, 2)

    def held(self, row: int, seen: int, protected: int) -> torch.Tensor:
        """Return which of a row's tokens are held, ``[H, seen]`` booleans on the CPU."""
        compressed = self.rule.compresses and seen >= protected
        place = 0, self.table[:, 0], [compressed] * len(self.table), self._budgets
        budgets, table = (each[row].cpu() for each in self._shares.place(*place))
        pages = self.pages.by_region() if self.divided else self.pages
        if pages.raw.device.type != "cpu":
            pages = pages.layout.view(pages.raw.cpu())
        if not compressed:
            rule = replace(self.rule, window=self.slots[row].window)
            return held_tokens(pages, table, seen, rule, budgets, protected)
        after = self._after_prompt(row)
        rule, made = replace(self.rule, window=after.window), (self.pages, self._made_table[row])
        return held_behind_prompt(pages, table, seen, rule, budgets - after.made, after, *made)

    def made_slots(self, row: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return keys and values ``[H, P, D]`` and biases ``[H, P]`` of the slots that were made of a row's prompt.

        Under a rule that makes none P is 0.
        """
        made = self._after_prompt(row).made if self.rule.compresses else 0
        slots, n = torch.arange(made), self.pages.layout.block_slots
        at = self._made_table[row].long()[slots // n], slice(None), slots % n
        return tuple(array[at].transpose(0, 1) for array in (self.pages.k, self.pages.v, self.pages.score))

    def allocated_bytes(self) -> int:
        """Return the bytes of the pages and tables of this layer."""
        return sum(
            tensor.untyped_storage().nbytes()
            for tensor in (self.pages.raw, self.table, self.prefix_table, self._budgets, self._windows)
        )


class LayerRows(LayerPages):
    """Caches of R rows of one layer that are driven with its q, k and v, without a model.

    Args:
        rule: retention rule of the layer.
        budget: B of all heads, or of each, ``[H]`` int32.
        like: keys ``[R, H, L, D]``, for sizes and dtype.
        scale: factor on q . k.
        protected: p, tokens of each row that are never evicted, or compressed.
        shifted: True if the score given with token t + 1 belongs to token t.
        seed: seed of the draws.

    Attributes:
        seen: tokens of each row so far.
    """

    def __init__(
        self,
        rule: RetentionRule,
        budget: int | torch.Tensor,
        like: torch.Tensor,
        scale: float,
        *,
        protected: int = 0,
        shifted: bool = False,
        seed: int = 0,
    ):
        rows, heads = like.shape[:2]
        budgets = torch.as_tensor(budget, dtype=torch.int32).expand(rows, heads)
        lengths = SequenceLengths([request_seed(0, seed)] * rows, like.device)
        super().__init__(rule, budgets, [rule.window] * rows, like, scale, lengths, shifted)
        self.protect(protected)
        lengths.protected.fill_(protected)
        self.seen, self.protected = 0, [protected] * rows

    def append(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, gate_scores: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the attention of the next tokens of each row; a single token is a decode step.

        Arguments and result are those of :meth:`attend`.
        """
        rows, _, length, _ = q.shape
        counts, starts = [length] * rows, [self.seen] * rows
        decodes = length == 1 and self.seen >= self.protected[0]
        batch = self.decode(self.protected) if decodes else self.prefill(starts, counts, length, self.protected)
        out = self.attend(q, k, v, batch, gate_scores)
        self.sequence_lengths.advance(counts)
        self.seen += length
        return out

    def held_by_rows(self) -> torch.Tensor:
        """Return which tokens are held, ``[R, H, seen]`` booleans on the CPU."""
        return torch.stack([self.held(row, self.seen, p) for row, p in enumerate(self.protected)])


def recording(device: torch.device) -> bool:
    """Return whether operations on the device are recorded into a CUDA graph now, and not executed."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def check_kernels(k: torch.Tensor, rule: RetentionRule) -> None:
    """Check that a layer's device has kernels for keys ``k [R, H, L, D]`` under its rule; a CPU always has.

    Raises:
        ConfigError: a GPU has none.
    """
    if k.device.type != "cuda":
        return
    if rule.rounds is not None:
        raise ConfigError(
            "this policy makes its scores anew in rounds, which only a CPU does: move the model to the CPU"
        )
    if rule.compresses:
        raise ConfigError(
            "this policy compresses prompts at their end, which only a CPU does: move the model to the CPU"
        )
    if torch.version.hip is not None or torch.cuda.get_device_capability(k.device) < (8, 0):
        raise ConfigError(
            "GPU kernels are for NVIDIA's from compute capability 8.0 on: move the model to another GPU or the CPU"
        )
    if {dispatch.select(op, k) for op in ("prefill_chunk", "decode_step")} != {"triton"}:
        raise ConfigError(
            f"there are no GPU kernels for keys of {k.dtype} and size {k.shape[-1]}: Triton must be there, and takes float32, float16"
            " and bfloat16 of up to 256; change the model's dtype, or move it to the CPU"
        )
