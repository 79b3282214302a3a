"""`kvpop eval --report`: a table, plots, and maps of the tokens that each layer retains (KVpop Figure 6).

Bad input raises a :class:`~kvpop_vllm.config.ConfigError` that names what to change.
"""

import json
import math
from pathlib import Path

import torch

from kvpop_vllm.config import ConfigError
from kvpop_vllm.evaluation.backends import Backend
from kvpop_vllm.evaluation.output import markdown_table, note
from kvpop_vllm.evaluation.policies import ResolvedPolicy
from kvpop_vllm.evaluation.runner import DENSE, Setting
from kvpop_vllm.evaluation.statistics import INTERVAL
from kvpop_vllm.files import write_figure, write_whole

TABLE, FIGURE, MAP, MAP_DATA = "table.md", "figure.png", "retained.png", "retained.jsonl"
MOST_BINS = 64
"""Maximum number of bins of positions in a map."""


class Report:
    """Folder of a report: a table, a figure and maps of retained tokens.

    Args:
        folder: created if it does not exist.
    """

    def __init__(self, folder: str):
        try:
            # not pyplot, which chooses a display and keeps figures
            from matplotlib.figure import Figure
        except ImportError:
            raise ConfigError("--report needs matplotlib: pip install 'kvpop_vllm[distill]'") from None
        self.folder, self.new_figure = Path(folder), Figure
        if self.folder.exists() and not self.folder.is_dir():
            raise ConfigError(f"--report {folder} is a file: name a folder")
        self.folder.mkdir(parents=True, exist_ok=True)
        self.maps: list[dict] = []
        self.left_out: list[str] = []

    def add_maps(
        self, backend: Backend, settings: list[Setting], resolved: ResolvedPolicy, tokens: torch.Tensor
    ) -> None:
        """Run the policy on ``tokens [S]`` once more and add a map of its caches for each setting.

        If the backend cannot run all of them, the table says so.
        """
        held_tokens = backend.held(resolved, tokens)
        if held_tokens.shape[-1] < len(tokens):
            self._leave_out("this backend cannot run a prompt that fills the model: maps end a token earlier")
        width = -(-held_tokens.shape[-1] // MOST_BINS)
        for setting in settings:
            self.maps.append(
                {
                    "policy": resolved.spec.name,
                    "length": held_tokens.shape[-1],
                    "budget": setting.budget,
                    "equal": setting.equal,
                    "tokens_per_bin": width,
                    "held": retention_map(held_tokens, width).tolist(),
                }
            )

    def _leave_out(self, reason: str) -> None:
        if reason not in self.left_out:
            self.left_out.append(reason)
            note(reason)

    def write(self, task: str, table: list[dict], columns: tuple[str, ...], data: str) -> None:
        """Write all files and print their names."""
        notes = "".join(f"\n{line}.\n" for line in self.left_out)
        text = f"`kvpop eval --task {task}` on {data}\n\n{markdown_table(table, columns)}{notes}"
        write_whole(self.folder / TABLE, text)
        drawing = self.new_figure(layout="constrained")
        DRAW[task](drawing, table)
        write_figure(self.folder / FIGURE, drawing)
        written = [TABLE, FIGURE]
        if self.maps:
            write_whole(self.folder / MAP_DATA, "".join(json.dumps(entry) + "\n" for entry in self.maps))
            drawing = self.new_figure(layout="constrained")
            draw_maps(drawing, self.maps)
            write_figure(self.folder / MAP, drawing)
            written += [MAP, MAP_DATA]
        else:  # files of an earlier run
            for name in (MAP, MAP_DATA):
                (self.folder / name).unlink(missing_ok=True)
        note(f"{self.folder} holds {', '.join(written)}")


def retention_map(held_mask: torch.Tensor, width: int) -> torch.Tensor:
    """Return the share of each bin of positions that is held, mean over heads.

    Args:
        held_mask: ``[layers, H, S]`` booleans.
        width: positions of a bin. The last bin may be shorter.

    Returns:
        ``[layers, bins]``.
    """
    return torch.stack([part.float().mean(dim=(1, 2)) for part in held_mask.split(width, dim=-1)], dim=1)


def draw_maps(drawing, maps: list[dict]) -> None:
    """Draw one map for each policy (rows) and budget (columns): layers downwards, positions to the right."""
    names = list(dict.fromkeys(entry["policy"] for entry in maps))
    budgets = list(dict.fromkeys((entry["budget"], entry["equal"]) for entry in maps))
    drawing.set_size_inches(1 + 4 * len(budgets), 0.8 + 2.1 * len(names))
    # squeeze=False, since one policy or one budget must have two indices too
    axes = drawing.subplots(len(names), len(budgets), squeeze=False)
    for entry in maps:
        axis = axes[names.index(entry["policy"])][budgets.index((entry["budget"], entry["equal"]))]
        end = entry["tokens_per_bin"] * len(entry["held"][0])
        # layer i is centred at i, the first on top
        extent = (0, end, len(entry["held"]) - 0.5, -0.5)
        image = axis.imshow(entry["held"], aspect="auto", vmin=0, vmax=1, extent=extent, interpolation="nearest")
        equal = " (equal bytes)" if entry["equal"] == "bytes" else ""
        axis.set_title(f"{entry['policy']}, B = {entry['budget']:,}{equal}", fontsize=9)
        axis.set(xlabel="position", ylabel="layer")
    drawing.colorbar(image, ax=axes, label="share of heads and positions that is held")


def _curves(table: list[dict], along: str, value: str) -> dict[str, list[tuple[float, float, float, float]]]:
    """Return the points of each policy's curve, in ascending order: x, y, and how far its interval goes down and up."""
    curves: dict[str, list[tuple[float, float, float, float]]] = {}
    for line in table:
        if line.get(along) is not None and line.get(value) is not None:
            name = line["policy"] + (" (equal bytes)" if line.get("equal") == "bytes" else "")
            y = line[value]
            low, high = line.get(value + INTERVAL) or (y, y)
            curves.setdefault(name, []).append((line[along], y, max(0.0, y - low), max(0.0, high - y)))
    return {name: sorted(points) for name, points in curves.items()}


def _against_budget(drawing, table: list[dict], plots: list[tuple[str | None, str]]) -> None:
    """Draw values against the budget, a row of plots for each length. A plot is a kind of record and a value."""
    lengths = sorted({line["length"] for line in table})
    drawing.set_size_inches(4 * len(plots), 3.4 * len(lengths))
    for row, length in zip(drawing.subplots(len(lengths), len(plots), squeeze=False), lengths, strict=True):
        for axis, (kind, value) in zip(row, plots, strict=True):
            lines = [x for x in table if x["length"] == length and x.get("kind") == kind]
            for name, points in _curves(lines, "budget", value).items():
                x, y, *reach = zip(*points, strict=True)
                (curve,) = axis.plot(x, y, marker="o", label=name)
                # bars only where a point has an interval
                if any(map(any, reach)):
                    axis.errorbar(x, y, reach, fmt="none", ecolor=curve.get_color(), capsize=2, linewidth=1)
            # lines without a budget hold for all budgets
            for line in (x for x in lines if x["budget"] is None and x.get(value) is not None):
                style = {"color": "black", "linestyle": ":"} if line["policy"] == DENSE else {"linestyle": "--"}
                axis.axhline(line[value], **style, label=line["policy"])
            axis.set(xlabel="budget B, tokens per KV head", ylabel=value)
            axis.set_title(f"{kind}, {length:,} tokens" if kind else f"{length:,} tokens", fontsize=9)
            if kind:  # shares
                axis.set_ylim(-0.03, 1.03)
        row[0].legend(fontsize=7)


def draw_text(drawing, table: list[dict]) -> None:
    """Draw perplexity, divergence and output error against the budget."""
    _against_budget(drawing, table, [(None, value) for value in ("perplexity", "kl", "error")])


def draw_retrieval(drawing, table: list[dict]) -> None:
    """Draw partial credit against the budget, a column of plots for each kind."""
    _against_budget(drawing, table, [(kind, "partial") for kind in dict.fromkeys(line["kind"] for line in table)])


def draw_reasoning(drawing, table: list[dict]) -> None:
    """Draw exact answers against the budget, a column of plots for each kind."""
    _against_budget(drawing, table, [(kind, "exact") for kind in dict.fromkeys(line["kind"] for line in table)])


def draw_replay(drawing, table: list[dict]) -> None:
    """Draw divergence and agreement against position, a row of plots for each length and budget."""
    settings = list(dict.fromkeys((x["length"], x["budget"], x["equal"]) for x in table if x["budget"]))
    drawing.set_size_inches(10, 3.2 * len(settings))
    axes = drawing.subplots(len(settings), 2, squeeze=False)
    for row, setting in zip(axes, settings, strict=True):
        for line in (x for x in table if (x["length"], x["budget"], x["equal"]) == setting):
            for axis, value in zip(row, ("kl", "agreement"), strict=True):
                means = line[f"{value}_by_position"]
                middles = [min((i + 0.5) * line["bucket"], line["length"]) for i in range(len(means))]
                axis.plot(middles, means, marker=".", label=line["policy"])
        for axis, label in zip(row, ("KL from dense, nats a token", "same most likely token"), strict=True):
            axis.axvline(setting[1], color="black", linewidth=0.5)
            axis.set(xlabel="position", ylabel=label)
        equal = " (equal bytes)" if setting[2] == "bytes" else ""
        row[0].set_title(f"{setting[0]:,} tokens, B = {setting[1]:,}{equal}", fontsize=9)
        # a logarithmic axis has no zero
        positive = [x for line in table for x in line["kl_by_position"] if x > 1e-6]
        if positive:
            row[0].set_yscale("log")
            row[0].set_ylim(bottom=10 ** math.floor(math.log10(min(positive))))
        row[1].legend(fontsize=7)


DRAW = {"text": draw_text, "retrieval": draw_retrieval, "replay": draw_replay, "reasoning": draw_reasoning}
