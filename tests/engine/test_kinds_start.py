"""Models with layers of several kinds: starts, refusals, and engines of their own. The others are in test_kinds.py."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from engine.driving import Job
from engine.kinds import BLOCK, BUDGET, TOLERANCE, Served, distance_of_engine, roles, serving
from engine.own_backend import OwnBackendForCausalLM
from engine.tiny_engine import configure, generate
from transformers import AutoModelForCausalLM
from vllm import ModelRegistry
from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec, FullAttentionSpec, MambaSpec, SlidingWindowSpec

from kvpop_vllm.cache.accounting import MOST_PADDING, common_pages
from kvpop_vllm.cli import main
from kvpop_vllm.config import ConfigError
from kvpop_vllm.hf import KVpopCache
from kvpop_vllm.model_shape import ModelShape
from kvpop_vllm.supported import CHUNKED, FULL, HYBRID, RECURRENT, SLIDING
from kvpop_vllm.testing import (
    BFLOAT16,
    FAMILIES,
    KindsOracle,
    random_prompt,
    require_distant_kinds,
    write_mixed_model,
    write_random_scorer,
    write_tiny_model,
)
from kvpop_vllm.vllm_glue.run import cache_groups
from kvpop_vllm.vllm_glue.run.cache_groups import with_block_sizes
from kvpop_vllm.vllm_glue.run.cache_spec import FixedBudgetSpec
from kvpop_vllm.vllm_glue.start.engine_policy import describe, engine_policy
from kvpop_vllm.vllm_glue.start.refusals import check_layers


@pytest.mark.parametrize(
    "kind", ["gemma3_text", *(pytest.param(kind, marks=pytest.mark.slow) for kind in FAMILIES if kind != "gemma3_text")]
)
def test_a_budget_of_the_whole_text_equals_stock(family, kind):
    """Tokens are the same, and log-probabilities differ by rounding.

    In bfloat16 tokens may part: there both are compared with the oracle.
    """
    folder, oracle = family(kind)
    policies = None, {"policy": "streaming-llm", "budget": 1024}
    if kind in BFLOAT16:
        stock, full = (distance_of_engine(folder, kind, policy, oracle) for policy in policies)
        assert full <= 2 * stock
        return
    options = {"block_size": BLOCK, "enable_prefix_caching": False}  # on a CPU vLLM has none with Mamba2
    stock, full = (generate(folder, policy, **options) for policy in policies)
    for ours, theirs in zip(full, stock, strict=True):
        assert [token for token, _ in ours] == [token for token, _ in theirs]
        assert max(abs(a - b) for (_, a), (_, b) in zip(ours, theirs, strict=True)) <= TOLERANCE


def _hit_of_second_turn(served, prompt: list[int], new: int, protect: int) -> int:
    """Return the tokens that the second turn of a chat hits, whose answers are protected too; the oracle judges both turns."""
    for more in ([], random_prompt(30, seed=10)):
        job = Job(prompt=[*prompt, *more], new=new, scored=False, asks={"kv_protect_prompt": protect})
        (answer,) = served.serve([job], protect=protect).values()
        prompt = [*job.prompt, *answer.outputs[0].token_ids]
    return answer.num_cached_tokens


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["gemma3_text", "gpt_oss", "granite_swa", "olmo3", "exaone4", "llama4_text", "gemma4_text"]
)
def test_hits_in_all_groups(family, tmp_path, kind):
    """Protected tokens are shared if all groups have them; answers after a hit are the oracle's, with other tails too.

    A request that protects all tokens takes no window from one that has evicted.
    """
    folder, oracle = family(kind)
    settings, exact = roles("kvpop", folder, tmp_path, oracle)
    text = random_prompt(300, seed=7)
    other = text[:200] + random_prompt(60, seed=8)
    short = 64 if kind == "llama4_text" else 0  # a chunk begins there, which needs no earlier token
    cases = [(text, 130, 0), (other, 130, 128), (other, 70, short), (text, 70, 64), (text, "all", 128)]
    cases += [(text, "all", 288)]
    with serving(folder, settings | {"protect_prompt": "all"}) as engine:
        served = Served(engine, oracle, exact)
        for prompt, protect, hit in cases:
            job = Job(prompt=prompt, new=20, scored=False, asks={"kv_protect_prompt": protect})
            (answer,) = served.serve([job], protect=True if protect == "all" else protect).values()
            assert answer.num_cached_tokens == hit, (len(prompt), protect)
        hit = 160 if kind == "llama4_text" else 96  # a chunk begins at 128
        assert _hit_of_second_turn(served, random_prompt(100, seed=9), 70, 250) == hit, (
            "windows stay for a prompt's end alone"
        )


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [None, 128])
@pytest.mark.parametrize("kind", BFLOAT16)
def test_hits_in_states(family, tmp_path, kind, chunk):
    """A hit takes the state after whole blocks of protected tokens, which a step ends at."""
    folder, oracle = family(kind)
    settings, exact = roles("streaming-llm", folder, tmp_path, oracle)
    tolerance = 2 * distance_of_engine(folder, kind, None, oracle)
    text = random_prompt(700, seed=7)
    other = text[:560] + random_prompt(100, seed=8)
    cases = [(text, 530, 0), (other, 530, 512), (other, 70, 0), (text, 70, 0), (text, "all", 512), (other, "all", 512)]
    with serving(folder, settings | {"protect_prompt": "all"}, kind) as engine:
        served = Served(engine, oracle, exact, tolerance)
        for prompt, protect, hit in cases:
            job = Job(prompt=prompt, new=20, scored=False, asks={"kv_protect_prompt": protect})
            (answer,) = served.serve([job], chunk, protect=True if protect == "all" else protect).values()
            assert answer.num_cached_tokens == hit, (len(prompt), protect)
        assert _hit_of_second_turn(served, random_prompt(500, seed=9), 20, 600) == 512
        served.settings = settings
        for prompt, new in ((500, 30), (70, 20)):  # the longer one has two states where its answer begins a block
            served.check_plan(prompt, new, "--protect-prompt", "all")


@pytest.mark.slow
def test_requests_that_are_served_together(family, tmp_path):
    """Sixteen requests, of which twelve fit."""
    folder, oracle = family("granitemoehybrid")
    settings, exact = roles("streaming-llm", folder, tmp_path, oracle)
    with serving(folder, settings, "granitemoehybrid") as engine, engine.small_pool(25):
        jobs = [Job(10 + 17 * i, new=30, scored=False) for i in range(16)]
        Served(engine, oracle, exact).serve(jobs)


def test_a_hit_whose_first_step_does_not_fit(family, tmp_path):
    """Windows give blocks back between steps alone: in a small pool a turn is computed again instead of waiting forever."""
    folder, oracle = family("gemma3_text")
    settings, exact = roles("streaming-llm", folder, tmp_path, oracle)
    hits = set()

    def ends(step):
        assert step < 150, "a request waits for what is never allocated"

    with serving(folder, settings, max_num_batched_tokens=64, max_model_len=1024) as engine:
        served = Served(engine, oracle, exact)
        for blocks in (12, 13, 14, 16):
            engine.engine.reset_prefix_cache()
            with engine.small_pool(blocks):
                first = served.serve([Job(prompt=random_prompt(400, seed=2), new=20, scored=False)], each_step=ends)
                history = [token for a in first.values() for token in (*a.prompt_token_ids, *a.outputs[0].token_ids)]
                turn = Job(prompt=[*history, *random_prompt(140, seed=3)], new=20, scored=False)
                second = served.serve([turn], each_step=ends)
            hits |= {answer.num_cached_tokens for answer in second.values()}
    assert hits == {0, len(history) - 1}


@pytest.mark.slow
def test_experts_of_gemma_4(tmp_path):
    """With `enable_moe_block` layers have experts next to their MLP."""
    experts = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 64}
    folder = str(write_mixed_model(tmp_path / "model", "gemma4_text", **experts))
    require_distant_kinds(folder)
    oracle = KindsOracle(folder)
    settings, exact = roles("kvpop", folder, tmp_path / "scorer", oracle)
    with serving(folder, settings) as engine:
        Served(engine, oracle, exact).serve([Job(1, new=70), Job(57), Job(200, new=20)], 16)


MIXED = {"architectures": ["MistralForCausalLM"], "model_type": "ministral", "sliding_window": 48}


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    """Return ``make(*kinds, **changes)``, which writes a Ministral with layers of these kinds."""

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
    untested = "no test serves models of type ministral (docs/models.md): compare their answers"
    turns = (
        "a prompt that goes on from an earlier request costs its new tokens (--no-enable-prefix-caching turns it off)"
    )
    assert describe(config)[1:] == [acts, untested, turns]
    shape = engine_policy(config).model
    assert (shape.num_layers, shape.model_layers, shape.layers) == (2, 4, (1, 3))
    assert [shape.ordinal(layer) for layer in (1, 3)] == [0, 1]
    assert shape.stages([(0, 2), (2, 4)]) == [(0, 1), (1, 2)]
    with pytest.raises(ConfigError, match="layer 2 of this model has full attention, and its config says sliding"):
        shape.ordinal(2)


def test_the_start_names_layers_with_states(family):
    config = configure(family("nemotron_h")[0], STREAMING)
    acts = "it acts on 2 of 6 layers, those with full attention (1, 4); 2 of linear_attention are as without a policy"
    assert acts in describe(config)
    config = configure(family("falcon_h1")[0], STREAMING)
    acts = "it acts on 3 of 3 layers, in all their full attention; the states of 3 are as without a policy"
    assert acts in describe(config)
    shape = engine_policy(config).model
    assert (shape.num_layers, shape.model_layers, shape.layers, shape.ordinal(2)) == (3, 3, (), 2)


def test_prefix_caching_of_states_on_a_cpu(family):
    """With Mamba2 layers, where vLLM stops at the first request, it is off where a policy would switch it on."""
    mamba, net = family("nemotron_h")[0], family("qwen3_next")[0]
    protecting = STREAMING | {"protect_prompt": "all"}
    for settings in (protecting, {"policy": "snapkv", "budget": BUDGET, "window": 32}):
        cache = configure(mamba, settings).cache_config
        assert (cache.enable_prefix_caching, cache.mamba_cache_mode, cache.mamba_block_size) == (False, "none", 256)
    with pytest.raises(ConfigError, match="on a CPU, where vLLM stops at the first request: leave --enable-prefix-cac"):
        configure(mamba, protecting, enable_prefix_caching=True)
    cache = configure(net, protecting, dtype="bfloat16").cache_config
    assert (cache.enable_prefix_caching, cache.mamba_cache_mode) == (True, "align")
    with pytest.raises(
        ConfigError, match="layers of linear_attention cannot .* float32 on a CPU: use --dtype bfloat16"
    ):
        configure(net, STREAMING, dtype="float32")


@pytest.mark.parametrize("kind", ["gemma3_text", "nemotron_h", "qwen3_next"])
def test_the_start_says_whether_turns_of_a_chat_go_on(family, kind):
    """Snapshots hold windows, and no recurrent states."""
    config = configure(family(kind)[0], STREAMING, dtype="bfloat16")
    goes_on = any(line.startswith("a prompt that goes on from an earlier request costs") for line in describe(config))
    refuses = (
        "a turn of a chat computes all of its tokens that are not protected, since snapshots hold no recurrent states"
    )
    assert (goes_on, refuses in describe(config)) == ((True, False) if kind == "gemma3_text" else (False, True))
    assert config.cache_config.enable_prefix_caching == goes_on


STATE = MambaSpec(block_size=1024, shapes=((4, 1000),), dtypes=(torch.float32,))


@pytest.mark.parametrize(
    "budget, state_floats, line",
    [
        (1000, 0, "a request takes 5 for 1000 slots; --kv-budget 1120 costs the same"),
        (1120, 0, "a request takes 5 for 1120 slots"),
        (100, 500, "a request takes 2 for 100 slots, 1 of them for the scorer's state; --kv-budget 224 costs the same"),
    ],
)
def test_slots_of_a_block_that_holds_a_state(monkeypatch, budget, state_floats, line):
    """The policy's page is the least that holds a state; a budget that costs the same is named."""
    ours = FixedBudgetSpec(
        block_size=64, num_kv_heads=1, head_size=8, kv_dtype=torch.float32, state_content_bytes=72, budget=budget, sinks=4,
        state_floats=state_floats, protect=0, max_budget=budget, max_protect=0,
    )  # fmt: skip
    config, lines = SimpleNamespace(), []
    config.cache_config = SimpleNamespace(user_specified_block_size=False)
    config.model_config = SimpleNamespace(max_model_len=2000)
    monkeypatch.setattr(cache_groups.logger, "info", lambda text, *values: lines.append(text % values))
    (specs,) = with_block_sizes([{"layers.0.attn": ours, "layers.1.mixer": STATE}], config)
    attention, state = specs.values()
    assert attention.block_size == 224 and 208 * 72 < 16000 <= 224 * 72
    assert attention.page_size_bytes == state.page_size_bytes == 224 * 72 and state.block_size == 1024
    assert lines == [f"a block holds the state of a recurrent layer, or 224 slots: {line}"]
    aligned = replace(STATE, block_size=256, mamba_cache_mode="align", page_size_padded=256 * 72)
    (specs,) = with_block_sizes([{"layers.0.attn": ours, "layers.1.mixer": aligned}], config)
    assert {spec.block_size for spec in specs.values()} == {256}


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
        ({"block_size": 48}, {}, {}, "--block-size 48 on a CPU: use a multiple of 32"),
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
                                          ([CHUNKED, FULL], [WINDOW, None]), ([], [None, WINDOW]),
                                          ([RECURRENT, FULL], [None, None]), ([RECURRENT, FULL], [STATE, STATE]),
                                          ([HYBRID, HYBRID], [STATE, DENSE]), (["mlp", FULL], [STATE, None])])  # fmt: skip
