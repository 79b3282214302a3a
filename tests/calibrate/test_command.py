"""`kvpop calibrate` on tiny models, and the serving of what it finds."""

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from calibrate.conftest import KINDS, WORDS
from distill.byte_tokenizer import CHAT
from distill.tiny_text import VOCABULARY, write_byte_tokenizer
from distill.typed import refused
from safetensors.torch import load_file, save_file
from scorers.spellings import SPELLINGS, write_spelling

from kvpop_vllm.cache.ranks import shards_of
from kvpop_vllm.calibrate.command import options_of
from kvpop_vllm.calibrate.plan import ROUNDS, Options, Plan, specs_of
from kvpop_vllm.calibration.shares import read_calibration
from kvpop_vllm.cli import make_parser
from kvpop_vllm.config import ConfigError
from kvpop_vllm.hf import KVpopCache
from kvpop_vllm.model_hook import load_model
from kvpop_vllm.scorers.checkpoint import read_config, write_shares
from kvpop_vllm.testing import write_random_scorer, write_tiny_model

POLICIES = "triattention", "streaming-llm"
"""Policies of a report by default."""


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("unit", ["layer", "head"])
def test_models_calibrate_without_code(calibrated, kind, unit):
    report, output, _ = calibrated(kind, unit)
    calibration = read_calibration(f"{kind}-{unit}")
    shares = torch.tensor(calibration.shares, dtype=torch.float64)
    assert shares.shape == (2, KINDS[kind]) and shares.mean().item() == pytest.approx(1)
    assert calibration.unit == report["shares"] == unit
    assert shares[0].max() < 0.51 < 1.0 < shares[1].mean() and (unit == "head" or (shares == shares[:, :1]).all())
    lines = {(line["policy"], line["budget"], line["shares"] != "equal"): line for line in report["lines"]}
    assert {key[:2] for key in lines} == {(name, b) for name in ("streaming-llm", "l2norm") for b in (64, 32, 16)}
    shared, equal = lines["streaming-llm", 32, True], lines["streaming-llm", 32, False]
    assert shared["over equal"] == pytest.approx(shared["kl"] / equal["kl"]) and shared["over equal interval"][1] < 1
    best = min((lines[name, 32, True] for name in ("streaming-llm", "l2norm")), key=lambda line: line["kl"])
    assert calibration.policy == best["policy"]
    assert all(math.isfinite(line["MiB"]) and line["prefill"] > 0 for line in lines.values())
    assert report["intervals over"] == "documents" and report["text"] == "text.jsonl" in output
    assert output.splitlines()[-1] == report["command"]


def test_triattention_is_in_the_report_by_default(kvpop):
    """It is left out where a budget is too small for it, unless it was asked for."""
    words = "calibrate", "qwen3", "--data", "text.jsonl", "--rows", "8", "--threads", "1", "--out"
    status, _, errors = kvpop(*words, "further", "--length", "320", "--budget", "180", "160", "150")
    assert status == 0 and "left out" not in errors, errors
    lines, calibration = json.loads(Path("further/report.json").read_text())["lines"], read_calibration("further")
    assert {line["policy"] for line in lines} == {"streaming-llm", "triattention"}
    assert {line["policy"] for line in lines if line["shares"] != "equal"} == {"triattention"}
    assert (calibration.unit, calibration.decided_by) == ("layer", "triattention")
    served = [line for line in lines if (line["policy"] == "triattention") == (line["shares"] != "equal")]
    best = min((line for line in served if line["budget"] == 160), key=lambda line: line["kl"])
    assert (calibration.policy, calibration.budget) == (best["policy"], 160)
    network = load_model("qwen3", torch.float32)
    policies = {name: KVpopCache(network, name, budget=160, calibration="further").policy for name in POLICIES}
    assert policies["triattention"].shares()[0].max() < 160 < policies["triattention"].shares()[1].min()
    assert (policies["streaming-llm"].shares() == 160).all(), "a window takes only shares that it decided about"
    assert ("no GPU has run triattention" in errors) == (best["policy"] == "triattention")
    status, _, errors = kvpop(*words, "small", "--length", "128", "--dry-run")
    left_out = "left out of the report, so that streaming-llm decides: triattention: a budget of 64 is too small"
    assert status == 0 and left_out in errors, errors
    refused(
        kvpop, " ".join((*words, "small", "--length", "128", "--policies", "triattention")), "a budget of 64 is too"
    )


