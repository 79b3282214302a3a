"""Decode rows at fixed addresses on a device that the host must not wait for.

A CUDA graph that is recorded with them serves every later step.
"""

from collections.abc import Mapping, Sequence

import torch

from kvpop_vllm.cache.pages import PageLayout, Prefix, cdiv
from kvpop_vllm.cache.ranks import Shares
from kvpop_vllm.cache.step import DecodeRows
from kvpop_vllm.requests import KERNELS_TAKE, NUMBERS, Compression, RequestSlots

PADDING = -1
"""Position of a row of padding: nothing is read or written for it."""
NULL_BLOCK = 0
"""Block that belongs to no request."""


def leading_decodes(counts: Sequence[int], longest: int = 1) -> int:
    """Return the number of leading requests that are decoded: of up to ``longest`` tokens, or all if none has more.

    Requests without tokens are padding of a captured batch, and are decoded too. A request of few tokens after longer
    ones is a chunk, because without drafts decode rows must have the indices of their tokens.

    Args:
        counts: tokens of each request.
        longest: most tokens of a decoded request, ``1 + m``. What of them are drafts need not be known: the tokens of a
            short chunk are drafts that will all be accepted.
    """
    if max(counts, default=0) <= longest:
        return len(counts)
    return next(i for i, count in enumerate(counts) if not 1 <= count <= longest)


