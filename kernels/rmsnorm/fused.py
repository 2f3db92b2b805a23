"""Over naive: one pass that keeps the row in registers between its sum of squares and its scaling."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from rooflab.kernels._checks import output
from rooflab.kernels.configs import default_config
from rooflab.kernels.registry import Arguments, register
from rooflab.kernels.rmsnorm._operands import check_operands
from rooflab.kernels.tuning import BF16, Footprint, Tuning
from rooflab.reference.spec import Case, Scheme, nbytes
from rooflab.roofline.model import Traffic

# 32 fp32 values per thread of 512; with twice as many ptxas spills in fp32.
MAX_HIDDEN = 16384
ADDRESS_REGISTERS = 16
"""For pointers, masks and the scale, in addition to the row."""


@dataclass(frozen=True)
class Config:
    """One way to launch the kernel."""

    num_warps: int


def configs(case: Case, scheme: Scheme = BF16) -> tuple[Config, ...]:
    """Every number of warps that a CTA can have."""
    return tuple(Config(num_warps) for num_warps in (1, 2, 4, 8, 16, 32))


def footprint(config: Config, case: Case, scheme: Scheme = BF16) -> Footprint:
    """The row in fp32 registers."""
    threads = 32 * config.num_warps
    row = int(triton.next_power_of_2(int(case["H"])))
    return Footprint(threads, triton.cdiv(row, threads) + ADDRESS_REGISTERS, 0, int(case["T"]))


def heuristic(case: Case, scheme: Scheme = BF16) -> Config:
    """Eight elements per thread (one 16-byte load in bf16), within 1 to 16 warps."""
    return Config(min(max(int(triton.next_power_of_2(int(case["H"]))) // (8 * 32), 1), 16))


@triton.jit
def _rmsnorm(x_ptr, weight_ptr, out_ptr, H, stride_x, stride_out, eps, BLOCK_H: tl.constexpr):
    # row is int64, because row * stride passes 2**31 from T * H = 2**31 on.
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK_H)
    inside = columns < H
    x = tl.load(x_ptr + row * stride_x + columns, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    # The masked lanes are 0, so they do not change the sum, and the divisor is H, not BLOCK_H.
    scale = tl.rsqrt(tl.sum(x * x, axis=0) / H + eps)
    out = x * scale * weight
    tl.store(out_ptr + row * stride_out + columns, out.to(out_ptr.dtype.element_ty), mask=inside)


def why_not_taken(x: torch.Tensor) -> str | None:
    """Why these rows do not fit in registers, or None."""
    hidden = x.shape[-1]
    return f"holds a row in registers, at most {MAX_HIDDEN} wide, got {hidden}" if hidden > MAX_HIDDEN else None


def traffic(inputs: Arguments) -> Traffic:
    """x is read and the result written; the weight comes from L2 after the first row."""
    x = inputs.x
    return Traffic(read_bytes=nbytes(x, inputs.weight), write_bytes=nbytes(x))


@register(
    op="rmsnorm", name="fused", role="optimized", backend="triton", unsupported=lambda inputs: why_not_taken(inputs.x),
    traffic=traffic, tuning=Tuning(Config, configs, heuristic, footprint),
)  # fmt: skip
def rmsnorm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    out: torch.Tensor | None = None,
    *,
    config: Config | None = None,
) -> torch.Tensor:
    """x / rms(x) * weight, one row per program, in fp32, rounded once.

    x: (T, H), H <= 16384; weight: (H,); returns (T, H).  Raises `ValueError` on wrong shapes or dtypes.
    """
    T, H = check_operands(x, weight)
    reason = why_not_taken(x)
    if reason:
        raise ValueError(f"x: {reason}")
    out = output(out, (T, H), x)
    if out.numel():
        config = config or default_config("rmsnorm", "fused", x.dtype, x.device, T=T, H=H)
        _rmsnorm[(T,)](
            x, weight, out, H, x.stride(0), out.stride(0), eps,
            BLOCK_H=triton.next_power_of_2(H), num_warps=config.num_warps,
        )  # fmt: skip
    return out
