"""Problems that take long written steps, with worked solutions and verifiers (`kvpop eval --task reasoning`).

A prompt states facts, and the solution writes one line per step. Facts that are needed late stand in earlier lines of
the solution, not in the prompt. All texts are words with a space between them, and numbers are written digit by digit.
Lines are numbered by words of their own, and a prompt has them in any order, so that a small model learns to find the
next one by its number and not by its place.

============  ==================================================================================
kind          what is needed late
============  ==================================================================================
``programs``  the value of any earlier variable, written once
``ledgers``   the latest of many values of an account
``sorting``   the list of the line before, and at the end the first number of every line
============  ==================================================================================

``sorting`` is `number_sorting` of reasoning-gym (https://github.com/open-thought/reasoning-gym), with its verifier.

Bad input raises a :class:`~kvpop_vllm.config.ConfigError` that names what to change.
"""

import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

from kvpop_vllm.config import ConfigError

NAMES = tuple(map("".join, product("bdfghjklmnprstvz", "aeiou")))
"""Names of variables and accounts, one word each."""
LINES = tuple(f"#{number}" for number in range(1, 100))
"""Numbers of lines, one word each."""
WORDS = (
    *"0123456789+=:;,",
    *NAMES,
    *"let run ask work answer end sort ascending descending first left".split(),
    *LINES,
)
"""Every word of every prompt and solution."""
SEEDS = {"train": range(0, 10**9), "validation": range(10**9, 2 * 10**9), "test": range(2 * 10**9, 3 * 10**9)}
"""Seeds of problems to train on, to choose settings with, and to report."""
DRAW_SIZE = 10_000
"""Problems of each kind that a draw of a split has. Draws are numbered, and share none."""
CONSTANTS, ACCOUNTS, ASKED = 8, 8, 4
"""Constants of a program, accounts of a ledger, and names in questions about either."""


@dataclass(frozen=True)
class Problem:
    """Problem with a worked solution.

    Attributes:
        kind: name in :data:`KINDS`.
        size: number of steps.
        seed: seed of all draws.
        prompt: words of the prompt.
        solution: words of the worked solution, the last of which is ``end``.
        answers: words of each single answer, as they stand in the solution's last line.
        verify: returns whether the words after ``answer`` are right.
    """

    kind: str
    size: int
    seed: int
    prompt: str
    solution: str
    answers: tuple[str, ...]
    verify: Callable[[str], bool]


class Verdict(NamedTuple):
    """Judgement of a generated solution.

    Attributes:
        exact: True if the verifier accepts the final answers.
        answered: True if there is a final answer that ends.
        before_error: share of the worked solution's words before the first that differs.
        right: share of the single answers that are right.
    """

    exact: bool
    answered: bool
    before_error: float
    right: float


class Kind(NamedTuple):
    """Kind of problem.

    Attributes:
        make: ``(draw, size, seed) -> (prompt, solution, answers, verify)``.
        size: default number of steps, whose solution has 1,000 to 1,300 words.
        largest: maximum number of steps.
    """

    make: Callable[[random.Random, int, int], tuple[str, str, list[str], Callable[[str], bool]]]
    size: int
    largest: int


def make_problem(kind: str, seed: int, size: int | None = None) -> Problem:
    """Return the problem of a kind, size and seed."""
    if kind not in KINDS:
        raise ConfigError(f"unknown kind of problem {kind!r}: choose from {', '.join(KINDS)}")
    size, largest = KINDS[kind].size if size is None else size, KINDS[kind].largest
    if not 1 <= size <= largest:
        raise ConfigError(f"a problem of kind {kind!r} has 1 to {largest} steps, not {size}")
    prompt, steps, answers, verify = KINDS[kind].make(random.Random(f"{kind}/{size}/{seed}"), size, seed)
    solution = f"{steps} {' '.join(answers)} end"
    return Problem(kind, size, seed, prompt, solution, tuple(answers), verify)


def judge(problem: Problem, text: str) -> Verdict:
    """Judge a generated solution, with or without ``end``."""
    written, expected = text.split(), problem.solution.split()
    place = next((i for i, (a, b) in enumerate(zip(written, expected, strict=False)) if a != b), None)
    place = min(len(written), len(expected)) if place is None else place
    steps, separator, final = " ".join(written).rpartition("answer ")
    # a blank, so that a final "end" is found too
    final, ended, _ = f"{final} ".partition("end ")
    words, right, start = final.split(), 0, 0
    for answer in problem.answers:
        size = len(answer.split())
        right += " ".join(words[start : start + size]) == answer
        start += size
    exact = bool(separator) and problem.verify(final.strip())
    return Verdict(
        exact, bool(separator and ended), place / len(expected), right / len(problem.answers) if separator else 0.0
    )


