"""Finds sums of floats whose last bits depend on the order in which warps add to them (`atom.add`, `red.add`)."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from rooflab.bench.emulator.numbers.bits import sum_and_error
from rooflab.bench.emulator.numbers.formats import decode

Lanes = npt.NDArray[np.int64]
MOST_TERMS = 3
"""A sum of two terms has the same bits in either order; the count of terms goes no further than this."""
FLOATS = ("f16", "bf16", "f16x2", "bf16x2", "f32", "f64")


class Sums:
    """Records which warps add floats to each place of a memory range of `size` bytes.  A place is two bytes long."""

    def __init__(self, size: int) -> None:
        self._terms = np.zeros(size // 2 + 1, np.uint8)
        """The terms other than zero of each place's sum, the value before the first addition included."""
        self._warps = np.full(size // 2 + 1, -1, np.int32)
        """The last warp that added to each place; -1 for none, -2 for several."""

    def add(self, offsets: Lanes, warps: Lanes, old: Any, added: Any, kind: str) -> bool:
        """Records that lanes add the values `added`, one after another, to the values `old` at byte `offsets`.

        Returns whether some sum would have other bits in another order: it has three terms or more, warps that differ
        added them, and this addition was rounded."""
        places, inverse, counts = np.unique(offsets >> 1, return_inverse=True, return_counts=True)
        is_first = np.zeros(len(offsets), np.bool_)
        is_first[np.unique(inverse, return_index=True)[1]] = True
        old_values, added_values = _values(old, kind), _values(added, kind)
        is_zero = (old_values == 0).all(axis=0)
        begins = np.zeros(len(places), np.bool_)
        begins[inverse[is_first]] = is_zero[is_first]  # a sum begins: whatever was there before is gone
        terms = np.where(begins, 0, np.maximum(self._terms[places], 1)) + counts
        lowest, highest = np.full(len(places), np.iinfo(np.int64).max), np.full(len(places), -1)
        np.minimum.at(lowest, inverse, warps)
        np.maximum.at(highest, inverse, warps)
        known = np.where(begins, -1, self._warps[places])
        is_mixed = (lowest != highest) | ((known != -1) & (known != lowest))
        self._terms[places] = np.minimum(terms, MOST_TERMS)
        self._warps[places] = np.where(is_mixed, -2, lowest)
        is_open = (terms >= MOST_TERMS) & is_mixed
        return bool(is_open.any() and (_rounded(old_values, added_values, kind) & is_open[inverse]).any())


def _values(codes: Any, kind: str) -> npt.NDArray[np.float64]:
    """Returns the values of lanes as fp64: `[1, lanes]`, or `[2, lanes]` for pairs."""
    if "f16" in kind:
        halves = np.ascontiguousarray(codes).view(np.uint16).reshape(len(codes), -1).T
        values = decode(halves, kind.removesuffix("x2"))
    else:
        values = codes.view(np.float32 if kind == "f32" else np.float64)[None]
    as_fp64: npt.NDArray[np.float64] = values.astype(np.float64)
    return as_fp64


def _rounded(old: Any, added: Any, kind: str) -> npt.NDArray[np.bool_]:
    """Tells for each lane whether the sum of two values is not exact in the type `kind`."""
    total, error = sum_and_error(old, added)
    is_exact = (error == 0) & _fits(total, kind)
    rounded: npt.NDArray[np.bool_] = (~is_exact & np.isfinite(total)).any(axis=0)
    return rounded


def _fits(values: Any, kind: str) -> Any:
    """Tells which fp64 values the type `kind` holds exactly."""
    mantissa_bits = {"f16": 11, "bf16": 8, "f32": 24, "f64": 53}[kind.removesuffix("x2")]
    fraction = np.frexp(values)[0] * 2.0**mantissa_bits
    return fraction == np.rint(fraction)
