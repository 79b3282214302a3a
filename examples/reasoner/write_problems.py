"""Write problems with worked solutions as text to train on, or to calibrate on: `kvpop distill --data FILE.jsonl`.

python examples/reasoner/write_problems.py runs/problems.jsonl --kinds programs --count 4000
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from kvpop_vllm.evaluation.problems import KINDS, SEEDS, make_problem


def main() -> None:
    """Write one record with a prompt and a response for each problem."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--split", choices=("train", "validation"), default="train", help="seeds of the problems")
    parser.add_argument("--count", type=int, default=4000, help="problems of each kind")
    parser.add_argument("--size", type=int, help="steps of a problem (default: the kind's own)")
    options = parser.parse_args()
    options.file.parent.mkdir(parents=True, exist_ok=True)
    with options.file.open("w") as file:
        for seed in SEEDS[options.split][: options.count]:
            for kind in options.kinds:
                problem = make_problem(kind, seed, options.size)
                file.write(json.dumps({"prompt": problem.prompt, "response": problem.solution}) + "\n")


if __name__ == "__main__":
    main()
