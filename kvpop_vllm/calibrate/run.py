"""`kvpop calibrate`: what layers lose, how they share the slots then, and whether unseen text is better for it."""

from __future__ import annotations

import functools
import json
import math
import shlex
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import torch

from kvpop_vllm import __version__, policies
from kvpop_vllm.calibrate.division import Curve, damped, divide, shares_of
from kvpop_vllm.calibrate.layers import RowReplay, head_losses, layer_losses, shared_losses
from kvpop_vllm.calibrate.passes import EQUAL, Choice, Passes
from kvpop_vllm.calibrate.records import Records
from kvpop_vllm.calibrate.rows import TEXT, Text, read_text
from kvpop_vllm.calibration.shares import AUTO, Calibration
from kvpop_vllm.config import DEFAULT_SINKS, ConfigError
from kvpop_vllm.distill.run import default_device, load_tokenizer
from kvpop_vllm.distill.sources import find_sources
from kvpop_vllm.evaluation.output import format_table, note, progress
from kvpop_vllm.evaluation.statistics import LEAST, bootstrap_ratio, estimate
from kvpop_vllm.files import write_whole
from kvpop_vllm.model_hook import load_model
from kvpop_vllm.model_shape import ModelShape, check_length, positions_of, read_model_config, vocabulary_of
from kvpop_vllm.policies.allocators import proportional
from kvpop_vllm.policies.base import Order
from kvpop_vllm.roles import Retention

VERSION = 1
"""Version of what is measured."""
LENGTH = 2048
"""Default length of a row, in tokens."""
SIZES = 64, 16, 8, 4, 2
"""Windows at which layers and heads are measured: the length over these."""
QUERIES = 32
"""The length over this is the number of queries that run again."""
BUDGETS = 2, 4, 8
"""Budgets of the report: the length over these. Shares are judged, and a policy is recommended, at the second."""
WINDOWS = 1 / 16, 1 / 4, 1 / 2
"""Windows that are tried for a policy, as fractions of ``B - s``."""
SEARCHED = 3
"""Rows that windows are chosen by."""
PROBE = "streaming-llm"
"""Policy that shares are chosen and judged with: a window, and the cheapest."""
COLUMNS = "policy", "budget", "window", "shares", "kl", "over equal", "MiB", "prefill"


@dataclass(frozen=True)
class Options:
    """Options of a calibration.

    Attributes:
        model: folder of the model.
        out: folder to write.
        data: files and folders of text; empty for the text of this package.
        unit: ``layer`` or ``head``.
        policies: names of the policies of the report.
        length: S, tokens of a row.
        rows: rows to measure on, and as many to judge by.
        protect: True to protect the prompts of documents.
        dtype: dtype of the model.
    """

    model: str
    out: str
    data: tuple[str, ...] = ()
    unit: str = "layer"
    policies: tuple[str, ...] = ()
    length: int = LENGTH
    rows: int = 12
    protect: bool = False
    dtype: str = "float32"


def in_chunks() -> list[str]:
    """Return the names of the policies that need no scorer and read prompts in chunks."""
    found = policies.loadable()[0]
    return [
        cls.name for cls in found if _takes_shares(cls) and cls.order in (Order.STATIC, Order.AGED) and not cls.draws
    ]


def _takes_shares(cls: type[policies.Policy]) -> bool:
    return cls.scorer_kind is None and not cls.keeps_all and not cls.compresses


def check_policies(names: tuple[str, ...]) -> tuple[str, ...]:
    """Return the policies of a report, :data:`PROBE` first."""
    for name in names:
        cls = policies.get(name)
        if not _takes_shares(cls):
            why = "needs a scorer" if cls.scorer_kind else "takes no shares of layers"
            raise ConfigError(f"--policies {name} {why}: leave it out")
    return tuple(dict.fromkeys([PROBE, *(names or in_chunks())]))


