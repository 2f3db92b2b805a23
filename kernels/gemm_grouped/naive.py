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
    bounds = offsets.tolist()
    for expert, (start, end) in enumerate(itertools.pairwise(bounds)):
        if end > start:
            out[start:end] = torch.mm(a[start:end], b[expert])
