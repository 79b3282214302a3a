"""How many requests vLLM says a pool is enough for, and whether our accounting of bytes agrees with that pool."""

from __future__ import annotations

import pytest
import torch
from engine.driving import Job, watched

from kvpop_vllm.cache.accounting import dense_request_bytes, request_bytes
from kvpop_vllm.kernels.pages import PageLayout
from kvpop_vllm.testing import write_random_scorer, write_tiny_model

HEADS, HEAD_DIM, LAYERS, LENGTH, BUDGET = 2, 64, 2, 4096, 1024
MLSTM_FLOATS = 64 * 64 + 64 + 1


def test_reported_concurrency_and_bytes(tmp_path):
    """vLLM's own figure for 4,096 tokens, in pools of the same size."""
    model = write_tiny_model(tmp_path / "model", "llama", layers=LAYERS, kv_heads=HEADS, head_dim=HEAD_DIM)
    shape = {"sinks": 4, "window": 128, "topk": BUDGET - 4 - 128}
    scorer = write_random_scorer(tmp_path / "scorer", model, "mlstm", **shape)
    streaming, learned = {"policy": "streaming-llm", "budget": BUDGET}, {"policy": "kvpop", "scorer": str(scorer)}
    sizes = {"max_model_len": LENGTH, "kv_cache_memory_bytes": 64 << 20, "dtype": "bfloat16", "block_size": 64}
    reported = {}
    for name, policy, floats in (("dense", None, 0), ("streaming", streaming, 0), ("mlstm", learned, MLSTM_FLOATS)):
        with watched(model, policy, **sizes) as engine:
            counted = dense_request_bytes(LAYERS, HEADS, HEAD_DIM, torch.bfloat16, LENGTH)
            if policy is not None:
                layout = PageLayout(HEADS, HEAD_DIM, torch.bfloat16, state_floats=floats)
                counted = request_bytes(layout, LAYERS, LENGTH, BUDGET)
            reported[name] = check_pool(engine, counted)
            print(f"{name}: {counted.allocated} bytes allocated, {counted.canonical} canonical, {reported[name]:.1f}x")
    assert reported["streaming"] / reported["dense"] >= 3.7
    assert reported["mlstm"] / reported["dense"] >= 3.4


def check_pool(engine, counted) -> float:
    """vLLM's reported concurrency, after checking that the pool agrees with our accounting; bytes of all layers."""
    config, pool = engine.engine.vllm_config, engine.recorder.pool
    engine.serve([Job(LENGTH - 8, new=2, scored=False)])
    most = max(len(blocks) for step in engine.recorder.blocks for _, blocks in step.running.values())
    total = sum(cache.nbytes for cache in engine.recorder.runner.kv_caches)
    assert most == counted.blocks
    assert most * total == counted.allocated * pool.num_gpu_blocks
    assert config.cache_config.kv_cache_max_concurrency == pytest.approx(total / counted.allocated)
    return config.cache_config.kv_cache_max_concurrency
