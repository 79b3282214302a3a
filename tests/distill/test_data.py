"""Training rows: equal from every format, nothing lost or repeated, stable splits, ranks, resumption."""

from __future__ import annotations

import io
import json
import os
import tracemalloc
from itertools import islice

import pytest
import torch
from distill.byte_tokenizer import BOS, EOS, byte_tokenizer
from distill.texts_on_disk import TABLES, documents, equal, pack, pieces, records, stream, texts, write

from kvpop_vllm.config import ConfigError
from kvpop_vllm.distill import data, sources, tokens
from kvpop_vllm.distill.data import split_of


@pytest.fixture
def mixed(tmp_path):
    """Text in four formats and several files, some of it duplicated."""
    own = texts(70)
    write(tmp_path, "a", "jsonl", records(own[:30]))
    write(tmp_path, "b", "parquet", records(own[30:50]))
    write(tmp_path, "c", "saved", records([*own[50:60], *own[:7], *own[30:33]]))
    for i, text in enumerate(own[60:]):
        write(tmp_path / "texts", str(i), "txt", records([text]))
    return tmp_path, own


# formats


@pytest.mark.parametrize("kind", ["txt", *TABLES])
def test_a_document_per_file_gives_the_same_rows_in_every_format(tmp_path, kind):
    same_size = [f"{i:02} " + "x\r\ny" * 20 for i in range(12)]
    for folder in ("txt", kind):
        for i, text in enumerate(same_size):
            write(tmp_path / folder, f"{i:02}", folder, records([text]))
    assert equal(islice(pack(tmp_path / "txt"), 80), islice(pack(tmp_path / kind), 80))


MESSAGES = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So.", "reasoning": "Hm. "}]
CALL = [{"function": {"name": "f", "arguments": {"a": 1}}}, {"function": {"name": "g", "arguments": {"b": 2}}}]
TALK = [{"role": "user", "content": "Call both."}, {"role": "assistant", "tool_calls": CALL}]
PARTS = [{"role": "user", "content": [{"type": "text", "text": "In "}, {"type": "text", "text": "parts."}]}]
SHOW = "{% for m in messages %}<{{ m.role }}>{{ m.reasoning }}{{ m.content }}{% endfor %}"
SHOW_CALLS = "{% for m in messages %}{{ m.content }}|{{ m.reasoning }}|{{ (m.tool_calls or '') | tojson }}{% endfor %}"
CONTENTS = {
    "texts": [{"text": text, "group": str(i % 5)} for i, text in enumerate(texts(40))],
    "messages": [{"messages": [*MESSAGES, {"role": "user", "content": text}]} for text in texts(20)],
    "tool calls": [{"messages": MESSAGES}, {"messages": TALK}],
    "contents in parts": [{"messages": PARTS}],
    "responses": [
        {"prompt": "Why?", "response": text, "reasoning": "Hm." * (i % 2)} for i, text in enumerate(texts(9))
    ],
    "all of them": [
        {"text": "a text", "messages": None, "prompt": None, "response": None},
        {"text": None, "messages": MESSAGES, "prompt": None, "response": None},
        {"text": None, "messages": None, "prompt": "Why?", "response": "So."},
    ],
}


@pytest.mark.parametrize("contents", CONTENTS)
def test_tables_give_the_same_rows_in_every_format(tmp_path, contents):
    tokenizer = byte_tokenizer(SHOW_CALLS if contents == "tool calls" else SHOW)
    for kind in TABLES:
        write(tmp_path, "table", kind, [dict(record) for record in CONTENTS[contents]])
    names = ("table.jsonl", "table.parquet", "table")
    options = {"split": "all", "buffer": 500, "tokenizer": tokenizer}
    found = [list(islice(pack(tmp_path / name, 16, **options), 60)) for name in names]
    assert equal(found[0], found[1]) and equal(found[0], found[2])


