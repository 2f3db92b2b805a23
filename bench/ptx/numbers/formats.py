"""The small float formats of PTX: f16, bf16, e4m3, e5m2 and tf32, decoded to float32 and encoded from it.

PTX ISA 8.7, sections "Alternate Floating-Point Data Formats" and "cvt".  Codes are uint16 (f16, bf16) or uint8 (e4m3,
e5m2); tf32 has float32's exponent and 10 bits of mantissa, and is kept as a float32.  e4m3 has no infinity: its codes
0x7f and 0xff are NaN and its largest number is 448.  A NaN is encoded as the canonical one of its format: 0x7fff,
0x7fff, 0x7f, 0x7f and 0x7fffffff.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np

from rooflab.bench.ptx.numbers.bits import Value, pick, some
from rooflab.bench.ptx.numbers.rounding import F32_NAN, narrow, narrow_odd, rectify

_F16, _F32 = np.dtype(np.float16), np.dtype(np.float32)
_MAGNITUDE = np.uint32(0x7FFFFFFF)
_HALF, _LOWER, _ONE = np.uint32(16), np.uint32(0xFFFF), np.uint32(1)


@dataclass(frozen=True)
class Format:
    """A float format with fewer bits than float32."""

    name: str
    bits: int
    """Bits of a code."""
    mantissa: int
    """Bits of the mantissa, the leading one not counted."""
    bias: int
    largest: np.float32
    """The largest finite number."""
    nan: int
    """The code of the canonical NaN."""
    overflow: int
    """The code, without its sign, of what is too large where `.satfinite` is absent."""
    roundings: tuple[str, ...]
    """The modes in which float32 is encoded."""


FORMATS = {
    "f16": Format("f16", 16, 10, 15, np.float32(65504), 0x7FFF, 0x7C00, ("rn", "rz", "rm", "rp")),
    "bf16": Format("bf16", 16, 7, 127, np.uint32(0x7F7F0000).view(_F32), 0x7FFF, 0x7F80, ("rn", "rz", "rm", "rp")),
    "tf32": Format("tf32", 32, 10, 127, np.uint32(0x7F7FE000).view(_F32), 0x7FFFFFFF, 0x7F800000, ("rn", "rz", "rna")),
    "e4m3": Format("e4m3", 8, 3, 7, np.float32(448), 0x7F, 0x7F, ("rn",)),
    "e5m2": Format("e5m2", 8, 2, 15, np.float32(57344), 0x7F, 0x7C, ("rn",)),
}
"""Formats by PTX's name."""


def get_format(name: str) -> Format:
    """The format of a name.  Raises `ValueError` on one that is unknown."""
    if name not in FORMATS:
        raise ValueError(f"format: expected one of {', '.join(FORMATS)}, got {name!r}")
    return FORMATS[name]


def _table(form: Format) -> np.ndarray:
    """Every code's value as float32: shape (256,)."""
    codes = np.arange(256, dtype=np.int64)
    size = codes & 0x7F
    exponent, mantissa = size >> form.mantissa, size & ((1 << form.mantissa) - 1)
    normal = exponent > 0
    unit = 1 << form.mantissa
    value = np.ldexp(mantissa + normal * unit, np.maximum(exponent, 1) - form.bias - form.mantissa)
    value = np.where(size > form.overflow, np.nan, np.where(size == form.overflow, np.inf, value))
    if form.overflow == form.nan:
        value[form.nan :: 128] = np.nan
    return np.where(codes >= 128, -value, value).astype(np.float32)


_TABLES = {name: _table(FORMATS[name]) for name in ("e4m3", "e5m2")}


def decode(codes: Value, name: str) -> Value:
    """The float32 that codes stand for; exact.  tf32 is taken as float32 or as its bits.

    Raises `ValueError` on a format that is unknown.
    """
    if name == "bf16":
        return (codes.astype(np.uint32) << _HALF).view(np.float32)
    if name == "f16":
        return codes.view(np.float16).astype(np.float32)
    if name == "tf32":
        return (codes.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)
    get_format(name)
    return _TABLES[name][codes]