def _digits(number: int) -> str:
    return f"{number // 10} {number % 10}"


def _addition(a: int, b: int) -> str:
    """Return the written addition of two two-digit numbers modulo 100: units, then tens with the carry."""
    units = a % 10 + b % 10
    tens = a // 10 + b // 10 + units // 10
    return f"{a % 10} + {b % 10} = {_digits(units)} , {a // 10} + {b // 10} + {units // 10} = {_digits(tens)}"


def _ask(draw: random.Random, assignments: str, lines: list[str], steps: list[str], asked_values: dict[str, int]):
    """Return the problem that asks for some values at the end. See :attr:`Kind.make`."""
    last, answers = LINES[len(lines)], [f"{name} {_digits(value)}" for name, value in asked_values.items()]
    draw.shuffle(lines)
    prompt = f"let {assignments} ; run {' '.join(lines)} {last} ask {' '.join(asked_values)} work"
    expected = " ".join(answers).split()
    return prompt, f"{' '.join(steps)} {last} answer", answers, lambda text: text.split() == expected


def programs(draw: random.Random, size: int, seed: int):
    """Return a program: each line's variable is the sum modulo 100 of two earlier ones."""
    names = draw.sample(NAMES, CONSTANTS + size)
    values = {name: draw.randrange(100) for name in names[:CONSTANTS]}
    prompt = " ; ".join(f"{name} {_digits(value)}" for name, value in values.items())
    lines, steps = [], []
    for number, name in enumerate(names[CONSTANTS:]):
        a, b = draw.sample(names[: CONSTANTS + number], 2)
        line, x, y = f"{LINES[number]} {name} = {a} {b}", values[a], values[b]
        values[name] = (x + y) % 100
        lines.append(line)
        steps.append(f"{line} : {a} {_digits(x)} {b} {_digits(y)} , {_addition(x, y)} , {name} {_digits(values[name])}")
    names_asked = draw.sample(names[CONSTANTS:], min(ASKED, size))
    return _ask(draw, prompt, lines, steps, {name: values[name] for name in names_asked})


def ledgers(draw: random.Random, size: int, seed: int):
    """Return a ledger: each line adds an amount to an account modulo 100."""
    accounts = draw.sample(NAMES, ACCOUNTS)
    values = {name: draw.randrange(100) for name in accounts}
    prompt = " ; ".join(f"{name} {_digits(value)}" for name, value in values.items())
    lines, steps = [], []
    for number in range(size):
        name, amount = draw.choice(accounts), draw.randrange(100)
        line, x = f"{LINES[number]} {name} + {_digits(amount)}", values[name]
        values[name] = (x + amount) % 100
        lines.append(line)
        steps.append(f"{line} : {name} {_digits(x)} , {_addition(x, amount)} , {name} {_digits(values[name])}")
    return _ask(draw, prompt, lines, steps, {name: values[name] for name in draw.sample(accounts, ASKED)})


def sorting(draw: random.Random, size: int, seed: int):
    """Return a list to sort: each line names the next number and writes the others out again."""
    try:
        from reasoning_gym.algorithmic.number_sorting import NumberSortingConfig, NumberSortingDataset
    except ImportError as error:
        raise ConfigError("problems of kind 'sorting' need reasoning-gym: pip install 'kvpop-vllm[distill]'") from error
    sizes = {"min_numbers": size, "max_numbers": size, "min_decimals": 0, "max_decimals": 0}
    gym = NumberSortingDataset(NumberSortingConfig(**sizes, min_value=0, max_value=99, seed=seed, size=1))
    entry = gym[0]
    left = [int(float(number)) for number in entry["metadata"]["original_numbers"]]
    direction = entry["metadata"]["direction"]
    prompt = f"sort {direction} {' , '.join(map(_digits, left))} work"
    answers, steps = [], []
    while left:
        number = (min if direction == "ascending" else max)(left)
        left.remove(number)
        answers.append(_digits(number))
        steps.append(f"first {answers[-1]} left {' , '.join(map(_digits, left))} ;")

    def verify(text: str) -> bool:
        # reasoning-gym's verifier compares decimals, such as 5.0
        numbers = [f"{int(a + b)}.0" for a, b in re.findall(r"(\d) (\d)", text)]
        return gym.score_answer(str(numbers), entry) == 1.0

    return prompt, " ".join([*steps, "answer"]), answers, verify


KINDS = {
    "programs": Kind(programs, 34, len(NAMES) - CONSTANTS),
    "ledgers": Kind(ledgers, 36, len(LINES) - 1),
    "sorting": Kind(sorting, 25, 100),
}
"""Kinds of problems by name."""
