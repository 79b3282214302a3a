"""Features that work together with a policy, on models with layers of several kinds: Gemma 3, and Nemotron-H with states.

Those that need an engine of their own are slow. Other features are in test_kinds.py and test_kinds_start.py.
"""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest
from distill.byte_tokenizer import byte_tokenizer
from engine.driving import Job
from engine.kinds import BLOCK, BUDGET, TOLERANCE, Served, roles, serving
from engine.matrix import policy_of
from engine.test_sharing_features import adapter
from engine.tiny_engine import PROMPTS, complete, configure, quick, running, scores
from prometheus_client import REGISTRY
from threads import core_for_each_of_two, one_thread

from kvpop_vllm.config import ConfigError
from kvpop_vllm.supported import RECURRENT
from kvpop_vllm.testing import KindsOracle, OraclePolicy, random_prompt
from kvpop_vllm.vllm_glue.run.cache_spec import FixedBudgetManager

NEW = 24


class Model(NamedTuple):
    """A model, its oracle, and settings and policy of a random scorer."""

    kind: str
    folder: str
    oracle: KindsOracle
    settings: dict
    exact: OraclePolicy

    def served(self, engine, policy: OraclePolicy | None = None, oracle: KindsOracle | None = None) -> Served:
        """Return the judge of an engine; after recurrent layers it decides by the engine's queries, keys and values."""
        recurrent = RECURRENT in self.oracle.kinds
        return Served(engine, oracle or self.oracle, policy or self.exact, by_inputs=recurrent)


@pytest.fixture(scope="module", params=["gemma3_text", "nemotron_h"])
def model(request, family, tmp_path_factory):
    """Return each model; both have six layers, two of them with full attention."""
    folder, oracle = family(request.param)
    settings, exact = roles("kvpop", folder, tmp_path_factory.mktemp("scorer"), oracle)
    return Model(request.param, folder, oracle, settings, exact)


def managers(served: Served) -> list[FixedBudgetManager]:
    """Return the block managers of the groups that the policy acts on."""
    all_managers = served.engine.recorder.scheduler.kv_cache_manager.coordinator.single_type_managers
    return [manager for manager in all_managers if isinstance(manager, FixedBudgetManager)]


def test_settings_of_requests(model):
    """Budgets, protection and seeds of requests of one batch are those of the oracle, with blocks reserved.

    Evictions are drawn by the index of a layer among those that the policy acts on. Reports and the inspect page have
    what each request holds.
    """
    drawn = OraclePolicy("random draw", 4, 8, BUDGET - 12)
    settings = {"policy": "random", "budget": BUDGET, "sinks": 4, "window": 8, "protect_prompt": 0, "reserve": True}
    settings |= {"max_budget": 72, "max_protect": 130, "inspect": True}
    options = [
        {},
        {"kv_seed": 3},
        {"kv_seed": 2**64 - 1, "kv_budget": 30},
        {"kv_budget": 72},
        {"kv_protect_prompt": 50},
    ]
    options += [{"kv_budget": 64, "kv_protect_prompt": 130, "kv_seed": 9}]
    jobs = [Job(n, new=30, scored=False, asks=asks | {"kv_report": 1}) for n in (140, 70) for asks in options]
    with serving(model.folder, settings, disable_log_stats=False) as engine:
        tokens = set()
        engine.chunk(16)
        for name, answer in engine.serve(jobs).items():
            asks = jobs[int(answer.request_id)].asks
            budget, protect = asks.get("kv_budget", BUDGET), asks.get("kv_protect_prompt", 0)
            policy = replace(drawn, topk=budget - 12, seeds=(0, asks.get("kv_seed", 0)))
            model.served(engine, policy).check(name, answer, protect)
            report, length = answer.kv_transfer_params["kv_report"], len(answer.prompt_token_ids) + 29
            steps = {layer: steps[-1] for layer, steps in engine.recorder.retained[name].items()}
            assert sorted(steps) == [0, 1] and report["seen_tokens"] == length
            assert report["kept_tokens_per_head"]["max"] == len(steps[0].positions[0])
            assert (report["layers"], report["model_layers"]) == (2, 6)
            tokens.add(tuple(answer.outputs[0].token_ids))
        assert len(tokens) > len(jobs) // 2, "settings change answers"
        core = engine.engine.engine_core.engine_core
        page = core.kvpop_inspect()
        for name in [request["id"] for request in page["requests"]]:  # the last ones to end
            left = np.frombuffer(core.kvpop_inspect_request(name)["left"], "<i4").reshape(2, 2, -1)
            for layer, steps in zip(left, engine.recorder.retained[name].values(), strict=True):
                assert [head.nonzero()[0].tolist() for head in layer == 0] == steps[-1].positions
        assert len(page["requests"]) > 3 and (page["layers"], page["model_layers"]) == (2, 6)
        (info,) = [metric for metric in REGISTRY.collect() if metric.name == "vllm:kv_policy_info"]
        assert {(sample.labels["layers"], sample.labels["model_layers"]) for sample in info.samples} == {("2", "6")}


