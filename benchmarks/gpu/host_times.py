"""Steps of prompts and of decoding, by engines that take turns in one process, for the host's time of `make gpu-rehearse`.

The pretended device records the time and the counts of every step (``pretend/sitecustomize.py``). On a GPU this module
would show nothing, because the host waits for the device there.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

from gpu.engine_times import Engine, case_of

ROUNDS = 50


def main() -> None:
    """Start the engines and let them take turns."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engines run in this process
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("engines", help="arguments of vllm.LLM by the engine's name, as JSON")
    parser.add_argument("--prompts", type=case_of, nargs="+", required=True, help="e.g. 1x40 8x500")
    parser.add_argument("--decoding", type=int, nargs="+", default=[], help="numbers of requests that decode")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--out", type=Path, required=True, help="CSV file of the engines' starts")
    options = parser.parse_args()
    engines = [Engine(name, arguments, options.out) for name, arguments in json.loads(options.engines).items()]
    for requests, context in options.prompts:
        for _ in range(options.rounds):
            for engine in engines:
                names = [engine.add(context, None) for _ in range(requests)]
                engine.step()
                engine.abort(names)
    for requests in options.decoding:
        names = [[engine.add(500, None) for _ in range(requests)] for engine in engines]
        for engine in engines:
            engine.admitted()
        for _ in range(options.rounds):
            for engine in engines:
                engine.step()
        for engine, of_engine in zip(engines, names, strict=True):
            engine.abort(of_engine)


if __name__ == "__main__":
    main()
