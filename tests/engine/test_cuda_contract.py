"""vLLM's own classes with the GPU backend. The kernels are tested in test_cuda_interpreted.py."""

import importlib.util
import inspect
import json
import pickle
import re
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from engine.cuda_engine import GROUP, HEADS, SIZE, SLOTS, STREAMING, chosen, configure, group_of, only_rank
from engine.image_models import without_images
from engine.published_configs import CONFIGS
from policies.matrix import random_statistics_folder
from vllm import ModelRegistry
from vllm.config.compilation import CUDAGraphMode
from vllm.platforms import current_platform
from vllm.platforms.interface import DeviceCapability
from vllm.plugins import load_general_plugins
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, MambaSpec, SlidingWindowSpec

from kvpop_vllm import policies
from kvpop_vllm.cache.accounting import MOST_PADDING
from kvpop_vllm.config import ConfigError
from kvpop_vllm.kernels import dispatch
from kvpop_vllm.model_shape import ModelShape
from kvpop_vllm.supported import FULL, RECURRENT, SLIDING
from kvpop_vllm.testing import write_mixed_model, write_random_scorer
from kvpop_vllm.vllm_glue import plugin
from kvpop_vllm.vllm_glue.run import gated_attention
from kvpop_vllm.vllm_glue.run.cache_groups import get_kv_cache_groups, with_block_sizes
from kvpop_vllm.vllm_glue.start import backend_choice, cuda
from kvpop_vllm.vllm_glue.start.engine_policy import engine_policy

ROOT = Path(__file__).parents[2]


@pytest.fixture
def model(tiny_model):
    return tiny_model("llama")


@pytest.fixture
def gate(model, tmp_path):
    """Return a scorer folder of TRIM-KV."""
    return str(write_random_scorer(tmp_path / "gate", model, "trimkv", sinks=2, window=6, topk=32))


