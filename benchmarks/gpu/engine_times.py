"""Times of one vLLM engine on a GPU: decode steps, first tokens, throughput, and decoding while a prompt arrives.

The engine runs in this process and is stepped by hand. Weights are dummies, and a learned scorer is random: times do
not depend on either. Each case sends its requests, waits until every request that fits has its first token, and then
times rounds of decode steps. Rows go to a CSV file as they come.
"""

import argparse
import csv
import json
import os
import statistics
import time
from functools import partial
from pathlib import Path

import torch
from vllm import LLM, SamplingParams

COLUMNS = ("engine", "budget", "requests", "context", "measure", "median", "low", "high", "unit", "note")
ROUNDS, STEPS = 5, 20
"""Rounds of a case, and decode steps of a round."""
SETTLED = 6
"""Decode steps without another request's first token, after which no waiting request fits."""
VOCABULARY = 30000


class Engine:
    """vLLM engine with one step per call.

    Args:
        name: name in the results.
        arguments: arguments of :class:`vllm.LLM`.
        out: CSV file that rows are appended to.
    """

    def __init__(self, name: str, arguments: dict, out: Path):
        self.name, self.out, self.count = name, out, 0
        begin = time.perf_counter()
        self.core = LLM(**arguments).llm_engine
        self.write(None, 0, 0, "start", [time.perf_counter() - begin], "s", self.backends())

    def backends(self) -> str:
        """Return the names of the attention backends that vLLM has chosen, with the version of FlashAttention."""
        layers = self.core.vllm_config.compilation_config.static_forward_context.values()
        names = set()
        for layer in layers:
            version = getattr(getattr(layer, "impl", None), "vllm_flash_attn_version", None)
            names.add(layer.get_attn_backend().get_name() + (f" {version}" if version else ""))
        return ", ".join(sorted(names))

    def write(self, budget: int | None, requests: int, context: int, measure: str, values, unit: str, note="") -> None:
        """Append one row with the median and the range of values."""
        row = (self.name, budget or "", requests, context, measure)
        row += (*(f"{value:.5g}" for value in (statistics.median(values), min(values), max(values))), unit, note)
        new = not self.out.exists()
        with self.out.open("a", newline="") as file:
            writer = csv.writer(file)
            writer.writerows([COLUMNS, row] if new else [row])
        print(*row, flush=True)

    def add(self, context: int, budget: int | None) -> str:
        """Send a request of random tokens that decodes until it is aborted, and return its name."""
        name, self.count = f"request-{self.count}", self.count + 1
        draw = torch.Generator(device="cpu").manual_seed(self.count)
        tokens = torch.randint(10, VOCABULARY, (context,), generator=draw, device="cpu").tolist()
        extra = {"kv_budget": budget} if budget else None
        sampling = SamplingParams(temperature=0, max_tokens=4096, ignore_eos=True, detokenize=False, extra_args=extra)
        self.core.add_request(name, {"prompt_token_ids": tokens}, sampling)
        return name

    def step(self) -> tuple[float, dict[str, int]]:
        """Run one engine step; return its seconds and the number of tokens that each request has so far."""
        begin = time.perf_counter()
        outputs = self.core.step()
        seconds = time.perf_counter() - begin
        return seconds, {output.request_id: len(output.outputs[0].token_ids) for output in outputs}

    def abort(self, names: list[str]) -> None:
        """Abort requests and wait until the engine has nothing to do."""
        self.core.abort_request(names)
        while self.core.has_unfinished_requests():
            self.core.step()

    def admitted(self) -> dict[str, float]:
        """Step until every request that fits decodes; return the seconds to the first token of each."""
        begin, first, quiet = time.perf_counter(), {}, 0
        while quiet < SETTLED:
            _, counts = self.step()
            fresh = [name for name in counts if name not in first]
            first |= dict.fromkeys(fresh, time.perf_counter() - begin)
            quiet = 0 if fresh or not counts else quiet + 1
        return first


