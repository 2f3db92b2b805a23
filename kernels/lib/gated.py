"""The rung `fused` of silu_and_mul and gelu_and_mul: configs, device code, launch."""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from rooflab.kernels._pdl import pdl_arguments
from rooflab.kernels._sizes import cdiv
from rooflab.kernels.tuning import BF16, Defaults, Footprint, LaunchConfig, Tuning, space
from rooflab.reference.spec import Case, Scheme

ADDRESS_REGISTERS = 16
"""For pointers and masks, in addition to gate and up."""


@dataclass(frozen=True)
class Config(LaunchConfig):
    """One way to launch the kernel."""

    block_i: int
    """Columns per program."""
    num_warps: int


def footprint(config: Config, case: Case, scheme: Scheme = BF16) -> Footprint:
    """gate and up in fp32 registers."""
    threads = 32 * config.num_warps
    ctas = int(case["T"]) * cdiv(int(case["I"]), config.block_i)
    return Footprint(threads, cdiv(2 * config.block_i, threads) + ADDRESS_REGISTERS, 0, ctas)


DEFAULTS = Defaults((*(({"I": 2**n}, Config(2**n, 4)) for n in range(10)), ({}, Config(1024, 4))))
"""Eight columns for each of 128 threads: one 16-byte load of gate and one of up in bf16."""
CONFIGS = space(Config, block_i=(256, 512, 1024, 2048, 4096), num_warps=(1, 2, 4, 8, 16))
TUNING = Tuning(Config, CONFIGS, DEFAULTS, footprint)


@triton.jit
def gated(x_ptr, out_ptr, I, stride_x, stride_out, GELU: tl.constexpr, BLOCK_I: tl.constexpr, PDL: tl.constexpr):
    # row is int64, because row * stride passes 2**31 from T * 2 I = 2**31 on.
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK_I + tl.arange(0, BLOCK_I)
    inside = columns < I
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    gate = tl.load(x_ptr + row * stride_x + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * stride_x + I + columns, mask=inside, other=0.0).to(tl.float32)
    # exp(-|gate|) cannot overflow, and a small sigmoid keeps its relative precision.
    argument = gate
    if GELU:
        # gelu(g) = g sigmoid(2 u) is 1 + tanh(u) without its cancellation; 2 sqrt(2 / pi) = 1.5957691.
        argument = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    decay = tl.exp(-tl.abs(argument))
    sigmoid = tl.where(argument >= 0.0, 1.0, decay) / (1.0 + decay)
    out = gate * sigmoid * up
    tl.store(out_ptr + row * stride_out + columns, out.to(out_ptr.dtype.element_ty), mask=inside)


def launch(x: Tensor, out: Tensor, config: Config, gelu: bool) -> None:
    """Runs silu_and_mul or gelu_and_mul."""
    T, I = out.shape
    gated[(T, cdiv(I, config.block_i))](
        x, out, I, x.stride(0), out.stride(0), GELU=gelu, **config.launch_arguments, **pdl_arguments()
    )
