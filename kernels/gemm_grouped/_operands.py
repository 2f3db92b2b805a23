"""Checks of the operands of all gemm_grouped kernels; they do not read the offsets, which are on the device."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from rooflab.kernels._checks import check_contiguous, check_dtype, check_float, check_shape


def check_operands(a: torch.Tensor, b: torch.Tensor, offsets: torch.Tensor) -> tuple[int, int, int, int]:
    """T, E, N and K.

    Raises `ValueError` unless a is (T, K) and b (E, K, N) of one float dtype, E > 0 if T > 0, and offsets (E + 1,)
    int32, contiguous and on a's device.
    """
    check_shape("a", a, None, None)
    T, K = a.shape
    check_shape("b", b, None, K, None)
    E, _, N = b.shape
    check_float("a", a)
    check_dtype("b", b, a.dtype)
    if T and not E:
        raise ValueError(f"b: expected an expert for the {T} rows of a, got none")
    check_shape("offsets", offsets, E + 1)
    check_dtype("offsets", offsets, torch.int32)
    check_contiguous("offsets", offsets)
    if offsets.device != a.device and a.device.type != "meta":
        raise ValueError(f"offsets: expected a tensor on {a.device}, got {offsets.device}")
    return T, E, N, K


def group_rows(offsets: torch.Tensor) -> Iterator[int]:
    """Rows of each expert that has rows; waits for the device, so only traffic models use it, never a launch."""
    bounds = offsets.tolist()
    return (end - start for start, end in zip(bounds[:-1], bounds[1:], strict=True) if end > start)