def refusal(model, policy, **options):
    with pytest.raises(ConfigError) as caught:
        configure(model, policy, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_an_engine_with_a_policy_asks_for_custom(model):
    config, stock = configure(model), configure(model, None)
    assert config.device_config.device_type == stock.device_config.device_type == "cuda"
    assert config.attention_config.backend is AttentionBackendEnum.CUSTOM and stock.attention_config.backend is None
    assert pickle.loads(pickle.dumps(config.attention_config)).backend is AttentionBackendEnum.CUSTOM


def test_vllm_chooses_it_by_its_own_path(model):
    """Each of two engines in a process gets its own backend, and a stock engine gets vLLM's."""
    first, second = configure(model), configure(model, STREAMING | {"budget": 96})
    assert [chosen(c).policy.retention.budget for c in (first, second, first)] == [64, 96, 64]
    backend = chosen(first)
    assert backend.get_name() in AttentionBackendEnum.__members__ and backend.block_slots == SLOTS
    for dtype in (torch.float16, torch.bfloat16):
        assert chosen(first, dtype=dtype).get_name() == "CUSTOM"
    try:
        assert chosen(configure(model, None), dtype=torch.bfloat16).__module__.startswith("vllm.")
    except ValueError as error:
        assert "No valid attention backend found" in str(error)  # this build has none of vLLM's


@pytest.mark.parametrize(
    "named, options",
    [
        ("head sizes are 32, 64, 80, 96, 128, 256", {"size": 48}),
        ("--dtype is float16, bfloat16 or float32", {"dtype": torch.float64}),
        ("leave --kv-policy out", {"use_mla": True}),
        ("leave --kv-policy out", {"attn_type": "encoder_only"}),
    ],
)
def test_what_a_layer_cannot_have(model, named, options):
    with pytest.raises(ValueError, match="CUSTOM is not valid") as caught:
        chosen(configure(model), **options)
    assert named in str(caught.value) and "\n" not in str(caught.value)


def test_sliding_windows_that_a_request_can_exceed(model):
    config = configure(model)
    longest = config.model_config.max_model_len
    with only_rank(config):
        impl = chosen(config, has_sliding_window=True).get_impl_cls()
        sizes = HEADS * GROUP, SIZE, SIZE**-0.5, HEADS
        impl(*sizes, sliding_window=longest)
        with pytest.raises(ConfigError, match="sliding-window layers of its own: leave --kv-policy out"):
            impl(*sizes, sliding_window=longest - 1)


def test_layers_that_a_policy_does_not_act_on(model, tmp_path):
    """Only full attention asks for CUSTOM; windows and chunks get what a stock engine chooses."""
    from vllm.model_executor.layers.attention import chunked_local_attention

    def folder(name, **changes):
        shutil.copytree(model, tmp_path / name)
        path = tmp_path / name / "config.json"
        kinds = {"layer_types": [changes.pop("kind"), "full_attention"]}
        path.write_text(json.dumps(json.loads(path.read_text()) | kinds | changes))
        return tmp_path / name

    windows = folder("windows", kind="sliding_attention", sliding_window=48)
    config, stock = configure(windows), configure(windows, None)
    assert config.attention_config.backend is stock.attention_config.backend is None
    assert config.attention_config.backend_per_kind == {"full_attention": AttentionBackendEnum.CUSTOM}
    assert chosen(config, dtype=torch.bfloat16).get_name() == "CUSTOM"
    options = {"dtype": torch.bfloat16, "has_sliding_window": True}
    assert chosen(config, **options) is chosen(stock, **options)
    config = configure(folder("chunks", kind="chunked_attention", attention_chunk_size=64))
    with only_rank(config):
        theirs = chunked_local_attention.get_attn_backend(SIZE, torch.bfloat16, "auto")
    assert theirs is chosen(stock, dtype=torch.bfloat16) and chosen(config, dtype=torch.bfloat16).get_name() == "CUSTOM"


@pytest.mark.parametrize("kind", ["gpt_oss", "granite_swa"])
def test_models_with_attention_sinks(tmp_path, kind):
    """Layers with full attention and sinks ask for CUSTOM; those with windows get what a stock engine chooses."""
    folder = write_mixed_model(tmp_path, kind)
    config, stock = configure(folder), configure(folder, None)
    assert config.attention_config.backend_per_kind == {"full_attention": AttentionBackendEnum.CUSTOM}
    assert engine_policy(config).model.layers == ((1, 3) if kind == "gpt_oss" else (0, 3))
    options = {"dtype": torch.bfloat16, "has_sink": True}
    assert chosen(config, **options).get_name() == "CUSTOM"
    options["has_sliding_window"] = True
    assert chosen(config, **options) is chosen(stock, **options)
    config, options["has_sliding_window"] = configure(folder, {"policy": "snapkv", "budget": 64}), False
    assert chosen(config, **options).get_name() == "CUSTOM"


def groups_of_layers(config, spec_of) -> list[tuple[str, int]]:
    """Return kind and number of layers of the groups that vLLM forms of a model's layers, whose blocks it zeroes first.

    Args:
        config: the engine's config.
        spec_of: cache spec of a layer, by kind of the layer; layers of other kinds have no cache.
    """
    kinds = engine_policy(config).model.kinds
    layers = {f"layers.{i}.attn": spec_of[kind] for i, kind in enumerate(kinds) if kind in spec_of}
    (specs,) = with_block_sizes([layers], config)
    config.cache_config.kv_cache_layout = "LBHNC"  # the engine core sets it later
    groups = get_kv_cache_groups(config, specs)
    assert len({group.kv_cache_spec.page_size_bytes for group in groups}) == 1
    cache = KVCacheConfig(num_blocks=9, kv_cache_tensors=[], kv_cache_groups=groups)
    assert cache.needs_kv_cache_zeroing, "windows would read scores and positions as keys"
    placed = {name: type(group.kv_cache_spec) for group in groups for name in group.layer_names}
    assert placed == {name: type(spec) for name, spec in layers.items()}
    return [(type(group.kv_cache_spec).__name__, len(group.layer_names)) for group in groups]


def test_groups_of_gpt_oss(tmp_path):
    """Windows and full attention form a group each, of 12 layers, whose pages have equal bytes, by the published shape."""
    shutil.copy(ROOT / "docs/configs/gpt-oss-20b/config.json", tmp_path)
    config = configure(tmp_path, max_model_len=4096, block_size=None)
    model, sizes = engine_policy(config).model, {"num_kv_heads": 8, "head_size": 64, "dtype": torch.bfloat16}
    assert (model.layers, model.num_kv_heads, model.head_dim) == (tuple(range(1, 24, 2)), 8, 64)
    backend = chosen(config, size=64, dtype=torch.bfloat16, has_sink=True)
    assert backend.get_name() == "CUSTOM"
    with only_rank(config):
        ours = backend.customize_spec(FullAttentionSpec(block_size=16, **sizes))
    windows = SlidingWindowSpec(block_size=16, sliding_window=128, **sizes)
    groups = groups_of_layers(config, {SLIDING: windows, FULL: ours})
    assert sorted(groups) == [("FixedBudgetSpec", 12), ("SlidingWindowSpec", 12)]
    (specs,) = with_block_sizes([{"layers.0.attn": windows, "layers.1.attn": ours}], config)
    page, largest = sorted(spec.page_size_bytes for spec in specs.values())
    assert page > (1 - MOST_PADDING) * largest == (1 - MOST_PADDING) * specs["layers.1.attn"].page_size_bytes
    message = refusal(tmp_path, STREAMING, max_model_len=4096, disable_hybrid_kv_cache_manager=True)
    assert "leave --disable-hybrid-kv-cache-manager out" in message


@pytest.mark.parametrize("newer", [False, True])
def test_gemma_4(tmp_path, monkeypatch, newer):
    """Heads of 512 ask for CUSTOM; windows have the backend that the model's config chooses, or the user, but CUSTOM."""
    monkeypatch.setattr("vllm.v1.attention.backends.fa_utils.is_fa_version_supported", lambda version: newer)
    published = CONFIGS["gemma-4-31b"] | {"dtype": "bfloat16", "max_position_embeddings": 8192}
    (tmp_path / "config.json").write_text(json.dumps(published))
    options = {"max_model_len": 4096, "block_size": None}
    config, stock = configure(tmp_path, **options), configure(tmp_path, None, **options)
    attention, model = config.attention_config, engine_policy(config).model
    theirs = None if newer else AttentionBackendEnum.TRITON_ATTN
    assert attention.backend is stock.attention_config.backend is theirs
    assert attention.flash_attn_version == stock.attention_config.flash_attn_version == (4 if newer else None)
    assert attention.backend_per_kind == {"full_attention": AttentionBackendEnum.CUSTOM}
    assert (len(model.layers), model.num_kv_heads, model.head_dim) == (10, 4, 512)
    backend, window = chosen(config, size=512, dtype=torch.bfloat16), {"size": 256, "has_sliding_window": True}
    assert backend.get_name() == "CUSTOM"
    assert chosen(config, dtype=torch.bfloat16, **window) is chosen(stock, dtype=torch.bfloat16, **window)
    sizes = {"block_size": 16, "dtype": torch.bfloat16}
    with only_rank(config):
        ours = backend.customize_spec(FullAttentionSpec(num_kv_heads=4, head_size=512, **sizes))
    windows = SlidingWindowSpec(num_kv_heads=16, head_size=256, sliding_window=1024, **sizes)
    (specs,) = with_block_sizes([{"layers.0.attn": windows, "layers.5.attn": ours}], config)
    assert {name: spec.block_size for name, spec in specs.items()} == {"layers.0.attn": 16, "layers.5.attn": 32}
    assert (
        0 <= specs["layers.5.attn"].page_size_bytes - windows.page_size_bytes < MOST_PADDING * windows.page_size_bytes
    )
    groups = groups_of_layers(config, {SLIDING: windows, FULL: ours})
    assert sorted(groups) == [("FixedBudgetSpec", 10)] + [("SlidingWindowSpec", 10)] * 5
    config = configure(tmp_path, attention_backend="FLEX_ATTENTION", **options)
    assert chosen(config, dtype=torch.bfloat16, **window).get_name() == "FLEX_ATTENTION"
    assert chosen(config, size=512, dtype=torch.bfloat16).get_name() == "CUSTOM"
    message = refusal(tmp_path, STREAMING, attention_backend="CUSTOM", **options)
    assert "the attention backend CUSTOM: leave --attention-backend out" in message
    (tmp_path / "config.json").write_text(json.dumps(published | {"num_kv_shared_layers": 20}))
    assert "cross-layer KV sharing" in refusal(tmp_path, STREAMING, **options)


@pytest.mark.parametrize(
    "name, layers, state_groups, slots",
    [("nemotron-h-8b", 4, 6, 1024), ("qwen3-next-80b", 12, 3, 544), ("qwen3.5-35b", 10, 3, 1040)],
)
@pytest.mark.parametrize("hits", [False, True])
def test_models_with_recurrent_layers(tmp_path, name, layers, state_groups, slots, hits):
    """VLLM chooses a block by the bytes of one slot, and a policy's page is the least of vLLM's that holds a state."""
    architectures = {"architectures": ["Qwen3_5MoeForCausalLM"]} if name == "qwen3.5-35b" else {}
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[name] | {"dtype": "bfloat16"} | architectures))
    with without_images():  # vLLM's module of Qwen3.5 has its models with images too
        config = configure(tmp_path, STREAMING | {"protect_prompt": "all" if hits else 0}, block_size=None)
        cls, _ = ModelRegistry.resolve_model_cls(config.model_config.architecture, model_config=config.model_config)
    attention, cache, model = config.attention_config, config.cache_config, config.model_config
    assert attention.backend_per_kind == {"full_attention": AttentionBackendEnum.CUSTOM} and attention.backend is None
    assert len(engine_policy(config).model.layers) == layers
    assert (cache.enable_prefix_caching, cache.mamba_cache_mode) == (hits, "align" if hits else "none")
    size, heads = model.get_head_size(), model.get_num_kv_heads(config.parallel_config)
    backend = chosen(config, size=size, dtype=torch.bfloat16)
    assert backend.get_name() == "CUSTOM"
    shapes, dtypes = cls.get_mamba_state_shape_from_config(config), cls.get_mamba_state_dtype_from_config(config)
    plain = FullAttentionSpec(block_size=16, num_kv_heads=heads, head_size=size, dtype=torch.bfloat16)
    with only_rank(config):
        ours, slot = (backend.customize_spec(replace(plain, block_size=tokens)) for tokens in (16, 1))
        assert slot.page_size_bytes == heads * (2 * 2 * size + 8)
        with mock.patch.object(type(current_platform), "_find_non_ssm_backends", lambda *args: [backend]):
            current_platform._align_hybrid_block_size(config, backend)
    assert cache.block_size == slots and (not hits or cache.mamba_block_size == slots)
    state = MambaSpec(
        shapes=shapes, dtypes=dtypes, block_size=cache.mamba_block_size, mamba_cache_mode=cache.mamba_cache_mode,
        page_size_padded=cache.mamba_page_size_padded,
    )  # fmt: skip
    (specs,) = with_block_sizes([{"layers.0.attn": ours, "layers.1.mixer": state}], config)
    assert specs["layers.0.attn"].block_size == slots
    assert {spec.page_size_bytes for spec in specs.values()} == {slots * slot.page_size_bytes}
    groups = groups_of_layers(config, {RECURRENT: state, FULL: ours})
    assert sorted(groups) == [("FixedBudgetSpec", layers)] + [("MambaSpec", layers)] * state_groups
    with without_images():
        message = refusal(tmp_path, STREAMING | {"cartridge": ["name=folder"]}, block_size=None)
    assert "cannot be combined with a cartridge, which holds a text in every layer" in message


