"""Weights that are reloaded while an engine serves (vLLM's ``reload_weights``): later answers are those of the new weights."""

import pytest
import torch
from engine.tiny_engine import complete, running
from safetensors.torch import load_file, save_file

from kvpop_vllm.cli import main
from kvpop_vllm.testing import write_mixed_model, write_random_scorer, write_tiny_model

NEW = 24


def check(model, other_model, settings: dict, **options) -> None:
    """Check that an engine answers as one of the other weights once it has loaded them, and as before with its first."""
    with running(model, settings, **options) as llm:
        first = complete(llm, NEW)
        llm.collective_rpc("reload_weights", kwargs={"weights_path": str(other_model)})
        reloaded = complete(llm, NEW)
        llm.collective_rpc("reload_weights", kwargs={"weights_path": str(model)})
        assert complete(llm, NEW) == first
    with running(other_model, settings, **options) as llm:
        assert complete(llm, NEW) == reloaded
    assert [tokens for tokens, _ in first[3]] != [tokens for tokens, _ in reloaded[3]]


@pytest.mark.parametrize("policy", ["streaming-llm", "kvpop", "trimkv", "dms-query"])
def test_other_weights_under_the_same_scorer(case, tmp_path, policy):
    """Scorers and gates of a folder stay, though the new weights have none."""
    matrix_case = case("qwen3", policy)
    check(matrix_case.model, write_tiny_model(tmp_path / "other", "qwen3", seed=7), matrix_case.settings)


@pytest.fixture
def other_sinks(tmp_path):
    """Return ``make(kind)``, which writes two models of a family that differ in their attention sinks alone."""

    def make(kind: str) -> list:
        folders = [write_mixed_model(tmp_path / name, kind) for name in ("model", "other")]
        weights = load_file(folders[1] / "model.safetensors")
        weights |= {name: weight + 3 for name, weight in weights.items() if name.endswith("sinks")}
        save_file(weights, folders[1] / "model.safetensors", {"format": "pt"})
        return folders

    return make


SINKS = {"policy": "h2o", "budget": 64}


def test_attention_sinks_are_those_of_the_new_weights(other_sinks):
    check(*other_sinks("granite_swa"), SINKS, block_size=32)


def test_attention_sinks_are_those_of_vllms_layers(other_sinks):
    """VLLM 0.32 leaves those of gpt-oss as they were when it reloads weights: its loader copies them to nowhere."""
    model, other_model = other_sinks("gpt_oss")
    with running(model, SINKS, block_size=32) as llm:
        llm.collective_rpc("reload_weights", kwargs={"weights_path": str(other_model)})
        executor = llm.llm_engine.engine_core.engine_core.model_executor
        layers = [layer.attn for layer in executor.driver_worker.worker.model_runner.model.model.layers]
        ours = [layer for layer in layers if hasattr(layer.attn.impl, "attention")]
        assert len(ours) == 2
        for layer in ours:
            assert torch.equal(layer.attn.impl.attention.sink_logits, layer.sinks.float())


@pytest.mark.parametrize("policy, scorer", [("kvpop", "mlstm"), ("dms", "dms")])
def test_other_weights_with_their_own_scorer(tmp_path, policy, scorer):
    """A checkpoint's scorer is reloaded with its other weights."""
    folders = []
    for seed in (0, 7):
        base = write_tiny_model(tmp_path / f"base{seed}", "qwen3", seed=seed)
        adapter = write_random_scorer(tmp_path / f"scorer{seed}", base, scorer, seed=seed)
        folders.append(tmp_path / f"full{seed}")
        assert main(["export", str(base), str(adapter), str(folders[-1])]) == 0
    check(*folders, {"policy": policy})
