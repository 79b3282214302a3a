"""Dataset, verifier and metrics of the tasks in this folder.

lm-eval imports this file by path (`!function utils.NAME` in the YAML files). Answers are read and compared by
math-verify, of which lm-eval's extra ``math`` is made.
"""

import random
from pathlib import Path
from statistics import mean

import datasets
from math_verify import LatexExtractionConfig, parse, verify

BOXED = r"\boxed{"
LETTERS = "ABCD"


def local_problems(problems: str | None = None, **_) -> datasets.DatasetDict:
    """Return the problems of a JSONL file as the split ``test``; each line has ``problem`` and ``answer``.

    Args:
        problems: path of the file, from ``--metadata '{"problems": PATH}'``, by default the file of this folder.

    Raises:
        ValueError: the lines have no ``problem`` or no ``answer``.
    """
    path = problems or Path(__file__).with_name("problems.jsonl")
    dataset = datasets.load_dataset("json", data_files={"test": str(path)})
    if missing := {"problem", "answer"}.difference(dataset["test"].column_names):
        raise ValueError(f"{path}: every line needs a {' and a '.join(sorted(missing))}")
    return dataset


def multiple_choice(dataset: datasets.Dataset) -> datasets.Dataset:
    """Return GPQA's rows as ``problem`` and ``answer``, the letter of the right choice.

    The order of the choices depends on the question only, so that it is the same for all policies.
    """

    def lettered(row: dict) -> dict:
        right = row["Correct Answer"].strip()
        choices = [right, *(row[f"Incorrect Answer {i}"].strip() for i in (1, 2, 3))]
        random.Random(row["Question"]).shuffle(choices)
        listed = "\n".join(f"({letter}) {choice}" for letter, choice in zip(LETTERS, choices, strict=True))
        return {"problem": f"{row['Question'].strip()}\n\n{listed}", "answer": LETTERS[choices.index(right)]}

    return dataset.map(lettered, remove_columns=dataset.column_names)


def boxed(text: str) -> str | None:
    r"""Return what the last complete ``\boxed{...}`` of a text contains, or None if there is none that holds anything."""
    start = text.rfind(BOXED)
    while start >= 0:
        depth = 1
        for end in range(start + len(BOXED), len(text)):
            depth += (text[end] == "{") - (text[end] == "}")
            if depth == 0:
                break
        content = text[start + len(BOXED) : end] if depth == 0 else ""
        if content.strip():
            return content
        start = text.rfind(BOXED, 0, start)
    return None


def is_right(expected: str, answer: str) -> bool:
    """Return whether an answer has the expected value; neither has dollar signs around it."""
    answer = answer.strip().rstrip(".%\\ ")  # a full stop or a percent sign; math-verify would not parse it
    return verify(parse(f"${expected}$"), parse(f"${answer}$", [LatexExtractionConfig()]))


def process_results(doc: dict, results: list) -> dict[str, float]:
    """Return the metrics of one problem.

    Args:
        doc: the problem, with its ``answer``.
        results: one list with the texts of all n answers, as the filter ``take_first_k`` leaves them.

    Returns:
        ``avg_score``, the share of right answers (avg@n, an estimate of pass@1), and ``no_answer_rate``, the share
        of texts without a boxed answer, which are wrong.
    """
    (texts,) = results
    answers = [boxed(text) for text in texts]
    scores = [answer is not None and is_right(str(doc["answer"]), answer) for answer in answers]
    return {"avg_score": mean(scores), "no_answer_rate": mean(answer is None for answer in answers)}