def test_older_gpus_than_kernels_are_for(model, monkeypatch):
    turing = classmethod(lambda cls, device_id=0: DeviceCapability(7, 5))
    monkeypatch.setattr(type(current_platform), "get_device_capability", turing)
    with pytest.raises(ValueError, match="compute capability 8.0"):
        chosen(configure(model))


def test_layouts_and_block_sizes(model):
    from vllm.v1.attention.backends.utils import get_supported_kv_cache_layouts
    from vllm.v1.worker.utils import select_common_block_size

    backend = chosen(configure(model))
    assert [layout.name for layout in get_supported_kv_cache_layouts([backend])] == ["LBHNC"]
    group = group_of(configure(model))
    assert select_common_block_size(SLOTS, [backend], [group.kv_cache_spec]) == SLOTS
    assert group.kv_cache_spec.uses_slot_mapping, "rows of padding are told by it"


def test_custom_without_a_policy(model, monkeypatch):
    """CUSTOM without a policy is refused, unless another plugin had registered its own backend before."""
    stock = configure(model, None, attention_backend="CUSTOM")
    with pytest.raises(AttributeError, match="for engines with --kv-policy"):
        chosen(stock)
    theirs = "vllm.v1.attention.backends.flex_attention.FlexAttentionBackend"
    monkeypatch.setattr(backend_choice, "custom_before", theirs)
    assert chosen(stock).__name__ == "FlexAttentionBackend"