def test_layers_that_are_not_of_their_kind_are_refused(kinds, specs):
    """A layer neither has the policy's cache where it should not, nor another where it should."""
    ours = FixedBudgetSpec.__new__(FixedBudgetSpec)
    layers = {f"layers.{i}.attn": ours if spec is None else spec for i, spec in enumerate(specs)}
    with pytest.raises(ConfigError, match=r"layers that bring an attention backend of their own \(layers\.[01]\.attn"):
        check_layers(layers, SimpleNamespace(kinds=tuple(kinds)))
    first = {SLIDING: WINDOW, CHUNKED: CHUNKS, RECURRENT: STATE}.get((kinds or [FULL])[0], ours)
    right = {"layers.0.attn": first, "layers.1.attn": ours}
    right |= {"model.2.mixer": STATE, "model.3.mixer": STATE} if HYBRID in kinds else {}
    if kinds[:1] == ["mlp"]:
        del right["layers.0.attn"]
    shape = SimpleNamespace(kinds=tuple(kinds), num_layers=sum(spec is ours for spec in right.values()))
    check_layers(right, shape)
    with pytest.raises(ConfigError, match=r"attention layers beyond those of the model \(draft\.1\.attn\)"):
        check_layers(right | {"draft.1.attn": ours}, shape)


