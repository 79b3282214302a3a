"""lm-eval's two ways to a policy, as `examples/lm_eval/README.md` gives them, end to end with the demo model."""

import json
import os
import runpy
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
from serving import Server
from threads import DTYPE
from transformers import AutoTokenizer

pytest.importorskip("lm_eval.tasks", reason="needs lm-eval: `make lm-eval` installs it")
pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
MODEL = str(ROOT / "models" / "SmolLM2-135M-Instruct")
SCORER = str(ROOT / "examples" / "scorers" / "smollm2-135m-kvpop")
TASK, BUDGET, NEW, REPEATS = "custom_local_agg8_verify_instruct", 128, 120, 8
PROCESS_RESULTS = runpy.run_path(str(ROOT / "examples" / "lm_eval" / "utils.py"))["process_results"]
PROBLEMS = [
    {"problem": r"Write the line \boxed{4} twenty times.", "answer": "4"},
    {"problem": r"Write the line \boxed{\frac{1}{2}} twenty times.", "answer": "0.5"},
]


def run_lm_eval(folder: Path, model: str, model_args: dict, **generation) -> tuple[list[dict], dict, str]:
    """Run the task. Return its samples, its metrics, and all output."""
    problems = folder / "problems.jsonl"
    problems.write_text("".join(json.dumps(problem) + "\n" for problem in PROBLEMS))
    command = [sys.executable, "-m", "lm_eval", "run", "--include_path", str(ROOT / "examples" / "lm_eval")]
    command += ["--tasks", TASK, "--metadata", json.dumps({"problems": str(problems)}), "--apply_chat_template"]
    command += ["--model", model, "--model_args", json.dumps(model_args), "--batch_size", "auto"]
    command += ["--gen_kwargs", json.dumps({"max_gen_toks": NEW, "ignore_eos": True} | generation)]
    command += ["--log_samples", "--output_path", str(folder / "out")]
    env = os.environ | {"HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(folder / "datasets")}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    (samples,) = (folder / "out").rglob("samples_*.jsonl")
    (results,) = (folder / "out").rglob("results_*.json")
    metrics = json.loads(results.read_text())["results"][TASK]
    return [json.loads(line) for line in samples.read_text().splitlines()], metrics, done.stdout + done.stderr


def check(samples: list[dict], metrics: dict) -> None:
    """Check that answers are sampled, that some do not fit into the budget, and that the scores are those of the texts."""
    tokenizer, scores = AutoTokenizer.from_pretrained(MODEL), []
    assert [sample["doc"] for sample in samples] == PROBLEMS
    for sample in samples:
        (texts,) = sample["resps"]
        assert len(texts) == REPEATS and len(set(texts)) > 1, "every request has the same seed"
        assert max(len(tokenizer(text).input_ids) for text in texts) > 100, "nothing is evicted"
        scores.append(PROCESS_RESULTS(sample["doc"], [texts]))
    for name in ("avg_score", "no_answer_rate"):
        assert metrics[f"{name},all"] == pytest.approx(statistics.mean(score[name] for score in scores))


@pytest.mark.parametrize(
    "client, endpoint", [("local-chat-completions", "chat/completions"), ("local-completions", "completions")]
)
def test_a_server_with_a_policy(tmp_path, served, client, endpoint):
    args = {"model": MODEL, "base_url": f"{served.url}/v1/{endpoint}", "num_concurrent": REPEATS, "timeout": 600}
    if client == "local-completions":
        args |= {"tokenizer": MODEL, "max_length": 2048}
    samples, metrics, _ = run_lm_eval(tmp_path, client, args, vllm_xargs={"kv_budget": 100})
    check(samples, metrics)
    assert f"--kv-policy streaming-llm: {BUDGET} tokens per KV head" in served.log()


@pytest.fixture(scope="module")
def served():
    options = ["--kv-policy", "streaming-llm", "--kv-budget", str(BUDGET), "--max-model-len", "2048", "--dtype", DTYPE]
    with Server(MODEL, *options, "--kv-cache-memory-bytes", str(256 << 20), "--enforce-eager") as server:
        yield server


def test_in_process_with_the_shipped_scorer(tmp_path):
    args = {"pretrained": MODEL, "dtype": DTYPE, "max_model_len": 2048, "enforce_eager": True}
    policy = {"policy": "kvpop", "scorer": SCORER, "budget": BUDGET, "allocator": "uniform"}
    args |= {"kv_cache_memory_bytes": 256 << 20, "additional_config": {"kv_policy": policy}}
    samples, metrics, output = run_lm_eval(tmp_path, "vllm", args, extra_args={"kv_budget": 100})
    check(samples, metrics)
    assert f"--kv-policy kvpop: {BUDGET} tokens per KV head" in output
