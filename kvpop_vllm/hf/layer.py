"""Pages of one layer for all rows of a batch.

Bad input raises a :class:`~kvpop_vllm.config.ConfigError` that names what to change.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace

import torch
from torch.nn.functional import pad

from kvpop_vllm.attention.layer import FixedBudgetAttention
from kvpop_vllm.attention.shifted_scores import shift
from kvpop_vllm.cache.allocate import allocate_pages
from kvpop_vllm.cache.divided_heads import SharesByVotes, divided_blocks
from kvpop_vllm.cache.pages import PageLayout, Pages, Prefix, cdiv
from kvpop_vllm.cache.shares import EqualHeads, HeadBudgets
from kvpop_vllm.cache.step import DecodeRows, RequestBlocks, Span, StepBatch, StepPlan, numbers_of
from kvpop_vllm.config import ConfigError
from kvpop_vllm.kernels.draws import request_seed
from kvpop_vllm.kernels.ops import RetentionRule
from kvpop_vllm.requests import RequestSlots
from kvpop_vllm.rules.retained import held_after_prompt, held_tokens


class SequenceLengths:
    """Progress of R rows on one device. Decode steps advance it there, without synchronising with the host.

    Args:
        requests: record of each row. All begin with equally many made slots.
        device: device of the tensors.

    Attributes:
        requests: record of each row on the host. Prefixes are those of the last prefill.
        positions: ``[R]`` int64, position of each row's next token.
        protected: ``[R]`` int64, p of each row.
        made_counts: ``[R]`` int64, slots of cartridges with which each row begins, or None.
        numbers: ``[R]`` each, numbers that kernels take, by name.
    """

    def __init__(self, requests: list[RequestSlots], device: torch.device):
        self.requests = requests
        self.numbers = {name: tensor.to(device) for name, tensor in numbers_of(requests).items()}
        made_counts = torch.tensor([record.made_slots for record in requests], device=device)
        self.positions, self.protected = made_counts.clone(), made_counts.clone()
        self.made_counts = made_counts if any(record.made_slots for record in requests) else None

    def advance(self, counts: list[int]) -> None:
        """Advance row r by ``counts[r]`` tokens."""
        single = all(count == 1 for count in counts)
        # a number needs no copy from the host, so that a decode step does not wait
        self.positions.add_(1 if single else torch.tensor(counts, device=self.positions.device))

    def allocated_bytes(self) -> int:
        """Return the bytes of the tensors."""
        return sum(tensor.nbytes for tensor in (self.positions, self.protected, *self.numbers.values()))

    def restart(self) -> None:
        """Set all positions and all p to where the rows begin."""
        for numbers in (self.positions, self.protected):
            numbers.zero_() if self.made_counts is None else numbers.copy_(self.made_counts)


class LayerPages:
    """Caches of R rows in one layer.

    Args:
        rule: retention rule of the layer.
        budgets: B ``[H]`` of each head, by the row's B, None if all heads have their row's.
        like: keys ``[R, H, L, D]``, for sizes, dtype and device.
        scale: factor on q . k.
        sequence_lengths: progress of the rows on the device.
        shifted: True if the score given with token t + 1 belongs to token t.
    """

    def __init__(
        self,
        rule: RetentionRule,
        budgets: Mapping[int, Sequence[int]] | None,
        like: torch.Tensor,
        scale: float,
        sequence_lengths: SequenceLengths,
        shifted: bool = False,
    ):
        rows, heads, _, size = like.shape
        self.sequence_lengths, self.shifted = sequence_lengths, shifted
        self.rule = rule = rule.to(like.device)
        layout = PageLayout(heads, size, like.dtype, state_floats=rule.state_floats(size))
        by_row = [record.budget for record in sequence_lengths.requests]
        self._budget = max_slots = max(by_row if budgets is None else map(max, budgets.values()))
        self.divided = rule.compresses and rule.compression.adaptive_head_budgets
        if self.divided:
            max_slots = max(max_slots, divided_blocks(heads, max_slots, layout.block_slots) * layout.block_slots)
        if rule.compresses and rule.compression.makes_slots:
            max_slots += (
                layout.block_slots
            )  # the last blocks are those of made slots, and neither part need fill its own
        self.pages, self.table = allocate_pages(layout, max_slots, requests=rows, device=like.device)
        self.prefix_table = torch.empty(rows, 0, dtype=torch.int32, device=like.device)
        self.attention = FixedBudgetAttention(layout, rule, scale)
        self._equal = EqualHeads(heads) if budgets is None else HeadBudgets(budgets, like.device)

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
        # all rows read the same blocks, which nothing writes to
        self.prefix_table = blocks.expand(rows, -1).contiguous()

    def _extend(self, blocks: int) -> None:
        """Add blocks after the existing ones, which are moved."""
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
        # the prompts are compressed, and the pages that held them are freed
        if self.rule.compresses and not tokens and have:
            self.pages = self.pages.layout.view(self.pages.raw[: self.table[:, 0].numel()].clone())
            self.prefix_table = self.prefix_table[:, :0].clone()
        if tokens <= self.prefix_room:
            return
        missing, first = cdiv(tokens, self.pages.layout.block_slots) - have, self.pages.num_blocks
        self._extend(rows * missing)
        blocks = torch.arange(first, first + rows * missing, dtype=torch.int32, device=self.pages.raw.device)
        self.prefix_table = torch.cat([self.prefix_table, blocks.view(rows, missing)], 1)

    def tables(self, cartridge_slots: int, protected: int) -> dict[str, torch.Tensor]:
        """Return the blocks of the rows' tails ``[R, P]``, and of their prefixes ``[R, Q]`` after what cartridges hold.

        Args:
            cartridge_slots: slots of cartridges.
            protected: tokens of the longest prefix, these slots included.
        """
        size = self.pages.layout.block_slots
        prefixes = self.prefix_table[:, cartridge_slots // size : cdiv(protected, size)]
        return {"tail": self.table[:, 0].long(), "prefix": prefixes.long()}

    def check_filled(self, source: str) -> None:
        """Check the numbers of filled slots that a rule with a threshold stores. ``source`` names their file."""
        if self.rule.threshold is None:
            return
        layout = self.pages.layout
        filled = self.pages.position[self.table[:, 0, layout.state_blocks].long()][..., 1]
        slots = (self.table.shape[2] - layout.state_blocks) * layout.block_slots
        if bool(((filled < 0) | (filled > slots - self.rule.window)).any()):
            raise ConfigError(f"{source} says that more slots are filled than there are: save the cache again")

    def clear(self, cartridge_slots: int) -> None:
        """Set all blocks to 0 but those of cartridges, which hold the first slots."""
        for table in self.tables(cartridge_slots, self.prefix_room).values():
            self.pages.raw[table] = 0

    @property
    def plan_key(self) -> Hashable:
        """Key of layers that have the same plan of a step: their pages have the same numbers."""
        return self.pages.raw.device, self.pages.layout, self.table.shape

    def plan_decode(self, protected: list[int]) -> StepPlan:
        """Return the plan of a step of one token for every row. The rows' tails have begun.

        ``protected`` is p of each row. A rule that compresses prompts has compressed them.
        """
        rows, lengths = len(self.table), self.sequence_lengths
        positions, numbers, prefix = lengths.positions, lengths.numbers, None
        if any(protected):
            prefix = Prefix(None, self.prefix_table, lengths.protected, lengths.made_counts)
        if self.rule.compresses:
            after = [self.rule.compression.after(record) for record in lengths.requests]
            shift, made_counts = torch.tensor([(record.shift, record.made_slots) for record in after]).unbind(1)
            positions, numbers = positions - shift, numbers_of(after)
            prefix = Prefix(None, self._made_table, made_counts, made_counts) if any(made_counts) else None
        decoded = DecodeRows(slice(0, rows), self.table[:, 0], positions, numbers, [True] * rows, prefix)
        return StepPlan(self.pages.layout, [], self._blocks, rows=decoded, checks=False)

    def plan_prefill(self, starts: list[int], counts: list[int], length: int, protected: list[int]) -> StepPlan:
        """Return the plan of a step of the last ``counts[r]`` of the ``length`` tokens of each row r.

        Args:
            starts: position of each row's first token.
            counts: number of tokens of each row.
            length: number of columns.
            protected: p of each row. A rule that compresses prompts does so after token p - 1.
        """
        lengths, compression = self.sequence_lengths, self.rule.compression
        # a rule that compresses prompts keeps the number of their tokens, which the cache forgets
        lengths.requests = [
            record if compression is not None and start >= p else record._replace(prefix=p)
            for record, start, p in zip(lengths.requests, starts, protected, strict=True)
        ]
        spans = [
            Span(r, (r + 1) * length - count, start, count, record, compression and compression.after(record))
            for r, (start, count, record) in enumerate(zip(starts, counts, lengths.requests, strict=True))
        ]
        decoded = DecodeRows(slice(0, 0), self.table[:0, 0], lengths.positions[:0], lengths.numbers)
        # tails begin one token early, because the next token may be part of a CUDA graph
        return StepPlan(self.pages.layout, spans, self._blocks, rows=decoded, ahead=1)

    @property
    def _blocks(self) -> RequestBlocks:
        """Blocks of the rows."""
        prefixes, made_blocks = self.prefix_table, None
        if self.rule.compresses:
            width = max(table.shape[1] for table in (prefixes, self._made_table))
            prefixes, made_blocks = (pad(x, (0, width - x.shape[1])) for x in (prefixes, self._made_table))
        return RequestBlocks(self.table[:, 0], prefixes, made_blocks)

    def _after_prompt(self, row: int) -> RequestSlots:
        """Return what a row is after the end of its prompt, under a rule that compresses prompts."""
        return self.rule.compression.after(self.sequence_lengths.requests[row])

    @property
    def _made_table(self) -> torch.Tensor:
        """Blocks ``[R, P]`` of the slots that are made of the rows' prompts: the tails' from the last one on."""
        # the tail fills its blocks from the first one on, and made slots from the last
        return self.table[:, 0].flip(1)

    @property
    def _addressed(self) -> Pages:
        """Pages as the kernels address them: heads that divide their slots have blocks of their own."""
        return self.pages.by_region() if self.divided else self.pages

    @property
    def shares(self) -> EqualHeads:
        """Shares of the heads in the slots, those of layer 0."""
        return SharesByVotes(self.pages, self.rule.compression, self._budget) if self.divided else self._equal

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: StepBatch, gate_scores=None, sink_logits=None
    ) -> torch.Tensor:
        """Run a step and return the attention output.

        Args:
            q: ``[R, Hq, L, D]``.
            k: ``[R, H, L, D]``.
            v: ``[R, H, L, D]``.
            batch: the step.
            gate_scores: ``[R, L, H]``, scores of the tokens, or None.
            sink_logits: ``[Hq]``, logits of the model's attention sinks, or None.

        Returns:
            ``[R, Hq, L, D]``, 0 for pads.
        """
        rows, _, length, _ = q.shape
        q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
        gate_scores = None if gate_scores is None else gate_scores.flatten(0, 1)
        pages = self._addressed
        if self.shifted:
            # the score of token t comes with token t + 1
            gate_scores = shift(gate_scores, pages, batch, self.rule.sinks)
        # pads of a prefill are not written, and must not be NaN
        out = torch.empty_like(q) if batch.decodes else torch.zeros_like(q)
        if sink_logits is not None:  # of this pass, since weights may change
            sink_logits = sink_logits.detach().to(q.device, torch.float32).contiguous()
        self.attention.sink_logits = sink_logits
        with torch.cuda.device_of(q):  # Triton launches on the current GPU
            self.attention.forward(q, k, v, pages, batch, out, gate_scores, self.pages)
        return out.unflatten(0, (rows, length)).transpose(1, 2)

    def held(self, row: int, length: int, protected: int) -> torch.Tensor:
        """Return which of a row's tokens are held, ``[H, length]`` booleans on the CPU."""
        compressed, record = self.rule.compresses and length >= protected, self.sequence_lengths.requests[row]
        place = (
            self.table[row : row + 1, 0],
            [compressed],
            torch.tensor([record.budget], dtype=torch.int32),
            [record.window],
        )
        budgets, table = (tensor[0].cpu() for tensor in self.shares.place(0, *place))
        pages = self._addressed
        # one copy instead of many small ones
        if pages.raw.device.type != "cpu":
            pages = pages.layout.view(pages.raw.cpu())
        if not compressed:
            rule = replace(self.rule, window=record.window)
            return held_tokens(pages, table, length, rule, budgets, protected)
        after = self._after_prompt(row)
        rule, made_pages = replace(self.rule, window=after.window), (self.pages, self._made_table[row])
        return held_after_prompt(pages, table, length, rule, budgets - after.made_slots, after, *made_pages)

    def made_slots(self, row: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return keys and values ``[H, P, D]`` and biases ``[H, P]`` of the slots that were made of a row's prompt.

        Under a rule that makes none P is 0.
        """
        count = self._after_prompt(row).made_slots if self.rule.compresses else 0
        slots, n = torch.arange(count), self.pages.layout.block_slots
        index = self._made_table[row].long()[slots // n], slice(None), slots % n
        return tuple(array[index].transpose(0, 1) for array in (self.pages.k, self.pages.v, self.pages.score))

    def allocated_bytes(self) -> int:
        """Return the bytes of the pages and block tables of this layer."""
        return sum(tensor.untyped_storage().nbytes() for tensor in (self.pages.raw, self.table, self.prefix_table))


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
        row_budget: B of the rows, the mean of all heads of the model, by default the mean of ``budget``.

    Attributes:
        tokens_seen: tokens of each row so far.
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
        row_budget: int | None = None,
    ):
        rows, heads = like.shape[0], budget.tolist() if isinstance(budget, torch.Tensor) else [budget]
        row_budget = sum(heads) // len(heads) if row_budget is None else row_budget
        budgets = {row_budget: heads} if isinstance(budget, torch.Tensor) else None
        record = RequestSlots(0, 0, row_budget, rule.window, request_seed(0, seed))
        lengths = SequenceLengths([record] * rows, like.device)
        super().__init__(rule, budgets, like, scale, lengths, shifted)
        self.protect(protected)
        lengths.protected.fill_(protected)
        self.tokens_seen, self.protected = 0, [protected] * rows

    def append(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        gate_scores: torch.Tensor | None = None,
        sink_logits: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the attention of the next tokens of each row. A single token is a decode step.

        Arguments and result are those of :meth:`attend`.
        """
        rows, _, length, _ = q.shape
        counts, starts = [length] * rows, [self.tokens_seen] * rows
        decodes = length == 1 and self.tokens_seen >= self.protected[0]
        step = starts, counts, length, self.protected
        plan = self.plan_decode(self.protected) if decodes else self.plan_prefill(*step)
        out = self.attend(q, k, v, plan.batch(self.shares), gate_scores, sink_logits)
        self.sequence_lengths.advance(counts)
        self.tokens_seen += length
        return out

    def held_by_rows(self) -> torch.Tensor:
        """Return which tokens are held, ``[R, H, tokens_seen]`` booleans on the CPU."""
        return torch.stack([self.held(row, self.tokens_seen, p) for row, p in enumerate(self.protected)])


def recording(device: torch.device) -> bool:
    """Return whether operations on the device are recorded into a CUDA graph now, and not executed."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