def test_registering_keeps_what_was_there(monkeypatch):
    monkeypatch.setattr(backend_choice, "custom_before", None)
    try:
        register_backend(AttentionBackendEnum.CUSTOM, "other.Backend")
        plugin.register()
        plugin.register()
        assert (backend_choice.custom_before, AttentionBackendEnum.CUSTOM.get_path()) == ("other.Backend", cuda.BACKEND)
    finally:
        register_backend(AttentionBackendEnum.CUSTOM, cuda.BACKEND)


def test_a_plugin_that_takes_custom_afterwards(model):
    load_general_plugins()  # ours comes first, also where no test has run before
    try:
        register_backend(AttentionBackendEnum.CUSTOM, "other.Backend")
        assert "(other.Backend): set VLLM_PLUGINS=kvpop" in refusal(model, STREAMING)
    finally:
        register_backend(AttentionBackendEnum.CUSTOM, cuda.BACKEND)


def test_another_backend(model):
    assert "leave --attention-backend out" in refusal(model, STREAMING, attention_backend="FLASH_ATTN")


@pytest.mark.parametrize("backend", [None, "FLEX_ATTENTION"])
def test_a_config_that_no_arguments_have_made(model, backend):
    """A config not made by engine arguments is refused when a layer would get a backend of vLLM's.

    The platform, or whoever made the config, chooses that backend.
    """
    config = configure(model, None, attention_backend=backend)
    assert chosen(config, dtype=torch.bfloat16).__module__.startswith("vllm.")
    config.additional_config = {"kv_policy": STREAMING}
    with pytest.raises(ConfigError, match="^--kv-policy streaming-llm.*by create_engine_config") as caught:
        chosen(config, dtype=torch.bfloat16)
    assert "\n" not in str(caught.value)


