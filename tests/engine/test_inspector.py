"""The record of the inspect page equals what the recorder reads from the engine's pages after every step."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from engine.driving import Job, preempt_all, watched
from engine.matrix import BUDGET, SINKS
from engine.test_cartridges import SLOTS, write
from policies.matrix import MILD_SHARES

from kvpop_vllm.cache.pages import PageLayout
from kvpop_vllm.cache.shares import EqualHeads
from kvpop_vllm.requests import RequestSlots
from kvpop_vllm.vllm_glue.extras import inspector

PROTECTED = 33
CASES = {
    "streaming-llm": ("qwen3", "streaming-llm", {}),
    "kvpop, protected": ("qwen3", "kvpop", {"protect_prompt": PROTECTED}),
    "pyramid, protected": ("llama", "h2o-pyramid", {"protect_prompt": PROTECTED}),
    "snapkv": ("qwen3", "snapkv", {"protect_prompt": True}),
    "adakv": ("qwen3", "adakv", {"protect_prompt": True, "budget": 64}),
    "dms": ("llama", "dms-query", {}),
    "vase": ("qwen3", "vase", {}),
    "triattention, heads": ("qwen3", "triattention", {"allocator": str(MILD_SHARES)}),
    "attention-matching": ("qwen3", "attention-matching", {"protect_prompt": True}),
}
QUICK = "streaming-llm", "adakv"
JOBS = [Job(7, new=9), Job(40, new=30), Job(90, new=40), Job(150, new=6)]


@pytest.fixture(scope="module", params=[pytest.param(c, marks=[] if c in QUICK else pytest.mark.slow) for c in CASES])
def served(request, case, tmp_path_factory):
    """Yield an engine that records what requests hold, and the name of its case."""
    kind, policy, options = CASES[request.param]
    matrix_case = case(kind, policy, **options)
    settings = matrix_case.settings | {"inspect": True}
    if request.param == "kvpop, protected":
        settings["cartridge"] = {"plain": write(tmp_path_factory.mktemp("plain"), matrix_case.model, "plain")}
    with watched(matrix_case.model, settings, None) as engine:
        engine.recorder.slots = SLOTS
        yield engine, request.param


def core(llm):
    return llm.llm_engine.engine_core.engine_core


def recorded(llm, name: str) -> tuple[np.ndarray, dict]:
    """Return what is recorded of a request: ``[layers, H, tokens]``, when each token left, and the rest."""
    shape, record = core(llm).kvpop_inspect(), core(llm).kvpop_inspect_request(name)
    return np.frombuffer(record["left"], "<i4").reshape(shape["layers"], shape["heads"], -1), record


def left(engine, name: str) -> np.ndarray:
    """Return the same array by the recorder: the number of tokens seen when each was first missing, 0 if it is held."""
    layers = []
    for _, steps in sorted(engine.recorder.retained[name].items()):
        first_missing = np.zeros((len(steps[0].positions), steps[-1].tokens_seen), int)
        for step in steps:
            if step.tokens_seen == step.new:  # a new start
                first_missing[:] = 0
            for head, positions in enumerate(step.positions):
                missing = np.setdiff1d(np.arange(step.tokens_seen), positions)
                first_missing[head, missing[first_missing[head, missing] == 0]] = step.tokens_seen
        layers.append(first_missing)
    return np.stack(layers)


def compare(engine, name: str, answer, cartridge_slots: int = 0) -> np.ndarray:
    """Compare a request that has ended with the recorder, and return when each token left."""
    prompt, ids = len(answer.prompt_token_ids), list(answer.outputs[0].token_ids)
    expected = left(engine, name)
    left_at, record = recorded(engine.llm, name)
    assert (
        record["tokens"][cartridge_slots:] == [*answer.prompt_token_ids, *ids[:-1]][cartridge_slots:]
        and record["error"] is None
    )
    assert (record["state"], record["seen_tokens"]) == ("ended", prompt + len(ids) - 1)
    retained = (left_at == 0).sum(-1)
    assert record["kept_tokens_per_head"] == {"min": retained.min(), "mean": retained.mean(), "max": retained.max()}
    assert record["evicted_tokens_per_head"]["mean"] == pytest.approx(left_at.shape[-1] - retained.mean())
    if engine.votes:  # the recorder says that all is there until the step after the prompt's end
        left_at, expected = (np.where(array == prompt, prompt + 1, array) for array in (left_at, expected))
    assert (left_at == expected).all()
    return left_at


def test_tokens_leave_when_the_pages_lose_them(served):
    """The record is exact to the step, also of requests that start over."""
    engine, case = served
    engine.chunk(32)
    again = lambda step: preempt_all(engine.recorder.scheduler) if step == 12 else None  # noqa: E731
    for each_step in (None, again):
        answers = engine.serve(JOBS, each_step)
        left_at = {answer.request_id: compare(engine, name, answer) for name, answer in answers.items()}
        assert (max(engine.recorder.preemptions.values()) > 0) == (each_step is not None)
        assert all((array > 0).any() for name, array in left_at.items() if JOBS[int(name)].length > 80)
        if case == "streaming-llm" and each_step is None:  # chunks of 32 tokens, then one by one
            ends = np.array([*range(32, 90, 32), *range(90, 130)])
            gone = np.arange(SINKS, 129 - (BUDGET - SINKS))  # token t is the oldest but the sinks at t + B - s
            times = ends[np.searchsorted(ends, gone + BUDGET - SINKS + 1)]
            assert (left_at["2"][..., SINKS : SINKS + len(gone)] == times).all()
            assert not left_at["2"][..., :SINKS].any() and not left_at["2"][..., SINKS + len(gone) :].any()
    assert not engine.recorder.manager.inspector.records.keys() - answers.keys()


def test_running_and_waiting_requests_are_listed(served):
    engine, _ = served
    states = []

    def look(step):
        states.append([request["state"] for request in core(engine.llm).kvpop_inspect()["requests"]])

    many = [Job(5, new=4, scored=False) for _ in range(20)]  # 16 run at once
    engine.serve(many, look)
    assert states[0].count("waiting") == 20 and states[1].count("running") == 16 and states[1].count("waiting") == 4
    look(None)
    assert states[-1] == ["ended"] * inspector.ENDED
    assert core(engine.llm).kvpop_inspect_request("nobody") is None


def test_settings_of_a_request(served):
    """A request's own budget and protection count, and so do the slots of its cartridge."""
    engine, case = served
    if case != "kvpop, protected":
        pytest.skip("needs the engine with a cartridge, which is the case 'kvpop, protected'")
    engine.chunk(None)
    asks = {"kv_budget": 44, "kv_protect_prompt": 9, "kv_cartridges": ["plain"]}
    ((name, answer),) = engine.serve([Job(90, new=30, scored=False, asks=asks)]).items()
    left_at = compare(engine, name, answer, SLOTS["plain"])
    assert not left_at[..., : SLOTS["plain"] + 9].any() and (left_at > 0).sum(-1).min() == 119 - 9 - 40


