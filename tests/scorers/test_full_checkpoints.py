"""Full checkpoints of other authors: what is read, served and refused, and that none of their code runs."""

import json
import logging
import os
import pickle

import pytest
import torch
from hf.prompts import generate
from safetensors.torch import load_file, save_file
from scorers.spellings import DIM, LAYERS, SPELLINGS, write_spelling
from transformers import AutoConfig, AutoModelForCausalLM

from kvpop_vllm.cli import main
from kvpop_vllm.config import ConfigError
from kvpop_vllm.hf import KVpopCache, load_checkpoint
from kvpop_vllm.model_shape import ModelShape
from kvpop_vllm.scorers import reader
from kvpop_vllm.scorers.checkpoint import read_scorer
from kvpop_vllm.scorers.config_keys import budgets_of, facts_of
from kvpop_vllm.scorers.inspect_checkpoint import inspect_checkpoint
from kvpop_vllm.supported import published_base
from kvpop_vllm.testing import random_prompt

PROMPTS = [random_prompt(120), random_prompt(90)]


@pytest.fixture(scope="module", params=SPELLINGS)
def spelt(request, tmp_path_factory):
    """Return a spelling, its base model, the scorer in our format, and the full checkpoint."""
    spelling = SPELLINGS[request.param]
    return spelling, *write_spelling(tmp_path_factory.mktemp(request.param), spelling)


def test_the_scorer_is_that_of_our_format(spelt):
    spelling, _, adapter, full = spelt
    (config, layers), (expected, values) = read_scorer(full), read_scorer(adapter)
    names = ("sinks", "window", "topk", "feature_map", "gate_softcap", "norm", "skip", "delayed")
    assert [getattr(config, name) for name in names] == [getattr(expected, name) for name in names]
    assert spelling.exact == (config.decay == expected.decay)
    for layer, value in zip(layers, values, strict=True):
        assert layer.keys() == value.keys()
        for name in value.keys() - ({} if spelling.exact else {"decay_logit"}):
            torch.testing.assert_close(
                layer[name], value[name], rtol=0, atol=1e-6 if name in ("norm.weight", "v_proj") else 0
            )


@torch.no_grad()
def test_it_is_served_as_its_base(spelt):
    _, base, adapter, full = spelt
    model, theirs = AutoModelForCausalLM.from_pretrained(base).eval(), load_checkpoint(full).eval()
    plain = generate(model, None, PROMPTS)
    assert generate(theirs, None, PROMPTS) == plain
    expected = generate(model, KVpopCache(model, "kvpop", scorer=adapter), PROMPTS)
    assert generate(theirs, KVpopCache(theirs, "kvpop"), PROMPTS) == expected != plain
    logits = [
        one(torch.tensor(PROMPTS[:1]), past_key_values=KVpopCache(one, "kvpop", **scorer)).logits
        for one, scorer in ((model, {"scorer": adapter}), (theirs, {}))
    ]
    torch.testing.assert_close(logits[1], logits[0], rtol=0, atol=1e-5)
    assert not (full.parent / "trace").exists()


@pytest.fixture
def full(tmp_path):
    """Return the full checkpoint of one spelling, to be changed."""
    return write_spelling(tmp_path / "spelt", SPELLINGS["mlstm_kernels"])[2]


def edit_config(full, **changes) -> None:
    """Change keys of ``config.json``; ``...`` removes one."""
    config = json.loads((full / "config.json").read_text()) | changes
    (full / "config.json").write_text(json.dumps({name: value for name, value in config.items() if value is not ...}))


def edit_tensors(full, change) -> None:
    """Replace the tensors by what ``change`` makes of them."""
    file = full / "model.safetensors"
    save_file(change(load_file(file)), file, metadata={"format": "pt"})


def rename(old: str, new: str):
    """Return a change of names."""
    return lambda tensors: {name.replace(old, new): tensor for name, tensor in tensors.items()}


