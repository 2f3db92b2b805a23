"""Encodes PTX's small float formats (f16, bf16, e4m3, e5m2, tf32), and runs `cvt` and `cvt.pack` between all types.

The source is PTX ISA 8.7, sections "Alternate Floating-Point Data Formats", "cvt" and "cvt.pack".  A code is the bits
of a number: a uint16 for f16 and bf16, a uint8 for e4m3 and e5m2.  `encode` returns a tf32 as a float32.  e4m3 has no
infinity: its codes 0x7f and 0xff are NaN, and its largest number is 448.  The canonical NaN is 0x7fff for f16 and bf16,
0x7f for e4m3 and e5m2, and 0x7fffffff for tf32.

`cvt` takes PTX's type names, and NumPy values of the same kind, such as int32 for s32.  A uint16 holds the bits of an
f16, of a bf16, or of a pair of fp8 (e4m3 or e5m2).  A uint32 holds the bits of a tf32, or of a pair of f16 or bf16.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np
import torch

from rooflab.bench.emulator.numbers.bits import (
    ROUNDINGS,
    UNSIGNED,
    Value,
    flush,
    narrow,
    narrow_odd,
    odd_sum,
    pack_pair,
    parts,
    pick,
    rectify,
    rounding_to,
    saturate,
    some,
    unsigned,
    whole,
)

_F16, _F32 = np.dtype(np.float16), np.dtype(np.float32)
_MAGNITUDE_MASK = np.uint32(0x7FFFFFFF)
_HALFWORD_BITS, _LOWER_MASK, _UINT32_ONE = np.uint32(16), np.uint32(0xFFFF), np.uint32(1)
INTEGER_DTYPES = {
    f"{sign}{8 * size}": np.dtype(f"{code}{size}") for sign, code in (("u", "u"), ("s", "i")) for size in (1, 2, 4, 8)
}
"""By integer type of PTX, the NumPy type."""
FLOATS: dict[str, np.dtype] = {"f32": np.dtype(np.float32), "f64": np.dtype(np.float64)}
RAW_TYPES = ("f16", "bf16", "tf32")
"""The float types that are kept as raw bits."""
_INTEGER_ROUNDINGS = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}
_F64 = np.dtype(np.float64)
_LOW_WORD_MASK = 0xFFFFFFFF
_ROUNDING_BIAS, _UPPER_MASK = np.uint32(0x7FFF), np.uint32(0xFFFF0000)


class Format(NamedTuple):
    """Describes a float format with fewer bits than float32."""

    bits: int
    """The number of bits of a code."""
    largest: np.float32
    """The largest finite number of the format."""
    nan: int
    """The code of the format's canonical NaN."""
    overflow: int
    """The code of a value that is too large, without its sign, if `.satfinite` is absent."""
    roundings: tuple[str, ...] = ("rn",)
    """The rounding modes that PTX has for encoding float32."""


FORMATS = {
    "f16": Format(16, np.float32(65504), 0x7FFF, 0x7C00, ROUNDINGS),
    "bf16": Format(16, np.uint32(0x7F7F0000).view(_F32), 0x7FFF, 0x7F80, ROUNDINGS),
    "tf32": Format(32, np.uint32(0x7F7FE000).view(_F32), 0x7FFFFFFF, 0x7F800000, ("rn", "rz", "rna")),
    "e4m3": Format(8, np.float32(448), 0x7F, 0x7F),
    "e5m2": Format(8, np.float32(57344), 0x7F, 0x7C),
}
"""By name in PTX, the format."""
_FP8_TYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
_FP8_VALUES = {
    name: torch.arange(256, dtype=torch.uint8).view(kind).float().numpy() for name, kind in _FP8_TYPES.items()
}
"""By name of an 8-bit format, the float32 values of its codes: `[256]`."""


def get_format(name: str) -> Format:
    """Returns the float format called `name`.  Raises `ValueError` on an unknown name."""
    if name not in FORMATS:
        raise ValueError(f"format: expected one of {', '.join(FORMATS)}, got {name!r}")
    return FORMATS[name]