@pytest.mark.parametrize("protect", [30, 100])
@pytest.mark.parametrize("model", ["gemma3_text"], indirect=True)
def test_chats_with_protected_tokens(model, protect):
    """Snapshots share prefix blocks and full windows; turns go on from them at once, from prompts' ends, and in small pools."""
    with serving(model.folder, model.settings | {"protect_prompt": protect}) as engine:
        served, history = model.served(engine), []

        def turn(*seeds: int, chunk=None) -> list:
            prompts = [[*history, *random_prompt(30 if history else 130, seed=seed)] for seed in seeds]
            answers = served.serve([Job(prompt=p, new=20, scored=False) for p in prompts], chunk, protect=protect)
            return [answers[engine.names[str(i)]] for i in range(len(seeds))]

        for number in range(3):
            (answer,) = turn(number, chunk=16 if number == 1 else None)
            assert answer.num_cached_tokens == max(0, len(history) - 1)
            history = [*answer.prompt_token_ids, *answer.outputs[0].token_ids]
        assert [answer.num_cached_tokens for answer in turn(7, 8, 9)] == [len(history) - 1] * 3
        history = [*answer.prompt_token_ids, 1]
        (answer,) = turn(10)
        assert answer.num_cached_tokens == len(history) - 1, "the prompt's end"
        history = [*answer.prompt_token_ids, *answer.outputs[0].token_ids]
        served.serve([Job(len(history) + 30, new=20, scored=False)], protect=protect)
        pool = engine.recorder.pool
        peak = pool.num_gpu_blocks - 1 - min(step.free for step in engine.recorder.blocks)
        for room in (0, 2):
            with engine.small_pool(peak + room):  # in which a request that hits nothing fits
                assert [len(turn(20 + number)) for number in range(4)] == [1] * 4


def test_reserved_blocks(model):
    """With `--kv-reserve` a request holds all blocks of the policy's layers from its first step on."""
    with serving(model.folder, model.settings | {"reserve": True}) as engine:
        served, counts = model.served(engine), []
        (manager,) = managers(served)

        def count(step):
            counts.extend(len(blocks) for blocks in manager.req_to_blocks.values())

        served.serve([Job(20, new=60, scored=False)], each_step=count)
        assert set(counts) == {manager.kv_cache_spec.blocks(80)}


def test_cartridges_are_refused(model, tmp_path):
    with pytest.raises(ConfigError, match="cannot be combined with a cartridge, which holds a text in every layer"):
        configure(model.folder, model.settings | {"cartridge": [f"name={tmp_path}"]})


def test_export_is_refused(model, tmp_path, run_kvpop):
    status, _, error = run_kvpop("export", model.folder, model.settings["scorer"], tmp_path / "out")
    assert status == 2 and "cannot carry scorers, only llama, qwen3 can: serve it with --kv-scorer" in error


@pytest.fixture(scope="module")
def alone(model):
    """Tokens and log-probabilities of one engine of one rank, which the oracle judges."""
    return answers_alone(model)


def answers_alone(model: Model) -> list:
    """Return tokens and log-probabilities of one engine of one rank, which the oracle judges."""
    with serving(model.folder, model.settings) as engine:
        jobs = [Job(prompt=prompt, new=NEW, scored=False) for prompt in PROMPTS]
        return [scores(answer) for answer in model.served(engine).serve(jobs).values()]


