"""Tensor maps and TMA tiles against a loop over the elements of a box, and against what wgmma then reads."""

import dataclasses
import itertools

import numpy as np
import pytest

from rooflab.bench.emulator.execute.atomics import combined
from rooflab.bench.emulator.numbers.formats import decode, encode
from rooflab.bench.emulator.tiles.tensor_map import (
    ELEMENT_BYTES,
    SWIZZLES,
    TensorMap,
    fill_unit,
    loaded,
    replace,
    tile_index,
    unpack,
)

PLAIN = TensorMap(4096, "bf16", (100, 60), (256,), (64, 16))


def copied_in(tensor, memory, coords, shared, start):
    """A load by `tile_index`: units gathered from `memory` into `shared`, both uint8."""
    index = tile_index(tensor, coords, start)
    unit = index.unit_bytes
    values = np.tile(fill_unit(tensor, unit), (index.shared_addresses.size, 1))
    inside = slice(None) if index.inside is None else index.inside
    values[inside] = memory.reshape(-1, unit)[index.global_addresses[inside] // unit]
    assert np.unique(index.shared_addresses).size == index.shared_addresses.size
    assert not (index.shared_addresses % unit).any() and not (index.global_addresses[inside] % unit).any()
    shared.reshape(-1, unit)[index.shared_addresses // unit] = values


def element_places(tensor, coords, start):
    """Every element of a box: its global address (None: out of bounds) and its shared one, by PTX's definition."""
    steps = (1, *tensor.element_strides[1:])
    counts = [-(-size // step) for size, step in zip(tensor.box, steps, strict=True)]
    strides = (tensor.element_bytes, *tensor.strides)
    for number, place in enumerate(itertools.product(*(range(count) for count in reversed(counts)))):
        index = [coord + i * step for coord, i, step in zip(coords, reversed(place), steps, strict=True)]
        inside = all(0 <= i < extent for i, extent in zip(index, tensor.dims, strict=True))
        address = start + number * tensor.element_bytes
        if tensor.swizzle:
            row = address // 128 % (tensor.swizzle // 16)
            address = (address // 16 ^ row) * 16 + address % 16
        yield (tensor.address + sum(i * s for i, s in zip(index, strides, strict=True)) if inside else None), address


def check_load(tensor, coords, start=2048):
    generator = np.random.default_rng(len(tensor.dims))
    memory = generator.integers(0, 256, 1 << 19).astype(np.uint8)
    shared = generator.integers(0, 256, 1 << 16).astype(np.uint8)
    wanted, size = shared.copy(), tensor.element_bytes
    outside = 0
    for source, place in element_places(tensor, coords, start):
        outside += source is None
        zero = fill_unit(tensor, size)
        wanted[place : place + size] = zero if source is None else memory[source : source + size]
    copied_in(tensor, memory, coords, shared, start)
    assert np.array_equal(shared, wanted)
    return outside


@pytest.mark.parametrize("rank", [1, 2, 3, 4, 5])
@pytest.mark.parametrize(
    ("element", "fill"), [("u8", "zero"), ("bf16", "zero"), ("f16", "nan"), ("f32", "nan"), ("f64", "nan")]
)
def test_a_tile_of_any_rank_is_loaded_element_by_element(rank, element, fill):
    size = ELEMENT_BYTES[element]
    dims, box = (40, 9, 6, 5, 4)[:rank], (32 // size, 4, 3, 2, 2)[:rank]
    strides = tuple(itertools.accumulate((9, 6, 5), lambda stride, dim: stride * dim, initial=320))[: rank - 1]
    tensor = TensorMap(4096, element, dims, strides, box, fill=fill)
    assert check_load(tensor, (8, 1, 1, 0, 1)[:rank]) == 0
    assert check_load(tensor, (-3, -2, 4, 4, -1)[:rank], 2048 + 128) > 0
    assert check_load(tensor, (37, 7, 0, 4, 3)[:rank], 2048 + 896) > 0
    assert check_load(tensor, (41, 0, 0, 0, 0)[:rank]) == tensor.box_bytes // size


@pytest.mark.parametrize("swizzle", SWIZZLES)
@pytest.mark.parametrize("element", ["u8", "f16", "f32"])
def test_a_swizzled_tile_follows_the_bits_of_its_own_address(swizzle, element):
    size = ELEMENT_BYTES[element]
    tensor = TensorMap(4096, element, (90, 30), (384,), ((swizzle or 64) // size, 20), swizzle=swizzle)
    for start, coords in itertools.product((1024, 1024 + 128, 4096 + 640), ((0, 0), (5, 3), (-7, 14), (60, -9))):
        check_load(tensor, coords, start)


@pytest.mark.parametrize("steps", [(1, 2), (1, 8), (3, 3)])
def test_element_strides_take_every_nth_row_and_never_skip_in_the_first_dimension(steps):
    tensor = TensorMap(4096, "bf16", (64, 50), (128,), (16, 21), steps)
    assert tensor.counts == (16, -(-21 // steps[1]))
    assert check_load(tensor, (8, 3)) == 0
    assert check_load(tensor, (56, 40)) > 0


def test_a_map_survives_packing():
    for swizzle, element in zip(SWIZZLES, ("u8", "f16", "tf32", "s64"), strict=True):
        tensor = TensorMap(1 << 40, element, (1 << 32, 7, 3), (1 << 36, 16), (16, 256, 1), (1, 8, 2), swizzle)
        assert unpack(tensor.pack()) == tensor
        assert len(tensor.pack()) == 128
    assert unpack(dataclasses.replace(PLAIN, fill="nan").pack()).fill == "nan"


def test_a_map_can_be_made_by_replacing_the_fields_of_zeroed_memory():
    raw = bytes(128)
    fields = [("global_address", 0, 4096), ("rank", 0, 1), ("box_dim", 0, 64), ("box_dim", 1, 16)]
    fields += [("global_dim", 0, 100), ("global_dim", 1, 60), ("element_stride", 0, 1), ("element_stride", 1, 1)]
    fields += [("elemtype", 0, 10), ("interleave_layout", 0, 0), ("swizzle_mode", 0, 3), ("fill_mode", 0, 1)]
    for field, ordinal, value in fields:
        raw = replace(raw, field, ordinal, value)
    wanted = TensorMap(4096, "bf16", (100, 60), (256,), (64, 16), swizzle=128, fill="nan")
    assert unpack(replace(raw, "global_stride", 0, 256)) == wanted
    assert unpack(replace(raw, "global_stride", 0, 16, stride_unit=16)) == wanted
    assert unpack(replace(PLAIN.pack(), "global_dim", 1, 61)) == dataclasses.replace(PLAIN, dims=(100, 61))


@pytest.mark.parametrize(
    "change,words",
    [
        ({"address": 8}, "address: expected a multiple of 16"),
        ({"dims": (0, 60)}, "dims: expected 1 to 2"),
        ({"strides": (8,)}, "strides: expected multiples of 16"),
        ({"box": (257, 1)}, "box: expected 1 to 256"),
        ({"box": (4, 4)}, "box: expected rows of a multiple of 16 bytes"),
        ({"swizzle": 64}, "box: expected rows of at most 64"),
        ({"element_strides": (1, 9)}, "element_strides: expected 1 to 8"),
        ({"fill": "nan", "element": "u16"}, "fill: nan needs"),
    ],
)
def test_a_map_that_the_driver_would_refuse_raises(change, words):
    with pytest.raises(ValueError, match=words):
        dataclasses.replace(PLAIN, **change)


@pytest.mark.parametrize(
    "call,words",
    [
        (lambda: unpack(b"\xff" * 128), "that a TensorMap packed, got ffff"),
        (lambda: unpack(bytes(128)), "got 128 zero bytes"),
        (lambda: unpack(replace(PLAIN.pack(), "rank", 0, 7)), "rank of 1 to 5, got 8"),
        (lambda: replace(PLAIN.pack(), "magic", 0, 1), "field: expected"),
        (lambda: replace(PLAIN.pack(), "box_dim", 5, 1), "ordinal: expected"),
        (lambda: tile_index(PLAIN, (0, 0, 0), 0), "coords: expected 2, got 3"),
        (lambda: tile_index(PLAIN, (0, 0), 64), "multiple of 128, got 0x40"),
    ],
)
def test_bytes_fields_and_boxes_that_are_none_raise(call, words):
    with pytest.raises(ValueError, match=words):
        call()


WHOLE = {"u32": np.uint32, "s32": np.int32, "u64": np.uint64, "s64": np.int64}


@pytest.mark.parametrize(
    ("element", "op"),
    [
        *itertools.product(WHOLE, ["min", "max", "and", "or", "xor"]),
        *itertools.product(["u32", "s32", "u64"], ["add"]),
        *itertools.product(["u32"], ["inc", "dec"]),
    ],
)
def test_reductions_of_integers_are_those_of_red(element, op):
    dtype, bits = WHOLE[element], 8 * np.dtype(WHOLE[element]).itemsize
    raw = np.random.default_rng(bits).integers(0, 1 << 63, (2, 40), dtype=np.uint64) * np.uint64(2)
    old, new = (raw >> np.uint64(64 - bits)).astype(f"u{bits // 8}")
    new[:3], old[:3] = (5, 0, 9), (5, 7, 0)
    rules = {
        "add": lambda x, y: x + y,
        "min": min,
        "max": max,
        "and": lambda x, y: x & y,
        "or": lambda x, y: x | y,
        "xor": lambda x, y: x ^ y,
        "inc": lambda x, y: 0 if x >= y else x + 1,
        "dec": lambda x, y: y if x == 0 or x > y else x - 1,
    }
    wanted = [rules[op](int(x), int(y)) % (1 << bits) for x, y in zip(old.view(dtype), new.view(dtype), strict=True)]
    found = combined(op, element, old.view(dtype), [new.view(dtype)])
    assert found.dtype == dtype and found.view(old.dtype).tolist() == wanted


@pytest.mark.parametrize("element", ["f16", "bf16", "f32", "f64"])
def test_reductions_of_floats_round_once_and_prefer_numbers_to_nan(element):
    generator = np.random.default_rng(9)
    numbers = generator.standard_normal((2, 64)).astype(np.float64 if element == "f64" else np.float32)
    numbers[0, 0] = np.nan
    small = element in ("f16", "bf16")
    word = np.uint16 if small else np.dtype(f"u{numbers.itemsize}")
    old, new = encode(numbers, element) if small else numbers.view(word)
    x, y = (decode(bits, element) if small else bits.view(numbers.dtype) for bits in (old, new))
    sums = {"add": x + y, "min": np.fmin(x, y), "max": np.fmax(x, y)}
    for op in sums if small else ["add"]:
        found = combined(op, element, *((old, [new]) if small else (x, [y])))
        assert found.dtype == (word if small else numbers.dtype)
        kept = decode(found, element) if small else found
        rounded = decode(encode(sums[op], element), element) if small else sums[op]
        assert np.array_equal(kept, rounded, equal_nan=True) and np.isnan(kept[0]) == (op == "add")


def test_tf32_loads_are_rounded_and_ftz_loads_lose_subnormals():
    bits = np.array([0x3F801000, 0x3F803000, 0x3F800FFF, 0x7F800000, 0x80000001, 0x3F801001], np.uint32)
    assert loaded(bits, "tf32").tolist() == [0x3F800000, 0x3F804000, 0x3F800000, 0x7F800000, 0x80000000, 0x3F802000]
    assert loaded(bits, "f32.ftz").tolist() == [*bits[:4].tolist(), 0x80000000, 0x3F801001]
    assert loaded(bits, "f32") is bits