def decode(codes: Value, name: str) -> Value:
    """Returns the exact float32 values of `codes`, the bits of numbers in the format `name`.

    Codes of tf32 may be float32 numbers or their bits.  Raises `ValueError` on an unknown format."""
    if name == "bf16":
        return (codes.astype(np.uint32) << _HALFWORD_BITS).view(np.float32)
    if name == "f16":
        return codes.view(np.float16).astype(np.float32)
    if name == "tf32":
        return (codes.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)
    get_format(name)
    return _FP8_VALUES[name][codes]


def encode(x: Value, name: str, rounding: str = "rn", saturate: bool = False, relu: bool = False) -> Value:
    """Encodes float32 or float64 values in the format `name`.  Returns the bits; a tf32 result is a float32.

    Values that are too large become infinity, or NaN in e4m3.  With `saturate`, they become the largest finite number.
    With `relu`, negative values become +0.  Raises `ValueError` on a format or rounding mode that PTX does not have."""
    float_format = get_format(name)
    if rounding not in float_format.roundings:
        raise ValueError(f"rounding: expected one of {', '.join(float_format.roundings)} for {name}, got {rounding!r}")
    if x.itemsize == 8 and name != "f16":
        # A value beyond float32 becomes float32's largest number, which is odd: directed modes then round correctly.
        x = narrow_odd(x)
    if relu:
        x = rectify(x)
    if float_format.bits == 8:
        return _encode_byte(x, name, saturate)
    if saturate:
        x = np.minimum(np.maximum(x, -float_format.largest), float_format.largest)
    if name == "f16":
        codes = narrow(x, _F16, rounding).view(np.uint16)
    elif name == "bf16":
        codes = (_dropped(x.view(np.uint32), 16, rounding) >> _HALFWORD_BITS).astype(np.uint16)
    else:
        codes = _dropped(x.view(np.uint32), 13, rounding) & np.uint32(0xFFFFE000)
    is_nan = x != x
    if some(is_nan):
        codes = pick(is_nan, codes.dtype.type(float_format.nan), codes)
    return codes.view(np.float32) if name == "tf32" else codes


def _dropped(bits: Value, count: int, rounding: str) -> Value:
    """Prepares float32 bits for rounding. If the caller then drops the last `count` bits, the value is correctly
    rounded."""
    half_unit = 1 << (count - 1)
    if rounding == "rn":
        return bits + np.uint32(half_unit - 1) + ((bits >> count) & _UINT32_ONE)
    if rounding == "rz":
        return bits
    if rounding == "rna":
        return bits + np.uint32(half_unit)
    is_negative = bits > _MAGNITUDE_MASK
    return bits + (is_negative if rounding == "rm" else ~is_negative) * np.uint32(2 * half_unit - 1)


def _encode_byte(x: Value, name: str, saturate: bool) -> Value:
    """Encodes float32 values to 8-bit codes, with a table indexed by the upper 16 bits of the float32.

    If any lower bit is 1, the index's last bit becomes 1 (round-to-odd).  The index keeps 8 bits of significand and a
    code at most 4, so the result is rounded correctly."""
    bits = x.view(np.uint32)
    return _byte_table(name, saturate)[(bits >> _HALFWORD_BITS) | ((bits & _LOWER_MASK) != 0)]


@cache
def _byte_table(name: str, saturate: bool) -> np.ndarray:
    """Returns the 8-bit codes of all float32 values with 16 zero low bits: uint8 `[65536]`. The index is the 16 high
    bits."""
    form = FORMATS[name]
    bits = np.arange(1 << 16, dtype=np.uint32) << _HALFWORD_BITS
    x = np.abs(bits.view(np.float32))
    # What overflows in e4m3 is NaN in some versions of torch and 448 in others; 464 is the last number that does not.
    is_overflow = (x > 464) & (name == "e4m3") & (not saturate)
    numbers = torch.from_numpy(np.minimum(x, form.largest) if saturate else x)
    codes = numbers.to(_FP8_TYPES[name]).view(torch.uint8).numpy()
    codes = np.where(is_overflow, form.overflow, codes) | ((bits >> 24) & 0x80)
    return np.where(x == x, codes, form.nan).astype(np.uint8)


