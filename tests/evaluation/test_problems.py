"""Problems with worked solutions: what they ask is right, and problems of the test are nobody's training."""

import re

import pytest

from kvpop_vllm.config import ConfigError
from kvpop_vllm.evaluation.problems import KINDS, SEEDS, WORDS, judge, make_problem


def number_of(line: str) -> int:
    """Return the number of a line of a prompt; lines are carried out in this order."""
    return int(line.split()[0])


def numbers(problem) -> dict[str, int]:
    """Return the values that the answers name."""
    return {name: int(a + b) for name, a, b in (answer.split() for answer in problem.answers)}


@pytest.mark.parametrize("kind", ["programs", "ledgers"])
@pytest.mark.parametrize("seed", range(20))
def test_lines_compute_what_python_computes(seed, kind):
    """A program's line adds two values, a ledger's line adds a number to its latest one."""
    problem = make_problem(kind, seed, 12)
    constants, lines = re.match(r"let (.*) ; run (.*) #13 ask", problem.prompt).groups()
    values = {name: int(a + b) for name, a, b in (word.split() for word in constants.split(" ; "))}
    for line in sorted(lines.split("#")[1:], key=number_of):
        _, name, _, a, b = line.split()
        values[name] = (values[a] + values[b] if kind == "programs" else values[name] + int(a + b)) % 100
    assert numbers(problem) == {name: values[name] for name in numbers(problem)}


def test_lists_are_sorted():
    pytest.importorskip("reasoning_gym")
    for seed in range(20):
        problem = make_problem("sorting", seed, 9)
        direction, letters = re.match(r"sort (\w+) (.*) work", problem.prompt).groups()
        expected = sorted(letters.split(" , "), reverse=direction == "descending")
        assert list(problem.answers) == expected and problem.verify(" ".join(expected))
        assert not problem.verify(" ".join(expected[::-1]))


@pytest.mark.parametrize("kind", KINDS)
def test_solutions_are_long_and_verified(kind):
    if kind == "sorting":
        pytest.importorskip("reasoning_gym")
    problem = make_problem(kind, SEEDS["validation"][3])
    assert 1000 <= len(problem.solution.split()) < 1300
    assert {*problem.prompt.split(), *problem.solution.split()} <= {*WORDS}
    assert judge(problem, problem.solution) == (True, True, 1.0, 1.0)


def test_a_solution_is_judged_up_to_its_first_error():
    problem = make_problem("programs", 0, 10)
    words = problem.solution.split()
    steps, _, final = problem.solution.rpartition("answer ")
    name, a, b = problem.answers[1].split()
    wrong = problem.solution.replace(f"{problem.answers[0]} {name} {a} {b}", f"{problem.answers[0]} {name} {a} x")
    verdict = judge(problem, wrong)
    assert not verdict.exact and verdict.answered and verdict.right == 0.75 and 0.9 < verdict.before_error < 1
    half = judge(problem, " ".join(words[: len(words) // 2]))
    assert half == (False, False, len(words) // 2 / len(words), 0.0)
    assert judge(problem, f"answer {final}").exact, "answers count, however they were found"
    assert not judge(problem, f"answer {final.replace(' end', '')}").answered


def test_problems_of_the_splits_differ():
    drawn = {split: {make_problem("programs", seeds[i]).prompt for i in range(200)} for split, seeds in SEEDS.items()}
    assert all(len(prompts) == 200 for prompts in drawn.values())
    assert not drawn["train"] & drawn["test"] and not drawn["validation"] & (drawn["train"] | drawn["test"])
    ranges = sorted((seeds[0], seeds[-1]) for seeds in SEEDS.values())
    assert all(before[1] < after[0] for before, after in zip(ranges, ranges[1:], strict=False))


def test_unknown_kinds_are_refused():
    with pytest.raises(ConfigError, match="choose from programs, ledgers, sorting"):
        make_problem("riddles", 0)
    for kind in KINDS:
        largest = KINDS[kind].largest
        if kind != "sorting":
            problem = make_problem(kind, 1, largest)
            assert judge(problem, problem.solution).exact
        with pytest.raises(ConfigError, match=f"{kind}' has 1 to {largest} steps, not {largest + 1}"):
            make_problem(kind, 1, largest + 1)
