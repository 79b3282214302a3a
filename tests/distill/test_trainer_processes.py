"""Processes of a training run: kills, SIGTERM, several that equal one, and a full disk."""

from __future__ import annotations

import json

import pytest
import torch
from distill.launching import last_loss, launch
from distill.rows import Rows
from distill.train_tiny import LENGTH, RECIPE, RECIPES, VALIDATION, train
from safetensors.torch import load_file
from threads import one_thread

from kvpop_vllm.distill.metrics import read_metrics
from kvpop_vllm.distill.run import OnlineTeacher
from kvpop_vllm.distill.sharding import Process
from kvpop_vllm.distill.trainer import Trainer


@pytest.fixture(scope="module")
def complete(model, tmp_path_factory):
    """Function that returns folder and last loss of an undisturbed launched run; each run is done once."""
    done = {}

    def run(kind, processes=1):
        if (kind, processes) not in done:
            folder = tmp_path_factory.mktemp("complete")
            done[kind, processes] = folder, last_loss(launch(model, folder, kind, processes=processes))
        return done[kind, processes]

    return run


@pytest.mark.parametrize("kind, processes", [("low", 1), ("base", 2)])
def test_a_kill_changes_nothing(model, tmp_path, complete, kind, processes):
    """The same holds for the base too in bfloat16, and for two processes.

    The launcher stops all processes after one of them is killed.
    """
    undisturbed, loss = complete(kind, processes)
    killed = launch(model, tmp_path / "cut", kind, 5, processes=processes)
    assert killed.returncode == (-9 if processes == 1 else 1) and "RESULT" not in killed.stdout
    assert [p.name for p in (tmp_path / "cut/run").glob("step-*")] == ["step-3"]
    assert last_loss(launch(model, tmp_path / "cut", kind, processes=processes)) == loss
    assert [row["step"] for row in read_metrics(tmp_path / "cut/run/metrics.jsonl")] == list(range(RECIPE.steps))
    for name in ["kvpop_scorer", *(["model/model"] if RECIPES[kind].trains_base else [])]:
        a, b = (load_file(folder / f"{name}.safetensors") for folder in (undisturbed, tmp_path / "cut"))
        assert a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


@pytest.mark.parametrize("kind, processes", [("frozen", 1), ("base", 2)])
def test_a_process_that_is_asked_to_stop_saves_its_step(model, tmp_path, complete, kind, processes):
    """One of two processes is asked in the middle of a step, which is taken to its end."""
    undisturbed, loss = complete(kind, processes)
    stopped = launch(model, tmp_path / "cut", kind, 4, "SIGTERM", processes=processes)
    assert stopped.returncode == 0 and "RESULT" not in stopped.stdout, stopped.stderr[-3000:]
    assert [p.name for p in sorted((tmp_path / "cut/run").glob("step-*"))] == ["step-3", "step-5"]
    lines = [line for line in stopped.stderr.splitlines() if line.startswith("kvpop: ")]
    assert len(lines) == 1 and "stopped by SIGTERM at step 5: " in lines[0] and "step-5 is written" in lines[0]
    assert last_loss(launch(model, tmp_path / "cut", kind, processes=processes)) == loss


def test_torchrun_sends_a_sigterm_on_and_ends_with_an_error(model, tmp_path):
    """The processes save their step, though torchrun does not exit with status 0."""
    stopped = launch(model, tmp_path / "cut", "base", 4, "SIGTERM", "launcher", processes=2)
    assert stopped.returncode not in (0, None) and "RESULT" not in stopped.stdout
    assert "SignalException" in stopped.stderr
    assert "kvpop: stopped by SIGTERM at step 5: " in stopped.stderr
    assert [p.name for p in sorted((tmp_path / "cut/run").glob("step-*"))] == ["step-3", "step-5"]


