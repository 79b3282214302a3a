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
    """Tensors of the requests decoded in a step, allocated once and filled before each step by ``ops.fill_rows``.

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
        shared_budgets: ``[2, n]`` int64, unequal budgets and how many heads of all layers have each; None if heads have
            equal ones.
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
        self.layout, self.protects, self.compression = layout, longest > 0, compression
        self.numbers = {
            name: torch.full((capacity,), getattr(default, name) or 0, dtype=getattr(torch, dtype), device=device)
            for name, dtype in NUMBERS.items()
        }
        self.numbers["budget"] = self.numbers["budget"].unsqueeze(1).repeat(1, layout.num_kv_heads)
        self.table = torch.full((capacity, columns), NULL_BLOCK, dtype=torch.int32, device=device)
        self.positions = torch.full((capacity,), PADDING, dtype=torch.int64, device=device)
        self.compressed = torch.zeros(capacity, dtype=torch.bool, device=device)
        self.tokens = torch.arange(capacity, device=device)
        self.drafts = torch.full((capacity,), -1, dtype=torch.int32, device=device)
        places = torch.zeros(3, capacity, 1 + layout.drafts, dtype=torch.int64, device=device)
        self.written, self.token_blocks, self.token_slots = places.unbind()
        self.shared_budgets = None
        if shares is not None:
            self.shared_budgets = torch.tensor(list(zip(*shares.counts.items(), strict=True)), device=device)
        width = cdiv(longest, layout.block_slots)
        self.prefix_table = torch.full((capacity, width), NULL_BLOCK, dtype=torch.int32, device=device)

    def receive(self, sent: Mapping[str, torch.Tensor]) -> None:
        """Copy numbers of the step's first n requests to the device.

        Args:
            sent: ``[n]`` each, by name, in pinned CPU memory. Numbers that are not sent keep their values.
        """
        for name, values in sent.items():
            self.numbers[name][: len(values)].copy_(values, non_blocking=True)

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
