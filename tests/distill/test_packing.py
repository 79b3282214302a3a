"""Rows are packed without borders: every token attends to earlier documents, as if the row were one text."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from distill.byte_tokenizer import EOS, byte_tokenizer
from distill.train_tiny import RECIPES
from transformers import AutoModelForCausalLM

from kvpop_vllm.distill.data import PackedTokens
from kvpop_vllm.distill.hook import Dense, load_model
from kvpop_vllm.distill.sparse import Sparse, recency
from kvpop_vllm.distill.student import Student
from kvpop_vllm.distill.teacher import top_logits
from kvpop_vllm.scorers import from_tensors
from kvpop_vllm.scorers.checkpoint import read_scorer
from kvpop_vllm.testing import write_random_scorer, write_tiny_model

VOCABULARY, LENGTH, WINDOW = 258, 96, 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Folder with text, a scorer, and a model whose config names the end of text.

    Borders could be found by that token.
    """
    folder = tmp_path_factory.mktemp("packing")
    config = write_tiny_model(folder / "model", "qwen3", vocab=VOCABULARY) / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"eos_token_id": EOS, "pad_token_id": EOS}))
    write_random_scorer(folder / "scorer", folder / "model", window=WINDOW, topk=20)
    lines = (json.dumps({"text": f"{i}: a document" + " of words" * (i % 3)}) + "\n" for i in range(60))
    (folder / "text.jsonl").write_text("".join(lines))
    return folder


@pytest.fixture(scope="module")
def model(folder):
    return load_model(folder / "model", torch.float32)


@pytest.fixture(scope="module")
def row(folder):
    """A row ``[1, S]`` of at least three documents."""
    row = PackedTokens(folder / "text.jsonl", byte_tokenizer(), LENGTH, vocab_size=VOCABULARY)[0]
    assert (row[10:-10] == EOS).sum() >= 2
    return row.unsqueeze(0)


@pytest.fixture(params=["uptrain", "streaming-plus", "sparsify"])
def student(request, model, folder):
    config, layers = read_scorer(folder / "scorer")
    scorers = [from_tensors(config, tensors) for tensors in layers] if request.param == "sparsify" else []
    recipe = dataclasses.replace(RECIPES["base"], phase=request.param, window=[WINDOW], topk=[20])
    return Student(model, scorers, recipe)


def hidden_of(student, row):
    """Return the student's hidden states ``[1, S, hidden]`` of a row that it is trained on."""
    seen = []
    hook = student.base.get_decoder().register_forward_hook(lambda m, args, out: seen.append(out.last_hidden_state))
    student(row, 0, lambda tokens, number: (torch.zeros(1, LENGTH, 1), torch.zeros(1, LENGTH, 1)))
    hook.remove()
    assert len(seen) == 1
    return seen[0]


def with_another_sink(row):
    """Return the row with another token in the first document, one that no policy evicts."""
    row = row.clone()
    row[0, 1] = (row[0, 1] + 1) % 256
    return row


def test_students_see_the_documents_before(student, row):
    last = int((row[0, :-10] == EOS).nonzero()[-1]) + 1
    moved = (hidden_of(student, row) - hidden_of(student, with_another_sink(row))).abs().amax(-1)[0]
    assert moved[0] == 0 and moved[last:].min() > 1e-3


def test_students_positions_run_on(student, row):
    roles = student.roles(0)
    attend = {
        "uptrain": Dense(),
        "streaming-plus": Sparse(recency, roles),
        "sparsify": Sparse(lambda layer, k, v, w: student.scorers[layer](k, v, window=WINDOW), roles),
    }[student.recipe.phase]
    positions = torch.arange(LENGTH) + student.first_position(0)
    expected = student.base.get_decoder()(input_ids=row, position_ids=positions[None], attend=attend)
    torch.testing.assert_close(hidden_of(student, row), expected.last_hidden_state)


def test_the_teacher_reads_one_text(model, folder, row):
    plain = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32, attn_implementation="eager")
    logits, ids, _ = top_logits(model, row, VOCABULARY, attend=Dense())
    expected = plain(row, attention_mask=torch.ones_like(row)).logits
    torch.testing.assert_close(logits, expected.gather(-1, ids), rtol=1e-4, atol=1e-4)