RANKS = {
    "two ranks": {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"},
    "two stages": {
        "pipeline_parallel_size": 2,
        "distributed_executor_backend": "mp",
        "enforce_eager": False,
        "compilation_config": {"mode": 2, "backend": "eager"},
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("ranks", RANKS)
def test_two_workers_equal_one(model, alone, monkeypatch, ranks):
    """Ranks have one KV head of each layer, stages one layer of full attention and two others."""
    check_two_workers(model, alone, monkeypatch, ranks)


def check_two_workers(model: Model, alone: list, monkeypatch, ranks: str) -> None:
    """Check that two workers give the tokens and log-probabilities of one engine of one rank."""
    for name, value in core_for_each_of_two().items():
        monkeypatch.setenv(name, value)
    with running(model.folder, model.settings, block_size=BLOCK, **RANKS[ranks]) as llm:
        for ours, one in zip(complete(llm, NEW), alone, strict=True):
            assert [token for token, _ in ours] == [token for token, _ in one]
            assert [score for _, score in ours] == pytest.approx([score for _, score in one], abs=1e-3)


@pytest.mark.slow
def test_asynchronous_scheduling(model, alone, monkeypatch):
    """A step is scheduled before the one before has its token, as in test_executors.py."""
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler

    update = CpuPlatform.check_and_update_config.__func__

    def update_and_leave_on(cls, config):
        update(cls, config)
        config.scheduler_config.async_scheduling = True

    monkeypatch.setattr(CpuPlatform, "check_and_update_config", classmethod(update_and_leave_on))
    with running(model.folder, model.settings, block_size=BLOCK, async_scheduling=True) as llm:
        assert isinstance(llm.llm_engine.engine_core.engine_core.scheduler, AsyncScheduler)
        for ours, one in zip(complete(llm, NEW), alone, strict=True):
            assert [token for token, _ in ours] == [token for token, _ in one]


@pytest.fixture(scope="module", params=[("gemma3_text", "dms-query"), ("gpt_oss", "trimkv"), ("nemotron_h", "kvzap")])
def gated(request, family, tmp_path_factory):
    """Return each model with a gate."""
    kind, name = request.param
    folder, oracle = family(kind)
    settings, exact, *_ = policy_of(folder, tmp_path_factory.mktemp("gate"), name)
    return Model(kind, folder, oracle, settings, exact)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", RANKS)
def test_gates_of_two_workers(gated, monkeypatch, ranks):
    check_two_workers(gated, answers_alone(gated), monkeypatch, ranks)


@pytest.mark.slow
def test_gates_with_adapters(gated, tmp_path):
    if gated.kind == "gpt_oss":
        pytest.skip("on a CPU vLLM has no adapters next to experts")
    check_adapter(gated, tmp_path)


@pytest.mark.slow
def test_adapters(model, tmp_path):
    """A request with a LoRA adapter gets the oracle's answer on the model whose weights contain it."""
    check_adapter(model, tmp_path)


def check_adapter(model: Model, tmp_path) -> None:
    """Check answers of requests with an adapter."""
    from vllm.lora.request import LoRARequest

    merged, lora = adapter(model.folder, tmp_path, seed=1)
    with serving(model.folder, model.settings, enable_lora=True, max_lora_rank=8) as engine:
        served = model.served(engine, oracle=KindsOracle(merged))
        served.serve([Job(n, new=40, scored=False, adapter=LoRARequest("first", 1, str(lora))) for n in (49, 140)])


@pytest.mark.slow
def test_structured_output(model, tmp_path):
    """Past the budget each token is the most probable one, by the oracle, of those that the pattern admits, in three turns."""
    from vllm import LLM, SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    shutil.copytree(model.folder, tmp_path / "model")
    byte_tokenizer(eos="<0x00>").save_pretrained(tmp_path / "model")
    options = {"max_model_len": 512, "kv_cache_memory_bytes": 8 << 20, "dtype": "float32", "enforce_eager": True}
    params = SamplingParams(
        temperature=0,
        max_tokens=100,
        structured_outputs=StructuredOutputsParams(regex="[a-f]{80,90}"),
    )
    prompts, answers = [[token % 128 for token in random_prompt(70, seed=3)]], []
    with one_thread(), quick(), pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        llm = LLM(str(tmp_path / "model"), additional_config={"kv_policy": model.settings}, block_size=BLOCK, **options)
        for turn in range(3):
            answers += llm.generate([{"prompt_token_ids": prompts[turn]}], params, use_tqdm=False)
            written = answers[turn].outputs[0]
            prompts.append([*prompts[turn], *written.token_ids[: len(written.text)], 65, 66])
        llm.llm_engine.engine_core.shutdown()
    if RECURRENT not in model.oracle.kinds:
        for turn in (1, 2):
            assert answers[turn].num_cached_tokens >= len(prompts[turn]) - 3, "it goes on from the turn before"
    admitted = [ord(letter) for letter in "abcdef"]
    for prompt, answer in zip(prompts, answers, strict=False):
        text, tokens = answer.outputs[0].text, list(answer.outputs[0].token_ids)
        assert re.fullmatch("[a-f]{80,90}", text)
        rows = model.oracle.logprobs([*prompt, *tokens], model.exact)[len(prompt) - 1 :]
        for row, token in zip(rows, tokens[: len(text)], strict=False):
            assert float(row[admitted].max() - row[token]) <= 2 * TOLERANCE
