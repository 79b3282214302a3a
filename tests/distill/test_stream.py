"""Data sets by name, whole and as a stream, and the filters on their records; the data sets are local folders.

`datasets` reads them by its own builders, as it reads those of its hub.
"""

from __future__ import annotations

import dataclasses
import json
from itertools import islice

import pytest
import torch
from distill.byte_tokenizer import EOS, byte_tokenizer
from distill.launching import last_loss, launch
from distill.texts_on_disk import documents, equal, pack, pieces, records, texts, write
from distill.train_tiny import LENGTH, RECIPES

from kvpop_vllm.config import ConfigError
from kvpop_vllm.distill import stream as streams
from kvpop_vllm.distill.data import DocumentRows
from kvpop_vllm.distill.hub_data import HubData
from kvpop_vllm.distill.metrics import read_metrics
from kvpop_vllm.distill.sources import Selection
from kvpop_vllm.distill.splits import in_split, share_of
from kvpop_vllm.distill.stream import StreamedRows
from kvpop_vllm.distill.trainer import Trainer
from kvpop_vllm.testing import write_tiny_model

FILES, EACH = 12, 15


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    """Keep the cache of `datasets` in the test's folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))
        yield


@pytest.fixture
def data(tmp_path, monkeypatch):
    """A data set of several files with fields, and its records by number."""
    monkeypatch.setattr(streams, "BLOCK", {"train": 16})
    all_records = [
        {"text": text, "effort": "high" if i % 3 else "low", "about": {"kind": str(i % 2)}}
        for i, text in enumerate(texts(FILES * EACH))
    ]
    for i in range(FILES):
        write(tmp_path / "data", f"train-{i:02}", "jsonl", all_records[i * EACH : (i + 1) * EACH])
    return tmp_path / "data", all_records


def streamed(folder, length=32, **options):
    return StreamedRows([f"hf:{folder}"], options.pop("tokenizer", None) or byte_tokenizer(), length, **options)


def texts_of(rows, count):
    """Return the documents that lie whole in the first ``count`` packed rows."""
    line = [token for row in islice(rows, count) for token in row.tolist()]
    return [bytes(piece[:-1]).decode() for piece in pieces(line) if piece[-1] == EOS]


def shard_of(state):
    """Return the number of the file in which the state of a stream is."""
    while "shard_idx" not in state:
        state = state["examples_iterable"]
    return state["shard_idx"]


def trained_on(all_records):
    return [r["text"] for r in all_records if in_split(share_of(r["text"]), "train", 0.05, 0.05)]


def test_a_pass_of_a_stream_has_each_document_once(data):
    """Documents are those of the split; passes have other orders, and blocks of documents follow each other."""
    folder, all_records = data
    rows, trained = streamed(folder, piece_rows=100), trained_on(all_records)
    size = sum(len(text.encode()) + 1 for text in trained)
    read = texts_of(rows, 2 * size // 32 + 1)
    first, second = read[: len(trained)], read[len(trained) : 2 * len(trained)]
    assert sorted(first) == sorted(trained) and len(second) >= len(trained) - 1 and set(second) <= set(trained)
    assert first != trained and first != second
    for block in range(0, len(trained) - 15, 16):
        assert sorted(first[block : block + 16]) == sorted(trained[block : block + 16])


def test_rows_follow_from_the_seed_and_their_number(data):
    folder, _ = data
    rows = list(islice(streamed(folder), 60))
    assert equal(rows, islice(streamed(folder), 60))
    for other in (streamed(folder, seed=1), streamed(folder).in_other_order()):
        assert not equal(rows, islice(other, 60))
    assert equal(islice(streamed(folder).in_other_order(), 60), islice(streamed(folder, seed=1), 60))
    alone, again = streamed(folder), streamed(folder)
    assert equal([alone[j] for j in range(1, 60, 4)], rows[1::4]), "a process among four"
    assert torch.equal(again[59], rows[59]) and torch.equal(again[3], rows[3]), "an earlier row"


def test_a_stream_goes_on_without_what_was_before(data):
    """Files before the place are not read, but for the last one of them: they hold something else by then."""
    folder, _ = data
    complete = list(islice(streamed(folder), 800))
    rows = streamed(folder)
    for j in range(600):
        rows[j]
    state = json.loads(json.dumps(rows.state()))
    file = shard_of(state["state"])
    goes_on = streamed(folder)
    for i in range(file - 1):
        (folder / f"train-{i:02}.jsonl").write_text("no JSON")
    goes_on.restore(state)
    assert 3 <= file < FILES and 400 < state["row"] <= 599
    assert equal([goes_on[j] for j in range(599, 700)], complete[599:700])


@pytest.mark.slow
def test_training_goes_on_at_the_place_of_a_stream(data, tmp_path, monkeypatch):
    """Losses are those of an undisturbed run; the checkpoint has the place, and the start of the stream is not read."""
    model = write_tiny_model(tmp_path / "model", "qwen3", vocab=264)
    recipe = dataclasses.replace(RECIPES["frozen"], batch=12, steps=6, fit_decays=False)

    class Interrupted(StreamedRows):
        def __getitem__(self, row):
            if row == 50:
                raise KeyboardInterrupt
            return super().__getitem__(row)

    def run(out, kind=StreamedRows):
        rows = kind([f"hf:{data[0]}"], byte_tokenizer(), LENGTH)
        return Trainer(model, recipe, tmp_path / out, rows, save_every=4, quiet=True).run(), rows

    expected, _ = run("undisturbed")
    with pytest.raises(KeyboardInterrupt):
        run("cut", Interrupted)
    notes = json.loads((tmp_path / "cut/run/step-4/meta.json").read_text())["notes"]
    assert 0 < notes["rows"]["row"] < 48
    begins, states = StreamedRows._begin, []
    monkeypatch.setattr(StreamedRows, "_begin", lambda rows, state: states.append(state) or begins(rows, state))
    assert run("cut")[0] == expected and states == [notes["rows"]["state"]]


@pytest.mark.slow
def test_two_processes_go_on_with_the_stream_of_one(data, tmp_path, monkeypatch):
    """One process is killed in its fifth step; two take the rows after its checkpoint, and losses are those of one."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    model = write_tiny_model(tmp_path / "model", "qwen3", vocab=264)
    undisturbed, cut = tmp_path / "undisturbed", tmp_path / "cut"
    expected = last_loss(launch(model, undisturbed, data[0], script="stream_tiny.py"))
    assert launch(model, cut, data[0], 50, script="stream_tiny.py").returncode == -9
    assert [path.name for path in (cut / "run").glob("step-*")] == ["step-4"]
    goes_on = launch(model, cut, data[0], processes=2, script="stream_tiny.py")
    assert last_loss(goes_on) == pytest.approx(expected, rel=1e-4)
    meta = json.loads((cut / "run/step-6/meta.json").read_text())
    assert meta["processes"] == 2 and meta["notes"]["rows"]["row"] > 48
    one, two = (read_metrics(folder / "run/metrics.jsonl") for folder in (undisturbed, cut))
    assert len(one) == 6 and two[:4] == one[:4]
    for a, b in zip(one, two, strict=True):
        assert b == pytest.approx(a, rel=1e-4)


