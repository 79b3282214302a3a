"""Engines on models with layers of several kinds, compared with the oracle of kinds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
from engine.driving import Job, Watched, watched

from kvpop_vllm.supported import FULL
from kvpop_vllm.testing import KindsOracle, OraclePolicy, write_random_scorer

BUDGET, BLOCK, TOLERANCE = 56, 32, 1e-5


@contextmanager
def serving(folder: str, settings: dict, **options) -> Iterator[Watched]:
    """Yield an engine whose freed blocks are overwritten, and check that it leaks nothing."""
    with pytest.MonkeyPatch.context() as patch, watched(folder, settings, block_size=BLOCK, **options) as engine:
        engine.poison(patch)
        yield engine
        engine.engine.reset_prefix_cache()
        assert not engine.leaks()


@dataclass
class Served:
    """An engine whose freed blocks are overwritten, with the oracle and the policy that judge it."""

    engine: object
    oracle: KindsOracle
    policy: OraclePolicy
    settings: dict = field(default_factory=dict)
    runs: dict = field(default_factory=dict)

    def serve(self, jobs: list[Job], chunk: int | None = None, each_step=None, protect: bool | int = 0) -> dict:
        """Serve jobs with prompts in chunks, and compare the answers with the oracle."""
        self.engine.chunk(chunk)
        answers = self.engine.serve(jobs, each_step)
        for answer in answers.values():
            self.check(answer, protect)
        return answers

    def check(self, answer, protect: bool | int = 0) -> None:
        """Compare tokens and log-probabilities of an answer with the oracle."""
        prompt, out = answer.prompt_token_ids, answer.outputs[0]
        fed = *prompt, *out.token_ids[:-1]
        key = fed, protect
        if key not in self.runs:
            policy = self.policy.protecting(protect, len(prompt)) if protect else self.policy
            self.runs[key] = self.oracle.logprobs(fed, policy)
        exact = self.runs[key]
        rows = [*(answer.prompt_logprobs or [None])[1:]]
        rows = [None] * (len(prompt) - 1 - len(rows)) + rows + list(out.logprobs)
        for row, entries in enumerate(rows):
            for token, entry in (entries or {}).items():
                assert abs(entry.logprob - float(exact[row, token])) <= TOLERANCE, (row, token)
        for i, token in enumerate(out.token_ids):
            row = exact[len(prompt) - 1 + i]
            assert float(row.max() - row[token]) <= 2 * TOLERANCE


def roles(policy: str, folder: str, scorer, oracle: KindsOracle) -> tuple[dict, OraclePolicy]:
    """Return the settings of a policy and the oracle's policy."""
    if policy == "kvpop":
        layers = [i for i, kind in enumerate(oracle.kinds) if kind == FULL]
        write_random_scorer(scorer, folder, layers=layers, sinks=4, window=16, topk=BUDGET - 20)
        return {"policy": policy, "scorer": str(scorer)}, OraclePolicy.from_scorer(scorer)
    if policy == "h2o":
        settings = {"policy": policy, "budget": BUDGET, "sinks": 0, "window": BUDGET // 2}
        return settings, OraclePolicy("mean mass", 0, BUDGET // 2, BUDGET - BUDGET // 2)
    settings = {"policy": policy, "budget": BUDGET, "sinks": 4}
    return settings, OraclePolicy.streaming(4, BUDGET - 4, 0)