class Calibrator:
    """A calibration of one model.

    Args:
        options: see :class:`Options`.
    """

    def __init__(self, options: Options):
        self.options, self.policies = options, check_policies(options.policies)
        most = positions_of(read_model_config(options.model))
        self.length = min(options.length, most or options.length)
        if self.length < 64:
            raise ConfigError(f"--length {self.length} is too short to shrink: give at least 64")
        check_length(options.model, self.length)
        self.dtype, self.shape = getattr(torch, options.dtype), ModelShape.of(options.model, self.length)
        if options.unit == "head" and self.shape.num_kv_heads == 1:
            raise ConfigError("the model has one KV head per layer: give --shares layer")
        self.sizes = [max(2, self.length // part) for part in SIZES]
        self.queries = max(8, self.length // QUERIES)
        self.budgets = [self.length // part for part in BUDGETS]
        self.passes_cost = 1.5
        vocabulary, tokenizer = vocabulary_of(options.model), load_tokenizer(options.model)
        where = {"vocab_size": vocabulary, "protect": options.protect}
        self.text: Text = read_text(list(options.data), tokenizer, self.length, options.rows, **where)
        longest_prompt = max(prompt for _, prompt in [*self.text.measured, *self.text.held_out])
        if longest_prompt > self.length // 2:
            raise ConfigError(f"a prompt has {longest_prompt} of {self.length} tokens, more than half: raise --length")
        self.layers = self.shape.num_layers
        self.split = range(0) if options.unit == "layer" else range(math.ceil(self.layers / 2))

    @property
    def settings(self) -> dict:
        """Settings that measurements depend on."""
        files = sorted(Path(self.options.model).glob("*.safetensors"))
        data = find_sources(self.options.data or [TEXT])
        return {
            "version": VERSION,
            "model": [self.shape.model_type, self.shape.rotation, [[file.name, file.stat().st_size] for file in files]],
            "data": [source.fingerprint() for source in data],
            "length": self.length,
            "rows": self.options.rows,
            "protect-prompt": self.options.protect,
            "dtype": self.options.dtype,
        }

    # --- what is to be done ---

    def layer_cost(self, layer: int, variants: int) -> float:
        """Return the work of measuring a layer on a row, in passes of a row through the model."""
        return variants * self.queries / self.length * (self.layers - layer) / self.layers * 2

    @property
    def work(self) -> dict[str, float]:
        """Work of each stage in passes of a row through the model."""
        rows, heads = len(self.text.measured), self.shape.num_kv_heads
        layers = sum(self.layer_cost(layer, len(self.sizes)) for layer in range(self.layers)) + 1
        split = sum(self.layer_cost(layer, len(self.sizes) * heads) for layer in self.split) + bool(self.split)
        tables = len(BUDGETS) * (2 * len(BUDGETS) + 1)
        tried = rows * (1 + 2 * tables * self.queries / self.length)
        tried += SEARCHED * self.passes_cost * len(WINDOWS) * (len(self.policies) - 1)
        judged = len(self.text.held_out) * self.passes_cost * len(BUDGETS) * 2 * len(self.policies)
        return {"layers": rows * layers, "heads": rows * split, "search": tried, "held-out rows": judged}

    # --- stages ---

    def run(self) -> dict:
        """Measure what is not measured yet, write the folder, and return the report."""
        began = time.process_time()
        self.model = load_model(self.options.model, self.dtype).eval().to(default_device())
        out = Path(self.options.out)
        self.records = Records(out, self.settings)
        self.passes = Passes(self.model, self.shape, self.options.protect, self.records, out / "tables")
        with progress(sum(self.work.values()), "calibrate") as tick:
            curves = self._curves(tick)
            chosen = self._search(curves, tick)
            windows = self._windows(chosen, tick)
            lines, kept = self._judge(chosen, windows, tick)
        shares = (
            None
            if chosen == EQUAL or not kept
            else json.loads((out / "tables" / f"{chosen}.json").read_text())["shares"]
        )
        best = min((line for line in lines if line["budget"] == self.budgets[1]), key=lambda line: line["kl"])
        sizes = {name: getattr(self.shape, name) for name in ("model_type", "num_layers", "num_kv_heads", "head_dim")}
        calibration = Calibration(
            **sizes,
            rotation=self.shape.rotation,
            unit="uniform" if shares is None else self.options.unit,
            shares=shares,
            windows=windows if shares is not None else {},
            policy=best["policy"],
            budget=best["budget"],
        )
        report = {
            "model": self.options.model,
            "kvpop": __version__,
            "text": self.text.source,
            "length": self.length,
            "rows": [len(self.text.measured), len(self.text.held_out)],
            "intervals over": "documents" if self.text.by_document else "separate passages of fewer than 8 documents",
            "shares": calibration.unit,
            "table": chosen,
            "cpu seconds": round(time.process_time() - began, 1),
            "lines": lines,
            "command": self.command(calibration),
        }
        write_whole(out / "report.json", json.dumps(report, indent=1) + "\n")
        calibration.write(out)
        return report

    def command(self, calibration: Calibration) -> str:
        """Return the command that serves the recommendation."""
        words = ["vllm", "serve", self.options.model, "--kv-policy", AUTO, "--kv-calibration", self.options.out]
        if self.options.protect:
            words += ["--kv-protect-prompt", "all"]
        if default_device().type == "cpu":
            words += ["--kv-cache-memory-bytes", str(1 << 30)]
        return shlex.join(words)

    def _curves(self, tick) -> list[Curve]:
        """Return what each layer, and each head of the layers that lose most, loses with each window."""
        rows, first = self.text.measured, [prompt or DEFAULT_SINKS for _, prompt in self.text.measured]
        losses = [
            self._row_curves(number, first[number], range(self.layers), "layer", tick) for number in range(len(rows))
        ]
        layers = torch.tensor(losses, dtype=torch.float64).mean(0)
        if not bool(layers.isfinite().all()):
            raise ConfigError("the model's predictions are not finite: give --dtype float32")
        by_loss = layers[:, len(self.sizes) // 2].argsort(descending=True).tolist()
        split = sorted(by_loss[: len(self.split)])
        found = []
        if split:
            heads = [self._row_curves(number, first[number], split, "head", tick) for number in range(len(rows))]
            means = torch.tensor(heads, dtype=torch.float64).mean(0)
            for layer, of_heads in zip(split, means.tolist(), strict=True):
                found += [Curve(layer, (head,), (*losses, 0.0)) for head, losses in enumerate(of_heads)]
        every = tuple(range(self.shape.num_kv_heads))
        return found + [Curve(i, every, (*layers[i].tolist(), 0.0)) for i in range(self.layers) if i not in split]

    def _row_curves(self, number: int, first: int, layers, unit: str, tick) -> list:
        """Return the losses of layers, or of their heads, on a row."""
        keys = {layer: [unit, number, layer] for layer in layers}
        variants = len(self.sizes) * (1 if unit == "layer" else self.shape.num_kv_heads)
        row, measure = None, layer_losses if unit == "layer" else head_losses
        for layer, key in keys.items():
            if key not in self.records:
                row = row or self._replay(number)
                self.records.get(key, lambda layer=layer, row=row: measure(row, layer, first, self.sizes))
            tick(self.layer_cost(layer, variants))
        tick(1)
        return [self.records.get(key, list) for key in keys.values()]

    @torch.inference_mode()
    def _replay(self, number: int) -> RowReplay:
        tokens = self.text.measured[number][0].to(default_device())
        return RowReplay(self.model, tokens, self.queries)

    def _search(self, curves: list[Curve], tick) -> str:
        """Return the name of the table of shares that measured rows like best, :data:`EQUAL` for none.

        Candidates are the divisions by marginal gain at each budget, and each of these half way to equal shares. The
        geometric mean over budgets of the divergence with all heads' windows shrunk decides.
        """
        sizes, shape = [*self.sizes, self.length - DEFAULT_SINKS], (self.layers, self.shape.num_kv_heads)
        tables = {EQUAL: torch.ones(shape, dtype=torch.float64)}
        for part, budget in zip(BUDGETS, self.budgets, strict=True):
            slots = divide(curves, sizes, budget - DEFAULT_SINKS)
            shares = shares_of(curves, slots, sizes[0], *shape)
            tables |= {f"{self.options.unit}-{part}": shares, f"{self.options.unit}-{part}-damped": damped(shares)}
        for name, shares in tables.items():
            self.passes.write_table(name, shares)
        windows = torch.stack([self._windows_at(budget, t) for t in tables.values() for budget in self.budgets])
        losses = [self._row_search(number, windows, tick) for number in range(len(self.text.measured))]
        means = torch.tensor(losses, dtype=torch.float64).mean(0).view(len(tables), len(self.budgets))
        return list(tables)[int(means.clamp_min(1e-12).log().mean(1).argmin())]

    def _windows_at(self, budget: int, shares: torch.Tensor) -> torch.Tensor:
        """Return the window ``[layers, H]`` of each head in tokens, as serving divides a budget."""
        kept = Retention(budget, DEFAULT_SINKS, self._window(PROBE, WINDOWS[0], budget))
        return proportional(shares.tolist(), kept, *shares.shape) - DEFAULT_SINKS

    def _row_search(self, number: int, windows: torch.Tensor, tick) -> list[float]:
        """Return the losses of a row with each table of windows."""
        prompt = self.text.measured[number][1]
        measure = functools.partial(self._shared, number, prompt or DEFAULT_SINKS, windows)
        found = self.records.get(["search", self.options.unit, number], measure)
        tick(1 + 2 * len(windows) * self.queries / self.length)
        return found

    def _shared(self, number: int, first: int, windows: torch.Tensor) -> list[float]:
        return shared_losses(self._replay(number), first, windows)

    def _window(self, policy: str, fraction: float, budget: int) -> int:
        """Return the window that serving makes of a fraction at a budget."""
        return max(1, int(fraction * (budget - policies.get(policy).default_sinks)))

    def _windows(self, chosen: str, tick) -> dict[str, float]:
        """Return the best window of each policy with the shares, as a fraction of ``B - s``."""
        budget, found = self.budgets[1], {PROBE: WINDOWS[0]}
        for name in self.policies:
            if name == PROBE:
                continue
            choices = [Choice(name, budget, self._window(name, part, budget), chosen) for part in WINDOWS]
            records = self._over("search", self.text.measured[:SEARCHED], choices, tick)
            means = [fmean(record["kl"] for record in own) for own in records]
            found[name] = WINDOWS[means.index(min(means))]
        return found

    def _judge(self, chosen: str, windows: dict[str, float], tick) -> tuple[list[dict], bool]:
        """Return the lines of the report, by rows that were not measured, and whether shares are kept.

        They are kept if the window of :data:`PROBE` diverges less at the middle budget, with an interval below 1, and at no
        budget more with an interval above 1.
        """
        rows, units = self.text.held_out, self.text.units
        pairs, lines, ratios = [], [], []
        for name in self.policies:
            for budget in self.budgets:
                own = Choice(name, budget, self._window(name, windows[name], budget), chosen)
                pairs.append((Choice(name, budget, None, EQUAL), own))
        distinct = list(dict.fromkeys(choice for pair in pairs for choice in pair))
        records = dict(zip(distinct, self._over("held-out", rows, distinct, tick), strict=True))
        for pair in pairs:
            equal, own = ([record["kl"] for record in records[choice]] for choice in pair)
            if pair[0].policy == PROBE and chosen != EQUAL:
                ratios.append(bootstrap_ratio(own, equal, units=units))
            for choice in pair if chosen != EQUAL else pair[:1]:
                lines.append(self._line(choice, records[choice], units, None if choice.shares == EQUAL else equal))
        kept = bool(ratios) and ratios[1].high < 1 and not any(ratio.low > 1 for ratio in ratios)
        return [line for line in lines if kept or line["shares"] == EQUAL] if not kept else lines, kept

    def _line(self, choice: Choice, records: list[dict], units: list[int], equal: list[float] | None) -> dict:
        """Return a line of the report."""
        resolved, losses = self.passes.resolve(choice), [record["kl"] for record in records]
        line = {
            "policy": choice.policy,
            "budget": choice.budget,
            "window": resolved.roles.window,
            "shares": choice.shares,
        }
        line |= estimate("kl", losses, units=units)
        if equal is not None:
            line |= estimate("over equal", losses, equal, units=units)
        line["MiB"] = resolved.request_bytes(self.length, self.dtype).allocated / 2**20
        return line | {"prefill": fmean(record["prefill"] for record in records)}

    def _over(self, side: str, rows, choices: list[Choice], tick) -> list[list[dict]]:
        """Return measurements of rows, with a progress that counts those that are there already."""
        done = len(rows) * len(choices) - self.passes.missing(side, len(rows), choices)
        tick(done * self.passes_cost)
        return self.passes.over(side, rows, choices, lambda count: tick(count * self.passes_cost))

    def estimate(self) -> dict[str, float]:
        """Return the minutes and the memory in GiB that a run takes, from a few passes that are made now."""
        began = time.monotonic()
        self.model = load_model(self.options.model, self.dtype).eval().to(default_device())
        loaded = time.monotonic() - began
        middle = self.layers // 2
        began = time.monotonic()
        row = self._replay(0)
        replay = time.monotonic() - began
        began = time.monotonic()
        layer_losses(row, middle, DEFAULT_SINKS, self.sizes)
        per_layer = (time.monotonic() - began) / self.layer_cost(middle, len(self.sizes))
        work = self.work
        seconds = loaded + (work["layers"] + work["heads"]) * per_layer
        served = (work["search"] + work["held-out rows"]) * replay
        return {"minutes": (seconds + served) / 60, "GiB": self.memory() / 2**30}

    def memory(self) -> float:
        """Return the bytes that a run needs, about: weights, keys and values of a row, a batch of variants, logits."""
        shape, size = self.shape, torch.empty((), dtype=self.dtype).element_size()
        weights = sum(weight.numel() for weight in self.model.parameters()) * size
        row = 2 * shape.num_kv_heads * shape.head_dim * self.length * size
        hidden = 16 * self.queries * 24 * (shape.hidden_size or 0) * size
        logits = 4 * 4 * 256 * vocabulary_of(self.options.model) + 4 * self.length // 4 * vocabulary_of(
            self.options.model
        )
        return weights + row * (shape.num_layers + 2 * 16) + hidden + logits


def calibrate(options: Options) -> dict:
    """Calibrate a model, print the report and return it."""
    calibrator = Calibrator(options)
    if not calibrator.text.by_document:
        note(f"the text has fewer than {2 * LEAST} documents: intervals are over separate passages")
    report = calibrator.run()
    print(format_table(report["lines"], COLUMNS))
    print(f"text: {report['text']}; intervals over {report['intervals over']}")
    print(f"shares: {report['shares']}")
    print(report["command"], flush=True)
    return report


def dry_run(options: Options) -> None:
    """Print how long a calibration takes, and its memory."""
    found = Calibrator(options).estimate()
    print(f"about {max(1, round(found['minutes']))} minutes and {found['GiB']:.1f} GiB of memory")
