"""Policies that compress a prompt at its end, against kvpress 0.5.5's presses on one model in float32 (`make peers` first).

    python benchmarks/presses.py --measure tokens
    python benchmarks/presses.py --measure needles --data TEXT... --budget 256

`tokens` prints for each policy and budget how many of the kept tokens are the same, and each head that differs with the
tokens that only one of the two keeps. The exit code is 1 if tokens differ where both keep as many, or if the one that
keeps fewer tokens keeps some that the other does not.

`needles` prints the exact and partial credit of both for numbers hidden in a text, and of the dense model. kvpress
keeps all generated tokens in addition to the compressed prompt. Here they share the budget.
"""

import argparse
import statistics
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import record
import torch
from harness import DEMO_MODEL, PEER, Configuration, Engine, check_model, check_peers, engines, say

from kvpop_vllm.distill.run import load_tokenizer
from kvpop_vllm.evaluation.backends import TransformersBackend
from kvpop_vllm.evaluation.examples import NEW_TOKENS, credit
from kvpop_vllm.evaluation.haystack import sentences
from kvpop_vllm.evaluation.policies import training_free
from kvpop_vllm.evaluation.retrieval import MEASURES, answers, make_examples
from kvpop_vllm.evaluation.tasks import CHARACTERS

POLICIES = ("snapkv", "pyramidkv", "adakv")
WINDOW = 32


def main() -> int:
    """Run the comparison and return its exit code."""
    parser = record.parser_of(__doc__)
    parser.add_argument("--measure", choices=["tokens", "needles"], default="tokens", help="what is compared")
    parser.add_argument("--model", default=str(DEMO_MODEL))
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=list(POLICIES))
    parser.add_argument("--length", type=int, default=2048, help="tokens of a prompt, and of its answer")
    parser.add_argument("--budget", type=int, nargs="+", default=[256, 512])
    parser.add_argument(
        "--data", nargs="+", default=[str(record.ROOT / "tests/data/hamlet.txt")], help="text of prompts"
    )
    parser.add_argument("--needles", type=int, default=20, help="prompts with a needle")
    parser.add_argument("--digits", type=int, default=7, help="of each needle's number")
    options = parser.parse_args()
    if options.measure == "tokens" and len(options.data) > 1:
        parser.error("tokens are compared on one text: give one file to --data")
    check_model(options)
    check_peers()
    settings = {"command": PEER, "dtype": "float32", "threads": torch.get_num_threads()}
    backend = TransformersBackend(options.model, torch.float32, options.length + 1)
    with kvpress(argparse.Namespace(**vars(options) | settings), settings) as press:
        return {"tokens": compare_tokens, "needles": compare_needles}[options.measure](backend, press, options)


@contextmanager
def kvpress(options, settings: dict) -> Iterator[Engine]:
    """Yield a process that runs kvpress on the model in float32; exit with a message if it dies or cannot run."""
    with engines(options, [Configuration("kvpress", settings=settings)]) as started:
        (press,) = started.values()
        press.ask("start")
        yield press


def compare_tokens(backend: TransformersBackend, press: Engine, options) -> int:
    """Compare the tokens kept at the end of one prompt; return the exit code."""
    text = Path(options.data[0]).read_text()
    tokens, wrong = load_tokenizer(options.model)(text).input_ids[: options.length], 0
    for policy in options.policies:
        for budget in options.budget:
            resolved = training_free(policy).resolve(backend.shape, budget, 0, WINDOW)
            ours = backend.held(resolved, torch.tensor(tokens))
            (theirs,) = press.ask("compress", prompts=[tokens], policy=policy, budget=budget, window=WINDOW)["kept"]
            wrong += count_wrong(f"{policy}, B = {budget}", ours, theirs)
    return int(wrong > 0)


def count_wrong(name: str, ours: torch.Tensor, theirs: list) -> int:
    """Print the differences and return the number of tokens that count as wrong.

    These are tokens that differ where both keep as many, and tokens that the smaller set has alone.

    Args:
        name: policy and budget.
        ours: ``[layers, H, S]`` booleans, tokens kept by our policy.
        theirs: positions kept by kvpress, per layer and head.
    """
    total, shared, their_total, wrong = 0, 0, 0, 0
    for layer, heads in enumerate(theirs):
        for head, their_tokens in enumerate(map(set, heads)):
            our_tokens = set(ours[layer, head].nonzero().flatten().tolist())
            total, their_total = total + len(our_tokens), their_total + len(their_tokens)
            shared += len(our_tokens & their_tokens)
            smaller, larger = sorted((our_tokens, their_tokens), key=len)
            wrong += len(smaller - larger)
            if our_tokens != their_tokens and len(our_tokens) == len(their_tokens):  # else those of the smaller count
                ours_only, theirs_only = sorted(our_tokens - their_tokens), sorted(their_tokens - our_tokens)
                say(f"{name}, layer {layer}, head {head}: only ours {ours_only}, only theirs {theirs_only}")
    say(f"{name}: we keep {total} tokens, kvpress {their_total}, {shared} of them the same")
    return wrong


def compare_needles(backend: TransformersBackend, press: Engine, options) -> int:
    """Print one line for the dense model, and two for each policy and budget; return 0."""
    tokenizer = load_tokenizer(options.model)
    text = sentences(options.data, "all", CHARACTERS * options.length)
    examples = make_examples(
        ["needle"], tokenizer, text, options.length, options.needles, seed=0, digits=options.digits
    )

    def ours(resolved) -> list[dict]:
        with backend.start(resolved) as run:
            return list(answers(run, tokenizer, examples))

    report("dense", ours(None))
    prompts = [example.prompt for example in examples]
    common = {"window": WINDOW, "new": NEW_TOKENS["needle"], "stop": tokenizer.eos_token_id}
    for policy in options.policies:
        for budget in options.budget:
            name = f"{policy}, B = {budget}"
            report(f"{name}, ours", ours(training_free(policy).resolve(backend.shape, budget, 0, WINDOW)))
            replies = press.ask("compress", prompts=prompts, policy=policy, budget=budget, **common)["answers"]
            texts = [tokenizer.decode(reply, skip_special_tokens=True) for reply in replies]
            credits = [vars(credit(e.expected, text)) for e, text in zip(examples, texts, strict=True)]
            report(f"{name}, kvpress", credits)
    return 0


def report(name: str, credits: list[dict]) -> None:
    """Print the mean credit of one run."""
    means = {measure: statistics.mean(answer[measure] for answer in credits) for measure in MEASURES}
    say(f"{name}: " + ", ".join(f"{measure} {value:.2f}" for measure, value in means.items()))


if __name__ == "__main__":
    sys.exit(main())