def test_a_layer_with_a_backend_of_its_own_is_refused(mixed, monkeypatch):
    """A layer of full attention of a mixed model that does not ask for a backend."""
    ModelRegistry.register_model("OwnBackendForCausalLM", OwnBackendForCausalLM)
    monkeypatch.setattr(OwnBackendForCausalLM, "first", 2, raising=False)
    folder = mixed(SLIDING, FULL, FULL, architectures=["OwnBackendForCausalLM"])
    with pytest.raises(ConfigError, match=r"backend of their own \(model.layers.2.self_attn.attn\)"):
        generate(folder, STREAMING, tokens=2)


@pytest.mark.parametrize(
    "page, head_bytes, multiple",
    [(128 * 256, 264, 16), (128 * 512, 520, 16), (128 * 128, 136, 16), (32 * 512, 264, 16), (64 * 256, 264, 64)],
)
def test_slots_of_a_block(page, head_bytes, multiple):
    """Our page is the largest, and of no page are 4% padding; pages are those of one head."""
    unit = head_bytes * multiple
    factor, count = common_pages(page, unit)
    for larger in [larger for larger in (1, 2, 4) if larger <= factor]:
        ours = -(-larger * page // unit) * unit
        assert (ours - larger * page < MOST_PADDING * ours) == (larger == factor)
    assert ours == count * unit


@pytest.mark.parametrize("kind, layers, model_layers, groups", [("olmo3", 3, 4, 3), ("nemotron_h", 2, 6, 1)])
def test_reports_and_the_inspect_page_of_several_groups(family, tmp_path, kind, layers, model_layers, groups):
    """Numbers of groups are summed, and each policy layer is read in its own blocks; other layers are not counted."""
    folder, oracle = family(kind)
    settings, _ = roles("h2o", folder, tmp_path, oracle)
    with serving(folder, settings | {"inspect": True}) as engine:
        jobs = [Job(n, new=30, scored=False, asks={"kv_report": 1}) for n in (130, 40)]
        answers, core = engine.serve(jobs), engine.engine.engine_core.engine_core
        page = core.kvpop_inspect()
        assert (page["layers"], page["model_layers"], page["heads"]) == (layers, model_layers, 2)
        for name, answer in answers.items():
            report, length = answer.kv_transfer_params["kv_report"], len(answer.prompt_token_ids) + 29
            per_layer = -(-min(length, BUDGET) // BLOCK)
            assert (report["seen_tokens"], report["blocks"]) == (length, groups * per_layer)
            assert report["bytes"] == layers * per_layer * BLOCK * 2 * (2 * 32 * 4 + 8)
            assert report["dense_bytes"] == length * layers * 2 * 2 * 32 * 4
            left = np.frombuffer(core.kvpop_inspect_request(name)["left"], "<i4").reshape(layers, 2, length)
            for layer, steps in engine.recorder.retained[name].items():
                assert [head.nonzero()[0].tolist() for head in left[layer] == 0] == steps[-1].positions


GEMMA_4 = {
    "model_type": "gemma4_text",
    "architectures": ["Gemma4ForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "global_head_dim": 64,
    "vocab_size": 256,
    "hidden_size_per_layer_input": 0,
    "sliding_window": 48,
    "layer_types": [SLIDING, FULL, FULL, FULL],
    "dtype": "float32",
}


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"per_layer_config": {"01": {"head_dim": 64}, "03": {"head_dim": 128}}}, "layers of different shapes"),
        ({"global_head_dim": 48, "head_dim": 64}, "head size 48"),
        ({"num_kv_shared_layers": 2}, "cross-layer KV sharing"),
    ],
)
def test_layers_of_two_shapes_are_refused(tmp_path, capsys, changes, message):
    """So are full-attention layers of a size that is not served, and layers that share a cache. `kvpop plan` refuses them too."""
    (tmp_path / "config.json").write_text(json.dumps(GEMMA_4 | changes))
    with pytest.raises(ConfigError, match=message) as caught:
        configure(tmp_path, STREAMING)
    assert "\n" not in str(caught.value)
    options = ["--kv-memory", "1GiB", "--budget", "64", "--max-model-len", "256"]
    assert main(["plan", "--model", str(tmp_path), *options]) == 2
    assert message in capsys.readouterr().err


