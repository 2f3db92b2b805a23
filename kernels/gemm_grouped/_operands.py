"""Counts the memory traffic of gemm_grouped.  This needs the offsets of the experts' rows on the host."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch

from rooflab.kernels._sizes import cdiv
from rooflab.reference.spec import Arguments, nbytes
from rooflab.roofline.model import Traffic


def group_rows(offsets: torch.Tensor) -> Iterator[int]:
    """Yields the number of rows of each expert that has rows.  Waits for the device, so no launcher calls it."""
    row_bounds = offsets.tolist()
    return (end_row - first_row for first_row, end_row in itertools.pairwise(row_bounds) if end_row > first_row)


def traffic(inputs: Arguments) -> Traffic:
    """Returns the memory traffic of a launch.  `a`, the offsets and the output count once.  An expert's matrix counts
    once for each `block_m * group_m` rows of this expert."""
    a, b, row_offsets, config = inputs.a, inputs.b, inputs.offsets, inputs.config
    _, K, N = b.shape
    b_read_count = sum(cdiv(rows, config.block_m * config.group_m) for rows in group_rows(row_offsets))
    return Traffic(nbytes(a, row_offsets) + b_read_count * K * N * b.element_size(), a.shape[0] * N * a.element_size())
