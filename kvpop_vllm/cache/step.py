"""The plan of a step, made once for all layers and by all drivers (DESIGN "One step")."""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import NamedTuple

import torch
from torch.nn.functional import pad

from kvpop_vllm.cache.chunks import Chunks, once, send
from kvpop_vllm.cache.pages import PageLayout, Prefix, cdiv
from kvpop_vllm.cache.shares import EqualHeads
from kvpop_vllm.requests import KERNELS_TAKE, NUMBERS, OPTIONS, RequestSlots

NO_CHUNKS = Chunks([], [], torch.zeros(0, 0, dtype=torch.int32, device="cpu"), [])


class Span(NamedTuple):
    """Tokens of one request in a step: ``length`` tokens of the flat batch from ``first`` on, at position ``start``.

    Attributes:
        request: index of the request.
        first: index of its first token in the flat batch.
        start: position of that token, as the kernels count.
        length: number of tokens.
        slots: slots of the request, as the kernels take them.
        after: what the request is after the end of its prompt, if the prompt is compressed there and has not been, else
            None.
        compressed: True if its prompt has been compressed before these tokens.
        drafts: number of its last tokens that are drafts of speculative decoding; the one before them is decoded.
    """

    request: int
    first: int
    start: int
    length: int
    slots: RequestSlots
    after: RequestSlots | None = None
    compressed: bool = False
    drafts: int = 0

    @property
    def protected(self) -> int:
        """Number of its tokens that belong to the prefix."""
        return max(0, min(self.length, self.slots.prefix - self.start))

    @property
    def is_decoded(self) -> bool:
        """True for one token and its drafts, False for a chunk."""
        return self.length == 1 + self.drafts


def span_of(request: int, first: int, start: int, length: int, slots: RequestSlots, after: RequestSlots | None) -> Span:
    """Return the span of a request whose prompt is compressed at its end, or not if ``after`` is None.

    Args:
        request, first, length: as in :class:`Span`.
        start: position of its first token in the text.
        slots: slots of the request before the end of its prompt.
        after: what it is after that.
    """
    if after is None or start < slots.prefix:
        return Span(request, first, start, length, slots, after)
    return Span(request, first, start - after.shift, length, after, None, True)


def cut_at_prompt_end(span: Span) -> list[Span]:
    """Return the tokens of a request as the kernels take them, cut at the end of a prompt that is compressed there.

    Prompts are held until their end and compressed then. After its end, a prompt leaves a prefix of the slots that were
    made of it. This is where compression enters a plan.
    """
    slots, after, inside = span.slots, span.after, span.protected
    if after is None:
        return [span]
    pieces = []
    if inside:
        sizes = {"budget": after.budget, "window": after.window}
        pieces.append(span._replace(length=inside, slots=slots._replace(**sizes)))
    if inside < span.length:
        place = {"first": span.first + inside, "start": span.start + inside - after.shift}
        pieces.append(span._replace(**place, length=span.length - inside, slots=after, after=None, compressed=True))
    return pieces


@dataclass(frozen=True)
class RequestBlocks:
    """Blocks of the requests of a step.

    Attributes:
        tails: ``[requests, W]`` int32, blocks of state and slots.
        prefixes: ``[requests, F]`` int32, blocks of prefixes, None if no request has one.
        made_blocks: ``[requests, F]`` int32, blocks of the slots made of prompts, None if none is compressed.
    """

    tails: torch.Tensor
    prefixes: torch.Tensor | None
    made_blocks: torch.Tensor | None = None

    @classmethod
    def of_rows(
        cls,
        table: torch.Tensor,
        slots: Sequence[RequestSlots],
        size: int,
        after: Sequence[RequestSlots] | None = None,
        widths: tuple[int | None, int | None] = (None, None),
    ) -> RequestBlocks:
        """Return the parts of rows ``table [requests, W]`` that hold prefix, made slots, state and tail, in this order.

        Args:
            table: block table of the engine.
            slots: slots of each request.
            size: N, slots per block.
            after: what each request is after the end of its prompt, or None if prompts are not compressed.
            widths: columns of ``tails`` and of ``prefixes``, for which GPU kernels are compiled, None for all of them.
        """
        columns, prefixes, made_blocks = [cdiv(record.prefix, size) for record in slots], table[:, : widths[1]], None
        if after is not None:
            made_blocks = from_columns(table, columns, prefixes.shape[1])
            columns = [first + cdiv(record.made_slots, size) for first, record in zip(columns, after, strict=True)]
        return cls(from_columns(table, columns, widths[0]), prefixes, made_blocks)

    def prefix(self, spans: Sequence[Span]) -> Prefix | None:
        """Return the prefixes of some requests, which are made slots where a prompt has been compressed, or None."""
        tokens = [span.slots.prefix for span in spans]
        if not any(tokens):
            return None
        made_slots, chosen = [span.slots.made_slots for span in spans], [span.request for span in spans]
        table = rows_of(self.prefixes, chosen)
        if self.made_blocks is not None:
            compressed = send([span.compressed for span in spans], table.device, torch.bool).unsqueeze(1)
            table = torch.where(compressed, rows_of(self.made_blocks, chosen), table)
        tokens, biased = (torch.tensor(counts, dtype=torch.int64, device="cpu") for counts in (tokens, made_slots))
        return Prefix(None, table, tokens, biased if any(made_slots) else None)


