"""Checks arguments for references and kernels. An error names the argument, the expected value and the actual value.

A reference makes all checks. A launcher checks values only where it may read values (`kernels/_checks.py`).
"""

from __future__ import annotations

from itertools import pairwise

import torch


def check_shape(name: str, tensor: torch.Tensor, *shape: int | None) -> None:
    """Raises `ValueError` unless `tensor` has the given `shape`. A None in `shape` allows any size."""
    tensor_sizes = tensor.shape
    if tensor_sizes == shape:  # the usual case
        return
    if len(tensor_sizes) == len(shape):
        for expected_size, size in zip(shape, tensor_sizes, strict=True):  # three times as fast as `any` of a generator
            if expected_size is not None and expected_size != size:
                break
        else:
            return
    shape_text = ", ".join("*" if size is None else str(size) for size in shape)
    raise ValueError(f"{name}: expected shape ({shape_text}), got {tuple(tensor_sizes)}")


def check_dtype(name: str, tensor: torch.Tensor, *dtypes: torch.dtype) -> None:
    """Raises `ValueError` unless the dtype of `tensor` is one of `dtypes`."""
    if tensor.dtype not in dtypes:
        raise ValueError(f"{name}: expected {' or '.join(str(dtype) for dtype in dtypes)}, got {tensor.dtype}")


def check_values(name: str, tensor: torch.Tensor, least: int, most: int) -> None:
    """Raises `ValueError` unless all integers of `tensor` lie between `least` and `most`."""
    if tensor.numel():
        smallest_value, largest_value = (int(edge_value) for edge_value in tensor.aminmax())
        if smallest_value < least or largest_value > most:
            raise ValueError(f"{name}: expected values from {least} to {most}, got {smallest_value} to {largest_value}")


def check_slots(slot_mapping: torch.Tensor, slots: int) -> None:
    """Raises `ValueError` if a slot is not below `slots`, or if two tokens have the same slot. -1 means no slot."""
    check_values("slot_mapping", slot_mapping, -1, slots - 1)
    slot_ids, use_counts = torch.unique(slot_mapping[slot_mapping >= 0], return_counts=True)
    if bool((use_counts > 1).any()):
        raise ValueError(f"slot_mapping: expected each slot at most once, got {int(slot_ids[use_counts > 1][0])} again")


def check_offsets(name: str, offsets: torch.Tensor, end: int) -> None:
    """Raises `ValueError` unless the offsets go from 0 to `end` and never decrease."""
    offset_list = offsets.tolist()
    if (
        offset_list[0] != 0
        or offset_list[-1] != end
        or any(later_offset < earlier_offset for earlier_offset, later_offset in pairwise(offset_list))
    ):
        raise ValueError(f"{name}: expected offsets from 0 to {end} that never fall, got {offset_list}")
