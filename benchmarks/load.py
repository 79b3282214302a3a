"""Time to first token under load of stock vLLM and fixed budgets with the same KV memory.

The load comes from `vllm bench serve`. Servers run one after another, as often as --rounds says, and each
gets the same random prompts at the same times. Nothing is called faster unless every policy's server gave
stock's greedy tokens on prompts shorter than its budget. Rows are appended to benchmarks/results/load.csv.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import openai
import record
from engines import (
    add_pool,
    check_budget,
    check_model,
    conclude,
    configurations,
    differs,
    parser_of,
    report,
    say,
    setting,
    short_prompts,
    token_bytes,
)

from kvpop_vllm.argument_types import positive

sys.path.insert(0, str(record.ROOT / "examples"))
from serving import Server, ServerError  # noqa: E402

RESULTS = record.RESULTS / "load.csv"
MEASURES = ("median_ttft_ms", "p99_ttft_ms", "median_tpot_ms", "output_throughput", "duration")


def main() -> int:
    """Run the benchmark and return its exit code."""
    options = parse_arguments()
    check_model(options)
    load = {"prompts": options.prompts, "input": options.input, "output": options.output, "rate": options.rate}
    load |= {"pool_tokens": int(options.dense_requests * 8192)}
    rows, first = [], None
    try:
        with tempfile.TemporaryDirectory(prefix="kvpop-bench-") as folder:
            settings = configurations(options, Path(folder))
            for turn in range(1, options.rounds + 1):
                for name, configuration in settings.items():
                    answers, measured = one_server(name, configuration["policy"], options, Path(folder))
                    first = answers if first is None else first  # stock comes first
                    if problem := differs(name, first, answers):
                        return conclude([problem], "", [], RESULTS, options)
                    rows.append(
                        setting(options, name) | load | {"round": turn} | {m: f"{measured[m]:.1f}" for m in MEASURES}
                    )
                    say(f"round {turn}, {name}: " + ", ".join(f"{m} {measured[m]:.0f}" for m in MEASURES))
    except ServerError as error:
        sys.exit(str(error))
    return conclude([], "\n".join(report(rows, (), measure) for measure in MEASURES), rows, RESULTS, options)


def parse_arguments():
    """Return the options of the command line."""
    parser = parser_of(__doc__, budget=1024, rounds=1)
    parser.add_argument("--prompts", type=positive, default=24, help="requests")
    parser.add_argument("--input", type=positive, default=4000, help="tokens of each prompt")
    parser.add_argument("--output", type=positive, default=128, help="tokens generated for each")
    parser.add_argument("--rate", type=float, default=0.06, help="requests per second, Poisson")
    add_pool(parser)
    options = parser.parse_args()
    check_budget(parser, options)
    if not options.rate > 0:
        parser.error("--rate must be above 0")
    if options.input + options.output > 8192:
        parser.error("a request exceeds the demo model's 8192 positions: lower --input or --output")
    return options


def one_server(name: str, policy: dict | None, options, folder: Path) -> tuple[list, dict]:
    """Return greedy tokens of short prompts, and the measurements of the load generator."""
    pool = int(options.dense_requests * 8192 * token_bytes(options.model, options.dtype))
    flags = ["--kv-cache-memory-bytes", str(pool), "--no-enable-prefix-caching"]
    flags += ["--dtype", options.dtype]
    flags += ["--enforce-eager"] if options.eager else []
    if policy:
        flags += ["--additional-config", json.dumps({"kv_policy": policy})]
    environment = {"OMP_NUM_THREADS": str(options.threads)}
    with Server(options.model, *flags, say=lambda line: say(f"{name}:{line}"), env=environment) as server:
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
            raise ServerError(f"{name}: {measured['completed']} of {options.prompts} requests completed")
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


if __name__ == "__main__":
    sys.exit(main())