def test_other_layers_have_heads_of_any_size(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(GEMMA_4 | {"head_dim": 48}))
    assert engine_policy(configure(tmp_path, STREAMING)).model.head_dim == ModelShape.of(tmp_path, 256).head_dim == 64


def test_texts_as_short_as_a_window(tmp_path, mixed):
    """A window counts as full attention then; what does not fit is told to serve longer texts, not to take another scorer."""
    advice = "raise --max-model-len above the window of 48 tokens, up to which windows count as full attention"
    (tmp_path / "config.json").write_text(json.dumps(GEMMA_4 | {"global_head_dim": 128}))
    scorer = write_random_scorer(tmp_path / "scorer", folder := mixed(SLIDING, FULL), layers=[1])
    for model, settings in (
        (tmp_path, STREAMING | {"budget": 32}),
        (folder, {"policy": "kvpop", "scorer": str(scorer)}),
    ):
        configure(model, settings, max_model_len=49)
        with pytest.raises(ConfigError, match=advice) as caught:
            configure(model, settings, max_model_len=48)
        assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match=advice):
        ModelShape.of(tmp_path, 48)
    with pytest.raises(ConfigError, match="max_length above the window"):
        KVpopCache(AutoModelForCausalLM.from_pretrained(folder), "kvpop", scorer=scorer, max_length=48)
