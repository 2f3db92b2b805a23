"""`cvt` and `cvt.pack` of PTX: integers of every width, float32, float64, f16, bf16, tf32 and packed pairs of fp8.

PTX ISA 8.7, sections "cvt" and "cvt.pack".  Types are PTX's names.  Integers are of the NumPy type of that name's sign
and width, f32 and f64 are floats, f16 and bf16 raw uint16, tf32 and packed pairs raw uint32, pairs of fp8 raw uint16.
A source may be wider than its type, of which the low bits are converted.
"""

from __future__ import annotations

import numpy as np

from rooflab.bench.ptx.numbers import exact
from rooflab.bench.ptx.numbers.bits import UNSIGNED, Value, pack_pair, parts, pick, some, unsigned, whole
from rooflab.bench.ptx.numbers.formats import decode, encode
from rooflab.bench.ptx.numbers.rounding import flush, narrow, narrow_odd, odd_sum, saturate

INTEGERS = {
    f"{sign}{8 * size}": np.dtype(f"{code}{size}") for sign, code in (("u", "u"), ("s", "i")) for size in (1, 2, 4, 8)
}
"""NumPy's type of each of PTX's integer types."""
FLOATS: dict[str, np.dtype] = {"f32": np.dtype(np.float32), "f64": np.dtype(np.float64)}
SMALL = ("f16", "bf16", "tf32")
"""Float types that are kept as raw bits."""
_WHOLE = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}
_F64 = np.dtype(np.float64)
_LOW_WORD = 0xFFFFFFFF
_HALF, _LAST, _BELOW_TIE, _UPPER = np.uint32(16), np.uint32(1), np.uint32(0x7FFF), np.uint32(0xFFFF0000)


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
    """x, of type `source`, as a value of type `to`.

    `rounding` is rn, rz, rm, rp (rna for tf32) where a float is the result, rni, rzi, rmi, rpi where it is to be
    whole; where it is left out, what needs rounding goes to nearest, and toward zero if the result is an integer.
    Floats saturate to the range of an integer, and NaN becomes 0, or the integer whose highest bit alone is set where
    `source` is f64 or the integer has 64 bits.  Raises `ValueError` on a type or mode that PTX lacks.
    """
    if source in INTEGERS:
        value = _integer(x, INTEGERS[source])
        if to in INTEGERS:
            return _resized(value, INTEGERS[to], sat)
        return _from_integer(value, to, rounding or "rn", sat)
    value = _decoded(x, source, ftz)
    if to in INTEGERS:
        return _to_integer(value, INTEGERS[to], source, rounding or "rzi")
    return _to_float(value, to, source, rounding, ftz, sat, relu, satfinite)


def cvt_pair(
    high: Value, low: Value, to: str, rounding: str = "rn", relu: bool = False, satfinite: bool = False
) -> Value:
    """`cvt.f16x2.f32`, `cvt.bf16x2.f32`, `cvt.e4m3x2.f32`, `cvt.e5m2x2.f32`: two float32 in one packed pair.

    PTX's first source is the high half.  `to` is the type with or without its x2; fp8 always saturates.
    """
    kind = to.removesuffix("x2")
    saturated = satfinite or kind in ("e4m3", "e5m2")
    return pack_pair(encode(high, kind, rounding, saturated, relu), encode(low, kind, rounding, saturated, relu))


def cvt_rn_bf16x2_f32(high: Value, low: Value) -> Value:
    """`cvt.rn.bf16x2.f32` without modifiers."""
    upper, lower = high.view(np.uint32), low.view(np.uint32)
    strange = (high != high) | (low != low)
    if some(strange):
        return pack_pair(encode(high, "bf16"), encode(low, "bf16"))
    # Both halves in place: half of what encoding and packing takes.
    upper = upper + ((upper >> _HALF & _LAST) + _BELOW_TIE)
    lower = lower + ((lower >> _HALF & _LAST) + _BELOW_TIE)
    return (upper & _UPPER) | (lower >> _HALF)


def cvt_rn_f16x2_f32(high: Value, low: Value) -> Value:
    """`cvt.rn.f16x2.f32` without modifiers."""
    return pack_pair(encode(high, "f16"), encode(low, "f16"))


def cvt_fp8x2_f16x2(x: Value, to: str, relu: bool = False) -> Value:
    """`cvt.rn.satfinite.e4m3x2.f16x2` and e5m2x2: a packed pair of f16 (uint32) as one of fp8 (uint16)."""
    codes = encode(decode(parts(unsigned(x), np.uint16), "f16"), to.removesuffix("x2"), "rn", True, relu)
    return whole(codes, np.uint16)


def cvt_f16x2_fp8x2(x: Value, source: str, relu: bool = False) -> Value:
    """`cvt.rn.f16x2.e4m3x2` and e5m2x2: a packed pair of fp8 (uint16) as one of f16 (uint32); exact."""
    values = decode(parts(unsigned(x), np.uint8), source.removesuffix("x2"))
    return whole(encode(values, "f16", "rn", False, relu), np.uint32)


