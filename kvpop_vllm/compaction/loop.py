"""Training loop of cartridges and compactors, in one process, and the folder of a run."""

from __future__ import annotations

import json
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path

import torch
from tqdm import tqdm

from kvpop_vllm.compaction.cartridge import check_new
from kvpop_vllm.config import ConfigError
from kvpop_vllm.distill.checkpoints import Checkpoints
from kvpop_vllm.distill.metrics import Metrics
from kvpop_vllm.distill.recipe import TrainingError
from kvpop_vllm.files import remove, to_disk, write_whole

END = 0.1
"""Learning rate at the end, as a share of its peak."""
CLIP = 1.0
"""Largest norm of a step's gradient."""


def check_same_run(out: Path, own: dict) -> None:
    """Check that a folder holds nothing but this run, and write ``run/run.json`` into a new one.

    Raises:
        ConfigError: it holds a run with other settings, or something else.
    """
    path = out / "run" / "run.json"
    if not path.exists():
        check_new(out)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(own, indent=1))
        return
    try:
        before = json.loads(path.read_text())
    except ValueError:
        raise ConfigError(f"{path} is damaged, so nobody can tell what it was: choose another --out") from None
    if name := next((name for name in {**own, **before} if own.get(name) != before.get(name)), None):
        raise ConfigError(
            f"{out} holds a run with {name} = {before.get(name)!r}, not {own.get(name)!r}: choose another --out, or the"
            " same settings"
        )


def write_beside(out: Path, write: Callable[[Path], None], *names: str) -> None:
    """Write files beside ``out/run``.

    Args:
        out: folder of the run.
        write: writes them to a folder that does not exist.
        names: their names; the last one makes the folder what it is, so it comes last.
    """
    draft = out / "run" / "draft"
    remove(draft)
    write(draft)
    for name in names:
        os.replace(draft / name, out / name)
        to_disk(out / name)
    remove(draft)


class Loop(ABC):
    """Training loop; the same call continues a run that was stopped.

    Args:
        trained: module whose parameters are trained, at its start.
        folder: folder of checkpoints and metrics.
        steps: optimiser steps.
        lr: peak of the learning rate.
        save_every: optimiser steps between checkpoints.
        quiet: True to hide the progress bar.
    """

    def __init__(
        self, trained: torch.nn.Module, folder: Path, steps: int, lr: float, save_every: int = 50, quiet: bool = False
    ):
        self.trained, self.folder, self.steps, self.lr = trained, folder, steps, lr
        self.save_every, self.quiet = save_every, quiet
        self.optimiser = torch.optim.AdamW(trained.parameters(), lr=lr, weight_decay=0.0)
        self.checkpoints = Checkpoints(folder)

    @abstractmethod
    def backward(self, step: int) -> dict[str, float]:
        """Add the gradient of a step and return its metrics, among them ``loss``."""

    def rate(self, step: int) -> float:
        """Return a learning rate: it rises over the first twentieth of the steps, then falls as a cosine to a tenth."""
        warmup = max(1, self.steps // 20)
        if step < warmup:
            return self.lr * (step + 1) / warmup
        progress = (step - warmup) / max(1, self.steps - 1 - warmup)
        return self.lr * (END + (1 - END) * 0.5 * (1 + math.cos(math.pi * progress)))

    def run(self) -> dict[str, float]:
        """Train to the last step, from the newest checkpoint if there is one, and return the last step's metrics.

        Raises:
            ConfigError: the newest checkpoint cannot be loaded.
            TrainingError: a loss or gradient is not finite, or a file cannot be written.
        """
        if not self.steps:
            return {}
        try:
            first = self.checkpoints.load(self.trained, self.optimiser)
        except ValueError as error:
            raise ConfigError(str(error)) from None
        try:
            with Metrics(self.folder, first) as metrics:
                with tqdm(range(first, self.steps), initial=first, total=self.steps, disable=self.quiet) as bar:
                    for step in bar:
                        found = self.step(step)
                        metrics.add(step, found)
                        bar.set_postfix({name: f"{value:.4f}" for name, value in found.items()})
                        if (step + 1) % self.save_every == 0 or step + 1 == self.steps:
                            self.checkpoints.save(step + 1, self.trained, self.optimiser)
                return metrics.last()
        except OSError as error:
            raise TrainingError(f"training stopped: {error}; the same command continues it") from None

    def step(self, step: int) -> dict[str, float]:
        """Take one optimiser step.

        Returns:
            Metrics of :meth:`backward`, ``grad_norm``, ``lr``.

        Raises:
            TrainingError: a loss or gradient is not finite.
        """
        found, rate = self.backward(step), self.rate(step)
        norm = float(torch.nn.utils.clip_grad_norm_(self.trained.parameters(), CLIP))
        if not math.isfinite(found["loss"]) or not math.isfinite(norm):
            raise TrainingError(
                f"training stopped at step {step}: loss {found['loss']}, gradient norm {norm}; lower --lr"
            )
        for group in self.optimiser.param_groups:
            group["lr"] = rate
        self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)
        return found | {"grad_norm": norm, "lr": rate}
