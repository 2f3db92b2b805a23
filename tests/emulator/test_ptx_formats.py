"""f16, bf16, fp8 and tf32 are decoded and encoded as torch does it, and as rational numbers round."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch
from ptx_reference import SHAPES, assert_same, edges, random_floats, rounded

from rooflab.bench.emulator.numbers.bits import high_half, low_half, pack_pair, parts, whole
from rooflab.bench.emulator.numbers.formats import FORMATS, decode, encode

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
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


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("rounding", ["rn", "rz", "rm", "rp"])
@pytest.mark.parametrize("name", ["f16", "bf16"])
def test_every_rounding_of_16_bits_is_that_of_the_rational_number(name, rounding, dtype):
    values = trials(name)[:1200].astype(dtype)
    if dtype is np.float64:
        # Next to a float32 and between two of them, where rounding to float32 first would show.
        values = np.concatenate([values, np.nextafter(values, np.inf), np.nextafter(values, -np.inf), [1e300, -1e-300]])
    expected = [rounded(Fraction(x), SHAPES[name], rounding) if np.isfinite(x) and x else x for x in values.tolist()]
    assert_same(decode(encode(values, name, rounding), name), expected, values)


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


def test_packed_pairs_keep_element_0_in_the_low_half():
    low, high = np.array([1, 2], np.uint16), np.array([0xAAAA, 0xBBBB], np.uint16)
    pair = pack_pair(high, low)
    assert pair.tolist() == [0xAAAA0001, 0xBBBB0002] and pair.dtype == np.uint32
    assert (low_half(pair) == low).all() and (high_half(pair) == high).all()
    assert parts(pair, np.uint16).tolist() == [[1, 0xAAAA], [2, 0xBBBB]]
    assert (whole(parts(pair, np.uint16), np.uint32) == pair).all()
    scalar = pack_pair(high[0], low[0])
    assert isinstance(scalar, np.uint32) and scalar == pair[0]
    assert pack_pair(high, low[0]).tolist() == [0xAAAA0001, 0xBBBB0001]
