"""Models with layers of several kinds: a policy acts on those with full attention, the others are vLLM's.

The judge is the oracle of kinds. One engine for each family, with policies spread over them.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from engine.driving import Job, preempt_all, watched
from engine.own_backend import OwnBackendForCausalLM
from engine.tiny_engine import configure, generate
from vllm import ModelRegistry
from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec, FullAttentionSpec, SlidingWindowSpec

from kvpop_vllm.cache.accounting import MOST_PADDING, common_pages
from kvpop_vllm.config import ConfigError
from kvpop_vllm.model_shape import ModelShape
from kvpop_vllm.supported import CHUNKED, FULL, SLIDING
from kvpop_vllm.testing import (
    FAMILIES,
    KindsOracle,
    OraclePolicy,
    random_prompt,
    require_distant_kinds,
    write_mixed_model,
    write_random_scorer,
    write_tiny_model,
)
from kvpop_vllm.vllm_glue.run.cache_spec import FixedBudgetSpec
from kvpop_vllm.vllm_glue.start.engine_policy import describe, engine_policy
from kvpop_vllm.vllm_glue.start.refusals import check_layers

QUICK = {"gemma3_text": "kvpop", "olmo3": "h2o", "exaone4": "streaming-llm", "llama4_text": "kvpop"}
"""Policy of each family's engine in the quick tests."""
POLICIES = ("streaming-llm", "kvpop", "h2o")
CASES = [
    pytest.param((kind, policy), marks=() if QUICK[kind] == policy else pytest.mark.slow, id=f"{kind}-{policy}")
    for kind in FAMILIES
    for policy in POLICIES
]
BUDGET, BLOCK, TOLERANCE = 56, 32, 1e-5
JOBS = [Job(1, new=90), Job(40), Job(BUDGET), Job(130, new=20), Job(281, new=4)]


@pytest.fixture(scope="module")
def family(tmp_path_factory):
    """Return ``make(kind)``, which writes the model of a family once and returns its folder and oracle."""

    @functools.cache
    def make(kind: str) -> tuple[str, KindsOracle]:
        folder = write_mixed_model(tmp_path_factory.mktemp(kind), kind)
        return str(folder), KindsOracle(folder)

    return make


@dataclass
class Served:
    """An engine whose freed blocks are overwritten, with the oracle and the policy that judge it."""

    engine: object
    oracle: KindsOracle
    policy: OraclePolicy
    runs: dict

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


@pytest.fixture(scope="module", params=CASES)
def served(request, family, tmp_path_factory):
    """Yield a poisoned engine of a family with a policy."""
    kind, policy = request.param
    folder, oracle = family(kind)
    settings, exact = roles(policy, folder, tmp_path_factory.mktemp("scorer"), oracle)
    with pytest.MonkeyPatch.context() as patch, watched(folder, settings, block_size=BLOCK) as engine:
        engine.poison(patch)
        engine.fill_pool(255)
        yield Served(engine, oracle, exact, {})
        assert not engine.leaks()


@pytest.mark.parametrize("kind", FAMILIES)
def test_the_models_depend_on_distant_tokens(family, kind):
    require_distant_kinds(family(kind)[0])


@pytest.mark.parametrize("chunk", [16, 128])
def test_requests_in_chunks(served, chunk):
    """Prompts and answers around blocks, windows and the budget are the oracle's, in a pool of NaN."""
    served.serve(JOBS, chunk)


def test_preempted_requests(served):
    """Requests that start over, and that a small pool has start over, give the oracle's answers."""

    def preempt(step):
        if step == 6:
            preempt_all(served.engine.recorder.scheduler)

    jobs = [Job(n, new=20, scored=False) for n in (30, 70, 120)]
    served.serve(jobs, 16, preempt)
    assert set(served.engine.recorder.preemptions.values()) == {1}
    pool, groups = served.engine.recorder.pool, len(served.engine.recorder.runner.kv_cache_config.kv_cache_groups)
    with served.engine.small_pool(9 * groups):
        served.serve([Job(9 + i, new=60, scored=False) for i in range(5)], 16)
        assert pool.get_num_free_blocks() == 9 * groups
    assert sum(served.engine.recorder.preemptions.values()) > 0


def test_pages_of_all_groups(served):
    """Pages of all groups have as many bytes, of which less than 4% are padding; layers are where their kind says."""
    config = served.engine.recorder.runner.kv_cache_config
    specs = [group.kv_cache_spec for group in config.kv_cache_groups]
    assert len({spec.page_size_bytes for spec in specs}) == 1
    assert all(spec.unpadded_page_size_bytes > (1 - MOST_PADDING) * spec.page_size_bytes for spec in specs)
    kinds = {FULL: FixedBudgetSpec, SLIDING: SlidingWindowSpec, CHUNKED: ChunkedLocalAttentionSpec}
    layers = {name: type(group.kv_cache_spec) for group in config.kv_cache_groups for name in group.layer_names}
    expected = {f"model.layers.{i}.self_attn.attn": kinds[kind] for i, kind in enumerate(served.oracle.kinds)}
    assert layers == expected


