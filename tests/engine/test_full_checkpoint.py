"""Checkpoints with their own scorers: ``kvpop export``, and ``vllm serve DIR --kv-policy kvpop``."""

import functools
import json
import shutil
from types import SimpleNamespace

import pytest
import torch
from engine.tiny_engine import configure, generate, start
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from kvpop_vllm.cli import main
from kvpop_vllm.config import ConfigError
from kvpop_vllm.scorers.export import INDEX, SCORER_SHARD, export_checkpoint
from kvpop_vllm.testing import write_random_scorer, write_tiny_model
from kvpop_vllm.vllm_glue.start import engine_policy

POLICIES = {
    "mlstm": "kvpop",
    "mlp": "kvpop-mlp",
    "linear": "kvpop-linear",
    "trimkv": "trimkv",
    "dms": "dms",
    "kvzap": "kvzap",
}


@pytest.fixture(scope="module")
def family(tmp_path_factory):
    """Return ``make(kind)``, which returns folders and answers, built once.

    The folders are base model, adapter and the export of both. The answers are the base's, dense and with the
    adapter. The adapter's state has an unusual size, which must come from the tensors because the config does
    not contain it.
    """

    @functools.cache
    def make(kind: str) -> SimpleNamespace:
        root = tmp_path_factory.mktemp(kind)
        base = write_tiny_model(root / "base", kind)
        sizes = {"features": 8, "value_width": 24, "norm": True, "skip": True}
        adapter = write_random_scorer(root / "adapter", base, "mlstm", **sizes)
        assert main(["export", str(base), str(adapter), str(root / "full")]) == 0
        dense, bounded = generate(base, None), generate(base, {"policy": "kvpop", "scorer": str(adapter)})
        return SimpleNamespace(kind=kind, base=base, adapter=adapter, full=root / "full", dense=dense, bounded=bounded)

    return make


@pytest.fixture(params=["qwen3", "llama"])
def exported(request, family):
    return family(request.param)


@pytest.fixture
def qwen3(family):
    return family("qwen3")


def test_the_folder(exported):
    config, original = (json.loads((folder / "config.json").read_text()) for folder in (exported.full, exported.base))
    changed = {key for key in config if config[key] != original.get(key)}
    assert changed == {"architectures", "model_type", "kvpop"} and original.keys() < config.keys()
    assert config["model_type"] == f"{exported.kind}_kvpop"
    assert config["architectures"] == [f"{exported.kind.capitalize()}KVpopForCausalLM"]
    assert len({file.stat().st_mode for file in exported.full.iterdir()}) == 1
    index = json.loads((exported.full / INDEX).read_text())
    assert sorted(set(index["weight_map"].values())) == sorted(f.name for f in exported.full.glob("*.safetensors"))
    assert index["metadata"]["total_size"] == sum(
        t.nbytes for f in exported.full.glob("*.safetensors") for t in load_file(f).values()
    )


@pytest.mark.slow
def test_it_equals_the_base_with_the_adapter(exported):
    assert generate(exported.full, {"policy": "kvpop"}) == exported.bounded
    assert exported.bounded[3] != exported.dense[3]  # the longest prompt, whose tokens are evicted


def test_without_a_policy_it_serves_densely_with_one_line(exported, caplog):
    assert generate(exported.full, None) == exported.dense
    (line,) = [r for r in caplog.records if r.name == "vllm.kvpop_vllm"]
    assert "--kv-policy" in line.getMessage() and "\n" not in line.getMessage()


@pytest.mark.parametrize("scorer", ["mlp", "linear", "trimkv", "dms", "kvzap"])
def test_other_scorers(qwen3, tmp_path, scorer):
    adapter = write_random_scorer(tmp_path / "adapter", qwen3.base, scorer)
    export_checkpoint(qwen3.base, adapter, tmp_path / "out")
    policy = {"policy": POLICIES[scorer]}
    assert generate(tmp_path / "out", policy) == generate(qwen3.base, policy | {"scorer": str(adapter)})


