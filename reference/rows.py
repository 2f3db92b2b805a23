"""Provides helpers for row-wise ops: columns of adversarial inputs, allowed errors, and outputs in eight bits.

A quantised output has one scale per row (token): the row's largest magnitude divided by the largest value of the dtype.
A scale is at least 2**-126. A row of zeros has the scale 1. A kernel quantises its fp32 value, without rounding it to
16 bits first.
"""

from __future__ import annotations

import torch

from rooflab.reference.contract import CallArguments, Dims, Result
from rooflab.reference.quantization import INT8_MAX
from rooflab.reference.spec import DTYPE_NAMES, FP32_ROUNDOFF, Inputs, Outputs, Scheme

ACCUMULATION_FACTOR = 4.0
"""The factor for an unlucky walk: a sum of n terms in fp32 errs by about sqrt(n) roundoffs."""
# The edges of 8- and 16-byte vectors, of a warp's span, and of power-of-two blocks.
PLANTED_COLUMNS = (0, 7, 8, 31, 32, 127, 128, 511, 512, 1023, 1024)
FP8_MAX = 448.0
"""The largest value of e4m3."""
MAX_CODES = {"int8": float(INT8_MAX), "fp8_e4m3": FP8_MAX}
"""The value to which the largest magnitude of a row is scaled, by the name of the dtype."""
MIN_SCALE = 2.0**-126
"""The least normal fp32 number: a scale below it loses bits, and 1 / scale overflows."""


QUANTIZE_NAMES = {torch.int8: "int8", torch.float8_e4m3fn: "fp8_e4m3"}
CODE_DTYPES = {name: dtype for dtype, name in QUANTIZE_NAMES.items()}


def row_results(shape: str, **more: Result) -> dict[str, Result]:
    """Describes the results of a row-wise op. `out` has the dtype of x, or of the codes if it is quantised. A quantised
    `out` comes with `scale`, one fp32 number per row. `more` describes further results of the op."""

    def dtype(arguments: CallArguments) -> torch.dtype:
        quant_format = arguments.get("quantize")
        return arguments["x"].dtype if quant_format is None else CODE_DTYPES[quant_format]

    return {"out": Result(shape, dtype), **more, "scale": Result("T", torch.float32, when="quantize")}


def row_rules(arguments: CallArguments, dims: Dims) -> None:
    """Raises `ValueError` if the argument `quantize` has an unknown value."""
    check_quantize(arguments.get("quantize"))


def row_scheme(arguments: CallArguments) -> str:
    """Returns the scheme name of a call: the dtype of x, or `out_int8` or `out_fp8` for a quantised 16-bit x."""
    quant_format, dtype = arguments.get("quantize"), arguments["x"].dtype
    if quant_format is None or dtype == torch.float32:
        return DTYPE_NAMES[dtype]
    return "out_int8" if quant_format == "int8" else "out_fp8"


def planted_columns(width: int) -> list[int]:
    """Returns column indices for adversarial inputs: the tile edges below `width`, and the last column."""
    return sorted({column for column in (*PLANTED_COLUMNS, width - 1) if 0 <= column < width})


def magnitudes(dtype: torch.dtype, terms: int) -> list[tuple[str, float]]:
    """Returns (label, magnitude) pairs for test inputs, from very small to very large. Some of their squares overflow
    or underflow in `dtype`. But an fp32 sum of `terms` squares never overflows."""
    dtype_info = torch.finfo(dtype)
    max_size = min(0.9 * dtype_info.max, (0.2 * torch.finfo(torch.float32).max / max(terms, 1)) ** 0.5)
    all_sizes = {"300": 300.0, "10,000": 1e4, "the largest": max_size, "the least": 4.0 * dtype_info.smallest_normal}
    return [(f"magnitudes of {size_label}", size) for size_label, size in all_sizes.items()]


def of_size(x: torch.Tensor, size: float) -> torch.Tensor:
    """Returns values with magnitudes between `size` / 2 and `size`, and with the signs of x."""
    size_factors = 0.5 + 0.5 * x.double().abs() / x.double().abs().amax().clamp(min=1e-30) if x.numel() else x.double()
    return (torch.where(x.double() < 0, -size_factors, size_factors) * size).to(x.dtype)


def quantizing(scheme: Scheme) -> Inputs:
    """Returns a dict with the argument `quantize` if the output has 8 bits, else an empty dict."""
    return {"quantize": QUANTIZE_NAMES[scheme.output]} if scheme.output in QUANTIZE_NAMES else {}


def check_quantize(quantize: str | None) -> None:
    """Raises `ValueError` unless `quantize` is None, "int8" or "fp8_e4m3"."""
    if quantize is not None and quantize not in MAX_CODES:
        raise ValueError(f"quantize: expected None, 'int8' or 'fp8_e4m3', got {quantize!r}")


def quantized_rows(values: torch.Tensor, dtype: str | None) -> Outputs:
    """Returns (values,) if `dtype` is None. Else returns values / scale, unrounded, and the scale of each row.

    values: (T, N) fp64; the scales are (T,) fp64."""
    check_quantize(dtype)
    if dtype is None:
        return (values,)
    row_max = values.abs().amax(dim=1) if values.shape[1] else values.new_zeros(values.shape[0])
    row_scales = torch.where(row_max == 0, 1.0, (row_max / MAX_CODES[dtype]).clamp(min=MIN_SCALE))  # NaN stays
    return values / row_scales[:, None], row_scales


def quantized_limits(oracle: Outputs, error: torch.Tensor, dtype: str) -> Outputs:
    """Returns the allowed errors of the codes (T, N) and of the scales (T,).

    `oracle` holds the right codes and scales. `error` (T, N) holds the allowed errors of the values before
    quantisation. A code may differ by half a step, plus the errors of value, scale and division. A row with only values
    near zero may be quantised as a row of zeros."""
    codes, row_scales = oracle
    row_error = error.amax(dim=1) if error.shape[1] else torch.zeros_like(row_scales)
    scale_error = row_error / MAX_CODES[dtype] + 2.0 * FP32_ROUNDOFF * row_scales
    row_max = row_scales * (codes.abs().amax(dim=1) if codes.shape[1] else 0.0)
    near_zero_rows = (row_max > 0) & (row_max <= row_error + 2.0**-126)
    scale_error = scale_error.clamp(min=near_zero_rows.double())
    code_error = error / row_scales[:, None] + codes.abs() * (scale_error / row_scales + 2.0 * FP32_ROUNDOFF)[:, None]
    code_error = code_error.clamp(min=2.0 * MAX_CODES[dtype] * near_zero_rows[:, None].double())
    if dtype == "int8":
        return code_error + 0.5, scale_error
    # Three bits behind the leading bit; below 2**-6 the steps stay 2**-9.
    code_exponent = torch.frexp((codes.abs() + code_error).clamp(min=2.0**-9)).exponent.clamp(min=-5)
    return code_error + torch.ldexp(torch.full_like(codes, 2.0**-5), code_exponent), scale_error
