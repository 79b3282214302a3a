"""Full checkpoints of other authors in vLLM: served as their base, without their code and without flags of a budget."""

import json
import logging
import pickle
from pathlib import Path

import pytest
from engine.tiny_engine import configure, generate
from huggingface_hub import constants
from safetensors.torch import load_file, save_file
from scorers.hub_server import lay_out
from scorers.spellings import SPELLINGS, write_spelling
from threads import core_for_each_of_two

from kvpop_vllm.config import ConfigError
from kvpop_vllm.testing import write_random_scorer
from kvpop_vllm.vllm_glue.start.engine_policy import engine_policy
from kvpop_vllm.vllm_glue.start.front_ends import settings_of
from kvpop_vllm.vllm_glue.start.published import adopt

POLICY = {"policy": "kvpop"}


@pytest.fixture(scope="module")
def spelt(tmp_path_factory):
    """Return ``make(name)``, which returns the base model, the scorer in our format and the full checkpoint."""
    written = {}

    def make(name: str) -> tuple[Path, Path, Path]:
        if name not in written:
            written[name] = write_spelling(tmp_path_factory.mktemp(name), SPELLINGS[name])
        return written[name]

    return make


def logged(monkeypatch) -> list[str]:
    """Return the list of lines that the package logs from now on; the first config sets up vLLM's loggers again."""
    lines = []
    logger = logging.getLogger("vllm.kvpop_vllm")
    monkeypatch.setattr(logger, "info", lambda text, *args: lines.append(text % args))
    return lines


def check_equal(theirs, ours, tolerance: float = 1e-5) -> None:
    """Check that two engines gave the same tokens, and log-probabilities that differ by rounding."""
    assert [[token for token, _ in row] for row in theirs] == [[token for token, _ in row] for row in ours]
    pairs = [(a, b) for x, y in zip(theirs, ours, strict=True) for (_, a), (_, b) in zip(x, y, strict=True)]
    assert max(abs(a - b) for a, b in pairs) < tolerance


@pytest.mark.parametrize("name", SPELLINGS)
def test_tokens_and_log_probabilities_are_those_of_our_format(spelt, name):
    base, adapter, full = spelt(name)
    theirs = generate(full, POLICY, trust_remote_code=True)
    ours = generate(base, POLICY | {"scorer": str(adapter)})
    check_equal(theirs, ours)
    assert not (full.parent / "trace").exists()


