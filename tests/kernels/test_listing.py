"""One name per op everywhere: schema, reference, fast implementations and tests."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

from kvpop_vllm.kernels import dispatch, ops

ROOT = Path(__file__).parents[2]
OPS = sorted(n for n, f in inspect.getmembers(ops, inspect.isfunction) if f.__module__.startswith(ops.__name__ + "."))


def test_there_are_ops():
    assert {"decode_step", "prefill_chunk", "online_topk", "delayed_mlstm"} <= set(OPS)


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
    of_draws = {"seeds": "keys", "seed": "keys"}  # the op makes keys of a request's seed
    own = {"impl"} | ({"window"} if op == "prefill_chunk" else set())  # arguments that the op itself handles
    schema = [of_draws.get(name, name) for name in inspect.signature(getattr(ops, op)).parameters if name not in own]
    assert list(inspect.signature(dispatch.resolve(op, impl, None)).parameters) == schema


def test_every_fast_file_belongs_to_an_op():
    for folder in ("kvpop_vllm/kernels/cpp", "triton_kernels"):
        files = [p.stem for p in (ROOT / folder).glob("[!_]*.py")]
        assert set(files) <= set(OPS), folder
    sources = [p.stem for p in (ROOT / "csrc/cpu").glob("*.cpp")]
    assert {p.stem for p in (ROOT / "triton_kernels").glob("[!_]*.py")} == set(dispatch.TRITON_DTYPES)
    assert sources and all(stem in OPS or stem.startswith("kernels_") for stem in sources)


def test_every_instruction_set_of_this_processor_is_there():
    """Tests that force each of ``isa_levels()`` therefore force all that this processor supports."""
    found = re.search(r"^flags\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.M)
    flags = set(found.group(1).split() if found else ())
    needed = {
        "baseline": set(),
        "avx2": {"avx2", "fma"},
        "avx512": {"avx512f", "avx512bw", "avx512dq", "avx512vl"},
        "avx512_bf16": {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_bf16"},
        "amx_bf16": {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_bf16", "amx_tile", "amx_bf16"},
    }
    assert dispatch.load_extension().isa_levels() == [name for name, those in needed.items() if those <= flags]
    sources = {p.stem.removeprefix("kernels_") for p in (ROOT / "csrc/cpu").glob("kernels_*.cpp")}
    assert sources == set(needed)


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match="impl must be"):
        dispatch.resolve("decode_step", "cuda", None)
