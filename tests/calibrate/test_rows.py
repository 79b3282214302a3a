"""Rows that are measured and rows that judge share no document."""

import json
from pathlib import Path

import pytest
from distill.byte_tokenizer import EOS, byte_tokenizer

from kvpop_vllm.calibrate import rows
from kvpop_vllm.calibrate.rows import TEXT, read_text
from kvpop_vllm.config import ConfigError


def write(path: Path, documents: list[dict]) -> str:
    path.write_text("".join(json.dumps(document) + "\n" for document in documents))
    return str(path)


def read(path: str, length: int, count: int = 8, protect: bool = False) -> rows.Text:
    return read_text([path], byte_tokenizer(), length, count, vocab_size=258, protect=protect)


def words(side) -> list[set[str]]:
    """Return the words of each row of a side."""
    return [set(bytes(t for t in row.tolist() if t < 256).decode().split()) for row, _ in side]


def test_sides_share_no_document(tmp_path):
    path = write(tmp_path / "text.jsonl", [{"text": f"w{i:02} " * 40} for i in range(40)])
    text = read(path, 64)
    assert text.by_document and len(text.measured) == len(text.held_out) == 8 and len(set(text.units)) == 8
    assert not set.union(*words(text.measured)) & set.union(*words(text.held_out))
    assert all(len(row) == 64 and prompt == 0 for row, prompt in [*text.measured, *text.held_out])


def test_a_row_goes_on_with_the_next_document(tmp_path):
    path = write(tmp_path / "text.jsonl", [{"text": f"{i:02}" * 15} for i in range(80)])
    text = read(path, 64)
    assert all((row == EOS).sum() == 2 for row, _ in text.measured)
    assert not set.union(*words(text.measured)) & set.union(*words(text.held_out))


def test_few_documents_give_separate_passages(tmp_path):
    path = write(tmp_path / "text.jsonl", [{"text": "".join(f"{i:03} " for i in range(500))}])
    text = read(path, 64, count=12)
    assert not text.by_document and text.units == list(range(12)) and len(text.measured) == 12
    assert not set.union(*words(text.measured)) & set.union(*words(text.held_out))


def test_rows_of_few_documents_are_judged_as_passages(tmp_path):
    """There are enough documents, but one has most of the rows of its side."""
    groups = [f"small {i}" for i in range(5)] + ["large"] * 60 + [f"small {i}" for i in range(5, 25)]
    documents = [{"text": f"{i:03} " * 20, "group": group} for i, group in enumerate(groups)]
    text = read(write(tmp_path / "text.jsonl", documents), 64, count=10)
    assert not text.by_document and text.units == list(range(10))


def test_the_beginnings_of_large_files_are_read(tmp_path, monkeypatch):
    """In turn, so that a large text takes no longer than a small one."""
    monkeypatch.setattr(rows, "READ", 4)
    files = [write(tmp_path / f"{name}.jsonl", [{"text": f"{name}{i:04} " * 12} for i in range(4000)]) for name in "ab"]
    text = read_text(files, byte_tokenizer(), 64, 16, vocab_size=258, protect=False)
    assert len(text.measured) == len(text.held_out) == 16
    numbers = {name: [] for name in "ab"}
    for word in set.union(*words([*text.measured, *text.held_out])):
        if word[0] in numbers and len(word) == 5:
            numbers[word[0]].append(int(word[1:]))
    assert all(of_file and max(of_file) < 4 * 16 * 64 / 72 for of_file in numbers.values())


def test_text_that_is_too_short_is_refused(tmp_path):
    path = write(tmp_path / "text.jsonl", [{"text": "x" * 800}])
    with pytest.raises(ConfigError, match="the text holds 12 rows of 64 tokens and 16 are needed"):
        read(path, 64)


def test_protected_prompts_are_those_of_documents(tmp_path):
    documents = [{"prompt": f"{i:02}", "response": "y" * (40 + 10 * (i % 4))} for i in range(64)]
    text = read(write(tmp_path / "text.jsonl", documents), 64, protect=True)
    assert len(text.measured) == 8
    for row, prompt in [*text.measured, *text.held_out]:
        assert (
            bytes(row[:prompt].tolist()).decode().startswith("<user>")
            and row[prompt - 1 :].tolist().count(ord("y")) > 30
        )


def test_documents_without_a_prompt_or_with_a_long_one_are_left_out(tmp_path):
    documents = [{"prompt": "x" * (40 if i % 2 else 2), "response": "y" * 90} for i in range(64)]
    documents += [{"text": "z" * 90} for _ in range(64)]
    text = read(write(tmp_path / "text.jsonl", documents), 64, protect=True)
    assert all(0 < prompt <= 32 and ord("z") not in row for row, prompt in [*text.measured, *text.held_out])


def test_the_text_of_the_package_is_prose_code_and_chat_with_its_licence():
    text = read_text([], byte_tokenizer(), 2048, 12, vocab_size=258, protect=False)
    assert text.by_document and len(text.measured) == len(text.held_out) == 12
    assert 250_000 < TEXT.stat().st_size < 350_000
    groups = [json.loads(line)["group"].split(":")[0] for line in TEXT.read_text().splitlines()]
    assert groups == ["prose", "code", "chat"] * 12
    assert "PYTHON SOFTWARE FOUNDATION LICENSE" in TEXT.with_name("text.LICENSE").read_text()


def test_chats_of_the_package_need_no_chat_template():
    text = read_text([], byte_tokenizer(template=None), 2048, 12, vocab_size=258, protect=False)
    assert any(b"user: " in bytes(t for t in row.tolist() if t < 256) for row, _ in text.measured + text.held_out)


def test_kinds_that_take_turns_are_on_both_sides(tmp_path):
    documents = [{"text": f"{'ab'[i % 2]}{i:02} " * 40} for i in range(40)]
    text = read(write(tmp_path / "text.jsonl", documents), 64, count=20)
    for side in (text.measured, text.held_out):
        kinds = [one[0] for row in words(side) for one in row if len(one) == 3]
        assert 4 < kinds.count("a") < len(kinds) - 4