def at(name: str, change):
    """Return a change of one tensor of layer 1; None removes it."""
    name = f"model.layers.1.self_attn.kvpop_mlstm.{name}"

    def changed(tensors):
        remaining = {tensor_name: tensor for tensor_name, tensor in tensors.items() if tensor_name != name}
        return remaining if change is None else remaining | {name: change(tensors[name]).contiguous()}

    return changed


def gates_together(tensors):
    """Put both gates into one tensor whose name does not say which is first."""
    out = {}
    for i in range(LAYERS):
        prefix = f"model.layers.{i}.self_attn.kvpop_mlstm"
        out[f"{prefix}.gates.weight"] = torch.stack([tensors[f"{prefix}.vecI"], tensors[f"{prefix}.vecF"]], 1)
    return {name: t for name, t in tensors.items() if not name.endswith(("vecI", "vecF"))} | out


def pickled(full) -> None:
    """Leave the weights as a pickle that would run code."""
    trace = full.parent / "trace"

    class Runs:
        def __reduce__(self):
            return os.system, (f"touch {trace}",)

    (full / "model.safetensors").unlink()
    with open(full / "pytorch_model.bin", "wb") as file:
        pickle.dump({"model.norm.weight": Runs()}, file)


def added(name: str, *shape: int):
    """Return a change that adds a tensor to the scorer of each layer."""
    prefixes = [f"model.layers.{i}.self_attn.kvpop_mlstm" for i in range(LAYERS)]
    return lambda tensors: tensors | {f"{prefix}.{name}": torch.ones(shape) for prefix in prefixes}


def without_layer_tensor(tensors):
    return {name: t for name, t in tensors.items() if not name.endswith("kvpop_mlstm.vecF")}


