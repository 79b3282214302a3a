"""`make gpu`: check kvpop_vllm on this GPU, and time it next to stock vLLM, in at most 8 minutes.

The parts run one after another in processes of their own, the most valuable first, each under its time limit. What a
part has measured is in a CSV file before the next case begins, so a part that overruns loses only what is missing.

The machine needs vLLM; or torch, Triton and transformers, and then ``build/gpu/bundle`` from `make gpu-bundle`. Where
vLLM is installed, that one is measured and the bundle is not used. OUT names the folder of results (default:
build/gpu/results). A part that is done there is not run again.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

from gpu.answers import compare

ROOT = Path(__file__).resolve().parents[2]
BUNDLE = ROOT / "build" / "gpu" / "bundle"
WORK = Path(os.environ.get("KVPOP_GPU_WORK") or ROOT / "build" / "gpu" / "work")
"""Folder of unpacked packages, models and caches."""
MODULES = WORK / "modules"
"""Our package as an installation places it, which processes import before any other."""
EMPTY = WORK / "empty"
"""Folder that processes run in, as Python imports from it too."""
CACHES = WORK / "caches"
"""Triton's cache of kernels and vLLM's cache of what models can do; both come with the bundle."""
BUNDLE_IS_FOR = "3.12", "9.0"
"""Python and compute capability of the bundle's compiled code."""
SECONDS = 480
"""Limit of all parts together."""
LAST_CASE = 30
"""Seconds of a section in which no case begins."""
SOURCES = "benchmarks/gpu", "kvpop_vllm", "triton_kernels"
"""Folders whose code the results depend on."""
REASONER = ROOT / "examples" / "reasoner" / "model"
REASONER_SCORER = ROOT / "examples" / "scorers" / "reasoner-kvpop"
QWEN3_8B = dict(
    architectures=["Qwen3ForCausalLM"], model_type="qwen3", hidden_size=4096, intermediate_size=12288,
    num_hidden_layers=36, num_attention_heads=32, num_key_value_heads=8, head_dim=128, vocab_size=151936,
    max_position_embeddings=40960, rms_norm_eps=1e-6, rope_theta=1e6, hidden_act="silu", tie_word_embeddings=False,
    torch_dtype="bfloat16", bos_token_id=1, eos_token_id=2, attention_bias=False,
)  # fmt: skip
BUDGETS = 4096, 1024
SINKS, WINDOW = 4, 256
BATCHES = 1, 8, 16, 64
ENGINE = dict(
    skip_tokenizer_init=True, load_format="dummy", dtype="bfloat16", max_model_len=20480, max_num_seqs=64,
    max_num_batched_tokens=16384, enable_prefix_caching=False, disable_log_stats=False,
    compilation_config=dict(mode=0, cudagraph_mode="FULL_DECODE_ONLY", cudagraph_capture_sizes=list(BATCHES)),
)  # fmt: skip
"""Arguments of both 8B engines; the model's shape is real, its weights are dummies."""
CASES = "1x16384 8x16384 16x16384 64x16384 64x4096"
"""Requests and context of decode steps, in order: requests of the same context join those that decode."""
PROMPTS = "1x40 1x3000 1x8000 2x8000 8x500"
"""Prompts of a step whose host time is measured: requests and tokens of each."""
HOST_TIMES = "host-times"
"""Part that only a rehearsal has a use for."""
QUARTER = 272
"""A quarter of a worked solution: 4 sinks, a window of 24 and 244 long-range slots."""
SMALL = dict(
    model=str(REASONER), dtype="bfloat16", max_model_len=2048, max_num_seqs=64, kv_cache_memory_bytes=1 << 30,
    gpu_memory_utilization=0.2, enable_prefix_caching=False,
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
    *(f"{op} is right, {rule}" for op in ("decode_step", "prefill_chunk") for rule in ("recency", "mlstm")),
    *(f"decode_step is right at full size, mlstm, batch {requests}" for requests in (1, 64)),
    "a prefix and its tail are right, mlstm",
)
"""Cases of the kernels' sections: is what serving runs right?"""
OUTCOMES = "same", "near-tie", "different"
"""Outcomes of :func:`gpu.answers.compare`."""
LAST_LINES = 15
"""Lines of the log that are shown of a part that failed."""
PROBE = """
import importlib.metadata, importlib.util, json, platform, shutil, subprocess, torch, triton
if importlib.util.find_spec("transformers") is None:
    raise ImportError("No module named 'transformers'")
machine = {"gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None, "card": None, "vllm": None}
if shutil.which("nvidia-smi"):
    query = ["nvidia-smi", "--query-gpu=driver_version,power.limit,memory.total", "--format=csv,noheader", "--id=0"]
    machine["card"] = subprocess.run(query, capture_output=True, text=True).stdout.strip()
if machine["gpu"]:
    machine["capability"] = "{}.{}".format(*torch.cuda.get_device_capability())
machine["python"] = ".".join(platform.python_version_tuple()[:2])
if importlib.util.find_spec("vllm"):
    machine["vllm"] = importlib.metadata.version("vllm")
versions = {name: importlib.metadata.version(name) for name in ("torch", "triton", "transformers")}
print(json.dumps(machine | versions | {"torch": torch.__version__}))
"""
"""Prints what the machine has, as a last line of JSON."""


