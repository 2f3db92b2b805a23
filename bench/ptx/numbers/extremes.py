"""What PTX does to floats without rounding: min, max, abs, neg, copysign, testp.

PTX ISA 8.7, section "Floating Point Instructions".  All take and give float32 or float64.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from rooflab.bench.ptx.numbers.bits import Value, full, pick, unsigned
from rooflab.bench.ptx.numbers.rounding import canonical, flush, with_sign


def fmin(
    a: Value, b: Value, ftz: bool = False, nan: bool = False, xorsign_abs: bool = False, absolute: bool = False
) -> Value:
    """`min`: the operand that is a number where one is NaN, and -0 below +0.

    `nan` makes the result the canonical NaN where either is NaN; `absolute` compares magnitudes; `xorsign_abs` does so
    too and gives the result the exclusive or of the operands' signs.
    """
    return _extreme(np.fmin, np.minimum, np.bitwise_or, a, b, ftz, nan, xorsign_abs, absolute)


def fmax(
    a: Value, b: Value, ftz: bool = False, nan: bool = False, xorsign_abs: bool = False, absolute: bool = False
) -> Value:
    """`max`: as `fmin`, the larger."""
    return _extreme(np.fmax, np.maximum, np.bitwise_and, a, b, ftz, nan, xorsign_abs, absolute)


def _extreme(
    number: Callable[..., Value],
    strict: Callable[..., Value],
    zeros: Callable[..., Value],
    a: Value,
    b: Value,
    ftz: bool,
    nan: bool,
    xorsign_abs: bool,
    absolute: bool,
) -> Value:
    if ftz:
        a, b = flush(a), flush(b)
    sign = unsigned(a) ^ unsigned(b) if xorsign_abs else None
    if xorsign_abs or absolute:
        a, b = np.abs(a), np.abs(b)
    result = canonical(strict(a, b)) if nan else number(a, b)
    if not full(result):
        # NumPy leaves open which of two zeros it takes; equal operands' bits tell.
        same = zeros(unsigned(a), unsigned(b)).view(result.dtype)
        result = pick((result == 0) & (a == b), same, result)
    if sign is None:
        return result
    return pick(result != result, result, with_sign(result, sign))


def fabs(a: Value, ftz: bool = False) -> Value:
    """`abs`."""
    return np.abs(flush(a) if ftz else a)


def fneg(a: Value, ftz: bool = False) -> Value:
    """`neg`."""
    return -(flush(a) if ftz else a)


def copysign(a: Value, b: Value) -> Value:
    """`copysign`: b with the sign of a, in PTX's order of operands."""
    return with_sign(b, unsigned(a))


def testp(a: Value, property: str) -> Value:
    """`testp`: bool_ whether a is `finite`, `infinite`, `number`, `notanumber`, `normal` or `subnormal`.

    Zeros are normal.  Raises `ValueError` on another property.
    """
    if property not in _PROPERTIES:
        raise ValueError(f"property: expected one of {', '.join(_PROPERTIES)}, got {property!r}")
    return _PROPERTIES[property](a)


def _subnormal(a: Value) -> Value:
    return (np.abs(a) < np.finfo(a.dtype).tiny) & (a != 0)


_PROPERTIES: dict[str, Callable[[Value], Value]] = {
    "finite": np.isfinite,
    "infinite": np.isinf,
    "number": lambda a: a == a,
    "notanumber": lambda a: a != a,
    "normal": lambda a: np.isfinite(a) & ~_subnormal(a),
    "subnormal": _subnormal,
}
