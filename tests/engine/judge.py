"""Comparison of an engine's run with the naive oracle on the engine's tokens (DESIGN "The rule")."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from kvpop_vllm.testing import (
    DisturbedSums,
    KindsOracle,
    OracleModel,
    OraclePolicy,
    OracleRun,
    derived_budget,
    derived_margin_bound,
)

MOST_NEAR_TIES = 1e-3
"""Largest share of decisions that may differ as near-ties."""


class Held(NamedTuple):
    """Tokens held by a request after one layer call: after ``tokens_seen`` tokens, ``new`` of them in this step."""

    tokens_seen: int
    new: int
    positions: list[list[int]]  # per head, sorted


class Nudge(NamedTuple):
    """A near-tie that the oracle decides like the engine: ``token`` scores ``by`` more."""

    layer: int
    head: int
    token: int
    by: float


class Reference(NamedTuple):
    """The oracle's runs on one sequence: in float64, and in float32 with the same sets and disturbed sums."""

    exact: OracleRun
    low: OracleRun

    @property
    def budget(self) -> float:
        return derived_budget(self.low, self.exact)

    @property
    def bounds(self) -> list[float]:
        return derived_margin_bound(self.low, self.exact)


@dataclass
class Judge:
    """Judge of one model under one policy.

    It counts decisions and near-ties of all runs it has judged, and keeps the oracle's runs.

    Attributes:
        protect: number of protected tokens of each prompt, True for all.
    """

    model_dir: str
    policy: OraclePolicy
    decisions: int = 0
    near_ties: int = 0
    references: dict = field(default_factory=dict, repr=False)
    protect: bool | int = 0

    def __post_init__(self):
        self.models = OracleModel(self.model_dir), OracleModel(self.model_dir, torch.float32)

    def reference(self, tokens: Sequence[int], nudges: tuple[Nudge, ...] = (), prompt: int = 0) -> Reference:
        """Return the oracle's run on ``tokens``, the first ``prompt`` of which are the prompt."""
        policy = self.policy.protecting(self.protect, prompt)
        key = tuple(tokens), nudges, policy.protect, policy.prompt
        if key not in self.references:
            exact, low = self.models
            run = exact.run(tokens, policy, bias=nudges)
            with DisturbedSums(0):
                eager = low.run(tokens, policy, visible=run.visible)
            self.references[key] = Reference(run, eager)
        return self.references[key]

    def check(self, answers, retained) -> None:
        """Compare all requests of a run with the oracle, with error budgets pooled over all positions.

        Args:
            answers: request id -> finished ``RequestOutput``.
            retained: request id -> layer -> :class:`Held`, in order.

        Raises:
            AssertionError: a set, a log-probability or a token differs by more than rounding explains.
        """
        fed = {name: [*a.prompt_token_ids, *a.outputs[0].token_ids[:-1]] for name, a in answers.items()}
        prompts = {name: len(a.prompt_token_ids) for name, a in answers.items()}
        plain = [self.reference(tokens, prompt=prompts[name]) for name, tokens in fed.items()]
        bounds = [max(layer) for layer in zip(*(reference.bounds for reference in plain), strict=True)]
        settled = {name: self.settle(fed[name], retained[name], bounds, name, prompts[name]) for name in answers}
        budget = max(reference.budget for reference, _ in settled.values())
        for name, answer in answers.items():
            reference, nudges = settled[name]
            self.near_ties += len(nudges)
            self.decisions += sum(int(m.isfinite().sum()) for m in reference.exact.margins)
            _check_logprobs(answer, reference.exact, budget)
            if not getattr(answer, "sampled", False):
                _check_tokens(answer, reference.exact, budget)

    def check_near_ties(self) -> None:
        """Raise AssertionError if there is more than one near-tie and more than MOST_NEAR_TIES of all decisions so far."""
        print(f"{self.near_ties} near-ties in {self.decisions} decisions")
        assert self.near_ties <= max(1, MOST_NEAR_TIES * self.decisions)

    def settle(self, tokens, retained, bounds, name, prompt: int = 0) -> tuple[Reference, tuple[Nudge, ...]]:
        """Return the oracle's run with its near-ties decided like the engine's, and these near-ties.

        Args:
            tokens: all tokens that were processed.
            retained: layer -> :class:`Held`, in order.
            bounds: one per layer, see ``derived_margin_bound``.
            name: name of the request for messages.
            prompt: number of tokens that are the prompt.

        Raises:
            AssertionError: the engine retains other tokens, and no near-tie explains it.
        """
        nudges: tuple[Nudge, ...] = ()
        assert sorted(retained) == list(range(self.models[0].layers)), f"request {name}: a layer was never called"
        while True:
            reference = self.reference(tokens, nudges, prompt)
            difference = first_difference(reference.exact, retained)
            if difference is None:
                return reference, nudges
            layer, head, first, last = difference
            margins = reference.exact.margins[layer][head, first : last + 1]
            margins = margins.where(margins >= 0, math.inf)  # negative: a near-tie that is decided already
            margin, query = float(margins.min()), first + int(margins.argmin())
            place = f"request {name}, layer {layer}, head {head}, queries {first} to {last}"
            assert margin < bounds[layer] and len(nudges) < 20, (
                f"{place}: other tokens are retained than by the oracle, whose smallest margin is {margin:.2e} "
                f"(near-tie below {bounds[layer]:.1e})"
            )
            nudges += (_nudge(reference.exact, layer, head, query),)


