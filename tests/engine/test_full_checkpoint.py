"""Checkpoints with their own scorers: ``kvpop export``, and ``vllm serve DIR --kv-policy kvpop``."""

from __future__ import annotations

import functools
import json
import shutil
import struct
from types import SimpleNamespace

import pytest
import torch
from engine.tiny_engine import generate, start
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from vllm.engine.arg_utils import EngineArgs

from kvpop_vllm.cli import main
from kvpop_vllm.config import ConfigError
from kvpop_vllm.scorers.export import INDEX, SCORER_SHARD, export_checkpoint
from kvpop_vllm.testing import write_random_scorer, write_tiny_model
from kvpop_vllm.vllm_glue import engine_policy

POLICIES = {"mlstm": "kvpop", "mlp": "kvpop-mlp", "linear": "kvpop-linear", "trimkv": "trimkv", "dms": "dms"}


@pytest.fixture(autouse=True, scope="module")
def engines_in_this_process():
    """Run engines in this process, but not the servers that other tests start."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        yield


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
def each(request, family):
    return family(request.param)


@pytest.fixture
def qwen3(family):
    return family("qwen3")


@pytest.fixture
def copy(qwen3, tmp_path):
    return shutil.copytree(qwen3.full, tmp_path / "copy")


def test_the_folder(each):
    config, original = (json.loads((folder / "config.json").read_text()) for folder in (each.full, each.base))
    changed = {key for key in config if config[key] != original.get(key)}
    assert changed == {"architectures", "model_type", "kvpop"} and original.keys() < config.keys()
    assert config["model_type"] == f"{each.kind}_kvpop"
    assert config["architectures"] == [f"{each.kind.capitalize()}KVpopForCausalLM"]
    assert len({file.stat().st_mode for file in each.full.iterdir()}) == 1
    index = json.loads((each.full / INDEX).read_text())
    assert sorted(set(index["weight_map"].values())) == sorted(f.name for f in each.full.glob("*.safetensors"))
    assert index["metadata"]["total_size"] == sum(
        t.nbytes for f in each.full.glob("*.safetensors") for t in load_file(f).values()
    )


def test_it_equals_the_base_with_the_adapter(each):
    assert generate(each.full, {"policy": "kvpop"}) == each.bounded
    assert each.bounded[3] != each.dense[3]  # the longest prompt, whose tokens are evicted


def test_without_a_policy_it_serves_densely_with_one_line(each, caplog):
    assert generate(each.full, None) == each.dense
    (line,) = [r for r in caplog.records if r.name == "vllm.kvpop_vllm"]
    assert "--kv-policy" in line.getMessage() and "\n" not in line.getMessage()


@pytest.mark.parametrize("scorer", ["mlp", "linear", "trimkv", "dms"])
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
    other = write_random_scorer(tmp_path / "adapter", qwen3.base, "linear", seed=3)
    policy = {"policy": "kvpop-linear", "scorer": str(other)}
    assert generate(qwen3.full, policy) == generate(qwen3.base, policy)


@pytest.mark.parametrize("policy", [{"policy": "streaming-llm", "budget": 64}, {"policy": "full"}])
def test_policies_without_scorers_ignore_them_and_say_so(qwen3, caplog, policy):
    base = generate(qwen3.base, policy)
    assert "prefix caching is off" in caplog.text and "scorers" not in caplog.text
    assert generate(qwen3.full, policy) == base
    (line,) = [r.getMessage() for r in caplog.records if "scorers" in r.getMessage()]
    assert line == f"the checkpoint carries KVpop scorers, which are not used by --kv-policy {policy['policy']}"


def test_dummy_weights_bring_no_scorer(qwen3, tmp_path):
    """Dummy weights without a scorer folder are refused before weights load.

    A scorer folder is read with any weights.
    """
    with pytest.raises(ConfigError, match="--load-format dummy brings no scorer .* give --kv-scorer DIR"):
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


def test_tokenizer_and_other_files_come_along(each, tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoConfig, AutoTokenizer

    model = shutil.copytree(each.base, tmp_path / "base")
    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0, "kept": 1, "evicted": 2}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(model / "tokenizer.json"))
    (model / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    (model / "LICENSE").write_text("anything")
    (model / "pytorch_model.bin").write_text("other weights")
    export_checkpoint(model, each.adapter, tmp_path / "out")
    copied = {f.name for f in (tmp_path / "out").iterdir()}
    assert {"tokenizer.json", "tokenizer_config.json", "LICENSE"} < copied and "pytorch_model.bin" not in copied
    assert AutoTokenizer.from_pretrained(tmp_path / "out")("kept or evicted").input_ids == [1, 0, 2]
    config = AutoConfig.from_pretrained(tmp_path / "out")
    assert config.model_type == f"{each.kind}_kvpop" and config.kvpop["scorer"] == "mlstm"


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


def configure(model, policy, **options):
    EngineArgs(
        str(model), skip_tokenizer_init=True, max_model_len=1024, additional_config={"kv_policy": policy}, **options
    ).create_engine_config()


def edit_scorer(folder, change):
    save_file(change(load_file(folder / SCORER_SHARD)), folder / SCORER_SHARD)


def edit_config(folder, change):
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))


def renamed(tensors):
    return {name.replace("self_attn.kvpop", "self_attn.retention"): t for name, t in tensors.items()}


BIAS = "model.layers.1.self_attn.kvpop.out.bias"
STRANGE = BIAS.replace("kvpop.out", "kvpop_x")
DAMAGE = {
    "layers.1.out.bias is missing": lambda t: {name: tensor for name, tensor in t.items() if name != BIAS},
    "layers.1.out.bias has shape (3,), expected (2,)": lambda t: t | {BIAS: torch.zeros(3)},
    "names found": renamed,
    "model.layers.{i}.self_attn.kvpop_x.bias;": lambda t: t | {STRANGE: torch.zeros(2)},
    "layers.9.out.bias": lambda t: t | {BIAS.replace("1", "9"): torch.zeros(2)},
}


@pytest.mark.parametrize("named", DAMAGE)
def test_damaged_tensors_are_refused_before_and_while_loading(copy, monkeypatch, named):
    edit_scorer(copy, DAMAGE[named])
    with pytest.raises(ConfigError) as caught:
        configure(copy, {"policy": "kvpop"})
    assert named in str(caught.value) and "\n" not in str(caught.value)
    monkeypatch.setattr(engine_policy, "check_checkpoint", lambda vllm_config: None)
    if DAMAGE[named] is renamed:  # nothing marks these as scorers: vLLM refuses unknown tensors
        with pytest.raises(ValueError, match="retention"):
            start(copy, {"policy": "kvpop"})
    else:
        with pytest.raises(ConfigError) as caught:
            start(copy, {"policy": "kvpop"})
        assert named in str(caught.value)


def test_unknown_names_are_refused_without_a_policy_too(copy):
    edit_scorer(copy, DAMAGE["model.layers.{i}.self_attn.kvpop_x.bias;"])
    with pytest.raises(ConfigError, match="kvpop_x"):
        start(copy, None)


def test_values_that_are_not_finite(copy):
    edit_scorer(copy, lambda t: t | {BIAS: torch.full((2,), torch.nan)})
    with pytest.raises(ConfigError, match="layers.1.out.bias holds values that are not finite"):
        start(copy, {"policy": "kvpop"})


@pytest.mark.parametrize(
    "named, change",
    [
        ("section kvpop: key 'topk' is missing", lambda c: c["kvpop"].pop("topk")),
        ("version 2", lambda c: c["kvpop"].update(version=2)),
        ("head_dim", lambda c: c["kvpop"].update(head_dim=64)),
        ("--kv-policy kvpop-mlp", lambda c: c.update(kvpop=mlp_section(c["kvpop"]))),
        ("--kv-scorer", lambda c: c.pop("kvpop")),
        ("must be one of LlamaKVpopForCausalLM", lambda c: c.update(architectures=["Qwen3ForCausalLM"])),
    ],
)
def test_damaged_sections(copy, named, change):
    edit_config(copy, change)
    with pytest.raises(ConfigError) as caught:
        configure(copy, {"policy": "kvpop"})
    assert named in str(caught.value) and "\n" not in str(caught.value)


def mlp_section(section):
    mlstm = ("feature_map", "gate_softcap", "norm", "skip", "delayed")
    return {key: value for key, value in section.items() if key not in mlstm} | {"scorer": "mlp"}


def refused_export(capsys, *arguments):
    assert main(["export", *map(str, arguments)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("kvpop: ") and error.count("\n") == 1
    return error


def test_export_refuses_what_does_not_fit(each, tmp_path, capsys):
    other = "llama" if each.kind == "qwen3" else "qwen3"
    out = tmp_path / "out"
    wrong_type = write_tiny_model(tmp_path / "other", other)
    wrong_size = write_tiny_model(tmp_path / "bigger", each.kind, layers=3)
    no_room = write_tiny_model(tmp_path / "qwen2", "qwen2", hidden=128)
    damaged = shutil.copytree(each.base, tmp_path / "damaged")
    (damaged / "model.safetensors").write_bytes((each.base / "model.safetensors").read_bytes()[:-8])
    empty = shutil.copytree(each.base, tmp_path / "empty")
    (empty / "model.safetensors").unlink()
    assert "model_type" in refused_export(capsys, wrong_type, each.adapter, out)
    assert "num_layers" in refused_export(capsys, wrong_size, each.adapter, out)
    assert "'qwen2' cannot carry scorers" in refused_export(capsys, no_room, each.adapter, out)
    assert "carries a scorer already" in refused_export(capsys, each.full, each.adapter, out)
    assert "not a complete safetensors file" in refused_export(capsys, damaged, each.adapter, out)
    assert "model.safetensors cannot be read" in refused_export(capsys, empty, each.adapter, out)
    assert "config.json" in refused_export(capsys, tmp_path / "nowhere", each.adapter, out)
    assert "kvpop_config.json" in refused_export(capsys, each.base, tmp_path / "nowhere", out)
    assert not out.exists()


def test_a_scorer_made_from_an_export_is_the_base_models(each, tmp_path):
    scorer = tmp_path / "scorer"
    assert main(["init-scorer", str(each.full), str(scorer), "--window", "8", "--topk", "20"]) == 0
    assert json.loads((scorer / "kvpop_config.json").read_text())["model_type"] == each.kind
    for model in (each.base, each.full):
        configure(model, {"policy": "kvpop", "scorer": str(scorer)})


def _tensor(**changes):
    info = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]} | changes
    return {"a": info}


HEADERS = {
    "a list": [1],
    "a number": 3,
    "tensor is a number": {"a": 1},
    "tensor is empty": {"a": {}},
    "offsets are no list": _tensor(data_offsets=4),
    "offsets are text": _tensor(data_offsets=["0", "4"]),
    "one offset": _tensor(data_offsets=[0]),
    "three offsets": _tensor(data_offsets=[0, 0, 4]),
    "backwards": _tensor(data_offsets=[4, 0]),
    "no dtype": {"a": {"shape": [1], "data_offsets": [0, 4]}},
    "dtype is a list": _tensor(dtype=[1]),
    "beyond the end": _tensor(shape=[2], data_offsets=[0, 8]),
}


@pytest.mark.parametrize("name", HEADERS)
def test_export_refuses_malformed_headers(qwen3, tmp_path, capsys, name):
    model, header = shutil.copytree(qwen3.base, tmp_path / "base"), json.dumps(HEADERS[name]).encode()
    (model / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(4))
    assert "is not a complete safetensors file" in refused_export(capsys, model, qwen3.adapter, tmp_path / "out")


def test_export_refuses_weights_without_tensors(qwen3, tmp_path, capsys):
    model = shutil.copytree(qwen3.base, tmp_path / "base")
    save_file({}, model / "model.safetensors", metadata={"format": "pt"})
    assert "holds no tensors" in refused_export(capsys, model, qwen3.adapter, tmp_path / "out")


@pytest.mark.parametrize(
    "index",
    [[1], 3, {}, *({"weight_map": m} for m in (None, [1], {}, {"a": 1}, {"a": ["x"]}, {"a": "../x.safetensors"}))],
)
def test_export_refuses_malformed_indices(qwen3, tmp_path, capsys, index):
    model = shutil.copytree(qwen3.base, tmp_path / "base")
    (model / INDEX).write_text(json.dumps(index))
    assert "is not an index of safetensors files" in refused_export(capsys, model, qwen3.adapter, tmp_path / "out")


@pytest.mark.parametrize("kind", [None, 3, ["llama"], {"a": 1}])
def test_export_refuses_odd_model_types(qwen3, tmp_path, capsys, kind):
    model = shutil.copytree(qwen3.base, tmp_path / "base")
    edit_config(model, lambda config: config.update(model_type=kind))
    assert "cannot carry scorers" in refused_export(capsys, model, qwen3.adapter, tmp_path / "out")


def test_export_leaves_nothing_half_done(qwen3, tmp_path, monkeypatch):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "note.txt").write_text("mine")
    with pytest.raises(ConfigError, match="not an empty folder"):
        export_checkpoint(qwen3.base, qwen3.adapter, tmp_path / "full")

    def full(*args, **options):
        raise SafetensorError("disk full")

    monkeypatch.setattr("kvpop_vllm.scorers.checkpoint.save_file", full)
    with pytest.raises(OSError, match="disk full"):
        export_checkpoint(qwen3.base, qwen3.adapter, tmp_path / "out")
    assert [f.name for f in tmp_path.iterdir()] == ["full"]
    monkeypatch.undo()
    (tmp_path / "empty").mkdir()
    export_checkpoint(qwen3.base, qwen3.adapter, tmp_path / "empty")
    assert (tmp_path / "empty" / SCORER_SHARD).is_file()


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
