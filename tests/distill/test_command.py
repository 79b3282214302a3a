"""The commands `kvpop distill` and `kvpop eval` on tiny models, and an engine that serves the result."""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from distill.tiny_text import VOCABULARY, write_byte_tokenizer, write_text
from distill.typed import RECIPE, distill, refused
from safetensors.torch import load_file, save_file
from threads import one_thread
from transformers import AutoTokenizer

from kvpop_vllm.distill import run
from kvpop_vllm.distill.metrics import read_metrics
from kvpop_vllm.distill.recipe import Recipe
from kvpop_vllm.distill.sharding import Process
from kvpop_vllm.distill.sparse_attention import Sparse
from kvpop_vllm.distill.student import Student
from kvpop_vllm.kernels.ops.rules import REPLAY
from kvpop_vllm.model_hook import Dense, load_model
from kvpop_vllm.scorers import from_tensors
from kvpop_vllm.scorers.checkpoint import read_config, read_scorer, write_shares
from kvpop_vllm.testing import random_prompt, write_random_scorer, write_tiny_model

ALL_OPTIONS = "--feature-map=softmax --gate-softcap=3 --norm --skip --no-project-values --features=9".split()


def test_every_option_of_the_mlstm_is_trained_as_it_is_written(kvpop):
    distill(kvpop, "options", "--steps=3", "--batch=2", *ALL_OPTIONS)
    config, layers = read_scorer("options")
    assert (config.feature_map, config.gate_softcap, config.norm, config.skip) == ("softmax", 3.0, True, True)
    assert all("v_proj" not in layer and layer["q_proj"].shape[-1] == 9 for layer in layers)
    assert all(layer[name].abs().max() > 0 for layer in layers for name in ("out.weight", "skip.weight")), "not trained"
    distill(kvpop, "wide", "--steps=1", "--value-size=7", "--features=5")
    assert all(layer["v_proj"].shape[-1] == layer["out.weight"].shape[-1] == 7 for layer in read_scorer("wide")[1])
    distill(kvpop, "hidden", "--steps=1", "--scorer=mlp", "--hidden=6")
    assert all(layer["fc1.weight"].shape[-1] == 6 for layer in read_scorer("hidden")[1])


@pytest.mark.parametrize("kind", ["mlstm", "immediate", "mlp", "linear"])
def test_trains_every_kind_of_scorer_and_tells_how(kvpop, kind):
    options = ["--scorer=mlstm", "--no-delayed"] if kind == "immediate" else [f"--scorer={kind}"]
    steps = distill(kvpop, kind, "--steps=3", "--batch=2", *options)
    assert [row["step"] for row in steps] == [0, 1, 2]
    assert all(math.isfinite(row["retention"]) and 0 < row["recall"] <= 1 for row in steps)
    config = json.loads(Path(kind, "kvpop_config.json").read_text())
    assert (config["scorer"], config["topk"]) == (options[0].removeprefix("--scorer="), 20)
    if config["scorer"] == "mlstm":
        assert config["delayed"] == (kind == "mlstm")
    assert Path(kind, "run/training.png").read_bytes()[1:4] == b"PNG"
    assert any(Path(kind, "run/tensorboard").glob("events.*"))
    before = load_file(Path(kind, "kvpop_scorer.safetensors"))
    assert distill(kvpop, kind, "--steps=3", "--batch=2", *options) == steps, "the same command again trained again"
    after = load_file(Path(kind, "kvpop_scorer.safetensors"))
    assert all(torch.equal(before[name], after[name]) for name in before)


