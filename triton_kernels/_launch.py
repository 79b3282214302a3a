"""Launches of the same kernels for all layers of a step, whose arguments differ in addresses alone."""

from __future__ import annotations


def launch(kernel, grid: tuple[int, ...], arguments: tuple, constants: tuple, **options):
    """Launch a kernel and return it as Triton has compiled it, or None if it is interpreted."""
    return kernel[grid](*arguments, *constants, **options)


class Launches:
    """Launches of layers that are alike: Triton looks up what it has compiled for the first one alone.

    That takes the host several times as long as the launch. Of a kernel, arguments differ in whether they are None, and
    in their values where these are addresses or are not specialised. ``constants`` begin with what a kernel always has.
    """

    def __init__(self):
        self._compiled = {}

    def __call__(self, kernel, grid: tuple[int, ...], arguments: tuple, constants: tuple, **options) -> None:
        """Launch a kernel as :func:`launch` does."""
        key = id(kernel), constants[1:], tuple(x is None for x in arguments)
        compiled = self._compiled.get(key)
        if compiled is None:
            self._compiled[key] = launch(kernel, grid, arguments, constants, **options)
        else:
            compiled[(*grid, 1, 1)[:3]](*arguments, *constants)