@pytest.mark.parametrize(
    "options, device, names",
    [
        ("", "cpu", ["triattention", "streaming-llm"]),
        ("", "cuda", ["streaming-llm"]),
        ("--policies", "cpu", ["streaming-llm"]),
        ("--policies triattention", "cuda", ["triattention", "streaming-llm"]),
        ("--policies h2o", "cpu", ["streaming-llm", "h2o"]),
        ("--policy streaming-llm --policies triattention", "cpu", ["streaming-llm", "triattention"]),
        ("--policy h2o --policies tova", "cpu", ["h2o", "streaming-llm", "tova"]),
    ],
)
def test_policies_of_a_report_and_first_the_one_that_decides(monkeypatch, options, device, names):
    monkeypatch.setattr("kvpop_vllm.calibrate.plan.default_device", lambda: torch.device(device))
    words = ["calibrate", str(Path("qwen3").resolve()), "--out", "out", *options.split()]
    assert [*specs_of(options_of(make_parser().parse_args(words)))] == names


@pytest.mark.parametrize(
    "options, rounds, by_errors",
    [
        ({}, 0, False),
        ({"unit": "head"}, 0, True),
        ({"unit": "head", "policy": "streaming-llm"}, 0, False),
        ({"scorer": "folder"}, ROUNDS, False),
        ({"scorer": "folder", "rounds": 0}, 0, False),
        ({"policy": "h2o", "rounds": 2}, 2, False),
    ],
)
def test_rounds_and_errors_that_take_part_by_default(options, rounds, by_errors):
    plan = Plan.__new__(Plan)
    plan.options = Options("model", "out", **options)
    plan.specs = {plan.options.policy or "triattention": None}
    assert (plan.rounds, plan.by_errors) == (rounds, by_errors)


def test_a_stopped_call_goes_on(calibrated, kvpop):
    before, _, _ = calibrated("qwen3")
    path = Path("qwen3-layer", "measured.jsonl")
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:20]) + lines[20][:9])
    after, _, _ = calibrated("qwen3")
    keys = [[json.loads(line)["key"] for line in text[1:]] for text in (lines, path.read_text().splitlines())]
    assert sorted(map(json.dumps, keys[0])) == sorted(map(json.dumps, keys[1]))
    same = [[{name: line[name] for name in line if name != "prefill"} for line in r["lines"]] for r in (before, after)]
    assert same[0] == same[1]
    refused(kvpop, f"calibrate qwen3 --out qwen3-layer {' '.join(WORDS)} --dtype bfloat16", "other settings (dtype)")
    refused(kvpop, f"calibrate llama --out qwen3-layer {' '.join(WORDS)}", "other settings (model)")


def test_damaged_results_are_written_again(kvpop):
    words = "calibrate qwen3 --data text.jsonl --rows 8 --threads 1 --length 320 --budget 160 --out damaged".split()
    assert kvpop(*words)[0] == 0
    folder, names = Path("damaged"), ("queries.safetensors", "shares.json")
    before = [(folder / name).read_bytes() for name in names]
    (folder / "queries.safetensors").write_bytes(before[0][:-5])
    (folder / "shares.json").write_text("{")
    status, _, errors = kvpop(*words)
    assert status == 0 and [(folder / name).read_bytes() for name in names] == before, errors


def test_measurements_from_the_start_replace_what_is_there(calibrated):
    """Statistics and shares of an earlier model do not survive a call that measures everything."""
    calibrated("qwen3")
    folder, names = Path("qwen3-layer"), ("queries.json", "queries.safetensors", "shares.json")
    before = [(folder / name).read_bytes() for name in names]
    for name in names:
        (folder / name).write_text("of another model")
    (folder / "measured.jsonl").unlink()
    calibrated("qwen3")
    assert [(folder / name).read_bytes() for name in names] == before


