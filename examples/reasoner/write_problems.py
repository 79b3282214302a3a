"""Write problems with worked solutions as text to train on, or to calibrate on: `kvpop distill --data FILE.jsonl`.

python examples/reasoner/write_problems.py runs/problems.jsonl --kinds programs --count 4000
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from kvpop_vllm.evaluation.problems import KINDS, SEEDS, make_problem
from kvpop_vllm.files import write_whole

COUNT = 4000
"""Default number of problems of each kind."""


def problems_text(kinds: Sequence[str], split: str = "train", count: int = COUNT, size: int | None = None) -> str:
    """Return JSON lines, a record with a prompt and a response for each problem.

    Args:
        kinds: kinds of problems.
        split: name of the seeds of problems.
        count: problems of each kind.
        size: steps of a problem, None for the kind's own.
    """
    problems = (make_problem(kind, seed, size) for seed in SEEDS[split][:count] for kind in kinds)
    records = ({"prompt": problem.prompt, "response": problem.solution} for problem in problems)
    return "".join(json.dumps(record) + "\n" for record in records)


def main() -> None:
    """Write the problems of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--split", choices=("train", "validation"), default="train", help="seeds of the problems")
    parser.add_argument("--count", type=int, default=COUNT, help="problems of each kind")
    parser.add_argument("--size", type=int, help="steps of a problem (default: the kind's own)")
    options = parser.parse_args()
    options.file.parent.mkdir(parents=True, exist_ok=True)
    write_whole(options.file, problems_text(options.kinds, options.split, options.count, options.size))


if __name__ == "__main__":
    main()
