"""Steps in persistent tensors equal steps built from new tensors, and padding writes nothing."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
import torch

from kvpop_vllm.attention.device_batch import DecodeRows, Split
from kvpop_vllm.attention.step_batch import RequestSettings, StepPlan
from kvpop_vllm.kernels.pages import PageLayout
from kvpop_vllm.roles import Retention

HEADS, SIZE, MOST, BLOCKS = 2, 32, 6, 600
KEPT = {
    "every step": Retention(40, 2, 6),
    "no sinks": Retention(48, 0, 9),
    "longer than any": Retention(400, 2, 6),
}
STEPS = [
    ([1, 1, 5], [9, 100, 7]),
    ([1, 1, 1, 1], [1, 40, 41, 300]),
    ([1, 30, 1, 2], [77, 30, 1, 200]),
    ([64, 3], [64, 90]),
]
"""Tokens and length of each request. The third step has a prompt of one token after a longer chunk."""
PROTECTED = [[20, 0, 3], [0, 39, 41, 50], [76, 40, 1, 150], [32, 90]]
"""p of each of these requests: inside a prefix, at its end and behind it, in decode rows and in chunks."""
LONGEST = 200


def rows_of(kept, state=0, longest=0, most=None):
    most, layout = most or kept.budget, PageLayout(HEADS, SIZE, torch.float32, 16, state)
    return DecodeRows(layout, kept, MOST, layout.blocks(most, most), {}, "cpu", longest)


def engine_tables(rows, lens, seed=0):
    """Return a block table with foreign blocks behind a request's own, and the slots of its tokens."""
    g = torch.Generator().manual_seed(seed)
    width = rows.table.shape[1] + rows.prefix_table.shape[1]
    table = 1 + torch.randperm(BLOCKS - 1, generator=g)[: MOST * width].int().view(MOST, -1)
    return table, torch.arange(100, 100 + sum(lens))


def ends(lens):
    return [0, *torch.tensor(lens).cumsum(0).tolist()]


def split_of(lens):
    return Split.of(ends(lens))


def filled(rows, lens, lengths, sizes=RequestSettings()):  # noqa: B008
    """Fill the persistent tensors with these requests and return their step."""
    (table, slots), seq_lens = engine_tables(rows, lens), torch.tensor(lengths, dtype=torch.int32)
    dtypes = {"protected": torch.int64, "budgets": torch.int32, "windows": torch.int32}
    known = {name: getattr(sizes, name) for name in dtypes}
    sent = {name: torch.tensor(x, dtype=dtypes[name]) for name, x in known.items() if x is not None}
    if "budgets" in sent:
        sent["budgets"] = sent["budgets"].unsqueeze(1).repeat(1, HEADS)
    rows.fill(split_of(lens).decodes, seq_lens, table, slots, sent)
    return rows.batch(split_of(lens), lengths, table, sizes=sizes)


def same_chunks(batch, expected):
    chunks = [c for c in batch.prefills if c.last - c.first > 1]
    without = {"row": None, "prefix_row": None, "budgets": None}
    for chunk, other in zip(chunks, expected.prefills, strict=True):
        assert replace(chunk, **without) == replace(other, **without)
        assert torch.equal(chunk.budgets, other.budgets)
        shared = min(chunk.row.shape[1], other.row.shape[1])
        assert torch.equal(chunk.row[:, :shared], other.row[:, :shared])
        if chunk.prefix_row is not None:
            assert torch.equal(chunk.prefix_row, other.prefix_row[: len(chunk.prefix_row)])


def test_decodes_are_the_leading_rows():
    assert split_of([1, 1, 5]) == Split(2, 7, ((2, 2, 5),))
    assert split_of([1, 30, 1, 2]) == Split(1, 34, ((1, 1, 30), (2, 31, 1), (3, 32, 2)))
    assert split_of([1, 1, 0, 0]) == Split(4, 4, ()), "padding of a captured batch decodes"
    assert split_of([2, 0, 1]) == Split(0, 3, ((0, 0, 2), (2, 2, 1)))
    assert split_of([]) == Split(0, 0, ())


def same_protection(batch, expected, table, protected):
    """Compare prefixes of the decode rows, and tails that begin in this step."""
    found, other, d = batch.protection, expected.protection, batch.decodes
    assert found.tokens.tolist() == protected[:d] and torch.equal(found.table, table[:d, : found.table.shape[1]])
    real = found.blocks != 0
    for each in ("written", "blocks", "slots"):
        assert torch.equal(getattr(found, each)[real], getattr(other, each)), each
    assert (found.slots[~real] == 0).all() and found.written[:d].tolist() == list(range(d))
    in_rows = sum(0 < protected[r] == int(expected.positions[r]) for r in range(d))
    assert torch.equal(found.begun_tokens, other.begun_tokens[in_rows:])
    for each in ("begun", "begun_table"):
        ours, theirs = getattr(found, each), getattr(other, each)[in_rows:]
        shared = min(ours.shape[-1], theirs.shape[-1])
        assert torch.equal(ours[..., :shared], theirs[..., :shared]), each