def from_columns(table: torch.Tensor, columns: Sequence[int], width: int | None = None) -> torch.Tensor:
    """Return ``width`` entries, by default W, of ``table [requests, W]`` int32 from column ``columns[i]`` of row i on.

    Beyond the end of a row, its last entry is repeated.
    """
    if not any(columns):
        return table[:, :width]
    width = table.shape[1] if width is None else width
    indices = torch.arange(width, device=table.device) + send(columns, table.device).unsqueeze(1)
    return table.gather(1, indices.clamp_max(table.shape[1] - 1))


def rows_of(tensor: torch.Tensor, chosen: list[int]) -> torch.Tensor:
    """Return some rows of a tensor without a wait for its device; a view if they lie one after another on a CPU."""
    if tensor.device.type != "cpu":  # kernels are compiled for one alignment, so rows are copied
        return torch.stack([tensor[i] for i in chosen]) if chosen else tensor[:0]
    together = chosen == list(range(chosen[0], chosen[-1] + 1)) if chosen else True
    return tensor[chosen[0] if chosen else 0 :][: len(chosen)] if together else tensor[chosen]


@dataclass(frozen=True)
class DecodeRows:
    """Requests of a step that are decoded together, with one token each: host tensors, or views of fixed addresses.

    With speculative decoding a request also has drafts, which follow its token in the flat batch. There are rows as
    well for requests with chunks, whose accepted drafts enter the cache before the chunk.

    Attributes:
        tokens: indices of their tokens in the flat batch; a slice if they come first and have no drafts. With
            speculative decoding they count from the beginning of ``flat``.
        tails: ``[R, W]`` int32, blocks of state and slots.
        positions: ``[R]`` int64, positions of their tokens.
        numbers: ``[R]`` each, numbers that kernels take, by name. Budgets may be ``[R, H]``. Seeds are missing if
            nothing is drawn.
        compressed: ``[R]`` booleans, True for requests whose prompt has been compressed.
        prefix: prefixes of the requests, None if no request has one.
        writes: indices, blocks and slots of protected tokens, ``[n]`` int64 each, None if there are none.
        drafts: ``[R]`` int32, drafts of each request, -1 for one with a chunk, None without speculative decoding.
        flat: part of the flat batch that holds their tokens and drafts, perhaps among others.
    """

    tokens: slice | torch.Tensor
    tails: torch.Tensor
    positions: torch.Tensor
    numbers: dict[str, torch.Tensor]
    compressed: Sequence[bool] | torch.Tensor = ()
    prefix: Prefix | None = None
    writes: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
    drafts: torch.Tensor | None = None
    flat: slice = field(default_factory=lambda: slice(None))

    @classmethod
    def of_spans(cls, spans: Sequence[Span], blocks: RequestBlocks) -> DecodeRows:
        """Return the rows of requests whose numbers the host knows, as host tensors."""
        chosen, firsts, starts, _, slots, _, compressed, _ = map(list, zip(*spans, strict=True)) if spans else [[]] * 8
        return cls(
            slice(0, len(spans)) if firsts == chosen == list(range(len(spans))) else torch.tensor(firsts, device="cpu"),
            rows_of(blocks.tails, chosen),
            torch.tensor(starts, dtype=torch.int64, device="cpu"),
            numbers_of(slots),
            compressed,
            blocks.prefix(spans),
        )

    @classmethod
    def with_drafts(cls, spans: Sequence[Span], chunks: Sequence[Span], blocks: RequestBlocks) -> DecodeRows:
        """Return the rows of requests with drafts, and of those with chunks, whose drafts of the last step may be accepted."""
        rows, flat = cls.of_spans([*spans, *chunks], blocks), slice(0, 0)
        if spans:
            flat = slice(min(span.first for span in spans), max(span.first + span.length for span in spans))
        tokens = [span.first - flat.start for span in spans] + [0] * len(chunks)
        drafts = [span.drafts for span in spans] + [-1] * len(chunks)
        tensors = {"tokens": torch.tensor(tokens, dtype=torch.int64, device="cpu")}
        return replace(rows, **tensors, drafts=torch.tensor(drafts, dtype=torch.int32, device="cpu"), flat=flat)

    @property
    def drafted(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Row of each token and draft, and how many tokens of this step are before it in its row, ``[n]`` int64 each."""
        counts = self.drafts.long() + 1
        rows = torch.arange(len(counts)).repeat_interleave(counts)
        return rows, torch.arange(len(rows)) - (counts.cumsum(0) - counts)[rows]

    @functools.cached_property
    def decodes(self) -> int:
        """R, number of decoded requests."""
        return len(self.positions)

    @functools.cached_property
    def windows(self) -> torch.Tensor:
        """``[R]`` int32, w of each request."""
        return self.numbers["window"]

    @property
    def seeds(self) -> torch.Tensor | None:
        """``[R]`` int64, seeds of the draws, None if nothing is drawn."""
        return self.numbers.get("seed")

    @functools.cached_property
    def options(self) -> dict[str, torch.Tensor | None]:
        """Arguments of ``ops.decode_step`` that are numbers of the requests, see :data:`OPTIONS`."""
        return {argument: self.numbers.get(name) for argument, name in OPTIONS.items()}


def numbers_of(slots: Sequence[RequestSlots], names: Iterable[str] = KERNELS_TAKE) -> dict[str, torch.Tensor]:
    """Return numbers of requests, ``[R]`` on the CPU each, without seeds if nothing is drawn.

    Raises:
        TypeError: some requests have a seed and others have none.
    """
    columns = {name: list(map(operator.attrgetter(name), slots)) for name in names}
    return {
        name: torch.tensor(values, dtype=getattr(torch, NUMBERS[name]), device="cpu")
        for name, values in columns.items()
        if set(values) != {None}
    }


class Begun(NamedTuple):
    """Requests whose tails begin in a step, after a prefix.

    Attributes:
        rows: indices of those that are decode rows.
        chunks: indices of the others' chunks.
        prefix: their prefixes, decode rows first, with their numbers on the CPU.
        table: ``[B, H, P]`` int32, pages of their tails in one layer.
    """

    rows: list[int]
    chunks: list[int]
    prefix: Prefix
    table: torch.Tensor | None = None


@dataclass(frozen=True)
class StepBatch(DecodeRows):
    """One step in the pages of a layer, or of all layers. Requests with one token are decoded together.

    Attributes:
        table: ``[R, H, P]`` int32, pages of the decoded requests' tails.
        budgets: ``[R, H]`` int32, B of each of their heads.
        chunks: chunks of the other requests.
        requests: index in the flat batch of each request with tokens, decoded ones first.
        starts: ``[n]`` int64, first position of each of these requests, 0 if it is at most p, because the tail then
            starts over. None if the host must not wait for it, or if another layer has checked them; each kernel then
            checks its own requests.
        first_pages: ``[n, H, S + 1]`` int64, the S pages of each head's state and the one of slot 0, which stores
            ``tokens_seen``, None as for ``starts``.
        begun: requests whose tails begin in this step, None if there are none.
        late: as in :class:`StepPlan`.
    """

    table: torch.Tensor | None = None
    budgets: torch.Tensor | None = None
    chunks: Chunks | None = None
    requests: Sequence[int] = ()
    starts: torch.Tensor | None = None
    first_pages: torch.Tensor | None = None
    begun: Begun | None = None
    late: bool = False
    _memo: dict = field(default_factory=dict, init=False, repr=False)

    once = once

    def having(self, **values) -> StepBatch:
        """Return a copy with other values and a memo of its own, as ``replace`` does, but quickly."""
        batch = object.__new__(StepBatch)
        batch.__dict__.update(self.__dict__, _memo={}, **values)
        return batch


class Between(NamedTuple):
    """Requests for which something is due between their last step and the next one.

    Attributes:
        starts: number of tokens that each has processed.
        slots: slots of each.
        after: what each is after the end of its prompt, with which the last step has ended, None if rounds are due.
        blocks: where they lie.
        prefix: their prefixes, with their numbers on the CPU, None if no request has one.
        seeds: ``[n]`` int64, seeds of the draws, None if nothing is drawn.
    """

    starts: list[int]
    slots: list[RequestSlots]
    after: list[RequestSlots] | None
    blocks: RequestBlocks
    prefix: Prefix | None
    seeds: torch.Tensor | None

    @classmethod
    def of(
        cls,
        starts: list[int],
        slots: list[RequestSlots],
        after: list[RequestSlots] | None,
        table: torch.Tensor,
        size: int,
    ) -> Between:
        """Return the requests whose block-table rows are ``table [n, W]``, in blocks of ``size`` slots."""
        blocks, seeds = RequestBlocks.of_rows(table, slots, size, after), numbers_of(slots, ("seed",)).get("seed")
        prefix = blocks.prefix(
            [Span(i, 0, start, 1, record) for i, (start, record) in enumerate(zip(starts, slots, strict=True))]
        )
        return cls(starts, slots, after, blocks, prefix, None if seeds is None else send(seeds, table.device))

    def place(self, shares: EqualHeads, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the budgets ``[n, H]`` on the CPU and the pages ``[n, H, P]`` of a layer."""
        sizes = numbers_of(self.after or self.slots, ("budget", "window"))
        return shares.place(layer, self.blocks.tails, [False] * len(self.starts), sizes["budget"], sizes["window"])


class StepPlan:
    """One step of any engine. The batch of each layer is made from it, since pages may differ by layer.

    Args:
        layout: page layout of the layers.
        spans: tokens of each request whose numbers the host knows, in the order of the flat batch.
        blocks: where these requests lie.
        rows: decode rows; all ``spans`` are chunks then. None to decode the spans of one token.
        ahead: 0 if a tail begins in the step of its first token; 1 if it begins in the step of the token before.
        checks: False if the host must not wait for the positions at which the caches end.
        late: True if what lies between two steps of a request is done ahead of the second one, by whoever makes the
            plan: rounds after decode rows, and the compression of a prompt with which a step ends.
    """

    def __init__(
        self,
        layout: PageLayout,
        spans: Sequence[Span],
        blocks: RequestBlocks,
        *,
        rows: DecodeRows | None = None,
        ahead: int = 0,
        checks: bool = True,
        late: bool = False,
    ):
        self.layout, self.checks, self.late = layout, checks, late
        self._batches: dict[int, StepBatch] = {}  # of layers, without starts
        self._everywhere: StepBatch | None = None
        self._host_knows = rows is None  # else tensors may be changed in place before a layer reads them
        singles, chunked = [], []
        for span in spans:
            pieces = [span] if span.after is None else cut_at_prompt_end(span)
            decoded = rows is None and span.is_decoded and pieces[0].after is None
            if span.length:
                (singles if decoded else chunked).extend(pieces)
        # a chunk after staged drafts: those that were accepted enter the cache before it
        resumed = [span for span in chunked if span.start > span.slots.prefix] if layout.drafts else []
        if rows is None:
            rows = (
                DecodeRows.with_drafts(singles, resumed, blocks)
                if layout.drafts
                else DecodeRows.of_spans(singles, blocks)
            )
        self.rows = rows
        self.tails = rows_of(blocks.tails, [span.request for span in chunked])
        # the second part of a span that the prompt's end cuts: it sees what compression leaves of the first
        follows = [i > 0 and span.request == chunked[i - 1].request for i, span in enumerate(chunked)]
        self.chunks = self._chunks(chunked, follows, blocks) if chunked else NO_CHUNKS
        self.compressed = [span.compressed and not later for span, later in zip(chunked, follows, strict=True)]
        self.writes, self.begun = self.rows.writes, None
        if near := [span for span in [*singles, *chunked] if span.start <= span.slots.prefix > 0]:
            self.writes = self._writes(near, blocks)
            self.begun = self._begun(singles, chunked, blocks, ahead)
        # a second part starts at a position that the cache reaches within the step, so it cannot be checked before
        self.first_parts = [i for i, later in enumerate(follows) if not later] if any(follows) else slice(None)
        starting = [*singles, *resumed, *(span for span, later in zip(chunked, follows, strict=True) if not later)]
        self.requests = [span.request for span in starting] if checks else []
        starts = [span.start if span.start > span.slots.prefix else 0 for span in starting] if checks else []
        self.starts = torch.tensor(starts, dtype=torch.int64, device=self.tails.device) if checks else None

    def _chunks(self, spans: list[Span], follows: list[bool], blocks: RequestBlocks) -> Chunks:
        """Return the chunks, whose pages are not known yet and whose budgets are those of their requests."""
        chosen, slots = [span.request for span in spans], [span.slots for span in spans]
        lengths, firsts = [span.length for span in spans], [span.first for span in spans]
        device, numbers = blocks.tails.device, numbers_of(slots)
        tokens = slice(firsts[0], firsts[-1] + lengths[-1])
        if sum(lengths) < tokens.stop - tokens.start:  # decoded tokens or padding lie between them
            tokens = send([i for span in spans for i in range(span.first, span.first + span.length)], device)
        seeds, after = numbers.get("seed"), [span.after for span in spans]
        followed = [*follows[1:], False]
        closes = [
            span.after is not None and span.start + span.length == span.slots.prefix and (later or not self.late)
            for span, later in zip(spans, followed, strict=True)
        ]
        return Chunks(
            [span.start for span in spans],
            lengths,
            numbers["budget"],
            [record.window for record in slots],
            firsts=firsts,
            tokens=tokens,
            slots=slots,
            follows=follows,
            prefix=blocks.prefix(spans),
            seeds=None if seeds is None else send(seeds, device),
            after=after,
            closes=closes,
            made_table=rows_of(blocks.made_blocks, chosen) if any(after) else None,
        )

    def _writes(self, spans: list[Span], blocks: RequestBlocks) -> tuple[torch.Tensor, ...] | None:
        """Return indices, blocks and slots of the protected tokens of the step, or None if there are none."""
        size, counts = self.layout.block_slots, [span.protected for span in spans]
        if not any(counts):
            return self.rows.writes
        begins = itertools.accumulate(counts, initial=0)
        # one row for each token: adding its number turns the offsets into its index in the batch and its position
        columns = [
            (span.request, span.first - begin, span.start - begin) for span, begin in zip(spans, begins, strict=False)
        ]
        numbers = torch.tensor(columns, device="cpu").repeat_interleave(torch.tensor(counts, device="cpu"), 0)
        numbers[:, 1:] += torch.arange(len(numbers), device="cpu").unsqueeze(1)
        requests, tokens, t = send(numbers.T.contiguous(), blocks.tails.device)
        writes = tokens, blocks.prefixes[requests, t // size].long(), t % size
        return writes if self.rows.writes is None else tuple(map(torch.cat, zip(self.rows.writes, writes, strict=True)))

    def _begun(self, singles: list[Span], chunked: list[Span], blocks: RequestBlocks, ahead: int) -> Begun | None:
        """Return the requests whose tails begin in this step, or None if there are none."""
        rows, chunks = (
            [
                i
                for i, s in enumerate(spans)
                if s.start <= s.slots.prefix and s.slots.begins_tail(s.start, s.start + s.length + ahead)
            ]
            for spans in (singles, chunked)
        )
        if not rows and not chunks:
            return None
        spans = [*(singles[i] for i in rows), *(chunked[i] for i in chunks)]
        return Begun(rows, chunks, blocks.prefix(spans))

    def batch(self, shares: EqualHeads, layer: int = 0) -> StepBatch:
        """Return the batch of a layer; layers with equal heads have the same one.

        Only the first layer's has starts to be checked, because all layers have seen the same tokens. Layers that share
        unequally have indices of their own, unless ``rows`` were given.

        Args:
            shares: how heads share slots.
            layer: index of the layer.
        """
        if not shares.by_layer:
            layer = 0
        elif not self._host_knows:  # other numbers may lie there now, or these are the shares of another layer
            self._batches = {}
        if layer not in self._batches:
            self._batches |= self._place(shares, layer)
        batch = self._batches[layer]
        if self.checks:
            batch, self.checks = self._checked(batch), False
        return batch

    def _place(self, shares: EqualHeads, layer: int) -> dict[int, StepBatch]:
        """Return the step in the pages of a layer, and of those that are placed with it. Arguments are as in :meth:`batch`."""
        rows, chunks, of_rows, of_chunks = self.rows, self.chunks, {}, {}

        def place(*columns) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
            return shares.place_layers(layer, *columns) if self._host_knows else {layer: shares.place(layer, *columns)}

        if rows.decodes:
            of_rows = place(rows.tails, rows.compressed, rows.numbers.get("budget"), rows.numbers.get("window"))
        if len(chunks):
            of_chunks = place(self.tails, self.compressed, chunks.budgets, chunks.windows)
        layers = (of_rows | of_chunks) or [layer]
        return {number: self._in_pages(of_rows.get(number), of_chunks.get(number)) for number in layers}

    def _in_pages(self, of_rows: tuple | None, of_chunks: tuple | None) -> StepBatch:
        """Return the step with budgets and pages ``[R, H]`` and ``[R, H, P]`` of decode rows and of chunks, None without any."""
        chunks, begun, step = self.chunks, self.begun, {}
        if of_rows is not None:
            step["budgets"], step["table"] = of_rows
        if of_chunks is not None:
            # a memo of its own, since what is memoised depends on the pages
            chunks = replace(chunks, budgets=of_chunks[0], table=of_chunks[1])
        if begun is not None:
            tables = (step.get("table"), begun.rows), (chunks.table, begun.chunks)
            paged = [rows_of(table, chosen) for table, chosen in tables if chosen]
            width = max(part.shape[2] for part in paged)  # requests of other budgets may have fewer pages
            paged = [part if part.shape[2] == width else pad(part, (0, width - part.shape[2])) for part in paged]
            begun = begun._replace(table=torch.cat(paged) if len(paged) > 1 else paged[0])
        if self._everywhere is None:
            rows = self.rows
            values = {column.name: getattr(rows, column.name) for column in fields(rows)} | {"writes": self.writes}
            formed = {"decodes": rows.decodes, "options": rows.options}  # once, not in each layer
            self._everywhere = StepBatch(**values, late=self.late).having(**formed)
        return self._everywhere.having(chunks=chunks, begun=begun, **step)

    def _checked(self, batch: StepBatch) -> StepBatch:
        """Return a batch with the starts of its requests."""
        tables = [batch.table] if batch.decodes else []
        if len(batch.chunks):
            tables.append(batch.chunks.table[self.first_parts])
        if not tables:
            return batch
        first = torch.cat([table[:, :, : self.layout.state_blocks + 1] for table in tables]).long()
        return batch.having(requests=self.requests, starts=self.starts, first_pages=first)


def plan_batch(
    layout: PageLayout,
    slots: Sequence[RequestSlots],
    counts: Sequence[int],
    lengths: Sequence[int],
    table: torch.Tensor,
    after: Sequence[RequestSlots] | None = None,
    drafts: Iterable[int] | None = None,
) -> StepPlan:
    """Return the plan of a flat batch whose requests follow one another, and whose numbers the host knows.

    Args:
        layout: page layout of the layers.
        slots: slots of each request.
        counts: tokens of each request in this step.
        lengths: tokens of each request, these included.
        table: ``[requests, W]`` int32, blocks of each request's prefix, state and tail.
        after: what each request is after the end of its prompt, or None if prompts are not compressed.
        drafts: number of drafts among the tokens of each request, None if there are none.
    """
    firsts, starts = itertools.accumulate(counts, initial=0), map(operator.sub, lengths, counts)
    columns = itertools.count(), firsts, starts, counts, slots
    if after is None:
        spans = list(map(Span, *columns))
        if drafts is not None:
            spans = [span._replace(drafts=number) for span, number in zip(spans, drafts, strict=True)]
    else:
        spans = list(map(span_of, *columns, after))
    return StepPlan(layout, spans, RequestBlocks.of_rows(table, slots, layout.block_slots, after))
