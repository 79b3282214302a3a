"""Reasoning: problems that a model solves in long written steps under a policy (`kvpop eval --task reasoning`).

Bad input raises a :class:`~kvpop_vllm.config.ConfigError` that names what to change.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from kvpop_vllm.config import ConfigError
from kvpop_vllm.evaluation.backends import GREEDY, Run, Sampling
from kvpop_vllm.evaluation.examples import prompt_ids
from kvpop_vllm.evaluation.problems import DRAW_SIZE, SEEDS, Problem, judge, make_problem

MEASURES = ("exact", "right", "before_error", "answered", "written")
ROOM = 1.1
"""Maximum tokens of a solution, as a multiple of the longest worked one."""


class Question(NamedTuple):
    """Problem with its prompt.

    Attributes:
        problem: see :class:`kvpop_vllm.evaluation.problems.Problem`.
        prompt: token ids.
        worked: tokens of the worked solution.
    """

    problem: Problem
    prompt: list[int]
    worked: int


def make_questions(
    tokenizer, kinds: Sequence[str], count: int, split: str, size: int | None = None, seed: int = 0
) -> list[Question]:
    """Return the first ``count`` problems of each kind of a split's draw.

    Args:
        tokenizer: the model's tokenizer.
        kinds: see :data:`kvpop_vllm.evaluation.problems.KINDS`.
        count: number of problems of each kind.
        split: see :data:`kvpop_vllm.evaluation.problems.SEEDS`.
        size: steps of each problem, None for the kind's default.
        seed: number of the draw. Draws share no problem.
    """
    if split not in SEEDS:
        raise ConfigError(f"--task reasoning has problems of {', '.join(SEEDS)}, not {split!r}: change --split")
    draws = len(SEEDS[split]) // DRAW_SIZE
    if count > DRAW_SIZE or not 0 <= seed < draws:
        raise ConfigError(
            f"problems have seeds 0 to {draws - 1} and at most {DRAW_SIZE} --rows: change --seed or --rows"
        )
    questions = []
    for kind in kinds:
        for number in SEEDS[split][seed * DRAW_SIZE :][:count]:
            problem = make_problem(kind, number, size)
            worked = tokenizer(problem.solution, add_special_tokens=False, verbose=False)["input_ids"]
            if tokenizer.decode(worked).split() != problem.solution.split():
                raise ConfigError("the model's tokenizer cannot write the solutions: choose another model")
            questions.append(Question(problem, prompt_ids(tokenizer, problem.prompt), len(worked)))
    return questions


def solve(
    run: Run,
    tokenizer,
    questions: Sequence[Question],
    *,
    new: int,
    samples: int = 1,
    sampling: Sampling = GREEDY,
    seed: int = 0,
    batch: int = 16,
) -> Iterator[dict]:
    """Yield a record of every sample of every problem, in batches as they are ready.

    Args:
        run: the model under a policy.
        tokenizer: the model's tokenizer.
        questions: problems.
        new: maximum tokens of a solution.
        samples: n, solutions of each problem.
        sampling: see :class:`kvpop_vllm.evaluation.backends.Sampling`.
        seed: seed of all draws. Each sample of each problem has its own.
        batch: maximum solutions that are written at once.

    Yields:
        Records with ``kind``, ``unit`` (the problem's seed), ``size``, ``sample``, ``tokens`` of the prompt,
        ``written`` tokens of the solution, ``answer`` and the fields of
        :class:`kvpop_vllm.evaluation.problems.Verdict`.
    """
    # a tokenizer may have no such token
    stop = {tokenizer.eos_token_id} - {None}
    jobs = [(question, sample) for question in questions for sample in range(samples)]
    for a in range(0, len(jobs), batch):
        batch_jobs = jobs[a : a + batch]
        # hash() of integers is the same in every process
        seeds = [hash((seed, question.problem.seed, sample)) % 2**63 for question, sample in batch_jobs]
        texts = run.generate([question.prompt for question, _ in batch_jobs], new, stop, sampling, seeds)
        for (question, sample), tokens in zip(batch_jobs, texts, strict=True):
            problem = question.problem
            text = tokenizer.decode(tokens, skip_special_tokens=True)
            # generate() leaves the stop token out, and a solution that is shorter than allowed has ended
            if len(tokens) < new:
                text += " end"
            record = {"kind": problem.kind, "unit": problem.seed, "size": problem.size, "sample": sample}
            record |= {"tokens": len(question.prompt), "written": len(tokens)}
            yield record | {"answer": text.rpartition("answer ")[2]} | judge(problem, text)._asdict()
