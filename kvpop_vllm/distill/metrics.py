"""Metrics of a run: JSONL, TensorBoard where it is installed, and a plot at the end."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from pathlib import Path

from kvpop_vllm.config import ConfigError
from kvpop_vllm.files import json_lines, naming, write_figure, write_whole

Tracker = Callable[[int, dict[str, float]], object]
"""Function that is called with a step's number and its metrics, for another tracker than TensorBoard."""


def find_tracker(name: str) -> Tracker:
    """Return the function that ``MODULE:FUNCTION`` names.

    Raises:
        ConfigError: there is none.
    """
    module, _, function = name.partition(":")
    try:
        tracker = getattr(importlib.import_module(module), function)
        if not callable(tracker):
            raise ValueError("it cannot be called")
        return tracker
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"--tracker {name} is no function ({error}): give MODULE:FUNCTION, on PYTHONPATH") from None


class Metrics:
    """Writer that appends one line per step to ``metrics.jsonl``.

    Lines of steps that a restart repeats are dropped first.

    Args:
        folder: folder of the files.
        first: the first step that will be added.
        track: further tracker, called after the others with what is added.

    Raises:
        ConfigError: the file of earlier steps is damaged.
    """

    def __init__(self, folder: Path, first: int, track: Tracker | None = None):
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.path, self.track = folder, folder / "metrics.jsonl", track
        self.rows = [row for row in read_metrics(self.path) if row["step"] < first]
        write_whole(self.path, "".join(json.dumps(row) + "\n" for row in self.rows))
        self.file = self.path.open("a")
        self.board = _board(folder / "tensorboard", first)

    def add(self, step: int, values: dict[str, float]) -> None:
        """Add the metrics of one step."""
        row = {"step": step} | values
        self.rows.append(row)
        with naming(self.path):
            self.file.write(json.dumps(row) + "\n")
            self.file.flush()
        if self.board:
            for name, value in values.items():
                self.board.add_scalar(name, value, step)
        if self.track:
            try:
                self.track(step, values)
            except Exception as error:  # of any code
                raise OSError(f"--tracker failed at step {step}: {error!r}") from error

    def last(self) -> dict[str, float]:
        """Return the metrics of the last step without its number, or an empty dictionary."""
        return {name: value for name, value in self.rows[-1].items() if name != "step"} if self.rows else {}

    def __enter__(self) -> Metrics:
        return self

    def __exit__(self, kind, error, trace) -> None:
        """Close the files and draw ``training.png``; after a failed run, ignore errors of the file system."""
        try:
            self._close()
        except OSError:
            if kind is None:
                raise

    def _close(self) -> None:
        with naming(self.path):
            self.file.close()
            if self.board:
                self.board.close()
        plot(self.rows, self.folder / "training.png")


def read_metrics(path: Path) -> list[dict]:
    """Return the rows of a ``metrics.jsonl``, without a last line that is incomplete.

    Raises:
        ConfigError: the file is damaged.
    """
    return json_lines(path, "step")


def plot(rows: list[dict], path: Path) -> None:
    """Plot loss and retention recall over the steps, each faint with a running mean."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print(f"{path} is not drawn: install kvpop_vllm[distill]")
        return
    if not rows:
        return
    names = [name for name in ("loss", "recall") if name in rows[-1]]
    figure = Figure(figsize=(5 * len(names), 3.2), layout="constrained")
    for axis, name in zip(figure.subplots(1, len(names), squeeze=False)[0], names, strict=True):
        x, y = [r["step"] for r in rows], [r[name] for r in rows]
        width = max(1, len(y) // 20)
        mean = [sum(y[max(0, i - width) : i + 1]) / len(y[max(0, i - width) : i + 1]) for i in range(len(y))]
        axis.plot(x, y, alpha=0.25, color="C0")
        axis.plot(x, mean, color="C0")
        axis.set(xlabel="step", title="loss" if name == "loss" else "top-k retention recall")
    write_figure(path, figure)


def _board(folder: Path, first: int):
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        print(f"{folder} is not written: install kvpop_vllm[distill]")
        return None
    return SummaryWriter(str(folder), purge_step=first)