@pytest.mark.slow
def test_two_ranks_read_the_scorers_of_their_heads(tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", core_for_each_of_two()["VLLM_CPU_OMP_THREADS_BIND"])
    base, adapter, full = write_spelling(tmp_path, SPELLINGS["heads"], heads=4)
    ranks = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    theirs = generate(full, POLICY, trust_remote_code=True, **ranks)
    check_equal(theirs, generate(base, POLICY | {"scorer": str(adapter)}), 1e-3)
    assert not (tmp_path / "trace").exists()


@pytest.mark.parametrize("name", SPELLINGS)
def test_the_command_needs_no_budget(spelt, name, monkeypatch):
    (*_, full), lines = spelt(name), logged(monkeypatch)
    config = configure(full, POLICY, trust_remote_code=True)
    retention, model = engine_policy(config).retention, config.model_config
    assert (retention.budget, retention.sinks, retention.window) == (64, 4, 16)
    assert model.architectures == ["Qwen3KVpopForCausalLM"] and not model.trust_remote_code
    assert "the scorer is read as" in "\n".join(lines) and "forget gate: " in "\n".join(lines)
    assert pickle.loads(pickle.dumps(model.hf_config)).kvpop_published is not None
    assert not (full.parent / "trace").exists()


def test_without_a_policy_it_is_served_densely(spelt, monkeypatch):
    (base, _, full), lines = spelt("xlstm"), logged(monkeypatch)
    assert generate(full, None, trust_remote_code=True) == generate(base, None)
    assert "the checkpoint carries KVpop scorers, which are not used without --kv-policy" in "\n".join(lines)
    assert not (full.parent / "trace").exists()


def test_a_scorer_folder_goes_before_the_checkpoints_own(spelt, tmp_path):
    base, _, full = spelt("xlstm")
    other_scorer = write_random_scorer(tmp_path / "other", base, "mlstm", topk=30)
    assert engine_policy(configure(full, POLICY | {"scorer": str(other_scorer)})).retention.budget == 50
    assert engine_policy(configure(base, POLICY | {"scorer": str(full)})).retention.budget == 64


def test_a_name_of_the_hub_in_its_cache(spelt, tmp_path, monkeypatch):
    *_, full = spelt("xlstm")
    lay_out(tmp_path, "owner/name", {"main": full})
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert engine_policy(configure("owner/name", POLICY)).retention.budget == 64
    config = configure(full, POLICY | {"scorer": "owner/name@main"})
    assert engine_policy(config).retention.budget == 64
    assert Path(config.additional_config["kv_policy"]["scorer"]).parent.name == "snapshots", "processes resolve it"


def test_engines_with_other_weights_are_told_apart(tmp_path):
    *_, full = write_spelling(tmp_path / "spelt", SPELLINGS["xlstm"])
    before = settings_of(configure(full, POLICY))["scorer"]
    assert settings_of(configure(full, POLICY))["scorer"] == before
    file = full / "model.safetensors"
    save_file({name: t.bfloat16() for name, t in load_file(file).items()}, file, metadata={"format": "pt"})
    assert settings_of(configure(full, POLICY))["scorer"] != before


def test_another_scorer_goes_before_a_section_of_the_authors(spelt, tmp_path):
    """Their ``kvpop`` section is not in our format, and nothing reads it."""
    base, _, full = spelt("xlstm_large")
    other_scorer = write_random_scorer(tmp_path / "other", base, "mlstm", topk=30)
    config = configure(full, POLICY | {"scorer": str(other_scorer)})
    assert engine_policy(config).retention.budget == 50 and config.load_config.load_format == "safetensors"


def test_a_config_that_cannot_be_read_is_not_trusted(tmp_path):
    *_, full = write_spelling(tmp_path / "spelt", SPELLINGS["xlstm"])
    (full / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="whose code must not run: leave --trust-remote-code out") as error:
        configure(full, POLICY, trust_remote_code=True)
    assert "\n" not in str(error.value) and not (full.parent / "trace").exists()


@pytest.mark.parametrize("kind", ["mistral_kvpop", "qwen3_kvpop"])
def test_without_a_policy_another_base_is_left_alone(tmp_path, kind):
    *_, full = write_spelling(tmp_path / "spelt", SPELLINGS["xlstm"])
    config = json.loads((full / "config.json").read_text()) | {"model_type": kind, "architectures": [kind]}
    (full / "config.json").write_text(json.dumps(config))
    from vllm import EngineArgs

    arguments = EngineArgs(model=str(full), trust_remote_code=True)
    adopt(arguments, None)
    served = kind == "qwen3_kvpop"
    assert arguments.trust_remote_code != served and bool(arguments.hf_overrides) == served
    assert arguments.load_format == "auto"


@pytest.mark.parametrize(
    "files, message",
    [
        ({"config.json": {"model_type": "mistral_kvpop", "architectures": ["MistralKVpop"]}}, "cannot be served, those of llama and qwen3 can"),
        ({"tokenizer_config.json": {"tokenizer_class": "KVpopTokenizer", "auto_map": {"AutoTokenizer": ["a.B", None]}}}, "its tokenizer 'KVpopTokenizer' exists only as code"),
        ({"tokenizer_config.json": []}, "tokenizer_config.json is no JSON object: copy the folder again"),
        ({"config.json": {"kvpop_config": {"num_sinks": 4, "top_k": 44}}}, "its scorer can be read in 2 ways (norm: rms or layer)"),
    ],
)  # fmt: skip
def test_refused_before_anything_starts(tmp_path, files, message):
    *_, full = write_spelling(tmp_path / "spelt", SPELLINGS["xlstm"])
    for name, changes in files.items():
        content = json.loads((full / name).read_text()) if (full / name).exists() else {}
        (full / name).write_text(json.dumps(content | changes if changes else changes))
    with pytest.raises(ConfigError) as error:
        configure(full, POLICY, trust_remote_code=True, skip_tokenizer_init=False)
    assert message in str(error.value) and "\n" not in str(error.value)
    assert not (full.parent / "trace").exists()