def test_without_triton(model, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "triton" else find(name, *a))
    assert "install the package triton" in refusal(model, STREAMING)


@pytest.mark.parametrize("op", ["decode_step", "prefill_chunk"])
def test_without_kernels(model, monkeypatch, op):
    monkeypatch.setitem(dispatch.TRITON_LARGEST_HEAD, op, 16)
    assert f"({op} of bfloat16 heads of 32): serve on a CPU" in refusal(model, STREAMING)
    monkeypatch.delitem(dispatch.TRITON_LARGEST_HEAD, op)
    monkeypatch.delitem(dispatch.TRITON_DTYPES, op)
    assert op in refusal(model, STREAMING)


@pytest.mark.parametrize("policy", policies.known())
def test_every_policy(model, tmp_path, policy):
    """Every policy gets the backend, with full graphs of decode steps."""
    settings = {"policy": policy, "budget": 200}
    if policies.get(policy).calibrated:
        settings["calibration"] = str(random_statistics_folder(tmp_path, ModelShape.of(model, 256)))
    if (kind := policies.get(policy).scorer_kind) is not None:
        scorer = write_random_scorer(tmp_path / "scorer", model, kind, sinks=2, window=6, topk=32)
        settings = {"policy": policy, "scorer": str(scorer)}
    if policy == "full":
        del settings["budget"]
    config = configure(model, settings)
    assert chosen(config).get_name() == "CUSTOM" and resolved(config).name == "FULL_AND_PIECEWISE"


