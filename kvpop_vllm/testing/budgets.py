"""Error budgets: how large a kernel's error may be, derived rather than chosen.

The same computation is done in float64 (the reference) and, several times, eagerly in low precision. The
kernel's largest error against float64 may be twice the largest error of the eager runs, plus a few units in
the last place of the reference's largest entry. Errors are absolute.

The error of a single eager run depends on the order in which a library adds the terms of a sum, which depends
on the processor. The eager runs' sums are therefore disturbed (:class:`DisturbedSums`) by the amount that
another order of their terms could cause. The budget then depends on the computation and on seeds, and hardly
on the processor.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_FLOOR_ULPS = 4.0
"""Units in the last place of the reference's largest entry that are always allowed."""


def _of_torch(*names: str) -> set:
    return {getattr(torch.ops.aten, name) for name in names}


_PRODUCTS, _ADDED_PRODUCTS = _of_torch("mm", "bmm", "mv", "dot"), _of_torch("addmm", "baddbmm", "addmv")
_REDUCTIONS = _of_torch("sum", "mean", "logsumexp", "linalg_vector_norm")
_ALONG_AN_AXIS = _of_torch("cumsum", "_softmax", "_log_softmax", "_softmax_backward_data", "_log_softmax_backward_data")
_SUMS = _PRODUCTS | _ADDED_PRODUCTS | _REDUCTIONS | _ALONG_AN_AXIS


