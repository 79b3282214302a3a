"""Drafts of layers, which have dense caches of vLLM's in groups of their own: answers are the naive oracle's."""

from __future__ import annotations

import pytest
from engine.draft_models import DRAFTS, accepting, write_eagle3, write_mtp
from engine.driving import Job, preempt_all, serving
from engine.matrix import BUDGET, make_case
from engine.tiny_engine import configure
from vllm.v1.kv_cache_interface import FullAttentionSpec

from kvpop_vllm.config import ConfigError
from kvpop_vllm.testing import random_prompt
from kvpop_vllm.vllm_glue.run.cache_spec import FixedBudgetSpec

CASES = {
    "EAGLE3": ("eagle3", "kvpop", {"protect_prompt": 40}, True),
    "MTP": ("mtp", "h2o", {}, False),
}
SLOW = {
    "MTP, some accepted": ("mtp", "kvpop", {"protect_prompt": True}, True),
    "EAGLE3, greedy": ("eagle3", "momentkv", {}, False),
}


@pytest.fixture(scope="module", params=[*CASES, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def served(request, tiny_model, tmp_path_factory):
    """Yield an engine, whose drafts are accepted at given rates or if the target says so."""
    method, policy, options, accepts = (CASES | SLOW)[request.param]
    folder = tmp_path_factory.mktemp("draft")
    model = tiny_model("llama") if method == "eagle3" else str(folder / "model")
    speculation = write_eagle3(folder / "head", model) if method == "eagle3" else write_mtp(folder / "model")
    setup = make_case(model, folder / "scorer", policy, **options)
    speculation = accepting(speculation) if accepts else speculation
    sizes = {"block_size": 32, "num_gpu_blocks_override": 800, "enable_prefix_caching": False}
    with serving(setup, speculative_config=speculation, **sizes) as engine:
        engine.accepts = accepts
        yield engine


@pytest.fixture(autouse=True)
def nothing_is_left(request):
    engine = request.getfixturevalue("served") if "served" in request.fixturenames else None
    if engine is not None:
        engine.chunk(None)
    yield
    assert engine is None or not engine.leaks()


def check(served, jobs, each_step=None) -> dict:
    """Serve jobs and compare them with the oracle."""
    answers = served.serve(jobs, each_step)
    for answer in answers.values():
        answer.sampled = served.accepts  # then tokens are those of the drafts, and only log-probabilities are judged
    served.judge.check(answers, served.recorder.held)
    return answers


def jobs_of(*lengths: int, new: int = 40) -> list[Job]:
    return [Job(length, new=new, scored=False) for length in lengths]


def test_draft_layers_have_dense_groups(served):
    """The policy's layers and those that draft are in groups of their own, whose pages are equal."""
    groups = served.recorder.scheduler.kv_cache_config.kv_cache_groups
    kinds = [type(group.kv_cache_spec) for group in groups]
    assert kinds == [FixedBudgetSpec, FixedBudgetSpec, FullAttentionSpec]
    assert len({group.kv_cache_spec.page_size_bytes for group in groups}) == 1
    assert [group.layer_names[0].split(".")[2] for group in groups] == ["0", "1", "2"]
    backends = [group.backend for groups in served.recorder.runner.attn_groups for group in groups]
    assert [getattr(backend, "policy", None) is None for backend in backends] == [False, False, True]


def test_answers(served):
    """Requests of any length are judged; where drafts are accepted at given rates, there are fewer steps than tokens."""
    answers = check(served, jobs_of(1, 5, 33, 40, BUDGET, 90, 130))
    steps = [len(served.chunks(name)) for name in answers]
    if served.accepts:
        assert max(steps) < 40 and min(steps) >= 40 // (1 + DRAFTS)


def test_chunks_and_preemption(served):
    """Prompts are read in chunks next to others' drafts; requests start over with accepted drafts that are staged."""
    served.chunk(7)

    def preempt(step):
        if step in (9, 25):
            preempt_all(served.recorder.scheduler)

    answers = check(served, [*jobs_of(1, 29, new=50), *jobs_of(57, 130, new=12)], preempt)
    assert max(served.recorder.preemptions[name] for name in answers) >= 1


def test_aborts(served):
    aborted = {3: ["2"], 6: ["0"]}
    answers = served.serve(jobs_of(3, 40, 90, 130), lambda step: served.engine.abort_request(aborted.get(step, [])))
    assert [answer.request_id for answer in answers.values() if answer.outputs[0].finish_reason == "length"] == [
        "1",
        "3",
    ]


def test_what_layers_that_draft_do_not_go_with(tiny_model, tmp_path):
    """Blocks of 16 tokens, which vLLM's attention on a CPU does not take, and drafts of all places at once."""
    policy, model = {"policy": "streaming-llm", "budget": 64}, tiny_model("llama")
    speculation = write_eagle3(tmp_path, model)
    with pytest.raises(ConfigError, match="--block-size 16 on a CPU, where layers draft: use a multiple of 32"):
        configure(model, policy, block_size=16, speculative_config=speculation)
    with pytest.raises(ConfigError, match="drafts in parallel: leave parallel_drafting out"):
        configure(model, policy, speculative_config=speculation | {"parallel_drafting": True})
    assert configure(model, policy, speculative_config=speculation).num_speculative_tokens == DRAFTS


@pytest.mark.slow
def test_prefixes_are_shared_and_chats_go_on(tiny_model, tmp_path):
    """A prompt hits the blocks of another in all groups, and a later turn goes on from a snapshot."""
    model = tiny_model("llama")
    speculation = accepting(write_eagle3(tmp_path / "head", model))
    for protect in (40, 0):
        setup = make_case(model, tmp_path / f"scorer-{protect}", "kvpop", protect_prompt=protect)
        sizes = {"block_size": 32, "num_gpu_blocks_override": 800, "enable_prefix_caching": True}
        with serving(setup, speculative_config=speculation, **sizes) as engine:
            prompt, more = random_prompt(95, seed=1), random_prompt(45, seed=2)
            (first,) = engine.serve([Job(prompt=prompt, new=20, scored=False)]).values()
            before = {layer: [*steps] for layer, steps in engine.recorder.held[engine.names["0"]].items()}
            first.sampled = True
            engine.judge.check({engine.names["0"]: first}, engine.recorder.held)
            text = [*prompt, *first.outputs[0].token_ids, *more]
            (later,) = (answers := engine.serve([Job(prompt=text, new=20, scored=False)])).values()
            assert later.num_cached_tokens >= (32 if protect else len(prompt))
            later.sampled = True
            if later.num_cached_tokens > 40:
                for layer, steps in engine.recorder.held[engine.names["0"]].items():
                    steps[:0] = before[layer]
            engine.judge.check(answers, engine.recorder.held)
            engine.engine.reset_prefix_cache()
