"""What the tiled Triton kernels of gemm share: the traffic, and the constants of a launch."""

from __future__ import annotations

from typing import Any

from rooflab.kernels.gemm._operands import panels_traffic
from rooflab.reference.spec import Arguments
from rooflab.roofline.model import Traffic


def traffic(inputs: Arguments) -> Traffic:
    """a once, b once per group of row panels, without reuse from L2."""
    return panels_traffic(inputs, inputs.config.block_m * inputs.config.group_m)


def constants(of: Arguments) -> dict[str, Any]:
    """What a launch compiles into the device code."""
    has = {"HAS_BIAS": of.bias is not None, "HAS_RESIDUAL": of.residual is not None}
    return {**has, "PRECISION": of.precision, **of.config.launch_arguments}
