"""Training loop of scorers, cartridges and compactors, and the folder of a run."""

from __future__ import annotations

import fcntl
import json
import math
import os
import signal
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from tqdm import tqdm

from kvpop_vllm.config import ConfigError
from kvpop_vllm.distill.checkpoints import Checkpoints, barrier, is_main
from kvpop_vllm.distill.metrics import Metrics, Tracker
from kvpop_vllm.distill.recipe import TrainingError
from kvpop_vllm.files import check_new, remove, to_disk, write_whole
from kvpop_vllm.hub import name_of
from kvpop_vllm.kernels.ops.training import NotFinite

END = 0.1
"""Learning rate of :class:`CosineLoop` at the end, as a share of its peak."""


def read_settings(path: Path) -> dict:
    """Return the settings that a run wrote into its ``run.json``.

    Raises:
        ConfigError: the file is damaged.
    """
    try:
        return json.loads(path.read_text())
    except ValueError:
        raise ConfigError(f"{path} is damaged, so nobody can tell what it was: choose another --out") from None


def check_settings(out: Path, before: dict, settings: dict) -> None:
    """Check that the run in a folder has the given settings.

    Raises:
        ConfigError: names the first setting that differs.
    """
    if "model" in before:  # a folder of the hub's cache may have been named by its path
        before = before | {"model": name_of(before["model"])}
    for name in {**settings, **before}:
        if settings.get(name) != before.get(name):
            raise ConfigError(
                f"{out} holds a run with {name} = {before.get(name)!r}, not {settings.get(name)!r}: choose another --out, or"
                " the same settings"
            )


def check_same_run(out: Path, settings: dict) -> None:
    """Check that a folder holds nothing but this run, and write ``run/run.json`` into a new one.

    Raises:
        ConfigError: it holds a run with other settings, or something else.
    """
    path = out / "run" / "run.json"
    if path.exists():
        check_settings(out, read_settings(path), settings)
        return
    check_new(out)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(settings, indent=1))


def write_next_to_run(out: Path, write: Callable[[Path], None], *names: str) -> None:
    """Write files into the folder that holds ``run``.

    Args:
        out: folder of the run.
        write: writes them to a folder that does not exist.
        names: their names; the last one makes the folder what it is, so it comes last.
    """
    # on the same file system as the folder, where a file is replaced at once
    draft = out / "run" / "draft"
    remove(draft)
    write(draft)
    for name in names:
        os.replace(draft / name, out / name)
        to_disk(out / name)
    remove(draft)


def cosine(step: int, steps: int, warmup: int, peak: float, end: float) -> float:
    """Return the learning rate of a step, which rises linearly in the warm-up and then falls as a cosine.

    It is ``peak`` at steps ``warmup - 1`` and ``warmup``, and ``end`` at the last of ``steps``, unless the warm-up
    lasts until then.
    """
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = (step - warmup) / (steps - 1 - warmup) if step < steps - 1 else 1.0
    return end + (peak - end) * 0.5 * (1 + math.cos(math.pi * progress))


class AskedToStop(Exception):
    """A process of a run got a SIGTERM."""


_locked: set[Path] = set()


@contextmanager
def only_run_in(folder: Path) -> Iterator[None]:
    """Hold a lock on a run's folder, which ends with this process at the latest; all processes of a run call this together.

    The first one holds the lock, once however often it asks. On file systems without locks there is none.

    Raises:
        ConfigError: another process trains in the folder.
    """
    path = folder.resolve()
    if not is_main() or path in _locked:
        barrier()
        yield
        return
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"another process trains in {folder}: wait until it ends, or choose another --out"
            ) from None
        except OSError:  # a file system without locks
            pass
        _locked.add(path)
        try:
            barrier()
            yield
        finally:
            _locked.remove(path)


