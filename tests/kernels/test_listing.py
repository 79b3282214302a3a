"""One name per op everywhere: schema, reference, fast implementations and tests."""

import inspect
import re
import types
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from kvpop_vllm.kernels import dispatch, ops
from kvpop_vllm.kernels.ops.serving import WRITE_TO_OUT

ROOT = Path(__file__).parents[2]
OPS = sorted(n for n, f in inspect.getmembers(ops, inspect.isfunction) if f.__module__.startswith(ops.__name__ + "."))


@pytest.mark.parametrize("op", OPS)
def test_reference_and_test_carry_the_ops_name(op):
    assert callable(dispatch.resolve(op, "reference", None))
    assert (ROOT / f"tests/kernels/test_{op}.py").is_file()


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("impl", ["reference", "cpp", "triton"])
def test_implementations_take_the_schemas_arguments(op, impl):
    written = {"reference": OPS, "cpp": dispatch.CPP_DTYPES, "triton": dispatch.TRITON_DTYPES}
    if op not in written[impl]:
        with pytest.raises(
            NotImplementedError, match=f"op '{op}' has no '{impl}' implementation: use impl='reference'"
        ):
            dispatch.resolve(op, impl, None)
        return
    names = {"seeds": "keys"}  # the op makes keys of a request's seed
    by_the_op = {"impl"} if op in WRITE_TO_OUT.get(impl, ()) else {"impl", "out"}  # else the op copies outputs
    arguments = [name for name in inspect.signature(getattr(ops, op)).parameters if name not in by_the_op]
    schema = [names.get(name, name) for name in arguments]
    parameters = list(inspect.signature(dispatch.resolve(op, impl, None)).parameters)
    assert parameters == schema + (["order"] if op == "boundary_loss" else [])  # of the ops that it ranks with


def test_every_fast_file_belongs_to_an_op():
    for folder in ("kvpop_vllm/kernels/cpp", "triton_kernels"):
        files = [p.stem for p in (ROOT / folder).glob("[!_]*.py")]
        assert set(files) <= set(OPS), folder
    sources = [p.stem for p in (ROOT / "csrc/cpu").glob("*.cpp")]
    assert {p.stem for p in (ROOT / "triton_kernels").glob("[!_]*.py")} == set(dispatch.TRITON_DTYPES)
    assert sources and all(stem in OPS or stem.startswith("kernels_") for stem in sources)


def test_every_instruction_set_of_this_processor_is_there():
    """Tests that force each of ``isa_levels()`` therefore force all that this processor supports."""
    match = re.search(r"^flags\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.M)
    flags = set(match.group(1).split() if match else ())
    needed = {
        "baseline": set(),
        "avx2": {"avx2", "fma"},
        "avx512": {"avx512f", "avx512bw", "avx512dq", "avx512vl"},
        "avx512_bf16": {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_bf16"},
        "amx_bf16": {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_bf16", "amx_tile", "amx_bf16"},
    }
    assert dispatch.load_extension().isa_levels() == [name for name, names in needed.items() if names <= flags]
    sources = {p.stem.removeprefix("kernels_") for p in (ROOT / "csrc/cpu").glob("kernels_*.cpp")}
    assert sources == set(needed)


SERVED = "decode_step", "prefill_chunk", "verify_step"
ATTENDING = "sparse_attention", "future_attention_mass"
LARGEST = dict.fromkeys((*SERVED, *ATTENDING), 512)
"""Largest head size of Triton's kernels; training in float32 takes half of it."""


def test_choice_of_implementation():
    """The fastest implementation that takes the device, dtype and head size is chosen."""

    def chosen(op, device="cuda", dtype=torch.bfloat16, size=64):
        shape = (1, 4, size) if op in SERVED else (1, 2, 8, size)
        return dispatch.select(op, types.SimpleNamespace(device=torch.device(device), dtype=dtype, shape=shape))

    for op in set(dispatch.TRITON_DTYPES) - {"begin_tail", "fill_rows", "online_topk"}:
        largest = LARGEST.get(op)
        assert chosen(op) == "triton", op
        assert chosen(op, size=2 * (largest or 128)) == ("reference" if largest else "triton"), op
        assert chosen(op, size=largest or 64) == "triton", op
        assert chosen(op, dtype=torch.float64) == ("triton" if op == "running_topk" else "reference"), op
    assert chosen("fill_rows", dtype=torch.int32) == "triton" and chosen("fill_rows", "cpu", torch.int32) == "reference"
    for op in ATTENDING:
        assert [chosen(op, dtype=torch.float32, size=size) for size in (256, 512)] == ["triton", "reference"]
    for op in ("delayed_mlstm", "future_attention_mass", "running_topk", "sparse_attention"):
        assert chosen(op, "cpu") == "reference"
    for op, dtype in (("decode_step", torch.float16), ("prefill_chunk", torch.float16), ("online_topk", torch.float32)):
        assert chosen(op, dtype=dtype, size=80) == "triton"


@pytest.mark.parametrize("op", dispatch.TRITON_DTYPES)
def test_kernels_are_launched_on_the_device_of_their_tensors(op, monkeypatch):
    """Two GPUs are pretended; the first one is current before and after."""
    current = [0]

    @contextmanager
    def device(target):
        current.append(target.index)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[-1])
    monkeypatch.setattr(dispatch, "_implementation", lambda *lookup: lambda x, *, y: (lookup, current[-1], x, y))
    with FakeTensorMode():
        for index in (0, 1):
            tensor = torch.empty(1, 1, 8, 64, dtype=dispatch.TRITON_DTYPES[op][0], device=f"cuda:{index}")
            for impl in ("auto", "triton"):
                assert dispatch.resolve(op, impl, tensor)(1, y=2) == ((op, "triton"), index, 1, 2)
            assert dispatch.resolve(op, "reference", tensor)(1, y=2) == ((op, "reference"), 0, 1, 2)
    assert current == [0]


def test_cpu_tensors_without_the_interpreter_are_refused(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match="needs a GPU and running_topk got CPU tensors: use impl='reference'"):
        ops.running_topk(torch.zeros(1, 1, 8), sinks=0, window=1, topk=1, impl="triton")
