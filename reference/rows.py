"""What ops over rows share: where the planted columns are, the error of a sum, and outputs in eight bits.

A quantised output has one scale for each row (token): the largest magnitude of the row over the largest value of the
dtype, or 1 for a row of zeros.  The kernel quantises its fp32 value, which was not rounded to 16 bits before.
"""

from __future__ import annotations

import torch

from rooflab.reference.quantization import INT8_MAX
from rooflab.reference.spec import FP32_ROUNDOFF, Inputs, Outputs, Scheme

ACCUMULATION_FACTOR = 4.0
"""A sum of n terms in fp32 errs by about sqrt(n) roundoffs; times this for an unlucky walk."""
# The edges of 8- and 16-byte vectors, of a warp's span, and of power-of-two blocks.
PLANTED_COLUMNS = (0, 7, 8, 31, 32, 127, 128, 511, 512, 1023, 1024)
FP8_MAX = 448.0
"""The largest value of e4m3."""
LARGEST = {"int8": float(INT8_MAX), "fp8_e4m3": FP8_MAX}
"""The value that the largest magnitude of a row becomes, by the name of the dtype."""


QUANTIZED = {torch.int8: "int8", torch.float8_e4m3fn: "fp8_e4m3"}


def planted_columns(width: int) -> list[int]:
    """Columns at edges, as far as rows reach, and the last one."""
    return sorted({column for column in (*PLANTED_COLUMNS, width - 1) if 0 <= column < width})


def quantizing(scheme: Scheme) -> Inputs:
    """The argument `quantize` of a scheme with outputs in eight bits; nothing for other schemes."""
    return {"quantize": QUANTIZED[scheme.output]} if scheme.output in QUANTIZED else {}


def quantized_rows(values: torch.Tensor, dtype: str | None) -> Outputs:
    """(values,) for None; else the values in units of their row's scale, not rounded, and the scales (T,), in fp64.

    values: (T, N) fp64.
    """
    if dtype is None:
        return (values,)
    largest = values.abs().amax(dim=1) if values.shape[1] else values.new_zeros(values.shape[0])
    scale = torch.where(largest > 0, largest / LARGEST[dtype], 1.0)
    return values / scale[:, None], scale


def quantized_limits(oracle: Outputs, error: torch.Tensor, dtype: str) -> Outputs:
    """The allowed errors of codes (T, N) and scales (T,), the `oracle`; `error` is that of the values before, (T, N).

    A code is within half a step, which for e4m3 depends on its size, and the error of value, scale and division.
    """
    codes, scale = oracle
    row_error = error.amax(dim=1) if error.shape[1] else torch.zeros_like(scale)
    scale_error = row_error / LARGEST[dtype] + 2.0 * FP32_ROUNDOFF * scale
    before = error / scale[:, None] + codes.abs() * (scale_error / scale + 2.0 * FP32_ROUNDOFF)[:, None]
    if dtype == "int8":
        return before + 0.5, scale_error
    # Three bits behind the leading one; below 2**-6 the steps stay 2**-9.
    exponent = torch.frexp((codes.abs() + before).clamp(min=2.0**-9)).exponent.clamp(min=-5)
    return before + torch.ldexp(torch.full_like(codes, 2.0**-5), exponent), scale_error
