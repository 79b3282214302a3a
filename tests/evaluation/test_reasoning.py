"""Reasoning: solutions are judged, counted by problem, and compared on the same problems."""

import random

import pytest

from kvpop_vllm.config import ConfigError
from kvpop_vllm.evaluation.backends import GREEDY, Sampling
from kvpop_vllm.evaluation.options import DRAWS, with_draws
from kvpop_vllm.evaluation.policies import training_free
from kvpop_vllm.evaluation.problems import SEEDS
from kvpop_vllm.evaluation.reasoning import MEASURES, make_questions, solve
from kvpop_vllm.evaluation.summaries import summarise_reasoning

COUNT = 12


class Solver:
    """Model that writes worked solutions, but the wrong last answer in every ``wrong``-th of them."""

    def __init__(self, tokenizer, questions, wrong: int):
        self.tokenizer, self.wrong, self.calls = tokenizer, wrong, []
        self.solutions = {tuple(q.prompt): (i, q.problem.solution) for i, q in enumerate(questions)}

    def generate(self, prompts, new, stop, sampling, seeds):
        assert stop == {self.tokenizer.eos_token_id}
        self.calls.append((len(prompts), sampling, tuple(seeds)))
        answers = []
        for prompt in prompts:
            i, text = self.solutions[tuple(prompt)]
            words = text.removesuffix(" end").split()
            if i % self.wrong == 0:
                words[-1] = str((int(words[-1]) + 1) % 10)
            answers.append(self.tokenizer(" ".join(words))["input_ids"][:new])
        return answers


def records_of(tokenizer, questions, wrong, new=10**6, **options):
    solver = Solver(tokenizer, questions, wrong)
    return list(solve(solver, tokenizer, questions, new=new, **options)), solver.calls


def test_solutions_are_judged(tokenizer):
    questions = make_questions(tokenizer, ["programs", "ledgers"], 4, "validation", 3)
    assert [q.problem.seed for q in questions] == [*SEEDS["validation"][:4]] * 2
    records, calls = records_of(tokenizer, questions, 2, batch=3)
    assert [count for count, _, _ in calls] == [3, 3, 2] and {sampling for _, sampling, _ in calls} == {GREEDY}
    assert [r["exact"] for r in records] == [False, True] * 4
    for record, question in zip(records, questions, strict=True):
        assert (record["kind"], record["unit"]) == (question.problem.kind, question.problem.seed)
        assert record["answered"] and record["written"] <= question.worked
        answers = len(question.problem.answers)
        assert record["right"] == pytest.approx(1 if record["exact"] else 1 - 1 / answers)
        assert record["before_error"] == 1 or 0.9 < record["before_error"] < 1 and not record["exact"]
    cut, _ = records_of(tokenizer, questions, 2, new=40)
    assert not any(r["answered"] or r["exact"] for r in cut) and all(r["before_error"] < 0.5 for r in cut)


def test_draws_share_no_problem(tokenizer):
    """The seed of `kvpop eval` has problems of its own, in every split."""
    drawn = {
        (split, seed): {
            question.problem.prompt for question in make_questions(tokenizer, ["programs"], 6, split, 2, seed)
        }
        for split in ("test", "validation")
        for seed in (0, 1, 9090)
    }
    assert all(len(prompts) == 6 for prompts in drawn.values()) and len(set.union(*drawn.values())) == 36
    for seed, count in ((-1, 2), (100_000, 2), (0, 10_001)):
        with pytest.raises(ConfigError, match="seeds 0 to 99999 and at most 10000 --rows: change --seed or --rows"):
            make_questions(tokenizer, ["programs"], count, "test", 2, seed)


def test_samples_have_seeds_of_their_own(tokenizer):
    questions = make_questions(tokenizer, ["programs"], 4, "validation", 2)
    options = {"samples": 3, "sampling": Sampling(0.6, 0.95), "batch": 5}
    records, calls = records_of(tokenizer, questions, 2, seed=1, **options)
    assert [r["sample"] for r in records] == [0, 1, 2] * 4 and {s for _, s, _ in calls} == {Sampling(0.6, 0.95)}
    seeds = [seed for _, _, call_seeds in calls for seed in call_seeds]
    assert len(set(seeds)) == 12
    assert [
        s for _, _, call_seeds in records_of(tokenizer, questions, 2, seed=1, **options)[1] for s in call_seeds
    ] == seeds
    assert [
        s for _, _, call_seeds in records_of(tokenizer, questions, 2, seed=2, **options)[1] for s in call_seeds
    ] != seeds


