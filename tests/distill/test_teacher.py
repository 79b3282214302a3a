"""Stored teacher logits are the model's own within float16, whole after a kill or a full disk.

Logits that do not fit the run are refused.
"""

from __future__ import annotations

import dataclasses
import errno
import json
from functools import partial
from itertools import islice

import pytest
import torch
from distill.byte_tokenizer import byte_tokenizer
from distill.launching import launch
from safetensors.torch import load_file

from kvpop_vllm.config import ConfigError
from kvpop_vllm.distill import teacher
from kvpop_vllm.distill.data import PackedTokens
from kvpop_vllm.distill.recipes import DEMO
from kvpop_vllm.distill.run import stored_teacher, write_teacher
from kvpop_vllm.distill.teacher import TeacherReader, read_index, settings_of, top_logits, write_rows
from kvpop_vllm.model_hook import Dense, load_model
from kvpop_vllm.testing import write_tiny_model

LENGTH, TOP, VOCAB, ROWS = 24, 16, 264, 11
ROW_BYTES = LENGTH * (4 * TOP + 8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Folder with a model, its tokenizer and text."""
    folder = tmp_path_factory.mktemp("teacher")
    byte_tokenizer().save_pretrained(write_tiny_model(folder / "model", "qwen3", vocab=VOCAB))
    lines = (json.dumps({"text": f"{i} " + "words of text " * (i % 7)}) + "\n" for i in range(60))
    (folder / "text.jsonl").write_text("".join(lines))
    return folder


@pytest.fixture(scope="module")
def model(folder):
    return load_model(folder / "model", torch.float32)


@pytest.fixture
def packed(folder):
    return PackedTokens(folder / "text.jsonl", byte_tokenizer(), LENGTH, vocab_size=VOCAB)


@pytest.fixture
def rows(packed):
    return list(islice(packed, ROWS))


@pytest.fixture
def settings(folder, packed):
    return settings_of(folder / "model", packed, TOP)


def write(model, rows, out, settings, count=ROWS, vocab_size=VOCAB):
    """Write logits, three rows to a file."""
    options = {"vocab_size": vocab_size, "shard_bytes": 3 * ROW_BYTES + 1, "quiet": True}
    logits = partial(top_logits, model, top=settings["top"], attend=Dense())
    write_rows(logits, rows, out, settings, count, **options)


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def complete(model, rows, settings, tmp_path):
    """Files that an uninterrupted run writes."""
    write(model, rows, tmp_path / "complete", settings)
    return contents(tmp_path / "complete")


def own_log_probabilities(model, row):
    with torch.no_grad():
        return model(row.unsqueeze(0), attend=Dense()).logits.double().log_softmax(-1)


def divergence(exact, stored):
    """Return the KL divergence at every position between distributions over the stored tokens."""
    p, q = exact.double().log_softmax(-1), stored.double().log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1)


@pytest.mark.parametrize("vocab_size", [VOCAB, 1 << 17])
def test_what_is_read_back_are_the_models_own_logits(model, rows, settings, tmp_path, vocab_size):
    write(model, rows, tmp_path, settings, vocab_size=vocab_size)
    reader = TeacherReader(tmp_path, settings, rows=ROWS)
    for number, row in enumerate(rows):
        exact = own_log_probabilities(model, row)
        stored, ids = reader(row.unsqueeze(0), number)
        assert (stored.dtype, ids.dtype) == (torch.float32, torch.int64)
        best = exact.topk(TOP)
        assert torch.equal(ids, best.indices)
        logits = model(row.unsqueeze(0), attend=Dense()).logits[0].gather(-1, ids[0])
        float16 = (best.values.abs() * 2**-11).clamp_min(2**-25)
        float32 = 2**-21 * logits.abs().max()
        assert ((stored - best.values).abs() <= float16 + float32).all()
        assert divergence(best.values, stored).max() < 1e-6
        again = stored[0] + reader._row(number)["lse"].unsqueeze(-1)
        assert ((again - logits).abs() <= float16[0] + 2 * float32).all()


@pytest.mark.parametrize("vocab_size", [VOCAB, 1 << 17])
def test_what_is_printed_beforehand_is_what_rows_take_of_the_disk(
    model, rows, settings, tmp_path, vocab_size, capsys, monkeypatch
):
    """Rows that a folder has are not counted again."""
    write(model, rows, tmp_path, settings, vocab_size=vocab_size)
    files = [load_file(file) for file in tmp_path.glob("*.safetensors")]
    size = sum(tensor.nbytes for tensors in files for tensor in tensors.values()) // ROWS
    monkeypatch.setattr(teacher, "size_text", str)
    teacher.check_disk(tmp_path, settings, ROWS + 5, vocab_size)
    assert capsys.readouterr().out.startswith(f"teacher's logits of 5 rows: {5 * size}; free in {tmp_path}: ")


@pytest.mark.parametrize("positions", [5, 24, 100])
def test_logits_are_computed_in_slices(model, rows, monkeypatch, positions):
    monkeypatch.setattr(teacher, "POSITIONS", positions)
    tokens = torch.stack(rows[:2])
    best = top_logits(model, tokens, TOP, attend=Dense())
    logits = model(tokens, attend=Dense()).logits
    torch.testing.assert_close(best.logits, logits.topk(TOP).values)
    torch.testing.assert_close(best.lse, logits.logsumexp(-1))
    assert torch.equal(best.ids, logits.topk(TOP).indices)


# continuing interrupted writes


@pytest.mark.parametrize("done", range(ROWS))
def test_a_kill_changes_nothing(model, rows, settings, tmp_path, complete, done):
    with pytest.raises(IndexError):
        write(model, rows[:done], tmp_path / "out", settings)
    (tmp_path / "out/.rows-00001.safetensors.partial").write_bytes(b"cut off")
    assert done < 3 or read_index(tmp_path / "out")["rows"] == done // 3 * 3
    write(model, rows, tmp_path / "out", settings)
    (tmp_path / "out/.rows-00001.safetensors.partial").unlink(missing_ok=True)
    assert contents(tmp_path / "out") == complete


@pytest.mark.parametrize("first", [1, 3, 5, ROWS])
def test_a_folder_is_extended_and_never_cut(model, rows, settings, tmp_path, complete, first):
    for count in (first, ROWS, 2):
        write(model, rows, tmp_path / "out", settings, count)
    assert contents(tmp_path / "out") == complete


@pytest.mark.parametrize("failing", range(1, 9))
def test_a_full_disk_loses_nothing(model, rows, settings, tmp_path, complete, monkeypatch, failing):
    calls = []

    def full(descriptor):
        calls.append(descriptor)
        if len(calls) >= failing:
            raise OSError(errno.ENOSPC, "No space left on device")

    safe = (failing - 1) // 2 * 3  # a file and the index for every three rows
    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", full)
        message = f"rows {safe} to .*: No space left on device; the {safe} rows before them are safe: make room and run"
        with pytest.raises(OSError, match=message) as caught:
            write(model, rows, tmp_path / "out", settings)
    assert "\n" not in str(caught.value) and not list((tmp_path / "out").glob(".*.partial"))
    for number in range(safe):
        part = f"rows-{number // 3:05d}.safetensors"
        assert (tmp_path / "out" / part).read_bytes() == complete[part]
        TeacherReader(tmp_path / "out", settings)(rows[number].unsqueeze(0), number)
    write(model, rows, tmp_path / "out", settings)
    assert contents(tmp_path / "out") == complete


@pytest.mark.slow
def test_two_processes_write_the_files_of_one(tmp_path):
    """They go on where fewer rows were asked for; the model is sharded among them, and the last files are not full."""
    written = []
    for processes in (1, 2):
        model = write_tiny_model(tmp_path / "model", "qwen3")
        outcome = launch(model, tmp_path / str(processes), 7, 11, processes=processes, script="teacher_tiny.py")
        assert outcome.returncode == 0, outcome.stderr[-3000:]
        written.append(contents(tmp_path / str(processes)))
    assert len(written[0]) == 5 and read_index(tmp_path / "2")["rows"] == 11
    assert written[0] == written[1]


# refusals


def test_a_folder_of_other_settings_is_refused(folder, model, packed, rows, settings, tmp_path):
    write(model, rows, tmp_path, settings, 3)
    other_model = write_tiny_model(tmp_path / "other", "qwen3", vocab=VOCAB, seed=1)
    (tmp_path / "other.jsonl").write_text((folder / "text.jsonl").read_text().replace("words", "Words"))
    other_text = PackedTokens(tmp_path / "other.jsonl", byte_tokenizer(), LENGTH, vocab_size=VOCAB)
    other_settings = {
        "length": settings | {"length": 25},
        "seed": settings | {"seed": 1},
        "top": settings_of(folder / "model", packed, TOP + 1),
        "model": settings_of(other_model, packed, TOP),
        "data": settings_of(folder / "model", other_text, TOP),
    }
    for name, changed in other_settings.items():
        for use in (TeacherReader, partial(write, model, rows)):
            with pytest.raises(ConfigError, match=f"with {name} = .*, not .*: use the same {name}, or another folder"):
                use(tmp_path, changed)


def test_a_row_of_other_text_or_beyond_the_last_is_refused(model, rows, settings, tmp_path):
    write(model, rows, tmp_path, settings, 5)
    first, second = rows[:2]
    reader = TeacherReader(tmp_path, settings, rows=5)
    reader(first.unsqueeze(0), 0)
    with pytest.raises(ConfigError, match="row 0 of .* was written for other text: write the teacher's logits again"):
        reader(second.unsqueeze(0), 0)
    for ask in (lambda: reader(first.unsqueeze(0), 5), lambda: TeacherReader(tmp_path, settings, rows=6)):
        with pytest.raises(ConfigError, match="holds the teacher's logits of 5 rows, 6 are needed: let `kvpop distill"):
            ask()


def test_folders_that_hold_something_else_are_refused(model, rows, settings, tmp_path):
    with pytest.raises(ConfigError, match="holds no teacher logits: write them with `kvpop distill teacher`"):
        TeacherReader(tmp_path)
    write(model, rows, tmp_path, settings, 3)
    part = tmp_path / "rows-00000.safetensors"
    part.write_bytes(part.read_bytes()[:-1])
    with pytest.raises(ConfigError, match="rows-00000.safetensors cannot be read .*: write .* again in another folder"):
        TeacherReader(tmp_path)(rows[0].unsqueeze(0), 0)
    for index in ("{", "[]", '{"format": "kvpop-teacher", "version": 2}'):
        (tmp_path / "index.json").write_text(index)
        for use in (TeacherReader, partial(write, model, rows)):
            with pytest.raises(ConfigError, match="index.json is not an index of teacher logits of version 1"):
                use(tmp_path, settings)


# the command


def test_a_folder_of_another_run_is_refused_before_its_disk_is_counted(folder, tmp_path, capsys):
    """Its tokens stay too; what is printed of a folder that goes on has the bytes of its tokens."""
    sizes = {
        "length": 24,
        "positions": None,
        "window": [4],
        "topk": [8],
        "dtype": "float32",
        "kl_top": 8,
        "train_base": True,
    }
    recipe = dataclasses.replace(DEMO, **sizes, steps=1, batch=2)
    name, data = str(folder / "model"), [str(folder / "text.jsonl")]
    write_teacher(name, data, str(tmp_path), recipe)
    tokens = (tmp_path / "tokens.bin").read_bytes()
    assert f"after {len(tokens) / 1e6:.1f} MB of tokens" in capsys.readouterr().out
    (tmp_path / "other.txt").write_text("Other text. " * 40)
    with pytest.raises(ConfigError, match="holds teacher logits with data = "):
        write_teacher(name, [str(tmp_path / "other.txt")], str(tmp_path), recipe, rows=10**14)
    assert (tmp_path / "tokens.bin").read_bytes() == tokens and not capsys.readouterr().out


def test_more_logits_than_the_vocabulary_has_are_all_of_them(folder, model, tmp_path):
    recipe = dataclasses.replace(
        DEMO,
        length=96,
        positions=None,
        window=[8],
        topk=[20],
        dtype="float32",
        kl_top=1000,
        steps=1,
        batch=3,
        train_base=True,
    )
    name, data = str(folder / "model"), [str(folder / "text.jsonl")]
    for count in (1, None):
        write_teacher(name, data, str(tmp_path), recipe, rows=count)
    rows = PackedTokens(data, byte_tokenizer(), 96, vocab_size=VOCAB)
    assert top_logits(model, torch.zeros(1, 5, dtype=torch.long), 1000, attend=Dense()).ids.shape == (1, 5, VOCAB)
    reader = stored_teacher(str(tmp_path), name, rows, recipe)
    row = rows[0].unsqueeze(0)
    logits, ids = reader(row, 0)
    assert logits.shape == (1, 96, VOCAB) and (ids.sort(-1).values == torch.arange(VOCAB)).all()
    torch.testing.assert_close(
        logits, own_log_probabilities(model, row[0]).gather(-1, ids).float(), rtol=2**-11, atol=1e-6
    )
