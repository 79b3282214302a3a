"""The trainer learns, survives kills, gives equal results in two processes, and reports failures."""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import json
import os
import re
import shutil
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from distill.rows import Rows
from distill.train_tiny import LENGTH, RECIPE, RECIPES, VALIDATION, train

from kvpop_vllm.config import ConfigError
from kvpop_vllm.distill import student
from kvpop_vllm.distill import trainer as trainer_module
from kvpop_vllm.distill.checkpoints import Checkpoints
from kvpop_vllm.distill.decays import decay_grid
from kvpop_vllm.distill.metrics import read_metrics
from kvpop_vllm.distill.recipe import FORMER_NAMES, Recipe, TrainingError
from kvpop_vllm.distill.sharding import Process
from kvpop_vllm.distill.sparse_attention import Sparse
from kvpop_vllm.distill.trainer import Validation
from kvpop_vllm.distill.training_loop import only_run_in
from kvpop_vllm.model_hook import Dense, load_model
from kvpop_vllm.scorers import Decay, log_gamma
from kvpop_vllm.scorers.checkpoint import read_scorer
from kvpop_vllm.scorers.untrained import init_scorer


def test_a_second_run_in_a_folder_is_refused(model, tmp_path):
    first, other = train(model, tmp_path), dataclasses.replace(RECIPE, steps=7)
    settings = (tmp_path / "run/run.json").read_bytes()
    with open(tmp_path / "run/lock", "w") as lock:  # as the first run's process does
        fcntl.flock(lock, fcntl.LOCK_EX)
        for second in (lambda: train(model, tmp_path, other), first.run):
            with pytest.raises(ConfigError, match="another process trains in .*: wait until it"):
                second()
    assert (tmp_path / "run/run.json").read_bytes() == settings
    assert first.run()["loss"] > 0


@pytest.mark.parametrize("error", [errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK])
def test_a_file_system_without_locks_has_runs(model, tmp_path, monkeypatch, error):
    def flock(*args):
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(fcntl, "flock", flock)
    with only_run_in(tmp_path / "run"):
        train(model, tmp_path)
    assert (tmp_path / "run/run.json").exists()


def test_a_run_of_the_former_mixed_precision_is_refused(model, tmp_path):
    """Runs in float32, or of a frozen base, compute as before and go on."""
    for kind, refused in (("low", True), ("base", False), ("frozen", False)):
        recipe, path = dataclasses.replace(RECIPES[kind], steps=3), tmp_path / kind / "run/run.json"
        train(model, tmp_path / kind, recipe).run()
        settings = json.loads(path.read_text())
        assert settings.pop("numerics") == 2
        path.write_text(json.dumps(settings))
        match = "holds a run of another version, which computed in bfloat16 in another way: choose another"
        with pytest.raises(ConfigError, match=match) if refused else nullcontext():
            train(model, tmp_path / kind, recipe)


def test_a_process_that_is_alone_leaves_its_group(model, tmp_path):
    trainer = train(model, tmp_path, dataclasses.replace(RECIPES["low"], steps=1))
    assert dist.is_initialized()
    trainer.run()
    assert not dist.is_initialized()


def test_the_teachers_logits_are_not_rounded(model, tmp_path, monkeypatch):
    """The KL in mixed precision is of the float32 logits that the teacher returns."""
    received, top_kl = [], student.top_kl
    monkeypatch.setattr(student, "top_kl", lambda logits, *top: received.append(top[0]) or top_kl(logits, *top))
    trainer = train(model, tmp_path, dataclasses.replace(RECIPES["low"], steps=1))
    trainer.one_pass(0, 1)
    expected = trainer.teacher(Rows(LENGTH)[0].unsqueeze(0), 0)[0]
    assert not torch.equal(expected, expected.bfloat16().float())
    count = expected.shape[1]
    assert sum(part.shape[1] for part in received) % count == 0
    assert torch.equal(received[0], expected[:, : received[0].shape[1]])


