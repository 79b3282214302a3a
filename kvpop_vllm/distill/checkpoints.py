"""Training state on disk, written whole or not at all.

A checkpoint is on the disk before older ones are removed.
"""

from __future__ import annotations

import json
import re
import shutil
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from kvpop_vllm.files import to_disk

KEEP = 2


def rank() -> int:
    """Return the rank of this process."""
    return dist.get_rank() if dist.is_initialized() else 0


def is_main() -> bool:
    """Return whether this process writes the files that are written once."""
    return rank() == 0


def barrier() -> None:
    """Wait for all processes."""
    if dist.is_initialized():
        dist.barrier()


class Checkpoints:
    """Numbered checkpoints in one folder: trained parameters, optimiser and random state.

    Frozen parameters are left out. Every process writes its own part of sharded parameters.
    """

    def __init__(self, folder: Path):
        self.folder = folder

    def steps(self) -> list[int]:
        """Return the steps of all complete checkpoints in ascending order."""
        names = (re.fullmatch(r"step-(\d+)", p.name) for p in self.folder.glob("step-*"))
        return sorted(int(m.group(1)) for m in names if m)

    def save(self, step: int, model, optimiser, notes: dict | None = None) -> None:
        """Write the state after ``step`` optimiser steps; then remove all checkpoints but the two newest.

        Args:
            step: number of optimiser steps taken.
            model: the trained model.
            optimiser: its optimiser.
            notes: what else a run needs to go on, as JSON has it; those of the first process are written.

        Raises:
            OSError: the state cannot be written; earlier checkpoints are untouched.
        """
        draft = self.folder / f"draft-{step}"
        random_state = draft / f"process-{rank()}.pt"
        if is_main():
            for unfinished in self.folder.glob(
                "draft-*"
            ):  # a killed save of any step leaves one, as large as a checkpoint
                shutil.rmtree(unfinished, ignore_errors=True)
            draft.mkdir(parents=True)
        barrier()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch warns that a single process saves "non-collectively"
                dcp.save(_state(model, optimiser), checkpoint_id=draft)
            gpu = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
            torch.save({"rng": torch.get_rng_state(), "cuda_rng": gpu}, random_state)
            to_disk(random_state)
            barrier()
            if is_main():
                meta = {"step": step, "processes": _world(), "notes": notes or {}}
                (draft / "meta.json").write_text(json.dumps(meta))
                to_disk(draft / "meta.json")
                to_disk(draft)
                draft.rename(self.folder / f"step-{step}")
                to_disk(self.folder)
        except (Exception, CheckpointException) as error:  # CheckpointException is not an Exception
            shutil.rmtree(draft, ignore_errors=True)
            free = shutil.disk_usage(self.folder).free >> 20
            raise OSError(
                f"step {step} cannot be saved in {self.folder}, where {free} MiB are free: {_cause(error)}"
            ) from error
        if is_main():
            for old in self.steps()[:-KEEP]:
                shutil.rmtree(self.folder / f"step-{old}")
        barrier()

    def load(self, model, optimiser) -> int:
        """Restore the newest checkpoint into model and optimiser; any number of processes may have written it.

        Returns:
            Steps taken; 0 if there is no checkpoint.

        Raises:
            ValueError: the checkpoint cannot be read. An older one is not taken instead.
        """
        steps = self.steps()
        if not steps:
            return 0
        folder = self.folder / f"step-{steps[-1]}"
        try:
            processes = json.loads((folder / "meta.json").read_text())["processes"]
            self._load(folder, model, optimiser, processes)
            return steps[-1]
        except torch.OutOfMemoryError:
            raise
        except (Exception, CheckpointException) as error:
            rest = f"the checkpoint of step {steps[-2]}" if len(steps) > 1 else "the start"
            raise ValueError(
                f"{folder} cannot be read ({_cause(error)}): if it is damaged, remove it to go on from {rest}"
            ) from error

    def notes(self, step: int) -> dict:
        """Return the notes of the checkpoint of a step; older ones have none."""
        return json.loads((self.folder / f"step-{step}" / "meta.json").read_text()).get("notes", {})

    @staticmethod
    def _load(folder: Path, model, optimiser, processes: int) -> None:
        state = _state(model, optimiser)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.load(state, checkpoint_id=folder)
        set_state_dict(
            model, optimiser, model_state_dict=state["model"], optim_state_dict=state["optimiser"], options=_OPTIONS
        )
        random_state = torch.load(folder / f"process-{rank() % processes}.pt", weights_only=True)
        torch.set_rng_state(random_state["rng"])
        if random_state["cuda_rng"] is not None and torch.cuda.is_available():
            torch.cuda.set_rng_state(random_state["cuda_rng"])


_OPTIONS = StateDictOptions(ignore_frozen_params=True, strict=False)


def _state(model, optimiser) -> dict:
    parameters, moments = get_state_dict(model, optimiser, options=_OPTIONS)
    return {"model": parameters, "optimiser": moments}


def _world() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def _cause(error: BaseException) -> str:
    """Return the innermost message, which distributed checkpointing wraps in a report of all processes."""
    text = [line.strip() for line in str(error).splitlines() if "rror" in line and line.strip()]
    return text[-1] if text else str(error).splitlines()[0] if str(error) else type(error).__name__
