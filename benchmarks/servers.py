"""Times and memory of servers of `vllm serve`: under load, and with a cartridge. They are measures of engines.py."""

import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import record
from child import short_prompts, token_bytes
from harness import (
    add_pool,
    check_budget,
    check_model,
    conclude,
    configurations,
    differs,
    median_interval,
    parser_of,
    parser_of_measure,
    report,
    say,
    setting,
)

from kvpop_vllm.argument_types import positive

sys.path.insert(0, str(record.ROOT / "examples"))
from serving import Server, ServerError  # noqa: E402

MEASURES = ("median_ttft_ms", "p99_ttft_ms", "median_tpot_ms", "output_throughput", "duration")
"""Columns of the load that `vllm bench serve` reports."""
QUESTION = 40
"""Tokens of the question to a cartridge."""
LONGEST_S = 7200
"""Seconds after which a request fails; the last of many whole corpora waits for all others."""
DENSE_BYTES, SMALL_BYTES = 6 << 30, 1 << 30
"""Bytes of the KV cache of stock vLLM and of the server with the cartridge."""


def load(arguments: list[str] | None = None) -> int:
    """Time to first token under load of stock vLLM and fixed budgets with the same KV memory.

    The load comes from `vllm bench serve`. Servers run one after another, as often as --rounds says, and each gets the
    same random prompts at the same times.
    """
    options = load_options(arguments)
    check_model(options)
    common = {"prompts": options.prompts, "input": options.input, "output": options.output, "rate": options.rate}
    common |= {"pool_tokens": int(options.dense_requests * 8192)}
    rows, dense, file = [], None, record.RESULTS / "load.csv"
    try:
        with tempfile.TemporaryDirectory(prefix="kvpop-bench-") as folder:
            chosen = configurations(options, Path(folder))
            for turn in range(1, options.rounds + 1):
                for name in chosen:
                    answers, measured = one_server(name, options, Path(folder))
                    dense = answers if dense is None else dense  # stock comes first
                    if problem := differs(str(name), dense, answers):
                        return conclude([problem], "", [], file, options)
                    values = {column: f"{measured[column]:.1f}" for column in MEASURES}
                    rows.append(setting(options, name) | common | {"round": turn} | values)
                    shown = ", ".join(f"{column} {measured[column]:.0f}" for column in MEASURES)
                    say(f"round {turn}, {name}: {shown}")
    except ServerError as error:
        sys.exit(str(error))
    return conclude([], "\n".join(report(rows, (), column) for column in MEASURES), rows, file, options)


def load_options(arguments: list[str] | None):
    """Return the options of the command line for the load."""
    parser = parser_of("load", load.__doc__, budget=1024, rounds=1)
    parser.add_argument("--prompts", type=positive, default=24, help="requests")
    parser.add_argument("--input", type=positive, default=4000, help="tokens of each prompt")
    parser.add_argument("--output", type=positive, default=128, help="tokens generated for each")
    parser.add_argument("--rate", type=float, default=0.06, help="requests per second, Poisson")
    add_pool(parser)
    options = parser.parse_args(arguments)
    check_budget(parser, options)
    if not options.rate > 0:
        parser.error("--rate must be above 0")
    if options.input + options.output > 8192:
        parser.error("a request exceeds the demo model's 8192 positions: lower --input or --output")
    return options


def one_server(configuration, options, folder: Path) -> tuple[list, dict]:
    """Return greedy tokens of short prompts, and the measurements of the load generator."""
    pool = int(options.dense_requests * 8192 * token_bytes(options.model, options.dtype))
    flags = ["--kv-cache-memory-bytes", str(pool), "--no-enable-prefix-caching"]
    flags += ["--dtype", options.dtype]
    flags += ["--enforce-eager"] if options.eager else []
    if policy := configuration.settings["policy"]:
        flags += ["--additional-config", json.dumps({"kv_policy": policy})]
    environment = {"OMP_NUM_THREADS": str(options.threads)}
    with Server(options.model, *flags, say=lambda line: say(f"{configuration}:{line}"), env=environment) as server:
        answers = [greedy(server.url, options.model, prompt) for prompt in short_prompts(options.budget)]
        result = folder / "load.json"
        command = [str(Path(sys.executable).with_name("vllm")), "bench", "serve", "--base-url", server.url]
        command += ["--model", options.model, "--dataset-name", "random", "--seed", "0", "--ignore-eos"]
        command += ["--random-input-len", str(options.input), "--random-output-len", str(options.output)]
        command += ["--num-prompts", str(options.prompts), "--request-rate", str(options.rate)]
        command += ["--save-result", "--result-dir", str(folder), "--result-filename", result.name]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise ServerError(f"vllm bench serve failed: {(done.stderr.strip() or 'without a word').splitlines()[-1]}")
        measured = json.loads(result.read_text())
        if measured["completed"] != options.prompts:
            raise ServerError(f"{configuration}: {measured['completed']} of {options.prompts} requests completed")
    return answers, measured


def greedy(url: str, model: str, prompt: str) -> list[dict]:
    """Return greedy tokens of a prompt, each with its log-probability and its lead over the second."""
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=120)
    sampling = {"max_tokens": 24, "temperature": 0, "logprobs": 2, "extra_body": {"ignore_eos": True}}
    logprobs = client.completions.create(model=model, prompt=prompt, **sampling).choices[0].logprobs
    best = [sorted(candidates.values(), reverse=True)[:2] for candidates in logprobs.top_logprobs]
    return [
        {"token": token, "logprob": logprob, "gap": pair[0] - pair[-1]}
        for token, logprob, pair in zip(logprobs.tokens, logprobs.token_logprobs, best, strict=True)
    ]


