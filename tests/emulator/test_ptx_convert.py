"""The float formats against torch and rational numbers, and `cvt`: every pair of types, every mode, the edges."""

from __future__ import annotations

import math
from fractions import Fraction
from functools import cache

import numpy as np
import pytest
import torch
from ptx_reference import SHAPES, assert_same, edges, high_half, low_half, random_floats, rounded

from rooflab.bench.emulator.numbers.formats import (
    FORMATS,
    INTEGER_DTYPES,
    cvt,
    cvt_f16x2_fp8x2,
    cvt_fp8x2_f16x2,
    cvt_pair,
    cvt_rn_bf16x2_f32,
    decode,
    encode,
)

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
FLOAT_TYPES = {"f32": np.float32, "f64": np.float64, "f16": np.uint16, "bf16": np.uint16}
TO_WHOLE = {"rni": round, "rzi": math.trunc, "rmi": math.floor, "rpi": math.ceil}


@cache
def integers(name: str, seed: int = 1) -> np.ndarray:
    """Random integers of all sizes, the ends, and what lies beside powers of two."""
    rng, info = np.random.default_rng(seed), np.iinfo(INTEGER_DTYPES[name])
    bits = info.bits
    wild = rng.integers(info.min, info.max, 200, dtype=INTEGER_DTYPES[name], endpoint=True)
    shifted = wild >> rng.integers(0, bits, 200).astype(INTEGER_DTYPES[name])
    ends = [x + d for p in range(bits) for x in (1 << p, -(1 << p)) for d in (-1, 0, 1)] + [info.min, info.max]
    return np.concatenate(
        [wild, shifted, np.array([x for x in ends if info.min <= x <= info.max], INTEGER_DTYPES[name])]
    )


@cache
def floats(name: str, seed: int = 2) -> np.ndarray:
    """Raw values of a float type: of any bits, halves of integers, and what lies beside the ends of integers."""
    rng = np.random.default_rng(seed)
    halves = rng.integers(-600, 600, 300) / 2
    ends = np.array([s * 2.0**p for p in (7, 8, 15, 16, 31, 32, 63, 64) for s in (1, -1)])
    # Ties of bf16, f16, f32 and what float64 has beside them, where rounding to float32 first would show.
    ties = np.array([s * (1 + k * 2.0**-p) for p in (8, 11, 24) for k in (1, 3) for s in (1, -1, 2.0**-126)])
    around = [ends, np.nextafter(ends, 0), ends + 0.5, ends - 0.5, ends - 1, ends * 1.5]
    around = np.concatenate([*around, ties, np.nextafter(ties, np.inf), np.nextafter(ties, -np.inf)])
    values = np.concatenate([halves, around, edges(np.float64), random_floats(rng, np.float32, 250)])
    return encode(values, name) if name in ("f16", "bf16") else values.astype(FLOAT_TYPES[name])


def as_numbers(raw: np.ndarray, name: str) -> list[float]:
    return (decode(raw, name) if name in ("f16", "bf16") else raw).tolist()


MODES = ("rn", "rz", "rm", "rp")


def wanted(value: float, source: str, to: str, rounding: str | None, sat: bool) -> float:
    """By rational numbers; what NaN becomes is that of PTX ISA 8.7, "cvt", integer notes."""
    if to in FLOAT_TYPES:
        if not math.isfinite(value) or not value:
            return value
        if rounding in TO_WHOLE:
            return math.copysign(float(TO_WHOLE[rounding](Fraction(value))), value)
        return rounded(Fraction(value), SHAPES[to], rounding)
    info = np.iinfo(INTEGER_DTYPES[to])
    if source in INTEGER_DTYPES and not sat:
        return (value - info.min) % (1 << info.bits) + info.min
    if math.isnan(value):
        top = 1 << (info.bits - 1)
        return (-top if info.min else top) if source == "f64" or info.bits == 64 else 0
    if math.isinf(value):
        return info.max if value > 0 else info.min
    return min(max(TO_WHOLE[rounding](Fraction(value)) if rounding else value, info.min), info.max)


@pytest.mark.parametrize("to", [*INTEGER_DTYPES, *FLOAT_TYPES])
@pytest.mark.parametrize("source", [*INTEGER_DTYPES, *FLOAT_TYPES])
def test_every_pair_of_types_in_every_mode(source, to):
    raw = integers(source) if source in INTEGER_DTYPES else floats(source)
    values = raw.tolist() if source in INTEGER_DTYPES else as_numbers(raw, source)
    if to in FLOAT_TYPES:
        modes = [(mode, False) for mode in (*MODES, *(TO_WHOLE if source == to else ()))]
    else:
        modes = [(mode, False) for mode in TO_WHOLE] if source in FLOAT_TYPES else [(None, False), (None, True)]
    for rounding, sat in modes:
        made = cvt(raw, to, source, rounding, sat=sat)
        assert made.dtype == (FLOAT_TYPES | INTEGER_DTYPES)[to]
        exact = [wanted(value, source, to, rounding, sat) for value in values]
        if to in FLOAT_TYPES:
            assert_same(as_numbers(made, to), exact, np.array(values, np.float64))
        else:
            wrong = [row for row in zip(values, made.tolist(), exact, strict=True) if row[1] != row[2]]
            assert not wrong, (rounding, wrong[:3])
    vector = cvt(raw[::60], to, source)
    for lane, value in enumerate(raw[::60]):
        single = cvt(value, to, source)
        assert type(single) is vector.dtype.type and single.tobytes() == vector[lane].tobytes()


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
    assert cvt(np.int32(5), "f32", "s32", "rn", sat=True) == 1
    assert cvt(np.int32(5), "f16", "s32", "rn", sat=True) == 0x3C00
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
    if to == "bf16x2":
        assert (cvt_rn_bf16x2_f32(a, b) == cvt_pair(a, b, to)).all()
    if not saturated:
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


