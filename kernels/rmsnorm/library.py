"""torch's rms_norm."""

from __future__ import annotations

import torch

from rooflab.kernels.registry import Arguments, register
from rooflab.kernels.rmsnorm._operands import check_operands
from rooflab.reference.spec import nbytes
from rooflab.roofline.model import Traffic


def traffic(inputs: Arguments) -> Traffic:
    """One fused kernel, as on CUDA; on the CPU torch runs several steps."""
    x = inputs.x
    return Traffic(read_bytes=nbytes(x, inputs.weight), write_bytes=nbytes(x))


@register(op="rmsnorm", name="library", role="library", backend="torch", traffic=traffic)
def rmsnorm(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """x / rms(x) * weight with `torch.nn.functional.rms_norm`, which takes no `out`.

    x: (T, H); weight: (H,); returns (T, H).  Raises `ValueError` on wrong shapes or dtypes.
    """
    check_operands(x, weight)
    return torch.nn.functional.rms_norm(x, weight.shape, weight, eps)
