"""The memory model of training against torch's own count of the trainer's steps, and what ``kvpop plan --train`` prints."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
from pathlib import Path

import pytest
import torch
from distill.fake_gpus import TRACKER_SEEN, write_config
from distill.launching import launch
from distill.measure_tiny import RECIPE as TINY
from distill.rows import Rows
from torch.distributed.run import get_args_parser as torchrun_parser
from torch.utils.flop_counter import FlopCounterMode

from kvpop_vllm.cli import SERVING_PLAN, TRAINING_PLAN, make_parser
from kvpop_vllm.distill.command import _refuse_options_of_others, recipe_of
from kvpop_vllm.distill.hub_data import HubData
from kvpop_vllm.distill.memory import FLOAT, Run, Sizes
from kvpop_vllm.distill.recipes import PAPER
from kvpop_vllm.distill.run import OnlineTeacher
from kvpop_vllm.distill.sharding import Process
from kvpop_vllm.distill.trainer import Trainer
from kvpop_vllm.distill.training_plan import lines_of
from kvpop_vllm.testing import write_tiny_model

ROOT = Path(__file__).parents[2]
KINDS = {
    "parameters": ("Sharded Param", "Parameter"),
    "gradients": ("Sharded Grad", "Gradient", "Other"),
    "optimizer": ("OptState", "Optstate"),
    "teacher": ("Inputs",),
    "gathered": ("Unsharded Param", "All Gather"),
    "reduced": ("Reduce Scatter",),
    "activations": ("Activation",),
    "gradients of activations and of the output layer": ("Temp", "Unsharded Grad"),
}
"""Parts of a GPU's memory, and the kinds of torch's tracker."""
PARTS = {
    "activations": ("checkpoints", "layer", "losses"),
    "gradients of activations and of the output layer": ("layer's gradients", "output layer's gradient"),
}
"""Parts of the tracker that are several of the memory model."""


def compare(run: Run, measurement: dict[str, int]) -> None:
    """Compare the memory model with a measurement, part by part; below 1% of all a part is as good as nothing."""
    moment, counted = run.peak()
    for part, kinds in KINDS.items():
        expected = sum(measurement.get(kind, 0) for kind in kinds)
        count = sum(counted.get(name, 0) for name in PARTS.get(part, (part,)))
        assert count == pytest.approx(expected, rel=0.1, abs=0.01 * measurement["Total"]), (
            part,
            moment,
            counted,
            measurement,
        )


def bytes_of_step(folder: Path, out: Path, gpus: int, changes: dict) -> dict[str, int]:
    """Return the bytes of a GPU by kind in a step of the paper's recipe with changes, see :mod:`distill.fake_gpus`."""
    return bytes_of(launch(folder, out, gpus, json.dumps(changes), script="fake_gpus.py", seconds=1800))


def bytes_of(outcome: subprocess.CompletedProcess) -> dict[str, int]:
    """Return the bytes by kind that a process has printed."""
    lines = [line for line in outcome.stdout.splitlines() if line.startswith("BYTES")]
    assert lines and not outcome.returncode, outcome.stderr[-3000:]
    return json.loads(lines[0].removeprefix("BYTES"))


def check_tracker() -> None:
    """Refuse other versions of torch than those in which the tracker, a private module, was seen."""
    assert torch.__version__.startswith(TRACKER_SEEN), (
        f"check torch's memory tracker, seen in torch {TRACKER_SEEN}x alone"
    )


@pytest.mark.slow
@pytest.mark.parametrize("size, gpus, train_base, rows", [
    ("8B", 8, True, 1), ("4B", 8, True, 1), ("8B", 8, True, 2), ("8B", 1, False, 1),
])  # fmt: skip
def test_the_model_is_what_a_step_of_the_trainer_takes(tmp_path, size, gpus, train_base, rows):
    """The trainer's own code runs a pass at the full shape of Qwen3, with tensors that have no values."""
    check_tracker()
    folder = write_config(tmp_path / size, size)
    changes = {"train_base": train_base, "micro_batch": rows}
    recipe, measurement = dataclasses.replace(PAPER, **changes), bytes_of_step(folder, tmp_path / "out", gpus, changes)
    run = Run(Sizes.of(folder, recipe), recipe, gpus)
    compare(run, measurement)
    assert sum(run.peak()[1].values()) == pytest.approx(measurement["Total"], rel=0.1)