def test_the_trained_model_has_the_generation_config_of_its_base(model, tmp_path):
    base = shutil.copytree(model, tmp_path / "base")
    (base / "generation_config.json").write_text('{"do_sample": true, "temperature": 0.6, "eos_token_id": [7, 9]}')
    train(base, tmp_path / "out", dataclasses.replace(RECIPES["low"], steps=1)).run()
    config = json.loads((tmp_path / "out/model/generation_config.json").read_text())
    assert (config["do_sample"], config["temperature"], config["eos_token_id"]) == (True, 0.6, [7, 9])


def test_a_frozen_base_is_not_gathered_for_the_results(model, tmp_path, monkeypatch):
    names, get_state = [], trainer_module.get_model_state_dict

    def noted(*args, **options):
        state = get_state(*args, **options)
        names.extend(state)
        return state

    monkeypatch.setattr(trainer_module, "get_model_state_dict", noted)
    train(model, tmp_path, dataclasses.replace(RECIPE, steps=1)).run()
    assert names and all(name.startswith("scorers.") for name in names)


def test_held_out_rows_are_judged_and_not_trained_on(model, tmp_path):
    """Losses are means of the rows' own, and accuracy is that of the model under the mask of its scores."""
    recipe = dataclasses.replace(RECIPES["base"], steps=3, positions=None)
    tracked, plain = [], train(model, tmp_path / "plain", recipe)
    expected = plain.run()
    held_out_rows = [Rows(LENGTH, first=7000)[row] for row in range(16)]
    options = {"validation": Validation(4, held_out_rows, [0] * 16)}
    options |= {"track": lambda step, values: tracked.append((step, dict(values)))}
    trainer = train(model, tmp_path / "judged", recipe, **options)
    last = trainer.run()
    held_out = {name: last.pop(name) for name in list(last) if name.startswith("validation_")}
    assert last == expected and tracked[-1] == (2, last | held_out) and [step for step, _ in tracked] == [0, 1, 2]
    student, right, losses = plain.student.eval(), [], []
    for row, tokens in enumerate(held_out_rows):
        tokens = tokens.unsqueeze(0)
        with torch.no_grad():
            loss, parts = student(tokens, row, plain.teacher(tokens, row))
            logits = student.base(tokens, attend=Sparse(student.score, student.roles(row))).logits
        losses.append([loss, parts["recall"], parts["ce"], parts["kl"]])
        right += (logits[0, :-1].argmax(-1) == tokens[0, 1:]).tolist()
    means = torch.tensor(losses).mean(0).tolist()
    assert [held_out[f"validation_{name}"] for name in ("loss", "recall", "ce", "kl")] == pytest.approx(means, rel=1e-4)
    assert held_out["validation_accuracy"] == pytest.approx(sum(right) / len(right)) and any(right)


@pytest.mark.parametrize("phase", ["uptrain", "kvzap"])
def test_phases_that_evict_nothing_have_no_accuracy(model, tmp_path, capsys, phase):
    """It is one under evictions; their losses of held-out rows are there. The bar has tokens a second and the time left."""
    recipe = dataclasses.replace(RECIPE, phase=phase, steps=1, batch=1, gate_width=16)
    last = train(model, tmp_path, recipe, validation=VALIDATION, quiet=False).run()
    assert "validation_accuracy" not in last and last["validation_loss"] > 0
    assert re.search(r"1/1 \[00:\d\d<00:00, .*tokens/s=[1-9]", capsys.readouterr().err)


def test_rows_of_a_pass_count_as_rows_of_passes(model, tmp_path):
    recipe = dataclasses.replace(RECIPES["base"], phase="uptrain", steps=3, positions=None, window=[8], topk=[20])
    alone, together = (
        train(model, tmp_path / str(rows), dataclasses.replace(recipe, micro_batch=rows)).run() for rows in (1, 2)
    )
    assert together == pytest.approx(alone, rel=1e-5)
    with pytest.raises(ConfigError, match="with --micro-batch give --pack, one --topk, no --positions"):
        dataclasses.replace(RECIPE, micro_batch=2)
    with pytest.raises(ConfigError, match="4 rows of a batch, which are no multiple of --micro-batch 3: change one"):
        train(model, tmp_path / "3", dataclasses.replace(recipe, micro_batch=3))