def test_the_layout_of_trimkvs_authors(qwen3, tmp_path):
    """Gates are also found under the names of TRIM-KV's authors, among the model's own tensors."""
    adapter = write_random_scorer(tmp_path / "adapter", qwen3.base, "trimkv")
    export_checkpoint(qwen3.base, adapter, tmp_path / "out")
    edit_scorer(
        tmp_path / "out", lambda t: {n.replace("self_attn.kvpop", "self_attn.retention_gate"): x for n, x in t.items()}
    )
    policy = {"policy": "trimkv"}
    bounded = generate(tmp_path / "out", policy)
    assert bounded == generate(qwen3.base, policy | {"scorer": str(adapter)}) and bounded[3] != qwen3.dense[3]


def test_an_adapter_given_by_name_goes_before_the_checkpoints_own(qwen3, tmp_path):
    adapter = write_random_scorer(tmp_path / "adapter", qwen3.base, "linear", seed=3)
    policy = {"policy": "kvpop-linear", "scorer": str(adapter)}
    assert generate(qwen3.full, policy) == generate(qwen3.base, policy)


@pytest.mark.parametrize("policy", [{"policy": "streaming-llm", "budget": 64}, {"policy": "full"}])
def test_policies_without_scorers_ignore_them_and_say_so(qwen3, caplog, policy):
    base = generate(qwen3.base, policy)
    assert "costs its new tokens" in caplog.text and "scorers" not in caplog.text
    assert generate(qwen3.full, policy) == base
    (line,) = [r.getMessage() for r in caplog.records if "scorers" in r.getMessage()]
    assert line == f"the checkpoint carries KVpop scorers, which are not used by --kv-policy {policy['policy']}"


def test_dummy_weights_bring_no_scorer(qwen3):
    """Dummy weights without a scorer folder are refused, but a scorer folder is read with any weights."""
    with pytest.raises(ConfigError):
        configure(qwen3.full, {"policy": "kvpop"}, load_format="dummy")
    configure(qwen3.full, {"policy": "kvpop", "scorer": str(qwen3.adapter)}, load_format="dummy")
    configure(qwen3.full, {"policy": "streaming-llm", "budget": 64}, load_format="dummy")


