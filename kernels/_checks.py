"""Checks of arguments that all launchers share; the error names the argument, what was expected and what came."""

from __future__ import annotations

import os

import torch

from rooflab.reference import rules
from rooflab.reference.rules import check_dtype, check_shape

CHECK_VALUES = os.environ.get("ROOFLAB_CHECK_VALUES") == "1"
"""Whether launchers check the values in page tables, slots, positions, offsets and token ids.  A check waits for the
device, so it is off by default; it does not work while a CUDA graph is captured."""


def checks_values(tensor: torch.Tensor) -> bool:
    """Whether a launcher reads the values of `tensor`, to check them."""
    return CHECK_VALUES and not tensor.is_meta


def checks_bounds(bounds: torch.Tensor) -> bool:
    """Whether a launcher reads lengths, offsets or a table, to check them: always on a CPU, where it costs little and a
    wrong one may end the process."""
    return bounds.device.type == "cpu" or checks_values(bounds)


def check_values(name: str, tensor: torch.Tensor, least: int, most: int) -> None:
    """With `CHECK_VALUES`: raises `ValueError` unless all integers lie between `least` and `most`."""
    if checks_values(tensor):
        rules.check_values(name, tensor, least, most)


def check_slots(slot_mapping: torch.Tensor, slots: int) -> None:
    """With `CHECK_VALUES`: raises `ValueError` unless each token has a slot of its own below `slots`, or -1."""
    if checks_values(slot_mapping):
        rules.check_slots(slot_mapping, slots)


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