LISTWISE = {"train_base": False, "boundary": 0.0, "listwise": 1.0}


@pytest.mark.slow
@pytest.mark.parametrize(
    "size, gpus, changes",
    [("8B", 1, LISTWISE), ("4B", 8, {}), ("8B", 8, {"micro_batch": 2}), ("8B", 1, {"train_base": False})],
    ids=str,
)
def test_four_layers(tmp_path, size, gpus, changes):
    """Each layer, the embeddings and the output layer are as in the whole model."""
    check_tracker()
    folder, recipe = write_config(tmp_path / size, size, num_hidden_layers=4), dataclasses.replace(PAPER, **changes)
    measurement = bytes_of_step(folder, tmp_path / "out", gpus, changes)
    run = Run(Sizes.of(folder, recipe), recipe, gpus)
    compare(run, measurement)
    assert sum(run.peak()[1].values()) == pytest.approx(measurement["Total"], rel=0.1)


@pytest.mark.slow
def test_two_processes_take_what_the_model_says(tmp_path):
    """The bytes of real shards, and at the peak those of gathered parameters and of gradients that are being added.

    Activations are those of other kernels than a GPU's. The memory model counts no gathered scorers: one is 0.5% of a
    layer of Qwen3-8B, and 6% here.
    """
    check_tracker()
    model = write_tiny_model(tmp_path / "model", "qwen3", hidden=128)
    measurement = bytes_of(launch(model, tmp_path / "out", processes=2, script="measure_tiny.py"))
    run = Run(Sizes.of(model, TINY), TINY, 2)
    lasting = run.lasting()
    for part in ("parameters", "gradients", "optimizer", "teacher"):
        expected = sum(measurement.get(kind, 0) for kind in KINDS[part])
        assert lasting[part] == pytest.approx(expected, rel=0.1), (part, lasting, measurement)
    moment, counted = run.peak()
    assert moment == "backward pass of a layer"
    gathered, reduced = (sum(measurement[kind] for kind in KINDS[part]) for part in ("gathered", "reduced"))
    assert reduced == pytest.approx(counted["reduced"], rel=0.1)
    scorers = FLOAT * run.sizes.layers * run.sizes.scorer
    assert 0.9 * counted["gathered"] < gathered < 1.1 * counted["gathered"] + scorers < 2 * counted["gathered"]


@pytest.mark.parametrize("options", ["", "--no-train-base --gpus 1"])
def test_the_document_has_what_the_command_prints(options):
    command = f"kvpop plan --train --model docs/configs/Qwen3-8B {options}".strip()
    parsed = make_parser().parse_args(command.replace("docs/", f"{ROOT}/docs/").split()[1:])
    lines = lines_of(parsed)
    assert "\n".join([f"$ {command}", *lines]) in (ROOT / "docs/training.md").read_text()


LAUNCHERS = """
torchrun() { printf '%s\\n' "$@"; }
srun() { while [[ $1 == -* ]]; do shift; done; "$@"; }
scontrol() { echo node; }
"""
"""Functions in bash that print the words that torchrun gets, also by srun."""


def test_the_commands_of_the_document_are_read_by_torchrun_and_kvpop():
    """Bash splits the words and expands braces; the data are names, and the recipe takes all options."""
    blocks = re.findall(r"```bash\n(.*?)```", (ROOT / "docs/training.md").read_text(), re.DOTALL)
    launched = [block for block in blocks if "torchrun " in block]
    nodes = []
    for block in launched:
        outcome = subprocess.run(["bash", "-c", LAUNCHERS + block], capture_output=True, text=True, check=True)
        launch = torchrun_parser().parse_args(outcome.stdout.splitlines())
        assert (launch.training_script, launch.no_python, launch.nproc_per_node) == ("kvpop", True, "8"), outcome
        options = make_parser().parse_args(launch.training_script_args)
        _refuse_options_of_others(options)
        recipe = recipe_of(options)
        assert (recipe.trains_base, recipe.steps, recipe.length, recipe.batch) == (True, 2000, 16384, 128)
        nodes.append(launch.nnodes)
        if options.stream:
            assert [HubData(name).split for name in options.data] == [f"high_part0{i}" for i in range(3)]
            assert options.validate_every == 100 and recipe.longest == 16384
    assert nodes == ["1:1", "2"]


