"""Decode steps of stock vLLM against fixed budgets, paired: `make bench`.

Each configuration lives in a child process with an engine of its own (vLLM's default compiled mode). All of them prefill
the same prompts; then they take turns, A B C A B C ..., while the others sleep. Nothing is called faster unless every
policy gave stock's greedy tokens on prompts shorter than its budget. Rows go to benchmarks/results/decode.csv.
"""

import argparse
import csv
import datetime
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "decode.csv"
NEAR_TIE = 0.5  # nats: four steps of a bfloat16 logit between 16 and 32
WARM_UP = 2  # steps of each turn that are not counted: the caches belong to the process before
SHORT_PROMPTS = (
    "The capital of France is",
    "Water boils when it is heated, and it freezes when",
    "Once upon a time there was a miller who had three sons. When he died, the eldest got the mill,",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
)


def main() -> int:
    options = parse_arguments()
    if options.child:
        return Child(json.loads(options.child)).serve()
    if not (Path(options.model) / "config.json").is_file():
        sys.exit(f"decode: no model in {options.model}: run `make model`")
    with tempfile.TemporaryDirectory(prefix="kvpop-bench-") as folder:
        engines = {}
        try:
            for name, told in configurations(options, Path(folder)).items():
                engines[name] = Engine(name, told, options, Path(folder))
            return measure(engines, options)
        except EngineError as error:
            print(f"decode: {error}", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            return 130
        finally:
            for engine in engines.values():
                engine.stop()


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=str(ROOT / "models" / "SmolLM2-135M-Instruct"))
    parser.add_argument("--context", type=int, default=7500, help="tokens of each prompt, about (default 7500)")
    parser.add_argument("--requests", type=int, default=8, help="requests decoded together (default 8)")
    parser.add_argument("--budget", type=int, default=2048, help="B of the policies (default 2048)")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each configuration (default 3)")
    parser.add_argument("--steps", type=int, default=24, help="counted steps of a turn (default 24)")
    cores = len(os.sched_getaffinity(0))
    parser.add_argument(
        "--threads", type=int, default=max(1, cores - 1), help="default: as vllm serve, all cores but 1"
    )
    parser.add_argument("--policies", nargs="+", default=["streaming-llm", "kvpop"], help="compared with stock")
    parser.add_argument("--eager", action="store_true", help="instead of the default compiled mode")
    parser.add_argument("--eager-too", action="store_true", help="each policy a second time, eager")
    parser.add_argument("--no-csv", action="store_true", help="do not append to benchmarks/results/decode.csv")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.eager and options.eager_too:
        parser.error("--eager leaves nothing to compare: leave it out, or --eager-too")
    if options.context + (options.rounds * (options.steps + WARM_UP)) > 8000:
        parser.error("context and generated tokens exceed the demo model's 8192 positions: lower --context")
    return options


EAGER = " eager"
"""Ends the name of a policy's eager twin."""


def configurations(options, folder: Path) -> dict:
    """Name -> ``policy``, its ``kv_policy`` or None for stock, and ``eager``."""
    policies = {name: {"policy": name, "budget": options.budget} for name in options.policies}
    for name in set(policies) & {"kvpop", "kvpop-mlp", "kvpop-linear"}:
        from kvpop_vllm.scorers.init import init_scorer

        kind = {"kvpop": "mlstm"}.get(name, name.removeprefix("kvpop-"))
        init_scorer(options.model, str(folder / name), scorer=kind)
        policies[name]["scorer"] = str(folder / name)
    told = {name: {"policy": policy, "eager": options.eager} for name, policy in {"dense": None, **policies}.items()}
    twins = {name + EAGER: {"policy": policies[name], "eager": True} for name in policies if options.eager_too}
    return told | twins


def measure(engines: dict, options) -> int:
    say("starting (each engine compiles for about a minute when it is new to this machine)")
    for name, reply in ask_all(engines, "start"):
        say(f"{name}: ready after {reply['seconds']:.0f} s, KV pool {reply['pool_bytes'] >> 20} MiB")
    short = dict(ask_all(engines, "short"))
    others = [name for name in engines if name != "dense"]
    problems = [problem for name in others if (problem := differs(name, short["dense"], short[name]))]
    say(f"prefill of {options.requests} x about {options.context} tokens in every engine: this takes minutes")
    held = {}
    for name, reply in ask_all(engines, "prefill"):
        held[name] = reply["held_bytes"]
        rate = reply["tokens"] / reply["seconds"]
        say(f"{name}: {rate:.0f} tokens/s, engines side by side; holds {reply['held_bytes'] / 2**20:.0f} MiB of KV")
    rows = []
    for turn in range(options.rounds):
        medians = {name: statistics.median(engine.ask("steps")["ms"]) for name, engine in engines.items()}
        say(f"round {turn + 1}: " + ", ".join(f"{name} {ms:.1f} ms" for name, ms in medians.items()))
        rows += [(name, turn + 1, ms, medians["dense"] / ms, held[name]) for name, ms in medians.items()]
    for problem in problems:
        print(f"decode: output check failed, no ratio is given: {problem}", file=sys.stderr)
    if problems:
        return 1
    print(report(rows, options))
    if not options.no_csv:
        append(rows, options)
    return 0


