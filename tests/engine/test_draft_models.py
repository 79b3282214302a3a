"""Drafts of layers, which have dense caches of vLLM's in groups of their own: answers are the naive oracle's.

The layers run; how many of their drafts are right, tests choose.
"""

import itertools
import random

import pytest
from engine.draft_models import DRAFTS, right_drafts, write_eagle3, write_mtp
from engine.driving import Job, preempt_all, serving
from engine.matrix import BUDGET, make_case
from engine.test_speculation import nothing_is_left  # noqa: F401
from engine.tiny_engine import configure
from vllm.v1.kv_cache_interface import FullAttentionSpec

from kvpop_vllm.config import ConfigError
from kvpop_vllm.testing import random_prompt
from kvpop_vllm.vllm_glue.run.cache_spec import FixedBudgetSpec

CASES = {
    "EAGLE3": ("eagle3", "kvpop", {"protect_prompt": 40}),
    "MTP": ("mtp", "streaming-llm", {}),
}
SIZES = {"block_size": 32, "num_gpu_blocks_override": 800}


def speculation_of(method: str, tiny_model, folder) -> tuple[str, dict]:
    """Return the folder of a target and the ``speculative_config`` of an engine."""
    if method == "mtp":
        return str(folder / "model"), write_mtp(folder / "model")
    return (model := tiny_model("llama")), write_eagle3(folder / "head", model)


@pytest.fixture(scope="module", params=CASES)
def served(request, tiny_model, tmp_path_factory):
    method, policy, options = CASES[request.param]
    folder = tmp_path_factory.mktemp("draft")
    model, speculation = speculation_of(method, tiny_model, folder)
    setup = make_case(model, folder / "scorer", policy, **options)
    with serving(setup, speculative_config=speculation, enable_prefix_caching=False, **SIZES) as engine:
        yield engine


def jobs_of(*lengths: int, new: int = 40) -> list[Job]:
    return [Job(length, new=new, scored=False) for length in lengths]


def whole(answer) -> list[int]:
    return [*answer.prompt_token_ids, *answer.outputs[0].token_ids]


def plain(served, jobs) -> list[list[int]]:
    """Return the whole texts of jobs with the drafts of the layers, which the oracle judges."""
    answers = served.serve(jobs)
    served.judge.check(answers, served.recorder.retained)
    return [whole(answers[served.names[str(i)]]) for i in range(len(jobs))]


def mixed(seed: int):
    draw = random.Random(seed)
    return (draw.randint(0, DRAFTS) for _ in itertools.count())


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
    """Requests of any length, with the layers' own drafts, with none, all or any number of right ones."""
    jobs = jobs_of(1, 5, 33, 40, BUDGET, 90, 130)
    texts = plain(served, jobs)
    for counts in (itertools.repeat(DRAFTS), mixed(1)):
        with right_drafts(served.recorder.runner, texts, counts):
            answers = served.serve(jobs)
        served.judge.check(answers, served.recorder.retained)
        assert [whole(answers[served.names[str(i)]]) for i in range(len(jobs))] == texts
        assert max(len(served.chunks(name)) for name in answers) < 30


def test_chunks_and_preemption(served):
    """Prompts are read in chunks next to others' drafts; requests start over with accepted drafts that are staged."""
    jobs = [*jobs_of(1, 29, new=50), *jobs_of(57, 130, new=12)]
    texts = plain(served, jobs)
    served.chunk(7)

    def preempt(step):
        if step in (5, 14):
            preempt_all(served.recorder.scheduler)

    with right_drafts(served.recorder.runner, texts, mixed(2)):
        answers = served.serve(jobs, preempt)
    assert max(served.recorder.preemptions[name] for name in answers) == 2
    served.judge.check(answers, served.recorder.retained)


def test_aborts(served):
    jobs, aborted = jobs_of(3, 40, 90, 130), {3: ["2"], 6: ["0"]}
    texts = plain(served, jobs)
    with right_drafts(served.recorder.runner, texts, mixed(3)):
        answers = served.serve(jobs, lambda step: served.engine.abort_request(aborted.get(step, [])))
    finished = {name: answer for name, answer in answers.items() if answer.outputs[0].finish_reason == "length"}
    assert {answer.request_id for answer in finished.values()} == {"1", "3"}
    served.judge.check(finished, served.recorder.retained)


def test_what_layers_that_draft_do_not_go_with(tiny_model, tmp_path):
    """Blocks of 16 tokens, which vLLM's attention on a CPU does not take, and drafts of all places at once."""
    policy, model = {"policy": "streaming-llm", "budget": 64}, tiny_model("llama")
    speculation = write_eagle3(tmp_path, model)
    with pytest.raises(ConfigError, match="--block-size 16 on a CPU, where layers draft: use a multiple of 32"):
        configure(model, policy, block_size=16, speculative_config=speculation)
    with pytest.raises(ConfigError, match="drafts in parallel: leave parallel_drafting out"):
        configure(model, policy, speculative_config=speculation | {"parallel_drafting": True})
    with pytest.raises(
        ConfigError, match="cartridges, of which layers that draft have no slots: leave --kv-cartridge out"
    ):
        configure(model, policy | {"cartridge": [f"name={tmp_path}"]}, speculative_config=speculation)
    with pytest.raises(
        ConfigError, match="one cache for all kinds of layers: leave --disable-hybrid-kv-cache-manager out"
    ):
        configure(model, policy, speculative_config=speculation, disable_hybrid_kv_cache_manager=True)
    assert configure(model, policy, speculative_config=speculation).num_speculative_tokens == DRAFTS


@pytest.mark.slow
@pytest.mark.parametrize("protect", [0, 40])
@pytest.mark.parametrize("method", ["eagle3", "mtp"])
def test_a_chat_goes_on(tiny_model, tmp_path, method, protect):
    """A later turn goes on from a snapshot with accepted drafts, or hits the protected blocks, in all groups."""
    model, speculation = speculation_of(method, tiny_model, tmp_path)
    setup = make_case(model, tmp_path / "scorer", "kvpop", protect_prompt=protect)
    with serving(setup, speculative_config=speculation, enable_prefix_caching=True, **SIZES) as engine:
        prompt, question = random_prompt(95, seed=1), random_prompt(45, seed=2)
        (first,) = plain(engine, [Job(prompt=prompt, new=20, scored=False)])
        engine.engine.reset_prefix_cache()
        (second,) = plain(engine, [Job(prompt=[*first, *question], new=20, scored=False)])
        engine.engine.reset_prefix_cache()
        with right_drafts(engine.recorder.runner, [first, second], itertools.repeat(2)):
            (answer,) = engine.serve([Job(prompt=prompt, new=20, scored=False)]).values()
            before = {layer: [*steps] for layer, steps in engine.recorder.retained[engine.names["0"]].items()}
            answers = engine.serve([Job(prompt=[*first, *question], new=20, scored=False)])
        (later,) = answers.values()
        assert whole(answer) == first and whole(later) == second
        assert later.num_cached_tokens in (len(first), len(first) - 1)
        for layer, steps in engine.recorder.retained[engine.names["0"]].items():
            steps[:0] = before[layer]
        engine.judge.check(answers, engine.recorder.retained)
        engine.engine.reset_prefix_cache()