def cvt(
    x: Value,
    to: str,
    source: str,
    rounding: str = "",
    ftz: bool = False,
    sat: bool = False,
    relu: bool = False,
    satfinite: bool = False,
) -> Value:
    """Converts `x` from the type `source` to the type `to`, as PTX's `cvt` does.

    `rounding` is PTX's mode; the default is rn for a float result and rzi for an integer result.  Floats are clamped to
    the range of an integer result.  NaN becomes 0 if both types have at most 32 bits, else only the highest bit is set.
    Raises `ValueError` on a type or mode that PTX does not have."""
    if source in INTEGER_DTYPES:
        decoded_value = _integer(x, INTEGER_DTYPES[source])
        if to in INTEGER_DTYPES:
            return _resized(decoded_value, INTEGER_DTYPES[to], sat)
        return _from_integer(decoded_value, to, rounding or "rn", sat)
    decoded_value = _decoded(x, source, ftz)
    if to in INTEGER_DTYPES:
        return _to_integer(decoded_value, INTEGER_DTYPES[to], source, rounding or "rzi")
    return _to_float(decoded_value, to, source, rounding, ftz, sat, relu, satfinite)


def cvt_pair(
    high: Value, low: Value, to: str, rounding: str = "rn", relu: bool = False, satfinite: bool = False
) -> Value:
    """Runs `cvt` from f32 to f16x2, bf16x2, e4m3x2 or e5m2x2: converts two float32 to a packed pair.

    PTX's first source operand is `high`.  `to` may omit the suffix x2.  fp8 results always saturate."""
    format_name = to.removesuffix("x2")
    clamp = satfinite or format_name in ("e4m3", "e5m2")
    return pack_pair(encode(high, format_name, rounding, clamp, relu), encode(low, format_name, rounding, clamp, relu))


def cvt_rn_bf16x2_f32(high: Value, low: Value) -> Value:
    """Runs `cvt.rn.bf16x2.f32` without modifiers."""
    upper_bits, lower_bits = high.view(np.uint32), low.view(np.uint32)
    is_nan = (high != high) | (low != low)
    if some(is_nan):
        return pack_pair(encode(high, "bf16"), encode(low, "bf16"))
    # This rounds both halves in place, in half the time of encoding and packing.
    upper_bits = upper_bits + ((upper_bits >> _HALFWORD_BITS & _UINT32_ONE) + _ROUNDING_BIAS)
    lower_bits = lower_bits + ((lower_bits >> _HALFWORD_BITS & _UINT32_ONE) + _ROUNDING_BIAS)
    return (upper_bits & _UPPER_MASK) | (lower_bits >> _HALFWORD_BITS)


def cvt_fp8x2_f16x2(x: Value, to: str, relu: bool = False) -> Value:
    """Runs `cvt.rn.satfinite.e4m3x2.f16x2` or e5m2x2: converts a pair of f16 (uint32) to a pair of fp8 (uint16)."""
    codes = encode(decode(parts(unsigned(x), np.uint16), "f16"), to.removesuffix("x2"), "rn", True, relu)
    return whole(codes, np.uint16)


def cvt_f16x2_fp8x2(x: Value, source: str, relu: bool = False) -> Value:
    """Runs `cvt.rn.f16x2.e4m3x2` or `...e5m2x2`: converts a pair of fp8 (uint16) exactly to a pair of f16 (uint32)."""
    decoded_pair = decode(parts(unsigned(x), np.uint8), source.removesuffix("x2"))
    return whole(encode(decoded_pair, "f16", "rn", False, relu), np.uint32)


def cvt_pack(a: Value, b: Value, c: Value | None = None, *, to: str) -> Value:
    """Runs `cvt.pack.sat`: saturates the s32 values `a` and `b` to the type `to`, and packs them in a uint32.

    `b` is in the lowest bits, then `a`, then the low bits of `c`.  `to` is u16 or s16, or with `c` an integer type of
    8, 4 or 2 bits.  Raises `ValueError` on any other `to`."""
    if to not in ("u16", "s16", "u8", "s8", "u4", "s4", "u2", "s2"):
        raise ValueError(f"to: expected an integer of 16, 8, 4 or 2 bits, got {to!r}")
    bits = int(to[1:])
    min_value, max_value = (0, (1 << bits) - 1) if to[0] == "u" else (-(1 << (bits - 1)), (1 << (bits - 1)) - 1)
    field_mask = np.uint32((1 << bits) - 1)
    a_field, b_field = (
        np.minimum(np.maximum(x.view(np.int32), min_value), max_value).view(np.uint32) & field_mask for x in (a, b)
    )
    packed_pair = (a_field << bits) | b_field
    return packed_pair if c is None else packed_pair | (c.view(np.uint32) << (2 * bits))


