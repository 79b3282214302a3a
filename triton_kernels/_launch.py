"""Launches of kernels: one by one, or those of one layer again for all layers of a step that are alike.

Layers that are alike differ in the addresses of their tensors alone. To look up what Triton has compiled takes the host
several times as long as a launch, and so does forming the arguments of all kernels of a layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from operator import itemgetter
from typing import Any

import torch

from kvpop_vllm.cache.pages import cdiv

ALIGNMENT = 256
"""Workspaces begin at multiples of it, in bytes."""


class Direct:
    """Launches of kernels as Triton makes them, and memory for their results."""

    empty = staticmethod(torch.empty)

    def __call__(self, kernel, grid: tuple[int, ...], arguments: tuple, constants: tuple, **options) -> None:
        """Launch a kernel."""
        kernel[grid](*arguments, *constants, **options)

    def reuse(self) -> None:
        """Let the workspaces that follow take the memory of those so far, as those that nobody holds do anyway."""


DIRECT = Direct()


class Launches(Direct):
    """Launches of layers that are alike: Triton looks up what it has compiled for the first one alone.

    Attributes:
        stream: stream of the launches, as the driver knows it. A caller sets it before each step, on one thread.
    """

    def __init__(self):
        self._compiled, self.stream = {}, None

    def __call__(self, *launch, **options) -> None:
        """Launch a kernel. Arguments are those of :meth:`launch`."""
        self.launch(*launch, **options)

    def launch(
        self, kernel, grid: tuple[int, ...], arguments: tuple, constants: tuple, **options
    ) -> tuple[Callable, tuple]:
        """Launch a kernel.

        Returns:
            A function that launches it again and its first arguments; ``arguments`` and ``constants`` follow.
        """
        key, place = (id(kernel), *constants, *options.values()), (*(*grid, 1)[:3], self.stream)
        if (entry := self._compiled.get(key)) is not None:
            run, *of_kernel = entry
            run(*place, *of_kernel, *arguments, *constants)
        elif (compiled := kernel[grid](*arguments, *constants, **options)) is not None:
            no_hooks = None, None, None
            run, *of_kernel = compiled.run, compiled.function, compiled.packed_metadata, *no_hooks
            self._compiled[key] = run, *of_kernel
        else:  # interpreted
            return partial(kernel[grid], **options), ()
        return run, (*place, *of_kernel)


class Recording(Direct):
    """Launches of a layer, which :meth:`repeat` makes again with the tensors of another one.

    A call launches a kernel and records it. A recording that holds a tensor of unknown origin cannot be repeated, for
    example the result of a torch operation. An operation that writes to a tensor in place is not seen: between launches
    there may be none, unless it writes the same in all layers.

    Args:
        launches: launches the kernels.
        tensors: tensors of the layer, None for those that it lacks.
        interpreted: True if kernels are interpreted: they take tensors, not addresses.

    Attributes:
        repeatable: whether the launches can be repeated, False before :meth:`close`.
    """

    def __init__(self, launches: Launches, tensors: Sequence[torch.Tensor | None], interpreted: bool):
        self._launches, self._interpreted, self.repeatable = launches, interpreted, False
        self._values: list[Any] = [None] * len(tensors)  # what arguments are chosen from; those of a layer come first
        self._of_layer = {id(tensor): place for place, tensor in enumerate(tensors) if tensor is not None}
        self._distinct = len(self._of_layer) == sum(tensor is not None for tensor in tensors)
        self._varying, self._unknown = set(range(len(tensors))), []
        self._tuples, self._calls, self._workspaces, self._size, self._device = [], [], [], 0, None
        self.reuse()

    def reuse(self) -> None:
        """Let the workspaces that follow take the memory of those so far."""
        self._end = 0
        # places by the id of a value, which lives as long as its entry, or another value might get its id
        self._places, self._alive = dict(self._of_layer), []

    def empty(self, *shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return a workspace that is no longer needed after the layer or after :meth:`reuse`."""
        workspace = torch.empty(*shape, dtype=dtype, device=device)
        place = self._add(None, workspace)
        self._varying.add(place)
        self._workspaces.append((place, self._end, shape, dtype))
        self._end += cdiv(workspace.nbytes, ALIGNMENT) * ALIGNMENT
        self._size, self._device = max(self._size, self._end), device
        return workspace

    def __call__(self, *launch, **options) -> None:
        """Launch a kernel and record it. Arguments are those of :meth:`Launches.launch`."""
        _, _, arguments, constants = launch
        run, first = self._launches.launch(*launch, **options)
        self._calls.append((run, _items([self._place(value) for value in (*first, *arguments, *constants)])))

    def close(self, shared: Iterable[torch.Tensor]) -> None:
        """End the recording; the tensors ``shared`` are the same for all layers."""
        storages = {tensor.untyped_storage().data_ptr() for tensor in shared}
        of_torch = any(tensor.untyped_storage().data_ptr() not in storages for tensor in self._unknown)
        self.repeatable = self._distinct and not of_torch
        self._of_layer = self._places = self._alive = self._unknown = None

    def repeat(self, tensors: Iterable[torch.Tensor | None]) -> None:
        """Launch the kernels for another layer, with ``tensors`` in the order of the first one's."""
        values = self._values.copy()
        for place, tensor in enumerate(tensors):
            if tensor is not None:
                values[place] = self._argument(tensor)
        if self._workspaces:
            memory = torch.empty(self._size, dtype=torch.uint8, device=self._device)
            if self._interpreted:
                for place, start, shape, dtype in self._workspaces:
                    end = start + dtype.itemsize * torch.Size(shape).numel()
                    values[place] = memory[start:end].view(dtype).view(shape)
            else:
                address = memory.data_ptr()
                for place, start, _, _ in self._workspaces:
                    values[place] = address + start
        for place, make, items in self._tuples:
            values[place] = make(items(values))
        for run, arguments in self._calls:
            run(*arguments(values))

    def _argument(self, tensor: torch.Tensor) -> torch.Tensor | int:
        """Return what a kernel takes of a tensor."""
        return tensor if self._interpreted else tensor.data_ptr()

    def _place(self, value) -> int:
        """Return the place of an argument among the values; tuples are made of other values."""
        is_tuple = isinstance(value, tuple)
        if not is_tuple and not isinstance(value, torch.Tensor):
            return self._add(value)
        if (place := self._places.get(id(value))) is not None:
            return place
        if not is_tuple:
            self._unknown.append(value)
            return self._add(self._argument(value), value)
        places = [self._place(item) for item in value]
        make, items = getattr(type(value), "_make", tuple), _items(places)
        if self._varying.isdisjoint(places):
            return self._add(make(items(self._values)), value)
        place = self._add(None, value)
        self._varying.add(place)
        self._tuples.append((place, make, items))
        return place

    def _add(self, argument, value=None) -> int:
        """Append an argument to the values and return its place, by which ``value`` is found from now on."""
        place = len(self._values)
        self._values.append(argument)
        if value is not None:
            self._places[id(value)] = place
            self._alive.append(value)
        return place


def _items(places: list[int]) -> Callable[[list], tuple]:
    """Return a function that returns the values at these places."""
    if len(places) == 1:
        return lambda values: (values[places[0]],)
    return itemgetter(*places)