def test_a_dry_run_writes_nothing(kvpop):
    status, output, _ = kvpop("calibrate", "qwen3", "--out", "dry", *WORDS, "--dry-run")
    assert status == 0 and not Path("dry").exists()
    assert output.startswith("at most about 1 minutes and ") and output.endswith(
        "for 2 layers and rows of 128 tokens\n"
    )
    statistics = "--policy", "triattention", "--length", "300", "--budget", "140"
    status, _, errors = kvpop("calibrate", "qwen3", "--out", "dry", *WORDS, "--dry-run", *statistics)
    assert status == 0 and not Path("dry").exists(), errors


def test_shares_that_do_not_help_are_not_kept(kvpop, folder):
    """In a model whose layers are alike nothing is won by unequal shares, but by a better window of `l2norm`, which has 1."""
    write_byte_tokenizer(write_tiny_model("alike", "llama", layers=1, vocab=VOCABULARY, kv_heads=2))
    for decides, name in (("streaming-llm", "tova"), ("l2norm", "l2norm")):
        words = "calibrate", "alike", "--out", f"alike-{decides}", *WORDS, "--policy", decides
        status, _, errors = kvpop(*words, "--policies", name)
        assert status == 0, errors
        calibration = read_calibration(f"alike-{decides}")
        assert (calibration.unit, calibration.shares, calibration.decided_by) == ("uniform", None, None)
        report = json.loads(Path(f"alike-{decides}", "report.json").read_text())
        assert {line["shares"] for line in report["lines"]} == {"equal"}
        assert report["shares"] == "uniform" and report["decided by"] is None
        cache = KVpopCache(load_model("alike", torch.float32), "auto", calibration=f"alike-{decides}")
        assert cache.policy.name == calibration.policy and (cache.policy.shares() == 32).all()
    assert calibration.windows.keys() == {"l2norm"}
    line = next(line for line in report["lines"] if (line["policy"], line["budget"]) == ("l2norm", 32))
    window = KVpopCache(load_model("alike", torch.float32), "l2norm", budget=32, calibration="alike-l2norm").policy
    assert window.retention.window == line["window"] > 1


def test_policies_take_shares_and_windows(calibrated):
    calibrated("llama")
    calibration, network = read_calibration("llama-layer"), load_model("llama", torch.float32)
    auto = KVpopCache(network, "auto", calibration=Path("llama-layer")).policy
    assert (auto.name, auto.retention.budget) == (
        calibration.policy,
        calibration.budget,
    ) and auto.retention.budget == 32
    assert auto.retention.window == int(calibration.windows[calibration.policy] * (32 - auto.retention.sinks))
    assert int(auto.shares().sum()) == 32 * 8 and auto.shares()[0].max() < 32 < auto.shares()[1].min()
    assert KVpopCache(network, "auto", calibration="llama-layer", budget=100).policy.retention.budget == 100
    h2o = KVpopCache(network, "h2o", calibration="llama-layer", budget=32).policy
    assert h2o.retention.window == 16, "h2o was not measured"
    assert int(h2o.shares().sum()) == 32 * 8 and (h2o.shares() != 32).all()
    overridden = KVpopCache(
        network, "streaming-llm", calibration="llama-layer", budget=32, window=9, allocator="uniform"
    )
    assert overridden.policy.retention.window == 9 and (overridden.policy.shares() == 32).all()
    write_random_scorer("scorer", "llama", "mlp", sinks=2, window=6, topk=24)
    learned = KVpopCache(network, "kvpop-mlp", scorer="scorer", calibration="llama-layer").policy
    assert learned.retention.window == 6 and (learned.shares() != 32).all()
    rounds = KVpopCache(network, "rkv", calibration="llama-layer", budget=256).policy
    assert rounds.shares()[0].max() < 256 < rounds.shares()[1].min()