def _integer(x: Value, dtype: np.dtype) -> Value:
    """Truncates an integer to the type `dtype`, which must not be wider."""
    if x.dtype == dtype:
        return x
    if x.itemsize != dtype.itemsize:
        x = unsigned(x).astype(UNSIGNED[dtype.itemsize])
    return x.view(dtype)


def _resized(x: Value, dtype: np.dtype, sat: bool) -> Value:
    if sat:
        source_info, target_info = np.iinfo(x.dtype), np.iinfo(dtype)
        x = np.minimum(np.maximum(x, max(source_info.min, target_info.min)), min(source_info.max, target_info.max))
    return x.astype(dtype)


def _decoded(x: Value, source: str, ftz: bool) -> Value:
    if source in FLOATS:
        x = x.view(FLOATS[source])
    elif source in RAW_TYPES:
        x = decode(_integer(x, np.dtype(np.uint32 if source == "tf32" else np.uint16)), source)
    else:
        raise ValueError(f"source: expected a type of cvt, got {source!r}")
    return flush(x) if ftz and source == "f32" else x


def _to_integer(x: Value, dtype: np.dtype, source: str, rounding: str) -> Value:
    if rounding not in _INTEGER_ROUNDINGS:
        raise ValueError(f"rounding: expected one of {', '.join(_INTEGER_ROUNDINGS)} for an integer, got {rounding!r}")
    integer_info, is_64_bit = np.iinfo(dtype), dtype.itemsize == 8
    whole_value = _INTEGER_ROUNDINGS[rounding](x).astype(_F64)
    # A conversion to 64 bits is defined only up to the largest float64 below 2**63 or 2**64.
    max_value = np.nextafter(_F64.type(integer_info.max), 0) if is_64_bit else _F64.type(integer_info.max)
    integer_value = np.fmin(np.fmax(whole_value, _F64.type(integer_info.min)), max_value).astype(dtype)
    if is_64_bit:
        integer_value = pick(whole_value > max_value, dtype.type(integer_info.max), integer_value)
    is_nan = x != x
    if some(is_nan):
        highest_bit = np.array(1 << (8 * dtype.itemsize - 1), UNSIGNED[dtype.itemsize]).view(dtype)[()]
        integer_value = pick(is_nan, highest_bit if is_64_bit or source == "f64" else dtype.type(0), integer_value)
    return integer_value


def _from_integer(x: Value, to: str, rounding: str, sat: bool) -> Value:
    if to not in FLOATS:
        wide_value = x.astype(_F64) if x.itemsize < 8 else odd_sum(*_words(x))
        return _to_float(wide_value, to, "f64", rounding, False, sat, False, False)
    with rounding_to(rounding):
        float_result = x.astype(FLOATS[to])
    return saturate(float_result) if sat else float_result


def _words(x: Value) -> tuple[Value, Value]:
    """Splits a 64-bit integer into two exact float64 values that add up to it."""
    return (x >> 32).astype(_F64) * 2.0**32, (x & x.dtype.type(_LOW_WORD_MASK)).astype(_F64)


def _to_float(
    x: Value, to: str, source: str, rounding: str, ftz: bool, sat: bool, relu: bool, satfinite: bool
) -> Value:
    if rounding in _INTEGER_ROUNDINGS:
        x, rounding = _INTEGER_ROUNDINGS[rounding](x), "rn"
    rounding = rounding or "rn"
    if to in RAW_TYPES:
        if source == "f64" and to != "f16":
            x = narrow_odd(x)
        encoded_value = encode(saturate(x) if sat else x, to, rounding, satfinite, relu)
        return encoded_value.view(np.uint32) if to == "tf32" else encoded_value
    if to not in FLOATS:
        raise ValueError(f"to: expected a type of cvt, got {to!r}")
    if x.dtype != FLOATS[to]:
        x = narrow(x, FLOATS[to], rounding)
    if ftz and to == "f32":
        x = flush(x)
    return saturate(x) if sat else x
