"""`make gpu`: check kvpop_vllm on this GPU, and time it next to stock vLLM.

The parts run one after another in processes of their own, the most valuable first, each under its time limit. What a
part has measured is in a CSV file before the next case begins, so a part that overruns loses only what is missing.

With ``build/gpu/bundle`` from `make gpu-bundle` the machine needs torch, Triton and transformers; without it, vLLM as
well. OUT names the folder of results (default: build/gpu/results). A part that is finished there is not run again.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BUNDLE = ROOT / "build" / "gpu" / "bundle"
WORK = Path(os.environ.get("KVPOP_GPU_WORK", "/tmp/kvpop-gpu"))
"""Folder of unpacked packages, models and Triton's cache."""
REASONER = ROOT / "examples" / "reasoner" / "model"
REASONER_SCORER = ROOT / "examples" / "scorers" / "reasoner-kvpop"
QWEN3_8B = dict(
    architectures=["Qwen3ForCausalLM"], model_type="qwen3", hidden_size=4096, intermediate_size=12288,
    num_hidden_layers=36, num_attention_heads=32, num_key_value_heads=8, head_dim=128, vocab_size=151936,
    max_position_embeddings=40960, rms_norm_eps=1e-6, rope_theta=1e6, hidden_act="silu", tie_word_embeddings=False,
    torch_dtype="bfloat16", bos_token_id=1, eos_token_id=2, attention_bias=False,
)  # fmt: skip
BUDGETS = 1024, 4096
SINKS, WINDOW = 4, 256
BATCHES = 1, 8, 16, 64
ENGINE = dict(
    skip_tokenizer_init=True, load_format="dummy", dtype="bfloat16", max_model_len=20480, max_num_seqs=64,
    enable_prefix_caching=False, disable_log_stats=False,
    compilation_config=dict(mode=0, cudagraph_mode="FULL_DECODE_ONLY", cudagraph_capture_sizes=list(BATCHES)),
)  # fmt: skip
"""Arguments of both 8B engines; the model's shape is real, its weights are dummies."""
CASES = "1x4096 8x4096 16x4096 64x4096 1x16384 8x16384 16x16384 64x16384"
QUARTER = 272
"""A quarter of a worked solution: 4 sinks, a window of 24 and 244 long-range slots."""
SMALL = dict(
    model=str(REASONER), dtype="bfloat16", max_model_len=2048, max_num_seqs=64, kv_cache_memory_bytes=1 << 30,
    enable_prefix_caching=False,
    compilation_config=dict(mode=0, cudagraph_mode="FULL_DECODE_ONLY", cudagraph_capture_sizes=[8, 16, 32, 64]),
)  # fmt: skip
PROTECTED = {"protect_prompt": "all"}
ANSWERS = {
    "stock": None,
    "kvpop, nothing evicted": {"policy": "kvpop", "scorer": str(REASONER_SCORER), "budget": 2048, **PROTECTED},
    "kvpop at 1/4": {"policy": "kvpop", "scorer": str(REASONER_SCORER), "budget": QUARTER, **PROTECTED},
    "window at 1/4": {"policy": "streaming-llm", "budget": QUARTER, **PROTECTED},
}
"""Engines that solve the reasoner's problems, and their policies."""


CHECKS = (
    *(f"{what} is right, {rule}" for what in ("decode_step", "prefill_chunk") for rule in ("recency", "mlstm")),
    *(f"decode_step is right at full size, mlstm, batch {requests}" for requests in (1, 64)),
    "a prefix and its tail are right, mlstm",
)
"""Cases of the kernels' sections that come first."""


class Part:
    """Part of the run: a name, a limit in seconds and what it runs."""

    def __init__(self, seconds: int, run: Callable[[Run], Iterator[list]]):
        self.seconds, self.run, self.name = seconds, run, run.__name__.replace("_", "-")


class Run:
    """Environment of the parts: the folder of results and the processes' environment."""

    def __init__(self, out: Path, slack: float):
        self.out, self.slack = out, slack
        out.mkdir(parents=True, exist_ok=True)
        WORK.mkdir(parents=True, exist_ok=True)
        self.log = out / "gpu.log"
        paths = [str(WORK / "own"), str(ROOT / "benchmarks")]
        self.environment = os.environ | {
            "VLLM_USE_FLASHINFER_SAMPLER": "0",
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_HOST_IP": "127.0.0.1",
            "VLLM_CACHE_ROOT": str(WORK / "vllm"),
            "VLLM_CONFIG_ROOT": str(WORK / "vllm"),
            "PYTHONUNBUFFERED": "1",
        }
        if BUNDLE.exists():
            unpack(BUNDLE, WORK)
            paths.insert(1, str(WORK / "site"))
            self.environment |= {"TRITON_CACHE_DIR": str(WORK / "kernels")}
        place_package(WORK / "own")
        self.environment["PYTHONPATH"] = ":".join([*paths, os.environ.get("PYTHONPATH", "")])

    def say(self, line: str) -> None:
        """Print a line and write it to the log."""
        print(line, flush=True)
        with self.log.open("a") as log:
            log.write(line + "\n")

    def do(self, part: Part) -> bool:
        """Run a part's processes until its time is over; return whether all ended well."""
        done = self.out / f"{part.name}.done"
        if done.exists():
            self.say(f"[{part.name}] done before")
            return True
        begin = time.monotonic()
        until = begin + part.seconds * self.slack
        processes = []
        for command in part.run(self):
            log = self.log.open("a")
            processes.append(
                subprocess.Popen(
                    [sys.executable, "-W", "ignore", "-m", *map(str, command)],
                    cwd=WORK, env=self.environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
                )
            )  # fmt: skip
        codes = []
        for process in processes:
            try:
                codes.append(process.wait(max(0, until - time.monotonic())))
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, 9)
                codes.append("overran")
        good = not any(codes)
        self.say(f"[{part.name}] {'done' if good else f'FAILED {codes}'}, {time.monotonic() - begin:.0f} s")
        if good:
            done.touch()
        return good


