"""Bounds the accesses to an allocation by the elements of the views that the launcher passed."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

Flags = npt.NDArray[np.bool_]


class ViewBounds:
    """Knows which bytes of an allocation of `size` bytes at the address `base` belong to an element of a view."""

    def __init__(self, base: int, size: int) -> None:
        self._base = base
        self._views: list[tuple[str, torch.Tensor]] = []
        self._inside: Flags = np.zeros(size, np.bool_)

    def add(self, name: str, view: torch.Tensor) -> None:
        """Adds the elements of `view`."""
        self._views.append((name, view))
        mark(self._inside, self._base, view)

    def outside(self, addresses: Any, width: int) -> tuple[int, str] | None:
        """Returns the address of an access of `width` bytes with a byte that belongs to no view, and a sentence about
        it.  Returns None if there is no such access."""
        starts = np.atleast_1d(addresses).astype(np.int64) - self._base
        is_inside = np.logical_and.reduce([self._inside[starts + index] for index in range(width)])
        if is_inside.all():
            return None
        start = int(starts[~is_inside][0])
        reaches = []
        for _, view in self._views:
            inside = mark(np.zeros_like(self._inside), self._base, view)
            reaches.append(max(_distance(inside, start + index) for index in range(width)))
        reach, (name, view) = min(zip(reaches, self._views, strict=True), key=lambda pair: pair[0])
        text = (
            f"{width} bytes begin {start + self._base - view.data_ptr()} bytes behind the first element of {name}, and"
        )
        text += f" reach {reach} bytes out of the view of shape {list(view.shape)} and strides {list(view.stride())}"
        return start + self._base, text


def mark(flags: Flags, base: int, tensor: torch.Tensor) -> Flags:
    """Sets the flags of the bytes of a tensor's elements, and returns `flags`, which begin at the address `base`."""
    size = tensor.element_size()
    shape, strides = (*tensor.shape, size), (*(stride * size for stride in tensor.stride()), 1)
    np.lib.stride_tricks.as_strided(flags[tensor.data_ptr() - base :], shape, strides)[...] = True
    return flags


def _distance(inside: Flags, place: int) -> int:
    """Returns how many bytes lie from `place` to the nearest flag that is set; all of them if none is."""
    sides = (inside[place::-1], inside[place:])
    return min((int(side.argmax()) for side in sides if side.any()), default=len(inside))
