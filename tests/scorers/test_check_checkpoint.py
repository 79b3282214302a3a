"""``kvpop check-checkpoint``: a wrong reading of the reasoner's scorer shows."""

import copy
import json
import re
import shutil
from argparse import Namespace
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from kvpop_vllm.cli import main
from kvpop_vllm.evaluation.check_checkpoint import _scorers, table
from kvpop_vllm.evaluation.problems import KINDS, SEEDS, make_problem

EXAMPLES = Path(__file__).parents[2] / "examples"
PROJECTIONS = {"q_proj": "query.weight", "k_proj": "key.weight", "v_proj": "value.weight", "out.weight": "score.weight", "out.bias": "score.bias"}  # fmt: skip


@pytest.fixture(scope="module")
def reasoner(tmp_path_factory):
    """Return the reasoner and its scorer as another author's full checkpoint."""
    full = tmp_path_factory.mktemp("reasoner") / "full"
    shutil.copytree(EXAMPLES / "reasoner" / "model", full)
    tensors = load_file(full / "model.safetensors")
    for name, tensor in load_file(EXAMPLES / "scorers" / "reasoner-kvpop" / "kvpop_scorer.safetensors").items():
        _, layer, piece = name.split(".", 2)
        piece = PROJECTIONS.get(piece, piece)
        tensor = tensor.transpose(1, 2) if tensor.dim() == 3 else tensor
        tensors[f"model.layers.{layer}.self_attn.importance.{piece}"] = tensor.contiguous()
    save_file(tensors, full / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((full / "config.json").read_text())
    config |= {"model_type": "llama-kvpop", "architectures": ["LlamaKVpopForCausalLM"]}
    config["kvpop"] = {"num_sinks": 4, "window": 24, "topk": 244, "decay_min": 0.99, "decay_max": 0.9999}
    (full / "config.json").write_text(json.dumps(config))
    return full


@pytest.mark.slow
def test_exchanged_halves_and_exchanged_gates_show(reasoner, tmp_path, capsys):
    """At a quarter of the reasoner's texts, each is worse than the right reading, with an interval clear of 0."""
    right = tmp_path / "right.json"
    assert main(["inspect-checkpoint", str(reasoner), "--out", str(right)]) == 0
    kvpop_map = json.loads(right.read_text())
    gates, halves = copy.deepcopy(kvpop_map), copy.deepcopy(kvpop_map)
    for end in ("", " bias"):
        for gate, other_gate in (("input gate", "forget gate"), ("forget gate", "input gate")):
            gates["pieces"][gate + end] = kvpop_map["pieces"][other_gate + end]
    halves["formula"]["inputs"] = "value key"
    maps = {"right": kvpop_map, "gates": gates, "halves": halves}
    for name, content in maps.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    text = tmp_path / "problems.jsonl"
    problems = [make_problem(kind, seed, None) for seed in SEEDS["train"][:6] for kind in KINDS]
    records = [{"prompt": problem.prompt, "response": problem.solution} for problem in problems]
    text.write_text("".join(json.dumps(record) + "\n" for record in records))
    capsys.readouterr()
    words = [word for name in maps for word in ("--map", str(tmp_path / f"{name}.json"))]
    command = ["check-checkpoint", str(reasoner), "--data", str(text), "--rows", "12", "--dtype", "float32", *words]
    assert main(command) == 0
    printed = capsys.readouterr().out
    lows = {
        name: low
        for name, low in re.findall(r"(gates|halves|scorer|window)(?:\.json)?\s+[\d.]+  \S+ \(([+-][\d.]+) to", printed)
    }
    assert lows.keys() == {"gates", "halves", "scorer", "window"} and all(float(low) > 0 for low in lows.values())
    assert "is better than a shuffled scorer and than a window of the same size" in printed


def test_maps_have_rows_of_their_own(reasoner, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("dense", "window"):
        assert main(["inspect-checkpoint", str(reasoner), "--out", name]) == 0
    scorers, budget, sinks = _scorers(reasoner, Namespace(map=["dense", "window"], budget=None, seed=0), tmp_path)
    assert list(scorers) == ["map dense", "map window", "shuffled scorer"] and (budget, sinks) == (272, 4)


def test_the_table():
    counts = [100] * 10
    dense, window = [100.0] * 10, [130.0 + i for i in range(10)]
    nats = {"dense": dense, "reading": [110.0 + i % 3 for i in range(10)], "shuffled scorer": window, "window": window}
    lines = table(nats, counts)
    assert lines[1].split()[:2] == ["dense", "1.0000"] and lines[2].split() == ["reading", "1.1090"]
    assert lines[-1] == "reading is better than a shuffled scorer and than a window of the same size"
    lines = table(nats | {"window": nats["reading"]}, counts)
    assert lines[-1].startswith("reading is not clearly better than window: the reading may be wrong")


@pytest.mark.parametrize("budget, length", [(272, 2048), (1500, 3000)])
def test_too_little_text(reasoner, tmp_path, capsys, budget, length):
    """Rows hold twice the budget, so that something is evicted."""
    (tmp_path / "text.txt").write_text("run #1 " * 20)
    words = [] if budget == 272 else ["--budget", str(budget)]
    assert main(["check-checkpoint", str(reasoner), "--data", str(tmp_path / "text.txt"), *words]) == 2
    error = f"makes 0 rows of {budget + 2} to {length} tokens, and an interval needs 8: give more text"
    assert error in capsys.readouterr().err
