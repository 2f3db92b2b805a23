"""Implements the kernel `naive`: the host reads the offsets and calls one matrix product per expert with rows."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from rooflab.kernels._torch_cpu import padded_rows_refused
from rooflab.kernels.launcher import kernel


@kernel(backend="torch", unsupported=padded_rows_refused)
def naive(a: Tensor, b: Tensor, offsets: Tensor, out: Tensor) -> None:
    """Multiplies each expert's rows by the expert's matrix with `torch.mm`, one expert after another."""
    row_bounds = offsets.tolist()
    for expert, (first_row, end_row) in enumerate(itertools.pairwise(row_bounds)):
        if end_row > first_row:
            out[first_row:end_row] = torch.mm(a[first_row:end_row], b[expert])
