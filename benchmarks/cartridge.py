"""Time to first token and memory behind a cartridge, against the whole corpus as the prompt.

A server of stock vLLM without prefix caching gets the corpus and a question as one prompt, a server with a cartridge of
the same corpus gets the question alone; in turns, --rounds times. Then --requests of each run together, and vLLM's
gauge says how many bytes of KV cache they hold. Times do not depend on how the cartridge was made: it is `first`.
Rows are appended to benchmarks/results/cartridge.csv.
"""

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
from engines import check_model, median_interval, say

from kvpop_vllm.argument_types import positive

sys.path.insert(0, str(record.ROOT / "examples"))
from serving import Server, ServerError  # noqa: E402

RESULTS = record.RESULTS / "cartridge.csv"
QUESTION = 40
"""Tokens of the question."""
LONGEST = 7200
"""Seconds after which a request fails; the last of many whole corpora waits for all others."""
DENSE, SMALL = 6 << 30, 1 << 30
"""Bytes of the KV cache of stock vLLM and of the server with the cartridge."""


def parse_arguments():
    """Return the options of the command line."""
    parser = record.parser_of(__doc__)
    parser.add_argument("--model", default=str(record.ROOT / "models" / "SmolLM2-135M-Instruct"), help="folder")
    parser.add_argument("--corpus", type=positive, default=7000, help="tokens of the corpus")
    parser.add_argument("--slots", type=positive, default=1024, help="slots of the cartridge")
    parser.add_argument("--requests", type=positive, default=16, help="requests that run together")
    parser.add_argument("--rounds", type=positive, default=7, help="pairs of requests")
    parser.add_argument("--dtype", default="bfloat16", help="dtype of the model")
    return parser.parse_args()


def compact(options, folder: Path) -> str:
    """Make the cartridge with `kvpop compact` and return its folder."""
    words = "north south east west river mountain winter summer stone water paper silver".split()
    (folder / "corpus.txt").write_text(" ".join(random.Random(0).choices(words, k=2 * options.slots)))
    command = [Path(sys.executable).with_name("kvpop"), "compact", options.model, "--data", folder / "corpus.txt"]
    command += ["--method", "first", "--slots", str(options.slots), "--place", "front", "--out", folder / "cartridge"]
    subprocess.run(list(map(str, command)), check=True, stdout=subprocess.DEVNULL)
    return str(folder / "cartridge")


class Asked:
    """A server and what its requests send: the corpus and a question, or the question behind the cartridge."""

    def __init__(self, server: Server, model: str, memory: int, ahead: int):
        self.server, self.model, self.memory, self.ahead = server, model, memory, ahead
        self.client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=LONGEST, max_retries=0)

    def first_token(self, seed: int, tokens: int = 1) -> float:
        """Return the seconds from sending a request with ``seed``'s tokens to its first token."""
        draw = random.Random(seed)
        prompt = [draw.randrange(100, 40_000) for _ in range(self.ahead + QUESTION)]
        start, first = time.perf_counter(), 0.0
        asked = {"model": self.model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": True}
        for _ in self.client.completions.create(**asked, extra_body={"ignore_eos": True}):
            first = first or time.perf_counter() - start
        return first

    def bytes_together(self, requests: int) -> float:
        """Return the most bytes of KV cache that requests of 64 new tokens hold together."""
        blocks = 0
        with ThreadPoolExecutor(requests) as pool:
            asked = [pool.submit(self.first_token, 1000 + i, 64) for i in range(requests)]
            while not all(each.done() for each in asked):
                blocks = max(blocks, self.server.blocks_in_use())
                time.sleep(0.2)
        for each in asked:
            each.result()  # raises what the request did
        return blocks * self.memory / self.server.cache_info("num_gpu_blocks")


def main() -> int:
    """Run the benchmark and return its exit code."""
    options = parse_arguments()
    check_model(options)
    common = ["--max-model-len", "8192", "--dtype", options.dtype, "--max-num-seqs", str(options.requests)]
    dense, small = (["--kv-cache-memory-bytes", str(memory), *common] for memory in (DENSE, SMALL))
    with tempfile.TemporaryDirectory(prefix="kvpop-bench-") as folder:
        cartridge = compact(options, Path(folder))
        try:
            with (
                Server(options.model, "--no-enable-prefix-caching", "--served-model-name", "m", *dense) as stock,
                Server(options.model, "--kv-cartridge", f"c={cartridge}", *small) as ours,
            ):
                return measure(Asked(stock, "m", DENSE, options.corpus), Asked(ours, "c", SMALL, 0), options)
        except ServerError as error:
            say(str(error))
            return 1


def measure(stock: Asked, ours: Asked, options) -> int:
    """Measure both servers in turns, print the comparison and append the rows; return the exit code."""
    for each in (stock, ours):
        each.first_token(0)
    rows, ratios = [], []
    told = {"corpus": options.corpus, "slots": options.slots, "question": QUESTION, "dtype": options.dtype}
    for turn in range(options.rounds):
        times = stock.first_token(turn + 1), ours.first_token(turn + 1)
        ratios.append(times[1] / times[0])
        for name, seconds in zip(("stock", "cartridge"), times, strict=True):
            rows.append(told | {"what": "first token", "configuration": name, "requests": 1, "value": f"{seconds:.4f}"})
        say(f"round {turn + 1}: {times[0]:.3f} s and {times[1]:.3f} s")
    held = stock.bytes_together(options.requests), ours.bytes_together(options.requests)
    for name, value in zip(("stock", "cartridge"), held, strict=True):
        rows.append(
            told | {"what": "bytes", "configuration": name, "requests": options.requests, "value": f"{value:.0f}"}
        )
    record.append(RESULTS, rows)
    low, high = median_interval(ratios)
    say(f"time to first token, cartridge over corpus: {statistics.median(ratios):.4f} ({low:.4f} to {high:.4f})")
    say(f"{options.requests} requests hold {held[0] / 2**20:.0f} MiB and {held[1] / 2**20:.0f} MiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
