"""Stages of a calibration: losses of layers, a table of shares, windows of policies, a verdict by other rows."""

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from statistics import fmean, median
from typing import NamedTuple

import torch

from kvpop_vllm import policies
from kvpop_vllm.calibrate.division import Curve, between, curves_of, divide, shares_from_slots
from kvpop_vllm.calibrate.layers import (
    Evicting,
    Kept,
    RowReplay,
    Windowed,
    head_losses,
    layer_measures,
    shared_losses,
)
from kvpop_vllm.calibrate.passes import EQUAL, SEARCH, Choice, Passes
from kvpop_vllm.calibrate.plan import FACTORS, GROUPS, PROBE, SERVED, SHORTLIST, WINDOWS, Plan
from kvpop_vllm.calibrate.records import Records
from kvpop_vllm.config import DEFAULT_SINKS, ConfigError
from kvpop_vllm.evaluation.policies import ResolvedPolicy
from kvpop_vllm.evaluation.statistics import bootstrap_ratio, estimate
from kvpop_vllm.policies.allocators import proportional
from kvpop_vllm.roles import Retention

TINY = 1e-3
"""Divergence, in nats per token, that a verdict does not count as a loss."""
FLOOR = 1e-5
"""Smallest divergence that tables are compared by: over 1,000 tokens of an answer it adds up to 0.01 nats."""


def _scores(losses: torch.Tensor, names: list[str]) -> dict[str, float]:
    """Return the mean logarithm over budgets of the losses ``[names * budgets]`` of tables of shares, by name."""
    return dict(zip(names, losses.view(len(names), -1).clamp_min(FLOOR).log().mean(1).tolist(), strict=True))


def is_better(losses: list[list[list[float]]], units: list[int]) -> bool:
    """Return whether rows lose less with a table of shares: over all budgets, and at none notably more.

    Args:
        losses: for each budget the losses of all rows with equal shares, and with the table.
        units: unit of each row.
    """
    for equal, shared in losses:
        notable = fmean(shared) - fmean(equal) > TINY
        if notable and bootstrap_ratio(shared, equal, units=units).low > 1:
            return False
    equal, shared = ([sum(rows) for rows in zip(*side, strict=True)] for side in zip(*losses, strict=True))
    return bootstrap_ratio(shared, equal, units=units).high < 1


class Verdict(NamedTuple):
    """Verdict of rows that were not measured.

    Attributes:
        lines: lines of the report.
        better: True if the table of shares is better than equal shares.
    """

    lines: list[dict]
    better: bool


