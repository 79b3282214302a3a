"""``generate()`` on the kernels that a GPU runs, interpreted on the CPU. Run in the
process that tests/kernels/test_triton_interpreted starts."""

from __future__ import annotations

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
        """Rows that outgrow their budgets, padded, and their second turn; a prompt whose tokens are done one by one."""
        model, found = case(kind, policy)
        prompts, told = [distinct(length) for length in lengths], []

        def choose(op, tensor):
            told.append(op)
            return "triton"

        def texts():
            cache = KVpopCache(model, **found.settings | settings)
            turns = [generate(model, cache, prompts, new=2)]
            if len(prompts) > 1:
                longer = [prompt + more + [1] for prompt, more in zip(prompts, turns[0], strict=True)]
                turns.append(generate(model, cache, longer, new=1))
            return turns, [cache.held(row).tolist() for row in range(len(prompts))]

        expected = texts()
        monkeypatch.setattr(dispatch, "select", choose)
        assert texts() == expected and set(told) == {"prefill_chunk", "decode_step"}