def unpack(bundle: Path, work: Path) -> None:
    """Unpack the bundle's archives after their checksums are compared."""
    for archive in sorted(bundle.glob("*.tar.xz")):
        folder = work / archive.name.removesuffix(".tar.xz")
        if folder.exists():
            continue
        expected = archive.with_name(f"{archive.name}.sha256").read_text().split()[0]
        if hashlib.sha256(archive.read_bytes()).hexdigest() != expected:
            sys.exit(f"{archive} is damaged: run `make gpu-bundle` again")
        with tarfile.open(archive) as tar:
            tar.extractall(folder, filter="data")


def place_package(folder: Path) -> None:
    """Copy the checkout's package to a folder as an installation would place it."""
    shutil.rmtree(folder, ignore_errors=True)
    package, information = folder / "kvpop_vllm", folder / "kvpop_vllm-0.1.0.dist-info"
    no_caches = shutil.ignore_patterns("__pycache__", "*.so")
    shutil.copytree(ROOT / "kvpop_vllm", package, ignore=no_caches)
    shutil.copytree(ROOT / "triton_kernels", package / "kernels" / "triton", ignore=no_caches)
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: kvpop-vllm\nVersion: 0.1.0\n")
    plugin = "[vllm.general_plugins]\nkvpop = kvpop_vllm.vllm_glue.plugin:register\n"
    (information / "entry_points.txt").write_text(plugin)


def correct(run: Run) -> Iterator[list]:
    """Yield the command that checks the kernels of serving against float64."""
    yield ["gpu.sections", "--sections", "serving-kernels", "prefill-kernels", "--out", run.out, "--cases", *CHECKS]


def attention(run: Run) -> Iterator[list]:
    """Yield the command that times attention."""
    yield ["gpu.attention_times", "--out", run.out / "attention.csv"]


def stock_engine(run: Run) -> Iterator[list]:
    """Yield the command that times stock vLLM."""
    yield engine(run, "stock", {}, [])


def kvpop_engine(run: Run) -> Iterator[list]:
    """Yield the command that times vLLM with the policy; requests ask for their budget."""
    policy = {"policy": "kvpop", "scorer": str(WORK / "model" / "scorer")}
    yield engine(run, "kvpop", {"additional_config": {"kv_policy": policy}}, ["--budgets", *BUDGETS])


def engine(run: Run, name: str, arguments: dict, options: list) -> list:
    """Return the command that times an engine of the 8B shape."""
    arguments = ENGINE | {"model": str(write_model())} | arguments
    command = ["gpu.engine_times", name, json.dumps(arguments), "--cases", CASES, *options]
    return [*command, "--first", 4096, 16384, "--arriving", 8192, "--out", run.out / "engines.csv"]


def write_model() -> Path:
    """Return the folder of the 8B model's config and its random scorer."""
    model = WORK / "model"
    if not (model / "scorer").exists():
        model.mkdir(parents=True, exist_ok=True)
        (model / "config.json").write_text(json.dumps(QWEN3_8B))
        script = "import sys; from kvpop_vllm.testing import write_random_scorer as write; "
        script += f"write(sys.argv[1] + '/scorer', sys.argv[1], sinks={SINKS}, window={WINDOW}, topk={BUDGETS[-1] - SINKS - WINDOW})"
        environment = os.environ | {"PYTHONPATH": str(WORK / "own")}
        subprocess.run([sys.executable, "-c", script, str(model)], env=environment, check=True)
    return model


def answers(run: Run) -> Iterator[list]:
    """Yield a command for each engine that solves problems; they share the GPU."""
    for i, policy in enumerate(ANSWERS.values()):
        arguments = SMALL | ({"additional_config": {"kv_policy": policy}} if policy else {})
        yield ["gpu.answers", json.dumps(arguments), "--out", run.out / f"answers-{i}.jsonl"]


def report_answers(run: Run) -> None:
    """Say how many problems each engine solved, and whether an engine that evicts nothing writes stock's tokens."""
    from gpu.answers import compare

    files = {name: run.out / f"answers-{i}.jsonl" for i, name in enumerate(ANSWERS)}
    records = {
        name: [json.loads(line) for line in path.read_text().splitlines()]
        for name, path in files.items()
        if path.exists()
    }
    for name, of_engine in records.items():
        line = f"{name}: {sum(record['exact'] for record in of_engine)} of {len(of_engine)} exact"
        if "stock" in records and name != "stock":
            line += f"; against stock's tokens: {compare(records['stock'], of_engine)}"
        run.say(line)


PARTS = [Part(75, correct), Part(60, attention), Part(150, stock_engine), Part(230, kvpop_engine), Part(90, answers)]


def main() -> int:
    """Run the parts of the command line; return 0 if all ended well."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [part.name for part in PARTS]
    parser.add_argument("parts", nargs="*", choices=[*names, []], help=f"only these: {', '.join(names)}")
    parser.add_argument("--slack", type=float, default=1.0, help="multiplies the limits of all parts")
    options = parser.parse_args()
    run = Run(Path(os.environ.get("OUT") or ROOT / "build" / "gpu" / "results"), options.slack)
    good = True
    for part in PARTS:
        if not options.parts or part.name in options.parts:
            good &= run.do(part)
            if part.run is answers:
                report_answers(run)
    for table in ("attention.csv", "engines.csv"):
        if (run.out / table).exists():
            run.say((run.out / table).read_text())
    return int(not good)


if __name__ == "__main__":
    sys.exit(main())