def kill_after(words, metrics, step):
    """Run a command line in a process of its own until ``metrics`` contains ``step``, and kill it there."""
    process = subprocess.Popen([sys.executable, "-m", "kvpop_vllm.cli", *words], stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 300
    while process.poll() is None and time.monotonic() < deadline and not _reached(metrics, step):
        time.sleep(0.005)
    process.kill()
    assert process.wait() == -signal.SIGKILL, process.stderr.read()


def _reached(metrics, step) -> bool:
    return any(row["step"] >= step for row in read_metrics(metrics))


@pytest.mark.slow
@one_thread()
def test_a_kill_changes_nothing(kvpop, folder):
    """A continued run over two kinds of text, in more than one pass, leaves the same files to the byte."""
    text = "".join(json.loads(line)["text"] + "\n" for line in (folder / "text.jsonl").read_text().splitlines()[:20])
    (folder / "text.txt").write_text(text)
    words = "distill --model=qwen3 --data text.jsonl text.txt --steps=120 --batch=2 --save-every=50 --threads=1".split()
    assert kvpop(*words, *RECIPE, "--out=whole")[0] in (0, None)
    run, uncut = Path("cut/run"), Path("whole")
    kill_after([*words, *RECIPE, "--out=cut"], run / "metrics.jsonl", step=53)
    assert list(run.glob("step-*")) and not Path("cut/kvpop_config.json").exists()
    assert kvpop(*words, *RECIPE, "--out=cut")[0] in (0, None)
    for name in ("run/metrics.jsonl", "kvpop_scorer.safetensors", "kvpop_config.json"):
        assert Path("cut", name).read_bytes() == (uncut / name).read_bytes(), name


def test_a_finished_run_keeps_the_shares_that_were_measured_for_it(kvpop):
    """Repeated, it writes nothing."""
    distill(kvpop, "measured", "--steps=2")
    shares = [[1.0, 3.0], [2.0, 2.0]]
    write_shares("measured", shares)  # as kvpop calibrate
    files = [Path("measured", name) for name in ("kvpop_config.json", "kvpop_scorer.safetensors")]
    before = [(file.read_bytes(), file.stat().st_mtime_ns) for file in files]
    distill(kvpop, "measured", "--steps=2")
    assert [(file.read_bytes(), file.stat().st_mtime_ns) for file in files] == before
    assert [list(row) for row in read_config("measured").shares] == shares


def test_a_budget_of_serving_does_not_bind_rows(kvpop):
    """Gates that evict nothing, or by their decisions alone, train on rows shorter than the budget, in both kinds of rows."""
    for name in ("kvzap", "dms"):
        words = f"distill --model=qwen3 --data text.jsonl --recipe={name} --length=64 --window=8 --topk=300 --steps=1 --dtype=float32"
        for rows in ("--pack", "--no-pack"):
            status, _, errors = kvpop(*words.split(), rows, "--batch=1", f"--out={name}{rows}")
            assert status in (0, None), errors
            assert read_config(f"{name}{rows}").topk == 300


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
@pytest.mark.parametrize("failed", [False, True])
def test_after_an_error_nccl_waits_for_nobody(monkeypatch, backend, failed):
    left = []
    monkeypatch.setattr(dist, "get_backend", lambda: backend)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: left.append("destroyed"))
    monkeypatch.setattr(dist.distributed_c10d, "_abort_process_group", lambda: left.append("aborted"))
    with pytest.raises(KeyError) if failed else nullcontext(), Process(joined=True):
        if failed:
            raise KeyError
    with Process():
        pass  # a group that another caller has joined is left alone
    assert left == ["aborted" if failed and backend == "nccl" else "destroyed"]


BASE = ["--steps=4", "--batch=1", "--train-base", "--kl-top=64", "--lr-base=1e-3"]


def test_stored_logits_train_as_the_teacher_itself_does(kvpop, monkeypatch):
    # otherwise float16 rounding errors grow step by step
    still = [*BASE, "--lr-base=1e-9", "--lr-new=1e-9", "--lr-new-end=1e-9"]
    online = distill(kvpop, "online", *still)
    distill(kvpop, "logits", *still, "--rows=1", action="teacher")
    words = ["distill --model=qwen3 --data text.jsonl --out=stored --teacher=logits", *RECIPE, *still]
    refused(kvpop, " ".join(words), "1 rows, 4 are needed")
    distill(kvpop, "logits", *still, action="teacher")

    def forbidden(*args):
        raise AssertionError("the teacher was asked although its logits are there")

    monkeypatch.setattr(run, "OnlineTeacher", forbidden)
    stored = distill(kvpop, "stored", *still, "--teacher=logits")
    for a, b in zip(online, stored, strict=True):
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-4) and b["kl"] == pytest.approx(a["kl"], rel=1e-4)
    assert len({round(a["kl"], 4) for a in online}) == len(online), "every row has a teacher of its own"