def test_byte_order_marks_and_blank_documents_are_left_out(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone")
    (tmp_path / "b.jsonl").write_bytes(
        b'\xef\xbb\xbf{"text": "two"}\n\n{"text": " \\n"}\n{"messages": []}\n{"text": "three"}'
    )
    assert sorted(documents(tmp_path, split="all")) == ["one", "three", "two"]


def test_folders_are_searched_and_nothing_is_read_twice(tmp_path, capsys):
    for i, folder in enumerate((".hidden", "deep/deeper", "other")):
        (tmp_path / folder).mkdir(parents=True)
        write(tmp_path / folder, "own", "txt", records([f"text {i}"]))
    (tmp_path / "notes.md").write_text("not text")
    (tmp_path / "link.txt").symlink_to(tmp_path / "other/own.txt")
    found = sources.find_sources([tmp_path, tmp_path / "other", tmp_path / "deep/../other/own.txt"])
    assert sorted(source.path.parent.name for source in found) in (["deeper", "other"], ["deeper", tmp_path.name])
    assert capsys.readouterr().err == f"{tmp_path}: 1 files of other kinds are passed over (.md)\n"


# packing


@pytest.mark.parametrize("buffer", [1, 700, 1 << 20])
@pytest.mark.parametrize("bos", [False, True])
def test_every_pass_holds_every_document_once(mixed, buffer, bos):
    folder, own = mixed
    length, longest, expected = 32, 64, []
    for text in own:
        ids = [BOS] * bos + list(text.encode())
        while ids:
            expected.append([*ids[: longest - 1], EOS])
            ids = ids[longest - 1 :]
    expected.sort()
    total = sum(map(len, expected))
    rows = pack(folder, length, split="all", buffer=buffer, piece_rows=2, tokenizer=byte_tokenizer(bos=bos))
    found = stream(rows, -(-3 * total // length))
    passes = [pieces(found[i * total : (i + 1) * total]) for i in range(3)]
    assert all(sorted(pass_) == expected for pass_ in passes)
    assert passes[0] != passes[1] != passes[2]
    once = pack(
        folder, length, split="all", buffer=buffer, piece_rows=2, repeat=False, tokenizer=byte_tokenizer(bos=bos)
    )
    for _ in range(2):
        assert stream(once) == found[: total // length * length]


def test_a_document_that_ends_with_eos_gets_no_second_one(tmp_path):
    write(tmp_path, "a", "jsonl", [{"text": "one<eos>"}, {"text": "two"}, {"messages": MESSAGES[:1]}])
    tokenizer = byte_tokenizer("{{ messages[0].content }}<eos>")
    assert sorted(documents(tmp_path, split="all", tokenizer=tokenizer)) == ["Why?", "one", "two"]


def test_seeds_decide_the_order(mixed):
    first, again, other = (pack(mixed[0], seed=seed) for seed in (1, 1, 2))
    assert equal(islice(first, 50), again_rows := list(islice(again, 50)))
    assert not equal(again_rows, islice(other, 50))
    assert [first.fingerprint == rows.fingerprint for rows in (again, other)] == [True, False]


def test_files_are_mixed_in_proportion_to_their_sizes(tmp_path):
    for i in range(20):
        write(tmp_path, f"{i:02}", "jsonl", records(["x" * 100] * 10 * (1 + i // 10)))
    found = sources.find_sources(tmp_path)
    order = [i for i, _ in sources.ReadingOrder(found)]
    assert len(order) == 300 and all(order.count(i) == 10 * (1 + i // 10) for i in range(20))
    lanes = [[i % sources.LANES for i in part] for part in (order[:150], order[150:])]
    assert all(abs(lanes[0].count(lane) - lanes[1].count(lane)) <= 2 for lane in range(sources.LANES))


def test_a_big_file_is_streamed(tmp_path):
    path, line = tmp_path / "big.jsonl", json.dumps({"text": "%08d" + " word" * 400}) + "\n"
    with open(path, "w") as file:
        file.writelines(line % i for i in range(16_000))
    assert path.stat().st_size > 30 << 20
    rows = pack(path, 64, split="test", validation=0.0, test=0.01, repeat=False, buffer=1 << 12)
    tracemalloc.start()
    try:
        count = sum(1 for _ in rows)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert rows.pass_.documents == 16_000 and count > 1000
    assert peak < 6 << 20


def test_long_texts_are_tokenised_in_bounded_calls(tmp_path, monkeypatch):
    own = [*texts(12, longest=90), "y" * 400, "z " * 300]
    write(tmp_path, "a", "jsonl", records(own))
    expected = list(pack(tmp_path, split="all", repeat=False))
    sizes, tokenizer = [], byte_tokenizer()

    class Watched:
        def __getattr__(self, name):
            return getattr(tokenizer, name)

        def __call__(self, text, **options):
            sizes.append(sum(map(len, text)))
            return tokenizer(text, **options)

    monkeypatch.setattr(tokens, "STRETCH", 100)
    assert equal(pack(tmp_path, split="all", repeat=False, tokenizer=Watched()), expected)
    assert 10 < len(sizes) and max(sizes) <= 100


def test_parquet_files_are_closed_and_hold_one_row_group(tmp_path):
    for i in range(20):
        write(tmp_path, str(i), "parquet", records(texts(20, seed=i)))
    folder = str(tmp_path.resolve())

    def still_open():
        """Return the open files of the folder; others may be closed meanwhile."""
        return [
            path
            for fd in os.listdir("/proc/self/fd")
            if (path := os.path.realpath(f"/proc/self/fd/{fd}")).startswith(folder)
        ]

    with (tmp_path / "0.parquet").open():
        assert still_open() == [f"{folder}/0.parquet"]
    found = sources.find_sources(tmp_path)
    assert sum(still_open() == [] for _ in sources.ReadingOrder(found)) == 400
    assert all(source.loaded == (-1, None) for source in found)


# splits

SPLITS = ("train", "validation", "test")


def splits(paths, **options):
    return {split: documents(paths, split=split, validation=0.2, test=0.3, **options) for split in SPLITS}


def test_splits_are_disjoint_and_complete(mixed):
    folder, own = mixed
    found = splits(folder)
    assert sorted(sum(found.values(), [])) == sorted(own) and all(found.values())
    assert sorted(documents(folder, split="all")) == sorted(own)


def test_training_rows_of_several_passes_hold_nothing_of_the_other_splits(mixed):
    rows = pack(mixed[0], validation=0.2, test=0.3, piece_rows=100)
    seen = {bytes(piece[:-1]).decode() for piece in pieces(stream(rows, 800))[:-1]}
    found = splits(mixed[0])
    assert seen == set(found["train"]) and rows.pass_.epoch > 1


def test_documents_keep_their_split_when_others_are_added(mixed):
    folder, own = mixed
    before = splits(folder)
    write(folder, "0", "jsonl", records(texts(40, seed=1)))
    write(folder, "z", "parquet", records(texts(40, seed=2)))
    after = splits(folder)
    assert all(set(before[split]) == set(after[split]) & set(own) for split in SPLITS)
    assert sum(map(len, after.values())) == 150


@pytest.mark.parametrize("group", [False, True])
def test_duplicates_of_a_text_are_used_once(tmp_path, group):
    own = texts(40)
    for i, kind in enumerate(("jsonl", "parquet", "saved")):
        write(tmp_path, str(i), kind, [{"text": t, "group": f"{i}/{j}" if group else None} for j, t in enumerate(own)])
    assert sorted(sum(splits(tmp_path).values(), [])) == sorted(own)


def test_documents_of_one_group_stay_together(tmp_path):
    own = texts(90)
    write(tmp_path, "a", "jsonl", [{"text": text, "group": i % 9} for i, text in enumerate(own[:45])])
    write(tmp_path, "b", "parquet", [{"text": text, "group": str(i % 9)} for i, text in enumerate(own[45:])])
    found = {split: {own.index(text) % 9 for text in texts} for split, texts in splits(tmp_path).items()}
    assert sum(map(len, found.values())) == 9 == len(set().union(*found.values()))


def test_shares_are_as_asked():
    found = [split_of(str(i), 0.1, 0.3) for i in range(4000)]
    assert [round(found.count(split) / 4000, 1) for split in SPLITS] == [0.6, 0.1, 0.3]


# processes and positions


@pytest.mark.parametrize("world", [2, 3])
def test_rows_of_all_ranks_are_those_of_one_process(mixed, world):
    ranks = [pack(mixed[0], rank=rank, world_size=world, buffer=500) for rank in range(world)]
    together = [next(ranks[i % world]) for i in range(50 * world)]
    assert equal(together, islice(pack(mixed[0], buffer=500), 50 * world))
    assert len({rows.fingerprint for rows in ranks}) == 1


def plain(state):
    return json.dumps(state, default=torch.Tensor.tolist)


@pytest.mark.parametrize("rank, world", [(0, 1), (1, 2)])
@pytest.mark.parametrize("buffer", [1, 600, 1 << 20])
def test_continuing_anywhere_gives_the_same_rows(mixed, monkeypatch, rank, world, buffer):
    monkeypatch.setattr(data, "BATCH", 4)
    options = {"rank": rank, "world_size": world, "buffer": buffer, "split": "all"}
    rows, whole, states, files = pack(mixed[0], **options), [], [], {}
    for i in range(1040 // world):
        states.append(plain(rows.state_dict()))
        if i in (0, 1, 2, 77, 223, 224, 300, 446, 447, 448, 900):  # a pass has 447 rows
            files[i] = io.BytesIO()
            torch.save(rows.state_dict(), files[i])
        whole.append(next(rows))
    assert rows.pass_.epoch == 2 and equal(islice(pack(mixed[0], **options), len(whole)), whole)
    for i, file in files.items():
        file.seek(0)
        again = pack(mixed[0], **options)
        again.load_state_dict(torch.load(file))
        assert equal(islice(again, 50), whole[i : i + 50])
        assert plain(again.state_dict()) == states[i + 50]


def test_a_position_at_the_end_stays_there(mixed):
    rows = pack(mixed[0], repeat=False)
    assert list(rows)
    again = pack(mixed[0], repeat=False)
    again.load_state_dict(rows.state_dict())
    assert list(again) == [] and equal(again, rows)


OTHER = {
    "length": {"length": 33},
    "split": {"split": "all"},
    "seed": {"seed": 1},
    "shares": {"test": 0.1},
    "buffer": {"buffer": 99},
    "pieces": {"piece_rows": 3},
    "tokenizer": {"tokenizer": byte_tokenizer(bos=True)},
}


@pytest.mark.parametrize("other", OTHER)
def test_a_position_in_other_rows_is_refused(mixed, other):
    with pytest.raises(ConfigError, match="^the data is not what the checkpoint was made with .*: restore it or"):
        pack(mixed[0], **OTHER[other]).load_state_dict(pack(mixed[0]).state_dict())


@pytest.mark.parametrize("kind", ["txt", *TABLES])
def test_a_position_in_a_changed_file_is_refused(tmp_path, kind):
    write(tmp_path, "a", kind, records(["x" * 5000 + "!"]))
    state = pack(tmp_path, split="all").state_dict()
    write(tmp_path, "a", kind, records(["x" * 5000 + "?"]))
    with pytest.raises(ConfigError, match="the data is not what the checkpoint was made with"):
        pack(tmp_path, split="all").load_state_dict(state)


def test_a_position_of_another_rank_is_refused(mixed):
    state = pack(mixed[0], rank=0, world_size=2).state_dict()
    with pytest.raises(ConfigError, match="rank 0 of 2, not of 1 of 2: use as many processes again"):
        pack(mixed[0], rank=1, world_size=2).load_state_dict(state)