def test_fitted_decays_are_written_and_do_not_train(model, tmp_path):
    """Training equals that without fitted decays, with a trained base too; only the written decays differ."""
    recipe = dataclasses.replace(RECIPES["base"], fit_decay_min=0.8, fit_decay_max=0.99)
    folders = [tmp_path / str(fitted) for fitted in (False, True)]
    results = [
        train(model, folder, dataclasses.replace(recipe, fit_decays=folder == folders[1])).run() for folder in folders
    ]
    assert 0 < results[1].pop("lost_mass") < 1 and results[0] == results[1]
    (config, plain), (fitted, layers) = (read_scorer(str(folder)) for folder in folders)
    assert fitted == dataclasses.replace(config, decay=Decay(1, 0.8, 0.99)) != config
    grid, decays = decay_grid(fitted.decay), []
    for layer, before in zip(layers, plain, strict=True):
        assert all(torch.equal(layer[name], before[name]) for name in layer if name != "decay_logit")
        decays.append(log_gamma(layer["decay_logit"], fitted.decay))
        assert (decays[-1].unsqueeze(-1) - grid).abs().amin(-1).max() < 1e-6
    written = json.loads((folders[1] / "run/decays.json").read_text())
    assert torch.allclose(torch.tensor(written["decays"]).double(), torch.stack(decays).exp(), atol=1e-6)


def test_the_loss_falls_and_the_result_is_served_from_disk(model, tmp_path):
    class OneRow(Rows):
        def __getitem__(self, row):
            return super().__getitem__(0)

    recipe = dataclasses.replace(RECIPE, steps=60, lr_new=2e-2, window=[8], topk=[20])
    train(model, tmp_path, recipe, OneRow(LENGTH), save_every=60).run()
    loss = [row["retention"] for row in read_metrics(tmp_path / "run/metrics.jsonl")]
    assert sum(loss[-10:]) < 0.8 * sum(loss[:10])
    config, layers = read_scorer(str(tmp_path))
    assert (config.sinks, config.window, config.topk, config.delayed) == (4, 8, 20, True) and len(layers) == 2
    assert (tmp_path / "run/training.png").stat().st_size > 5000
    assert list((tmp_path / "run/tensorboard").iterdir())


@pytest.mark.parametrize("phase", ["uptrain", "streaming-plus"])
def test_phases_that_train_the_base(model, tmp_path, phase):
    rates = {"lr_base": 1e-3, "lr_base_end": 1e-4, "warmup": 2}
    recipe = dataclasses.replace(RECIPES["low"], train_base=False, phase=phase, steps=15, **rates)
    result = train(model, tmp_path, recipe, save_every=15).run()
    first, *_, last = metrics = read_metrics(tmp_path / "run/metrics.jsonl")
    assert (first["lr"], metrics[2]["lr"], last["lr"]) == pytest.approx((5e-4, 1e-3, 1e-4))
    assert result["loss"] < first["loss"] and ("kl" in result) == (phase == "streaming-plus")
    assert not (tmp_path / "kvpop_config.json").exists()
    trained = load_model(tmp_path / "model", torch.float32)
    assert next(trained.parameters()).dtype == torch.float32 and trained.config.model_type == "qwen3"
    with torch.no_grad():
        assert trained(Rows(LENGTH)[0].unsqueeze(0), attend=Dense()).logits.isfinite().all()


def gradients(model, out, **changes):
    """Return the gradients of the first row's loss by parameter."""
    trainer = train(model, out, dataclasses.replace(RECIPES["base"], **changes))
    tokens = Rows(LENGTH)[0].unsqueeze(0)
    loss, _ = trainer.student(tokens, 0, trainer.teacher(tokens, 0))
    loss.backward()
    return {name: p.grad for name, p in trainer.student.named_parameters() if p.grad is not None}


