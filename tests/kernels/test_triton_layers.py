"""Layers of a step that are alike repeat the launches of the second one, with tensors of their own."""

from collections import namedtuple
from types import SimpleNamespace

import pytest
import torch
from kernels.factories import given_scores
from kernels.problems import Problem
from kernels.served import INTERPRETED, Pool

from kvpop_vllm.cache.chunks import Chunks
from kvpop_vllm.cache.pages import Prefix
from kvpop_vllm.kernels import ops

LAYERS, LENGTHS = 3, (15, 10)
CASES = "none", "mass-newest", "mlstm", "mlstm-immediate", "gate_scores-threshold"
OF_TORCH = "key-norm", "gate_scores-ages", "mlp"
"""Cases whose scores torch forms between the launches: each layer forms its own arguments."""


class Layer(Pool):
    """A layer with weights, pages and texts of its own; page table and p are the same tensors in all layers."""

    def __init__(self, case: str, seed: int, dtype: torch.dtype, shared: Problem | None, **sizes):
        p = Problem(case, seed=seed, length=sum(LENGTHS), size=16, dtype=dtype, q_dtype=dtype, **sizes).prepare()
        if shared is not None:
            p.table = shared.table
        super().__init__(p)
        self.first, self.outputs = shared or p, []

    def prefill(self, chunks: Chunks) -> None:
        """Prefill a chunk of each request."""
        p, options = self.p, {}
        cuts = [self.begin(r, length, "triton") for r, length in enumerate(chunks.lengths)]
        q, k, v = (torch.cat([x[r][cut] for r, cut in enumerate(cuts)]) for x in p.texts)
        if p.protected:
            options["prefix"] = Prefix(self.pages, p.prefix_table, self.first.tokens)
        options |= dict(gate_scores=given_scores(p.rule, k), rule=p.rule, scale=p.scale, impl="triton")
        self.outputs += ops.prefill_chunk(q, k, v, self.pages, self.table, chunks, **options)


class TestLayers:
    __test__ = INTERPRETED

    @pytest.mark.parametrize(
        "case, protected", [*((case, ()) for case in (*CASES, *OF_TORCH)), ("none", (16, 7)), ("mlstm", (16, 7))]
    )
    def test_each_computes_its_own(self, case, protected):
        """Outputs, log-sum-exps and pages are those of layers that know nothing of each other, to the bit."""
        for dtype in (torch.float32, torch.float16) if case == "none" else (torch.float32,):
            together, alone = [], []
            for layers in (together, alone):
                for seed in range(LAYERS):
                    layers.append(Layer(case, seed, dtype, layers[0].p if layers else None, protected=protected))
            p, start = together[0].p, 0
            for length in LENGTHS:
                numbers = [start] * p.requests, [length] * p.requests, p.budgets, p.windows.tolist()
                chunks = Chunks(*numbers)
                for one, another in zip(together, alone, strict=True):
                    one.prefill(chunks)
                    another.prefill(Chunks(*numbers))
                (plan,) = chunks._memo.values()
                assert (plan.recording is not None) == (case in CASES)
                start += length
            for one, another in zip(together, alone, strict=True):
                assert torch.equal(one.pages.raw, another.pages.raw)
                for a, b in zip(one.outputs, another.outputs, strict=True):
                    assert torch.equal(a, b) and a.isfinite().all()
            assert not torch.equal(together[1].outputs[0], together[2].outputs[0])


View = namedtuple("View", "base row")


class Kernel:
    """A kernel that Triton has compiled, as the launches see it."""

    def __init__(self):
        self.calls = []

    def __getitem__(self, grid):
        return lambda *arguments, **options: SimpleNamespace(
            run=lambda *arguments: self.calls.append(arguments), function="function", packed_metadata="metadata"
        )


class TestRecordings:
    """Recordings of compiled kernels, which take addresses."""

    def record(self, layer, shared, unknown=None):
        """Return a recording of two pieces, and its kernel."""
        from kvpop_vllm.kernels.triton._launch import Launches, Recording

        launches, kernel = Launches(), Kernel()
        launches.stream = "stream"
        recording = Recording(launches, layer, interpreted=False)
        for _ in range(2):
            recording.reuse()
            floats = recording.empty(5, 3, dtype=torch.float32, device=torch.device("cpu"))
            doubles = recording.empty(2, dtype=torch.float64, device=torch.device("cpu"))
            arguments = View(layer[0], 4), layer[2], (View(shared, 1),), floats, (doubles, unknown), 0.5, None
            recording(kernel, (2, 3), arguments, ("constant",), num_warps=4)
        recording.close([shared])
        return recording, kernel

    def test_addresses_are_those_of_the_layer(self):
        layers = [[torch.zeros(3), None, torch.zeros(7)] for _ in range(2)]
        shared = torch.zeros(4)
        recording, kernel = self.record(layers[0], shared[1:])
        assert recording.repeatable
        kernel.calls.clear()
        recording.repeat(layers[1])
        first, _, last = (None if tensor is None else tensor.data_ptr() for tensor in layers[1])
        assert len(kernel.calls) == 2
        floats = {call[12] for call in kernel.calls}
        assert len(floats) == 1, "pieces share their workspaces"
        (address,) = floats
        place = 2, 3, 1, "stream", "function", "metadata", None, None, None
        doubles = address + 256
        arguments = (first, 4), last, ((shared[1:].data_ptr(), 1),), address, (doubles, None), 0.5, None, "constant"
        assert kernel.calls == [(*place, *arguments)] * 2
        assert all(isinstance(call[9], View) for call in kernel.calls)

    def test_a_tensor_of_unknown_origin_is_not_repeated(self):
        layer, shared = [torch.zeros(3), None, torch.zeros(7)], torch.zeros(4)
        assert not self.record(layer, shared, unknown=torch.zeros(2))[0].repeatable
        assert self.record(layer, shared, unknown=shared[2:])[0].repeatable

    def test_a_tensor_with_two_roles_is_not_repeated(self):
        """In other layers the roles may have a tensor each."""
        tensor = torch.zeros(3)
        assert not self.record([tensor, None, tensor], torch.zeros(4))[0].repeatable
