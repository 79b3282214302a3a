"""The example that trains a model to reason: its curriculum, a stopped run, and what it writes."""

import json
import random
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from threads import one_thread

from kvpop_vllm.distill.run import load_tokenizer
from kvpop_vllm.evaluation.backends import TransformersBackend
from kvpop_vllm.evaluation.policies import ResolvedPolicy, training_free
from kvpop_vllm.evaluation.problems import KINDS, make_problem
from kvpop_vllm.evaluation.reasoning import make_questions, solve

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "reasoner"))
import train
import write_problems

WORDS = ["--kinds", "programs", "ledgers", "--tokens", "300", "--threads", "1", "--save-every", "2"]


@one_thread()
def test_a_stopped_training_goes_on_as_if_it_had_not_been(tmp_path, monkeypatch):
    train.main([str(tmp_path / "whole"), "--batches", "6", *WORDS])
    batch = train.Batches.__getitem__

    def die(self, index):
        if index == 5:
            raise KeyboardInterrupt
        return batch(self, index)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(train.Batches, "__getitem__", die)
        train.main([str(tmp_path / "cut"), "--batches", "6", *WORDS])
    assert [path.name for path in (tmp_path / "cut/checkpoints").iterdir()] == ["checkpoint-4"]
    train.main([str(tmp_path / "cut"), "--batches", "6", *WORDS])
    uncut, cut = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "cut"))
    assert all(torch.equal(cut[name], uncut[name]) for name in uncut)
    started = load_file(tmp_path / "cut/checkpoints/checkpoint-6/model.safetensors")
    assert any(
        not torch.equal(started[name], train.make_model(train.make_tokenizer()).state_dict()[name]) for name in started
    )


def test_problems_grow_as_they_are_solved_and_a_checkpoint_keeps_how_far():
    curriculum, draw = train.Curriculum(["programs", "ledgers"]), random.Random(0)
    assert {curriculum.draw(draw)[0] for _ in range(50)} == {0}, "the others wait"
    assert max(curriculum.draw(draw)[1] for _ in range(50)) == train.FIRST
    for _ in range(100):
        curriculum.see(0, train.FIRST, 0.0)
        curriculum.see(0, train.FIRST - 1, 1.0)
    assert curriculum.sizes == [train.FIRST, 0], "only the largest size counts"
    while not curriculum.sizes[1]:
        curriculum.see(0, round(curriculum.sizes[0]), 1.0)
    drawn = [curriculum.draw(draw) for _ in range(3000)]
    assert {kind for kind, _ in drawn} == {0, 1}
    assert {size for kind, size in drawn if kind == 1} == {*range(train.LEAST, KINDS["ledgers"].size + 1)}
    restored = train.Curriculum.from_state(json.loads(json.dumps(curriculum.state())))
    assert vars(restored) == vars(curriculum)
    for _ in range(1000):
        curriculum.see(1, round(curriculum.sizes[1]), 1.0)
    assert curriculum.sizes[1] == KINDS["ledgers"].size


def test_rows_are_problems_whose_prompts_have_no_labels():
    tokenizer = train.make_tokenizer()
    batch = train.Batches(tokenizer, train.Curriculum(["programs", "ledgers"]), 1, 400)[0]
    ids, labels = batch["input_ids"], batch["labels"]
    assert ids.shape == labels.shape and len(ids) > 1
    for row, expected in zip(ids.tolist(), labels.tolist(), strict=True):
        text = tokenizer.decode([token for token in row if token != tokenizer.pad_token_id])
        prompt, _, solution = text.removeprefix("<s> ").partition(" work ")
        solved = [token for token in expected if token != -100]
        assert tokenizer.decode(solved) == solution and solution.endswith(" end") and prompt.startswith("let ")


def test_problems_are_written_as_training_text(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["", str(tmp_path / "a" / "p.jsonl"), "--kinds", "programs", "--count", "3"])
    write_problems.main()
    records = [json.loads(line) for line in (tmp_path / "a/p.jsonl").read_text().splitlines()]
    problems = [make_problem("programs", seed) for seed in range(3)]
    assert records == [{"prompt": p.prompt, "response": p.solution} for p in problems]
    tokenizer = train.make_tokenizer()
    turns = [
        {"role": "user", "content": records[0]["prompt"]},
        {"role": "assistant", "content": records[0]["response"]},
    ]
    text = tokenizer.apply_chat_template(turns, tokenize=False)
    assert text.split() == ["<s>", *records[0]["prompt"].split(), *records[0]["response"].split()]
    assert tokenizer.pad_token_id not in tokenizer(text)["input_ids"], "a word is unknown"


def test_the_shipped_reasoner_solves_problems_and_fails_with_a_window_alone():
    folder = str(Path(train.__file__).parent / "model")
    tokenizer = load_tokenizer(folder)
    questions = make_questions(tokenizer, ["programs", "ledgers"], 4, "validation", 12)
    backend = TransformersBackend(folder, torch.float32, 512, 4)

    def exact(policy: ResolvedPolicy | None) -> list[bool]:
        with backend.start(policy) as run:
            return [record["exact"] for record in solve(run, tokenizer, questions, new=400, batch=4)]

    window = replace(training_free("streaming-llm"), protect=True).resolve(backend.shape, 64)
    assert sum(exact(None)) >= 7 and sum(exact(window)) <= 1
