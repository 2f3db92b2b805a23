"""The kernel `native`, in C++ for the CPU, converts codes to fp32 as it loads them.  It improves on `packed`.

The codes are stored in panels of 32 columns.  A scale multiplies the sum of its column, so no weight is rounded.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rooflab.kernels.gemm import native as native_gemm
from rooflab.kernels.gemm._operands import along_k
from rooflab.kernels.gemm.native import Panels
from rooflab.kernels.launcher import kernel
from rooflab.reference.rules import check_dtype
from rooflab.reference.spec import Arguments, nbytes
from rooflab.roofline.model import Traffic


def pack(b: torch.Tensor, scale: torch.Tensor) -> Panels:
    """Packs int8 codes (K, N) in panels of 32 columns, with fp32 scales (N,).  Raises `ValueError` on other inputs."""
    check_dtype("b", b, torch.int8)
    return replace(native_gemm.pack(b), scales=scale.float().contiguous())


def traffic(inputs: Arguments) -> Traffic:
    """Counts the bytes of every operand once.  The weight was packed at load, so packing does not count."""
    a, (K, N) = inputs.a, inputs.b.shape
    return Traffic(nbytes(a, inputs.scale, inputs.bias) + K * N, len(a) * N * a.element_size())


@kernel(
    backend="cpp",
    devices=("cpu",),
    prepare=pack,
    packed=Panels,
    bind=native_gemm.shape,
    traffic=traffic,
    holds=along_k("a"),
)
def native(a: Tensor, b: Panels, scale: Tensor, bias: Tensor | None, c: Tensor, *, bound: Any) -> None:
    """Computes `a @ (scale * b) + bias` in fp32, rounded once.  `b` is from `pack` and contains the scales."""
    native_gemm.product(a, b, bias, c, bound)
