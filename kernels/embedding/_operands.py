"""Checks of the operands of all embedding kernels, and their traffic."""

from __future__ import annotations

import torch

from rooflab.kernels._checks import check_float, check_last_dim_contiguous, check_values
from rooflab.kernels.registry import Arguments
from rooflab.reference.rules import check_dtype, check_shape
from rooflab.reference.spec import nbytes
from rooflab.roofline.model import Traffic


def check_operands(token_ids: torch.Tensor, weight: torch.Tensor) -> tuple[int, int, int]:
    """T, V and H.  Raises `ValueError` unless token_ids is (T,) int64 and weight (V, H) float with contiguous rows."""
    check_shape("token_ids", token_ids, None)
    check_dtype("token_ids", token_ids, torch.int64)
    check_last_dim_contiguous("token_ids", token_ids)
    check_shape("weight", weight, None, None)
    check_float("weight", weight)
    check_last_dim_contiguous("weight", weight)
    check_values("token_ids", token_ids, 0, len(weight) - 1)
    return token_ids.shape[0], *weight.shape


def traffic(inputs: Arguments) -> Traffic:
    """Each distinct row is read once (L2 serves repeats), and each token's row is written."""
    token_ids, weight = inputs.token_ids, inputs.weight
    row_bytes = weight.shape[1] * weight.element_size()
    return Traffic(
        read_bytes=nbytes(token_ids) + len(set(token_ids.tolist())) * row_bytes, write_bytes=len(token_ids) * row_bytes
    )
