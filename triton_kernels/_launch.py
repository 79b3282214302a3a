"""Launches of the same kernels for all layers of a step, whose arguments differ in addresses alone."""

from __future__ import annotations


def launch(kernel, grid: tuple[int, ...], arguments: tuple, constants: tuple, **options):
    """Launch a kernel and return it as Triton has compiled it, or None if it is interpreted."""
    return kernel[grid](*arguments, *constants, **options)


class Launches:
    """Launches of layers that are alike: Triton looks up what it has compiled for the first one alone.

    The look-up takes the host several times as long as the launch. From layer to layer, arguments differ in addresses
    and in numbers that are not specialised.

    Attributes:
        stream: stream of the launches, as the driver knows it. A caller sets it before each step, on one thread.
    """

    def __init__(self):
        self._compiled, self.stream = {}, None

    def __call__(self, kernel, grid: tuple[int, ...], arguments: tuple, constants: tuple, **options) -> None:
        """Launch a kernel as :func:`launch` does."""
        key = id(kernel), *constants, *options.values()
        if (compiled := self._compiled.get(key)) is not None:
            run, *of_kernel = compiled
            run(*(*grid, 1)[:3], self.stream, *of_kernel, *arguments, *constants)
        elif (compiled := launch(kernel, grid, arguments, constants, **options)) is not None:
            no_hooks = None, None, None
            self._compiled[key] = compiled.run, compiled.function, compiled.packed_metadata, *no_hooks