def differs(name: str, dense: list, other: list) -> str | None:
    """Greedy tokens and their log-probabilities must be stock's up to the first near tie; what is wrong, or None."""
    compared = 0
    for prompt, (expected, got) in enumerate(zip(dense, other, strict=True)):
        for step, (e, g) in enumerate(zip(expected, got, strict=True)):
            compared += 1
            if e["token"] != g["token"]:
                if e["gap"] > NEAR_TIE:
                    return f"{name}, prompt {prompt}, token {step}: {g['token']} instead of {e['token']}, gap {e['gap']:.2f}"
                break  # from here on the texts differ
            if abs(e["logprob"] - g["logprob"]) > NEAR_TIE:
                return f"{name}, prompt {prompt}, token {step}: log-probability {g['logprob']:.2f}, stock {e['logprob']:.2f}"
    total = sum(map(len, dense))
    say(f"{name}: {compared} of {total} greedy tokens compared with stock before a near tie")
    return None if compared >= total / 2 else f"{name}: near ties left only {compared} of {total} tokens to compare"


def report(rows: list, options) -> str:
    lines = [f"{'':19} {'ms/step':>8} {'KV MiB':>7} {'dense / it: median':>19} {'min':>6} {'max':>6}"]
    for name in dict.fromkeys(row[0] for row in rows):
        mine = [row for row in rows if row[0] == name]
        ratios = [row[3] for row in mine]
        step = statistics.median(row[2] for row in mine)
        lines.append(
            f"{name:19} {step:8.1f} {mine[0][4] / 2**20:7.0f} {statistics.median(ratios):19.2f} {min(ratios):6.2f} {max(ratios):6.2f}"
        )
    for name in (row[0] for row in rows if row[0].endswith(EAGER) and row[1] == 1):
        compiled = {row[1]: row[2] for row in rows if row[0] == name.removesuffix(EAGER)}
        ratios = [row[2] / compiled[row[1]] for row in rows if row[0] == name]
        lines.append(
            f"{name} / compiled: median {statistics.median(ratios):.2f}, {min(ratios):.2f} to {max(ratios):.2f}"
        )
    return "\n".join(lines)


def append(rows: list, options) -> None:
    from importlib.metadata import version

    setting = {
        "machine": cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "threads": options.threads,
        "date": datetime.date.today().isoformat(),
        "commit": commit(),
        "vllm": version("vllm"),
        "mode": None,
        "requests": options.requests,
        "context": options.context,
        "budget": options.budget,
    }
    names = [*setting, "configuration", "round", "step_ms", "dense_over_it", "kv_bytes"]
    new = not RESULTS.exists()
    RESULTS.parent.mkdir(exist_ok=True)
    with RESULTS.open("a", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        if new:
            writer.writerow(names)
        for name, turn, ms, ratio, held in rows:
            mode = "eager" if options.eager or name.endswith(EAGER) else "compiled"
            figures = [name.removesuffix(EAGER), turn, f"{ms:.2f}", f"{ratio:.3f}", held]
            writer.writerow([*(setting | {"mode": mode}).values(), *figures])


def cpu_model() -> str:
    """The name, and what tells models of the same name apart."""
    about = Path("/proc/cpuinfo").read_text()
    fields = dict(line.split("\t", 1) for line in about.splitlines() if "\t" in line)
    name, family, model = (fields.get(key, "").strip("\t: ") for key in ("model name", "cpu family", "model"))
    return f"{name} family {family} model {model}" if name else platform.machine()


def commit() -> str:
    def git(*arguments):
        return subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True).stdout.strip()

    return (git("rev-parse", "--short", "HEAD") or "none") + ("+" if git("status", "--porcelain", "-uno") else "")


def say(line: str) -> None:
    print(f"[bench] {line}", flush=True)


class EngineError(Exception):
    """A child failed; the text says how."""


