"""Layout of the chunks that are prefilled together, worked out once per step for all layers.

Chunks are cut into *segments*, parts of one request, that are put together into pieces of bounded size. All numbers of
a piece are on the device, so that each kernel is launched once for all its segments, one after another on three axes:

- tail rows ``[P]``: tokens after the protected prefixes, for each segment a multiple of :data:`ROWS`;
- keys ``[N]``: slots in use before the piece, then new tokens of the tail;
- entries ``[E]``: long-range slots that may be in use after the piece, then tokens that leave the window, for each
  segment a multiple of :data:`WIDTH`.

Positions within a segment count from the first token of its tail. Query 0 is the first new token of the tail.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from kvpop_vllm.cache.chunks import Chunks, send
from kvpop_vllm.cache.pages import cdiv
from kvpop_vllm.kernels.ops import RetentionRule

PIECE = 32768
"""Tail rows and slots in use, beyond those of one segment, whose scores and keys are in memory at once."""
WIDTH = 1024
"""Entries that a program looks at together."""
LARGEST_CHUNK = 64
"""Most tokens of a chunk of an mLSTM. Longer chunks are split, which gives the same result."""
ROWS = LARGEST_CHUNK
"""Tail rows of a program."""
LAST = tl.constexpr(2**31 - 1)
"""Eviction time of a token that is not evicted within its piece."""


class Numbers(NamedTuple):
    """Numbers of a segment; there are 16, so that what follows them is aligned to 16 bytes."""

    request: Any
    position: Any  # of its first token,
    token: Any  # which has this index in the batch
    inside: Any  # tokens below p
    length: Any  # tokens of the tail
    start: Any  # tokens of the tail before it
    first: Any  # p
    sinks: Any
    window: Any
    row: Any  # first tail row
    key: Any  # first key
    used: Any  # slots in use
    entry: Any  # first entry
    filled: Any  # long-range slots that may be in use afterwards
    leaving: Any  # tokens that leave the window
    biased: Any  # leading protected tokens that have a bias


@triton.jit
def numbers_of(segments, s):
    """Return the numbers of segment s of ``segments [S, 16]``, of which those that are not used are not loaded."""
    base = segments + 16 * s
    return Numbers(
        tl.load(base), tl.load(base + 1), tl.load(base + 2), tl.load(base + 3), tl.load(base + 4),
        tl.load(base + 5), tl.load(base + 6), tl.load(base + 7), tl.load(base + 8), tl.load(base + 9),
        tl.load(base + 10), tl.load(base + 11), tl.load(base + 12), tl.load(base + 13), tl.load(base + 14),
        tl.load(base + 15),
    )  # fmt: skip


@triton.jit
def block_of(segments, blocks, block):
    """Return the numbers of a block's segment, and the index of the block's first token within the segment."""
    return numbers_of(segments, tl.load(blocks + 2 * block)), tl.load(blocks + 2 * block + 1)


Segment = tuple[Numbers, list[int]]
"""Numbers of a segment, and k of each head."""


def segment(topk, count: int, *, request=0, token=0, position=0, protected=0, sinks=0, window=1, biased=0) -> Segment:
    """Return the segment of the tokens ``[token, token + count)`` of the batch, from ``position`` on, after p tokens.

    Where heads differ, its numbers are those of the head with most slots. :class:`Piece` sets row, key and entry.
    """
    inside = min(max(protected - position, 0), count)
    length, start = count - inside, max(position - protected, 0)
    before, after = (max(0, q - window - sinks) for q in (start, start + length))  # have left the window
    used, filled = min(start, sinks + window + max(topk)), min(after, max(topk))
    leading = request, position, token, inside, length, start, protected, sinks, window
    return Numbers(*leading, 0, 0, used, 0, filled, after - before, biased), topk


def pieces_of(
    chunks: Chunks, rule: RetentionRule, protected: list[int], biased: list[int], device: torch.device
) -> list[Piece]:
    """Return the pieces of the chunks; if the rule is sequential, only tokens below p are in their segments.

    Each request has ``protected`` tokens, of which the first ``biased`` ones have a bias.
    """
    pieces, room, first, budgets = [[]], PIECE, 0, chunks.budgets.tolist()
    for r, (position, length, window) in enumerate(zip(chunks.starts, chunks.lengths, chunks.windows, strict=True)):
        p, topk = protected[r], [budget - rule.sinks - window for budget in budgets[r]]
        total = min(length, max(0, p - position)) if rule.sequential else length
        for done in range(0, total, PIECE):
            count = min(total - done, PIECE)
            part = segment(
                topk, count, request=r, token=first + done, position=position + done, protected=p,
                sinks=rule.after_prefix(p).sinks, window=window, biased=biased[r],
            )  # fmt: skip
            needed_room = cdiv(count, ROWS) * ROWS + part[0].used  # rows even for tokens of the prefix
            if pieces[-1] and needed_room > room:
                pieces.append([])
                room = PIECE
            pieces[-1].append(part)
            room -= needed_room
        first += length
    return [Piece(parts, device) for parts in pieces if parts]


class Piece:
    """Segments that are processed together, with their numbers on the device.

    Attributes:
        segments: ``[S, 16]`` int32, :class:`Numbers`.
        topk: ``[S, H]`` int32, long-range slots of each head.
        rows, keys, entries: P, N and E.
        most_keys, most_slots, most_entries: largest numbers of keys, slots and entries of a segment.
        width: WIDTH.
        evicts: False if no head has more candidates than long-range slots.
        lines: numbers of each segment.
    """

    def __init__(self, parts: list[Segment], device: torch.device):
        lines, row, key, entry, self.width = [], 0, 0, 0, WIDTH
        for part, _ in parts:
            lines.append(part._replace(row=row, key=key, entry=entry))
            row += cdiv(part.length, ROWS) * ROWS
            key += part.used + part.length
            entry += cdiv(part.filled + part.leaving, WIDTH) * WIDTH
        self.device, self.lines, self.heads = device, lines, len(parts[0][1])
        self.segments, self.topk = (
            send(numbers, device, torch.int32) for numbers in (lines, [topk for _, topk in parts])
        )
        self.rows, self.keys, self.entries = row, key, entry
        self.most_keys = max(part.used + part.inside + part.length for part, _ in parts)
        self.most_slots = max(part.sinks + part.window + max(topk) for part, topk in parts)
        self.most_entries = max(part.filled + part.leaving for part, _ in parts)
        self.evicts = any(part.start + part.length > part.sinks + part.window + min(topk) for part, topk in parts)
        self._blocks = {}

    def __len__(self) -> int:
        return len(self.lines)

    def blocks(self, size: int | None = None) -> torch.Tensor:
        """Return blocks ``[blocks, 2]`` int32, segment and first token, of ``size`` tokens or else ROWS tail rows."""
        if size not in self._blocks:
            counts = (part.length + (part.inside if size else 0) for part in self.lines)
            pairs = [(s, first) for s, count in enumerate(counts) for first in range(0, count, size or ROWS)]
            self._blocks[size] = send(pairs, self.device, torch.int32)
        return self._blocks[size]

    def no_counts(self, blocks: int) -> torch.Tensor:
        """Return numbers of listed keys ``[H, blocks, 2]`` int32 where no tail has any, formed once."""
        if (key := ("counts", blocks)) not in self._blocks:
            self._blocks[key] = torch.zeros(self.heads, blocks, 2, dtype=torch.int32, device=self.device)
        return self._blocks[key]

    @cached_property
    def gone(self) -> torch.Tensor:
        """Eviction times of keys ``[H, N]`` int32; where layers write any, all of them do."""
        return torch.full((self.heads, self.keys), LAST.value, dtype=torch.int32, device=self.device)

    @cached_property
    def slot_of(self) -> torch.Tensor:
        """Slots ``[H, P]`` int32 of the tokens that leave the window with rows, -1 if there is none or it is evicted."""
        return torch.full((self.heads, self.rows), -1, dtype=torch.int32, device=self.device)

    @cached_property
    def candidates(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Workspaces ``[H, E]`` of scores, float32, and positions and free slots, int32, for one layer after another."""
        scores = torch.empty(self.heads, self.entries, dtype=torch.float32, device=self.device)
        return scores, *(torch.empty_like(scores, dtype=torch.int32) for _ in range(2))

    @cached_property
    def order(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Workspaces ``[H, E]`` of eviction times, int32, and priorities, float64, as they come and in order."""
        times = torch.empty(self.heads, self.entries, dtype=torch.int32, device=self.device)
        return times, *(torch.empty_like(times, dtype=torch.float64) for _ in range(2))

    @cached_property
    def tail_rows(self) -> torch.Tensor:
        """Token of the batch ``[P]`` int64 of each tail row; of a row that holds none, the last one of its segment."""
        numbers = Numbers(*self.segments.T.long())
        owner, first = self.blocks().long().unbind(1)
        index = first.unsqueeze(1) + torch.arange(ROWS, device=first.device)
        last = (numbers.length[owner] - 1).unsqueeze(1)
        return ((numbers.token + numbers.inside)[owner].unsqueeze(1) + index.minimum(last)).flatten()

    @cached_property
    def ends(self) -> torch.Tensor:
        """Numbers of blocks of :data:`ROWS` rows before each segment, and in all, ``[S + 1]`` int32."""
        return send([*(part.row // ROWS for part in self.lines), self.rows // ROWS], self.device, torch.int32)

    @cached_property
    def segment_of(self) -> torch.Tensor:
        """Segment of each of these blocks, int32."""
        return self.blocks()[:, 0].contiguous()