def test_slots_are_balanced_over_the_ranks_that_will_serve(calibrated, kvpop):
    """Heads of each of two ranks have as many slots; with a stage for each layer there is nothing to divide."""
    _, output, _ = calibrated("llama", "head")
    alone = read_calibration("llama-head").shares
    shutil.copytree("llama-head", "llama-ranks", dirs_exist_ok=True)
    words = "calibrate", "llama", "--out", "llama-ranks", "--shares", "head", *WORDS, "--tensor-parallel-size", "2"
    status, output, errors = kvpop(*words)
    assert status == 0, errors
    report, calibration = json.loads(Path("llama-ranks/report.json").read_text()), read_calibration("llama-ranks")
    assert report["table"].startswith("head-2x1-") and " --tensor-parallel-size 2" in report["command"]
    shares = torch.tensor(calibration.shares, dtype=torch.float64)
    assert shares.tolist() != list(map(list, alone))
    assert shares[:, :2].mean().item() == pytest.approx(1) and shares[:, 2:].mean().item() == pytest.approx(1)
    shards = shards_of([(0, 2)], 4, 2)
    policy = KVpopCache(load_model("llama", torch.float32), "auto", calibration="llama-ranks", budget=64).policy
    totals = [sum(map(sum, shares.budgets)) for shares in policy.division(shards).shares(64, policy.retention.window)]
    assert sum(totals) == 64 * 8 and abs(totals[0] - totals[1]) <= 2


def test_a_scorers_policy_decides_and_its_folder_gets_the_shares(kvpop):
    write_random_scorer("deciding", "llama", "mlp", sinks=2, window=6, topk=24)
    words = [*WORDS[:-4], "--policy", "kvpop-mlp", "--scorer", "deciding"]
    status, output, errors = kvpop("calibrate", "llama", *words)
    assert status == 0, errors
    out = Path("deciding/calibration")
    report, calibration = json.loads((out / "report.json").read_text()), read_calibration(str(out))
    assert {line["policy"] for line in report["lines"]} == {"kvpop-mlp", "streaming-llm"}
    assert calibration.unit == "layer" and calibration.shares[0][0] < 0.51 and "kvpop-mlp" not in calibration.windows
    ours = next(line for line in report["lines"] if line["policy"] == "kvpop-mlp" and line["shares"] == "equal")
    assert ours["window"] == 6
    assert ("--kv-scorer deciding" in output) == (calibration.policy == "kvpop-mlp")
    assert read_config("deciding").shares == calibration.shares
    network = load_model("llama", torch.float32)
    shares = KVpopCache(network, "kvpop-mlp", scorer="deciding", budget=32).policy.shares()
    assert int(shares.sum()) == 32 * 8 and shares[0].max() < 32 < shares[1].min()
    Path("measured.txt").write_text((out / "measured.jsonl").read_text())
    assert kvpop("calibrate", "llama", *words)[0] == 0, "shares in the folder do not change what is measured"
    assert (out / "measured.jsonl").read_text() == Path("measured.txt").read_text()


def test_a_scorer_keeps_its_shares_where_none_are_better(kvpop):
    """One layer alone has nothing to divide."""
    write_byte_tokenizer(write_tiny_model("single", "llama", layers=1, vocab=VOCABULARY, kv_heads=2))
    write_random_scorer("of-single", "single", "mlp", sinks=2, window=6, topk=24)
    write_shares("of-single", ((1.25, 0.75),))
    status, _, errors = kvpop("calibrate", "single", *WORDS, "--scorer", "of-single", "--rounds", "0")
    assert status == 0, errors
    assert read_calibration("of-single/calibration").shares is None
    assert read_config("of-single").shares == ((1.25, 0.75),)


@pytest.mark.slow
def test_a_full_checkpoint_gets_the_shares(kvpop):
    write_random_scorer("exported", "llama", "mlp", sinks=2, window=6, topk=24)
    assert kvpop("export", "llama", "exported", "full")[0] == 0
    before = json.loads(Path("full/config.json").read_text())
    words = ["calibrate", "full", "--out", "of-full", "--scorer", "full", *WORDS[:-4], "--budget", "32"]
    status, output, errors = kvpop(*words)
    assert status == 0, errors
    shares = read_calibration("of-full").shares
    assert shares is not None and shares[0][0] < 0.51
    after = json.loads(Path("full/config.json").read_text())
    assert after["kvpop"].pop("shares") == [list(row) for row in shares]
    before["kvpop"].pop("shares", None)
    assert after == before
    served = KVpopCache(load_model("full", torch.float32), "kvpop-mlp", budget=32).policy.shares()
    assert served[0].max() < 32 < served[1].min()