def test_policies_that_draw_have_several_seeds():
    specs = with_draws([training_free(name) for name in ("h2o", "random")])
    assert [(s.name, s.seed) for s in specs] == [("h2o", 0)] + [("random", i) for i in range(DRAWS)] and DRAWS >= 5


def test_the_table_compares_policies_on_the_same_problems():
    """A problem counts with the mean of its samples; intervals are a bootstrap over problems."""
    draw, records = random.Random(0), []
    chance = {"dense": 0.9, "streaming-llm": 0.2, "random": 0.6}
    for name, share in chance.items():
        for problem in range(40):
            for sample in range(5 if name == "random" else 1):
                exact = draw.random() < share
                record = dict.fromkeys(MEASURES, 0.5) | {"exact": exact, "kind": "programs", "unit": problem}
                record |= {"length": 900, "policy": name, "sample": sample, "allocated": 2**20}
                records.append(record | ({} if name == "dense" else {"budget": 99, "equal": "k", "topk": 60}))
    dense, stream, rival = summarise_reasoning(records, "streaming-llm")
    means = {name: [0.0] * 40 for name in chance}
    for r in records:
        means[r["policy"]][r["unit"]] += r["exact"] / (5 if r["policy"] == "random" else 1)
    assert [line["samples"] for line in (dense, stream, rival)] == [1, 1, 5]
    for line in (dense, stream, rival):
        assert line["problems"] == 40 and line["exact"] == pytest.approx(sum(means[line["policy"]]) / 40)
        low, high = line["exact interval"]
        assert low < line["exact"] < high and high - low < 0.35
    assert rival["of dense"] == pytest.approx(sum(means["random"]) / sum(means["dense"]))
    gained = sum(means["random"]) / 40 - sum(means["streaming-llm"]) / 40
    assert rival["difference"] == pytest.approx(gained) and rival["difference interval"][0] > 0
    assert "difference" not in stream and "of dense" not in dense
    # drawing a problem's samples apart would make the interval too narrow
    apart = summarise_reasoning([r | {"unit": 5 * r["unit"] + r["sample"]} for r in records if r["policy"] == "random"])
    width = rival["exact interval"][1] - rival["exact interval"][0]
    assert apart[0]["problems"] == 200 and apart[0]["exact interval"][1] - apart[0]["exact interval"][0] < 1.2 * width


def test_bad_questions_are_refused(tokenizer):
    with pytest.raises(ConfigError, match="--task reasoning has problems of train, validation, test, not 'all'"):
        make_questions(tokenizer, ["programs"], 2, "all")
    deaf = type("Deaf", (), {"decode": lambda *_: "", "__call__": lambda *_, **__: {"input_ids": [1]}})()
    with pytest.raises(ConfigError, match="cannot write the solutions"):
        make_questions(deaf, ["programs"], 2, "test")


def test_trainings_of_a_reference_are_paired_with_the_line():
    """The difference is that of the means, whichever of both has several trainings."""
    draw, records = random.Random(5), []
    chances = {("kvpop", 0): 0.9, ("kvpop", 1): 0.2, ("kvpop", 2): 0.3, ("h2o", 0): 0.5, ("dense", 0): 1.0}
    for (name, training), chance in chances.items():
        for problem in range(24):
            record = dict.fromkeys(MEASURES, 0.5) | {
                "kind": "programs",
                "unit": problem,
                "exact": draw.random() < chance,
            }
            record |= {"length": 900, "policy": name, "allocated": 2**20, "training": training}
            records.append(record | ({} if name == "dense" else {"budget": 99, "equal": "k", "topk": 60}))
    for against, policy in (("kvpop", "h2o"), ("h2o", "kvpop")):
        lines = {line["policy"]: line for line in summarise_reasoning(records, against)}
        assert lines[policy]["difference"] == pytest.approx(lines[policy]["exact"] - lines[against]["exact"])
        low, high = lines[policy]["difference interval"]
        assert low < 0 < high and high - low > 0.4, "trainings differ more than the policies"
        assert lines["kvpop"]["of dense"] == pytest.approx(lines["kvpop"]["exact"])
        assert lines["kvpop"]["trainings"] == 3 and "trainings" not in lines["h2o"]
