"""Texts and options from which no training rows can be made are refused in one line."""

from __future__ import annotations

import datasets
import pytest
from distill.byte_tokenizer import byte_tokenizer
from distill.texts_on_disk import pack, records, texts, write

from kvpop_vllm.config import ConfigError

GOOD = b'{"text": "good"}\n'
BAD_FILES = {
    "empty file": ("a.jsonl", b"", "there are no documents in .*a.jsonl: all are empty"),
    "blank file": ("a.txt", b" \n", "there are no documents in .*a.txt"),
    "unknown kind": ("a.csv", b"x", "a.csv is of no kind that can be read: .txt, .jsonl, .parquet or a `datasets` folder"),
    "no JSON": ("a.jsonl", GOOD + b'\n{"text": }\n', "a.jsonl:3 is not JSON .Expecting value.: write one object per line"),
    "deep JSON": ("a.jsonl", GOOD + b"[" * 10**5, "a.jsonl:2 is not JSON .*recursion"),
    "no object": ("a.jsonl", GOOD * 2 + b"[1]", "a.jsonl:3 is not a JSON object: write one per line"),
    "no text": ("a.jsonl", GOOD + b'{"body": "x"}', "a.jsonl:2 has no field `text` .*: add one"),
    "text of numbers": ("a.jsonl", b'{"text": [1]}', "a.jsonl:1 has no field `text` .a string."),
    "prompt alone": ("a.jsonl", b'{"prompt": "x", "response": null}', "a.jsonl:1 has no field .*`prompt` and `response`"),
    "response of numbers": ("a.jsonl", b'{"prompt": "x", "response": 1}', "a.jsonl:1: the `content` of message 1 is not text"),
    "no role": ("a.jsonl", b'{"messages": [{"content": "x"}]}', "a.jsonl:1: message 0 needs a `role` and a `content`"),
    "no content": ("a.jsonl", b'{"messages": [{"role": "user"}]}', "a.jsonl:1: message 0 needs a `role` and a `content`"),
    "broken UTF-8 in JSONL": ("a.jsonl", GOOD + b'{"text": "\xff"}', "a.jsonl:2 is not UTF-8: convert the file or leave"),
    "broken UTF-8 in text": ("a.txt", b"abc\xff", "a.txt is not UTF-8 .byte 3.: convert it or leave it out"),
    "no Parquet": ("a.parquet", b"PAR1", "a.parquet is not a Parquet file .*: leave it out"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_FILES)
def test_bad_files_are_refused_in_one_line(tmp_path, case):
    name, content, message = BAD_FILES[case]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=message) as caught:
        pack(tmp_path / name, 2, split="all")[0]
    assert "\n" not in str(caught.value)


def test_bad_rows_of_tables_are_named(tmp_path):
    for kind in ("parquet", "saved"):
        path = write(tmp_path, "a", kind, [{"text": "good"}] * 9 + [{"text": None}])
        with pytest.raises(ConfigError, match=f"{path}, row 9 has no field `text`"):
            pack(path, split="all")[0]
        path = write(tmp_path, "b", kind, [{"prompt": "x", "answer": "y"}])
        with pytest.raises(ConfigError, match=f"{path} has no column .*, only prompt, answer: rename one"):
            pack(path)


def test_damaged_tables_are_refused(tmp_path):
    path = write(tmp_path, "a", "parquet", records(texts(40)))
    table = path.read_bytes()
    footer = 8 + int.from_bytes(table[-8:-4], "little")
    path.write_bytes(table[:4] + bytes(len(table) - 4 - footer) + table[-footer:])
    with pytest.raises(ConfigError, match="a.parquet is not a whole Parquet file .*: leave it out") as caught:
        pack(path)[0]
    assert "\n" not in str(caught.value)
    path = write(tmp_path, "b", "saved", records(["x"]))
    (path / "state.json").write_text("{}")
    with pytest.raises(ConfigError, match="b is not a `datasets` folder .*: leave it out"):
        pack(path)


def test_folders_without_text_or_with_several_datasets_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="there is no file or folder .*nowhere: give --data one that exists"):
        pack(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="no text is given: name files or folders with --data"):
        pack([])
    (tmp_path / "notes.md").write_text("x")
    with pytest.raises(ConfigError, match="holds no .txt, .jsonl, .parquet file and no `datasets` folder"):
        pack(tmp_path)
    datasets.DatasetDict({"train": datasets.Dataset.from_list(records(["x"]))}).save_to_disk(tmp_path / "both")
    with pytest.raises(ConfigError, match="holds several datasets: give the folders of those that are meant .*train"):
        pack(tmp_path)


BAD_OPTIONS = {
    "ids beyond the model": ({"vocab_size": 100, "tokenizer": byte_tokenizer(eos="<0x00>")}, "but the model knows 100: use the model's own tokenizer"),
    "EOS beyond the model": ({"vocab_size": 256}, "gives token 256, .* knows 256: use the model's own tokenizer"),
    "no EOS": ({"tokenizer": byte_tokenizer(eos=None)}, "no end-of-text token .eos_token.: set one in tokenizer_config"),
    "too few tokens": ({"length": 10**6}, "holds [0-9]+ tokens, too few for one row of 1000000: give more text or lower"),
    "empty split": ({"split": "validation", "validation": 0.0}, "the validation split of .* none of 5 documents; give more"),
    "unknown split": ({"split": "dev"}, "split must be one of train, validation, test, all, got 'dev'"),
    "short rows": ({"length": 1}, "a row needs at least 2 tokens, got length 1: raise --length"),
    "no training share": ({"validation": 0.5, "test": 0.5}, "leave nothing to train on: lower them"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_OPTIONS)
def test_bad_options_are_refused_in_one_line(tmp_path, case):
    options, message = BAD_OPTIONS[case]
    write(tmp_path, "a", "jsonl", records(texts(5)))
    with pytest.raises(ConfigError, match=message) as caught:
        pack(tmp_path, **options)[0]
    assert "\n" not in str(caught.value)