def test_a_trained_base_is_served_with_its_scorer_as_it_was_trained(kvpop, monkeypatch):
    """Clear greedy tokens of the engine are those of the student under its sparse mask, prompts protected or not."""
    from engine.tiny_engine import quick, start, stop
    from vllm import SamplingParams

    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    distill(kvpop, "both", *BASE)
    assert AutoTokenizer.from_pretrained("both/model").eos_token == "<end>"
    trained, before = (load_file(Path(f, "model.safetensors")) for f in ("both/model", "qwen3"))
    assert not torch.equal(trained["model.layers.0.mlp.up_proj.weight"], before["model.layers.0.mlp.up_proj.weight"])
    assert kvpop("export", "both/model", "both", "full")[0] in (0, None)
    config, layers = read_scorer("both")
    scorers = [from_tensors(config, tensors) for tensors in layers]
    model = load_model("both/model", torch.float32).eval()
    recipe = Recipe(length=2048, sinks=config.sinks, window=[config.window], topk=[config.topk], pack=False)
    # after a long prompt, a scorer's state begins in its middle
    for protects, length in ((False, 150), (True, 50), (True, REPLAY + 100)):
        prompt = random_prompt(length, VOCABULARY - 1)
        student = Student(model, scorers, replace(recipe, protect_prompt=protects))
        with quick():
            llm = start("full", {"policy": "kvpop", "protect_prompt": protects}, max_model_len=2048)
            try:
                options = SamplingParams(temperature=0, max_tokens=80, ignore_eos=True, detokenize=False)
                answer = llm.generate([{"prompt_token_ids": prompt}], options, use_tqdm=False)[0].outputs[0].token_ids
            finally:
                stop(llm)
        tokens, roles = torch.tensor([[*prompt, *answer]]), student.roles(0, length)
        with torch.inference_mode():
            sparse = model(tokens, attend=Sparse(student.score, roles)).logits[0].log_softmax(-1)
            dense = model(tokens, attend=Dense()).logits[0].log_softmax(-1)
        assert (sparse - dense)[length + 60 :].abs().max() > 0.1, "the budget shows in nothing"
        best = sparse[length - 1 : -1].topk(2)
        clear = best.values[:, 0] - best.values[:, 1] > 1e-2
        assert clear.sum() > 60 and torch.equal(best.indices[clear, 0], torch.tensor(answer)[clear])


