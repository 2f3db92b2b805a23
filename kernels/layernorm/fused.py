"""Over naive: one pass that keeps rows in registers between their mean, their variance and the result."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rooflab.kernels._checks import output
from rooflab.kernels._rows_triton import TUNING, Config, check_width, why_not_taken
from rooflab.kernels._sizes import cdiv, next_power_of_2
from rooflab.kernels.configs import default_config
from rooflab.kernels.layernorm._operands import check_operands, traffic
from rooflab.kernels.registry import register


@triton.jit
def _layernorm(
    x_ptr, weight_ptr, bias_ptr, out_ptr, T, H, stride_x, stride_out, eps, BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr
):
    # rows are int64, because row * stride passes 2**31 from T * H = 2**31 on.
    rows = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)[:, None]
    columns = tl.arange(0, BLOCK_H)[None, :]
    inside = (rows < T) & (columns < H)
    weight = tl.load(weight_ptr + columns, mask=columns < H, other=0.0).to(tl.float32)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + columns, mask=columns < H, other=0.0).to(tl.float32)
    # Without a barrier ptxas asks for the weight only when the row is there, which costs a trip to memory.
    tl.debug_barrier()
    x = tl.load(x_ptr + rows * stride_x + columns, mask=inside, other=0.0).to(tl.float32)
    # The mean of squares minus the squared mean would cancel where the mean is large.
    centred = tl.where(inside, x - (tl.sum(x, axis=1) / H)[:, None], 0.0)
    scale = tl.rsqrt(tl.sum(centred * centred, axis=1) / H + eps)
    out = centred * scale[:, None] * weight
    if bias_ptr is not None:
        out += bias
    tl.store(out_ptr + rows * stride_out + columns, out.to(out_ptr.dtype.element_ty), mask=inside)


@register(
    op="layernorm", name="fused", role="optimized", backend="triton",
    unsupported=lambda inputs: why_not_taken(inputs.x), traffic=traffic, tuning=TUNING,
)  # fmt: skip
def layernorm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    out: torch.Tensor | None = None,
    *,
    config: Config | None = None,
) -> torch.Tensor:
    """(x - mean) / sqrt(variance + eps) * weight + bias in fp32, whole rows per program, rounded once.

    x: (T, H), H <= 16384; weight, bias: (H,); returns (T, H).  Raises `ValueError` on wrong shapes or dtypes.
    """
    T, H = check_operands(x, weight, bias)
    check_width(x)
    out = output(out, (T, H), x)
    if out.numel():
        config = config or default_config("layernorm", "fused", x.dtype, x.device, T=T, H=H)
        _layernorm[(cdiv(T, config.block_t),)](
            x, weight, bias, out, T, H, x.stride(0), out.stride(0), eps,
            BLOCK_T=config.block_t, BLOCK_H=next_power_of_2(H), num_warps=config.num_warps,
        )  # fmt: skip
    return out