def test_retention_moves_scorers_only(model, tmp_path):
    """The boundary loss changes no gradient of the base, and no other loss reaches a scorer."""
    without, boundary = (gradients(model, tmp_path / str(weight), boundary=weight) for weight in (0.0, 1.0))
    for name, grad in boundary.items():
        if name.startswith("base."):
            assert grad.abs().sum() > 0 and torch.equal(without[name], grad), name
        else:
            assert name not in without or not without[name].any(), name
    moved = [n for n, grad in boundary.items() if n.startswith("scorers.") and grad.any()]
    assert any(n.endswith("out.weight") for n in moved) and any(n.endswith("decay_logit") for n in moved)


def test_recomputed_layers_give_the_same_gradients(model, tmp_path):
    stored, recomputed = (gradients(model, tmp_path / str(on), activation_checkpointing=on) for on in (False, True))
    torch.testing.assert_close(recomputed, stored)


@pytest.mark.parametrize("value", [torch.inf, torch.nan])
@pytest.mark.parametrize("part", ["scorer", "base"])
def test_a_loss_that_is_not_finite_stops_and_keeps_the_last_good_checkpoint(model, tmp_path, value, part):
    class Broken(Rows):
        def __getitem__(self, row):
            if row == 8:
                student = trainer.student
                broken = student.scorers[1].scorer.out.bias if part == "scorer" else next(student.base.parameters())
                broken.data.fill_(value)
            return super().__getitem__(row)

    trainer = train(model, tmp_path, rows=Broken(LENGTH))
    with pytest.raises(TrainingError, match="stopped at step 4: .*; the checkpoint of step 3 is good"):
        trainer.run()
    again = train(model, tmp_path).run()
    assert again["loss"] == train(model, tmp_path / "other").run()["loss"]


def test_full_memory_and_a_failed_tracker_stop_with_one_line(model, tmp_path):
    class Large(Rows):
        def __getitem__(self, row):
            if row == 8:
                raise torch.OutOfMemoryError("CUDA out of memory.\nSee the documentation")
            return super().__getitem__(row)

    def failing(step, metrics):
        if step == 4:
            raise ValueError("no connection")

    with pytest.raises(TrainingError, match="stopped at step 4: CUDA out of memory.; the checkpoint of step 3 is good"):
        train(model, tmp_path / "large", rows=Large(LENGTH)).run()
    trainer = train(model, tmp_path / "tracked")
    trainer.track = failing
    with pytest.raises(
        TrainingError, match=r"--tracker failed at step 4: ValueError\('no connection'\); the checkpoint of"
    ):
        trainer.run()


def test_a_draft_of_a_killed_save_goes_with_the_next_one(tmp_path):
    (tmp_path / "draft-37").mkdir()
    (tmp_path / "draft-37/large").write_bytes(b"0")
    model = torch.nn.Linear(2, 2)
    Checkpoints(tmp_path).save(50, model, torch.optim.AdamW(model.parameters()))
    assert [path.name for path in tmp_path.iterdir()] == ["step-50"]


def test_what_another_run_or_command_wrote_is_not_overwritten(model, tmp_path):
    init_scorer(model, tmp_path)
    before = (tmp_path / "kvpop_scorer.safetensors").read_bytes()
    with pytest.raises(ConfigError, match="holds kvpop_config.json of something else.*: choose another --out"):
        train(model, tmp_path)
    assert (tmp_path / "kvpop_scorer.safetensors").read_bytes() == before


@pytest.mark.parametrize("saved, loaded", [(False, True), (True, False), (True, True)])
def test_random_states_of_cpu_and_gpu_are_continued(tmp_path, monkeypatch, saved, loaded):
    """A run may continue with or without a GPU, wherever it began."""
    state, gpu = torch.arange(16, dtype=torch.uint8), []
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda: state)
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state: gpu.append(state.tolist()))
    for name in ("save", "load"):  # these would use the GPU that is only simulated
        monkeypatch.setattr(f"torch.distributed.checkpoint.{name}", lambda *args, **options: None)
    model, checkpoints = torch.nn.Linear(2, 2), Checkpoints(tmp_path)
    optimiser = torch.optim.AdamW(model.parameters())
    with torch.random.fork_rng(devices=[]):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: saved)
        checkpoints.save(1, model, optimiser)
        expected = torch.rand(3)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: loaded)
        assert checkpoints.load(model, optimiser) == 1 and torch.equal(torch.rand(3), expected)
    assert gpu == [state.tolist()] * (saved and loaded)