def test_requests_have_one_budget_where_heads_are_unequal(model):
    """Tables of pages are gathered on the device, from a map for the server's budget."""
    for allocator in ("pyramid", "uniform"):
        policy = engine_policy(configure(model, {"policy": "h2o", "budget": 64, "allocator": allocator}))
        assert policy.one_budget == (allocator == "pyramid")
    message = refusal(model, {"policy": "h2o", "budget": 64, "allocator": "pyramid", "max_budget": 80})
    assert "gives all requests one budget here: leave --kv-max-budget out" in message


def test_batch_invariance(model, monkeypatch):
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    assert "unset VLLM_BATCH_INVARIANT" in refusal(model, STREAMING)


@pytest.mark.parametrize("rocm", [True, False])
def test_others_than_nvidias(model, monkeypatch, rocm):
    """AMD GPUs and platforms of other plugins are refused, although they call themselves cuda too."""
    kind = type(current_platform)
    monkeypatch.setattr(kind, "is_cuda", lambda self: False)
    monkeypatch.setattr(kind, "is_rocm", lambda self: rocm)
    assert f"the {'rocm' if rocm else kind.__name__} platform yet" in refusal(model, STREAMING)


@pytest.mark.parametrize("policy", ["h2o", "momentkv", "dms", "corrected", "trimkv", "streaming-llm"])
def test_tokens_of_a_step(model, tmp_path, policy, monkeypatch):
    """Steps are bounded, and the server warns, where a token takes long; here 15 ms in each of two layers."""
    lines = []
    monkeypatch.setattr(cuda.logger, "warning", lambda text, *values: lines.append(text % values))
    settings = {"policy": policy, "budget": 128}
    if policy == "corrected":
        settings |= {"policy": "streaming-llm", "correction": "moment"}
    if policy in ("dms", "trimkv"):
        scorer = write_random_scorer(tmp_path / "gate", model, policy, sinks=2, window=6, topk=120)
        settings["scorer"] = str(scorer)
    one_by_one = policy not in ("trimkv", "streaming-llm")
    sizes = {"max_num_batched_tokens": 4096, "max_num_seqs": 8}

    def steps(**options):
        return configure(model, settings, **(sizes | options)).scheduler_config.max_num_scheduled_tokens

    assert steps() is None and not lines, "30 us are few"
    monkeypatch.setattr(cuda, "PHASE_SECONDS", 15e-3)
    assert steps() == (66 if one_by_one else None)
    slow = "prompts are prefilled token by token, by reckoning at 33 tokens a second"
    assert len(lines) == one_by_one and all(slow in line for line in lines)
    if policy == "h2o":
        assert steps(max_num_seqs=2000) == 2000 and steps(max_num_batched_tokens=64) is None
        assert steps(max_num_scheduled_tokens=3000) == 3000
        assert steps(enable_chunked_prefill=False) is None, "prompts could not be cut"
        assert steps(disable_chunked_mm_input=True) is None, "nor could an image, which may be longer"


@pytest.mark.parametrize("policy, budget, expected", [("h2o", 1024, 16.3e-6), ("momentkv", 1024, 19.5e-6)])
def test_time_of_a_token(model, policy, budget, expected):
    """It follows from budget and head size, here 32 numbers of 2 bytes."""
    config = configure(model, {"policy": policy, "budget": budget})
    chosen = engine_policy(config)
    assert cuda._token_seconds(chosen, config.model_config) == pytest.approx(expected, rel=0.01)