# without an engine of the fixture


@pytest.mark.parametrize(
    "kind", ["gemma3_text", *(pytest.param(kind, marks=pytest.mark.slow) for kind in FAMILIES if kind != "gemma3_text")]
)
def test_a_budget_of_the_whole_text_equals_stock(family, kind):
    """Tokens are the same, and log-probabilities differ by rounding."""
    folder, _ = family(kind)
    stock, full = (generate(folder, policy) for policy in (None, {"policy": "streaming-llm", "budget": 1024}))
    for ours, theirs in zip(full, stock, strict=True):
        assert [token for token, _ in ours] == [token for token, _ in theirs]
        assert max(abs(a - b) for (_, a), (_, b) in zip(ours, theirs, strict=True)) <= TOLERANCE


def test_hits_in_all_groups(family, tmp_path):
    """Protected tokens are shared if all groups have them; answers after a hit are the oracle's, with other tails too."""
    folder, oracle = family("gemma3_text")
    settings, exact = roles("kvpop", folder, tmp_path, oracle)
    text = random_prompt(300, seed=7)
    other = text[:200] + random_prompt(60, seed=8)
    cases = [(text, 130, 0), (other, 130, 128), (other, 70, 0), (text, 70, 64), (text, "all", 0), (text, "all", 288)]
    with (
        pytest.MonkeyPatch.context() as patch,
        watched(folder, settings | {"protect_prompt": "all"}, block_size=BLOCK) as engine,
    ):
        engine.poison(patch)
        served = Served(engine, oracle, exact, {})
        for prompt, protect, hit in cases:
            job = Job(prompt=prompt, new=70, scored=False, asks={"kv_protect_prompt": protect})
            (answer,) = served.serve([job], protect=True if protect == "all" else protect).values()
            assert answer.num_cached_tokens == hit, (len(prompt), protect)
        engine.engine.reset_prefix_cache()
        assert not engine.leaks()


MIXED = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 48}


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    """Return ``make(*kinds, **changes)``, which writes a Mistral with layers of these kinds."""

    def make(*kinds: str, **changes) -> str:
        folder = write_tiny_model(tmp_path_factory.mktemp("mixed"), "llama", layers=len(kinds))
        config = json.loads((folder / "config.json").read_text()) | MIXED | {"layer_types": list(kinds)} | changes
        (folder / "config.json").write_text(json.dumps(config))
        return str(folder)

    return make


STREAMING = {"policy": "streaming-llm", "budget": BUDGET}


def test_the_start_names_the_layers(mixed):
    """The lines are those of the log and of `kvpop doctor`; the shape is that of the policy's layers."""
    config = configure(mixed(SLIDING, FULL, SLIDING, FULL), STREAMING)
    acts = "it acts on 2 of 4 layers, those with full attention (1, 3); 2 of sliding_attention are as without a policy"
    assert acts in describe(config)
    shape = engine_policy(config).model
    assert (shape.num_layers, shape.model_layers, shape.layers) == (2, 4, (1, 3))
    assert [shape.ordinal(layer) for layer in (1, 3)] == [0, 1]
    assert shape.stages([(0, 2), (2, 4)]) == [(0, 1), (1, 2)]
    with pytest.raises(ConfigError, match="layer 2 of this model has full attention, and its config says sliding"):
        shape.ordinal(2)


def test_a_window_that_no_request_exceeds_is_full_attention(mixed):
    folder = mixed(SLIDING, FULL)
    for length, layers in ((48, ()), (49, (1,))):
        assert engine_policy(configure(folder, STREAMING | {"budget": 32}, max_model_len=length)).model.layers == layers
        assert ModelShape.of(folder, length).layers == layers


@pytest.mark.parametrize(
    "options, settings, variables, message",
    [
        ({"disable_hybrid_kv_cache_manager": True}, {}, {}, "leave --disable-hybrid-kv-cache-manager out"),
        ({}, {}, {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}, "unset VLLM_ALLOW_RUNTIME_LORA_UPDATING"),
    ],
)
def test_what_does_not_work_with_other_layers(mixed, monkeypatch, options, settings, variables, message):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="^--kv-policy on a model with layers of sliding_attention cannot") as caught:
        configure(mixed(SLIDING, FULL), STREAMING | settings, **options)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_unequal_shares_with_a_stage_that_has_none(mixed):
    stages = {"pipeline_parallel_size": 2, "distributed_executor_backend": "mp"}
    unequal, folder = {"policy": "h2o", "budget": BUDGET, "allocator": "pyramid"}, mixed(SLIDING, SLIDING, FULL, FULL)
    with pytest.raises(ConfigError, match="stage of --pipeline-parallel-size 2 has no layer with full attention"):
        configure(folder, unequal, **stages)
    configure(folder, STREAMING, **stages)


