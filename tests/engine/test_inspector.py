"""The record of the inspect page equals what the recorder reads from the engine's pages after every step."""

from __future__ import annotations

import numpy as np
import pytest
from engine.driving import Job, preempt_all, watched
from engine.test_cartridges import write

PROTECTED = 33
CASES = {
    "streaming-llm": ("qwen3", "streaming-llm", {}),
    "kvpop, protected": ("qwen3", "kvpop", {"protect_prompt": PROTECTED}),
    "pyramid, protected": ("llama", "h2o-pyramid", {"protect_prompt": PROTECTED}),
    "snapkv": ("qwen3", "snapkv", {"protect_prompt": True}),
    "adakv": ("qwen3", "adakv", {"protect_prompt": True, "budget": 64}),
    "dms": ("llama", "dms-query", {}),
    "vase": ("qwen3", "vase", {}),
}
QUICK = "kvpop, protected", "adakv"
JOBS = [Job(7, new=9), Job(40, new=30), Job(90, new=40), Job(150, new=6)]


@pytest.fixture(scope="module", params=[pytest.param(c, marks=[] if c in QUICK else pytest.mark.slow) for c in CASES])
def served(request, case):
    """Yield an engine that records what requests hold."""
    kind, policy, options = CASES[request.param]
    found = case(kind, policy, **options)
    with watched(found.model, found.settings | {"inspect": True}, None) as engine:
        yield engine


def core(engine):
    return engine.engine.engine_core.engine_core


def left(engine, name: str, prompt: int) -> np.ndarray:
    """Return, by the recorder, the number of tokens that had been seen when a token was first missing, or 0."""
    layers = []
    for _, steps in sorted(engine.recorder.held[name].items()):
        found = np.zeros((len(steps[0].positions), steps[-1].seen), int)
        for step in steps:
            for head, positions in enumerate(step.positions):
                missing = np.setdiff1d(np.arange(step.seen), positions)
                found[head, missing[found[head, missing] == 0]] = step.seen
        layers.append(found)
    return np.stack(layers)


def recorded(engine, name: str) -> tuple[np.ndarray, dict]:
    """Return the same by the inspect page's record, and what else it says."""
    found = core(engine).kvpop_inspect_request(name)
    shape = core(engine).scheduler.kv_cache_manager.coordinator.single_type_managers[0].inspector.shape
    return np.frombuffer(found["left"], "<i4").reshape(*shape, -1), found


def test_tokens_leave_when_the_pages_lose_them(served):
    served.chunk(32)
    answers = served.serve(JOBS)
    listed = {each["id"]: each for each in core(served).kvpop_inspect()["requests"]}
    for name, answer in answers.items():
        ids = [*answer.prompt_token_ids, *answer.outputs[0].token_ids]
        expected = left(served, name, len(answer.prompt_token_ids))
        found, told = recorded(served, name)
        print(name, found.shape, expected.shape, (found != expected).sum(), np.unique((found - expected)[found != expected]))
        assert told["tokens"] == ids[: told["seen_tokens"]] and told["state"] == "ended"