def encode(x: Value, name: str, rounding: str = "rn", saturate: bool = False, relu: bool = False) -> Value:
    """The codes of float32 or float64 values, rounded once.

    `saturate` is `.satfinite`: what is larger than the largest finite number, infinities included, becomes it; without
    it, it becomes infinity, or NaN in e4m3.  `relu` makes what is negative +0.  tf32 comes back as float32.  Raises
    `ValueError` on a format or mode that PTX lacks.
    """
    form = get_format(name)
    if rounding not in form.roundings:
        raise ValueError(f"rounding: expected one of {', '.join(form.roundings)} for {name}, got {rounding!r}")
    if x.itemsize == 8 and name != "f16":
        # Directed modes of what lies beyond float32 see its largest number, which is odd, and go on as they should.
        x = narrow_odd(x)
    if relu:
        x = rectify(x)
    if form.bits == 8:
        return _encode_byte(x, name, saturate)
    if saturate:
        x = np.minimum(np.maximum(x, -form.largest), form.largest)
    return _ENCODERS[name](x, rounding)


def _with_nan(codes: Value, x: Value, form: Format) -> Value:
    strange = x != x
    return pick(strange, codes.dtype.type(form.nan), codes) if some(strange) else codes


def _encode_f16(x: Value, rounding: str) -> Value:
    return _with_nan(narrow(x, _F16, rounding).view(np.uint16), x, FORMATS["f16"])


def _dropped(bits: Value, count: int, rounding: str) -> Value:
    """Float32 bits whose last `count` are rounded off; the caller drops what is left of them."""
    half = 1 << (count - 1)
    if rounding == "rn":
        return bits + np.uint32(half - 1) + ((bits >> count) & _ONE)
    if rounding == "rz":
        return bits
    if rounding == "rna":
        return bits + np.uint32(half)
    negative = bits > _MAGNITUDE
    return bits + (negative if rounding == "rm" else ~negative) * np.uint32(2 * half - 1)


def _encode_bf16(x: Value, rounding: str) -> Value:
    codes = (_dropped(x.view(np.uint32), 16, rounding) >> _HALF).astype(np.uint16)
    return _with_nan(codes, x, FORMATS["bf16"])


def _encode_tf32(x: Value, rounding: str) -> Value:
    value = (_dropped(x.view(np.uint32), 13, rounding) & np.uint32(0xFFFFE000)).view(np.float32)
    strange = x != x
    return pick(strange, F32_NAN, value) if some(strange) else value


def _encode_byte(x: Value, name: str, saturate: bool) -> Value:
    """Codes of 8 bits, looked up by the upper half of a float32.

    A one in the lower half is kept in the last bit of the upper one, which is rounding to odd: those 8 bits of
    significand are more than an 8-bit format has and two, so that what is looked up is rounded as if once.
    """
    bits = x.view(np.uint32)
    return _byte_table(name, saturate)[(bits >> _HALF) | ((bits & _LOWER) != 0)]


@cache
def _byte_table(name: str, saturate: bool) -> np.ndarray:
    """The code of every float32 whose lower half is zero, by its upper half: uint8 of shape (65536,)."""
    form = FORMATS[name]
    bits = np.arange(1 << 16, dtype=np.uint32) << _HALF
    x = np.abs(bits.view(np.float32))
    if saturate:
        x = np.minimum(x, form.largest)
    dropped, least_normal = 23 - form.mantissa, 2.0 ** (1 - form.bias)
    normal = (_dropped(x.view(np.uint32), dropped, "rn") >> dropped) - np.uint32((127 - form.bias) << form.mantissa)
    small = np.rint(np.fmin(x, least_normal) * 2.0 ** (form.bias - 1 + form.mantissa)).astype(np.uint32)
    codes = np.where(x < least_normal, small, normal)
    finite = np.flatnonzero(_TABLES[name] == form.largest)[0]
    codes = np.where(codes > finite, form.overflow, codes) | ((bits >> 24) & 0x80)
    return np.where(x == x, codes, form.nan).astype(np.uint8)


_ENCODERS: dict[str, Callable[[Value, str], Value]] = {
    "f16": _encode_f16,
    "bf16": _encode_bf16,
    "tf32": _encode_tf32,
}
