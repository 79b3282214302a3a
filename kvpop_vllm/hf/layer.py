"""Pages of one layer for all rows of a batch."""

from __future__ import annotations

from dataclasses import replace

import torch

from kvpop_vllm.attention.allocate import allocate_pages
from kvpop_vllm.attention.shifted_scores import shift
from kvpop_vllm.attention.step_batch import FixedBudgetAttention, PrefillChunk, Protection, StepBatch, protection_of
from kvpop_vllm.config import ConfigError
from kvpop_vllm.kernels import dispatch
from kvpop_vllm.kernels.ops import RetentionRule
from kvpop_vllm.kernels.pages import PageLayout, cdiv
from kvpop_vllm.kernels.retained import held_tokens


class SequenceLengths:
    """Progress of R rows on one device. Decode steps advance it there, without synchronising with the host.

    Attributes:
        positions: ``[R]`` int64, position of each row's next token.
        protected: ``[R]`` int64, p of each row.
        seeds: ``[R]`` int64, seed of the draws of each row.
    """

    def __init__(self, rows: int, device: torch.device, seeds: list[int]):
        self.positions = torch.zeros(rows, dtype=torch.int64, device=device)
        self.protected = torch.zeros(rows, dtype=torch.int64, device=device)
        self.seeds = torch.tensor(seeds, device=device)

    def advance(self, counts: list[int]) -> None:
        """Advance row r by ``counts[r]`` tokens."""
        one = all(count == 1 for count in counts)
        self.positions.add_(1 if one else torch.tensor(counts, device=self.positions.device))

    def restart(self) -> None:
        """Set all positions and all p to 0."""
        self.positions.zero_()
        self.protected.zero_()


