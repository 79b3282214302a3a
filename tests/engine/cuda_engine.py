"""Parts of an engine on a pretended GPU: configs, a metadata builder, and the engine core's cache config."""

from __future__ import annotations

from contextlib import contextmanager
from unittest import mock

import torch
from vllm.config import set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.attention.selector import get_attn_backend
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.worker.utils import AttentionGroup

from kvpop_vllm.vllm_glue import backend as glue

HEADS, SIZE, SLOTS, LENGTH, MOST = 2, 32, 16, 512, 4
STREAMING = {"policy": "streaming-llm", "budget": 64, "sinks": 2, "window": 16}


def configure(model, policy=STREAMING, **options):
    """Return the config of an engine as ``vllm serve`` makes it."""
    additional = {} if policy is None else {"kv_policy": policy}
    sizes = {"max_model_len": LENGTH, "max_num_seqs": MOST, "block_size": SLOTS}
    args = EngineArgs(str(model), skip_tokenizer_init=True, additional_config=additional, **(sizes | options))
    return args.create_engine_config()


@contextmanager
def rank(config, index: int = 0, ranks: int = 1):
    """Act as one tensor-parallel rank of an engine."""
    there = {"get_tensor_model_parallel_rank": index, "get_tensor_model_parallel_world_size": ranks}
    with set_current_vllm_config(config), mock.patch.multiple(glue, **{k: lambda v=v: v for k, v in there.items()}):
        yield


def chosen(config, size=SIZE, dtype=torch.float32, **options):
    """Return the backend that vLLM chooses for a layer."""
    with set_current_vllm_config(config):
        return get_attn_backend(size, dtype, None, **options)


def group_of(config, heads=HEADS, device="cpu", index=0, ranks=1) -> AttentionGroup:
    """Return the layers' attention group with its metadata builder, as a runner makes it."""
    with rank(config, index, ranks):
        backend = chosen(config)
        plain = FullAttentionSpec(block_size=SLOTS, num_kv_heads=heads, head_size=SIZE, dtype=torch.float32)
        group = AttentionGroup(backend, ["model.layers.0.self_attn.attn"], backend.customize_spec(plain), 0)
        group.create_metadata_builders(config, torch.device(device), group.kv_cache_spec.block_size)
    return group


def cache_of(group, blocks=100) -> KVCacheConfig:
    """Return the cache config of one group, as the engine core sees it."""
    spec = KVCacheGroupSpec(group.layer_names, group.kv_cache_spec)
    return KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=[spec])
