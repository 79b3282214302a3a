"""Needles that kvpress 0.5.5's presses find beside those that our policies find, on the same prompts (`make peers` first).

    python benchmarks/press_needles.py --data TEXT... --budget 256

kvpress keeps all generated tokens beside the compressed prompt; here they share the budget. Prints the exact
and partial credit of both for each policy, and of the dense model.
"""

import statistics
import sys

import record
import torch
from engines import DEMO_MODEL, check_model, check_peers, say
from press_parity import POLICIES, WINDOW, kvpress

from kvpop_vllm.distill.run import load_tokenizer
from kvpop_vllm.evaluation.backends import TransformersBackend
from kvpop_vllm.evaluation.examples import NEW_TOKENS, credit
from kvpop_vllm.evaluation.haystack import sentences
from kvpop_vllm.evaluation.policies import training_free
from kvpop_vllm.evaluation.retrieval import MEASURES, answers, make_examples
from kvpop_vllm.evaluation.tasks import CHARACTERS


def main() -> int:
    """Print one line for the dense model and two for each policy."""
    parser = record.parser_of(__doc__)
    parser.add_argument("--model", default=str(DEMO_MODEL))
    parser.add_argument("--data", nargs="+", required=True, help="text that needles are hidden in")
    parser.add_argument("--length", type=int, default=2048, help="tokens of a prompt and its answer")
    parser.add_argument("--budget", type=int, default=256)
    parser.add_argument("--needles", type=int, default=20, help="prompts with a needle")
    parser.add_argument("--digits", type=int, default=7, help="of each needle's number")
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=list(POLICIES))
    options = parser.parse_args()
    check_model(options)
    check_peers()
    tokenizer = load_tokenizer(options.model)
    text = sentences(options.data, "all", CHARACTERS * options.length)
    examples = make_examples(
        ["needle"], tokenizer, text, options.length, options.needles, seed=0, digits=options.digits
    )
    backend = TransformersBackend(options.model, torch.float32, options.length)

    def ours(resolved) -> list[dict]:
        with backend.start(resolved) as run:
            return list(answers(run, tokenizer, examples))

    report("dense", ours(None))
    prompts = [example.prompt for example in examples]
    common = {"budget": options.budget, "window": WINDOW, "new": NEW_TOKENS["needle"], "stop": tokenizer.eos_token_id}
    with kvpress(options) as press:
        for policy in options.policies:
            report(f"{policy}, ours", ours(training_free(policy).resolve(backend.shape, options.budget, 0, WINDOW)))
            replies = press.ask("compress", prompts=prompts, policy=policy, **common)["answers"]
            texts = [tokenizer.decode(reply, skip_special_tokens=True) for reply in replies]
            credits = [vars(credit(e.expected, text)) for e, text in zip(examples, texts, strict=True)]
            report(f"{policy}, kvpress", credits)
    return 0


def report(name: str, credits: list[dict]) -> None:
    """Print the mean credit of one run."""
    means = {measure: statistics.mean(each[measure] for each in credits) for measure in MEASURES}
    say(f"{name}: " + ", ".join(f"{measure} {value:.2f}" for measure, value in means.items()))


if __name__ == "__main__":
    sys.exit(main())
