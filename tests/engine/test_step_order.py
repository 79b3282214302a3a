"""A step that an engine repeats or goes back to raises and leaves the cache unchanged."""

from __future__ import annotations

import pytest
import torch
from engine.driving import Job, serving

from kvpop_vllm.kernels.ops import StepOrderError
from kvpop_vllm.vllm_glue.backend import FixedBudgetImpl


@pytest.mark.parametrize("policy", ["kvpop", "streaming-llm"])
def test_a_layer_called_again_with_what_it_has_seen(case, policy):
    """After each layer call, the same call again and a call from two steps before both raise."""
    refused, earlier = {"replayed": 0, "rewound": 0}, {}
    with serving(case("qwen3", policy), num_gpu_blocks_override=20) as engine, pytest.MonkeyPatch.context() as patch:
        forward = FixedBudgetImpl.forward

        def twice(impl, layer, query, key, value, kv_cache, metadata, output, **scales):
            result = forward(impl, layer, query, key, value, kv_cache, metadata, output, **scales)
            call = [t.clone() for t in (query, key, value)], metadata
            earlier[impl] = calls = [*earlier.get(impl, []), call][-3:]
            if _starts(metadata) == [0]:  # may be repeated: preempted requests start over so
                return result
            before = kv_cache.view(torch.uint8).clone()
            for name, (inputs, old) in (("replayed", calls[-1]), ("rewound", calls[0])):
                if _starts(old) != [0]:
                    with pytest.raises(StepOrderError):
                        forward(impl, layer, *inputs, kv_cache, old, torch.empty_like(inputs[0]))
                    refused[name] += 1
            assert torch.equal(kv_cache.view(torch.uint8), before)
            return result

        patch.setattr(FixedBudgetImpl, "forward", twice)
        for job, threshold in ((Job(100, new=20), 32), (Job(1, new=70), None)):
            earlier.clear()
            engine.recorder.scheduler.max_num_scheduled_tokens = threshold or 8192  # also cuts a lone prompt
            engine.verdict(engine.serve([job]))
    assert refused == {"replayed": 2 * (3 + 19 + 69), "rewound": 2 * (1 + 19 + 67)}


def _starts(metadata) -> list[int]:
    """Return the position at which each request of a batch continues."""
    batch = metadata.batch(0, None)
    return batch.positions.tolist() + [chunk.start for chunk in batch.prefills]