@one_thread()  # as in the processes that are launched
@pytest.mark.parametrize("kind, processes", [("frozen", 2), ("base", 2), ("gates", 2), ("base", 4)])
def test_several_processes_equal_one(model, tmp_path, complete, kind, processes):
    """Losses of training and of held-out rows, and what was trained."""
    train(model, tmp_path, RECIPES[kind], validation=VALIDATION).run()
    folders = tmp_path, complete(kind, processes)[0]
    one, two = (read_metrics(folder / "run/metrics.jsonl") for folder in folders)
    for a, b in zip(one, two, strict=True):
        assert b == pytest.approx(a, rel=1e-4)
    judged = [row["step"] for row in one if "validation_accuracy" in row]
    assert judged == [3, 7] and ("validation_recall" in one[3]) == (kind != "gates")
    a, b = (load_file(folder / "kvpop_scorer.safetensors") for folder in folders)
    for name in a:  # Adam turns rounding of a small gradient into a full step, so single entries may differ
        if name.endswith("out.bias"):  # it cancels in every comparison, so its gradient is rounding only
            continue
        assert (b[name] - a[name]).norm() <= 0.02 * a[name].norm() + 1e-3, name


class Reversed(Trainer):
    """Trainer that takes the rows of a step in the opposite order."""

    def one_pass(self, row, passes):
        number = row % self.recipe.batch
        return super().one_pass(row - number + self.recipe.batch - 1 - number, passes)


@pytest.mark.slow
@one_thread()
def test_two_processes_equal_one_in_bfloat16(model, tmp_path, complete):
    """Parameters are computed with in bfloat16, sums of gradients are float32, and the teacher is sharded.

    Both runs have the same bfloat16 gradients of a row, whose float32 sum alone depends on the order. So the first
    losses are equal, and the first norms to the rounding of a sum of four. An update turns that rounding into other bfloat16
    copies of some parameters: how much this moves later losses is measured by one process that adds in another order.
    """
    recipe, process = RECIPES["low"], Process()
    options = {"teacher": OnlineTeacher(model, recipe, process), "validation": VALIDATION, "quiet": True}
    Reversed(model, recipe, tmp_path, Rows(LENGTH), process=process, **options).run()
    folders = complete("low")[0], complete("low", 2)[0], tmp_path
    one, two, reordered = (read_metrics(folder / "run/metrics.jsonl") for folder in folders)
    names = [name for name in one[0] if name not in ("step", "lr", "grad_norm", "recall")]
    assert {"loss", "kl", "retention"} <= {*names}
    for other in (two, reordered):
        assert [other[0][name] for name in names] == pytest.approx([one[0][name] for name in names], rel=1e-12)
        assert other[0]["grad_norm"] == pytest.approx(one[0]["grad_norm"], rel=1e-5)
    for name in [*names, "grad_norm"]:
        far, rounding = (max(abs(a[name] - b[name]) for a, b in zip(one, o, strict=True)) for o in (two, reordered))
        assert far <= 4 * rounding < 0.01 * max(row[name] for row in one), (name, far, rounding)
    assert two != one != reordered, "no sum was rounded otherwise"


def test_another_number_of_processes_goes_on(model, tmp_path, complete):
    """One process begins, four go on, and two end the run; its steps are those of two processes."""
    undisturbed = complete("base", 2)[0]
    for processes, dies in ((1, 4), (4, 7), (2, None)):
        outcome = launch(model, tmp_path / "cut", "base", *filter(None, [dies]), processes=processes)
        assert ("RESULT" in outcome.stdout) == (dies is None), outcome.stderr[-3000:]
    assert json.loads((tmp_path / "cut/run/step-6/meta.json").read_text())["processes"] == 4
    one, other = (read_metrics(folder / "run/metrics.jsonl") for folder in (undisturbed, tmp_path / "cut"))
    assert [row["step"] for row in other] == list(range(RECIPE.steps))
    for a, b in zip(one, other, strict=True):
        assert b == pytest.approx(a, rel=1e-4)


def test_a_full_disk_stops_and_keeps_the_last_good_checkpoint(model, tmp_path, complete):
    def stopped_at(step, checkpoint):
        run = launch(model, tmp_path, "frozen", file_size=20_000)
        last = run.stderr.strip().splitlines()[-1]
        assert run.returncode != 0 and f"TrainingError: training stopped at step {step}" in last and checkpoint in last
        assert not list((tmp_path / "run").glob("draft-*"))
        return [p.name for p in (tmp_path / "run").glob("step-*")]

    assert stopped_at(3, "no checkpoint") == []
    assert launch(model, tmp_path, "frozen", 5).returncode == -9
    assert stopped_at(6, "the checkpoint of step 3 is good") == ["step-3"]
    assert last_loss(launch(model, tmp_path, "frozen")) == complete("frozen")[1]
