"""Checks of arguments that all launchers share; the error names the argument, what was expected and what came."""

from __future__ import annotations

import os

import torch

CHECK_VALUES = os.environ.get("ROOFLAB_CHECK_VALUES") == "1"
"""Whether launchers check the values in page tables, slots, positions and offsets.  A check waits for the device, so it
is off by default; it does not work while a CUDA graph is captured."""


def check_shape(name: str, tensor: torch.Tensor, *shape: int | None) -> None:
    """Raises `ValueError` unless `tensor` has `shape`; None stands for any size."""
    sizes = tensor.shape
    if sizes == shape:  # the usual case
        return
    if len(sizes) == len(shape):
        for wanted, size in zip(shape, sizes, strict=True):  # three times as fast as `any` of a generator
            if wanted is not None and wanted != size:
                break
        else:
            return
    text = ", ".join("*" if size is None else str(size) for size in shape)
    raise ValueError(f"{name}: expected shape ({text}), got {tuple(sizes)}")


def check_values(name: str, tensor: torch.Tensor, least: int, most: int) -> None:
    """With `CHECK_VALUES`: raises `ValueError` unless all integers lie between `least` and `most`."""
    if CHECK_VALUES and tensor.numel() and not tensor.is_meta:
        values = [int(value) for value in tensor.aminmax()]
        if values[0] < least or values[1] > most:
            raise ValueError(f"{name}: expected values from {least} to {most}, got {values[0]} to {values[1]}")


def check_dtype(name: str, tensor: torch.Tensor, *dtypes: torch.dtype) -> None:
    """Raises `ValueError` unless `tensor` has one of `dtypes`."""
    if tensor.dtype not in dtypes:
        raise ValueError(f"{name}: expected {' or '.join(str(dtype) for dtype in dtypes)}, got {tensor.dtype}")


def check_float(name: str, tensor: torch.Tensor) -> None:
    """Raises `ValueError` unless `tensor` is fp32, fp16 or bf16."""
    check_dtype(name, tensor, torch.float32, torch.float16, torch.bfloat16)


def check_last_dim_contiguous(name: str, tensor: torch.Tensor) -> None:
    """Raises `ValueError` unless the last dimension has stride 1; a launcher never makes a silent copy."""
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1 and tensor.numel():
        raise ValueError(f"{name}: expected stride 1 in the last dimension, got {tensor.stride(-1)}")


def check_contiguous(name: str, tensor: torch.Tensor) -> None:
    """Raises `ValueError` unless `tensor` is contiguous."""
    if not tensor.is_contiguous():
        raise ValueError(f"{name}: expected a contiguous tensor, got strides {tensor.stride()}")


def output(
    out: torch.Tensor | None, shape: tuple[int, ...], like: torch.Tensor, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """`out`, or a new tensor on the device of `like`, an input, if it is None.

    Raises `ValueError` where `out` does not fit, or overlaps `like` without being it.
    """
    dtype = dtype or like.dtype
    if out is None:
        return torch.empty(shape, dtype=dtype, device=like.device)
    check_shape("out", out, *shape)
    check_dtype("out", out, dtype)
    check_last_dim_contiguous("out", out)
    if out.device != like.device:
        raise ValueError(f"out: expected a tensor on {like.device}, got {out.device}")
    same = out.data_ptr() == like.data_ptr() and out.shape == like.shape and out.stride() == like.stride()
    if not same and _end(like) > out.data_ptr() and _end(out) > like.data_ptr():
        raise ValueError("out: expected memory of its own, or the input itself, got memory that overlaps the input's")
    return out


def _end(tensor: torch.Tensor) -> int:
    """The address behind the last element; that of the first if there is none, or on `meta`."""
    if not tensor.numel() or tensor.is_meta:
        return tensor.data_ptr()
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr() + (last + 1) * tensor.element_size()