def test_any_seed_of_a_request_can_be_inspected():
    """A seed of 64 bits is no number of the plan that finds pages."""
    impl, layout = SimpleNamespace(layer=0, policy=SimpleNamespace(compression=None)), PageLayout(2, 32, torch.float32)
    pages = layout.view(torch.zeros(3, 2, layout.region_bytes, dtype=torch.uint8))
    row = inspector.Row(5, [[1, 2]], RequestSlots(0, 0, 32, 8, seed=2**64 - 1))
    assert inspector._next_step(impl, [row], pages).batch(EqualHeads(2)).decodes == 1


def test_pages_that_cannot_be_read(served):
    """The workers answer with a line, and the engine goes on."""
    engine, _ = served
    engine.add("x", Job(80, new=30, scored=False))
    for _ in range(6):
        engine.engine.step()
    attached = engine.recorder.manager.inspector
    request = engine.recorder.scheduler.running[0]
    row = inspector.Row.of(attached.scheduler, request, request.num_computed_tokens)
    (error,) = attached.run(inspector.held_in_worker, ([row._replace(tokens_seen=row.tokens_seen + 1)],))
    compression = attached.policy.compression  # tokens of a prompt that slots were made of are not counted in the pages
    tokens_seen = row.tokens_seen - (0 if compression is None else compression.after(row.slots).shift)
    assert error == f"these pages have seen {[tokens_seen] * attached.shape[1]} tokens, not {tokens_seen + 1}"
    while engine.engine.has_unfinished_requests():
        engine.engine.step()
