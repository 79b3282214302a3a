"""Retrieval tasks in the style and wording of RULER (Hsieh et al. 2024, arXiv:2404.06654).

They are generated from text and a seed. RULER's values have seven digits. Here they have four unless asked
otherwise, because small models write numbers digit by digit. Common words appear 10 times and the others once
(RULER: 30 and 3), so that they fit short prompts.

Bad input raises a :class:`~kvpop_vllm.config.ConfigError` that names what to change.
"""

import random
import re
import string
from collections.abc import Callable
from dataclasses import dataclass

from kvpop_vllm.config import ConfigError

ADJECTIVES = (
    "amber brave calm daring eager fancy gentle honest jolly keen lively mellow noble odd proud quick rustic silent tidy vivid"
).split()
NOUNS = (
    "anchor basket candle dolphin engine falcon guitar harbor island jacket kettle lantern meadow needle orchard pepper quilt"
    " river saddle tunnel"
).split()
SHORTEST = 0.9
"""Minimum share of the requested length that a prompt fills. A shorter prompt means that the text ran out."""


@dataclass(frozen=True)
class Example:
    """Prompt with the expected content of its answer.

    Attributes:
        kind: see :data:`KINDS`.
        prompt: token ids.
        expected: strings that must all occur in the answer.
        chat: True if the prompt is in the tokenizer's chat format, False if the tokenizer has none.
        depth: depth of the (first) needle as a share of the sentences, None without a needle.
    """

    kind: str
    prompt: list[int]
    expected: tuple[str, ...]
    chat: bool
    depth: float | None


@dataclass(frozen=True)
class Question:
    """Question before its haystack is cut.

    Attributes:
        body: ``body(n)`` returns the question with n units of haystack.
        units: maximum n.
        answer: beginning of the model's answer.
        expected: see :class:`Example`.
        depth: see :class:`Example`.
    """

    body: Callable[[int], str]
    units: int
    answer: str
    expected: tuple[str, ...]
    depth: float | None = None


def make_example(
    kind: str, tokenizer, sentences: list[str], length: int, *, seed: str, depth: float, digits: int
) -> Example:
    """Return an example whose prompt has at most ``length`` tokens, and nearly as many.

    Args:
        kind: of :data:`KINDS`.
        tokenizer: the model's tokenizer.
        sentences: sentences of the haystack. It begins at a sentence drawn by the seed.
        length: maximum tokens of the prompt.
        seed: seed of all draws.
        depth: depth of a single needle, from 0 to 1.
        digits: digits of a needle's number.
    """
    # a string, which random.Random hashes alike in every process
    draw = random.Random(f"{kind}/{seed}")
    first = draw.randrange(len(sentences))
    question = KINDS[kind](draw, sentences[first:] + sentences[:first], depth, digits)

    def ids(units: int) -> list[int]:
        return prompt_ids(tokenizer, question.body(units), question.answer)

    if len(ids(0)) > length:
        raise ConfigError(
            f"a prompt of {length} tokens has no room for {kind!r}, which takes {len(ids(0))} without text: raise --length"
        )
    # doubling, then bisection: a prompt grows with its units
    fits, too_many = 0, 1
    while too_many <= question.units and len(ids(too_many)) <= length:
        fits, too_many = too_many, 2 * too_many
    too_many = min(too_many, question.units + 1)
    while too_many - fits > 1:
        middle = (fits + too_many) // 2
        fits, too_many = (middle, too_many) if len(ids(middle)) <= length else (fits, middle)
    prompt = ids(fits)
    if fits == question.units and len(prompt) < SHORTEST * length:
        raise ConfigError(
            f"the text is too short for {kind!r} at {length} tokens, it fills {len(prompt)}: give more text"
        )
    return Example(kind, prompt, question.expected, bool(tokenizer.chat_template), question.depth)


def prompt_ids(tokenizer, body: str, answer: str = "") -> list[int]:
    """Return the token ids of the user's turn and the beginning of the model's turn.

    Without a chat template the two are concatenated.
    """
    text = f"{body}{answer}"
    if tokenizer.chat_template:
        turn = [{"role": "user", "content": body}]
        text = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True) + answer.lstrip()
    # a chat template writes the special tokens itself
    return tokenizer(text, add_special_tokens=not tokenizer.chat_template, verbose=False)["input_ids"]


def _hidden(sentences: list[str], needles: list[str], depths: list[float]) -> str:
    """Return the sentences with each needle at its depth. Needles of one depth keep their order."""
    passages, places = list(sentences), [int(depth * len(sentences)) for depth in depths]
    for place, needle in reversed(sorted(zip(places, needles, strict=True), key=lambda pair: pair[0])):
        passages.insert(place, needle)  # from the end, so that needles of one place keep their order
    return " ".join(passages)


def _keys(draw: random.Random, count: int) -> list[str]:
    names = [f"{adjective}-{noun}" for adjective in ADJECTIVES for noun in NOUNS]
    return draw.sample(names, count)


def _numbers(draw: random.Random, count: int, digits: int) -> list[str]:
    return [str(n) for n in draw.sample(range(10 ** (digits - 1), 10**digits), count)]


