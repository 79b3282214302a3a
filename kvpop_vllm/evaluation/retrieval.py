"""Retrieval: answers generated under a policy to questions about a prompt.

Bad input raises a :class:`~kvpop_vllm.config.ConfigError` that names what to change.
"""

from collections.abc import Iterator

from kvpop_vllm.evaluation.backends import Run
from kvpop_vllm.evaluation.examples import NEW_TOKENS, Example, credit, make_example

MEASURES = ("exact", "partial")


def make_examples(
    kinds: list[str], tokenizer, sentences: list[str], length: int, count: int, *, seed: int, digits: int
) -> list[Example]:
    """Return ``count`` examples of each kind, single needles at evenly spaced depths.

    Prompt and answer together have at most ``length`` tokens.
    """
    return [
        make_example(
            kind,
            tokenizer,
            sentences,
            length - NEW_TOKENS[kind],
            seed=f"{seed}/{length}/{i}",
            # in the middle of equal parts, so that no needle stands at an end
            depth=(i + 0.5) / count,
            digits=digits,
        )
        for kind in kinds
        for i in range(count)
    ]


def answers(run: Run, tokenizer, examples: list[Example]) -> Iterator[dict]:
    """Yield one record for each example.

    A record has ``kind, example, unit`` (the same), ``tokens`` of the prompt, ``chat, depth, expected, answer, exact,
    partial`` (:class:`kvpop_vllm.evaluation.examples.Credit`).
    """
    stop = {tokenizer.eos_token_id} - {None}
    numbers: dict[str, int] = {}
    for example in examples:
        (answer_tokens,) = run.generate([example.prompt], NEW_TOKENS[example.kind], stop)
        answer = tokenizer.decode(answer_tokens, skip_special_tokens=True)
        number = numbers[example.kind] = numbers.get(example.kind, -1) + 1
        facts = {"kind": example.kind, "example": number, "unit": number, "tokens": len(example.prompt)}
        facts |= {"chat": example.chat, "depth": example.depth, "expected": list(example.expected), "answer": answer}
        yield facts | vars(credit(example.expected, answer))