def test_data_sets_take_turns(data, tmp_path):
    """Records of two data sets alternate; the state of both is restored."""
    folder, _ = data
    write(tmp_path / "other", "train", "parquet", records([f"other {i}" for i in range(60)]))
    names = [f"hf:{folder}", f"hf:{tmp_path}/other:train"]
    read = texts_of(rows := StreamedRows(names, byte_tokenizer(), 32, piece_rows=100), 120)
    assert 0.3 < sum(text.startswith("other") for text in read) / len(read) < 0.7
    goes_on = StreamedRows(names[::-1], byte_tokenizer(), 32, piece_rows=100)
    goes_on.restore(json.loads(json.dumps(rows.state())))
    assert rows.place.row > 50 and torch.equal(goes_on[120], rows[120]) and rows.fingerprint == goes_on.fingerprint


def test_documents_of_a_stream_as_rows(data, tmp_path):
    folder, all_records = data
    options = {"validation": 0.0, "test": 0.0, "shortest": 60, "after_prompt": False}
    talks = [{"prompt": "Why? " * i, "response": f"{i} " + "So. " * 9} for i in range(1, 40)]
    write(tmp_path / "talks", "train", "jsonl", talks)
    rows = streamed(tmp_path / "talks", 100, pack=False, **options)
    stored = DocumentRows(tmp_path / "talks", byte_tokenizer(), 100, **options)
    count = len(stored._documents[1])
    of_stream, of_file = (sorted((r[j].tolist(), r.prompt_length(j)) for j in range(count)) for r in (rows, stored))
    assert count > 20 and of_stream == of_file


def test_splits_of_a_stream_are_disjoint(data):
    folder, all_records = data
    rows = streamed(folder, validation=0.3, test=0.1, piece_rows=100)
    train, validation = set(texts_of(rows, 400)), set(texts_of(rows.of_split("validation"), 100))
    expected = {r["text"] for r in all_records if in_split(share_of(r["text"]), "validation", 0.3, 0.1)}
    assert validation <= expected and len(validation) > 10 and not train & expected