class DeviceRows:
    """Tensors of the requests decoded in a step, allocated once and filled before each step.

    With speculative decoding a request has up to m drafts after its first new token.

    Args:
        layout: page layout of the layers.
        default: slots of a request that asks for nothing.
        capacity: largest number of requests of a step.
        columns: largest number of blocks of a request's state and tail.
        shares: budgets of all heads if they are unequal, else None.
        device: device of all tensors.
        longest: most protected tokens of a request.
        compression: way in which prompts are compressed at their end, None if they are not.

    Attributes:
        numbers: ``[capacity]`` for each name of :data:`kvpop_vllm.requests.NUMBERS`; budgets ``[capacity, H]`` int32.
        table: ``[capacity, columns]`` int32, blocks of each request's state and tail, else :data:`NULL_BLOCK`.
        positions: ``[capacity]`` int64, :data:`PADDING` in rows of padding.
        compressed: ``[capacity]`` booleans, True for requests whose prompt has been compressed.
        prefix_table: ``[capacity, F]`` int32, prefix blocks of each request and the blocks after them.
        tokens: ``[capacity]`` int64, index of the first new token of each request in the flat batch.
        drafts: ``[capacity]`` int32, number of new tokens after the first, -1 in rows of padding and of chunks.
        written: ``[capacity, 1 + m]`` int64, index of each new token that is protected, else 0. This and the next
            two are for rows with drafts; a kernel writes protected tokens of other rows.
        token_blocks: ``[capacity, 1 + m]`` int64, block of each new token that is protected, else :data:`NULL_BLOCK`.
        token_slots: ``[capacity, 1 + m]`` int64, slot of each new token that is protected, else 0.
    """

    def __init__(
        self,
        layout: PageLayout,
        default: RequestSlots,
        capacity: int,
        columns: int,
        shares: Shares | None,
        device: torch.device | str,
        longest: int = 0,
        compression: Compression | None = None,
    ):
        self.layout, self.shares, self.protects, self.compression = layout, shares, longest > 0, compression
        self.numbers = {
            name: torch.full((capacity,), getattr(default, name) or 0, dtype=getattr(torch, dtype), device=device)
            for name, dtype in NUMBERS.items()
        }
        self.numbers["budget"] = self.numbers["budget"].unsqueeze(1).repeat(1, layout.num_kv_heads)
        self.table = torch.full((capacity, columns), NULL_BLOCK, dtype=torch.int32, device=device)
        self.positions = torch.full((capacity,), PADDING, dtype=torch.int64, device=device)
        self.compressed = torch.zeros(capacity, dtype=torch.bool, device=device)
        self._columns = torch.arange(columns, dtype=torch.int32, device=device)
        self._rows, self._steps = torch.arange(capacity, device=device), torch.arange(1 + layout.drafts, device=device)
        self.tokens, self.drafts = self._rows.clone(), torch.full((capacity,), -1, dtype=torch.int32, device=device)
        places = torch.zeros(3, capacity, 1 + layout.drafts, dtype=torch.int64, device=device)
        self.written, self.token_blocks, self.token_slots = places.unbind()
        width = cdiv(longest, layout.block_slots)
        self.prefix_table = torch.full((capacity, width), NULL_BLOCK, dtype=torch.int32, device=device)

    def fill(
        self,
        rows: int,
        lengths: torch.Tensor,
        block_table: torch.Tensor,
        slot_mapping: torch.Tensor,
        sent: Mapping[str, torch.Tensor] = {},  # noqa: B006
        firsts: torch.Tensor | None = None,
        decodes: int | None = None,
    ) -> None:
        """Fill the first ``rows`` rows, with operations on the device only.

        A row is padding if the engine gives it no length or no tokens, if its first token has no slot (-1), or if it
        has no block. The block is the prefix block of a protected token, otherwise the block of the first slot of
        the tail. Such rows occur after the requests of a captured batch, in dummy runs, and in warm-ups with
        blocks for keys and values only.

        Args:
            rows: number of rows to fill.
            lengths: ``[>= rows]`` int32, length of each request with the new tokens.
            block_table: ``[>= rows, W]`` int32, blocks of each request's prefix, state and tail.
            slot_mapping: ``[T]`` int64, -1 if a token has no slot; other values are not used.
            sent: ``[n]`` each, numbers of the step's requests by name, in pinned CPU memory. Numbers that are not
                sent keep their values.
            firsts: ``[> rows]`` int32, index of each request's first token, and their number; without speculative
                decoding None, which stands for a token of each request.
            decodes: number of rows that are decoded, by default all. The others have chunks that are computed after the
                step: of them, what is staged enters the cache.
        """
        for name, values in sent.items():
            self.numbers[name][: len(values)].copy_(values, non_blocking=True)
        prefixes, places, decoded = self.numbers["prefix"][:rows], slot_mapping[:rows], None
        starts, drafts = lengths[:rows] - 1, 0
        if firsts is not None:
            tokens, counts = firsts[:rows].long(), firsts[1 : rows + 1] - firsts[:rows]
            starts, decoded = lengths[:rows] - counts, self._rows[:rows] < (rows if decodes is None else decodes)
            places = slot_mapping[tokens.clamp_max(len(slot_mapping) - 1)]
            drafts = torch.where(decoded, counts - 1, -1)
            starts = torch.where((counts > 0) & (decoded | (starts > prefixes)), starts, PADDING)
        if self.compression is not None:
            starts = starts - self.numbers["shift"][:rows]
            self.compressed[:rows].copy_((self.numbers["left"][:rows] > 0) & (starts >= prefixes))
        tails = self._tails(block_table[:rows], prefixes)
        width, block = tails.shape[1], tails[:, self.layout.state_blocks]
        if self.protects:
            inside, prefix_blocks = self._fill_prefixes(starts, block_table[:rows])
            block = torch.where(inside[:, 0], prefix_blocks[:, 0], block)
        real = (places >= 0) & (block != NULL_BLOCK)
        positions = self.positions[:rows].copy_(torch.where(real, starts, PADDING))
        ends = positions
        if firsts is not None:
            self.tokens[:rows].copy_(tokens)
            drafts = self.drafts[:rows].copy_(torch.where(positions < 0, -1, drafts))
            ends = positions + drafts.clamp_min(0)
        # below 0 in rows of padding, which then have no blocks
        since = ends - prefixes if self.protects else ends
        blocks = self._blocks(since)
        if self.compression is not None:
            blocks = self._blocks_of_compressed(blocks, positions, since)
        in_use = self._columns[:width] < blocks.unsqueeze(1)
        self.table[:rows, :width].copy_(torch.where(in_use, tails, NULL_BLOCK))
        if self.protects and firsts is not None:
            inside &= (self._steps <= ends.unsqueeze(1) - positions.unsqueeze(1)) & (positions >= 0).unsqueeze(1)
            inside &= decoded.unsqueeze(1)
            self.written[:rows].copy_(torch.where(inside, tokens.unsqueeze(1) + self._steps, 0))
            self.token_blocks[:rows].copy_(torch.where(inside, prefix_blocks, NULL_BLOCK))
            slots = (starts.unsqueeze(1) + self._steps) % self.layout.block_slots
            self.token_slots[:rows].copy_(torch.where(inside, slots, 0))

    def _fill_prefixes(self, starts: torch.Tensor, table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Fill ``prefix_table`` and find the blocks of protected new tokens.

        Args:
            starts: ``[R]``, positions of the first new tokens.
            table: ``[R, W]``, block table of the engine.

        Returns:
            Which of the ``1 + m`` tokens from there on are protected, ``[R, 1 + m]`` booleans, and their prefix blocks,
            ``[R, 1 + m]``; other entries of these are of no use.
        """
        width, prefix_blocks = min(self.prefix_table.shape[1], table.shape[1]), table
        if self.compression is not None:  # of made slots
            left = self.numbers["left"][: len(table)] * self.compressed[: len(table)]
            columns = self._whole_blocks(left).unsqueeze(1) + torch.arange(width, device=table.device)
            prefix_blocks = table.gather(1, columns.clamp_max(table.shape[1] - 1))
        self.prefix_table[: len(table), :width].copy_(prefix_blocks[:, :width])
        positions = starts.unsqueeze(1) + self._steps
        inside = positions < self.numbers["prefix"][: len(table)].unsqueeze(1)
        # rows of padding have position -1
        columns = (positions // self.layout.block_slots).clamp(0, table.shape[1] - 1).long()
        return inside, table.gather(1, columns)

    def _tails(self, table: torch.Tensor, prefixes: torch.Tensor) -> torch.Tensor:
        """Return the blocks ``[R, columns]`` after the prefix blocks of requests with ``prefixes [R]`` tokens.

        Beyond the end of a row, its last entry is repeated.
        """
        if not self.protects:
            return table[:, : self.table.shape[1]]
        first = self._whole_blocks(prefixes)
        if self.compression is not None:
            first = first + self._whole_blocks(self.numbers["left"][: len(table)])
        return table.gather(1, (first.unsqueeze(1) + self._columns).clamp_max(table.shape[1] - 1))

    def _whole_blocks(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the number of blocks of so many tokens each."""
        return (tokens + self.layout.block_slots - 1) // self.layout.block_slots

    def _blocks_of_compressed(self, blocks: torch.Tensor, positions: torch.Tensor, since: torch.Tensor) -> torch.Tensor:
        """Return the blocks for state and slots ``[R]`` of requests whose prompts are compressed.

        Args:
            blocks: ``[R]``, those of other requests.
            positions: ``[R]``, positions of the new tokens.
            since: ``[R]``, the same from the end of the prefix on.
        """
        if self.compression.adaptive_head_budgets:
            blocks = torch.where(self.compressed[: len(blocks)] & (positions >= 0), self.table.shape[1], blocks)
        votes = (since < 0) & (since >= -self.compression.queries) & (positions >= 0)  # its query is stored
        return torch.where(votes, self.layout.state_blocks, blocks)

    def _blocks(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return an upper bound ``[R]`` of the blocks for state and slots of ``tokens + 1`` tokens.

        It is 0 where ``tokens`` is negative.
        """
        size = self.layout.block_slots
        counts = {self.numbers["budget"][: len(tokens), 0]: 1} if self.shares is None else self.shares.counts
        pages = [
            (((tokens + 1).clamp_max(budget) + size - 1) // size + self.layout.state_blocks) * many
            for budget, many in counts.items()
        ]
        heads = sum(counts.values())
        # all heads share the regions of a block, so that only the sum is rounded up
        blocks = (sum(pages) + heads - 1) // heads if heads > 1 else pages[0]
        return torch.where(tokens < 0, 0, blocks)

    def view(self, rows: int, drawn: bool, biased: bool) -> DecodeRows:
        """Return the first ``rows`` rows.

        Args:
            rows: number of decode rows.
            drawn: True if scores are drawn.
            biased: True if requests may begin with cartridges.
        """
        numbers = {name: self.numbers[name][:rows] for name in KERNELS_TAKE if drawn or name != "seed"}
        prefix = writes = drafts = None
        tokens = slice(0, rows)
        if self.layout.drafts:
            tokens, drafts = self.tokens[:rows], self.drafts[:rows]
        if self.protects:
            made_slots = self.numbers["made_slots"] if biased else None
            prefix = Prefix(None, self.prefix_table, self.numbers["prefix"], made_slots).of(slice(0, rows))
        if self.protects and self.layout.drafts:
            writes = tuple(x[:rows].flatten() for x in (self.written, self.token_blocks, self.token_slots))
        compressed = () if self.compression is None else self.compressed[:rows]
        return DecodeRows(tokens, self.table[:rows], self.positions[:rows], numbers, compressed, prefix, writes, drafts)