def cartridge(arguments: list[str] | None = None) -> int:
    """Time to first token and memory with a cartridge, against the whole corpus as the prompt.

    A server of stock vLLM without prefix caching gets the corpus and a question as one prompt, a server with a
    cartridge of the same corpus gets the question alone; in turns, --rounds times. Then --requests of each run
    together, and vLLM's gauge says how many bytes of KV cache they hold. Times do not depend on how the cartridge was
    made: it is `first`.
    """
    parser = parser_of_measure("cartridge", cartridge.__doc__)
    parser.add_argument("--corpus", type=positive, default=7000, help="tokens of the corpus")
    parser.add_argument("--slots", type=positive, default=1024, help="slots of the cartridge")
    parser.add_argument("--requests", type=positive, default=16, help="requests that run together")
    parser.add_argument("--rounds", type=positive, default=7, help="pairs of requests")
    parser.add_argument("--dtype", default="bfloat16", help="dtype of the model")
    options = parser.parse_args(arguments)
    check_model(options)
    common = ["--max-model-len", "8192", "--dtype", options.dtype, "--max-num-seqs", str(options.requests)]
    dense, small = (["--kv-cache-memory-bytes", str(memory), *common] for memory in (DENSE_BYTES, SMALL_BYTES))
    with tempfile.TemporaryDirectory(prefix="kvpop-bench-") as folder:
        cartridge_folder = compact(options, Path(folder))
        try:
            with (
                Server(options.model, "--no-enable-prefix-caching", "--served-model-name", "m", *dense) as stock,
                Server(options.model, "--kv-cartridge", f"c={cartridge_folder}", *small) as ours,
            ):
                clients = Client(stock, "m", DENSE_BYTES, options.corpus), Client(ours, "c", SMALL_BYTES, 0)
                return first_tokens(*clients, options)
        except ServerError as error:
            say(str(error))
            return 1


def compact(options, folder: Path) -> str:
    """Make the cartridge with `kvpop compact` and return its folder."""
    words = "north south east west river mountain winter summer stone water paper silver".split()
    (folder / "corpus.txt").write_text(" ".join(random.Random(0).choices(words, k=2 * options.slots)))
    command = [Path(sys.executable).with_name("kvpop"), "compact", options.model, "--data", folder / "corpus.txt"]
    command += ["--method", "first", "--slots", str(options.slots), "--place", "front", "--out", folder / "cartridge"]
    subprocess.run(list(map(str, command)), check=True, stdout=subprocess.DEVNULL)
    return str(folder / "cartridge")


class Client:
    """Requests to a server: ``ahead`` tokens of the corpus and a question, or the question alone."""

    def __init__(self, server: Server, model: str, memory: int, ahead: int):
        self.server, self.model, self.memory, self.ahead = server, model, memory, ahead
        self.client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=LONGEST_S, max_retries=0)

    def first_token(self, seed: int, tokens: int = 1) -> float:
        """Return the seconds from sending a request with ``seed``'s tokens to its first token."""
        draw = random.Random(seed)
        prompt = [draw.randrange(100, 40_000) for _ in range(self.ahead + QUESTION)]
        start, first = time.perf_counter(), 0.0
        request = {"model": self.model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": True}
        for _ in self.client.completions.create(**request, extra_body={"ignore_eos": True}):
            first = first or time.perf_counter() - start
        return first

    def bytes_together(self, requests: int) -> float:
        """Return the most bytes of KV cache that requests of 64 new tokens hold together."""
        blocks = 0
        with ThreadPoolExecutor(requests) as pool:
            answers = [pool.submit(self.first_token, 1000 + i, 64) for i in range(requests)]
            while not all(answer.done() for answer in answers):
                blocks = max(blocks, self.server.blocks_in_use())
                time.sleep(0.2)
        for answer in answers:
            answer.result()  # raises what the request did
        return blocks * self.memory / self.server.cache_info("num_gpu_blocks")


def first_tokens(stock: Client, ours: Client, options) -> int:
    """Measure both servers in turns, print the comparison and append the rows; return the exit code."""
    for client in (stock, ours):
        client.first_token(0)
    rows, ratios = [], []
    common = {"corpus": options.corpus, "slots": options.slots, "question": QUESTION, "dtype": options.dtype}
    for turn in range(options.rounds):
        times = stock.first_token(turn + 1), ours.first_token(turn + 1)
        ratios.append(times[1] / times[0])
        for name, seconds in zip(("stock", "cartridge"), times, strict=True):
            row = {"what": "first token", "configuration": name, "requests": 1, "value": f"{seconds:.4f}"}
            rows.append(common | row)
        say(f"round {turn + 1}: {times[0]:.3f} s and {times[1]:.3f} s")
    sizes = stock.bytes_together(options.requests), ours.bytes_together(options.requests)
    for name, size in zip(("stock", "cartridge"), sizes, strict=True):
        row = {"what": "bytes", "configuration": name, "requests": options.requests, "value": f"{size:.0f}"}
        rows.append(common | row)
    record.append(record.RESULTS / "cartridge.csv", rows)
    low, high = median_interval(ratios)
    say(f"time to first token, cartridge over corpus: {statistics.median(ratios):.4f} ({low:.4f} to {high:.4f})")
    say(f"{options.requests} requests hold {sizes[0] / 2**20:.0f} MiB and {sizes[1] / 2**20:.0f} MiB")
    return 0
