"""Launches of the same kernels for all layers of a step, whose arguments differ in addresses alone."""

from __future__ import annotations

from triton.runtime import driver


def launch(kernel, grid: tuple[int, ...], arguments: tuple, constants: tuple, **options):
    """Launch a kernel and return it as Triton has compiled it, or None if it is interpreted."""
    return kernel[grid](*arguments, *constants, **options)


class Launches:
    """Launches of layers that are alike: Triton looks up what it has compiled for the first one alone.

    The look-up takes the host several times as long as the launch. From layer to layer, arguments differ in addresses
    and in numbers that are not specialised. ``constants`` begin with one that a kernel always has.
    """

    def __init__(self):
        self._compiled = {}

    def __call__(self, kernel, grid: tuple[int, ...], arguments: tuple, constants: tuple, **options) -> None:
        """Launch a kernel as :func:`launch` does."""
        key = id(kernel), constants[1:]
        compiled = self._compiled.get(key)
        if compiled is None:
            self._compiled[key] = launch(kernel, grid, arguments, constants, **options)
            return
        stream, hooks = driver.active.get_current_stream(driver.active.get_current_device()), (None, None)
        of_kernel = compiled.function, compiled.packed_metadata, None  # no metadata for hooks
        compiled.run(*(*grid, 1)[:3], stream, *of_kernel, *hooks, *arguments, *constants)