REFUSED = {
    "a decay that may be a logit or gamma": (
        lambda full: edit_tensors(full, lambda t: {n.replace("alpha", "decay"): x.abs() % 1 if "alpha" in n else x for n, x in t.items()}),
        "its scorer can be read in 2 ways (decay: logit or gamma): run 'kvpop inspect-checkpoint",
    ),
    "gates in an order that nothing says": (lambda full: edit_tensors(full, gates_together), "can be read in 2 ways (input gate: "),
    "a tensor of one layer is missing": (lambda full: edit_tensors(full, at("matK", None)), "layers.1.self_attn.kvpop_mlstm.matK is missing"),
    "a piece is missing": (lambda full: edit_tensors(full, without_layer_tensor), "no tensor of its scorer can be the forget gate"),
    "a layer's tensor has another shape": (lambda full: edit_tensors(full, at("matV", lambda t: t[..., :5])), "matV has shape"),
    "a tensor of no piece": (lambda full: edit_tensors(full, rename("vecF_bias", "ogate.weight")), "ogate.weight [3] is no piece of an mLSTM scorer"),
    "a vector that nothing names": (lambda full: edit_tensors(full, added("mystery", 3)), "mystery [3] is no piece of an mLSTM scorer"),
    "a matrix that nothing names": (lambda full: edit_tensors(full, added("mystery.weight", 3, 64)), "its scorer's tensors do not make a scorer together"),
    "a bias that nothing names": (lambda full: edit_tensors(full, added("mystery.bias", 3)), "mystery.bias [3] is no piece of an mLSTM scorer"),
    "a tensor below the base model's": (lambda full: edit_tensors(full, lambda t: t | {"model.layers.0.mlp.up_proj.ogate": torch.ones(3)}), "tensor model.layers.1.mlp.up_proj.ogate is missing"),
    "a name of numbers": (lambda full: edit_tensors(full, lambda t: t | {"1.2": torch.ones(3)}), "tensor 1.2 [3] is no piece of an mLSTM scorer"),
    "a norm of the inputs": (lambda full: edit_tensors(full, added("input_rmsnorm.weight", 24)), "input_rmsnorm.weight [24] is no piece of an mLSTM scorer"),
    "a norm of all heads": (lambda full: edit_tensors(full, added("rmsnorm.weight", 72)), "its scorer's tensors do not make a scorer together"),
    "a base that is not served": (lambda full: edit_config(full, model_type="mistralkvpop", architectures=["MistralKVpopForCausalLM"]), "a KVpop checkpoint of mistral cannot be served, those of llama and qwen3 can"),
    "names that disagree": (lambda full: edit_config(full, model_type="llama_kvpop"), "of llama or qwen3 cannot be served"),
    "not a number": (lambda full: edit_tensors(full, at("matQ", lambda t: t * torch.nan)), "layers.1.q_proj holds values that are not finite"),
    "other heads in the config": (lambda full: edit_config(full, num_key_value_heads=6), "k_proj.weight is [96, 64], and config.json says 192 rows"),
    "a norm without a tensor": (lambda full: edit_config(full, kvpop_norm="rmsnorm"), "kvpop_norm is 'rms', and there is no such tensor"),
    "numbers that do not add up": (lambda full: edit_config(full, kvpop_budget=1000), "kvpop_budget is 1000, and 4 sinks, window 16 and kvpop_topk 44 make 64"),
    "two windows": (lambda full: edit_config(full, kvpop={"window": 17}), "one of the two is wrong"),
    "an activation that is not served": (lambda full: edit_config(full, kvpop={"score_activation": "gelu"}), "is 'gelu', and silu alone can be served"),
    "no window": (lambda full: edit_config(full, kvpop_window=...), "config.json does not say window"),
    "a pickle": (pickled, "pytorch_model.bin is a pickle: convert it with 'kvpop import'"),
    "a file that is not there": (lambda full: (full / "model.safetensors.index.json").write_text('{"weight_map": {"a": "b.safetensors"}}'), "has no file 'b.safetensors', which its index names"),
    "a file whose name is too long": (lambda full: (full / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "b" * 5000}})), "which its index names"),
    "a name of two lines": (lambda full: edit_tensors(full, lambda t: t | {"a\nkvpop: error": torch.ones(3)}), r"'a\nkvpop: error' is no name of a tensor"),
    "a key of two lines": (lambda full: edit_config(full, kvpop={"a\nkvpop: error.window": 17}), "one of the two is wrong"),
    "a budget that may count the state": (lambda full: edit_config(full, kvpop_topk=..., kvpop_budget=64), "can be read in 2 ways (topk: 44 or 32): run 'kvpop inspect-checkpoint"),
    "no scorer": (lambda full: edit_tensors(full, lambda t: {n: x for n, x in t.items() if "kvpop" not in n}), "has no tensors but the base model's"),
}  # fmt: skip


@pytest.mark.parametrize("reason", REFUSED)
def test_refused_in_one_line(full, reason):
    change, message = REFUSED[reason]
    change(full)
    with pytest.raises(ConfigError) as error:
        read_scorer(full)
    assert message in str(error.value) and "\n" not in str(error.value)
    assert not (full.parent / "trace").exists()


