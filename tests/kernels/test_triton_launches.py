"""Launches of a layer's prefill, with kernels that do nothing, in the process that test_triton_interpreted starts."""

import pytest
import torch
from kernels.factories import given_scores, poisoned_pages
from kernels.problems import Problem
from kernels.served import INTERPRETED

from kvpop_vllm.cache.chunks import Chunks
from kvpop_vllm.kernels import ops

TOKENS = {
    "a prompt of 400": [400],
    "one of 3,000": [3000],
    "one of 8,000": [8000],
    "two of 8,000": [8000] * 2,
    "eight of 500": [500] * 8,
}
BUDGET = 300, 4096
MOST = {
    ("none", 300): 4,
    ("none", 4096): 4,
    ("gate_scores", 300): 8,
    ("gate_scores-ages", 300): 7,
    ("mlp", 300): 8,
    ("mlstm", 300): 11,
}
"""Most launches of a case with a budget, whatever the prompts are."""


@pytest.fixture
def launched(monkeypatch):
    """Return a list that gets the name of each kernel that is launched; kernels do nothing."""
    from triton.runtime.interpreter import InterpretedFunction

    names = []

    def launch(self, grid):
        assert all(size > 0 for size in grid), "an empty launch"
        return lambda *args, **options: names.append(self.fn.__name__)

    monkeypatch.setattr(InterpretedFunction, "__getitem__", launch)
    return names


def prefill(case: str, budget: int, lengths: list[int], launched: list[str]) -> list[str]:
    """Prefill prompts in three layers, and return the kernels that the last one launches."""
    sizes = dict(requests=len(lengths), heads=8, group=4, size=16, sinks=4, window=16, topk=budget - 20)
    p = Problem(case, **sizes, dtype=torch.float16, q_dtype=torch.float16).prepare()
    pages, tokens = poisoned_pages(p.layout, p.num_blocks), sum(lengths)
    q, k, v = (torch.zeros(tokens, heads, p.size, dtype=p.dtype) for heads in (p.heads * p.group, p.heads, p.heads))
    chunks = Chunks([0] * len(lengths), lengths, p.budgets, [p.window] * len(lengths))
    for _ in range(3):
        launched.clear()
        options = dict(rule=p.rule, scale=1.0, gate_scores=given_scores(p.rule, k), impl="triton")
        ops.prefill_chunk(q, k, v, pages, p.table, chunks, **options)
    return list(launched)


class TestLaunches:
    __test__ = INTERPRETED

    @pytest.mark.parametrize("case, budget", MOST)
    def test_they_depend_neither_on_requests_nor_on_lengths(self, case, budget, launched):
        """A prompt that evicts nothing takes fewer; all that evict take the same."""
        kernels_of = {name: prefill(case, budget, lengths, launched) for name, lengths in TOKENS.items()}
        evict = {name: kernels for name, kernels in kernels_of.items() if max(TOKENS[name]) > budget}
        (same,) = {tuple(kernels) for kernels in evict.values()}
        assert len(same) <= MOST[case, budget] and "_attend_keys" in same
        assert max(map(len, kernels_of.values())) == len(same)
