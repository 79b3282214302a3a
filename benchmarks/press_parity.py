"""Comparison of the tokens kept at a prompt's end with those of kvpress 0.5.5's presses.

Both run on one model in float32. Run `make peers` first, then

    python benchmarks/press_parity.py

For each policy and budget it prints how many of the kept tokens are the same, and each head that differs with the
tokens that only one of the two keeps. The exit code is 1
if tokens differ where both keep as many, or if the one that keeps fewer tokens keeps some that the other does
not.
"""

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import record
import torch
from engines import DEMO_MODEL, PEER, Engine, check_model, check_peers, engines, say

from kvpop_vllm.evaluation.backends import TransformersBackend
from kvpop_vllm.evaluation.policies import training_free

TEXT = record.ROOT / "tests" / "data" / "hamlet.txt"
POLICIES = ("snapkv", "pyramidkv", "adakv")
WINDOW = 32


def main() -> int:
    """Run the comparison and return its exit code."""
    parser = record.parser_of(__doc__)
    parser.add_argument("--model", default=str(DEMO_MODEL))
    parser.add_argument("--text", default=str(TEXT))
    parser.add_argument("--length", type=int, default=2048, help="tokens of the prompt")
    parser.add_argument("--budget", type=int, nargs="+", default=[256, 512])
    options = parser.parse_args()
    check_model(options)
    check_peers()
    from transformers import AutoTokenizer

    tokens = AutoTokenizer.from_pretrained(options.model)(open(options.text).read()).input_ids[: options.length]
    backend = TransformersBackend(options.model, torch.float32, options.length + 1)
    wrong = 0
    with kvpress(options) as press:
        for policy in POLICIES:
            for budget in options.budget:
                resolved = training_free(policy).resolve(backend.shape, budget, 0, WINDOW)
                ours = backend.held(resolved, torch.tensor(tokens))
                (theirs,) = press.ask("compress", prompts=[tokens], policy=policy, budget=budget, window=WINDOW)["kept"]
                wrong += compare(policy, budget, ours, theirs)
    return int(wrong > 0)


@contextmanager
def kvpress(options) -> Iterator[Engine]:
    """Yield a process that runs kvpress on the model in float32; exit with a message if it dies or cannot run."""
    settings = {"command": PEER, "dtype": "float32", "threads": torch.get_num_threads()}
    with engines(argparse.Namespace(**vars(options) | settings), {"kvpress": settings}) as started:
        started["kvpress"].ask("start")
        yield started["kvpress"]


def compare(policy: str, budget: int, ours: torch.Tensor, theirs: list) -> int:
    """Print the differences and return the number of tokens that count as wrong.

    These are tokens that differ where both keep as many, and tokens that the smaller set has alone.

    Args:
        policy: name of the policy.
        budget: B in tokens.
        ours: ``[layers, H, S]`` booleans, tokens kept by our policy.
        theirs: positions kept by kvpress, per layer and head.
    """
    where, total, same, other, wrong = f"{policy}, B = {budget}", 0, 0, 0, 0
    for layer, heads in enumerate(theirs):
        for h, kept in enumerate(map(set, heads)):
            mine = set(ours[layer, h].nonzero().flatten().tolist())
            total, same, other = total + len(mine), same + len(mine & kept), other + len(kept)
            smaller, larger = sorted((mine, kept), key=len)
            wrong += len(smaller - larger)
            if mine != kept and len(mine) == len(kept):  # of unequal numbers, those of the smaller are counted
                say(
                    f"{where}, layer {layer}, head {h}: only ours {sorted(mine - kept)}, only theirs {sorted(kept - mine)}"
                )
    say(f"{where}: we keep {total} tokens, kvpress {other}, {same} of them the same")
    return wrong


if __name__ == "__main__":
    sys.exit(main())
