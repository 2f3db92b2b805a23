"""Rounding a float64 to fewer bits once, in each of PTX's directions, and the modifiers `.ftz` and `.sat`.

Modes are PTX's: `rn` to nearest, ties to even; `rz` toward zero; `rm` toward minus infinity; `rp` toward plus infinity
(PTX ISA 8.7, sections "Rounding Modifiers" and "Floating Point Instructions").
"""

from __future__ import annotations

import numpy as np

from rooflab.bench.ptx.numbers.bits import UNSIGNED, Value, full, pick, some

ROUNDINGS = ("rn", "rz", "rm", "rp")
"""Rounding modes of float arithmetic."""
F32_NAN = np.uint32(0x7FFFFFFF).view(np.float32)
"""PTX's canonical NaN of float32."""
F64_NAN = np.uint64(0x7FFFFFFFFFFFFFFF).view(np.float64)
"""PTX's canonical NaN of float64."""
_TOWARD = {"rz": 0.0, "rm": -np.inf, "rp": np.inf}
_F32_SIGN, _F32_EXPONENT = np.uint32(0x80000000), np.uint32(0x7F800000)
_ZERO: dict[int, Value] = {4: np.float32(0), 8: np.float64(0)}
_ONE: dict[int, Value] = {4: np.float32(1), 8: np.float64(1)}


def check_rounding(rounding: str) -> None:
    """Raises `ValueError` on a rounding mode that float arithmetic does not have."""
    if rounding not in ROUNDINGS:
        raise ValueError(f"rounding: expected one of {', '.join(ROUNDINGS)}, got {rounding!r}")


def flush(x: Value) -> Value:
    """`.ftz`: float32 denormals become zeros of the same sign.  A float64 is returned as it is."""
    if x.itemsize != 4:
        return x
    bits = x.view(np.uint32)
    exponent = bits & _F32_EXPONENT
    if full(exponent):
        return x
    return pick(exponent != 0, bits, bits & _F32_SIGN).view(np.float32)


def saturate(x: Value) -> Value:
    """`.sat`: float32 or float64 clamped to [0, 1]; NaN and -0 become +0."""
    zero = _ZERO[x.itemsize]
    # NumPy leaves open which of two zeros it takes; their sum is +0.
    return np.fmin(np.fmax(x, zero), _ONE[x.itemsize]) + zero


def rectify(x: Value) -> Value:
    """`.relu`: float32 or float64 with what is negative, -0 included, made +0; NaN stays NaN."""
    zero = _ZERO[x.itemsize]
    return np.maximum(x, zero) + zero


def narrow(x: Value, dtype: np.dtype, rounding: str = "rn") -> Value:
    """A float rounded once to a NumPy float type of fewer bits; overflow as IEEE 754 has it for the mode.

    Raises `ValueError` on a mode that is unknown.
    """
    nearest = x.astype(dtype)
    if rounding == "rn":
        return nearest
    check_rounding(rounding)
    back = nearest.astype(x.dtype)
    if rounding == "rz":
        wrong = np.abs(back) > np.abs(x)
    else:
        wrong = back > x if rounding == "rm" else back < x
    return pick(wrong, np.nextafter(nearest, dtype.type(_TOWARD[rounding])), nearest)


def narrow_odd(x: Value) -> Value:
    """A float64 rounded to float32 so that a further rounding to at most 22 bits is as if it were the only one.

    What is inexact takes the neighbour with an odd last bit (Boldo and Melquiond 2008, "Emulation of a FMA and
    correctly rounded sums: proved algorithms using rounding to odd").
    """
    nearest = x.astype(np.float32)
    back = nearest.astype(np.float64)
    inexact = (back != x) & (x == x)
    if not some(inexact):
        return nearest
    bits = nearest.view(np.uint32)
    odd = (bits - (np.abs(back) > np.abs(x))) | np.uint32(1)
    return pick(inexact, odd.astype(np.uint32), bits).view(np.float32)


def odd_sum(a: Value, b: Value, rounding: str = "rn") -> Value:
    """The float64 sum, rounded to odd, so that a rounding to at most 51 bits after it is the only one that shows.

    The sign of an exact zero is the one that `rounding` asks for: minus for `rm` where the operands' signs differ.
    """
    total = a + b
    other = total - a
    error = (a - (total - other)) + (b - other)
    inexact = np.abs(error) > 0
    if some(inexact):
        bits = total.view(np.uint64)
        odd = (bits - ((error < 0) != (total < 0))) | np.uint64(1)
        total = pick(inexact, odd.astype(np.uint64), bits).view(np.float64)
    if rounding == "rm":
        total = pick((total == 0) & (np.signbit(a) != np.signbit(b)), np.float64(-0.0), total)
    return total


def canonical(x: Value) -> Value:
    """A float32 or float64 whose NaNs are PTX's canonical ones."""
    strange = x != x
    if not some(strange):
        return x
    return pick(strange, F32_NAN if x.itemsize == 4 else F64_NAN, x)


def with_sign(x: Value, sign: Value) -> Value:
    """A float whose sign bit is that of `sign`, an unsigned integer of the same size."""
    dtype = UNSIGNED[x.itemsize]
    mask = dtype.type(1 << (8 * x.itemsize - 1))
    return ((x.view(dtype) & ~mask) | (sign & mask)).view(x.dtype)