def test_an_edited_map_serves_what_can_be_read_in_two_ways(full, tmp_path, capsys):
    expected = read_scorer(full)
    edit_tensors(full, gates_together)
    out = tmp_path / "map.json"
    assert main(["inspect-checkpoint", str(full), "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "2 readings fit, of which this is one; they differ in" in printed and f"wrote {out}: mend it" in printed
    assert "gates.weight [3, 2, 64]: input gate or forget gate" in printed
    kvpop_map = json.loads(out.read_text())
    for first in (0, 1):
        kvpop_map["pieces"]["input gate"]["part"], kvpop_map["pieces"]["forget gate"]["part"] = first, 1 - first
        out.write_text(json.dumps(kvpop_map))
        config, layers = read_scorer(full, str(out))
        gates = ("igate.weight", "fgate.weight") if first == 0 else ("fgate.weight", "igate.weight")
        for layer, right in zip(layers, expected[1], strict=True):
            assert torch.equal(layer["igate.weight"], right[gates[0]])
            assert torch.equal(layer["fgate.weight"], right[gates[1]])
    assert config == expected[0]
    model = load_checkpoint(full).eval()
    with pytest.raises(ConfigError, match="give it with map"):
        KVpopCache(model, "kvpop")
    assert generate(model, KVpopCache(model, "kvpop", map=out), PROMPTS)
    assert main(["inspect-checkpoint", str(full), "--map", str(out)]) == 0
    assert f"{out} fits" in capsys.readouterr().out
    assert main(["inspect-checkpoint", str(full), "--out", str(out)]) == 2
    assert "exists: name another file with --out" in capsys.readouterr().err


def test_a_tensor_whose_name_is_a_number_is_listed(full, tmp_path, capsys):
    edit_tensors(full, lambda tensors: tensors | {"0": torch.ones(3)})
    assert main(["inspect-checkpoint", str(full), "--out", str(tmp_path / "map.json")]) == 0
    assert "  0 [3]: no piece of a scorer" in capsys.readouterr().out


HARMLESS = {
    "the kind of a cache": {"cache_type": "static", "kvpop": {"cache": {"type": "dynamic"}}},
    "an optimizer": {"training": {"optimizer": {"name": "adamw"}}},
    "sampling": {"generation_config": {"top_k": 20}},
    "a range to 1": {"kvpop": {"decay_range": [0.999, 1]}, "decay_range": ...},
}


@pytest.mark.parametrize("keys", HARMLESS)
def test_keys_of_other_things_are_left_alone(full, keys):
    edit_config(full, **HARMLESS[keys])
    assert read_scorer(full)[0].topk == 44


@pytest.mark.parametrize("keys", [{"kvpop": {"window": 17}}, {"out_act": "none"}, {"kvpop_sinks": 10**400}])
def test_a_map_decides_in_place_of_the_config(full, tmp_path, keys, capsys):
    edit_config(full, **keys)
    with pytest.raises(ConfigError, match="or give a map"):
        read_scorer(full)
    assert main(["inspect-checkpoint", str(full), "--out", str(tmp_path / "map.json")]) == 0
    assert "map.json: mend it, and give it with --kv-map" in capsys.readouterr().out
    assert read_scorer(full, str(tmp_path / "map.json"))[0].window == 16


MAPS = {
    "a piece that there is none of": (lambda m: m["pieces"].update(ogate={"tensor": "x", "axes": "head"}), "'ogate' is no piece of a scorer"),
    "a tensor that is not there": (lambda m: m["pieces"]["key"].update(tensor="model.key"), "has no tensor model.key, which kvpop_map.json names"),
    "axes that do not describe it": (lambda m: m["pieces"]["key"].update(axes="head out"), "which axes 'head out' do not describe: mend the map"),
    "axes in half a group": (lambda m: m["pieces"]["key"].update(axes="(head out in"), "axes of key must be of layer, head, part, in, out and 1"),
    "axes of other names": (lambda m: m["pieces"]["key"].update(axes="head rows in"), "axes of key must be of layer, head, part, in, out and 1"),
    "a missing piece": (lambda m: m["pieces"].pop("key"), "pieces has no 'key': name its tensor"),
    "a feature map": (lambda m: m["formula"].update(feature_map="relu"), 'formula.feature_map must be one of "hedgehog", "softmax", got'),
    "an unknown key": (lambda m: m.update(more=1), "has an unknown key 'more'"),
    "another format": (lambda m: m.update(format="kvpop-scorer"), "is not that of a map of version 1"),
    "a decay that is none": (lambda m: m["formula"].update(decay="log"), "the decay is said to be log, and has values that are none"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MAPS)
def test_a_wrong_map_is_refused_in_one_line(full, tmp_path, mistake):
    out = tmp_path / "map.json"
    inspect_checkpoint(full, out)
    kvpop_map = json.loads(out.read_text())
    change, message = MAPS[mistake]
    change(kvpop_map)
    out.write_text(json.dumps(kvpop_map))
    with pytest.raises(ConfigError) as error:
        read_scorer(full, str(out))
    assert message in str(error.value) and "\n" not in str(error.value)


def test_the_value_half_may_come_first(full, tmp_path):
    out, right = tmp_path / "map.json", read_scorer(full)[1]
    inspect_checkpoint(full, out)
    kvpop_map = json.loads(out.read_text())
    kvpop_map["formula"]["inputs"] = "value key"
    out.write_text(json.dumps(kvpop_map))
    for layer, expected in zip(read_scorer(full, str(out))[1], right, strict=True):
        for name in ("q_proj", "k_proj", "v_proj", "igate.weight", "fgate.weight"):
            assert torch.equal(layer[name], torch.cat([expected[name][:, DIM:], expected[name][:, :DIM]], 1))


def test_a_map_is_for_these_checkpoints_alone(full, tmp_path):
    adapter = full.parent / "ours"
    with pytest.raises(ConfigError, match="--kv-map is for full checkpoints of other authors, and .* is none"):
        read_scorer(adapter, str(tmp_path / "map.json"))
    model = load_checkpoint(full)
    with pytest.raises(ConfigError, match="streaming-llm uses no scorer: leave map out"):
        KVpopCache(model, "streaming-llm", budget=64, map=tmp_path / "map.json")


def test_import_reads_a_pickle_of_tensors_and_no_other(full, tmp_path, capsys):
    expected = read_scorer(full)
    torch.save(load_file(full / "model.safetensors"), full / "pytorch_model.bin")
    (full / "model.safetensors").unlink()
    assert main(["import", str(full), str(tmp_path / "out"), "--topk", "40"]) == 0
    config, layers = read_scorer(tmp_path / "out")
    assert config.topk == 40 and config.window == expected[0].window
    assert all(torch.equal(a[name], b[name]) for a, b in zip(layers, expected[1], strict=True) for name in b)
    (full / "pytorch_model.bin").unlink()
    (full / "model.safetensors").touch()
    pickled(full)
    assert main(["import", str(full), str(tmp_path / "other")]) == 2
    assert "cannot be read as tensors alone" in capsys.readouterr().err
    assert not (full.parent / "trace").exists() and not (tmp_path / "other").exists()


@pytest.mark.parametrize("content", [b"\x80\x02.", b"", b"PK", pickle.dumps({0: 1}, 2), pickle.dumps([], 2)])
def test_a_damaged_pickle_is_refused_in_one_line(full, tmp_path, content, capsys):
    weights = load_file(full / "model.safetensors")
    (full / "model.safetensors").unlink()
    (full / "training_args.bin").write_bytes(content)
    (full / "pytorch_model.bin").write_bytes(content)
    assert main(["import", str(full), str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert "pytorch_model.bin" in error and error.count("\n") == 1, error
    torch.save({0: torch.ones(1)}, full / "pytorch_model.bin")
    assert main(["import", str(full), str(tmp_path / "out")]) == 2
    assert "holds something else than named tensors: give a checkpoint's folder" in capsys.readouterr().err
    torch.save(weights, full / "pytorch_model.bin")
    assert main(["import", str(full), str(tmp_path / "out")]) == 0


def test_what_is_assumed_is_said(full, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(reader.logger, "propagate", True)
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    read_scorer(full)
    line = f"{full}: assumed, because config.json does not say it: feature_map hedgehog, gate_softcap None, delayed True, decay_step 1"
    assert line in caplog.messages
    edit_config(full, decay_range=..., kvpop={"gate_softcap": 0, "delayed": True, "decay_step": 1})
    read_scorer(full)
    assert caplog.messages[-1].endswith("does not say it: feature_map hedgehog, decay_min 0.999, decay_max 0.999999")
    inspect_checkpoint(full, tmp_path / "map.json")
    caplog.clear()
    read_scorer(full, str(tmp_path / "map.json"))
    assert not caplog.messages


def test_a_config_of_theirs_in_our_name_is_not_ours(full):
    (full / "kvpop_config.json").write_text('{"format": "theirs"}')
    edit_config(full, kvpop={"format": "theirs"})
    assert read_scorer(full)[0].topk == 44


def test_no_weight_of_the_base_is_random(full):
    edit_tensors(full, lambda tensors: {name: t for name, t in tensors.items() if "1.mlp.up_proj" not in name})
    with pytest.raises(
        ConfigError, match=r"has no weights for model.layers.1.mlp.up_proj.weight, which would be random"
    ):
        load_checkpoint(full)


def test_no_code_is_executed(full):
    """Neither by transformers, which would ask for trust, nor with an option that gives it."""
    with pytest.raises(ConfigError, match="no code of a checkpoint is executed: leave trust_remote_code out"):
        load_checkpoint(full, trust_remote_code=True)
    load_checkpoint(full)
    assert AutoConfig.from_pretrained(full).model_type == "qwen3_kvpop"
    assert AutoModelForCausalLM.from_pretrained(full).config.architectures == ["Qwen3KVpopForCausalLM"]
    assert ModelShape.of(full, 128).model_type == "qwen3"
    assert not (full.parent / "trace").exists()


@pytest.mark.parametrize(
    "budget, topk",
    [({"topk": 3772, "budget": 4096}, [3772]), ({"topk": 4032}, [4032]), ({"budget": 4032}, [3772, 3708]), ({"topk": 3772, "budget": 4032}, [3772]),
     ({"topk": 4032, "budget": 4096}, [3772]), ({"budget": 4096, "state_entries": 64}, [3772]), ({"topk": 4032, "budget": 4032}, [3772]),
     ({"budget": 4032, "state_entries": 0}, [3772])],
)  # fmt: skip
def test_a_budget_may_count_the_state(budget, topk):
    """The paper's 4,096 are 4 sinks, a window of 256, 3,772 long-range tokens and a state of 64."""
    facts = facts_of({"kvpop": {"sinks": 4, "window": 256} | budget}, frozenset(), "config.json")
    budgets = budgets_of(facts, 128 * 128 // (2 * 128), "config.json")
    assert budgets == [{"sinks": 4, "window": 256, "topk": k} for k in topk]


@pytest.mark.parametrize(
    "config, base",
    [
        ({"model_type": "qwen3kvpop"}, "qwen3"),
        ({"model_type": "Qwen3-KV_POP"}, "qwen3"),
        ({"model_type": "qwen3", "architectures": ["Qwen3KVPopForCausalLM"]}, "qwen3"),
        ({"model_type": "kvpop", "architectures": ["KVpopLlamaForCausalLM"]}, "llama"),
        ({"model_type": "qwen3_kvpop", "kvpop": {"format": "kvpop-scorer"}}, None),
        ({"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}, None),
        ({"model_type": "kvpop"}, ""),
        ({"model_type": "qwen3_kvpop", "kvpop": {"format": "theirs"}}, "qwen3"),
    ],
)
def test_names_of_checkpoints(config, base):
    assert published_base(config) == base


def test_the_model_can_be_saved_and_pickled_as_the_base(full, tmp_path):
    model = load_checkpoint(full)
    assert pickle.loads(pickle.dumps(model)).config.kvpop_published == "Qwen3_KVPop"
    model.save_pretrained(tmp_path / "saved")
    with pytest.raises(ConfigError, match="has no tensors but the base model's, so no scorer: give --kv-scorer DIR"):
        read_scorer(tmp_path / "saved")


def test_plan_reads_the_scorer(full, capsys):
    assert main(["plan", "--model", str(full), "--kv-memory", "1GiB", "--budget", "64"]) == 0
    assert "kvpop's state is that of a scorer of default size" not in capsys.readouterr().out
