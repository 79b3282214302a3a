"""``generate()`` on the GPU kernels, interpreted on the CPU.

tests/kernels/test_triton_interpreted runs this module in the process that it starts.
"""

import os

import pytest
from hf.prompts import distinct, generate

from kvpop_vllm.hf import KVpopCache
from kvpop_vllm.kernels import dispatch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


class TestGenerate:
    __test__ = INTERPRETED

    @pytest.mark.parametrize(
        "kind, policy, settings, lengths",
        [("qwen3", "kvpop", {}, (70, 41)), ("llama", "h2o", {"budget": 5, "window": 2}, (7,))],
    )
    def test_equals_the_cpus_kernels(self, case, monkeypatch, kind, policy, settings, lengths):
        """Interpreted Triton kernels generate the tokens of the CPU's kernels.

        Padded rows outgrow their budgets and have a second turn. One prompt is worked off token by token.
        """
        model, served = case(kind, policy)
        prompts, ops = [distinct(length) for length in lengths], []

        def choose(op, tensor):
            ops.append(op)
            return "triton"

        def texts():
            cache = KVpopCache(model, **served.settings | settings)
            turns = [generate(model, cache, prompts, new=2)]
            if len(prompts) > 1:
                longer = [prompt + answer + [1] for prompt, answer in zip(prompts, turns[0], strict=True)]
                turns.append(generate(model, cache, longer, new=1))
            return turns, [cache.held(row).tolist() for row in range(len(prompts))]

        expected = texts()
        monkeypatch.setattr(dispatch, "select", choose)
        assert texts() == expected and set(ops) == {"prefill_chunk", "decode_step"}