class KindsJudge(Judge):
    """Judge of a model whose layers are of several kinds; those of the recorder and the oracle have full attention."""

    def __post_init__(self):
        self.models = KindsOracle(self.model_dir), KindsOracle(self.model_dir, torch.float32)


def _check_logprobs(answer, run: OracleRun, budget: float) -> None:
    prompt, length = answer.prompt_logprobs or [None], len(answer.prompt_token_ids)
    for row, entries in [*enumerate(prompt[1:]), *enumerate(answer.outputs[0].logprobs, start=length - 1)]:
        for token, entry in entries.items():
            error = abs(entry.logprob - float(run.logprobs[row, token]))
            assert error <= budget, (  # also fails for NaN
                f"request {answer.request_id}: log-prob of token {token} after position {row} of "
                f"{length} + {len(answer.outputs[0].token_ids)} is off by {error:.2e}, budget {budget:.1e}"
            )


def _check_tokens(answer, run: OracleRun, budget: float) -> None:
    """Check that tokens are the oracle's, unless its two best are within the budget."""
    gap, best = run.top2_gap, run.logprobs.argmax(-1)
    for row, token in enumerate(answer.outputs[0].token_ids, start=len(answer.prompt_token_ids) - 1):
        close = float(gap[row]) <= budget
        assert close or token == int(best[row]), f"request {answer.request_id}: token {token} after position {row}"


def first_difference(run: OracleRun, retained) -> tuple[int, int, int, int] | None:
    """Return layer, head, first and last query of the first decision that differs, or None.

    Differences in later layers follow from it.
    """
    for layer in sorted(retained):
        earliest = math.inf, None
        for head in range(len(run.visible[layer])):
            before = 0
            for step in retained[layer]:
                if step.positions[head] != run.retained(layer, head, step.tokens_seen - 1):
                    earliest = min(
                        earliest,
                        (step.tokens_seen, (layer, head, min(before, step.tokens_seen - 1), step.tokens_seen - 1)),
                    )
                    break
                before = step.tokens_seen
        if earliest[1] is not None:
            return earliest[1]
    return None


def _nudge(run: OracleRun, layer: int, head: int, query: int) -> Nudge:
    """Return a nudge that reverses the decision at ``query``: the best evicted token is kept.

    Only one of several evictions in a decision can be reversed. A second near-tie among them is not excused.
    """
    victim = int(run.lost[layer][head, query])
    return Nudge(layer, head, victim, 2 * abs(float(run.margins[layer][head, query])) + 1e-12)
