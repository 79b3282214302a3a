"""Parts of an engine on a pretended GPU: configs, layers, a metadata builder, and the engine core's cache config."""

from contextlib import contextmanager
from types import SimpleNamespace
from unittest import mock

import torch
from engine import tiny_engine
from vllm.config import set_current_vllm_config
from vllm.utils.torch_utils import set_default_torch_dtype
from vllm.v1.attention.selector import get_attn_backend
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.worker.utils import AttentionGroup

from kvpop_vllm.vllm_glue.run import backend as glue

HEADS, GROUP, SIZE, SLOTS, LENGTH, MOST = 2, 2, 32, 16, 512, 4
STREAMING = {"policy": "streaming-llm", "budget": 64, "sinks": 2, "window": 16}


def configure(model, policy=STREAMING, **options):
    """Return the config of an engine as ``vllm serve`` makes it."""
    sizes = {"max_model_len": LENGTH, "max_num_seqs": MOST, "block_size": SLOTS}
    return tiny_engine.configure(model, policy, **(sizes | options))


@contextmanager
def only_rank(config):
    """Act as the only tensor-parallel rank of an engine."""
    rank_functions = {"get_tensor_model_parallel_rank": lambda: 0, "get_tensor_model_parallel_world_size": lambda: 1}
    with set_current_vllm_config(config), mock.patch.multiple(glue, **rank_functions):
        yield


def chosen(config, size=SIZE, dtype=torch.float32, **options):
    """Return the backend that vLLM chooses for a layer."""
    with set_current_vllm_config(config):
        return get_attn_backend(size, dtype, None, **options)


def group_of(config, heads=HEADS, device="cpu") -> AttentionGroup:
    """Return the layers' attention group with its metadata builder, as a runner makes it."""
    with only_rank(config):
        backend = chosen(config)
        plain = FullAttentionSpec(block_size=SLOTS, num_kv_heads=heads, head_size=SIZE, dtype=torch.float32)
        group = AttentionGroup(backend, ["model.layers.0.self_attn.attn"], backend.customize_spec(plain), 0)
        group.create_metadata_builders(config, torch.device(device), group.kv_cache_spec.block_size)
    return group


def attention_of(config, layer: int, heads=HEADS, cache=None, dtype=torch.float32, **options):
    """Return the attention of a layer on the config's device; ``options`` are those of its constructor."""
    with only_rank(config), torch.device(config.device_config.device_type):
        impl = chosen(config).get_impl_cls()(heads * GROUP, SIZE, SIZE**-0.5, heads, **options)
        impl.gates = torch.nn.ModuleList()
    context = config.compilation_config.static_forward_context
    context[f"model.layers.{layer}.self_attn.attn"] = SimpleNamespace(impl=impl, kv_cache=cache)
    load_weights(impl, dtype)
    return impl


def load_weights(impl, dtype=torch.float32) -> None:
    """Build the rule of a layer as vLLM does after its loader."""
    with only_rank(impl.vllm_config), set_default_torch_dtype(dtype):
        impl.process_weights_after_loading(dtype)


def cache_of(group, blocks=100) -> KVCacheConfig:
    """Return the cache config of one group, as the engine core sees it."""
    spec = KVCacheGroupSpec(group.layer_names, group.kv_cache_spec)
    return KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=[spec])
