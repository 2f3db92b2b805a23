"""Implements the kernel `library`: calls torch.nn.functional.embedding."""

from __future__ import annotations

import torch
from torch import Tensor

from rooflab.kernels.launcher import kernel
from rooflab.reference.embedding import SPEC


@kernel(backend="torch", traffic=SPEC.least)
def library(token_ids: Tensor, weight: Tensor, out: Tensor) -> None:
    """Computes `weight[token_ids]`.  For an id outside the table, torch raises `IndexError` on a CPU.  On CUDA an
    assertion of torch fails."""
    # Only torch's index_select takes an `out`; on axis 0 it equals embedding.
    torch.index_select(weight, 0, token_ids, out=out)