def test_gates_read_every_layer(tmp_path, mixed):
    folder = mixed(SLIDING, FULL, model_type="qwen3", architectures=["Qwen3ForCausalLM"], use_sliding_window=True)
    gate = write_random_scorer(tmp_path, folder, "trimkv", layers=[1])
    with pytest.raises(ConfigError, match="whose gate reads every layer: choose another policy"):
        configure(folder, {"policy": "trimkv", "scorer": str(gate)})


def test_a_scorer_of_other_layers_is_refused(tmp_path, mixed):
    scorer = write_random_scorer(tmp_path, folder := mixed(SLIDING, FULL, FULL), layers=[0, 2])
    with pytest.raises(ConfigError, match=r"made for a model with layers = \(0, 2\), this one has \(1, 2\)"):
        configure(folder, {"policy": "kvpop", "scorer": str(scorer)})


def test_shares_among_several_groups_are_refused(mixed):
    """Five layers of full attention next to two others are dealt to three groups."""
    folder = mixed(SLIDING, FULL, FULL, FULL, SLIDING, FULL, FULL)
    with pytest.raises(ConfigError, match="form 3 cache groups, .*: set --kv-allocator uniform") as caught:
        generate(folder, {"policy": "h2o", "budget": BUDGET, "allocator": "pyramid"})
    assert "\n" not in str(caught.value)


WINDOW = SlidingWindowSpec(block_size=32, num_kv_heads=2, head_size=32, dtype=torch.float32, sliding_window=48)
DENSE = FullAttentionSpec(block_size=32, num_kv_heads=2, head_size=32, dtype=torch.float32)
CHUNKS = ChunkedLocalAttentionSpec(
    block_size=32, num_kv_heads=2, head_size=32, dtype=torch.float32, attention_chunk_size=64
)


@pytest.mark.parametrize("kinds, specs", [([SLIDING, FULL], [DENSE, None]), ([SLIDING, FULL], [WINDOW, DENSE]),
                                          ([SLIDING, FULL], [WINDOW, WINDOW]), ([SLIDING, FULL], [None, None]),
                                          ([CHUNKED, FULL], [WINDOW, None]), ([], [None, WINDOW])])  # fmt: skip
def test_layers_that_are_not_of_their_kind_are_refused(kinds, specs):
    """A layer neither has the policy's cache where it should not, nor another where it should."""
    ours = FixedBudgetSpec.__new__(FixedBudgetSpec)
    layers = {f"layers.{i}.attn": ours if spec is None else spec for i, spec in enumerate(specs)}
    with pytest.raises(ConfigError, match=r"layers that bring an attention backend of their own \(layers\.[01]\.attn"):
        check_layers(layers, SimpleNamespace(kinds=tuple(kinds)))
    right = {"layers.0.attn": {SLIDING: WINDOW, CHUNKED: CHUNKS}.get((kinds or [FULL])[0], ours), "layers.1.attn": ours}
    check_layers(right, SimpleNamespace(kinds=tuple(kinds)))


def test_a_layer_with_a_backend_of_its_own_is_refused(mixed, monkeypatch):
    """A layer of full attention of a mixed model that does not ask for a backend."""
    ModelRegistry.register_model("OwnBackendForCausalLM", OwnBackendForCausalLM)
    monkeypatch.setattr(OwnBackendForCausalLM, "first", 2, raising=False)
    folder = mixed(SLIDING, FULL, FULL, architectures=["OwnBackendForCausalLM"])
    with pytest.raises(ConfigError, match=r"a backend of their own \(model.layers.2.self_attn.attn\)"):
        generate(folder, STREAMING, tokens=2)


@pytest.mark.parametrize(
    "page, head_bytes, multiple",
    [(128 * 256, 264, 16), (128 * 512, 520, 16), (128 * 128, 136, 16), (32 * 512, 264, 16), (64 * 256, 264, 64)],
)
def test_slots_of_a_block(page, head_bytes, multiple):
    """Our page is the largest, and of no page are 4% padding; pages are those of one head."""
    unit = head_bytes * multiple
    factor, count = common_pages(page, unit)
    for larger in range(1, factor + 1):
        ours = -(-larger * page // unit) * unit
        assert (ours - larger * page < MOST_PADDING * ours) == (larger == factor)
    assert ours == count * unit
