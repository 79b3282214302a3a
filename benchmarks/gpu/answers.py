"""Answers of the shipped reasoner in one vLLM engine: which problems it solves, and its tokens with their margins.

The file that it writes has a record for every problem: whether the answer is exact, the tokens, and by how many nats
the first choice led the second at every token. :func:`compare` holds two files against each other.
"""

import argparse
import json
import os
from pathlib import Path

KINDS = "programs", "ledgers"
NEW = 1400
"""Maximum tokens of an answer; a worked solution has about 1,080."""
CLOSE = 0.25
"""Lead in nats below which bfloat16 may choose either token."""


def solve(arguments: dict, rows: int) -> list[dict]:
    """Solve ``rows`` test problems of each kind greedily, and return their records."""
    from vllm import LLM, SamplingParams

    from kvpop_vllm.evaluation.problems import judge
    from kvpop_vllm.evaluation.reasoning import make_questions

    engine = LLM(**arguments)
    tokenizer = engine.get_tokenizer()
    questions = make_questions(tokenizer, KINDS, rows, "test")
    sampling = SamplingParams(temperature=0, max_tokens=NEW, logprobs=2, detokenize=False)
    outputs = engine.generate([{"prompt_token_ids": question.prompt} for question in questions], sampling)
    records = []
    for question, output in zip(questions, outputs, strict=True):
        answer = output.outputs[0]
        words = [token for token in answer.token_ids if 0 <= token < len(tokenizer)]
        text = tokenizer.decode(words, skip_special_tokens=True) + (" end" if answer.finish_reason == "stop" else "")
        leads = []
        for choices in answer.logprobs:
            best = sorted((choice.logprob for choice in choices.values()), reverse=True)
            leads.append(round(best[0] - best[1], 4) if len(best) > 1 else 0.0)
        records.append(
            {"kind": question.problem.kind, "seed": question.problem.seed, "exact": judge(question.problem, text).exact}
            | {"tokens": list(answer.token_ids), "leads": leads}
        )
    return records


def compare(expected: list[dict], actual: list[dict]) -> dict:
    """Return how many answers are the same, differ from a near-tie on, or differ otherwise."""
    counts = {"same": 0, "near-tie": 0, "different": 0}
    for reference, answer in zip(expected, actual, strict=True):
        pairs = zip(reference["tokens"], answer["tokens"], strict=False)
        first = next((i for i, (token, written) in enumerate(pairs) if token != written), None)
        if first is None:
            counts["same" if len(reference["tokens"]) == len(answer["tokens"]) else "different"] += 1
        else:
            counts["near-tie" if reference["leads"][first] < CLOSE else "different"] += 1
    return counts


def main() -> None:
    """Solve the problems with the engine of the command line."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine runs in this process
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("arguments", help="arguments of vllm.LLM, as JSON")
    parser.add_argument("--rows", type=int, default=32, help="problems of each kind")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    records = solve(json.loads(options.arguments), options.rows)
    options.out.write_text("\n".join(map(json.dumps, records)) + "\n")
    print(f"{sum(record['exact'] for record in records)} of {len(records)} exact")


if __name__ == "__main__":
    main()