def test_several_shards_stay_as_they_are(qwen3, tmp_path):
    sharded = tmp_path / "sharded"
    shutil.copytree(qwen3.base, sharded)
    tensors = sorted(load_file(qwen3.base / "model.safetensors").items())
    (sharded / "model.safetensors").unlink()
    weight_map = {}
    for i, part in enumerate((tensors[:7], tensors[7:]), 1):
        save_file(dict(part), sharded / f"part-{i}.safetensors")
        weight_map |= {name: f"part-{i}.safetensors" for name, _ in part}
    (sharded / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    export_checkpoint(sharded, qwen3.adapter, tmp_path / "out")
    for i in (1, 2):
        name = f"part-{i}.safetensors"
        assert (tmp_path / "out" / name).read_bytes() == (sharded / name).read_bytes()
    assert weight_map.items() < json.loads((tmp_path / "out" / INDEX).read_text())["weight_map"].items()
    assert generate(tmp_path / "out", {"policy": "kvpop"}) == qwen3.bounded


def test_tokenizer_and_other_files_come_along(exported, tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoConfig, AutoTokenizer

    model = shutil.copytree(exported.base, tmp_path / "base")
    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0, "kept": 1, "evicted": 2}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(model / "tokenizer.json"))
    (model / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    (model / "LICENSE").write_text("anything")
    (model / "pytorch_model.bin").write_text("other weights")
    export_checkpoint(model, exported.adapter, tmp_path / "out")
    copied = {f.name for f in (tmp_path / "out").iterdir()}
    assert {"tokenizer.json", "tokenizer_config.json", "LICENSE"} < copied and "pytorch_model.bin" not in copied
    assert AutoTokenizer.from_pretrained(tmp_path / "out")("kept or evicted").input_ids == [1, 0, 2]
    config = AutoConfig.from_pretrained(tmp_path / "out")
    assert config.model_type == f"{exported.kind}_kvpop" and config.kvpop["scorer"] == "mlstm"


def test_the_models_dtype_is_written_down(qwen3, tmp_path):
    """The config gets the model's dtype, so that vLLM does not infer it from the scorer's float32."""
    model = shutil.copytree(qwen3.base, tmp_path / "base")
    config = json.loads((model / "config.json").read_text())
    del config["dtype"]
    (model / "config.json").write_text(json.dumps(config))
    weights = {name: t.bfloat16() for name, t in load_file(model / "model.safetensors").items()}
    save_file(weights, model / "model.safetensors")
    export_checkpoint(model, qwen3.adapter, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"


def edit_scorer(folder, change):
    save_file(change(load_file(folder / SCORER_SHARD)), folder / SCORER_SHARD)


BIAS = "model.layers.1.self_attn.kvpop.out.bias"


def without(tensors):
    return {name: tensor for name, tensor in tensors.items() if name != BIAS}


def renamed(tensors):
    return {name.replace("self_attn.kvpop", "self_attn.retention"): t for name, t in tensors.items()}


def stranger(tensors):
    return tensors | {BIAS.replace("kvpop.out", "kvpop_x"): torch.zeros(2)}


def infinite(tensors):
    return tensors | {BIAS: torch.full((2,), torch.nan)}


@pytest.mark.parametrize(
    "change, policy, error, message",
    [
        (without, {"policy": "kvpop"}, ConfigError, "layers.1.out.bias is missing"),
        (renamed, {"policy": "kvpop"}, ValueError, "self_attn.retention"),
        (stranger, {"policy": "kvpop"}, ConfigError, "kvpop_x"),
        (stranger, None, ConfigError, "kvpop_x"),
        (infinite, {"policy": "kvpop"}, ConfigError, "layers.1.out.bias holds values that are not finite"),
    ],
)
def test_damaged_tensors_are_refused_while_loading(qwen3, tmp_path, monkeypatch, change, policy, error, message):
    """The loader refuses what the check before loading would miss; vLLM itself refuses unknown tensors."""
    copy = shutil.copytree(qwen3.full, tmp_path / "copy")
    edit_scorer(copy, change)
    monkeypatch.setattr(engine_policy, "check_checkpoint", lambda vllm_config: None)
    with pytest.raises(error, match=message):
        start(copy, policy)


def test_a_scorer_made_from_an_export_is_the_base_models(exported, tmp_path):
    scorer = tmp_path / "scorer"
    assert main(["init-scorer", str(exported.full), str(scorer), "--window", "8", "--topk", "20"]) == 0
    assert json.loads((scorer / "kvpop_config.json").read_text())["model_type"] == exported.kind
    for model in (exported.base, exported.full):
        configure(model, {"policy": "kvpop", "scorer": str(scorer)})


def test_export_leaves_nothing_half_done(qwen3, tmp_path, monkeypatch):
    def full(*args, **options):
        raise SafetensorError("disk full")

    monkeypatch.setattr("kvpop_vllm.tensor_files.save_file", full)
    with pytest.raises(OSError, match="disk full"):
        export_checkpoint(qwen3.base, qwen3.adapter, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_dms_model_with_projections_of_its_own_is_served(tmp_path):
    """A DMS model with separate projections is served with the imported scorer folder.

    The projections in the model's weights are ignored.
    """
    plain, source, gates = (tmp_path / name for name in ("plain", "source", "gates"))
    write_tiny_model(plain, "qwen3")
    shutil.copytree(plain, source)
    config = json.loads((source / "config.json").read_text())
    config |= {"dms_window_size": 8, "dms_alpha_scale": 100.0, "dms_separate_alpha": True}
    (source / "config.json").write_text(json.dumps(config))
    weights, draw = load_file(source / "model.safetensors"), torch.Generator().manual_seed(0)
    for layer in range(2):
        prefix = f"model.layers.{layer}.self_attn.dms_proj_alpha"
        weights[f"{prefix}.weight"] = torch.randn(2, 64, generator=draw) / 100
        weights[f"{prefix}_norm.weight"] = torch.ones(64)
    save_file(weights, source / "model.safetensors", metadata={"format": "pt"})
    assert main(["import", str(source), str(gates), "--topk", "12"]) in (0, None)
    settings = {"policy": "dms", "scorer": str(gates)}
    assert generate(source, settings) == generate(plain, settings) != generate(plain, None)