# Formats

TORCH = {"f16": torch.float16, "bf16": torch.bfloat16, "e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
CODES = {"f16": np.uint16, "bf16": np.uint16, "e4m3": np.uint8, "e5m2": np.uint8}


def all_codes(name: str) -> np.ndarray:
    return np.arange(1 << FORMATS[name].bits).astype(CODES[name])


def by_torch(name: str, codes: np.ndarray) -> np.ndarray:
    signed = torch.from_numpy(codes.view(f"i{codes.itemsize}").copy())
    return signed.view(TORCH[name]).float().numpy()


def torch_codes(name: str, values: np.ndarray) -> np.ndarray:
    made = torch.from_numpy(values).to(TORCH[name])
    return made.view(torch.int16 if FORMATS[name].bits == 16 else torch.int8).numpy().view(CODES[name])


def trials(name: str) -> np.ndarray:
    """Float32 numbers: all that the format has, what lies halfway between two, its neighbours, and others."""
    rng = np.random.default_rng(7)
    own = decode(all_codes(name), name)
    own = np.unique(own[np.isfinite(own)])
    middle = ((own[1:].astype(np.float64) + own[:-1]) / 2).astype(np.float32)
    near = [np.nextafter(middle, np.float32(toward)) for toward in (-np.inf, np.inf)]
    over = np.array([float(FORMATS[name].largest) * x for x in (1.01, 1.03, 1.04, 1.06, 1.07, 1.2, 2)], np.float32)
    found = np.concatenate([own, middle, *near, over, -over, edges(np.float32), random_floats(rng, np.float32, 3000)])
    return found[rng.permutation(found.size)[:40000]]


@pytest.mark.parametrize("name", TORCH)
def test_every_code_is_decoded_as_torch_does_it_and_encoded_as_itself(name):
    codes = all_codes(name)
    values = decode(codes, name)
    assert_same(values, by_torch(name, codes), codes)
    assert (encode(values, name) == np.where(np.isnan(values), FORMATS[name].nan, codes)).all()
    assert np.isnan(values).sum() == {"f16": 2046, "bf16": 254, "e4m3": 2, "e5m2": 6}[name]


@pytest.mark.parametrize("name", TORCH)
def test_float32_is_encoded_to_nearest_as_torch_does_it(name):
    values = trials(name)
    number = values == values
    if name == "e4m3":  # what overflows is NaN in some versions of torch and 448 in others
        number &= np.abs(values) <= 464
    assert (encode(values, name)[number] == torch_codes(name, values)[number]).all()
    number = values == values
    assert (encode(values, name)[~number] == FORMATS[name].nan).all()


@pytest.mark.parametrize("rounding", ["rn", "rz", "rna"])
def test_tf32_keeps_ten_bits_of_mantissa(rounding):
    rng = np.random.default_rng(3)
    values = np.concatenate([random_floats(rng, np.float32, 1500), edges(np.float32)])
    # Ties: a last bit of the eleven that tf32 lacks.
    values = np.concatenate([values, ((values.view(np.uint32) & 0xFFFFE000) | 0x1000).view(np.float32)])
    expected = [rounded(Fraction(x), SHAPES["tf32"], rounding) if np.isfinite(x) and x else x for x in values.tolist()]
    made = encode(values, "tf32", rounding)
    assert made.dtype == np.float32 and not (made.view(np.uint32)[made == made] & 0x1FFF).any()
    assert_same(made, expected, values)
    assert (decode(made, "tf32")[made == made] == made[made == made]).all()


@pytest.mark.parametrize("name", FORMATS)
def test_saturation_stops_at_the_largest_number_relu_at_zero_and_both_leave_nan(name):
    largest = FORMATS[name].largest
    values = np.array([largest, largest * np.float32(1.5), np.inf, -largest, -np.inf, np.nan, 1], np.float32)
    made = decode(encode(values, name, "rn", saturate=True), name)
    assert_same(made, [largest, largest, largest, -largest, -largest, np.nan, 1])
    values = np.array([-1, -0.0, -1e-45, -np.inf, 1, np.nan, -np.nan], np.float32)
    assert_same(decode(encode(values, name, "rn", relu=True), name), [0, 0, 0, 0, 1, np.nan, np.nan])


def test_what_fp8_cannot_hold_overflows_as_its_format_says():
    values = np.array([464, 465, 480, 1e30, np.inf, -np.inf], np.float32)
    assert encode(values, "e4m3").tolist() == [0x7E, 0x7F, 0x7F, 0x7F, 0x7F, 0xFF]
    assert encode(np.array([61439, 61440, np.inf, -1e9], np.float32), "e5m2").tolist() == [0x7B, 0x7C, 0x7C, 0xFC]
