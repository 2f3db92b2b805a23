"""Implements the kernel `native` in C++ for the CPU.  It calls no torch op, so that decode steps can be replayed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rooflab.kernels._native import built, sizes
from rooflab.kernels.launcher import kernel
from rooflab.reference.embedding import SPEC
from rooflab.reference.rules import check_values
from rooflab.reference.spec import Arguments

SOURCE = Path(__file__).with_suffix(".cpp")


def shape(of: Arguments) -> Any:
    """Returns the numbers that the C++ function gets: sizes, strides in bytes and the number of threads."""
    (V, H), item_bytes = of.weight.shape, of.weight.element_size()
    row_strides = (of.weight.stride(0) * item_bytes, of.out.stride(0) * item_bytes)
    return sizes(len(of.token_ids), V, H * item_bytes, *row_strides, torch.get_num_threads())


@kernel(
    backend="cpp",
    devices=("cpu",),
    traffic=SPEC.least,
    bind=shape,
    over="library",
    shows={"": '"index_select" in calls("library").names and calls("native").names.keys() <= {"empty", "empty_like"}'},
)
def native(token_ids: Tensor, weight: Tensor, out: Tensor, *, bound: Any) -> None:
    """Computes `weight[token_ids]`.  Raises `ValueError` if an id is not in the table."""
    if built(SOURCE, "pppp")(token_ids.data_ptr(), weight.data_ptr(), out.data_ptr(), bound):
        check_values("token_ids", token_ids, 0, len(weight) - 1)