@pytest.fixture(scope="module")
def unusable(folder):
    """Models, texts and a scorer that cannot be used."""
    for name in ("damaged", "holed", "mixed"):
        write_byte_tokenizer(write_tiny_model(folder / name, vocab=VOCABULARY))
        weights, config = folder / name / "model.safetensors", folder / name / "config.json"
        if name == "damaged":
            weights.write_bytes(weights.read_bytes()[:-100])
        elif name == "holed":
            tensors = load_file(weights)
            del tensors["model.layers.1.self_attn.k_proj.weight"]
            save_file(tensors, weights, metadata={"format": "pt"})
        else:
            config.write_text(json.dumps(json.loads(config.read_text()) | {"num_key_value_heads": 1}))
    write_text(folder / "long.jsonl", documents=200)
    (folder / "empty.txt").write_text("")
    (folder / "short.txt").write_text("A few words.")
    write_random_scorer(folder / "other", write_tiny_model(folder / "wide", "qwen3", kv_heads=4), "mlstm")
    write_byte_tokenizer(write_tiny_model(folder / "small", vocab=200))
    write_byte_tokenizer(write_tiny_model(folder / "capped", vocab=VOCABULARY))
    config = json.loads((folder / "capped/config.json").read_text()) | {"final_logit_softcapping": 30.0}
    (folder / "capped/config.json").write_text(json.dumps(config))
    for name in ("spelled", "brief"):
        write_byte_tokenizer(write_tiny_model(folder / name, vocab=VOCABULARY))
    tokenizer = json.loads((folder / "spelled/tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (folder / "spelled/tokenizer.json").write_text(json.dumps(tokenizer))
    config = json.loads((folder / "brief/config.json").read_text()) | {"max_position_embeddings": 100}
    (folder / "brief/config.json").write_text(json.dumps(config))


START = "distill --out=x --model=qwen3 --data text.jsonl"
REASON = "eval --task=reasoning --model=qwen3 --dtype=float32"
EVAL = "eval --model=qwen3 --data long.jsonl --split=all --dtype=float32 --length 128"
REFUSED = {
    "distill --out=x --model=qwen3": "needs --data",
    "distill --out=x --model=absent --data text.jsonl": "absent",
    "distill --out=x --model=qwen3 --data absent.txt --length=96 --window=8 --topk 20": "absent.txt",
    "distill --out=x --model=qwen3 --data empty.txt --length=96 --window=8 --topk 20": "empty.txt",
    "distill --out=x --model=qwen3 --data short.txt --length=96 --window=8 --topk 20": "too few for one row",
    "distill --out=x --model=small --data text.jsonl --length=96 --window=8 --topk 20": "the model knows 200",
    "distill --out=x --model=capped --data text.jsonl --recipe=demo --train-base --steps=1": "rescales its logits",
    f"{START} --recipe=demo --positions=96 --teacher=logits --length=96 --window=8 --topk 20": "which is frozen: leave --teacher out",
    f"{START} --phase=uptrain --length=96 --teacher=logits": "phase uptrain has no teacher",
    f"{START} --train-base --kl=0 --ce=1 --teacher=logits --length=96 --window=8 --topk 20": "no use for a teacher",
    f"{START} --no-train-base --lr-base=1e-5": "--lr-base is about training the base model",
    f"{START} --no-train-base --lr-base-end=1e-6": "--lr-base-end is about training the base model",
    f"{START} --phase=streaming-plus --warmup=9": "--warmup is about rates that fall: give --lr-base-end",
    f"{START} --positions=5000 --length=96 --window=8 --topk 20": "the model has 4096 positions: lower --positions 5000",
    f"{START}": "the model has 4096 positions: lower --length 16384",
    f"{START} --scorer=linear --norm": "--norm is about mlstm scorers, not linear",
    f"{START} --scorer=mlp --no-delayed": "--delayed is about mlstm scorers",
    f"{START} --hidden=9": "--hidden is about mlp scorers, not mlstm",
    f"{START} --no-project-values --value-size=9": "--value-size is about the value projection",
    f"{START} --fit-decay-rows=3": "is about fitted decays: give --fit-decays",
    f"{START} --calibration-rows=3": "--fit-decay-rows is about fitted decays: give --fit-decays",
    f"{START} --calibrate --calibrate-max=1.0": "fit_decays needs 0 < min < max < 1",
    f"{START} --phase=streaming-plus --samples=3": "phase streaming-plus has none",
    f"{START} --phase=uptrain --topk=3": "phase uptrain is dense",
    f"{START} --phase=uptrain --ce=0.5": "phase uptrain has cross-entropy alone",
    f"{START} --train-base --boundary=0 --tau=2": "boundary loss, which has weight 0",
    f"{START} --train-base --kl=0 --ce=1 --kl-top=9": "--kl-top is about the KL",
    f"{START} --features=0": "features must be at least 1",
    f"{START} --rows=3": "kvpop distill train has no use for --rows",
    "distill teacher --out=x --model=qwen3 --data text.jsonl --teacher=logits": "teacher has no use for --teacher",
    "distill teacher --out=x --model=qwen3 --data text.jsonl --length=96 --phase=uptrain": "phase uptrain has no teacher: write no logits",
    "distill teacher --out=x --model=qwen3 --data text.jsonl --length=96 --recipe=kvzap --window 8": "phase kvzap has no teacher: write no logits",
    "distill teacher --out=x --model=qwen3 --data text.jsonl --recipe=demo --length=96 --positions=96 --window=8 --topk 20": "frozen: write no logits, or give --train-base",
    "distill teacher --out=x --model=qwen3 --data text.jsonl --length=96 --window=8 --topk 20 --kl=0 --ce=1": "no use for a teacher: write no logits, or give --kl",
    f"{START} --length=96 --recipe=trimkv --topk 23 --batch=2 --micro-batch=2": "phase trimkv takes one row a pass: leave --micro-batch out",
    f"{START} --length=96 --recipe=kvzap --window=92": "length 96 must exceed sinks + window = 4 + 92: raise --length or lower --window",
    f"{START} --stream --processes=2": "--processes is about text that is tokenised once: leave it out, or --stream",
    f"{START} --length=96 --window=8 --topk 20 --stream": "--stream reads data sets, and text.jsonl is none: give hf:NAME",
    f"{START} --length=96 --window=8 --topk 20 --longest=0": "longest must be at least 1",
    f"{START} --length=96 --window=8 --topk 20 --select effort": "--select effort is no condition: give FIELD=VALUE",
    f"{START} --validation-rows=3": "--validation-rows is about held-out rows: give --validate-every",
    f"{START} --train-base --length=96 --window=8 --topk 20 --teacher=logits --validate-every=3": "--teacher has no logits of held-out rows: leave it or --validate-every out",
    f"{START} --tracker=nowhere:f": "--tracker nowhere:f is no function (No module named 'nowhere'): give MODULE:FUNCTION",
    f"distill teacher {START.removeprefix('distill ')} --length=96 --window=8 --topk 20 --validate-every=3": "teacher has no use for --validate-every",
    f"distill teacher {START.removeprefix('distill ')} --length=96 --window=8 --topk 20 --rows={10**14}": " free and the teacher's logits need 9907200.0 TB",
    "distill texts --out=x --steps=5": "kvpop distill texts has no use for --steps",
    "distill --out=x --model=damaged --data text.jsonl --recipe=demo --length=96 --positions=96 --window=8 --topk 20": "damaged cannot be loaded",
    "distill --out=x --model=holed --data text.jsonl --recipe=demo --length=96 --positions=96 --window=8 --topk 20": "has no weights for model.layers.1.self_attn.k_proj.weight",
    "distill --out=x --model=mixed --data text.jsonl --recipe=demo --length=96 --positions=96 --window=8 --topk 20": "k_proj.weight is [64, 64] and should be [32, 64] by config.json",
    "eval --model=qwen3 --data text.jsonl --split=all --length 5000": "the model has 4096 positions: lower --length 5000",
    f"{START} --phase=foo --no-train-base": "phase must be one of",
    f"{START} --phase=uptrain --no-train-base": "leave --no-train-base out",
    f"{START} --recipe=demo --kl-top=0": "kl_top must be at least 1",
    f"{START} --save-every=0": "--save-every: 0 is not at least 1",
    "eval --model=qwen3 --data text.jsonl --split=all --scorer=other --length 96": "num_kv_heads = 4, this one has 2",
    "eval --model=capped --data text.jsonl --split=all --length 512": "rescales its logits",
    "eval --model=qwen3 --data text.jsonl --split=all --policies h3o --length 512": "unknown policy 'h3o'",
    "eval --model=qwen3 --data text.jsonl --split=all --policies --length 512": "nothing to evaluate",
    "eval --model=qwen3 --data text.jsonl --split=all --policies random random --length 512": "'random' is to be compared twice",
    "eval --model=qwen3 --data text.jsonl --split=all --length 64": "leaves nothing beside 4 sinks and a window of 64",
    f"{EVAL} --share 1": "--share 1 keeps everything",
    f"{EVAL} --length 512 --out=nowhere/x": "nowhere/x",
    f"{START} --length=96 --recipe=trimkv --topk 23 --train-base": "phase trimkv trains gates alone: give --no-train-base",
    f"{START} --length=96 --recipe=trimkv --topk 23 --lr-base=1e-5": "--lr-base is about training the base model, and phase trimkv trains gates alone",
    f"{START} --length=96 --recipe=dms --window=8 --topk 23 --capacity=2": "--capacity is about TRIM-KV's gates, and phase dms has none",
    f"{START} --length=96 --recipe=trimkv --topk 23 --compression=4": "--compression is about DMS's gates, and phase trimkv has none",
    f"{START} --length=96 --recipe=trimkv --topk 23 --scorer=mlp": "--scorer is about scorers, and phase trimkv has none",
    f"{START} --length=96 --recipe=trimkv --topk 23 --kl=0 --ce=0": "gates are trained but neither --kl nor --ce is above 0",
    f"{START} --length=96 --recipe=trimkv --topk 23 --gate-reads=query": "gate_reads must be hidden or kv",
    f"{START} --length=96 --recipe=dms --window=8 --topk 23 --gate-reads=kv": "gate_reads must be hidden or query in phase dms, got 'kv'",
    f"{START} --length=96 --recipe=dms --window=8 --topk 23 --gate-reads=query": "with --gate-reads query give --train-base",
    f"{START} --length=96 --recipe=dms --window=8 --topk 23 --borrow-steps=3": "--borrow-steps is about a borrowed channel: give --gate-reads query",
    f"{START} --length=96 --recipe=dms --window=8 --topk 23 --gate-reads=query --train-base --steps=5 --borrow-steps=6": "borrow_steps 6 exceeds steps 5",
    f"{START} --length=96 --recipe=kvzap --window=8 --topk 23 --train-base": "phase kvzap trains gates alone: give --no-train-base",
    f"{START} --length=96 --recipe=kvzap --window=8 --topk 23 --lr-base=1e-5": "and phase kvzap trains gates alone",
    f"{START} --length=96 --recipe=kvzap --window=8 --topk 23 --kl=1": "--kl is about the model's outputs, and phase kvzap fits gates to targets: leave it out",
    f"{START} --length=96 --recipe=kvzap --window=8 --activation-checkpointing": "--activation-checkpointing is about the model's outputs, and phase kvzap",
    f"{START} --length=96 --recipe=kvzap --window=8 --topk 23 --gate-linear --gate-width=9": "--gate-width is about MLPs of TRIM-KV's and KVzap's gates, and there is none",
    f"{START} --length=96 --recipe=kvzap --window=8 --topk 23 --gate-bias=1": "--gate-bias is about TRIM-KV's gates, and phase kvzap has none",
    f"{START} --length=96 --recipe=kvzap --window=8 --topk 23 --exact-targets": "--exact-targets is about scorers, and phase kvzap has none",
    f"{START} --length=96 --recipe=kvzap --window=8 --topk 23 --teacher=x": "phase kvzap has no teacher: leave --teacher out",
    f"{START} --length=96 --recipe=trimkv --topk 23 --gate-linear": "--gate-linear is about KVzap's gates, and phase trimkv has none",
    f"{START} --length=96 --recipe=dms --window=8 --topk 23 --gate-width=9": "--gate-width is about MLPs of TRIM-KV's and KVzap's gates",
    f"{START} --length=96 --recipe=dms --window=1 --topk 23": "window must be an integer from 2",
    f"{START} --length=96 --topk=20 --window 8 9 10": "window needs one value, or one for each of the 1 of topk",
    f"{START} --length=96 --topk 22 30 --window 70 8": "length 96 must exceed sinks + window + topk = 4 + 70 + 22",
    f"{START} --length=96 --topk=20 --window=0": "window must be at least 1, got",
    f"{START} --length=96 --positions=95": "length 96 exceeds positions 95: raise --positions",
    f"{START} --dtype=float16": "dtype must be bfloat16 or float32",
    f"{START} --topk=0": "topk must be at least 1",
    f"{START} --no-train-base --boundary=0": "nothing learns: give --boundary, --listwise or --train-base",
    f"{START} --lists=3": "--lists is about the listwise loss, which has weight 0",
    f"{START} --listwise=1 --boundary=0 --lookahead=9": "--lookahead is about the boundary loss, which has weight 0",
    f"{START} --train-base --boundary=0 --groups=mean": "--groups is about targets",
    f"{START} --train-base --kl=0": "neither --kl nor --ce",
    f"{START} --beta1=1.5": "beta1 must be at least 0 and below 1",
    f"{START} --seed={10**11}": "seed must be from 0",
    f"{START} --lr-new=inf": "lr_new must be above 0",
    f"{START} --fit-decays --fit-decay-max=1.0": "max < 1",
    f"{EVAL} --backend=vllm": "--backend vllm says nothing to --task text: leave it out, or give --task retrieval",
    f"{EVAL} --bucket=3 --task=retrieval": "--bucket says nothing to --task retrieval",
    f"{EVAL} --kinds words --task=replay": "--kinds says nothing to --task replay",
    f"{EVAL} --digits 3": "--digits says nothing to --task text",
    f"{EVAL} --task=replay --protect-prompt all": "--protect-prompt all keeps all of a row in --task replay: give a number, or",
    f"{EVAL} --task=retrieval --budget 60 --kinds needle --policies snapkv --protect-prompt 0": "snapkv holds prompts until their end anyway: leave --protect-prompt out, or snapkv",
    f"{EVAL} --task=replay --budget 128": "a budget of 128 keeps all of 128 tokens: lower --budget",
    f"{EVAL} --budget 127": "a budget of 127 keeps all of 128 tokens",
    f"{EVAL} --task=replay --budget 5 --policies streaming-llm": "streaming-llm: a budget of 5 is too small for 4 sinks",
    f"{EVAL} --task=replay --budget 60 --policies kvpop": "policy 'kvpop' needs a scorer: give --scorer DIR",
    f"{EVAL} --task=replay --budget 60 --policies full": "policy 'full' evicts nothing",
    f"{EVAL} --task=replay --budget 60 --equal bytes --policies h2o momentkv": "(0 in as many bytes for 128 tokens) leaves momentkv no long-range",
    "eval --model=qwen3 --length 128": "--task text needs text: give --data",
    f"{EVAL} --task=reasoning": "--data says nothing to --task reasoning: leave it out",
    f"{REASON} --kinds needle": "--task reasoning has no kind needle: choose from programs, ledgers, sorting",
    f"{REASON} --split all": "--task reasoning has problems of train, validation, test, not 'all'",
    f"{REASON} --samples 3": "greedy decoding gives 3 equal solutions: give --temperature, or --samples 1",
    f"{REASON} --top-p 0.5": "--top-p is about sampling, and decoding is greedy: give --temperature",
    f"{REASON} --top-p 1.5 --temperature 1": "--top-p: 1.5 is not above 0 and at most 1",
    f"{REASON} --temperature -1": "--temperature: -1 is not a finite number of at least 0",
    f"{REASON} --kinds programs --length 40": "raise it, or lower --size",
    f"{REASON} --kinds programs --length 400 500": "give one --length, or none",
    f"{REASON} --kinds programs --size 500": "a problem of kind 'programs' has 1 to 72 steps, not 500",
    f"{EVAL} --samples 2": "--samples says nothing to --task text: leave it out, or give --task reasoning",
    f"{EVAL} --budget 80 --against h2o": "--against h2o is not compared: choose from streaming-llm, l2norm, random, or add it",
    f"{EVAL} --against h2o --task=retrieval": "--against says nothing to --task retrieval: leave it out, or give --task text",
    f"{REASON} --policies --no-dense": "nothing to evaluate: give --policies or --scorer",
    f"{REASON} --policies --against h2o": "--against says nothing to the dense model alone: leave it out, or give --policies",
    f"{REASON} --policies --share 4": "--share says nothing to the dense model alone",
    f"{EVAL} --no-dense": "--no-dense says nothing to --task text: leave it out, or give --task retrieval",
    f"{REASON} --no-dense --teacher=qwen3": "--no-dense leaves out the model of --teacher: give one of them",
    f"{EVAL} --budget 80 --teacher=absent": "absent has no config.json",
    f"{EVAL} --budget 80 --teacher=small": "--teacher small knows 200 tokens, qwen3 257: give the model that --model was trained",
    f"{EVAL} --budget 80 --teacher=spelled": "--teacher spelled has another tokenizer than qwen3: give the model that --model was trained",
    f"{EVAL} --budget 80 --teacher=brief": "--teacher brief has 100 positions: lower --length 128, or give the model that",
    f"{EVAL} --task=retrieval --budget 60 --policies h2o --kinds needle": "has no room for 'needle'",
    f"{EVAL} --task=replay --budget 60 --policies h2o --length 90000": "the model has 4096 positions: lower --length 90000",
    f"{EVAL} --task=replay --budget 60 --policies h2o --length 4000 --data text.jsonl --split test": "the test split holds no row of 4000",
    f"{EVAL} --task=replay --share 4 --budget 60": "not allowed with argument",
    f"{EVAL} --task=replay --budget 60 --report=long.jsonl": "--report long.jsonl is a file: name a folder",
}


@pytest.mark.parametrize("line", REFUSED)
def test_bad_input_is_refused_in_one_line(kvpop, unusable, line):
    refused(kvpop, line, REFUSED[line])
    assert not Path("x/kvpop_config.json").exists()
