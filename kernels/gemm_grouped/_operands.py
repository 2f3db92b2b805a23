"""Checks of the operands of all gemm_grouped kernels; by default they read no offsets on a GPU."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from rooflab.kernels._checks import check_contiguous, check_float, checks_bounds
from rooflab.reference.gemm_grouped import check_shapes
from rooflab.reference.rules import check_dtype, check_offsets


def check_operands(a: torch.Tensor, b: torch.Tensor, offsets: torch.Tensor) -> tuple[int, int, int, int]:
    """T, E, N and K.

    Raises `ValueError` unless a is (T, K) and b (E, K, N) of one float dtype, E > 0 if T > 0, and offsets (E + 1,)
    int32, contiguous and on a's device.  On a CPU, and with `CHECK_VALUES`, they must go from 0 to T and never fall.
    """
    check_shapes(a, b, offsets)
    check_float("a", a)
    check_dtype("b", b, a.dtype)
    check_dtype("offsets", offsets, torch.int32)
    check_contiguous("offsets", offsets)
    if offsets.device != a.device and a.device.type != "meta":
        raise ValueError(f"offsets: expected a tensor on {a.device}, got {offsets.device}")
    if checks_bounds(offsets):
        check_offsets("offsets", offsets, len(a))
    (T, K), (E, _, N) = a.shape, b.shape
    return T, E, N, K


def group_rows(offsets: torch.Tensor) -> Iterator[int]:
    """Rows of each expert that has rows; waits for the device, so only traffic models use it, never a launch."""
    bounds = offsets.tolist()
    return (end - start for start, end in zip(bounds[:-1], bounds[1:], strict=True) if end > start)
