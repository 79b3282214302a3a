"""An engine of this process with the GPU's metadata builder and the CPU's kernels, compared with the oracle.

The runner's own batches are used. Parts that only a GPU has are tested in test_cuda_contract.
"""

from __future__ import annotations

import pytest
from engine.driving import Job
from engine.matrix import BUDGET

from kvpop_vllm.vllm_glue.backend import FixedBudgetBackend
from kvpop_vllm.vllm_glue.cuda_backend import CudaMetadataBuilder

JOBS = [Job(1, new=24), Job(15, new=50), Job(BUDGET), Job(130)]
CASES = {
    "a state": ("qwen3", "kvpop", {}),
    "regions": ("llama", "streaming-llm", {"allocator": "pyramid"}),
    "scores one token late": ("llama", "dms", {"shifted": True}),
    "protected prompts, a state": ("qwen3", "kvpop", {"protect_prompt": True}),
    "twenty protected tokens": ("llama", "streaming-llm", {"protect_prompt": 20}),
    "regions behind protected prompts": ("llama", "streaming-llm", {"allocator": "pyramid", "protect_prompt": 40}),
}


@pytest.mark.parametrize("name", CASES)
def test_served_as_by_the_cpus_builder(case, watch, monkeypatch, name):
    """The GPU's builder serves chunks, decode rows and preempted requests in a small pool like the oracle.

    The last token of a prompt of 15 tokens is a decode row.
    """
    monkeypatch.setattr(FixedBudgetBackend, "get_builder_cls", staticmethod(lambda: CudaMetadataBuilder))
    kind, policy, options = CASES[name]
    room = (
        {"num_gpu_blocks_override": 40, "max_model_len": 256}
        if "protect_prompt" in options
        else {"num_gpu_blocks_override": 24}
    )
    with watch(case(kind, policy, **options), **room) as engine:
        (builder,) = engine.recorder.runner.attn_groups[0][0].metadata_builders
        assert type(builder) is CudaMetadataBuilder
        places = [x.data_ptr() for x in (builder.rows.table, builder.rows.positions)]
        engine.chunk(7)

        def preempt(step):
            if step == 9:
                engine.engine.reset_prefix_cache(reset_running_requests=True)

        verdict = engine.verdict(engine.serve(JOBS, preempt))
        assert verdict and places == [x.data_ptr() for x in (builder.rows.table, builder.rows.positions)]
        assert sum(engine.recorder.preemptions.values()) > 0