def support(config):
    backend = chosen(config)
    return backend.get_builder_cls().get_cudagraph_support(config, None), backend.__name__


def resolved(config, v2=False):
    """Return the graph mode as either runner resolves it."""
    return config.compilation_config.resolve_cudagraph_mode_and_sizes(*support(config), 1, use_v2_model_runner=v2)


def test_equally_long_requests_are_what_is_declared(model):
    """Graphs of several tokens per request are declared; only speculative decoding uses them."""
    from vllm.v1.worker.gpu.attn_utils import get_attn_cg_support

    config = configure(model)
    of_v2 = get_attn_cg_support([[group_of(config)]], config)
    assert support(config)[0] is of_v2.min_cg_support
    assert of_v2.min_cg_support.name == "UNIFORM_BATCH"


@pytest.mark.parametrize("v2", [False, True])
@pytest.mark.parametrize(
    "option, becomes",
    [
        (None, "FULL_AND_PIECEWISE"),
        ("FULL", "FULL_AND_PIECEWISE"),
        ("FULL_DECODE_ONLY", "FULL_DECODE_ONLY"),
        ("PIECEWISE", "PIECEWISE"),
    ],
)
def test_full_graphs_hold_no_mixed_batch(model, option, becomes, v2):
    config = configure(model, **({"compilation_config": {"cudagraph_mode": option}} if option else {}))
    mode = resolved(config, v2)
    assert mode.name == becomes and mode.mixed_mode() is not CUDAGraphMode.FULL


def test_graphs_are_captured_for_all_requests_that_run_together(model):
    """Sizes end where vLLM's do, or at max-num-seqs; sizes that were chosen stay."""

    def sizes(policy=STREAMING, **options):
        compilation = configure(model, policy, max_num_batched_tokens=4096, **options).compilation_config
        assert compilation.max_cudagraph_capture_size == (compilation.cudagraph_capture_sizes or [0])[-1]
        return compilation.cudagraph_capture_sizes

    stock = sizes(None, max_num_seqs=1000)
    assert max(stock) == 512
    ours = sizes(max_num_seqs=1000)
    assert ours[: len(stock)] == stock and ours[len(stock) :] == [*range(544, 1000, 32), 1000]
    assert sizes(max_num_seqs=300) == sizes(None, max_num_seqs=300)
    assert sizes(max_num_seqs=1000, enforce_eager=True) == []
    for chosen_sizes in ({"cudagraph_capture_sizes": [1, 8]}, {"max_cudagraph_capture_size": 64}):
        stock = sizes(None, max_num_seqs=1000, **chosen_sizes)
        assert sizes(max_num_seqs=1000, **chosen_sizes) == stock
        assert sizes(max_num_seqs=1000, compilation_config=chosen_sizes) == stock


def test_breakable_graphs_end_where_vllms_attention_ends_them():
    """Our op and vLLM's have the same decorator, which reads the environment when it is applied."""
    from vllm.model_executor.layers.attention import attention

    for module, op in (
        (attention, "unified_attention_with_output"),
        (gated_attention, "attention_with_gate_scores"),
    ):
        assert re.search(rf"@eager_break_during_capture\n(@\w+\n)*def {op}\(", inspect.getsource(module))


def test_gates_end_a_piece_of_the_compiled_graph(model, gate):
    """The op that passes gate scores to attention is outside of piecewise CUDA graphs."""
    from vllm.compilation.partition_rules import should_split

    assert gated_attention.LIBRARY.ns == "kvpop_vllm"
    op = torch.ops.kvpop_vllm.attention_with_gate_scores.default
    node = SimpleNamespace(op="call_function", target=op)
    gated = configure(model, {"policy": "trimkv", "scorer": gate}).compilation_config
    assert should_split(node, gated.splitting_ops) and gated.splitting_ops_contain_attention()
    for config in (configure(model), configure(model, None)):
        assert not should_split(node, config.compilation_config.splitting_ops)
