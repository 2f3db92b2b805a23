"""torch's rms_norm; with `round_first` or an offset a few calls more, as its users write them."""

from __future__ import annotations

import torch
from torch import Tensor

from rooflab.kernels._traffic import steps
from rooflab.kernels.launcher import kernel
from rooflab.kernels.rmsnorm import _traffic
from rooflab.reference.spec import Arguments
from rooflab.roofline.model import Traffic


def call(
    x: torch.Tensor, weight: torch.Tensor, eps: float, weight_offset: float = 0.0, round_first: bool = False
) -> torch.Tensor:
    """The norm of x (T, H), with as few calls of torch as the options allow."""
    if not weight_offset and not round_first:
        return torch.nn.functional.rms_norm(x, weight.shape, weight, eps)
    if round_first and not weight_offset:
        return torch.nn.functional.rms_norm(x, weight.shape, None, eps) * weight
    normed = torch.nn.functional.rms_norm(x.float(), weight.shape, None, eps)
    normed = normed.to(x.dtype) if round_first else normed
    return (normed * (weight.float() + weight_offset)).to(x.dtype)


def traffic(inputs: Arguments) -> Traffic:
    """One fused kernel, as on CUDA, and a pass for each further call; on the CPU torch runs several steps."""
    once, size, full = _traffic.traffic(inputs), inputs.x.numel() * inputs.x.element_size(), 4 * inputs.x.numel()
    if not inputs.weight_offset:
        more = [(size, size)] if inputs.round_first else []
        return steps((once.read_bytes, once.write_bytes), *more)
    rounded = [(full, size)] if inputs.round_first else []
    return steps((size, full), (full, full), *rounded, (full, full), (full, size))


@kernel(backend="torch", traffic=traffic)
def library(x: Tensor, weight: Tensor, *, eps: float, weight_offset: float, round_first: bool) -> Tensor:
    """x / rms(x) * (weight + weight_offset) with `torch.nn.functional.rms_norm`, which takes no `out`."""
    return call(x, weight, eps, weight_offset, round_first)
