"""Modes of torch that watch every op: bytes that are allocated, and waits of a host for its device."""

from __future__ import annotations

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class AllocatedBytes(TorchDispatchMode):
    """Counts the bytes of the tensors that ops return while these live.

    Attributes:
        peak: the most bytes at once.
    """

    def __init__(self):
        super().__init__()
        self.peak, self.now, self.storages = 0, 0, weakref.WeakSet()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._add(tensor.untyped_storage())
        return result

    def _add(self, storage):
        if storage in self.storages:
            return
        self.storages.add(storage)
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._free, storage.nbytes())

    def _free(self, count):
        self.now -= count


WAITS = ("_local_scalar_dense", "nonzero", "is_nonzero", "masked_select", "_unique2", "equal")
"""Ops whose results a host has to read."""


class RefuseWaits(TorchDispatchMode):
    """Refuses what a host would wait for a device for: ops that it reads, and copies between both that it waits for.

    The host's tensors lie on the CPU, the device's on another device, as torch's meta device.
    """

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = func.overloadpacket.__name__
        devices = {tensor.device.type for tensor in tree_leaves((args, kwargs)) if isinstance(tensor, torch.Tensor)}
        if name in WAITS and devices != {"cpu"}:
            raise AssertionError(f"the host waits for {func}")
        if name in ("_to_copy", "copy_"):
            blocks = not (kwargs.get("non_blocking") or (name == "copy_" and True in args[2:]))
            if len(devices | {result.device.type}) > 1 and blocks:
                raise AssertionError(f"the host waits for {func} between {devices} and {result.device}")
        return result