class Engine:
    """The parent's end of one child."""

    def __init__(self, name: str, told: dict, options, folder: Path):
        self.name, self.log = name, folder / f"{name}.log"
        told = json.dumps(vars(options) | told)
        env = os.environ | {"OMP_NUM_THREADS": str(options.threads), "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, __file__, "--child", told],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=env,
            )

    def send(self, command: str) -> None:
        try:
            self.process.stdin.write(command + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise self._died() from None

    def receive(self):
        while line := self.process.stdout.readline():
            reply = json.loads(line)
            if "progress" not in reply:
                return reply
            say(f"{self.name}: {reply['progress']}")
        raise self._died()

    def ask(self, command: str):
        self.send(command)
        return self.receive()

    def _died(self) -> EngineError:
        lines = [line for line in self.log.read_text().splitlines() if line.strip()]
        return EngineError(f"the {self.name} engine died: {lines[-1] if lines else 'without a word'}")

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()


def ask_all(engines: dict, command: str):
    """All at once; yields each name with its reply."""
    for engine in engines.values():
        engine.send(command)
    for name, engine in engines.items():
        yield name, engine.receive()


class Child:
    """One engine. Reads commands, one a line, and answers each with a line of JSON."""

    def __init__(self, options: dict):
        self.options = argparse.Namespace(**options)
        self.replies = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)  # whatever else is printed goes to the log

    def serve(self) -> int:
        for command in sys.stdin:
            self.reply(getattr(self, command.strip())())
        os._exit(0)  # vLLM's own teardown has nothing to say here

    def reply(self, what) -> None:
        print(json.dumps(what), file=self.replies)

    def start(self) -> dict:
        begin, asked = time.monotonic(), self.options
        from vllm import LLM

        self.llm = LLM(
            asked.model,
            dtype="bfloat16",
            max_num_seqs=asked.requests,
            kv_cache_memory_bytes=self._pool_bytes(),
            enable_prefix_caching=False,
            enforce_eager=asked.eager,
            additional_config={"kv_policy": asked.policy} if asked.policy else {},
        )
        self.engine = self.llm.llm_engine
        scheduler = self.engine.engine_core.engine_core.scheduler
        self.pool = scheduler.kv_cache_manager.block_pool
        pool_bytes = sum(tensor.size for tensor in scheduler.kv_cache_config.kv_cache_tensors)
        self.block_bytes = pool_bytes // scheduler.kv_cache_config.num_blocks
        self.free = self.pool.get_num_free_blocks()
        return {"seconds": time.monotonic() - begin, "pool_bytes": pool_bytes}

    def _pool_bytes(self) -> int:
        """The same for every configuration: what stock needs for all requests, and a little."""
        model = json.loads((Path(self.options.model) / "config.json").read_text())
        width = model.get("head_dim") or model["hidden_size"] // model["num_attention_heads"]
        per_token = 2 * 2 * model["num_hidden_layers"] * model["num_key_value_heads"] * width
        return int(1.15 * self.options.requests * 8192 * per_token)

    def short(self) -> list:
        """Greedy tokens of short prompts, each with its log-probability and its lead over the second."""
        from vllm import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=24, logprobs=2, ignore_eos=True)
        answers = self.llm.generate(list(SHORT_PROMPTS), params, use_tqdm=False)
        return [
            [self._token(*pair) for pair in zip(a.outputs[0].token_ids, a.outputs[0].logprobs, strict=True)]
            for a in answers
        ]

    @staticmethod
    def _token(token: int, candidates: dict) -> dict:
        first, second = sorted((c.logprob for c in candidates.values()), reverse=True)[:2]
        return {"token": token, "logprob": candidates[token].logprob, "gap": first - second}

    def prefill(self) -> dict:
        from vllm import SamplingParams

        draw = random.Random(0)
        lengths = [self.options.context - 16 * i for i in range(self.options.requests)]
        params = SamplingParams(
            temperature=0, max_tokens=8192 - self.options.context, ignore_eos=True, detokenize=False
        )
        for i, length in enumerate(lengths):
            tokens = [draw.randrange(100, 40000) for _ in range(length)]
            self.engine.add_request(f"long-{i}", {"prompt_token_ids": tokens}, params)
        begin = said = time.monotonic()
        while (decoding := len(self.engine.step())) < self.options.requests:
            if time.monotonic() - said > 30:
                said = time.monotonic()
                self.reply(
                    {"progress": f"{decoding} of {self.options.requests} prompts done after {said - begin:.0f} s"}
                )
        held = (self.free - self.pool.get_num_free_blocks()) * self.block_bytes
        return {"seconds": time.monotonic() - begin, "tokens": sum(lengths), "held_bytes": held}

    def steps(self) -> dict:
        times = []
        for _ in range(WARM_UP + self.options.steps):
            begin = time.perf_counter()
            decoded = len(self.engine.step())
            times.append(1e3 * (time.perf_counter() - begin))
            if decoded != self.options.requests:
                raise RuntimeError(
                    f"{decoded} of {self.options.requests} requests decoded: a turn must hold all of them"
                )
        return {"ms": times[WARM_UP:]}


if __name__ == "__main__":
    sys.exit(main())
