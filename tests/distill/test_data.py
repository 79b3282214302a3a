"""Training rows: equal from every format, nothing lost or repeated, stable splits, one file of tokens."""

from __future__ import annotations

import json
import os
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from itertools import islice

import pytest
import torch
from distill.byte_tokenizer import BOS, EOS, byte_tokenizer
from distill.texts_on_disk import TABLES, documents, equal, pack, pieces, records, stream, texts, write

from kvpop_vllm.distill import sources, tokens
from kvpop_vllm.distill.sources import documents_of, find_sources
from kvpop_vllm.distill.splits import in_split, share_of
from kvpop_vllm.distill.token_file import TokenFile


@pytest.fixture
def mixed(tmp_path):
    """Text in four formats and several files, some of it duplicated."""
    corpus = texts(70)
    write(tmp_path, "a", "jsonl", records(corpus[:30]))
    write(tmp_path, "b", "parquet", records(corpus[30:50]))
    write(tmp_path, "c", "saved", records([*corpus[50:60], *corpus[:7], *corpus[30:33]]))
    for i, text in enumerate(corpus[60:]):
        write(tmp_path / "texts", str(i), "txt", records([text]))
    return tmp_path, corpus


# formats


def test_a_document_per_file_gives_the_same_rows_in_every_format(tmp_path):
    for kind in ("txt", *TABLES):
        for i in range(12):
            write(tmp_path / kind, f"{i:02}", kind, records([f"{i:02} " + "x\r\ny" * 20]))
    plain, *tables = (list(islice(pack(tmp_path / kind), 80)) for kind in ("txt", *TABLES))
    assert all(equal(plain, other) for other in tables)


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
    options = {"split": "all", "tokenizer": tokenizer}
    rows = [list(islice(pack(tmp_path / name, 16, **options), 60)) for name in names]
    assert equal(rows[0], rows[1]) and equal(rows[0], rows[2])


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
    files = find_sources([tmp_path, tmp_path / "other", tmp_path / "deep/../other/own.txt"])
    assert sorted(source.path.parent.name for source in files) in (["deeper", "other"], ["deeper", tmp_path.name])
    assert capsys.readouterr().err == f"{tmp_path}: 1 files of other kinds are passed over (.md)\n"


# packing