class LayerPages:
    """Caches of R rows in one layer.

    Args:
        rule: retention rule of the layer.
        budgets: ``[R, H]`` int32, on the CPU.
        windows: w of each row.
        like: keys ``[R, H, L, D]``, for sizes, dtype and device.
        scale: factor on q . k.
        sequence_lengths: clock of the device.
        seeds: seed of the draws of each row.
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
        seeds: list[int],
        shifted: bool,
    ):
        rows, heads, _, size = like.shape
        self.sequence_lengths, self.shifted, self.budgets, self.windows, self.seeds = (
            sequence_lengths,
            shifted,
            budgets,
            windows,
            seeds,
        )
        self.rule = rule = rule.to(like.device)
        layout = PageLayout(heads, size, like.dtype, state_floats=rule.state_floats(size))
        self.pages, self.table = allocate_pages(layout, int(budgets.max()), requests=rows, device=like.device)
        self.prefix_table = torch.empty(rows, 0, dtype=torch.int32, device=like.device)
        self._budgets = budgets.contiguous().to(like.device)
        self._windows = torch.tensor(windows, dtype=torch.int32, device=like.device)
        self.attention = FixedBudgetAttention(layout, rule, scale)

    @property
    def prefix_room(self) -> int:
        """Number of protected tokens of a row for which pages are allocated."""
        return self.prefix_table.shape[1] * self.pages.layout.block_slots

    def protect(self, tokens: int) -> None:
        """Allocate pages for prefixes of ``tokens`` tokens in every row. Existing pages are moved."""
        if tokens <= self.prefix_room:
            return
        rows, have = self.prefix_table.shape
        more = cdiv(tokens, self.pages.layout.block_slots) - have
        raw, first = self.pages.raw, self.pages.num_blocks
        self.pages = self.pages.layout.view(torch.cat([raw, raw.new_zeros(rows * more, *raw.shape[1:])]))
        blocks = torch.arange(first, first + rows * more, dtype=torch.int32, device=raw.device)
        self.prefix_table = torch.cat([self.prefix_table, blocks.view(rows, more)], 1)

    def decode(self, protected: list[int]) -> StepBatch:
        """Return the step of one token for every row. The rows' tails have begun.

        ``protected`` is p of each row.
        """
        rows, positions = len(self.table), self.sequence_lengths.positions
        none, protection = positions[:0], None
        if any(protected):
            protection = Protection(
                self.prefix_table,
                self.sequence_lengths.protected,
                none,
                none,
                none,
                self.table[:0],
                self.prefix_table[:0],
                none,
            )
        sizes = self._budgets, self._windows
        return StepBatch(
            rows, slice(0, rows), self.table, positions, *sizes, (), none, none, protection, self.sequence_lengths.seeds
        )

    def prefill(self, starts: list[int], counts: list[int], length: int, protected: list[int]) -> StepBatch:
        """Return the step of the last ``counts[r]`` of the ``length`` tokens of each row r.

        Args:
            starts: position of each row's first token.
            counts: number of tokens of each row.
            length: number of columns.
            protected: p of each row.
        """
        busy = [r for r, count in enumerate(counts) if count]
        spans = [((r + 1) * length - count, starts[r], count) for r, count in enumerate(counts)]
        chunks = [
            PrefillChunk(
                first,
                first + count,
                start,
                self.table[r],
                self._budgets[r].clone(),
                self.windows[r],
                protected[r],
                self.prefix_table[r],
                self.seeds[r],
            )
            for r, (first, start, count) in enumerate(spans)
            if count
        ]
        device, none = self.table.device, self.sequence_lengths.positions[:0]
        zero = torch.tensor(busy, dtype=torch.int64, device=device), slice(None), self.pages.layout.state_blocks
        goes_on = [starts[r] if starts[r] > protected[r] else 0 for r in busy]
        first = torch.tensor(goes_on, dtype=torch.int64, device=device)
        size, protection = self.pages.layout.block_slots, None
        if any(protected):
            # tails begin one token early, because the next token may be part of a CUDA graph
            protection = protection_of(size, spans, protected, self.prefix_table, self.table, slice(0, 0), ahead=1)
        own = self.table[:0], none, self._budgets[:0], self._windows[:0]
        return StepBatch(0, slice(0, 0), *own, tuple(chunks), first, self.table[zero].long(), protection)

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
        if self.shifted:
            gate_scores = shift(gate_scores, self.pages, batch, self.rule.sinks)
        out = torch.empty_like(q) if batch.decodes else torch.zeros_like(q)
        with torch.cuda.device_of(q):  # Triton launches on the current GPU
            self.attention.forward(q, k, v, self.pages, batch, out, gate_scores)
        return out.unflatten(0, (rows, length)).transpose(1, 2)

    def held(self, row: int, seen: int, protected: int) -> torch.Tensor:
        """Return which of a row's tokens are held, ``[H, seen]`` booleans on the CPU."""
        pages = self.pages
        if pages.raw.device.type != "cpu":
            pages = pages.layout.view(pages.raw.cpu())
        rule = replace(self.rule, window=self.windows[row])
        return held_tokens(pages, self.table[row].cpu(), seen, rule, self.budgets[row], protected)

    def allocated_bytes(self) -> int:
        """Return the bytes of the pages and tables of this layer."""
        return sum(
            tensor.untyped_storage().nbytes()
            for tensor in (self.pages.raw, self.table, self.prefix_table, self._budgets, self._windows)
        )


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
    if torch.version.hip is not None or torch.cuda.get_device_capability(k.device) < (8, 0):
        raise ConfigError(
            "GPU kernels are for NVIDIA's from compute capability 8.0 on: move the model to another GPU or the CPU"
        )
    if {dispatch.select(op, k) for op in ("prefill_chunk", "decode_step")} != {"triton"}:
        raise ConfigError(
            f"there are no GPU kernels for keys of {k.dtype} and size {k.shape[-1]}: Triton must be there, and takes float32, float16"
            " and bfloat16 of up to 256; change the model's dtype, or move it to the CPU"
        )