@pytest.mark.slow
def test_more_rounds_go_on_from_what_was_measured(kvpop):
    words = "calibrate", "llama", "--policy", "tova", "--budget", "24", *WORDS[:-4], "--threads", "1"
    for out, rounds in (("few", "0"), ("few", "2"), ("many", "2")):
        status, _, errors = kvpop(*words, "--out", out, "--rounds", rounds)
        assert status == 0, errors
    assert Path("few/shares.json").read_text() == Path("many/shares.json").read_text()
    keys = [{line for line in Path(out, "measured.jsonl").read_text().splitlines()[1:]} for out in ("few", "many")]
    keys = [{json.dumps(json.loads(line)["key"]) for line in lines} for lines in keys]
    assert keys[0] >= keys[1] and len(keys[1]) > 100


@pytest.mark.slow
@pytest.mark.parametrize("unit, ranks", [("layer", 1), ("head", 1), ("head", 2)])
def test_any_policy_may_decide(kvpop, unit, ranks):
    words = ["--policy", "tova", "--shares", unit, "--budget", "24", *WORDS[:-4], "--threads", "1"]
    words += ["--tensor-parallel-size", str(ranks), "--rounds", "2"]
    status, output, errors = kvpop("calibrate", "llama", "--out", f"tova-{unit}", *words)
    assert status == 0, errors
    calibration = read_calibration(f"tova-{unit}")
    shares = torch.tensor(calibration.shares)
    assert calibration.unit == unit and shares[0].max() < 0.51 < 1 < shares[1].mean()
    assert all(part.mean().item() == pytest.approx(1) for part in shares.chunk(ranks, 1))
    report = json.loads(Path(f"tova-{unit}", "report.json").read_text())
    table = report["table"].removeprefix(unit)
    assert table.startswith("-2x1-") == (ranks == 2), "ranks have tables of their own in the same folder"
    lines = {(line["policy"], line["shares"] != "equal"): line for line in report["lines"]}
    assert set(lines) == {("tova", False), ("tova", True), ("streaming-llm", False)}
    assert {line["budget"] for line in report["lines"]} == {24} and calibration.budget == 24
    assert lines["tova", True]["over equal interval"][1] < 1
    losses: dict[str, list[float]] = {}
    for line in map(json.loads, Path(f"tova-{unit}", "measured.jsonl").read_text().splitlines()[1:]):
        side, *_, window, name, _ = line["key"] if line["key"][0] == "search" else (None,) * 4
        alike = side and (name == "equal" or ("-2x1-" in name) == (ranks == 2))
        if alike and window == 1:  # that of the search
            losses.setdefault(name, []).append(line["value"]["kl"])
    scores = {name: sum(of_rows) for name, of_rows in losses.items()}
    assert {len(of_rows) for of_rows in losses.values()} == {3} and len(scores) > 3
    assert scores[report["table"]] == min(scores.values()), "the table that measured rows like best"


def test_protected_prompts_are_in_the_memory_of_the_report(kvpop):
    """A prompt of at most 83 tokens takes two blocks of 64 slots, and 28 slots after it a third."""
    shutil.copytree("llama", "chat", dirs_exist_ok=True)
    Path("chat/chat_template.jinja").write_text(CHAT)
    documents = [{"prompt": "x" * (50 + i % 20), "response": f"{i:02} likes {i:02}. " * 12} for i in range(40)]
    Path("prompts.jsonl").write_text("".join(json.dumps(document) + "\n" for document in documents))
    words = "--data prompts.jsonl --length 200 --rows 8 --budget 32 --threads 1".split()
    for protect, blocks in (([], 1), (["--protect-prompt"], 3)):
        status, _, errors = kvpop("calibrate", "chat", "--out", f"prompts-{blocks}", *words, *protect)
        assert status == 0, errors
        lines = json.loads(Path(f"prompts-{blocks}", "report.json").read_text())["lines"]
        equal = next(line for line in lines if line["shares"] == "equal")
        assert equal["MiB"] * 2**20 == blocks * 2 * 4 * 64 * (2 * 32 * 4 + 8)