@pytest.mark.parametrize("name", ["__0_0.distcp", "process-0.pt", "meta.json"])
def test_a_damaged_checkpoint_is_named_and_no_older_one_taken_unasked(model, tmp_path, name):
    complete = train(model, tmp_path).run()
    newest, older = (tmp_path / f"run/step-{step}" for step in (8, 6))
    (newest / name).write_bytes((newest / name).read_bytes()[:-40])
    with pytest.raises(
        ConfigError,
        match="step-8 cannot be read .*: if it is damaged, remove it to go on from the checkpoint of step 6",
    ):
        train(model, tmp_path).run()
    shutil.rmtree(newest)
    assert train(model, tmp_path).run() == complete
    (tmp_path / "run/run.json").write_text("")
    with pytest.raises(ConfigError, match="run.json is damaged"):
        train(model, tmp_path)
    assert older.exists()


def test_a_run_with_the_former_names_of_options_goes_on(model, tmp_path):
    recipe = dataclasses.replace(RECIPE, fit_decay_min=0.8, fit_decay_max=0.99)
    result = train(model, tmp_path, recipe).run()
    path = tmp_path / "run/run.json"
    settings = json.loads(path.read_text())
    former = {new: old for old, new in FORMER_NAMES.items()}
    path.write_text(json.dumps({former.get(name, name): value for name, value in settings.items()}))
    assert "calibrate_min" in path.read_text() and "fit_decay" not in path.read_text()
    assert train(model, tmp_path, recipe).run() == result
    with pytest.raises(ConfigError, match="holds a run with fit_decay_max = 0.99, not 0.98: choose another --out"):
        train(model, tmp_path, dataclasses.replace(recipe, fit_decay_max=0.98))


def test_another_run_in_the_same_folder_is_refused(model, tmp_path):
    train(model, tmp_path)
    train(model, tmp_path, dataclasses.replace(RECIPE, steps=7))  # nothing has been trained yet
    train(model, tmp_path, save_every=1).run()
    with pytest.raises(ConfigError, match="holds a run with steps = 8, not 9: choose another --out"):
        train(model, tmp_path, dataclasses.replace(RECIPE, steps=9))
    path = tmp_path / "run/run.json"
    settings = json.loads(path.read_text())
    assert settings["steps"] == 8
    other = Rows(LENGTH)
    other.fingerprint = "other text"
    with pytest.raises(ConfigError, match="^the data is not what the checkpoint was made with .*: restore it or"):
        train(model, tmp_path, rows=other)
    del settings["data"]  # as before rows were numbered
    path.write_text(json.dumps(settings))
    with pytest.raises(ConfigError, match="holds a run of an older version, which shuffled text .*: choose another"):
        train(model, tmp_path)


def test_processes_that_cannot_share_a_batch_are_refused(model, tmp_path):
    with pytest.raises(ConfigError, match="batch 2 cannot be shared by 3 processes"):
        train(model, tmp_path, process=Process(0, 3))


def test_the_papers_recipe_is_table_3():
    """The recipe is the paper's Table 3, except for two values.

    The base is trained only if asked, and the number of steps is that of the paper's text.
    """
    r = Recipe()
    assert (r.length, r.batch, r.window, r.sinks, r.topk, r.steps) == (16384, 128, [256], 4, [2016], 2000)
    assert (r.lr_base, r.lr_new, r.lr_new_end, r.warmup, r.weight_decay) == (8e-5, 1e-3, 8e-5, 100, 1e-4)
    assert (r.beta1, r.beta2, r.kl_top, r.tau, r.margin, r.decay_step) == (0.9, 0.95, 256, 1.0, True, 1)
    assert (r.decay_min, r.decay_max, r.trains_base, r.dtype) == (0.999, 0.999999, False, "bfloat16")
    assert all(Recipe(phase=phase).trains_base for phase in ("uptrain", "streaming-plus"))