class Loop(ABC):
    """Training loop, for one process or many; the same call continues a run that was stopped.

    Args:
        trained: module whose parameters are trained, at its start.
        optimiser: its optimiser.
        folder: folder of checkpoints and metrics.
        steps: optimiser steps.
        clip: largest norm of a step's gradient.
        save_every: optimiser steps between checkpoints.
        quiet: True to hide the progress bar.
        track: see :class:`Metrics`.

    Attributes:
        next_step: number of the next optimiser step, and of those taken.
        tokens: tokens that all processes have read since this one began, about; 0 if a loop does not count them.
    """

    def __init__(
        self,
        trained: torch.nn.Module,
        optimiser: torch.optim.Optimizer,
        folder: Path,
        steps: int,
        *,
        clip: float = 1.0,
        save_every: int = 50,
        quiet: bool = False,
        track: Tracker | None = None,
    ):
        self.trained, self.optimiser, self.folder, self.steps = trained, optimiser, folder, steps
        self.clip, self.save_every, self.quiet = clip, save_every, quiet
        self.track, self.tokens = track, 0
        self.checkpoints, self.next_step = Checkpoints(folder), 0
        self._asked_to_stop = False

    @abstractmethod
    def backward(self, step: int) -> dict[str, torch.Tensor | float]:
        """Add the gradient of a step and return its metrics, among them ``loss``, the same in all processes."""

    @staticmethod
    def numbers(metrics: dict[str, torch.Tensor | float]) -> dict[str, float]:
        """Return metrics as numbers; this is where a step waits for its device, once."""
        tensors = {name: value for name, value in metrics.items() if isinstance(value, torch.Tensor)}
        values = torch.stack([value.detach().double() for value in tensors.values()]).tolist() if tensors else []
        numbers = dict(zip(tensors, values, strict=True))
        return {name: numbers.get(name, value) for name, value in metrics.items()}

    @abstractmethod
    def rates(self, step: int) -> Sequence[float]:
        """Return the learning rate of each group of parameters in a step."""

    def judge(self, step: int) -> dict[str, float]:
        """Return metrics of what was not trained on, after so many steps; none if they are not due."""
        return {}

    def notes(self) -> dict:
        """Return what a checkpoint holds besides parameters, optimiser and random state, as JSON has it."""
        return {}

    def restore(self, notes: dict) -> None:
        """Take up the :meth:`notes` of the checkpoint that a run goes on from.

        Raises:
            ValueError: they are of another kind of run.
        """
        if notes:
            raise ValueError(f"a checkpoint of this run has no {', '.join(notes)}")

    def finish(self, last: dict[str, float]) -> dict[str, float]:
        """Return the metrics of a run with the given metrics of its last step, after what a run ends with.

        A SIGTERM does not end this: the last step's checkpoint is written, and the rest is done to its end.
        """
        return last

    def run(self) -> dict[str, float]:
        """Train to the last step, from the newest checkpoint if there is one, and return the last step's metrics.

        Raises:
            ConfigError: the newest checkpoint cannot be loaded.
            TrainingError: a score, loss or gradient is not finite, or a file cannot be written.
        """
        if not self.steps:
            return {}
        with only_run_in(self.folder), self._until_asked_to_stop():
            try:
                self.next_step = self.checkpoints.load(self.trained, self.optimiser)
                if self.next_step:
                    self.restore(self.checkpoints.notes(self.next_step))
            except ValueError as error:
                raise ConfigError(str(error)) from None
            try:
                with Metrics(self.folder, self.next_step, self.track) if is_main() else nullcontext() as metrics:
                    last = self._steps(metrics)
                return self.finish(last)
            except (OSError, SafetensorError, NotFinite, torch.OutOfMemoryError) as error:
                raise self._stopped(str(error).partition("\n")[0]) from None
            except ConfigError as error:  # a stream is read between steps
                raise self._stopped(str(error), " with the same data") if self.checkpoints.steps() else error from None
            except AskedToStop:
                self._save_and_exit()

    @contextmanager
    def _until_asked_to_stop(self) -> Iterator[None]:
        """Note a SIGTERM instead of dying of it; other threads than the main one cannot."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def note(number, frame):
            self._asked_to_stop = True

        # between steps parameters and optimiser agree, within one they need not
        handler = signal.signal(signal.SIGTERM, note)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, handler)

    def check_stop(self) -> None:
        """Check that no process was asked to stop; all processes call this together, between steps.

        Raises:
            AskedToStop: one was, by a SIGTERM.
        """
        stop = self._asked_to_stop
        # a process that stops alone would leave the others waiting in their next collective operation
        if dist.is_initialized() and dist.get_world_size() > 1:
            stop = torch.tensor(float(stop), device=next(self.trained.parameters()).device)
            dist.all_reduce(stop, dist.ReduceOp.MAX)
        if stop:
            raise AskedToStop

    def _save(self, step: int) -> None:
        """Write a checkpoint of the last step taken, as :meth:`Checkpoints.save`."""
        self.checkpoints.save(step, self.trained, self.optimiser, self.notes())

    def _save_and_exit(self) -> None:
        """Write a checkpoint of the last step taken, and exit with status 0.

        Raises:
            TrainingError: it cannot be written.
        """
        step, saved = self.next_step, self.checkpoints.steps()
        try:
            if step and step not in saved:
                self._save(step)
        except OSError as error:
            raise self._stopped(str(error)) from None
        if is_main():
            result = f"{self.folder / f'step-{step}'} is written" if step else "no step was taken"
            print(f"kvpop: stopped by SIGTERM at step {step}: {result}, and the same command goes on", file=sys.stderr)
        raise SystemExit(0)

    def _steps(self, metrics: Metrics | None) -> dict[str, float]:
        first, total, began = self.next_step, self.steps, time.monotonic()
        last = metrics.last() if metrics else {}
        with tqdm(range(first, total), initial=first, total=total, disable=self.quiet or not is_main()) as bar:
            for step in bar:
                self.check_stop()
                last = self.step(step) | self.judge(step + 1)
                if metrics:
                    metrics.add(step, last)
                    shown = {name: f"{value:.4f}" for name, value in last.items()}
                    speed = {"tokens/s": f"{self.tokens / (time.monotonic() - began):.0f}"} if self.tokens else {}
                    bar.set_postfix(speed | shown)
                self.next_step = step + 1
                if self.next_step % self.save_every == 0 or self.next_step == total:
                    self._save(self.next_step)
        return last

    def step(self, step: int) -> dict[str, float]:
        """Take one optimiser step.

        Returns:
            Metrics of :meth:`backward`, ``grad_norm``, ``lr`` of the first group.

        Raises:
            TrainingError: a loss or gradient is not finite.
        """
        groups = self.optimiser.param_groups
        for group, rate in zip(groups, self.rates(step), strict=True):
            group["lr"] = rate
        metrics = self.backward(step)
        norm = torch.nn.utils.clip_grad_norm_([p for group in groups for p in group["params"]], self.clip)
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        metrics = self.numbers(metrics | {"grad_norm": norm})
        loss, norm = metrics["loss"], metrics["grad_norm"]
        if not math.isfinite(loss) or not math.isfinite(norm):
            raise self._stopped(f"loss {loss}, gradient norm {norm}: lower the learning rate")
        self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)
        return metrics | {"lr": groups[0]["lr"]}

    def _stopped(self, reason: str, condition: str = "") -> TrainingError:
        saved, advice = self.checkpoints.steps(), "no checkpoint had been written"
        if saved:
            advice = f"the checkpoint of step {saved[-1]} is good, and the same command goes on from it{condition}"
        return TrainingError(f"training stopped at step {self.next_step}: {reason}; {advice} in {self.folder}")


class CosineLoop(Loop):
    """Loop with one learning rate and no weight decay.

    Args:
        trained: module whose parameters are trained, at its start.
        folder: folder of checkpoints and metrics.
        steps: optimiser steps.
        lr: peak of the learning rate.
        options: ``save_every`` and ``quiet``; see :class:`Loop`.
    """

    def __init__(self, trained: torch.nn.Module, folder: Path, steps: int, lr: float, **options):
        optimiser = torch.optim.AdamW(trained.parameters(), lr=lr, weight_decay=0.0)
        super().__init__(trained, optimiser, folder, steps, **options)
        self.lr = lr

    def rate(self, step: int) -> float:
        """Return a learning rate: it rises over the first twentieth of the steps, then falls as a cosine to a tenth."""
        return cosine(step, self.steps, max(1, self.steps // 20), self.lr, END * self.lr)

    def rates(self, step: int) -> list[float]:
        """Return the learning rate of the only group of parameters in a step."""
        return [self.rate(step)]
