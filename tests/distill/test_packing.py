"""Rows are packed without borders: every token attends to earlier documents, as if the row were one text."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from distill.rows import Rows
from distill.train_tiny import LENGTH, RECIPES
from transformers import AutoModelForCausalLM

from kvpop_vllm.distill.sparse_attention import Sparse, recency
from kvpop_vllm.distill.student import Student
from kvpop_vllm.distill.teacher import top_logits
from kvpop_vllm.model_hook import Dense, load_model
from kvpop_vllm.scorers import from_tensors
from kvpop_vllm.scorers.checkpoint import read_scorer
from kvpop_vllm.testing import write_random_scorer, write_tiny_model

WINDOW, EOS = 8, 0
ROW = Rows(LENGTH)[0].clamp_min(1).index_fill(0, torch.tensor([30, 55, 70]), EOS).unsqueeze(0)
"""A row ``[1, S]`` of four documents."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Folder of a model whose config names the end of text. Borders could be found by that token."""
    config = write_tiny_model(tmp_path_factory.mktemp("packing") / "model", "qwen3") / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"eos_token_id": EOS, "pad_token_id": EOS}))
    return config.parent


@pytest.fixture(scope="module")
def model(folder):
    return load_model(folder, torch.float32)


@pytest.fixture(params=["uptrain", "streaming-plus", "sparsify"])
def student(request, model, folder, tmp_path):
    recipe = dataclasses.replace(RECIPES["base"], phase=request.param, window=[WINDOW], topk=[20])
    config, layers = read_scorer(write_random_scorer(tmp_path / "scorer", folder, window=WINDOW, topk=20))
    scorers = [from_tensors(config, tensors) for tensors in layers] if recipe.has_scorers else []
    return Student(model, scorers, recipe)


def hidden_of(student, row):
    """Return the student's hidden states ``[1, S, hidden]`` of a row that it is trained on."""
    outputs = []
    hook = student.base.get_decoder().register_forward_hook(lambda m, args, out: outputs.append(out.last_hidden_state))
    student(row, 0, (torch.zeros(1, LENGTH, 1), torch.zeros(1, LENGTH, 1)))
    hook.remove()
    assert len(outputs) == 1
    return outputs[0]


def test_students_see_the_documents_before(student):
    other = ROW.clone()
    other[0, 1] = ROW[0, 1] % 255 + 1  # in the first document, where no policy evicts it
    moved = (hidden_of(student, ROW) - hidden_of(student, other)).abs().amax(-1)[0]
    assert moved[0] == 0 and moved[71:].min() > 1e-3


def test_students_positions_run_on(student):
    roles = student.roles(0)
    attend = {
        "uptrain": Dense(),
        "streaming-plus": Sparse(recency, roles),
        "sparsify": Sparse(lambda layer, k, v, w: student.scorers[layer](k, v, window=WINDOW), roles),
    }[student.recipe.phase]
    positions = torch.arange(LENGTH) + student.first_position(0)
    expected = student.base.get_decoder()(input_ids=ROW, position_ids=positions[None], attend=attend)
    torch.testing.assert_close(hidden_of(student, ROW), expected.last_hidden_state)


def test_the_teacher_reads_one_text(model, folder):
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    logits, ids, _ = top_logits(model, ROW, 256, attend=Dense())
    expected = plain(ROW, attention_mask=torch.ones_like(ROW)).logits
    torch.testing.assert_close(logits, expected.gather(-1, ids), rtol=1e-4, atol=1e-4)