@pytest.mark.parametrize("state", [0, 5000])
@pytest.mark.parametrize("kind", ["server's sizes", "protected prompts", "own sizes"])
@pytest.mark.parametrize("name", KEPT)
def test_equal_to_batches_made_anew(name, kind, state):
    """Steps are equal, also where requests have their own budgets, windows and protection.

    Budgets lie below and above the server's. The next step keeps nothing of them: a second turn runs the same
    steps with the server's budgets and windows.
    """
    kept, own = KEPT[name], kind == "own sizes"
    longest = 0 if kind == "server's sizes" else LONGEST
    rows = rows_of(kept, state=state, longest=longest, most=2 * kept.budget if own else None)
    for turn, (number, (lens, lengths)) in itertools.product(range(1 + own), enumerate(STEPS)):
        draw, protected = random.Random(number), PROTECTED[number] if longest else [0] * len(lens)
        budgets, windows = [kept.budget] * len(lens), [kept.window] * len(lens)
        if own and turn == 0:
            budgets = [draw.randint(kept.first_long + 4, 2 * kept.budget) for _ in lens]
            windows = [draw.randint(1, kept.window + 2) for _ in lens]
        sizes = RequestSettings(protected if longest else None, *((budgets, windows) if own else ()))
        batch, d = filled(rows, lens, lengths, sizes), split_of(lens).decodes
        table = engine_tables(rows, lens)[0][: len(lens)]
        expected = StepPlan(rows.layout, kept, lens, torch.tensor(lengths, dtype=torch.int32), table, sizes).batch()
        assert batch.decodes == d and batch.tokens == slice(0, d) and batch.starts is batch.slot_zero is None
        for each in ("positions", "budgets", "windows"):
            assert torch.equal(getattr(batch, each), getattr(expected, each)[:d]), each
        assert batch.budgets[:, 0].tolist() == budgets[:d] and batch.windows.tolist() == windows[:d]
        for r in range(d):
            behind = lengths[r] - protected[r]
            held = replace(kept, budget=budgets[r]).behind(protected[r]).budget
            held = rows.layout.blocks(behind, held) if behind > 0 else 0
            assert torch.equal(batch.table[r, :, :held], expected.table[r, :, :held])
            assert (batch.table[r, :, held + (longest > 0) :] == 0).all()
            assert held > 0 or (batch.table[r] == 0).all()
        same_chunks(batch, expected)
        if longest:
            same_protection(batch, expected, table, protected)


@pytest.mark.parametrize("cause", ["no length", "no slot", "no block"])
def test_rows_of_padding_behind_a_prefix(cause):
    """A row behind a prefix is padding if it has no length, no slot or no block.

    Rows 1 to 3 lie inside the prefix, at its end and behind it. The missing block is that of the token, or
    the first one of the tail.
    """
    rows, protected = rows_of(KEPT["every step"], state=5000, longest=LONGEST), torch.tensor([0, 20, 20, 20, 0, 0])
    (table, slots), lengths = engine_tables(rows, [1] * 4), torch.tensor([30, 18, 21, 60], dtype=torch.int32)
    first = 2 + rows.layout.state_blocks
    if cause == "no length":
        lengths[1:] = 0
    elif cause == "no slot":
        slots[1:] = -1
    else:
        table[1, 1] = table[2, first] = table[3, first] = 0
    rows.fill(4, lengths, table, slots, {"protected": protected})
    assert rows.positions[:4].tolist() == [29, -1, -1, -1]
    assert (rows.table[1:4] == 0).all() and (rows.blocks == 0).all() and (rows.slots == 0).all()
    if cause == "no block":
        table[1, 1] = table[3, first] = 7
        rows.fill(4, lengths, table, slots, {"protected": protected})
        assert rows.positions[:4].tolist() == [29, 17, -1, 59], "blocks of others do not matter"
        assert rows.blocks[:4].tolist() == [0, 7, 0, 0] and rows.slots[:4].tolist() == [0, 1, 0, 0]


def test_a_narrow_block_table_is_taken_as_it_is():
    rows = rows_of(KEPT["longer than any"])
    table = torch.arange(1, 9, dtype=torch.int32).view(2, 4)
    rows.fill(2, torch.tensor([20, 60], dtype=torch.int32), table, torch.tensor([5, 6]))
    assert rows.table[0].count_nonzero() == 2 and rows.table[1, :4].tolist() == [5, 6, 7, 8]