def decode_cases(engine: Engine, budget: int | None, cases: list[tuple[int, int]]) -> None:
    """Time decode steps of ``(requests, context)``, as many at a time as fit.

    A case of more requests at the context of the case before adds to its requests, which have decoded since.
    """
    names, last = [], None
    for requests, context in cases:
        if context != last or requests < len(names):
            engine.abort(names)
            names, last = [], context
        torch.cuda.reset_peak_memory_stats()
        added = [engine.add(context, budget) for _ in range(requests - len(names))]
        names += added
        first = engine.admitted()
        times, rates, running = [], [], 0
        for _ in range(ROUNDS):
            begin, tokens = time.perf_counter(), 0
            for _ in range(STEPS):
                counts = engine.step()[1]
                tokens += len(counts)
                running = max(running, len(counts))
            seconds = time.perf_counter() - begin
            times.append(1e3 * seconds / STEPS)
            rates.append(tokens / seconds)
        write = partial(engine.write, budget, requests, context)
        note = "" if running == requests else f"{running} of {requests} requests fit"
        write("decode step", times, "ms", note)
        write("decoded tokens a second", rates, "1/s", note)
        last_first = max((first[name] for name in added if name in first), default=None)
        if last_first is not None:
            write(f"first tokens of {len(added)} requests", [last_first], "s", note)
        write("peak memory", [torch.cuda.max_memory_allocated() / 2**30], "GiB", note)
    engine.abort(names)


def warm_up(engine: Engine, budget: int | None) -> None:
    """Serve a short request, so that what is left to compile is compiled."""
    name = engine.add(512, budget)
    engine.admitted()
    engine.abort([name])


def first_token_case(engine: Engine, budget: int | None, context: int) -> None:
    """Time the first token of a lone request."""
    seconds = []
    for _ in range(ROUNDS):
        name, begin = engine.add(context, budget), time.perf_counter()
        while name not in engine.step()[1]:
            pass
        seconds.append(1e3 * (time.perf_counter() - begin))
        engine.abort([name])
    engine.write(budget, 1, context, "first token", seconds, "ms")


def arrival_case(engine: Engine, budget: int | None, requests: int, context: int, arriving: int) -> None:
    """Time the steps of decoding requests while a long prompt is read."""
    names = [engine.add(context, budget) for _ in range(requests)]
    engine.admitted()
    totals, longest = [], []
    for _ in range(ROUNDS):
        newcomer, steps, last = engine.add(arriving, budget), [], time.perf_counter()
        while True:
            _, counts = engine.step()
            if names[0] in counts or newcomer in counts:
                steps.append(time.perf_counter() - last)
                last = time.perf_counter()
            if newcomer in counts:
                break
        totals.append(1e3 * sum(steps))
        longest.append(1e3 * max(steps))
        engine.core.abort_request([newcomer])
        for _ in range(5):
            engine.step()
    engine.write(budget, requests, context, f"longest gap while {arriving} tokens arrive", longest, "ms")
    engine.write(budget, requests, context, f"{arriving} tokens arrive in", totals, "ms")
    engine.abort(names)


def case_of(text: str) -> tuple[int, int]:
    """Return requests and context of a case such as ``8x4096``."""
    requests, context = text.split("x")
    return int(requests), int(context)


def main() -> None:
    """Start the engine and run the cases of the command line."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine runs in this process
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", help="name of the engine in the results")
    parser.add_argument("arguments", help="arguments of vllm.LLM, as JSON")
    parser.add_argument("--cases", type=case_of, nargs="+", required=True, help="e.g. 1x4096 64x16384")
    parser.add_argument("--budgets", type=int, nargs="+", default=[0], help="budget of requests; 0 leaves it out")
    parser.add_argument("--first", type=int, nargs="*", default=[], help="contexts of lone first tokens")
    parser.add_argument("--arriving", type=int, nargs="*", default=[], help="lengths of prompts that arrive")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    engine = Engine(options.name, json.loads(options.arguments), options.out)
    for budget in options.budgets:
        warm_up(engine, budget)
        decode_cases(engine, budget, options.cases)
        for context in options.first:
            first_token_case(engine, budget, context)
        for arriving in options.arriving:
            arrival_case(engine, budget, 16, 4096, arriving)


if __name__ == "__main__":
    main()