class Stages:
    """Stages of a calibration of a loaded model; what was measured is kept.

    Args:
        plan: what to measure.
        model: from :func:`kvpop_vllm.model_hook.load_model`.
        records: where measurements are kept.
        passes: passes under policies.
        tick: called with the work that is done, in dense passes of a row.
    """

    def __init__(
        self, plan: Plan, model: torch.nn.Module, records: Records, passes: Passes, tick: Callable[[float], object]
    ):
        self.plan, self.model, self.records, self.passes, self.tick = plan, model, records, passes, tick

    def replay(self, number: int) -> RowReplay:
        """Return a measured row after a dense pass."""
        tokens = self.plan.text.measured[number][0].to(next(self.model.parameters()).device)
        with torch.inference_mode():
            row = RowReplay(self.model, tokens, self.plan.queries)
        if not bool(row.exact.isfinite().all()):
            raise ConfigError("the model's predictions are not finite: choose another model or --dtype")
        return row

    def _first(self, number: int) -> int:
        """Return the number of first tokens of a measured row that all heads see."""
        return self.plan.text.measured[number][1] or DEFAULT_SINKS

    def attention(self, number: int) -> Kept:
        """Return the attention of a measured row with few slots: a window, or that of the policy that decides."""
        if self.plan.decides == PROBE:
            return Windowed(self._first(number))
        return Evicting(self._equal(self.plan.budget, self.plan.text.measured[number][1]))

    def pass_cost(self, name: str) -> float:
        """Return the time of a pass of a row under a policy over that of a dense pass, for a dry run."""
        choice = Choice(name, self.plan.budget, None, EQUAL)
        return self.passes.prefill(*self.plan.text.measured[0], choice)

    def curves(self) -> tuple[list[Curve], list[Curve]]:
        """Return what layers lose with few slots, with heads of those that lose most, and the errors of their attention.

        Errors cost next to nothing and tell the heads of all layers apart, but say less about the model's output.
        """
        # the last size is that of a whole row, at which nothing is lost
        shape, sizes = self.plan.shape, (*self.plan.sizes, self.plan.length - DEFAULT_SINKS)
        layers, errors = self._means("layer", range(shape.num_layers)).split([1, shape.num_kv_heads], 1)
        # heads take H times as long as their layer, so only those of the layers that lose most are measured
        losing = layers[:, 0, len(sizes) // 2].argsort(descending=True, stable=True).tolist()
        split, every = sorted(losing[: self.plan.split]), tuple(range(shape.num_kv_heads))
        curves = []
        if split:
            for layer, heads in zip(split, self._means("head", split).tolist(), strict=True):
                curves += [Curve(layer, (head,), sizes, (*losses, 0.0)) for head, losses in enumerate(heads)]
        unsplit = (layer for layer in range(shape.num_layers) if layer not in split)
        curves += [Curve(layer, every, sizes, (*layers[layer, 0].tolist(), 0.0)) for layer in unsplit]
        groups = [(head,) for head in every] if split else [every]
        of_errors = [
            Curve(layer, group, sizes, (*errors[layer, list(group)].sum(0).tolist(), 0.0))
            for layer in range(shape.num_layers)
            for group in groups
        ]
        return curves, of_errors

    def _means(self, unit: str, layers: Iterable[int]) -> torch.Tensor:
        """Return the measures of layers, or the losses of their heads, ``[layers, 1 + H or H, sizes]``, means over rows."""
        rows = range(len(self.plan.text.measured))
        return torch.tensor([self._losses(unit, number, layers) for number in rows], dtype=torch.float64).mean(0)

    def _losses(self, unit: str, number: int, layers: Iterable[int]) -> list:
        """Return the measures of layers, or the losses of their heads, on a row."""
        measure, sizes, losses, row = layer_measures if unit == "layer" else head_losses, self.plan.sizes, [], None
        variants = len(sizes) * (1 if unit == "layer" else self.plan.shape.num_kv_heads)
        for layer in layers:
            key = [unit, number, layer]
            # a call that goes on after a stop replays only rows of which something is missing
            if key not in self.records:
                row = row or self.replay(number)
                self.records.put(key, measure(row, layer, self.attention(number), sizes))
            losses.append(self.records[key])
            # also for what is there already, so that progress adds up
            self.tick(self.plan.layer_cost(layer, variants))
        self.tick(1)
        return losses

    def search(self, curves: list[Curve], errors: list[Curve]) -> str:
        """Return the name of the table of shares that measured rows like best, :data:`EQUAL` for none.

        Candidates are the divisions by marginal gain at each budget, and each of these half way to equal shares. Losses
        of one layer or head do not add up to those of all, and errors of attention may be a better guide for heads. The
        heads of each rank have as many slots together as those of any other of as many layers. The geometric mean over
        budgets of the divergence decides, under the policy that decides and on the kernels of serving. :data:`PROBE`
        tries the best only, by the last queries with all heads' windows shrunk. Under another policy the best tables
        are then improved, see :meth:`improve`.
        """
        plan, unit = self.plan, self.plan.unit
        shape = plan.shape.num_layers, plan.shape.num_kv_heads
        tables, smallest = {EQUAL: torch.ones(shape, dtype=torch.float64)}, plan.sizes[0]
        measures = {unit: curves} | ({f"{unit}-error": errors} if plan.by_errors else {})
        for budget in plan.budgets:
            mean = budget - DEFAULT_SINKS if plan.decides == PROBE else self._roles(budget).topk
            for name, of_units in measures.items():
                shares = self._divided(of_units, mean, smallest)
                tables |= {f"{name}-{budget}": shares, f"{name}-{budget}-damped": between(shares)}
        self.passes.tables |= tables
        names = list(tables)
        # the probe costs a fraction of a pass on the kernels of serving, so it narrows the tables first
        if plan.decides == PROBE:
            windows = torch.stack(
                [self._windows(budget, shares) for shares in tables.values() for budget in plan.budgets]
            )
            losses = [self._search(number, windows) for number in range(len(plan.text.measured))]
            scores = _scores(torch.tensor(losses, dtype=torch.float64).mean(0), names)
            names = [EQUAL, *sorted(names[1:], key=scores.get)[:SHORTLIST]]
        scores = self._measured(names)
        best = min(scores, key=scores.get)
        return best if plan.decides == PROBE else self.improve(scores, curves)

    def _divided(self, curves: list[Curve], mean: float, smallest: float) -> torch.Tensor:
        """Return the shares ``[layers, H]`` by which the heads of each rank divide ``mean`` slots of each head."""
        by_rank = [curves_of(curves, shard) for shard in self.plan.shards]
        slots = [size for group in by_rank for size in divide(group, mean)]
        shape = self.plan.shape.num_layers, self.plan.shape.num_kv_heads
        return shares_from_slots([curve for group in by_rank for curve in group], slots, smallest, *shape)

    def improve(self, scores: dict[str, float], curves: list[Curve]) -> str:
        """Return the name of the best table found from the best of some tables on, in which losses do not add up as alone.

        Rounds go on while tables get better. Large steps lead from a few tables to different ones, of which the best is
        changed by smaller and smaller steps.

        Args:
            scores: scores of tables, by name.
            curves: layers and heads that differ.
        """
        groups = self._groups(curves)
        starts = sorted(scores, key=scores.get)[:SHORTLIST]
        ends = [
            self._rounds(f"{self.plan.unit}-{number}", FACTORS[:1], start, scores[start], groups)
            for number, start in enumerate(starts)
        ]
        best, score = min(ends, key=lambda end: end[1])
        return self._rounds(self.plan.unit, FACTORS[1:], best, score, groups)[0]

    def _groups(self, curves: list[Curve]) -> list[list[Curve]]:
        """Return the layers and heads of each rank in groups that follow each other, about :data:`GROUPS` in all."""
        by_rank = [curves_of(curves, shard) for shard in self.plan.shards]
        size = math.ceil(sum(map(len, by_rank)) / GROUPS)
        return [units[first : first + size] for units in by_rank for first in range(0, len(units), size)]

    def _rounds(
        self, name: str, factors: Sequence[float], best: str, score: float, groups: list[list[Curve]]
    ) -> tuple[str, float]:
        """Return the name and the score of the best table found from one on, by steps of some sizes in turn.

        Args:
            name: begins the names of new tables.
            factors: sizes of the steps, above 1.
            best: name of a table.
            score: its score.
            groups: layers and heads that change together.
        """
        # one iterator for all factors, which share the number of rounds
        rounds = iter(range(self.plan.rounds))
        for factor in factors:
            for number in rounds:
                changed, lower = self._round(f"{name}-round-{number}", factor, best, groups)
                if lower >= score:
                    break
                best, score = changed, lower
        return best, score

    def _round(self, name: str, factor: float, best: str, groups: list[list[Curve]]) -> tuple[str, float]:
        """Return the name and the score of the best table found by small changes of another one.

        Every group gets ``factor`` times fewer and more slots, at the cost of all others in its rank. Tried are the best
        change alone, all changes that lose less at once, and these half way.

        Args:
            name: name of the new table.
            factor: size of the changes, above 1.
            best: name of the table to change.
            groups: layers and heads that change together.
        """
        tables, choices = self.passes.tables, []
        shares = tables[best]
        for group in groups:
            heads_of_group = [(curve.layer, head) for curve in group for head in curve.heads]
            before = [(layer, (head,), float(shares[layer, head])) for layer, head in heads_of_group]
            label = f"{name}-{group[0].layer}-{group[0].heads[0]}" + (f"-of-{len(group)}" if len(group) > 1 else "")
            # the addend lets a head without slots get some
            shrunk = [(layer, heads, share / factor) for layer, heads, share in before]
            grown = [(layer, heads, factor * share + (factor - 1) / 8) for layer, heads, share in before]
            changes = {best: before, f"{label}-fewer": shrunk, f"{label}-more": grown}
            tables |= {table: self._exchanged(shares, change) for table, change in changes.items() if table != best}
            choices.append(changes)
        names = list(dict.fromkeys(itertools.chain.from_iterable(choices)))
        at_budget = self._kl([self._choice(self.plan.budget, changed) for changed in names])
        losses = dict(zip(names, at_budget, strict=True))
        better = [min(changes, key=losses.get) for changes in choices]
        together = [change for changes, table in zip(choices, better, strict=True) for change in changes[table]]
        tables[name] = self._exchanged(shares, together)
        # changes that each help alone may help less together
        tables[f"{name}-damped"] = between(tables[name], shares)
        scores = self._measured([name, f"{name}-damped", min(better, key=losses.get)])
        name = min(scores, key=scores.get)
        return name, scores[name]

    def _exchanged(self, shares: torch.Tensor, changes: Iterable[tuple[int, tuple[int, ...], float]]) -> torch.Tensor:
        """Return shares ``[layers, H]`` with other ones of some heads, scaled so that each rank has as many as before.

        Args:
            shares: shares before.
            changes: layers with heads, and their new share.
        """
        changed = shares.clone()
        for layer, heads, share in changes:
            changed[layer, list(heads)] = share
        for shard in self.plan.shards:
            part = slice(*shard.layers), slice(*shard.heads)
            changed[part] *= shares[part].sum() / changed[part].sum()
        return changed

    def _measured(self, names: list[str]) -> dict[str, float]:
        """Return the scores of tables by measured rows under the policy that decides."""
        choices = [self._choice(budget, name) for name in names for budget in self.plan.budgets]
        return _scores(torch.tensor(self._kl(choices), dtype=torch.float64), names)

    def _kl(self, choices: list[Choice]) -> list[float]:
        """Return the divergence of measured rows under choices, means over rows."""
        measured = self._over(SEARCH, self.plan.text.measured[: self.plan.searched], choices)
        return [fmean(record["kl"] for record in records) for records in measured]

    def _equal(self, budget: int, prompt: int = 0) -> ResolvedPolicy:
        """Return the policy that decides with equal shares, and the window that it has with unequal ones."""
        return self.passes.resolve(self._choice(budget, "")._replace(shares=EQUAL), prompt)

    def _roles(self, budget: int) -> Retention:
        """Return the slot roles of the policy that decides at a budget."""
        return self._equal(budget).roles

    def _choice(self, budget: int, table: str) -> Choice:
        """Return the policy that decides with a table of shares."""
        return self._choice_of(self.plan.decides, budget, WINDOWS[0], table)

    def _choice_of(self, name: str, budget: int, fraction: float | None, table: str) -> Choice:
        """Return a policy with a table of shares and a window, a fraction of ``B - s``. None stands for its own."""
        # a window with equal shares has all slots that are not of first tokens
        fitted = fraction is None or self.plan.specs[name].scorer or (name == PROBE and table == EQUAL)
        return Choice(name, budget, None if fitted else self._window(name, fraction, budget), table)

    def _windows(self, budget: int, shares: torch.Tensor) -> torch.Tensor:
        """Return the window ``[layers, H]`` of each head in tokens, as serving divides a budget."""
        roles = Retention(budget, DEFAULT_SINKS, self._window(PROBE, WINDOWS[0], budget))
        return proportional(shares.tolist(), roles, *shares.shape) - DEFAULT_SINKS

    def _search(self, number: int, windows: torch.Tensor) -> list[float]:
        """Return the losses of a row with each table of windows."""
        key = ["search", self.plan.unit, number]
        if key not in self.records:
            self.records.put(key, shared_losses(self.replay(number), self._first(number), windows))
        self.tick(self.plan.search_cost(len(windows)))
        return self.records[key]

    @staticmethod
    def _window(policy: str, fraction: float, budget: int) -> int:
        """Return the window that serving makes of a fraction at a budget."""
        return max(1, int(fraction * (budget - policies.get(policy).default_sinks)))

    def windows(self, table: str) -> dict[str, float]:
        """Return the best window of each policy with a table of shares, as a fraction of ``B - s``.

        Equal shares have a window of their own, so that a better window does not pass for better shares.
        """
        budget, best = self.plan.budget, {}
        if table != EQUAL and self.plan.takes_shares(PROBE):
            best[PROBE] = WINDOWS[0]
        for name, spec in self.plan.specs.items():
            if name == PROBE or spec.scorer:
                continue
            # its own window is among them, and is not written
            fractions = None, *WINDOWS
            losses = self._kl([self._choice_of(name, budget, fraction, table) for fraction in fractions])
            if (fraction := fractions[losses.index(min(losses))]) is not None:
                best[name] = fraction
        return best

    def judge(self, table: str, windows: dict[str, dict[str, float]]) -> Verdict:
        """Return the lines of the report, by rows that were not measured.

        A table is better if the policy that decides diverges less over all budgets, with an interval below 1, and at
        none notably more, with an interval above 1. Lines of a table that is not better are left out.

        Args:
            table: name of a table of shares.
            windows: windows of policies (:meth:`windows`) with this table and with equal shares, by its name.
        """
        text, pairs, lines = self.plan.text, [], []
        for name in self.plan.specs:
            for budget in self.plan.budgets:
                tables = [EQUAL] + ([table] if table != EQUAL and self.plan.takes_shares(name) else [])
                pairs.append([self._choice_of(name, budget, windows[shares].get(name), shares) for shares in tables])
        choices = [choice for pair in pairs for choice in pair]
        measured = dict(zip(choices, self._over("held-out", text.held_out, choices), strict=True))
        losses = {choice: [record["kl"] for record in records] for choice, records in measured.items()}
        for equal, *shared in pairs:
            lines.append(self._line(equal, measured[equal]))
            lines += [self._line(choice, measured[choice], losses[equal]) for choice in shared]
        deciding = [[losses[choice] for choice in pair] for pair in pairs if pair[0].policy == self.plan.decides]
        better = table != EQUAL and is_better(deciding, text.units)
        return Verdict([line for line in lines if better or line["shares"] == EQUAL], better)

    def _line(self, choice: Choice, records: list[dict], equal: list[float] | None = None) -> dict:
        """Return a line of the report; ``equal`` are the losses with equal shares."""
        plan, losses = self.plan, [record["kl"] for record in records]
        resolved, units = self.passes.resolve(choice, plan.prompt), plan.text.units
        line = {
            "policy": choice.policy,
            "budget": choice.budget,
            "window": resolved.roles.window,
            "shares": choice.shares,
        }
        line |= estimate("kl", losses, units=units)
        if equal is not None:
            line |= estimate("over equal", losses, equal, units=units)
        line["MiB"] = resolved.request_bytes(plan.length, plan.dtype, plan.prompt or None).allocated / 2**20
        # not the mean: on a GPU the first row compiles kernels
        return line | {"prefill": median(record["prefill"] for record in records)}

    def _over(self, side: str, rows: list, choices: list[Choice]) -> list[list[dict]]:
        """Return measurements of rows, with a progress that counts what is there already."""
        self.tick(SERVED * (len(rows) * len(choices) - self.passes.missing(side, len(rows), choices)))
        return self.passes.over(side, rows, choices, lambda: self.tick(SERVED))
