"""`cvt` against Python's integers and rational numbers: every pair of types, every mode, the edges."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from ptx_reference import SHAPES, assert_same, edges, random_floats, rounded

from rooflab.bench.ptx.numbers.bits import high_half, low_half
from rooflab.bench.ptx.numbers.formats import (
    INTEGERS,
    cvt,
    cvt_f16x2_fp8x2,
    cvt_fp8x2_f16x2,
    cvt_pack,
    cvt_pair,
    cvt_rn_bf16x2_f32,
    cvt_rn_f16x2_f32,
    decode,
    encode,
)

FLOAT_TYPES = {"f32": np.float32, "f64": np.float64, "f16": np.uint16, "bf16": np.uint16}
TO_WHOLE = {"rni": round, "rzi": math.trunc, "rmi": math.floor, "rpi": math.ceil}


@pytest.fixture(autouse=True)
def quiet():
    with np.errstate(all="ignore"):
        yield


def integers(name: str, seed: int = 1) -> np.ndarray:
    """Random integers of all sizes, the ends, and what lies beside powers of two."""
    rng, info = np.random.default_rng(seed), np.iinfo(INTEGERS[name])
    bits = info.bits
    wild = rng.integers(info.min, info.max, 600, dtype=INTEGERS[name], endpoint=True)
    shifted = wild >> rng.integers(0, bits, 600).astype(INTEGERS[name])
    ends = [x + d for p in range(bits) for x in (1 << p, -(1 << p)) for d in (-1, 0, 1)] + [info.min, info.max]
    return np.concatenate([wild, shifted, np.array([x for x in ends if info.min <= x <= info.max], INTEGERS[name])])


def floats(name: str, seed: int = 2) -> np.ndarray:
    """Raw values of a float type: of any bits, halves of integers, and what lies beside the ends of integers."""
    rng = np.random.default_rng(seed)
    halves = rng.integers(-600, 600, 300) / 2
    ends = np.array([s * 2.0**p for p in (7, 8, 15, 16, 31, 32, 63, 64) for s in (1, -1)])
    around = np.concatenate([ends, np.nextafter(ends, 0), ends + 0.5, ends - 0.5, ends - 1, ends * 1.5])
    values = np.concatenate([halves, around, edges(np.float64), random_floats(rng, np.float32, 500)])
    return encode(values, name) if name in ("f16", "bf16") else values.astype(FLOAT_TYPES[name])


def as_numbers(raw: np.ndarray, name: str) -> list[float]:
    return (decode(raw, name) if name in ("f16", "bf16") else raw).tolist()


@pytest.mark.parametrize("sat", [False, True])
@pytest.mark.parametrize("to", INTEGERS)
@pytest.mark.parametrize("source", INTEGERS)
def test_integers_are_extended_cut_or_clamped(source, to, sat):
    values, info = integers(source), np.iinfo(INTEGERS[to])
    made = cvt(values, to, source, sat=sat)
    assert made.dtype == INTEGERS[to]
    if sat:
        wanted = [min(max(x, info.min), info.max) for x in values.tolist()]
    else:
        wanted = [(x - info.min) % (1 << info.bits) + info.min for x in values.tolist()]
    assert made.tolist() == wanted


@pytest.mark.parametrize("rounding", TO_WHOLE)
@pytest.mark.parametrize("to", INTEGERS)
@pytest.mark.parametrize("source", FLOAT_TYPES)
def test_floats_become_integers_that_saturate(source, to, rounding):
    raw, info = floats(source), np.iinfo(INTEGERS[to])
    made = cvt(raw, to, source, rounding)
    assert made.dtype == INTEGERS[to]
    # NaN: PTX ISA 8.7, "cvt", integer notes.
    strange = 0
    if source == "f64" or info.bits == 64:
        strange = -(1 << (info.bits - 1)) if info.min else 1 << (info.bits - 1)
    for value, got in zip(as_numbers(raw, source), made.tolist(), strict=True):
        if math.isnan(value):
            wanted = strange
        elif math.isinf(value):
            wanted = info.max if value > 0 else info.min
        else:
            wanted = min(max(TO_WHOLE[rounding](Fraction(value)), info.min), info.max)
        assert got == wanted, (value, got, wanted)


@pytest.mark.parametrize("rounding", ["rn", "rz", "rm", "rp"])
@pytest.mark.parametrize("to", FLOAT_TYPES)
@pytest.mark.parametrize("source", INTEGERS)
def test_integers_become_floats_rounded_once(source, to, rounding):
    values = integers(source)
    made = cvt(values, to, source, rounding)
    assert made.dtype == FLOAT_TYPES[to]
    wanted = [rounded(Fraction(x), SHAPES[to], rounding) if x else 0.0 for x in values.tolist()]
    assert_same(as_numbers(made, to), wanted, values.astype(np.float64))


@pytest.mark.parametrize("rounding", ["rn", "rz", "rm", "rp"])
@pytest.mark.parametrize("to", FLOAT_TYPES)
@pytest.mark.parametrize("source", FLOAT_TYPES)
def test_floats_become_other_floats_rounded_once(source, to, rounding):
    raw = floats(source)
    made = cvt(raw, to, source, rounding)
    assert made.dtype == FLOAT_TYPES[to]
    values = as_numbers(raw, source)
    wanted = [rounded(Fraction(x), SHAPES[to], rounding) if math.isfinite(x) and x else x for x in values]
    assert_same(as_numbers(made, to), wanted, np.array(values))


@pytest.mark.parametrize("rounding", TO_WHOLE)
@pytest.mark.parametrize("kind", FLOAT_TYPES)
def test_floats_become_whole_floats_with_their_sign(kind, rounding):
    raw = floats(kind)
    values = as_numbers(raw, kind)
    wanted = [math.copysign(float(TO_WHOLE[rounding](Fraction(x))), x) if math.isfinite(x) else x for x in values]
    got = as_numbers(cvt(raw, kind, kind, rounding), kind)
    # Whole numbers next to the largest of a 16-bit format are themselves.
    assert_same(got, wanted, np.array(values))


def test_tf32_comes_as_bits():
    raw = cvt(np.float32(1 + 2**-11), "tf32", "f32", "rna")
    assert isinstance(raw, np.uint32) and raw == 0x3F802000
    assert cvt(np.float32(1 + 2**-11), "tf32", "f32", "rn") == 0x3F800000
    assert cvt(np.float32(-1), "tf32", "f32", "rn", relu=True) == 0
    assert cvt(np.float32(np.inf), "tf32", "f32", "rna", satfinite=True) == 0x7F7FE000
    assert cvt(np.uint32(0x3F803FFF), "f32", "tf32") == np.uint32(0x3F802000).view(np.float32)


def test_modifiers_flush_and_clamp():
    tiny = np.float32(1e-40)
    assert cvt(tiny, "f64", "f32") > 0 and cvt(tiny, "f64", "f32", ftz=True) == 0
    assert cvt(np.float64(1e-40), "f32", "f64") > 0 and cvt(np.float64(1e-40), "f32", "f64", "rn", ftz=True) == 0
    assert cvt(tiny, "s32", "f32", "rpi") == 1 and cvt(tiny, "s32", "f32", "rpi", ftz=True) == 0
    assert cvt(tiny, "f32", "f32", "rpi", ftz=True) == 0
    assert cvt(np.float32(3), "f16", "f32", "rn", sat=True) == 0x3C00
    assert_same(cvt(np.array([-2, np.nan, 0.5, 7], np.float32), "f32", "f32", sat=True), [0, 0, 0.5, 1])
    assert (
        cvt(np.int32(5), "f32", "s32", "rn", sat=True) == 1 and cvt(np.int32(5), "f16", "s32", "rn", sat=True) == 0x3C00
    )
    assert cvt(np.float32(-3), "bf16", "f32", "rn", relu=True) == 0
    assert cvt(np.float32(1e9), "f16", "f32", "rn", satfinite=True) == 0x7BFF
    assert cvt(np.float32(2.7), "s32", "f32") == 2


def test_the_low_bits_of_a_wider_source_are_converted():
    assert cvt(np.uint32(0xABCD01FF), "s32", "s8") == -1 and cvt(np.uint64(0xFFFF3C00), "f32", "f16") == 1
    assert cvt(np.int32(-1), "u64", "u16") == 0xFFFF and cvt(np.uint32(0xFFFFFFFF), "s64", "s32") == -1


@pytest.mark.parametrize("to", ["f16x2", "bf16x2", "e4m3x2", "e5m2x2"])
def test_the_first_source_of_a_pair_is_its_high_half(to):
    a, b = (random_floats(np.random.default_rng(seed), np.float32, 400) for seed in (3, 4))
    kind, saturated = to[:-2], to[0] == "e"
    for relu in (False, True):
        made = cvt_pair(a, b, to, relu=relu)
        assert made.dtype == (np.uint16 if saturated else np.uint32)
        assert (high_half(made) == encode(a, kind, "rn", saturated, relu)).all()
        assert (low_half(made) == encode(b, kind, "rn", saturated, relu)).all()
        single = cvt_pair(a[3], b[3], to, relu=relu)
        assert type(single) is made.dtype.type and single == made[3]
    fast = {"bf16x2": cvt_rn_bf16x2_f32, "f16x2": cvt_rn_f16x2_f32}.get(to)
    if fast:
        assert (fast(a, b) == cvt_pair(a, b, to)).all()
        assert (cvt_pair(a, b, to, "rz", satfinite=True) & 0x7FFF != encode(np.float32(np.inf), kind)).all()


@pytest.mark.parametrize("kind", ["e4m3", "e5m2"])
def test_packed_fp8_and_packed_f16_convert_half_by_half(kind):
    pairs = np.arange(65536).astype(np.uint16)
    wide = cvt_f16x2_fp8x2(pairs, kind + "x2")
    assert wide.dtype == np.uint32
    assert_same(decode(low_half(wide), "f16"), decode(low_half(pairs), kind))
    assert_same(decode(high_half(wide), "f16"), decode(high_half(pairs), kind))
    back = cvt_fp8x2_f16x2(wide, kind)
    number = np.isfinite(decode(low_half(pairs), kind)) & np.isfinite(decode(high_half(pairs), kind))
    assert back.dtype == np.uint16 and (back[number] == pairs[number]).all() and number.sum() > 60000
    assert isinstance(cvt_f16x2_fp8x2(pairs[9], kind), np.uint32) and cvt_f16x2_fp8x2(pairs[9], kind) == wide[9]
    assert isinstance(cvt_fp8x2_f16x2(wide[9], kind), np.uint16)
    assert cvt_fp8x2_f16x2(np.uint32(0x7C00FC00), kind) == {"e4m3": 0x7EFE, "e5m2": 0x7BFB}[kind]
    assert cvt_fp8x2_f16x2(np.uint32(0xBC003C00), kind, relu=True) == {"e4m3": 0x0038, "e5m2": 0x003C}[kind]


@pytest.mark.parametrize("to", ["u16", "s16", "u8", "s8", "u4", "s4", "u2", "s2"])
def test_pack_clamps_two_integers_above_a_third(to):
    values, bits = integers("s32"), int(to[1:])
    least, most = (0, 2**bits - 1) if to[0] == "u" else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    clamped = [min(max(x, least), most) % (1 << bits) for x in values.tolist()]
    made = cvt_pack(values, values[::-1].copy(), to, None if bits == 16 else np.uint32(0x12345678))
    above = 0 if bits == 16 else (0x12345678 << (2 * bits)) & 0xFFFFFFFF
    assert made.dtype == np.uint32
    assert made.tolist() == [(a << bits) | b | above for a, b in zip(clamped, clamped[::-1], strict=True)]


def test_what_ptx_lacks_is_refused():
    with pytest.raises(ValueError, match="to: expected a type of cvt, got 'f128'"):
        cvt(np.float32(1), "f128", "f32")
    with pytest.raises(ValueError, match="source: expected a type of cvt, got 'f128'"):
        cvt(np.float32(1), "f32", "f128")
    with pytest.raises(ValueError, match="rounding: expected one of rni, rzi, rmi, rpi for an integer, got 'rn'"):
        cvt(np.float32(1), "s32", "f32", "rn")
    with pytest.raises(ValueError, match="to: expected an integer of 16, 8, 4 or 2 bits, got 's32'"):
        cvt_pack(np.int32(1), np.int32(1), "s32")


@pytest.mark.parametrize("source", [*INTEGERS, *FLOAT_TYPES])
@pytest.mark.parametrize("to", [*INTEGERS, *FLOAT_TYPES, "tf32"])
def test_scalars_are_one_lane(source, to):
    values = (integers(source) if source in INTEGERS else floats(source))[::60]
    vector = cvt(values, to, source)
    for lane, value in enumerate(values):
        single = cvt(value, to, source)
        assert type(single) is vector.dtype.type
        assert single.tobytes() == vector[lane].tobytes()
