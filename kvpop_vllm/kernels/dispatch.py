"""Selection of the implementation that runs an op."""

import functools
import importlib
import os
from collections.abc import Callable

import torch

from kvpop_vllm.supported import KERNELS

IMPLS = ("reference", "cpp", "triton")
"""Names of the implementations."""


def load_extension():
    """Return the compiled module ``kvpop_vllm._C``.

    Raises:
        ImportError: the extension was not built for this installation.
    """
    try:
        return importlib.import_module("kvpop_vllm._C")
    except ImportError as error:
        raise ImportError(
            f"kvpop_vllm._C is not usable here ({error}): reinstall with a C++ compiler and torch present, or use impl='reference'"
        ) from error


@functools.cache
def _available(module: str) -> bool:
    try:
        importlib.import_module(module)
    except ImportError:
        return False
    return True


@functools.cache
def _implementation(op: str, impl: str) -> Callable:
    if impl == "cpp":
        load_extension()
    module = {
        "reference": "kvpop_vllm.kernels.reference",
        "cpp": "kvpop_vllm.kernels.cpp",
        "triton": "kvpop_vllm.kernels.triton",
    }[impl]
    try:
        return getattr(importlib.import_module(f"{module}.{op}"), op)
    except ModuleNotFoundError as error:
        if error.name == "triton":
            raise ImportError("impl='triton' needs the package triton, which is not installed") from error
        if error.name != f"{module}.{op}":
            raise
        raise NotImplementedError(f"op {op!r} has no {impl!r} implementation: use impl='reference'") from None


SERVING = "begin_tail", "decode_step", "prefill_chunk", "verify_step"
"""Ops whose head sizes and dtypes are those of :data:`kvpop_vllm.supported.KERNELS`."""

_SERVED = {name: tuple(getattr(torch, dtype) for dtype in support.dtypes or ()) for name, support in KERNELS.items()}

CPP_DTYPES = {
    **dict.fromkeys(SERVING, _SERVED["cpp"]),
    "online_topk": (torch.float32,),
    "running_topk": (torch.float32, torch.float64),
}
"""Dtypes that the C++ implementation of each op accepts for its first tensor."""

TRITON_DTYPES = {
    **dict.fromkeys(SERVING, _SERVED["triton"]),
    "delayed_mlstm": (torch.float32, torch.float16, torch.bfloat16),
    "fill_rows": (torch.int32,),
    "future_attention_mass": (torch.float32, torch.float16, torch.bfloat16),
    "online_topk": (torch.float32,),
    "running_topk": (torch.float32, torch.float64, torch.float16, torch.bfloat16),
    "sparse_attention": (torch.float32, torch.float16, torch.bfloat16),
    "write_tokens": _SERVED["triton"],
}
"""Dtypes that the Triton implementation of each op accepts for its first tensor."""

ATTENDING = "future_attention_mass", "sparse_attention"
TRITON_LARGEST_HEAD = dict.fromkeys((*SERVING, *ATTENDING, "write_tokens"), KERNELS["triton"].largest)
"""Largest head size D that the Triton implementation of each op accepts."""
TRITON_LARGEST_FLOAT32_HEAD = TRITON_LARGEST_HEAD | dict.fromkeys(ATTENDING, 256)
"""The same in float32, of which larger heads in training do not fit the shared memory of an A100."""


def largest_head(op: str, dtype: torch.dtype) -> float:
    """Return the largest head size that Triton takes for an op in a dtype, infinity if nothing bounds it."""
    return (TRITON_LARGEST_FLOAT32_HEAD if dtype == torch.float32 else TRITON_LARGEST_HEAD).get(op, float("inf"))


def select(op: str, tensor: torch.Tensor) -> str:
    """Return the implementation that ``impl="auto"`` selects for ``tensor``, the op's first argument."""
    # the C++ kernels of serving read a head in whole vectors
    fits = op not in SERVING or tensor.shape[-1] % KERNELS["cpp"].multiple == 0
    if tensor.device.type == "cpu" and tensor.dtype in CPP_DTYPES.get(op, ()) and fits and _available("kvpop_vllm._C"):
        return "cpp"
    if tensor.device.type == "cuda" and tensor.dtype in TRITON_DTYPES.get(op, ()) and _available("triton"):
        if tensor.shape[-1] <= largest_head(op, tensor.dtype):
            return "triton"
    return "reference"


def chosen(op: str, impl: str, tensor: torch.Tensor) -> str:
    """Return the implementation that runs an op on ``tensor``, its first argument, if ``impl`` is asked for."""
    return select(op, tensor) if impl == "auto" else impl


def resolve(op: str, impl: str, tensor: torch.Tensor) -> Callable:
    """Return the function that implements ``op``; on a GPU it launches kernels on the device of ``tensor``.

    Args:
        op: name of the op.
        impl: "auto" or one of ``IMPLS``.
        tensor: first argument of the op; its device, dtype and last axis decide what "auto" selects.

    Raises:
        ValueError: unknown ``impl``, or "triton" for CPU tensors without Triton's interpreter.
        ImportError: the package or extension that ``impl`` needs is not installed.
        NotImplementedError: the op has no such implementation.
    """
    impl = chosen(op, impl, tensor)
    if impl not in IMPLS:
        raise ValueError(f"impl must be 'auto' or one of {IMPLS}, got {impl!r}")
    run = _implementation(op, impl)
    if impl == "triton" and tensor is not None and tensor.device.type == "cpu" and not _interpreted():
        raise ValueError(f"impl='triton' needs a GPU and {op} got CPU tensors: use impl='reference'")
    if impl == "triton" and tensor is not None and tensor.device.type == "cuda":
        return functools.partial(_run_on, tensor.device, run)
    return run


def _run_on(device: torch.device, run: Callable, *args, **kwargs):
    """Call a function while a GPU is the current one: Triton launches on that, whatever its arguments are on.

    Autograd does so for backward passes.
    """
    if torch.cuda.current_device() == device.index:
        return run(*args, **kwargs)
    with torch.cuda.device(device):
        return run(*args, **kwargs)


def _interpreted() -> bool:
    """Return whether Triton interprets its kernels on the CPU, which is slow and meant for tests.

    Triton reads this variable when it is imported.
    """
    return os.environ.get("TRITON_INTERPRET") == "1"