class Part(NamedTuple):
    """Part of the run.

    Attributes:
        name: name on the command line.
        seconds: time limit.
        commands: yields the arguments of ``python -m`` of each process; they run side by side.
        needs_vllm: True if it cannot run without vLLM.
        report: writes what the part's processes have found.
        by_name_only: True if it runs only where the command line names it.
    """

    name: str
    seconds: float
    commands: Callable[[Run], Iterator[list]]
    needs_vllm: bool = True
    report: Callable[[Run], None] | None = None
    by_name_only: bool = False


class Run:
    """Folder of results, environment of the processes, and state of the parts.

    Attributes:
        out: folder of results.
        environment: environment of the processes.
        machine: GPU, vLLM or None, and versions.
    """

    def __init__(self, out: Path, slack: float):
        self.out, self.slack = out, slack
        self.until = time.monotonic() + SECONDS * slack
        for folder in (out, WORK, EMPTY):
            folder.mkdir(parents=True, exist_ok=True)
        self.log, self.state = out / "run.log", out / "state.json"
        paths = [MODULES, ROOT / "benchmarks"]
        self.environment = os.environ | {
            "HF_HUB_OFFLINE": "1",
            "PYTHONUNBUFFERED": "1",
            "VLLM_HOST_IP": "127.0.0.1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_USE_FLASHINFER_SAMPLER": "0",
        }
        bundled = BUNDLE.exists() and not has_vllm()
        if bundled:
            unpack(BUNDLE, WORK)
            paths.insert(1, WORK / "site")
            self.environment |= {
                "TRITON_CACHE_DIR": str(CACHES / "triton"),
                "VLLM_CACHE_ROOT": str(CACHES / "vllm"),
                "VLLM_CONFIG_ROOT": str(CACHES / "vllm"),
            }
        place_package(MODULES)
        inherited = os.environ.get("PYTHONPATH")
        self.environment["PYTHONPATH"] = ":".join([*map(str, paths), *([inherited] if inherited else [])])
        self.machine = self._machine()
        compiled = self.machine["python"], self.machine["capability"]
        if bundled and compiled != BUNDLE_IS_FOR:
            message = "{} is for Python {} and compute capability {}, not {} and {}: install vLLM"
            sys.exit(message.format(BUNDLE, *BUNDLE_IS_FOR, *compiled))
        self.done = self._parts_done()
        self._write_state()
        if BUNDLE.exists() and not bundled:
            self.say(f"[gpu] vLLM {self.machine['vllm']} is installed, so {BUNDLE} is not used")

    def say(self, line: str) -> None:
        """Print a line and write it to the log."""
        print(line, flush=True)
        with self.log.open("a") as log:
            log.write(line + "\n")

    def do(self, part: Part) -> bool:
        """Run a part's processes until its time is over; return whether all ended well."""
        if part.name in self.done:
            self.say(f"[{part.name}] done before")
            return True
        if part.needs_vllm and not self.machine["vllm"]:
            self.say(f"[{part.name}] not measured: install vLLM, or bring build/gpu/bundle (`make gpu-bundle`)")
            return False
        begin, start = time.monotonic(), self.log.stat().st_size if self.log.exists() else 0
        outcomes = self._outcomes(part, min(begin + part.seconds * self.slack, self.until))
        seconds = f"{time.monotonic() - begin:.0f} s"
        if part.report:
            part.report(self)
        if any(outcomes):
            with self.log.open(errors="replace") as log:
                log.seek(start)
                print(*log.read().splitlines()[-LAST_LINES:], sep="\n")
            self.say(f"[{part.name}] FAILED {', '.join(filter(None, outcomes))}, {seconds}")
            return False
        self.say(f"[{part.name}] done, {seconds}")
        self.done.append(part.name)
        self._write_state()
        return True

    def _write_state(self) -> None:
        """Write what the results belong to, and the parts that are done."""
        self.state.write_text(json.dumps(self.machine | {"done": self.done}, indent=1) + "\n")

    def _outcomes(self, part: Part, until: float) -> list[str]:
        """Run a part's processes until a time; return what is wrong with each, or an empty string."""
        processes = []
        try:
            with self.log.open("a") as log:
                for command in part.commands(self):
                    command = [sys.executable, "-W", "ignore", "-m", *map(str, command)]
                    to_log = dict(stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
                    processes.append(subprocess.Popen(command, cwd=EMPTY, env=self.environment, **to_log))
            return [self._outcome(process, until) for process in processes]
        except (OSError, subprocess.CalledProcessError) as error:
            return [str(error)]
        finally:
            for process in processes:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()

    @staticmethod
    def _outcome(process: subprocess.Popen, until: float) -> str:
        """Wait for a process until a time; return what is wrong, or an empty string."""
        try:
            code = process.wait(max(0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            return "overran"
        return f"exit code {code}" if code else ""

    def _machine(self) -> dict:
        """Return GPU and versions, and a digest of the code; end with a line if nothing can run here."""
        command = [sys.executable, "-W", "ignore", "-c", PROBE]
        probe = subprocess.run(command, cwd=EMPTY, env=self.environment, capture_output=True, text=True)
        if probe.returncode:
            sys.exit(
                f"`make gpu` needs torch, Triton and transformers in {sys.executable}: {probe.stderr.splitlines()[-1]}"
            )
        machine = json.loads(probe.stdout.splitlines()[-1])
        if not machine["gpu"]:
            sys.exit(f"there is no GPU here that torch {machine['torch']} can use")
        return machine | {"sources": digest_of_sources()}

    def _parts_done(self) -> list[str]:
        """Return the parts that are done; end with a line if the folder has results of other code or another machine."""
        if not self.state.exists():
            return []
        state = json.loads(self.state.read_text())
        done = state.pop("done")
        if state != self.machine:
            changed = ", ".join(name for name in self.machine if state.get(name) != self.machine[name])
            sys.exit(f"{self.out} has results of other {changed}: move it away, or set OUT to another folder")
        return done


def has_vllm() -> bool:
    """Return whether vLLM is installed."""
    return importlib.util.find_spec("vllm") is not None


def digest_of_sources() -> str:
    """Return a digest of the code that results depend on."""
    digest = hashlib.sha256()
    for path in sorted(path for folder in SOURCES for path in (ROOT / folder).rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def unpack(bundle: Path, work: Path) -> None:
    """Unpack the bundle's archives, unless the same ones are there, after their checksums are compared."""
    for archive in sorted(bundle.glob("*.tar.xz")):
        folder, mark = (work / archive.name.removesuffix(suffix) for suffix in (".tar.xz", ".xz"))
        expected = archive.with_name(f"{archive.name}.sha256").read_text().split()[0]
        if mark.exists() and mark.read_text() == expected:
            continue
        if hashlib.sha256(archive.read_bytes()).hexdigest() != expected:
            sys.exit(f"{archive} is damaged: run `make gpu-bundle` again")
        shutil.rmtree(folder, ignore_errors=True)
        with tarfile.open(archive) as tar:
            tar.extractall(folder, filter="data")
        mark.write_text(expected)


def place_package(folder: Path) -> None:
    """Copy the checkout's package to a folder as an installation would place it."""
    shutil.rmtree(folder, ignore_errors=True)
    version = re.search(r'__version__ = "(.+)"', (ROOT / "kvpop_vllm" / "__init__.py").read_text())[1]
    package, information = folder / "kvpop_vllm", folder / f"kvpop_vllm-{version}.dist-info"
    no_caches = shutil.ignore_patterns("__pycache__", "*.so")
    shutil.copytree(ROOT / "kvpop_vllm", package, ignore=no_caches)
    shutil.copytree(ROOT / "triton_kernels", package / "kernels" / "triton", ignore=no_caches)
    information.mkdir()
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: kvpop-vllm\nVersion: {version}\n")
    plugin = "[vllm.general_plugins]\nkvpop = kvpop_vllm.vllm_glue.plugin:register\n"
    (information / "entry_points.txt").write_text(plugin)


def correct(run: Run) -> Iterator[list]:
    """Yield the command that checks the kernels of serving against float64."""
    yield ["gpu.sections", "serving-kernels", "prefill-kernels", "--out", run.out, "--cases", *CHECKS]


def section(name: str, run: Run) -> Iterator[list]:
    """Yield the command that runs a section of the kernels."""
    seconds = SECTIONS[name] * run.slack - LAST_CASE
    yield ["gpu.sections", name, "--minutes", f"{seconds / 60:.2f}", "--out", run.out]


def attention(run: Run) -> Iterator[list]:
    """Yield the command that times attention."""
    yield ["gpu.attention_times", "--out", run.out / "attention.csv"]


def stock_engine(run: Run) -> Iterator[list]:
    """Yield the command that times stock vLLM."""
    yield engine(run, "stock", {}, [])


def kvpop_engine(run: Run) -> Iterator[list]:
    """Yield the command that times vLLM with the policy; requests ask for their budget."""
    policy = {"policy": "kvpop", "scorer": str(write_model(run) / "scorer")}
    yield engine(run, "kvpop", {"additional_config": {"kv_policy": policy}}, ["--budgets", *BUDGETS])


def engine(run: Run, name: str, arguments: dict, options: list) -> list:
    """Return the command that times an engine of the 8B shape."""
    arguments = ENGINE | {"model": str(write_model(run))} | arguments
    command = ["gpu.engine_times", name, json.dumps(arguments), "--cases", *CASES.split(), *options]
    return [*command, "--first", 4096, 16384, "--arriving", 8192, "--out", run.out / "engines.csv"]


def host_times(run: Run) -> Iterator[list]:
    """Yield the command in which engines of a small model with the 8B model's heads take turns with stock vLLM."""
    model = write_model(run, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28)
    server, engines = {"budget": BUDGETS[1]}, {"stock": {}}
    policies = {"streaming-llm": {}, "kvpop": {"scorer": str(model / "scorer")}}
    for name, scorer in policies.items():
        for suffix, protected in {"": {}, ", protected": PROTECTED}.items():
            engines[name + suffix] = {
                "additional_config": {"kv_policy": {"policy": name, **scorer, **server, **protected}}
            }
    shared = ENGINE | {"model": str(model), "kv_cache_memory_bytes": 1 << 32, "gpu_memory_utilization": 0.1}
    engines = {name: shared | arguments for name, arguments in engines.items()}
    options = ["--prompts", *PROMPTS.split(), "--decoding", 1, 8]
    yield ["gpu.host_times", json.dumps(engines), *options, "--out", run.out / "host_times.csv"]


def write_model(run: Run, **changes) -> Path:
    """Return the folder of the 8B model's config, with ``changes``, and its random scorer."""
    model = WORK / f"model-{run.machine['sources']}{'-small' * bool(changes)}"
    if not (model / "scorer").exists():
        model.mkdir(exist_ok=True)
        (model / "config.json").write_text(json.dumps(QWEN3_8B | changes))
        sizes = f"sinks={SINKS}, window={WINDOW}, topk={BUDGETS[0] - SINKS - WINDOW}"
        script = "import sys; from kvpop_vllm.testing import write_random_scorer as write; "
        script += f"write(sys.argv[1] + '/scorer', sys.argv[1], {sizes})"
        subprocess.run([sys.executable, "-c", script, str(model)], cwd=EMPTY, env=run.environment, check=True)
    return model


def answers(run: Run) -> Iterator[list]:
    """Yield a command for each engine that solves problems; they share the GPU."""
    for name, policy in ANSWERS.items():
        answers_of(name).unlink(missing_ok=True)
        arguments = SMALL | ({"additional_config": {"kv_policy": policy}} if policy else {})
        yield ["gpu.answers", json.dumps(arguments), "--out", answers_of(name)]


def answers_of(name: str) -> Path:
    """Return the file of an engine's answers."""
    return WORK / f"answers-{list(ANSWERS).index(name)}.jsonl"


def report_answers(run: Run) -> None:
    """Write how many problems each engine solved, and how many answers have stock's tokens."""
    files = {name: answers_of(name) for name in ANSWERS if answers_of(name).exists()}
    records = {name: [json.loads(line) for line in path.read_text().splitlines()] for name, path in files.items()}
    with (run.out / "answers.csv").open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("engine", "problems", "exact", *OUTCOMES))
        for name, of_engine in records.items():
            counts = compare(records["stock"], of_engine).values() if "stock" in records else [""] * len(OUTCOMES)
            writer.writerow((name, len(of_engine), sum(record["exact"] for record in of_engine), *counts))


SECTIONS = {
    "serving-kernels": 240,
    "prefill-kernels": 480,
    "training-kernels": 180,
    "tiles": 150,
    "generation": 180,
    "distillation": 300,
    "sanitizers": 270,
}
"""Seconds of the sections of :mod:`gpu.sections`, which are parts that run by name only."""
PARTS = (
    Part("correct", 75, correct, needs_vllm=False),
    Part("attention", 40, attention, needs_vllm=False),
    Part("kvpop-engine", 195, kvpop_engine),
    Part("stock-engine", 110, stock_engine),
    Part("answers", 60, answers, report=report_answers),
    Part(HOST_TIMES, 240, host_times, by_name_only=True),
    *(
        Part(name, seconds, partial(section, name), needs_vllm=False, by_name_only=True)
        for name, seconds in SECTIONS.items()
    ),
)
TABLES = "attention.csv", "engines.csv", "answers.csv"


def main() -> int:
    """Run the parts of the command line; return 0 if all ended well."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    usual = [part.name for part in PARTS if not part.by_name_only]
    names = [part.name for part in PARTS]
    parser.add_argument(
        "parts", nargs="*", choices=[*names, []], metavar="PART",
        help=f"only these of {', '.join(names)}; usually the first {len(usual)}",
    )  # fmt: skip
    parser.add_argument("--slack", type=float, default=1.0, help="multiplies all time limits")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that parts are ended, too
    run = Run(Path(os.environ.get("OUT") or ROOT / "build" / "gpu" / "results").resolve(), options.slack)
    run.say(f"[gpu] {run.machine}")
    outcomes = [run.do(part) for part in PARTS if part.name in (options.parts or usual)]
    for table in (run.out / name for name in TABLES):
        if table.exists():
            run.say(table.read_text())
    return int(not all(outcomes))


if __name__ == "__main__":
    sys.exit(main())