@pytest.mark.parametrize("name", ["snapkv", "pyramidkv", "adakv", "attention-matching", "full"])
def test_policies_that_take_no_calibration_say_so(calibrated, name):
    calibrated("llama")
    with pytest.raises(ConfigError, match=f"^policy {name} .*: leave calibration out$"):
        KVpopCache(
            load_model("llama", torch.float32),
            name,
            calibration="llama-layer",
            **{} if name == "full" else {"budget": 64},
        )


DAMAGE = {
    "no file": (None, "has no shares.json: give the folder of a finished 'kvpop calibrate'"),
    "no json": ("{", "cannot be read as JSON"),
    "another format": ({"format": "x"}, "is not that of a calibration of version 1"),
    "another version": ({"version": 2}, "is not that of a calibration of version 1"),
    "another model": ({"model_type": "qwen3"}, "was made for a model with model_type = 'qwen3', this one has 'llama'"),
    "layers": ({"num_layers": 3, "shares": [[1] * 4] * 3}, "was made for a model with num_layers = 3, this one has 2"),
    "rotation": ({"rope": {}}, "was made for rotary embeddings with rope_theta = None, this one has 10000.0"),
    "NaN": ({"shares": [[math.nan] * 4] * 2}, "shares must be 2 lists of 4 numbers"),
    "a window of NaN": ({"windows": {"h2o": math.nan}}, "windows must be an object of numbers above 0 and at most 1"),
    "a window of 0": ({"windows": {"h2o": 0}}, "windows must be an object of numbers above 0 and at most 1"),
    "no shares": ({"shares": None}, "shares must be 2 lists of"),
    "unit": ({"unit": "block"}, "unit must be one of uniform, layer, head, got 'block'"),
    "budget": ({"budget": True}, "budget must be an integer from 1 to 16777216, got True"),
    "unknown": ({"more": 1}, "has an unknown key 'more'"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_folders_are_refused_in_one_line(calibrated, tmp_path, damage):
    calibrated("llama")
    change, message = DAMAGE[damage]
    shutil.copytree("llama-layer", tmp_path / "copy")
    path = tmp_path / "copy" / "shares.json"
    if change is None:
        path.unlink()
    else:
        path.write_text(change if isinstance(change, str) else json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ConfigError) as caught:
        KVpopCache(load_model("llama", torch.float32), "streaming-llm", budget=64, calibration=tmp_path / "copy")
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_refusals_of_the_command(kvpop, calibrated):
    calibrated("llama")
    words = " ".join(WORDS)
    start = "calibrate llama --out refused"
    refused(kvpop, f"{start} {words} --policies kvpop", "--policies kvpop needs a scorer: give --scorer DIR")
    refused(kvpop, f"{start} {words} --policy kvpop", "--policy kvpop needs a scorer: give --scorer DIR")
    refused(kvpop, f"calibrate llama {words}", "kvpop calibrate needs a folder to write: give --out DIR")
    refused(kvpop, f"{start} {words} --budget 128", "--budget 128 evicts nothing of 128 tokens: lower it")
    refused(kvpop, f"{start} {words} --budget 64 6", "a budget of 6 is too small to divide: raise --budget or --length")
    for name, smallest in (("vase", 69), ("triattention", 133)):
        small = f"{name}: a budget of 64 is too small for 4 sinks + window {smallest - 5} + 1: raise --budget to at least {smallest}"
        refused(kvpop, f"{start} {words} --policies {name} --dry-run", small)
    assert not Path("refused").exists()
    write_random_scorer("learned", "llama", "mlp", sinks=2, window=6, topk=24)
    refused(
        kvpop, f"{start} {words} --policy h2o --scorer learned", "which is for kvpop-mlp: give --policy kvpop-mlp, or"
    )
    full = write_spelling(Path("spelt"), SPELLINGS["mlstm_kernels"])[2]
    refused(
        kvpop,
        f"calibrate spelt/base --out refused {words} --scorer {full}",
        "cannot take shares, which are written into a scorer's folder: write one with 'kvpop import'",
    )
    refused(
        kvpop,
        f"{start} {words} --scorer learned --policies kvpop-mlp",
        "--policies kvpop-mlp is the policy of --scorer, and in the report already: leave it out",
    )
    refused(kvpop, f"{start} {words} --rounds 2", "--rounds 2 has no use under streaming-llm: leave it out, or give")
    refused(kvpop, f"{start} {words} --protect-prompt", "whose prompts have at most half of them and 16 are needed")
    refused(kvpop, f"{start} {words} --policies snapkv", "--policies snapkv takes no shares of layers: leave it out")
    refused(kvpop, f"{start} {words} --rows 7", "--rows 7 is too few for an interval: give at least 8")
    refused(kvpop, f"{start} --data text.jsonl --length 32", "--length 32 is too short to shrink")
    refused(kvpop, f"{start} --data text.jsonl --length 4096", "and 16 are needed, half of them to judge by")
    positions = json.loads(Path("llama/config.json").read_text())["max_position_embeddings"]
    longer = f"--length {positions + 1} is more than the model's {positions} positions: lower it"
    refused(kvpop, f"{start} --data text.jsonl --length {positions + 1}", longer)
    refused(kvpop, f"calibrate missing --out refused {words}", "missing has no config.json")
    shutil.copytree("llama", "broken", dirs_exist_ok=True)
    Path("broken/model.safetensors").write_bytes(b"no weights")
    refused(kvpop, f"calibrate broken --out refused-weights {words}", "broken cannot be loaded")
    write_byte_tokenizer(write_tiny_model("nan", "llama", vocab=VOCABULARY))
    weights = load_file("nan/model.safetensors")
    weights["lm_head.weight"].fill_(math.nan)
    save_file(weights, "nan/model.safetensors", metadata={"format": "pt"})
    refused(kvpop, f"calibrate nan --out refused-nan {words}", "the model's predictions are not finite")
    write_random_scorer("gate", "llama", "trimkv", sinks=2, window=6, topk=24)
    refused(kvpop, f"{start} {words} --scorer gate", "--scorer gate holds a gate, and shares are for scorers of keys")
    refused(kvpop, f"{start} {words} --scorer nothing", "no scorer at 'nothing'")
    refused(kvpop, f"{start} {words} --shares head --tensor-parallel-size 3", "3 does not divide 4 KV heads: choose")
    refused(kvpop, f"{start} {words} --pipeline-parallel-size 3", "--pipeline-parallel-size 3 is more than 2 layers")
    network = load_model("llama", torch.float32)
    assert KVpopCache(network, "auto", budget=64).policy.name == "streaming-llm"
    with pytest.raises(ConfigError, match="^policy streaming-llm needs a budget: give budget or compression$"):
        KVpopCache(network, "auto")


def test_plan_and_eval_take_a_calibration(kvpop, calibrated):
    calibrated("llama")
    status, output, _ = kvpop(*"plan --model llama --kv-memory 1MiB --budget 128 --calibration llama-layer".split())
    assert status == 0 and "streaming-llm" in output
    assert "snapkv, 128 tokens: --policy snapkv compresses prompts, for which nothing is calibrated" in output, output
    words = "--split all --policies streaming-llm --calibration none llama-layer --length 128 --budget 32 --rows 1 --equal k"
    start = "eval --task replay --model llama --dtype float32 --data text.jsonl --out records.jsonl"
    status, output, errors = kvpop(*start.split(), *words.split())
    assert status == 0, errors
    records = [json.loads(line) for line in Path("records.jsonl").read_text().splitlines()[1:]]
    named = {record["policy"]: record for record in records}
    assert set(named) == {"dense", "streaming-llm", "streaming-llm+llama-layer"}
    assert named["streaming-llm+llama-layer"]["kl"] < named["streaming-llm"]["kl"]
