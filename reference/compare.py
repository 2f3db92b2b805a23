"""Compares a kernel's output with the reference output. Every element has its own tolerance. A NaN always fails."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch


@dataclass(frozen=True)
class ErrorStats:
    """The errors of one output of a kernel, compared with the reference output."""

    output: str
    passed: bool
    max_abs_error: float
    """The largest absolute error; NaN where the output has a NaN or a wrong infinity."""
    max_error_over_tolerance: float
    """The largest error as a multiple of its tolerance; at most 1 passes."""
    mismatched: int
    """The number of elements outside the tolerance."""
    total: int
    worst_index: tuple[int, ...] = ()
    """The index of the worst element."""
    note: str = ""
    """A remark that a reader needs beyond the numbers."""

    def describe(self) -> str:
        """Describes the errors in one line of text."""
        if self.passed:
            return f"{self.output}: error at most {_ratio(self.max_error_over_tolerance)} of what is allowed"
        if self.note:
            return f"{self.output}: {self.note}"
        return (
            f"{self.output}: {self.mismatched} of {self.total} elements off, worst at {list(self.worst_index)}: "
            f"error {self.max_abs_error:.3g}, {_ratio(self.max_error_over_tolerance)} times what is allowed"
        )


def _ratio(ratio: float) -> str:
    """Formats a ratio of an error to its tolerance, with two or three digits. A ratio near 1 gets six digits, so that
    0.9999 is not printed as 1."""
    return f"{ratio:.6g}" if 0.99 < ratio < 1.01 else f"{ratio:.2g}" if ratio < 1 else f"{ratio:.3g}"


CHUNK_ELEMENTS = {"cpu": 2**15, "cuda": 2**26}
"""The number of elements that are compared at once.  On a CPU a piece stays in L2, and torch starts no threads for a
piece of this size: an element takes 7 ns (100 ns if all are one piece).  If the CPU has other work, threads that wait
for each other take 20 times as long."""


def elementwise(name: str, actual: torch.Tensor, oracle: torch.Tensor, tolerance: torch.Tensor) -> ErrorStats:
    """Compares `actual` with the reference output `oracle`, element by element.

    `tolerance` is the allowed absolute error, and broadcasts. Equal infinities pass, and NaN fails. The worst element
    has the largest error / tolerance."""
    if actual.shape != oracle.shape:
        note = f"expected shape {tuple(oracle.shape)}, got {tuple(actual.shape)}"
        return ErrorStats(name, False, float("nan"), float("inf"), oracle.numel(), oracle.numel(), note=note)
    if oracle.numel() == 0:
        return ErrorStats(name, True, 0.0, 0.0, 0, 0)
    worst_index, max_error, ratio, wrong_count = 0, 0.0, -1.0, 0
    for chunk_start, values, expected_values, chunk_tolerance in _pieces(actual, oracle, tolerance):
        stats = _plain(values, expected_values, chunk_tolerance) or _careful(values, expected_values, chunk_tolerance)
        wrong_count += stats.wrong
        # NaN stays: it is neither larger nor smaller than a number.
        max_error = stats.largest if stats.largest > max_error or math.isnan(stats.largest) else max_error
        if stats.ratio > ratio:
            worst_index, ratio = chunk_start + stats.worst, stats.ratio
    index = tuple(int(i) for i in np.unravel_index(worst_index, tuple(oracle.shape)))  # torch's own imports SymPy: 1 s
    return ErrorStats(name, wrong_count == 0, max_error, ratio, wrong_count, oracle.numel(), index)


def all_within(actual: torch.Tensor, oracle: torch.Tensor, tolerance: torch.Tensor) -> bool:
    """Returns whether all elements pass `elementwise`. Stops at the first chunk with an element that fails."""
    return actual.shape == oracle.shape and all(
        not (_plain(*chunk) or _careful(*chunk)).wrong for _, *chunk in _pieces(actual, oracle, tolerance)
    )


class _PieceStats(NamedTuple):
    """Holds the errors of one chunk of elements."""

    wrong: int
    largest: float
    ratio: float
    worst: int


def _pieces(
    actual: torch.Tensor, oracle: torch.Tensor, tolerance: torch.Tensor
) -> Iterator[tuple[int, torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Yields the flattened tensors in chunks: the index of a chunk's first element, actual values, expected values and
    tolerances."""
    values, flat_oracle = (tensor.detach().to(oracle.device).reshape(-1) for tensor in (actual, oracle))
    limit = tolerance.detach().to(oracle.device)
    limit = limit.reshape(1).expand(len(flat_oracle)) if limit.numel() == 1 else limit.expand(oracle.shape).reshape(-1)
    chunk_size = CHUNK_ELEMENTS[oracle.device.type]
    for chunk_start in range(0, len(flat_oracle), chunk_size):
        chunk_range = slice(chunk_start, chunk_start + chunk_size)
        yield chunk_start, values[chunk_range].double(), flat_oracle[chunk_range].double(), limit[chunk_range].double()


def _plain(values: torch.Tensor, right: torch.Tensor, limit: torch.Tensor) -> _PieceStats | None:
    """Compares a chunk of values with the expected values by subtraction and division. Returns None if the result is
    infinite or NaN."""
    abs_error = (values - right).abs_()
    ratio = abs_error / limit
    worst_index = int(ratio.argmax())
    max_error, max_ratio = float(abs_error.max()), float(ratio[worst_index])
    if not (math.isfinite(max_error) and math.isfinite(max_ratio)):
        return None
    # A ratio of 1 may be rounded.
    wrong_count = int((abs_error > limit).sum()) if max_ratio > 0.999 else 0
    return _PieceStats(wrong_count, max_error, max_ratio, worst_index)


def _careful(values: torch.Tensor, right: torch.Tensor, limit: torch.Tensor) -> _PieceStats:
    error = (values - right).abs()
    equal_mask = values == right  # equal infinities have a NaN difference
    passed = equal_mask | (error.isfinite() & (error <= limit))  # an infinite tolerance must not pass an infinite error
    ratio = torch.where(equal_mask, 0.0, error / limit)
    ratio = torch.where(ratio.isnan() | ~error.isfinite() & ~equal_mask, torch.inf, ratio)
    worst_index = int(ratio.argmax())
    max_error = float("nan") if error[~equal_mask].isnan().any() else float(torch.where(equal_mask, 0.0, error).max())
    return _PieceStats(int((~passed).sum()), max_error, float(ratio[worst_index]), worst_index)


def exact(oracle: torch.Tensor) -> torch.Tensor:
    """Returns a tolerance of zero for each element of `oracle`, for ops that only move data."""
    return torch.zeros((), dtype=torch.float64).expand(oracle.shape)
