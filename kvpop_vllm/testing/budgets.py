"""Error budgets: how wrong a kernel may be, derived rather than chosen.

The same computation is done three times: in float64 (reference), eagerly in the low precision, and
by the kernel under test. The kernel's error against float64 may be a small multiple of the eager
one's, plus a few units in the last place of the reference's largest entry.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

_FLOOR_ULPS = 4.0


@dataclass(frozen=True, eq=False)
class ErrorBudget:
    """One output's reference and the error it may show.

    Attributes:
        reference: float64 result.
        eager_low: the same computation done eagerly in low precision.
        factor: allowed multiple of the eager error.
    """

    reference: torch.Tensor
    eager_low: torch.Tensor
    factor: float = 2.0

    @property
    def eager_error(self) -> float:
        """Largest absolute error of the eager low-precision result."""
        return _largest_error(self.eager_low, self.reference)

    @property
    def allowed(self) -> float:
        """Largest absolute error the result under test may have."""
        finite = self.reference[self.reference.isfinite()]
        scale = float(finite.abs().max()) if finite.numel() else 0.0
        return self.factor * self.eager_error + _floor(self.eager_low.dtype, scale)

    def check(self, actual: torch.Tensor, name: str = "result") -> None:
        """Raise AssertionError unless ``actual`` is within budget.

        Infinities must sit where the reference has them; a NaN passes only where it has a NaN.
        """
        if actual.shape != self.reference.shape:
            raise AssertionError(f"{name}: shape {tuple(actual.shape)}, not {self.reference.shape}")
        wide = actual.detach().to("cpu", torch.float64)
        odd = ~self.reference.isfinite() | ~wide.isfinite()
        same = (wide == self.reference) | (wide.isnan() & self.reference.isnan())
        if (odd & ~same).any():
            where = tuple(torch.nonzero(odd & ~same)[0].tolist())
            raise AssertionError(
                f"{name}: {int((odd & ~same).sum())} of {wide.numel()} entries are wrongly NaN or "
                f"infinite (or wrongly finite), first at {where}: {float(wide[where])} instead of "
                f"{float(self.reference[where])}"
            )
        error = _largest_error(wide, self.reference)
        if error > self.allowed:
            difference = torch.where(odd, 0.0, (wide - self.reference).abs())
            where = tuple(int(i) for i in torch.unravel_index(difference.argmax(), wide.shape))
            raise AssertionError(
                f"{name}: error {error:.3e} at {where} ({float(wide[where]):.9g} instead of "
                f"{float(self.reference[where]):.9g}) exceeds {self.allowed:.3e} = "
                f"{self.factor:g} x eager {self.eager_low.dtype} error {self.eager_error:.3e} + floor"
            )


def error_budget(
    fn: Callable[..., torch.Tensor | tuple[torch.Tensor, ...]],
    inputs: tuple,
    low_dtype: torch.dtype,
    factor: float = 2.0,
) -> ErrorBudget | tuple[ErrorBudget, ...]:
    """Run ``fn`` eagerly in ``low_dtype`` and in float64 on the same rounded inputs.

    Args:
        fn: plain torch computation; returns a tensor or a tuple of them.
        inputs: its arguments; floating tensors are rounded to ``low_dtype`` first, others pass as
            they are.
        low_dtype: precision of the kernel to be judged.
        factor: allowed multiple of the eager error, usually 2 to 4.

    Returns:
        One budget per output, in the structure ``fn`` returns.
    """
    rounded = [_cast(x, low_dtype) for x in inputs]
    eager, exact = fn(*rounded), fn(*[_cast(x, torch.float64) for x in rounded])
    if isinstance(eager, torch.Tensor):
        return ErrorBudget(exact, eager, factor)
    return tuple(ErrorBudget(high, low, factor) for high, low in zip(exact, eager, strict=True))


def assert_within_budget(
    actual: torch.Tensor,
    ref64: torch.Tensor,
    eager_low: torch.Tensor,
    factor: float = 2.0,
    name: str = "result",
) -> None:
    """Raise AssertionError unless ``actual`` errs at most ``factor`` times as much as ``eager_low``."""
    ErrorBudget(ref64, eager_low, factor).check(actual, name)


def _cast(x: object, dtype: torch.dtype) -> object:
    if isinstance(x, torch.Tensor) and x.is_floating_point():
        return x.detach().to(dtype)
    return x


def _largest_error(actual: torch.Tensor, reference: torch.Tensor) -> float:
    """Largest absolute difference over entries where both are finite; 0 when there are none."""
    difference = (actual.detach().cpu().double() - reference).abs()
    difference = difference[difference.isfinite()]
    return float(difference.max()) if difference.numel() else 0.0


def _floor(dtype: torch.dtype, scale: float) -> float:
    return _FLOOR_ULPS * torch.finfo(dtype).eps * scale