SELECTIONS = {
    "one field": (["effort=high"], lambda r, i: i % 3 > 0),
    "alternatives": (["effort=high", "effort=low"], lambda r, i: True),
    "two fields": (["effort=low", "about.kind=1"], lambda r, i: i % 3 == 0 and i % 2 == 1),
}


@pytest.mark.parametrize("kind", ["files", "whole", "stream"])
@pytest.mark.parametrize("name", SELECTIONS)
def test_records_are_selected_by_their_fields(data, kind, name):
    folder, all_records = data
    select, fits = SELECTIONS[name]
    expected = {r["text"] for i, r in enumerate(all_records) if fits(r, i)}
    options = {"split": "all", "select": select, "piece_rows": 100}
    if kind == "stream":
        read = set(texts_of(streamed(folder, **options), 1200))
    else:
        read = set(documents(folder if kind == "files" else f"hf:{folder}", split="all", select=select))
    assert read == expected


def test_long_documents_are_left_out(data):
    folder, all_records = data
    expected = {r["text"] for r in all_records if len(r["text"].encode()) <= 90}
    options = {"split": "all", "longest": 90}
    assert set(documents(folder, **options)) == expected and 10 < len(expected) < 100
    assert set(texts_of(streamed(folder, piece_rows=100, **options), 300)) == expected


def test_a_data_set_by_name_gives_the_rows_of_its_files(data, tmp_path):
    folder, _ = data
    write(tmp_path / "one", "train", "jsonl", records(texts(40)))
    assert equal(islice(pack(f"hf:{tmp_path}/one"), 60), islice(pack(tmp_path / "one"), 60))


@pytest.mark.parametrize("prompts", [False, True])
def test_several_processes_tokenise_into_the_same_file(data, tmp_path, prompts):
    folder, _ = data
    write(folder, "talks", "jsonl", [{"prompt": "Why? " * i, "response": "So. \ud800"} for i in range(1, 20)])
    files = []
    for processes in (1, 2):
        options = {"folder": tmp_path / str(processes), "processes": processes}
        rows = (
            pack(folder, **options)
            if not prompts
            else DocumentRows(folder, byte_tokenizer(), 32, shortest=2, after_prompt=False, **options)
        )
        rows.file.load()
        files.append((options["folder"] / "tokens.bin").read_bytes())
        assert not list(options["folder"].glob("documents-*"))
    assert files[0] == files[1]


def test_an_error_of_one_of_several_processes_is_one_line(tmp_path):
    write(tmp_path, "talks", "jsonl", [{"messages": [{"role": "user", "content": "x"}]}] * 3)
    with pytest.raises(ConfigError, match="has no chat template|no chat template: give `text` instead") as caught:
        pack(tmp_path, tokenizer=byte_tokenizer(None), processes=2, split="all")[0]
    assert "\n" not in str(caught.value)


OTHER = {"length": 33, "split": "all", "seed": 1, "piece_rows": 3, "longest": 99, "pack": False}
OTHER |= {"select": ["effort=low"]}


@pytest.mark.parametrize("name", OTHER)
def test_other_streams_have_another_fingerprint(data, name):
    folder, _ = data
    assert (
        streamed(folder).fingerprint
        == streamed(folder).fingerprint
        != streamed(folder, **{name: OTHER[name]}).fingerprint
    )


def test_a_changed_data_set_has_another_fingerprint(data):
    folder, _ = data
    before = streamed(folder).fingerprint
    write(folder, "train-00", "jsonl", records(["something else"]))
    assert streamed(folder).fingerprint != before