def _needles(draw, sentences, depth, digits, count: int) -> Question:
    keys, values = _keys(draw, count), _numbers(draw, count, digits)
    lines = [f"One of the special magic numbers for {k} is: {v}." for k, v in zip(keys, values, strict=True)]
    depths = [depth, *(draw.random() for _ in lines[1:])]

    def body(n):
        return (
            "A special magic number is hidden within the following text. Make sure to memorize it. I will quiz you about the"
            f" number afterwards.\n{_hidden(sentences[:n], lines, depths)}\nWhat is the special magic number for {keys[0]}"
            " mentioned in the provided text?"
        )

    answer = f" The special magic number for {keys[0]} mentioned in the provided text is"
    return Question(body, len(sentences), answer, (values[0],), depth)


def needle(draw: random.Random, sentences: list[str], depth: float, digits: int) -> Question:
    """Return RULER's niah_single with numbers in text."""
    return _needles(draw, sentences, depth, digits, 1)


def multikey(draw: random.Random, sentences: list[str], depth: float, digits: int) -> Question:
    """Return RULER's niah_multikey_1: the question is about one needle among three with other keys and values."""
    return _needles(draw, sentences, depth, digits, 4)


def variables(draw: random.Random, sentences: list[str], depth: float, digits: int) -> Question:
    """Return RULER's variable tracking: one chain of five variables, after a short example as in RULER."""
    names = ["".join(draw.sample(string.ascii_uppercase, 5)) for _ in range(10)]
    example, name = _numbers(draw, 2, 5)
    depths = sorted(draw.random() for _ in range(5))

    def ask(chain, value, text, depths):
        links = [f"VAR {chain[0]} = {value}", *(f"VAR {b} = VAR {a}" for a, b in zip(chain, chain[1:], strict=False))]
        return (
            "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"
            f"{_hidden(text, links, depths)}\nQuestion: Find all variables that are assigned the value {value} in the text above."
        )

    def answer(value):
        return (
            " Answer: According to the chain(s) of variable assignment in the text above, 5 variables are assigned the value"
            f" {value}, they are:"
        )

    filler = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.".split(". ")
    shown = ask(names[:5], example, filler, [0, 0.2, 0.4, 0.6, 0.8]) + answer(example) + f" {' '.join(names[:5])}\n\n"
    return Question(
        lambda n: shown + ask(names[5:], name, sentences[:n], depths),
        len(sentences),
        answer(name),
        tuple(names[5:]),
        depths[0],
    )


COMMON, OFTEN = 10, 10
"""Number of common words, and how often each appears."""


def words(draw: random.Random, sentences: list[str], depth: float, digits: int) -> Question:
    """Return RULER's common words extraction, with words of the text."""
    vocabulary = dict.fromkeys(
        word.lower() for sentence in sentences for word in re.findall(r"\b[a-zA-Z]{4,10}\b", sentence)
    )
    words = list(vocabulary)
    draw.shuffle(words)
    common, uncommon = words[:COMMON], words[COMMON:]
    # drawn once, so that body(n) is the same text whenever it is called
    mixed = draw.random()

    def body(n):
        listed = common * OFTEN + uncommon[:n]
        random.Random(f"{mixed}/{n}").shuffle(listed)
        numbered = " ".join(f"{i}. {word}" for i, word in enumerate(listed, 1))
        return (
            "Below is a numbered list of words. In these words, some appear more often than others. Memorize the ones that appear"
            f" most often.\n{numbered}\nQuestion: What are the {COMMON} most common words in the above list?"
        )

    answer = f" Answer: The top {COMMON} words that appear most often in the list are:"
    return Question(body, len(uncommon), answer, tuple(common))


KINDS: dict[str, Callable[[random.Random, list[str], float, int], Question]] = {
    "needle": needle,
    "multikey": multikey,
    "variables": variables,
    "words": words,
}
"""Kind of task -> function that makes its question, ``(draw, sentences, depth, digits) -> Question``."""
NEW_TOKENS = {"needle": 16, "multikey": 16, "variables": 40, "words": 70}
"""Number of answer tokens that are generated."""


@dataclass(frozen=True)
class Credit:
    """Credit for an answer.

    Attributes:
        exact: 1 if all expected strings are named, else 0.
        partial: mean share of each expected string that is named.
    """

    exact: float
    partial: float


def credit(expected: tuple[str, ...], answer: str) -> Credit:
    """Return the credit for an answer.

    A word counts if it occurs as a whole. A number counts by the digits that it shares with the beginning of
    the best matching number of the answer, as a share of the longer number's digits.
    """
    shares = [_digits_right(e, answer) if e.isdigit() else float(_occurs(e, answer)) for e in expected]
    return Credit(float(all(share == 1 for share in shares)), sum(shares) / len(shares))


def _occurs(word: str, answer: str) -> bool:
    return re.search(rf"\b{re.escape(word)}\b", answer, re.IGNORECASE) is not None


def _digits_right(number: str, answer: str) -> float:
    best = 0.0
    # 1,000 is read as 1000
    for written in re.findall(r"\d+", re.sub(r"(?<=\d),(?=\d{3})", "", answer)):
        match = next(
            (i for i, (a, b) in enumerate(zip(number, written, strict=False)) if a != b), min(len(number), len(written))
        )
        best = max(best, match / max(len(number), len(written)))
    return best
