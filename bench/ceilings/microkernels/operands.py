"""Random operands of the tensor-core microkernels, and the product that their accumulators must hold."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

STEP_BYTES = 32
"""K of one tensor-core instruction, in bytes, whatever the dtype."""


class Dtype(NamedTuple):
    """An operand dtype."""

    ptx: str
    bytes: int
    tolerance: float
    """Allowed error of a sum of accumulators, over its root mean square."""


DTYPES = {
    "bf16": Dtype("bf16", 2, 0.005),
    "fp16": Dtype("f16", 2, 0.005),
    "tf32": Dtype("tf32", 4, 0.005),
    # Hopper's tensor cores keep about 14 bits of an fp8 product's sum.
    "fp8_e4m3": Dtype("e4m3", 1, 0.05),
}
"""With fp32 accumulators."""


@dataclass(frozen=True)
class Operands:
    """a: (M, K) and b: (N, K), both K-major, normally distributed, exact in their dtype."""

    a: torch.Tensor
    b: torch.Tensor

    @classmethod
    def random(cls, dtype: str, m: int, n: int, k_bytes: int, device: torch.device) -> Operands:
        """K is `k_bytes` over the dtype's size."""
        generator = torch.Generator(device).manual_seed(0)
        k = k_bytes // DTYPES[dtype].bytes
        return cls(*(_random(dtype, rows, k, generator, device) for rows in (m, n)))

    def product(self) -> torch.Tensor:
        """a b^T in fp64: (M, N)."""
        return self.a.double() @ self.b.double().T


def _random(dtype: str, rows: int, k: int, generator: torch.Generator, device: torch.device) -> torch.Tensor:
    values = torch.randn(rows, k, generator=generator, device=device)
    if dtype == "tf32":  # 10 bits of mantissa: the other 13 are what the tensor cores do not read
        return (values.view(torch.int32) & ~0x1FFF).view(torch.float32)
    kinds = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8_e4m3": torch.float8_e4m3fn}
    return values.to(kinds[dtype])


def per_thread(product: torch.Tensor) -> torch.Tensor:
    """Sums over the elements of a 16 x (a multiple of 8) tile that each of a warp's 32 threads accumulates.

    Thread t holds rows t / 4 and 8 further, and columns 2 (t % 4) and one further of every 8 (PTX ISA, "Register
    Fragments" of wgmma and of mma.m16n8).  `product`: (..., 16, n); returns (..., 32).
    """
    *outer, _, n = product.shape
    split = product.reshape(*outer, 2, 8, n // 8, 4, 2)
    return split.sum(dim=(-5, -3, -1)).reshape(*outer, 32)