REFUSED = {
    "no data set": (["file.jsonl"], {}, "--stream reads data sets, and file.jsonl is none: give hf:NAME"),
    "no name": (["hf:"], {}, "hf: is no name of a data set: give hf:NAME"),
    "no folder": (["hf:./nowhere/at/all"], {}, "hf:./nowhere/at/all cannot be read"),
    "other split": (["hf:{data}:dev"], {}, "has the splits train, not dev: give one of them"),
    "no column": (["hf:{data}"], {"select": ["size=3"]}, "has no column size, only .*: change --select size=3"),
    "no condition": (["hf:{data}"], {"select": ["size"]}, "--select size is no condition: give FIELD=VALUE"),
    "nothing fits": (["hf:{data}"], {"select": ["effort=none"]}, "has no document that fits --select effort=none: give more"),
    "all too long": (["hf:{data}"], {"longest": 1}, "has no document that fits --longest 1: give more text"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_streams_that_cannot_be_read_are_refused_in_one_line(data, case):
    names, options, message = REFUSED[case]
    with pytest.raises(ConfigError, match=message) as caught:
        StreamedRows([name.format(data=data[0]) for name in names], byte_tokenizer(), 32, **options)[0]
    assert "\n" not in str(caught.value)


def test_files_without_the_selected_fields_are_refused(tmp_path):
    write(tmp_path, "a", "txt", records(["plain text"]))
    with pytest.raises(
        ConfigError, match="a.txt has no fields for --select effort=high: leave the file or --select out"
    ):
        pack(tmp_path, select=["effort=high"])
    write(tmp_path / "b", "b", "jsonl", records(["no effort"]))
    with pytest.raises(ConfigError, match="there are no documents in .*: none fits --select effort=high"):
        pack(tmp_path / "b", select=["effort=high"], split="all")[0]


@pytest.mark.parametrize("text, parts", [
    ("hf:a/b", ("a/b", None, None, None)),
    ("hf:a/b@v1.0:high_part00", ("a/b", "v1.0", None, "high_part00")),
    ("hf:a/b:sample-10BT/train", ("a/b", None, "sample-10BT", "train")),
    ("hf:./folder", ("./folder", None, None, None)),
])  # fmt: skip
def test_names_of_data_sets(text, parts):
    name = HubData(text)
    assert (name.path, name.revision, name.config, name.split) == (*parts[:3], parts[3] or "train")


def test_a_record_that_cannot_be_read_is_refused_where_it_is_met(tmp_path):
    """The rows before it are there; the error says which data set it is of, and from which row on."""
    write(tmp_path, "a", "jsonl", records([f"document {i} of a good file" for i in range(2000)]))
    (tmp_path / "b.jsonl").write_text('{"text": "begun\n')
    rows = StreamedRows([f"hf:{tmp_path}"], byte_tokenizer(), 32)
    assert len(rows[0]) == 32
    with pytest.raises(
        ConfigError, match=f"^hf:{tmp_path} cannot be read from row 2000 on .JSON.*: mend the data"
    ) as caught:
        rows[100_000]
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("sets", [1, 2])
def test_a_record_without_text_late_in_a_stream_is_named(data, tmp_path, sets):
    """It has its number in the pass, also after the state of a stream was restored."""
    folder, all_records = data
    bad = {**all_records[0], "text": None}
    write(folder, f"train-{FILES}", "jsonl", [*all_records[:7], bad])
    names, row = [f"hf:{folder}"], f"hf:{folder}, row {FILES * EACH + 7}"
    if sets == 2:
        write(tmp_path / "other", "train", "jsonl", records(["It is longer."] * 2 * FILES * EACH))
        names, row = [*names, f"hf:{tmp_path}/other"], f"row {2 * (FILES * EACH + 7)} of all in turn"
    rows, goes_on = (StreamedRows(names, byte_tokenizer(), 32) for _ in range(2))
    rows[100]
    goes_on.restore(json.loads(json.dumps(rows.state())))
    for stream in (rows, goes_on):
        with pytest.raises(ConfigError, match=f"{row} has no field `text`"):
            stream[100_000]


def test_other_spellings_of_a_data_set_are_the_same_run(data, tmp_path, monkeypatch):
    """Fingerprints and rows are the same, and a data set that is named twice is read once."""
    folder, _ = data
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "other", "train", "parquet", records([f"other {i}" for i in range(60)]))
    spellings = ["hf:data", "hf:./data", f"hf:{folder}", "hf:other/../data:train", "hf:data:default/train"]
    of_stream = [StreamedRows([name, "hf:other"], byte_tokenizer(), 32) for name in spellings]
    of_stream.append(StreamedRows(["hf:./other:train", *spellings[:2]], byte_tokenizer(), 32))
    assert len({rows.fingerprint for rows in of_stream}) == 1
    rows = [list(islice(rows, 300)) for rows in of_stream]
    assert all(equal(rows[0], same) for same in rows)
    assert len({pack([name]).fingerprint for name in spellings}) == 1


@pytest.mark.parametrize(
    "condition, fits",
    [("good=true", 1), ("good=True", 0), ("size=3", 1), ("missing=None", 0), ("missing=null", 0), ("name=x", 1)],
)
def test_values_are_compared_as_text_or_json(condition, fits):
    assert ({"good": True, "size": 3, "name": "x"} in Selection([condition])) == bool(fits)
