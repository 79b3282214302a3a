"""Which implementation runs an op."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable

import torch

IMPLS = ("reference", "cpp", "triton")


def load_extension():
    """The compiled module ``kvpop_vllm._C``.

    Raises:
        ImportError: it was not built for this installation.
    """
    try:
        return importlib.import_module("kvpop_vllm._C")
    except ImportError as error:
        raise ImportError(
            f"kvpop_vllm._C is not usable here ({error}): reinstall with a C++ compiler and torch present, or use impl='reference'"
        ) from error


@functools.cache
def _extension_available() -> bool:
    try:
        load_extension()
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
        if error.name != f"{module}.{op}":
            raise
        raise NotImplementedError(f"op {op!r} has no {impl!r} implementation: use impl='reference'") from None


CPP_DTYPES = {
    "decode_step": (torch.float32, torch.bfloat16),
    "online_topk": (torch.float32,),
    "running_topk": (torch.float32, torch.float64),
}
"""Dtypes of the first tensor that the C++ implementation of an op takes."""


def select(op: str, tensor: torch.Tensor) -> str:
    """The name of the implementation that ``impl="auto"`` takes for ``tensor`` (an op's first argument)."""
    fits = op != "decode_step" or tensor.shape[-1] % 16 == 0
    if tensor.device.type == "cpu" and tensor.dtype in CPP_DTYPES.get(op, ()) and fits and _extension_available():
        return "cpp"
    return "reference"


def resolve(op: str, impl: str, tensor: torch.Tensor) -> Callable:
    """The function that runs ``op``.

    Raises:
        ValueError: unknown ``impl``.
        ImportError, NotImplementedError: ``impl`` was asked for by name and is not there.
    """
    if impl == "auto":
        impl = select(op, tensor)
    elif impl not in IMPLS:
        raise ValueError(f"impl must be 'auto' or one of {IMPLS}, got {impl!r}")
    return _implementation(op, impl)
