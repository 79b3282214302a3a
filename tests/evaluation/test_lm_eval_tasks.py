"""The tasks for lm-eval: verifier, metrics, and what every YAML file makes of a row of its dataset."""

import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest

REASON = "needs lm-eval: `make lm-eval` installs it"
datasets = pytest.importorskip("datasets")
pytest.importorskip("math_verify", reason=REASON)
tasks = pytest.importorskip("lm_eval.tasks", reason=REASON)

FOLDER = Path(__file__).parents[2] / "examples" / "lm_eval"
HUB = sorted(path.stem for path in FOLDER.glob("*.yaml") if "local" not in path.stem)
MATHS = {"problem": ["What is 6 * 7?"], "answer": ["42"], "year": ["2024"]}
GPQA = {
    "Question": ["Which is a noble gas?", "Which is a metal?"],
    "Correct Answer": ["argon\n", "iron"],
    "Incorrect Answer 1": ["oxygen", "neon"],
    "Incorrect Answer 2": ["carbon", "sulphur"],
    "Incorrect Answer 3": ["iron", "iodine"],
}


@pytest.fixture(scope="module")
def utils():
    return SimpleNamespace(**runpy.run_path(str(FOLDER / "utils.py")))


@pytest.mark.parametrize(
    "text, inside",
    [
        (r"so \boxed{42}.", "42"),
        (r"\boxed{1} no, \boxed{42}", "42"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\text{a \{set\}}} then", r"\text{a \{set\}}"),
        (r"\boxed{7} and then \boxed{\frac{1}{2", "7"),  # cut off in the last one
        (r"\boxed{7} written as \boxed{}", "7"),
        (r"\boxed{ }", None),
        (r"\boxed 42", None),
        ("the answer is 42", None),
        ("", None),
    ],
)
def test_the_last_whole_box_is_the_answer(utils, text, inside):
    assert utils.boxed(text) == inside


RIGHT = {
    "42": ["42", "042", " 42. ", "x = 42", r"42\text{ cm}", *r"42\% \text{42} 42^\circ \$42 \left(42\right)".split()],
    "042": ["42"],
    "1234": ["1,234"],
    "1000": ["10^3"],
    r"\frac{1}{2}": ["0.5", r"\dfrac12"],
    r"9\sqrt{23}": [r"9 \sqrt{23}"],
    r"\{1,2\}": ["2, 1"],
    "(1,2)": ["(1, 2)"],
    "B": [r"\text{B}", "(B)"],
}
WRONG = {
    "42": ["41", "-42", "420", "4 2", "42, 43", r"42\text{ or }43", "forty-two", "", ".", r"\frac{"],
    "(1,2)": ["(2,1)"],
    r"\frac{2}{3}": ["0.67"],
    "B": ["C", "A, B"],
}
"""Equal answers and others, by the expected one."""


@pytest.mark.parametrize("right, answers", [(True, RIGHT), (False, WRONG)], ids=["right", "wrong"])
def test_equal_answers_are_right_and_others_wrong(utils, right, answers):
    for expected, texts in answers.items():
        assert [utils.is_right(expected, text) for text in texts] == [right] * len(texts), expected


def test_metrics_are_means_over_the_answers_of_a_problem(utils):
    texts = [rf"\boxed{{{answer}}}" for answer in ("42", "41", "", "0")]
    texts += [r"it is 42", r"hence \boxed{42.}", r"\boxed{42", ""]
    assert utils.process_results({"answer": 42}, [texts]) == {"avg_score": 2 / 8, "no_answer_rate": 4 / 8}


def test_choices_are_shuffled_by_the_question_alone(utils):
    rows = utils.multiple_choice(datasets.Dataset.from_dict(GPQA))
    assert rows.column_names == ["problem", "answer"]
    turned = utils.multiple_choice(datasets.Dataset.from_dict({name: column[::-1] for name, column in GPQA.items()}))
    assert list(turned)[::-1] == list(rows)
    for row, right in zip(rows, ("argon", "iron"), strict=True):
        assert f"\n({row['answer']}) {right}" in row["problem"] and row["problem"].count("\n(") == 4


def test_the_orders_of_choices_differ(utils):
    many = {name: [f"{column[0]} {i}" for i in range(64)] for name, column in GPQA.items()}
    letters = [row["answer"] for row in utils.multiple_choice(datasets.Dataset.from_dict(many))]
    assert all(8 <= letters.count(letter) <= 24 for letter in "ABCD")


def load(name: str, **metadata):
    """Return a task; lm-eval's own tasks are left out, which would take seconds to index."""
    manager = tasks.TaskManager(include_path=str(FOLDER), include_defaults=False, metadata=metadata)
    return tasks.get_task_dict([name], manager)[name]


@pytest.mark.parametrize("name", HUB)
def test_a_task_makes_prompts_and_scores_of_its_dataset(monkeypatch, name):
    """The Hub's rows are written by hand here, with the columns of the published datasets."""
    columns, options = GPQA if "gpqa" in name else MATHS, {}

    def load_dataset(path, name=None, **_):
        options.update(path=path, name=name)
        return datasets.DatasetDict(train=datasets.Dataset.from_dict(columns))

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    task = load(name)
    published = {
        "aime2024": "simplescaling/aime24_nofigures",
        "aime2025": "simplescaling/aime25_nofigures",
        "hmmt_202502": "MathArena/hmmt_feb_2025",
        "hmmt_202511": "MathArena/hmmt_nov_2025",
        "gpqa_diamond": "Idavidrein/gpqa",
    }
    (path,) = (path for part, path in published.items() if part in name)
    assert options == {"path": path, "name": "gpqa_diamond" if "gpqa" in name else None}
    doc = list(task.test_docs())[0]
    prompt = task.doc_to_text(doc)
    assert prompt.startswith(columns["Question" if "gpqa" in name else "problem"][0]) and r" \boxed{} " in prompt
    assert ("from 0 to 999" in prompt) == ("aime" in name)
    sampled = {"do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.0, "max_gen_toks": 15360}
    assert task.config.generation_kwargs == sampled | {"until": [], "seed": None}
    repeats = 16 if "agg16" in name else 8
    assert task.config.repeats == repeats
    right = rf"\boxed{{{task.doc_to_target(doc)}}}"
    (texts,) = task._filters[0].filters[0]().apply([[right] + ["?"] * repeats], [doc])
    assert task.process_results(doc, [texts]) == {"avg_score": 1 / repeats, "no_answer_rate": 1 - 1 / repeats}


def test_local_problems_come_from_any_file(tmp_path):
    assert len(load("custom_local_agg8_verify_instruct").test_docs()) == 4
    file = tmp_path / "own.jsonl"
    file.write_text('{"problem": "Name a number.", "answer": 5}\n')
    (doc,) = load("custom_local_agg8_verify_instruct", problems=str(file)).test_docs()
    assert doc == {"problem": "Name a number.", "answer": 5}
    file.write_text('{"question": "Name a number.", "answer": 5}\n')
    with pytest.raises(ValueError, match=f"^{file}: every line needs a problem$"):
        load("custom_local_agg8_verify_instruct", problems=str(file))