def cvt_pack(a: Value, b: Value, to: str, c: Value | None = None) -> Value:
    """`cvt.pack.sat`: two s32 saturated to a narrow integer, a above b, in the low bits of a uint32.

    What is above them is the low bits of c.  `to` is u16 or s16, or with c any of u8, s8, u4, s4, u2, s2; another
    raises `ValueError`.
    """
    if to not in ("u16", "s16", "u8", "s8", "u4", "s4", "u2", "s2"):
        raise ValueError(f"to: expected an integer of 16, 8, 4 or 2 bits, got {to!r}")
    bits = int(to[1:])
    least, most = (0, (1 << bits) - 1) if to[0] == "u" else (-(1 << (bits - 1)), (1 << (bits - 1)) - 1)
    mask = np.uint32((1 << bits) - 1)
    high, low = (np.minimum(np.maximum(x.view(np.int32), least), most).view(np.uint32) & mask for x in (a, b))
    pair = (high << bits) | low
    return pair if c is None else pair | (c.view(np.uint32) << (2 * bits))


def _integer(x: Value, dtype: np.dtype) -> Value:
    """The low bits of an integer as a type of at most its width."""
    if x.dtype == dtype:
        return x
    if x.itemsize != dtype.itemsize:
        x = unsigned(x).astype(UNSIGNED[dtype.itemsize])
    return x.view(dtype)


def _resized(x: Value, dtype: np.dtype, sat: bool) -> Value:
    if sat:
        own, other = np.iinfo(x.dtype), np.iinfo(dtype)
        x = np.minimum(np.maximum(x, max(own.min, other.min)), min(own.max, other.max))
    return x.astype(dtype)


def _decoded(x: Value, source: str, ftz: bool) -> Value:
    if source in FLOATS:
        x = x.view(FLOATS[source])
    elif source in SMALL:
        x = decode(_integer(x, np.dtype(np.uint32 if source == "tf32" else np.uint16)), source)
    else:
        raise ValueError(f"source: expected a type of cvt, got {source!r}")
    return flush(x) if ftz and source == "f32" else x


def _to_integer(x: Value, dtype: np.dtype, source: str, rounding: str) -> Value:
    if rounding not in _WHOLE:
        raise ValueError(f"rounding: expected one of {', '.join(_WHOLE)} for an integer, got {rounding!r}")
    info, wide = np.iinfo(dtype), dtype.itemsize == 8
    value = _WHOLE[rounding](x).astype(_F64)
    # The largest float64 below 2**63 or 2**64 is where a 64-bit conversion is still defined.
    most = np.nextafter(_F64.type(info.max), 0) if wide else _F64.type(info.max)
    made = np.fmin(np.fmax(value, _F64.type(info.min)), most).astype(dtype)
    if wide:
        made = pick(value > most, dtype.type(info.max), made)
    strange = x != x
    if some(strange):
        highest = np.array(1 << (8 * dtype.itemsize - 1), UNSIGNED[dtype.itemsize]).view(dtype)[()]
        made = pick(strange, highest if wide or source == "f64" else dtype.type(0), made)
    return made


def _from_integer(x: Value, to: str, rounding: str, sat: bool) -> Value:
    if rounding == "rn" and to in FLOATS:
        made = x.astype(FLOATS[to])
    elif to == "f64":
        made = x.astype(_F64) if x.itemsize < 8 else _halves_summed(x, rounding)
    else:
        value = x.astype(_F64) if x.itemsize < 8 else _odd_float(x)
        if to == "f32":
            made = narrow(value, FLOATS["f32"], rounding)
        else:
            return _to_float(value, to, "f64", rounding, False, sat, False, False)
    return saturate(made) if sat else made


def _words(x: Value) -> tuple[Value, Value]:
    """A 64-bit integer as the sum of two float64, both exact."""
    return (x >> 32).astype(_F64) * 2.0**32, (x & x.dtype.type(_LOW_WORD)).astype(_F64)


def _odd_float(x: Value) -> Value:
    return odd_sum(*_words(x))


def _halves_summed(x: Value, rounding: str) -> Value:
    high, low = _words(x)
    return exact.lanes(exact.fma, rounding, high, np.float64(1), low)


def _to_float(
    x: Value, to: str, source: str, rounding: str, ftz: bool, sat: bool, relu: bool, satfinite: bool
) -> Value:
    if rounding in _WHOLE:
        x, rounding = _WHOLE[rounding](x), "rn"
    rounding = rounding or "rn"
    if to in SMALL:
        if source == "f64" and to != "f16":
            x = narrow_odd(x)
        made = encode(saturate(x) if sat else x, to, rounding, satfinite, relu)
        return made.view(np.uint32) if to == "tf32" else made
    if to not in FLOATS:
        raise ValueError(f"to: expected a type of cvt, got {to!r}")
    if x.dtype != FLOATS[to]:
        x = narrow(x, FLOATS[to], rounding)
    if ftz and to == "f32":
        x = flush(x)
    return saturate(x) if sat else x
