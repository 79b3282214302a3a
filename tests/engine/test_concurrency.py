"""vLLM's reported concurrency of a pool agrees with the accounting of bytes."""

import functools

import pytest
import torch
from engine.driving import Job, watched

from kvpop_vllm.cache.accounting import dense_request_bytes, pool_bytes, request_bytes
from kvpop_vllm.cache.pages import BLOCK_SLOTS, PageLayout
from kvpop_vllm.roles import Retention
from kvpop_vllm.testing import write_random_scorer, write_tiny_model
from kvpop_vllm.vllm_glue.start.engine_policy import engine_policy

HEADS, HEAD_DIM, LAYERS, LENGTH, BUDGET = 2, 64, 2, 4096, 1024


def test_reported_concurrency_and_bytes(tmp_path):
    """Reported concurrency and bytes agree for 4,096 tokens, in equal pools with default block sizes."""
    model = write_tiny_model(tmp_path / "model", "llama", layers=LAYERS, kv_heads=HEADS, head_dim=HEAD_DIM)
    shape = {"sinks": 4, "window": 128, "topk": BUDGET - 4 - 128}
    scorer = write_random_scorer(tmp_path / "scorer", model, "mlstm", **shape)
    streaming, learned = {"policy": "streaming-llm", "budget": BUDGET}, {"policy": "kvpop", "scorer": str(scorer)}
    sizes = {"max_model_len": LENGTH, "kv_cache_memory_bytes": 64 << 20, "dtype": "bfloat16", "block_size": None}
    reported = {}
    for name, policy in (("dense", None), ("streaming", streaming), ("mlstm", learned)):
        with watched(model, policy, **sizes) as engine:
            reported[name] = check_pool(name, engine, counter(engine, policy))
    assert reported["streaming"] / reported["dense"] >= 3.7
    assert reported["mlstm"] / reported["dense"] >= 3.4


def counter(engine, policy: dict | None):
    """Return a function from a length to the ``CacheBytes`` of this engine's cache."""
    config = engine.engine.vllm_config
    if policy is None:
        assert config.cache_config.block_size != BLOCK_SLOTS  # otherwise a wrong default would not be noticed
        slots = config.cache_config.block_size
        return lambda n: dense_request_bytes(LAYERS, HEADS, HEAD_DIM, torch.bfloat16, n, slots)
    layout = PageLayout(HEADS, HEAD_DIM, torch.bfloat16, state_floats=engine_policy(config).state_floats)
    return functools.partial(request_bytes, layout, LAYERS, retention=Retention(BUDGET, 4, 64))


def check_pool(name: str, engine, count) -> float:
    """Check the pool against our accounting over all layers, and return vLLM's reported concurrency."""
    config, blocks = engine.engine.vllm_config.cache_config, engine.recorder.pool.num_gpu_blocks
    total = sum(cache.nbytes for cache in engine.recorder.runner.kv_caches)
    for prompt in (LENGTH - 8, 639):  # plus one token: the second generated token never gets into the cache
        engine.serve([Job(prompt, new=2, scored=False)])
        peak = max(len(row) for step in engine.recorder.blocks for *_, row in step.running.values())
        request = count(prompt + 1)
        assert peak == request.blocks and peak * total == request.allocated * blocks
    pool = pool_bytes(count(LENGTH), blocks)
    assert pool.allocated == total
    assert pool.requests == pytest.approx(config.kv_cache_max_concurrency)
    print(
        f"{name}: a request {count(LENGTH).allocated} bytes allocated, {count(LENGTH).canonical} canonical; "
        f"the pool {pool.allocated} and {pool.canonical}, {config.kv_cache_max_concurrency:.1f} requests"
    )
    return config.kv_cache_max_concurrency
