"""Rows of one document each: whole documents with their prompts, which are protected and left out of the loss."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from distill.byte_tokenizer import CHAT, EOS, byte_tokenizer
from distill.texts_on_disk import write
from distill.tiny_text import write_byte_tokenizer
from distill.train_tiny import RECIPES
from distill.typed import distill, refused
from transformers import AutoModelForCausalLM

from kvpop_vllm.config import ConfigError
from kvpop_vllm.distill.data import DocumentRows
from kvpop_vllm.distill.gates import TrimKVAttend, capacity_loss
from kvpop_vllm.distill.student import Student
from kvpop_vllm.model_hook import load_model
from kvpop_vllm.testing import random_prompt

TALKS = [{"prompt": "Why? " * i, "response": f"{i} " + "So. " * (3 * i)} for i in range(1, 40)]
FULL = [f"<user>{t['prompt']}</user>\n<assistant>{t['response']}</assistant>\n" for t in TALKS]
PROMPTS = [len(f"<user>{t['prompt']}</user>\n") for t in TALKS]


def rows_of(path, length=200, shortest=60, after_prompt=False, **options) -> DocumentRows:
    options = {"validation": 0.0, "test": 0.0, "shortest": shortest, "after_prompt": after_prompt} | options
    return DocumentRows(path, byte_tokenizer(), length, **options)


@pytest.mark.parametrize("after_prompt", [False, True])
def test_a_row_is_a_document_up_to_its_length(tmp_path, after_prompt):
    """A pass holds every document that is long enough once, each pass in its own order."""
    path = write(tmp_path, "talks", "jsonl", [*TALKS, {"text": "plain " * 20}])
    rows = rows_of(path, after_prompt=after_prompt)
    expected = {}
    for text, prompt in zip([*FULL, "plain " * 20], [*PROMPTS, 0], strict=True):
        tokens = [*text.encode(), EOS][:200]
        if len(tokens) - (prompt if after_prompt else 0) >= 60:
            expected[tuple(tokens)] = min(prompt, len(tokens) - 1)
    count = len(expected)
    assert 5 < count < 40
    passes = [[tuple(rows[j].tolist()) for j in range(n * count, (n + 1) * count)] for n in (0, 1)]
    assert all({*rows} == {*expected} for rows in passes) and passes[0] != passes[1]
    assert [rows.prompt_length(j) for j in range(count)] == [expected[row] for row in passes[0]]
    other = rows.in_other_order()
    assert {tuple(other[j].tolist()) for j in range(count)} == {*expected}
    assert [*map(tuple, (other[j].tolist() for j in range(count)))] != passes[0]
    assert rows.fingerprint != rows_of(path, 199).fingerprint


def test_documents_from_which_nothing_is_evicted_are_refused(tmp_path):
    path = write(tmp_path, "talks", "jsonl", TALKS[:5])
    with pytest.raises(ConfigError, match="no document of 150 tokens after its prompt: give longer documents"):
        rows_of(path, shortest=150, after_prompt=True)[0]


@pytest.mark.parametrize("prompt", [0, 1, 37, 700])
def test_the_loss_covers_what_follows_the_prompt(model, prompt):
    """KL and cross-entropy are means over the positions that predict what follows the prompt."""
    options = {"kl": 0.7, "ce": 0.3, "pack": False, "protect_prompt": True, "length": 1024, "positions": None}
    sizes = {"window": [1000], "topk": [10]}
    recipe = dataclasses.replace(RECIPES["base"], phase="streaming-plus", **options, **sizes)
    tokens = torch.tensor([random_prompt(800)])
    ids, teacher = torch.randint(0, 256, (1, 800, 4)), torch.randn(1, 800, 4)
    loss, parts = Student(load_model(model, torch.float32), [], recipe)(tokens, 0, (teacher, ids), prompt)
    with torch.no_grad():
        logp = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)(tokens).logits.log_softmax(-1)
    first = max(0, prompt - 1)
    ce = F.nll_loss(logp[0, first:-1], tokens[0, first + 1 :])
    p = teacher.log_softmax(-1)
    kl = (p.exp() * (p - logp.gather(-1, ids))).sum(-1)[0, first:].mean()
    assert (float(parts["ce"]), float(parts["kl"])) == pytest.approx((ce.item(), kl.item()), rel=1e-4)
    assert loss.item() == pytest.approx((0.7 * kl + 0.3 * ce).item(), rel=1e-4)


def test_a_protected_prompt_has_no_gates():
    """TRIM-KV's factors are 1 for protected tokens, which do not count towards the capacity."""
    torch.manual_seed(0)
    q, k, v = torch.randn(1, 4, 30, 8), torch.randn(1, 2, 30, 8), torch.randn(1, 2, 30, 8)
    log_beta = -torch.rand(1, 30, 2)
    attend = TrimKVAttend(lambda layer, signals: log_beta, 1, protected=11)
    out = attend(0, q, k, v, 0.3)
    bias = torch.cat([torch.zeros(1, 2, 11), log_beta.transpose(1, 2)[..., 11:]], -1).repeat_interleave(2, 1)
    t = torch.arange(30)
    logits = q @ k.repeat_interleave(2, 1).mT * 0.3 + bias[:, :, None] * (t[:, None] - t)
    expected = logits.masked_fill(t > t[:, None], float("-inf")).softmax(-1) @ v.repeat_interleave(2, 1)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    assert attend.losses[0] == capacity_loss(log_beta.transpose(1, 2)[..., 11:], 1) > 0


START = "--length=300 --window=8 --topk 20 --dtype=float32 --steps=2 --batch=2 --no-pack --protect-prompt".split()
PHASES = {
    "sparsify": "--recipe=demo --lists=8 --warmup=2 --positions=300 --fit-decay-rows=2".split(),
    "base": "--recipe=demo --lists=8 --warmup=2 --positions=300 --train-base --no-fit-decays --lr-base=1e-3".split(),
    "streaming-plus": ["--phase=streaming-plus"],
    "trimkv": "--recipe=trimkv --gate-width=16 --gate-bias=5".split(),
    "dms": "--recipe=dms".split(),
    "kvzap": "--recipe=kvzap --gate-width=16".split(),
}


@pytest.mark.parametrize("phase", PHASES)
def test_every_phase_trains_on_documents(kvpop, folder, phase):
    """Metrics with stored logits are those with the teacher itself; rows have different lengths."""
    template = json.loads((folder / "qwen3" / "tokenizer_config.json").read_text()) | {"chat_template": CHAT}
    write_byte_tokenizer(folder / "qwen3")
    (folder / "qwen3" / "tokenizer_config.json").write_text(json.dumps(template))
    write(folder, "text", "jsonl", TALKS)
    still = [] if phase in ("sparsify", "kvzap") else ["--kl-top=64"]
    online = distill(kvpop, f"{phase}-online", *still, recipe=[*START, *PHASES[phase]])
    assert len(online) == 2 and Path(f"{phase}-online/run/tokens.bin").exists()
    if still:
        distill(kvpop, f"{phase}-logits", *still, action="teacher", recipe=[*START, *PHASES[phase]])
        stored = distill(kvpop, f"{phase}-stored", *still, f"--teacher={phase}-logits", recipe=[*START, *PHASES[phase]])
        for a, b in zip(online, stored, strict=True):
            assert b["loss"] == pytest.approx(a["loss"], rel=1e-3)


def test_packed_rows_have_no_prompts(kvpop):
    words = "distill --model=qwen3 --data text.jsonl --out=x --recipe=demo --protect-prompt"
    refused(kvpop, words, "packed rows have no prompts to protect: with --protect-prompt give --no-pack")