def test_hours_follow_from_the_share_of_the_peak():
    command = f"plan --train --model {ROOT}/docs/configs/Qwen3-8B --mfu"
    hours = []
    for share in ("0.1", "0.2", "0.4"):
        printed = "\n".join(lines_of(make_parser().parse_args([*command.split(), share])))
        hours.append(float(re.search(r"([\d.]+) hours at (\d+)% of 989 TFLOPS a GPU", printed)[1]))
    assert hours[0] > 50 and hours[1:] == pytest.approx([hours[0] / 2, hours[0] / 4], abs=0.1)


@pytest.mark.parametrize("train_base", [False, True])
def test_operations_are_those_of_the_trainers_products(tmp_path, train_base):
    """The matrix products of model and teacher are counted. Attention and scorers take other ops, and logits are formed twice."""
    model = write_tiny_model(tmp_path / "model", "qwen3", hidden=128)
    recipe = dataclasses.replace(TINY, dtype="float32", train_base=train_base, activation_checkpointing=False, steps=1)
    process = Process()
    teacher = OnlineTeacher(model, recipe, process) if recipe.distils else None
    trainer = Trainer(model, recipe, tmp_path / "out", Rows(recipe.length), teacher=teacher, process=process)
    with FlopCounterMode(display=False) as counter:
        trainer.backward(0)
    operations = counter.get_flop_counts()["Global"]
    sizes = dataclasses.replace(Sizes.of(model, recipe), queries=0, scorer=0)
    recomputed = 2 * sizes.head * recipe.batch * recipe.length if recipe.distils else 0
    counted = Run(sizes, recipe).operations()
    assert counted == pytest.approx(operations[torch.ops.aten.mm] - recomputed, rel=0.02)


def total(**changes) -> float:
    recipe = dataclasses.replace(PAPER, **changes)
    return sum(Run(Sizes.of(ROOT / "docs/configs/Qwen3-8B", recipe), recipe, 8).peak()[1].values()) / 1e9


def test_the_papers_run_fits():
    assert 25 < total() < 70
    assert total(length=32768) > total(micro_batch=2) - 1 > total() + 5


def test_each_option_is_about_serving_or_training():
    command = make_parser().parse_args(["plan", "--model", "x"])
    options = vars(command).keys() - {"model", "train", "run"}
    assert not SERVING_PLAN.keys() & TRAINING_PLAN.keys() and options == SERVING_PLAN.keys() | TRAINING_PLAN.keys()
    assert {name: getattr(command, name) for name in options} == SERVING_PLAN | TRAINING_PLAN


@pytest.mark.parametrize("command, message", [
    ("--kv-memory 8GiB --gpus 8", "--gpus is about training: leave it out, or give --train"),
    ("--train --drafts 3", "--drafts is about serving: leave it out, or leave --train out"),
    ("--train --mamba-ssm-cache-dtype float32", "--mamba-ssm-cache-dtype is about serving: leave it out"),
    ("--train --no-enable-prefix-caching", "--enable-prefix-caching is about serving: leave it out"),
    ("--train --kv-memory 8GiB", "--kv-memory is about serving: leave it out, or leave --train out"),
    ("", "kvpop plan needs --kv-memory, or --train for the memory of training"),
    ("--train --length 65536", "the model has 40960 positions: lower --length 65536"),
    ("--train --gpus 3", "batch 128 cannot be shared by 3 GPUs with 1 rows a pass evenly: change one"),
    ("--train --no-train-base --stored-teacher", "a frozen base has no teacher: leave --stored-teacher out"),
    ("--train --recipe workshop --micro-batch 2", "recipe workshop has a budget for each row: leave out --micro-batch"),
    ("--train --model docs/configs/gpt-oss-20b", "has experts, whose training memory kvpop plan --train does not count"),
    ("--train --model docs/configs/Llama-3.1-8B-Instruct", "config.json has no intermediate_size, on which training memory"),
    ("--train --model docs/configs/gemma-3-27b-it", "has layers of several kinds, whose training memory"),
])  # fmt: skip
def test_what_is_not_counted_is_refused(run_kvpop, monkeypatch, command, message):
    monkeypatch.chdir(ROOT)
    model = [] if "--model" in command else ["--model", "docs/configs/Qwen3-8B"]
    code, _, error = run_kvpop("plan", *model, *command.split())
    assert code != 0 and message in error and error.count("\n") == 1
