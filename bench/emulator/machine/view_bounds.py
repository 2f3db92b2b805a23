"""Bounds the accesses to an allocation by the elements of the views that the launcher passed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Flags = npt.NDArray[np.bool_]


class _View(NamedTuple):
    name: str
    start: int
    """The byte of the allocation at which the first element begins."""
    shape: Sequence[int]
    strides: Sequence[int]
    """In elements."""
    element_bytes: int

    def mark(self, inside: Flags) -> Flags:
        """Sets the flags of the view's bytes in `inside`, which has one for each byte of the allocation."""
        bytes_of(inside[self.start :], self.shape, self.strides, self.element_bytes)[...] = True
        return inside


class ViewBounds:
    """Knows which bytes of an allocation of `size` bytes at the address `base` belong to an element of a view."""

    def __init__(self, base: int, size: int) -> None:
        self._base = base
        self._views: list[_View] = []
        self._inside: Flags = np.zeros(size, np.bool_)

    def add(self, name: str, address: int, shape: Sequence[int], strides: Sequence[int], element_bytes: int) -> None:
        """Adds the view at `address`.  `strides` are in elements."""
        self._views.append(_View(name, address - self._base, shape, strides, element_bytes))
        self._views[-1].mark(self._inside)

    def outside(self, addresses: Any, width: int) -> tuple[int, str] | None:
        """Returns the address of an access of `width` bytes with a byte that belongs to no view, and a sentence about
        it.  Returns None if there is no such access."""
        starts = np.atleast_1d(addresses).astype(np.int64) - self._base
        is_inside = np.logical_and.reduce([self._inside[starts + index] for index in range(width)])
        if is_inside.all():
            return None
        start = int(starts[~is_inside][0])
        reaches = [
            max(_distance(view.mark(np.zeros_like(self._inside)), start + index) for index in range(width))
            for view in self._views
        ]
        view, reach = min(zip(self._views, reaches, strict=True), key=lambda pair: pair[1])
        text = f"{width} bytes begin {start - view.start} bytes behind the first element of {view.name}, and reach"
        text += f" {reach} bytes out of the view of shape {list(view.shape)} and strides {list(view.strides)}"
        return start + self._base, text


def bytes_of(flags: Flags, shape: Sequence[int], strides: Sequence[int], element_bytes: int) -> Flags:
    """Returns the flags of a tensor's bytes: `[*shape, element_bytes]`.  `flags` has one for each byte from the first
    element on, and `strides` are in elements."""
    byte_strides = [stride * element_bytes for stride in strides]
    return np.lib.stride_tricks.as_strided(flags, (*shape, element_bytes), (*byte_strides, 1))


def _distance(inside: Flags, place: int) -> int:
    """Returns how many bytes lie from `place` to the nearest flag that is set; all of them if none is."""
    sides = (inside[place::-1], inside[place:])
    return min((int(side.argmax()) for side in sides if side.any()), default=len(inside))
