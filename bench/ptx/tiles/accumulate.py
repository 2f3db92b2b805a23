"""How Hopper's tensor cores add up: the short sums of fp8, as an option beside sums in float32.

DeepSeek-V3 (arXiv 2412.19437, section 3.3.2) found that fp8 GEMM on H800 keeps about 14 bits: products are shifted
right to the largest exponent and cut.  MMA-Sim (arXiv 2511.10909) found, with bitwise agreement on an H100, this model:
the K products of one instruction and the accumulator are cut, towards zero, to a common grid of 2**-F times the power
of two of the largest exponent, and added exactly; the sum is cut to F bits of mantissa.  F is 13 for fp8 into f32.  The
exponent of a product is the sum of those of its factors, before it is normalised.  For the 16-bit types and tf32 that
paper gives F = 25 and a result of 23 bits.  None of it has been compared with a GPU here.
"""

from __future__ import annotations

import numpy as np

FP8_FRACTION_BITS = 13
FRACTION_BITS = 25
"""F for f16, bf16 and tf32."""
_LOWEST = {"e4m3": -6, "e5m2": -14, "f16": -14, "bf16": -126, "tf32": -126, "f32": -126}
_NONE = -(1 << 14)
_MANTISSA_BITS = 23


def truncated_wgmma(
    d: np.ndarray | None, a: np.ndarray, b: np.ndarray, a_type: str, b_type: str, d_type: str = "f32"
) -> np.ndarray:
    """A times the transpose of `b` plus `d` (None: nothing) in one instruction of Hopper, by the model above.

    `a` is (M, K), `b` (N, K), `d` (M, N), all float32; so is the result (M, N), for a `d_type` of f16 rounded to what
    f16 holds.  Where the plain sum is not finite, the result is that sum.  Raises `KeyError` on a type without a model.
    """
    bits = FP8_FRACTION_BITS if a_type in ("e4m3", "e5m2") else FRACTION_BITS
    old = np.zeros((a.shape[0], b.shape[0]), np.float32) if d is None else d
    a_exponents, b_exponents = _exponents(a, a_type), _exponents(b, b_type)
    top = np.maximum(_exponents(old, d_type), _LOWEST["f32"])
    for k in range(a.shape[1]):
        np.maximum(top, a_exponents[:, k, None] + b_exponents[None, :, k], out=top)
    grid = np.ldexp(1.0, bits - top)
    total = np.trunc(old.astype(np.float64) * grid)
    for k in range(a.shape[1]):
        total += np.trunc(a[:, k, None] * b[None, :, k] * grid)
    total /= grid
    found = total.astype(np.float16) if d_type == "f16" else _cut(total, min(bits, _MANTISSA_BITS))
    plain = np.matmul(a, b.T) + old
    return np.where(np.isfinite(plain), found.astype(np.float32), plain)


def _exponents(values: np.ndarray, element: str) -> np.ndarray:
    """Exponents (int32) of the significands in [1, 2) that a type gives to values; below all others for zero."""
    exponents = np.maximum(np.frexp(values)[1] - 1, _LOWEST[element])
    return np.where(values == 0, _NONE, exponents)


def _cut(values: np.ndarray, bits: int) -> np.ndarray:
    """`values` (float64) cut towards zero to `bits` of mantissa behind the leading one, in the range of float32."""
    exponents = np.maximum(np.frexp(values)[1] - 1, _LOWEST["f32"])
    grid = np.ldexp(1.0, bits - exponents)
    cut: np.ndarray = np.trunc(values * grid) / grid
    return cut
