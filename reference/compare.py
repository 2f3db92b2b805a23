"""Judging a result: NaN never passes, and every tolerance is per element."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class ErrorStats:
    """How one output differs from the oracle."""

    output: str
    passed: bool
    max_abs_error: float
    """Largest absolute error; NaN where the output has a NaN or a wrong infinity."""
    max_error_over_tolerance: float
    """Largest error as a multiple of its tolerance; at most 1 passes."""
    mismatched: int
    """Elements outside the tolerance."""
    total: int
    worst_index: tuple[int, ...] = ()
    """Index of the worst element."""
    note: str = ""
    """What a reader should know beyond the numbers."""

    def describe(self) -> str:
        """One line of text."""
        if self.passed:
            return f"{self.output}: error at most {self.max_error_over_tolerance:.2g} of what is allowed"
        if self.note:
            return f"{self.output}: {self.note}"
        return (
            f"{self.output}: {self.mismatched} of {self.total} elements off, worst at {list(self.worst_index)}: "
            f"error {self.max_abs_error:.3g}, {self.max_error_over_tolerance:.3g} times what is allowed"
        )


def elementwise(name: str, actual: torch.Tensor, oracle: torch.Tensor, tolerance: torch.Tensor) -> ErrorStats:
    """Compares `actual` with `oracle` element by element; `tolerance` is absolute and broadcasts.

    An element passes if its error is finite and `<=` its tolerance, or if both are the same infinity. NaN on either
    side fails.
    """
    if actual.shape != oracle.shape:
        note = f"expected shape {tuple(oracle.shape)}, got {tuple(actual.shape)}"
        return ErrorStats(name, False, float("nan"), float("inf"), oracle.numel(), oracle.numel(), note=note)
    if oracle.numel() == 0:
        return ErrorStats(name, True, 0.0, 0.0, 0, 0)
    actual = actual.detach().to("cpu", torch.float64)
    oracle = oracle.detach().to("cpu", torch.float64)
    tolerance = tolerance.detach().to("cpu", torch.float64).expand(oracle.shape)
    error = (actual - oracle).abs()
    same = actual == oracle  # equal infinities have a NaN difference
    passed = same | (error.isfinite() & (error <= tolerance))  # an infinite tolerance must not pass an infinite error
    ratio = torch.where(same, 0.0, error / tolerance)
    ratio = torch.where(ratio.isnan() | ~error.isfinite() & ~same, torch.inf, ratio)
    worst = int(ratio.argmax())
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(worst), oracle.shape))
    wrong = int((~passed).sum())
    largest = float("nan") if error[~same].isnan().any() else float(torch.where(same, 0.0, error).max())
    return ErrorStats(name, wrong == 0, largest, float(ratio.flatten()[worst]), wrong, oracle.numel(), index)


def exact(oracle: torch.Tensor) -> torch.Tensor:
    """The tolerance of an op that only moves data: zero."""
    return torch.zeros((), dtype=torch.float64).expand(oracle.shape)