class DisturbedSums(TorchDispatchMode):
    """Mode that disturbs every float32 sum at random, as the roundings of another processor could.

    Sums of gradients are included. Each operand moves by up to one unit in the last place, as if the
    operation that produced it had rounded differently. The result of a sum of ``n`` terms moves by up to
    ``sqrt(n)`` units. Adding terms one after another makes ``n`` errors of at most half a unit of the partial
    sum. Their signs rarely agree, so the total rarely exceeds ``sqrt(n)`` units. Vectors, blocks and fused
    multiply-adds make fewer errors. Sums of 16-bit numbers are not disturbed, because libraries accumulate
    them in float32, and the error of that is small compared with the rounding of the result.
    """

    def __init__(self, seed: int) -> None:
        """Seed the disturbances. Equal seeds give equal disturbances."""
        super().__init__()
        self.seed = seed
        self.generators: dict[torch.device, torch.Generator] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Run ``func``, disturbed if it is a sum."""
        # the packet stands for all overloads of an operation
        operation = func.overloadpacket
        if operation not in _SUMS:
            return func(*args, **(kwargs or {}))
        result = func(*(self._moved(x, 1) for x in args), **(kwargs or {}))
        if operation in _REDUCTIONS:
            # numbers of the input for each of the result
            terms = args[0].numel() // max(1, result.numel())
        elif operation in _ALONG_AN_AXIS:
            # the axis is the first int: a boolean that follows is of another type
            terms = args[0].shape[next(x for x in args if type(x) is int)]
        else:
            # addmm and its like have what is added first, then the factors
            terms = args[operation in _ADDED_PRODUCTS].shape[-1]
        return self._moved(result, math.sqrt(terms))

    def _moved(self, x: object, units: float) -> object:
        """Return ``x``. Entries of a float32 tensor are changed by up to ``units`` in the last place."""
        if not isinstance(x, torch.Tensor) or x.dtype != torch.float32:
            return x
        if x.device not in self.generators:
            # a generator draws on one device only
            self.generators[x.device] = torch.Generator(x.device).manual_seed(self.seed)
        reach = units * torch.finfo(x.dtype).eps
        return x * torch.empty_like(x).uniform_(1 - reach, 1 + reach, generator=self.generators[x.device])


def eager_runs(run: Callable[[], torch.Tensor | tuple[torch.Tensor, ...]], count: int = 4) -> list | tuple[list, ...]:
    """Repeat an eager computation with its sums disturbed from ``count`` seeds.

    Returns:
        One result per seed, or a tuple of such lists if ``run`` returns several outputs. There is only one
        result if nothing is disturbed.
    """
    results = []
    for seed in range(count):
        with DisturbedSums(seed) as disturbed:
            results.append(run())
        # nothing was disturbed, so that further runs would be equal
        if not disturbed.generators:
            break
    if isinstance(results[0], torch.Tensor):
        return results
    return tuple(list(runs) for runs in zip(*results, strict=True))


@dataclass(frozen=True, eq=False)
class ErrorBudget:
    """Reference of one output and the error that it may have.

    Attributes:
        reference: float64 result.
        eager: the same computation done eagerly in low precision: results of :func:`eager_runs`, each shaped
            as ``reference``, or one tensor if no sum is involved.
        factor: allowed multiple of the largest eager error.
    """

    reference: torch.Tensor
    eager: torch.Tensor | Sequence[torch.Tensor]
    factor: float = 2.0

    @property
    def runs(self) -> Sequence[torch.Tensor]:
        """All eager results."""
        return [self.eager] if isinstance(self.eager, torch.Tensor) else self.eager

    @property
    def eager_error(self) -> float:
        """Largest absolute error of any eager result."""
        return max(_largest_error(run, self.reference) for run in self.runs)

    @property
    def allowed(self) -> float:
        """Largest absolute error that the result under test may have."""
        finite = self.reference[self.reference.isfinite()]
        scale = float(finite.abs().max()) if finite.numel() else 0.0
        return self.factor * self.eager_error + _FLOOR_ULPS * torch.finfo(self.runs[0].dtype).eps * scale

    def share(self, actual: torch.Tensor) -> float:
        """Return the error of ``actual`` as a fraction of the allowed error, 0 without an error."""
        error = _largest_error(actual, self.reference)
        return error / self.allowed if error else 0.0

    def check(self, actual: torch.Tensor, name: str = "result") -> None:
        """Check that ``actual`` is within the budget.

        Infinities must be where the reference has them. A NaN passes only where the reference has a NaN.

        Raises:
            AssertionError: the shape differs, or the error is too large.
        """
        if actual.shape != self.reference.shape:
            raise AssertionError(f"{name}: shape {tuple(actual.shape)}, not {self.reference.shape}")
        wide = actual.detach().to("cpu", torch.float64)
        odd = ~self.reference.isfinite() | ~wide.isfinite()
        equal = (wide == self.reference) | (wide.isnan() & self.reference.isnan())
        if (odd & ~equal).any():
            index = tuple(torch.nonzero(odd & ~equal)[0].tolist())
            raise AssertionError(
                f"{name}: {int((odd & ~equal).sum())} of {wide.numel()} entries are wrongly NaN or "
                f"infinite (or wrongly finite), first at {index}: {float(wide[index])} instead of "
                f"{float(self.reference[index])}"
            )
        error = _largest_error(wide, self.reference)
        if error > self.allowed:
            difference = torch.where(odd, 0.0, (wide - self.reference).abs())
            index = tuple(int(i) for i in torch.unravel_index(difference.argmax(), wide.shape))
            raise AssertionError(
                f"{name}: error {error:.3e} at {index} ({float(wide[index]):.9g} instead of "
                f"{float(self.reference[index]):.9g}) exceeds {self.allowed:.3e} = "
                f"{self.factor:g} x eager {self.runs[0].dtype} error {self.eager_error:.3e} + floor"
            )


def assert_within_budget(
    actual: torch.Tensor,
    ref64: torch.Tensor,
    eager: torch.Tensor | Sequence[torch.Tensor],
    factor: float = 2.0,
    name: str = "result",
) -> None:
    """Check that ``actual`` is within the :class:`ErrorBudget` of the other arguments.

    Raises:
        AssertionError: it is not.
    """
    ErrorBudget(ref64, eager, factor).check(actual, name)


def _largest_error(actual: torch.Tensor, reference: torch.Tensor) -> float:
    """Return the largest absolute difference over entries where both are finite, 0 if there are none."""
    difference = (actual.detach().cpu().double() - reference.detach()).abs()
    difference = difference[difference.isfinite()]
    return float(difference.max()) if difference.numel() else 0.0
