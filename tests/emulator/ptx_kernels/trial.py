"""The result of a case of the corpus: a launch, what it wrote, and what it should have written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
    "int8": torch.int8,
}


@dataclass(frozen=True)
class Trial:
    launch: Callable[[], object]
    got: Sequence[torch.Tensor]
    """Tensors that the launch writes."""
    wanted: Sequence[torch.Tensor]
    """The same, computed in float64 or in integers."""
    relative: float = 0.0
    """Error that is allowed, of the largest number wanted; none where the numbers are small integers."""

    def error(self) -> float:
        """The largest error of the largest number wanted; NaN where a number is."""
        worst = 0.0
        for got, wanted in zip(self.got, self.wanted, strict=True):
            assert got.shape == wanted.shape, f"{tuple(got.shape)} is not {tuple(wanted.shape)}"
            apart = (got.double() - wanted.double()).abs().max().item()
            largest = wanted.double().abs().max().item() or 1.0
            worst = max(worst, apart / largest) if apart == apart else apart
        return worst


def whole(shape: Sequence[int], seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Random integers from -8 to 8, which every format keeps exactly and whose short sums fp32 keeps exactly."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-8, 9, tuple(shape), generator=generator).to(dtype)


def normal(shape: Sequence[int], seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Random numbers of the standard normal distribution."""
    return torch.randn(tuple(shape), generator=torch.Generator().manual_seed(seed)).to(dtype)


def blank(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A tensor that must be written throughout: NaN, or a number that nothing yields."""
    return torch.full(shape, float("nan") if dtype.is_floating_point else 77, dtype=dtype)


def operands(M: int, N: int, K: int, trans: str, dtype: str, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A and B as they lie in memory: `trans` has a letter for each, T where its first dimension is the second of the
    product's operand."""
    kind = DTYPES[dtype]
    a = whole((K, M) if trans[0] == "T" else (M, K), seed, kind)
    b = whole((N, K) if trans[1] == "T" else (K, N), seed + 1, kind)
    return a, b


def product(a: torch.Tensor, b: torch.Tensor, trans: str) -> torch.Tensor:
    """The product of `operands` in float64."""
    left, right = a.double(), b.double()
    return (left.T if trans[0] == "T" else left) @ (right.T if trans[1] == "T" else right)