@pytest.mark.parametrize("bos", [False, True])
def test_every_pass_holds_every_document_once(mixed, bos):
    folder, corpus = mixed
    length, longest, expected = 32, 64, []
    for text in corpus:
        ids = [BOS] * bos + list(text.encode())
        while ids:
            expected.append([*ids[: longest - 1], EOS])
            ids = ids[longest - 1 :]
    expected.sort()
    total = sum(map(len, expected))
    rows = pack(folder, length, split="all", piece_rows=2, tokenizer=byte_tokenizer(bos=bos))
    tokens = stream(islice(rows, -(-3 * total // length)))
    passes = [pieces(tokens[i * total : (i + 1) * total]) for i in range(3)]
    assert all(sorted(pass_) == expected for pass_ in passes)
    assert passes[0] != passes[1] != passes[2]
    assert stream(rows.one_pass()) == tokens[: total // length * length]


def test_a_document_that_ends_with_eos_gets_no_second_one(tmp_path):
    write(tmp_path, "a", "jsonl", [{"text": "one<eos>"}, {"text": "two"}, {"messages": MESSAGES[:1]}])
    tokenizer = byte_tokenizer("{{ messages[0].content }}<eos>")
    assert sorted(documents(tmp_path, split="all", tokenizer=tokenizer)) == ["Why?", "one", "two"]


def test_seeds_decide_the_order(mixed):
    first, again, other = (list(islice(pack(mixed[0], seed=seed), 50)) for seed in (1, 1, 2))
    assert equal(first, again) and not equal(first, other)
    assert equal(islice(pack(mixed[0], seed=1).in_other_order(), 50), other)


def test_files_are_mixed_in_proportion_to_their_sizes(tmp_path):
    for i in range(20):
        write(tmp_path, f"{i:02}", "jsonl", records(["x" * 100] * 10 * (1 + i // 10)))
    ticks = []
    order = [int(document.origin.split("/")[-1][:2]) for document in documents_of(find_sources(tmp_path), ticks.append)]
    assert len(ticks) == len(order) + 1 and min(ticks) >= 0 and sum(ticks) == pytest.approx(1), "progress adds up"
    assert len(order) == 300 and all(order.count(i) == 10 * (1 + i // 10) for i in range(20))
    lanes = [[i % sources.LANES for i in part] for part in (order[:150], order[150:])]
    assert all(abs(lanes[0].count(lane) - lanes[1].count(lane)) <= 2 for lane in range(sources.LANES))


def test_a_big_file_is_not_held_in_memory(tmp_path):
    path, line = tmp_path / "big.jsonl", json.dumps({"text": "%08d" + " word" * 400}) + "\n"
    with open(path, "w") as file:
        file.writelines(line % i for i in range(4_000))
    assert path.stat().st_size > 7 << 20
    rows = pack(path, 64, split="test", validation=0.0, test=0.04)
    tracemalloc.start()
    try:
        count = sum(1 for _ in rows.one_pass())
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert rows.file.load().read == 4_000 and count > 1000
    assert peak < 6 << 20


def test_long_texts_are_tokenised_in_stretches(tmp_path, monkeypatch):
    corpus = [*texts(12, longest=90), "y" * 400, "z " * 300]
    write(tmp_path, "a", "jsonl", records(corpus))
    expected = list(pack(tmp_path, split="all").one_pass())
    monkeypatch.setattr(tokens, "STRETCH", 100)
    assert equal(pack(tmp_path, split="all").one_pass(), expected)


def test_files_are_closed(tmp_path):
    for i, kind in enumerate(("parquet", "jsonl") * 10):
        write(tmp_path, str(i), kind, records(texts(20, seed=i)))
    folder = str(tmp_path.resolve())

    def still_open():
        """Return the open files of the folder; others may be closed meanwhile."""
        paths = (os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd"))
        return {path for path in paths if path.startswith(folder)}

    open_counts = [len(still_open()) for _ in documents_of(find_sources(tmp_path))]
    assert len(open_counts) == 400 and 1 < max(open_counts) <= sources.LANES and not still_open()


# splits

SPLITS = ("train", "validation", "test")


def splits(paths, **options):
    return {split: documents(paths, split=split, validation=0.2, test=0.3, **options) for split in SPLITS}


def test_splits_are_disjoint_and_complete(mixed):
    """Training rows of several passes hold nothing of the other splits."""
    folder, corpus = mixed
    by_split = splits(folder)
    assert sorted(sum(by_split.values(), [])) == sorted(corpus) and all(by_split.values())
    assert sorted(documents(folder, split="all")) == sorted(corpus)
    rows = pack(folder, validation=0.2, test=0.3, piece_rows=100)
    drawn = {bytes(piece[:-1]).decode() for piece in pieces(stream(islice(rows, 800)))[:-1]}
    assert drawn == set(by_split["train"]) and 800 * rows.length > 2 * rows.pass_tokens


def test_documents_keep_their_split_when_others_are_added(mixed):
    folder, corpus = mixed
    before = splits(folder)
    write(folder, "0", "jsonl", records(texts(40, seed=1)))
    write(folder, "z", "parquet", records(texts(40, seed=2)))
    after = splits(folder)
    assert all(set(before[split]) == set(after[split]) & set(corpus) for split in SPLITS)
    assert sum(map(len, after.values())) == 150


@pytest.mark.parametrize("group", [False, True])
def test_duplicates_of_a_text_are_used_once(tmp_path, group):
    corpus = texts(40)
    for i, kind in enumerate(("jsonl", "parquet", "saved")):
        rows = [{"text": t, "group": f"{i}/{j}" if group else None} for j, t in enumerate(corpus)]
        write(tmp_path, str(i), kind, rows)
    assert sorted(sum(splits(tmp_path).values(), [])) == sorted(corpus)


def test_documents_of_one_group_stay_together(tmp_path):
    corpus = texts(90)
    write(tmp_path, "a", "jsonl", [{"text": text, "group": i % 9} for i, text in enumerate(corpus[:45])])
    write(tmp_path, "b", "parquet", [{"text": text, "group": str(i % 9)} for i, text in enumerate(corpus[45:])])
    groups = {split: {corpus.index(text) % 9 for text in texts} for split, texts in splits(tmp_path).items()}
    assert sum(map(len, groups.values())) == 9 == len(set().union(*groups.values()))


def test_shares_are_as_asked():
    membership = {split: [in_split(share_of(str(i)), split, 0.1, 0.3) for i in range(4000)] for split in SPLITS}
    assert [round(sum(members) / 4000, 1) for members in membership.values()] == [0.6, 0.1, 0.3]


# the file of tokens


def test_text_is_tokenised_once_for_all_rows(mixed, tmp_path, monkeypatch):
    """Seeds, splits and lengths need no other file; another process that has to wait finds it."""
    folder, stored = mixed[0], tmp_path / "stored"
    expected = list(islice(pack(folder, 16, seed=3, split="validation", validation=0.2), 20))
    with ThreadPoolExecutor(2) as executor:
        first, second = executor.map(lambda i: pack(folder, folder=stored)[i], range(2))
    assert equal([first, second], islice(pack(folder), 2))
    assert sorted(path.name for path in stored.iterdir()) == ["tokens.bin", "tokens.json", "tokens.lock"]
    with monkeypatch.context() as patch:
        patch.setattr(TokenFile, "_write", None)
        assert equal(islice(pack(folder, 16, seed=3, split="validation", validation=0.2, folder=stored), 20), expected)
    write(folder, "z", "jsonl", records(texts(40, seed=1)))
    assert equal(islice(pack(folder, folder=stored), 99), islice(pack(folder), 99))


def test_a_file_that_was_not_written_whole_is_written_again(mixed, tmp_path, monkeypatch):
    stored, expected = tmp_path / "stored", pack(mixed[0])[0]

    def killed(*args):
        raise KeyboardInterrupt

    for target in ("kvpop_vllm.files.to_disk", "kvpop_vllm.distill.token_file.write_whole"):
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(target, killed)
            pack(mixed[0], folder=stored)[0]
        assert not (stored / "tokens.json").exists()
    assert torch.equal(pack(mixed[0], folder=stored)[0], expected)


def test_rows_may_be_asked_for_in_any_order(mixed):
    """A pass has 447 rows and ends within a row."""
    rows, again = pack(mixed[0], split="all"), pack(mixed[0], split="all")
    expected = list(islice(rows, 1000))
    order = [0, 1, 2, 77, 446, 447, 448, 900, 447, 446, 0]
    assert rows.pass_tokens // 32 == 447 and rows.pass_tokens % 32
    assert equal([again[row] for row in order], [expected[row] for row in order])


def test_the_order_is_that_of_any_machine(tmp_path):
    """A run may be continued with another version of NumPy, which has to draw the same order."""
    write(tmp_path, "a", "jsonl", records(list("abcdefgh")))
    text = "".join(chr(token) for token in stream(islice(pack(tmp_path, 2, split="all", seed=5), 16)) if token < EOS)
    assert text == "dbfeghcaaegbcfhd"


OTHER = {"length": 33, "split": "all", "seed": 1, "test": 0.1, "piece_rows": 3, "tokenizer": byte_tokenizer(bos=True)}


@pytest.mark.parametrize("name", OTHER)
def test_other_rows_have_another_fingerprint(mixed, name):
    assert pack(mixed[0]).fingerprint == pack(mixed[0]).fingerprint != pack(mixed[0], **{name: OTHER[name]}).fingerprint


@pytest.mark.parametrize("kind", ["txt", *TABLES])
def test_rows_of_a_changed_file_have_another_fingerprint(tmp_path, kind):
    fingerprints = set()
    for end in "!?":
        write(tmp_path, "a", kind, records(["x" * 5000 + end]))
        fingerprints.add(pack(tmp_path).fingerprint)
    assert len(fingerprints) == 2
