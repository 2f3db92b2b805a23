"""Implements tensor maps and the tiles that TMA copies with them: map fields, box addresses, and changes to values.

A map holds the arguments of cuTensorMapEncodeTiled in 128 bytes, after the same checks.  NVIDIA does not publish the
layout of these bytes, so this module uses its own.  128 zero bytes are an empty map.

A box is dense in shared memory, its first dimension fastest (PTX ISA 8.7, "Tensors" and `cp.async.bulk.tensor`).  A
load fills elements outside of the tensor; a store leaves them unchanged.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

import numpy as np
import torch

from rooflab.bench.emulator.numbers.bits import UNSIGNED
from rooflab.bench.emulator.numbers.formats import encode
from rooflab.bench.emulator.tiles.shared_layout import CHUNK_BYTES, SWIZZLE_PERIOD, swizzled

MAP_BYTES = 128
"""Bytes of a tensor map."""
ELEMENT_TYPES = ("u8", "u16", "u32", "s32", "u64", "s64", "f16", "f32", "f32.ftz", "f64", "bf16", "tf32", "tf32.ftz")
"""Element types in the order of the .elemtype values of PTX ISA 8.7, `tensormap.replace`."""
DRIVER_ELEMENTS = ("u8", "u16", "u32", "s32", "u64", "s64", "f16", "f32", "f64", "bf16", "f32.ftz", "tf32", "tf32.ftz")
"""The types in `ELEMENT_TYPES`, in the order of the driver's CUtensorMapDataType, which differs from index 8 on."""
ELEMENT_BYTES = {name: 8 if "64" in name else 4 if "32" in name else 1 if name == "u8" else 2 for name in ELEMENT_TYPES}
SWIZZLES = (0, 32, 64, 128)
"""The bytes of the swizzle, in the order of PTX's .swizzle_mode and of the driver's CUtensorMapSwizzle."""
FILL_MODES = ("zero", "nan")
"""The values that a load writes for elements out of bounds, in the order of PTX's .fill_mode."""

_MAGIC_NUMBER = 0x70616D5F62616C66
_MAP_DTYPE = np.dtype(
    [
        ("magic", "<u8"),
        ("global_address", "<u8"),
        ("global_dim", "<u8", (5,)),
        ("global_stride", "<u8", (4,)),
        ("box_dim", "<u2", (5,)),
        ("element_stride", "u1", (5,)),
        ("rank", "u1"),
        ("elemtype", "u1"),
        ("interleave_layout", "u1"),
        ("swizzle_mode", "u1"),
        ("fill_mode", "u1"),
        ("unused", "u1", (20,)),
    ]
)
_CODE_COUNTS = {
    "elemtype": len(ELEMENT_TYPES),
    "interleave_layout": 3,
    "swizzle_mode": len(SWIZZLES),
    "fill_mode": len(FILL_MODES),
}
BOX_ALIGNMENT = 128
"""The alignment in bytes of the shared address of a box."""
_INTEGER_TYPES = ("u32", "s32", "u64", "s64")
REDUCIBLE_TYPES = {
    "add": ("u32", "s32", "u64", "f16", "f32", "f32.ftz", "f64", "bf16", "tf32", "tf32.ftz"),
    **dict.fromkeys(("min", "max"), (*_INTEGER_TYPES, "f16", "bf16")),
    **dict.fromkeys(("inc", "dec"), ("u32",)),
    **dict.fromkeys(("and", "or", "xor"), _INTEGER_TYPES),
}
"""By reduction, the element types that ptxas accepts for `cp.reduce.async.bulk`, and Triton for tensors (PTX ISA 8.7,
`red` and `cp.reduce.async.bulk.tensor`)."""


@dataclass(frozen=True)
class TensorMap:
    """Describes a tiled tensor in global memory, and the box that one copy moves.  The contiguous dimension is first.

    Raises `ValueError`, with the argument's name, if cuTensorMapEncodeTiled would refuse the map (CUDA driver API,
    "Tensor Map Object Management"), and on an interleaved layout, which is not emulated."""

    address: int
    """Global address of the first element, a multiple of 16."""
    element: str
    """The element type, one of `ELEMENT_TYPES`."""
    dims: tuple[int, ...]
    """The number of elements of each of 1 to 5 dimensions."""
    strides: tuple[int, ...]
    """The bytes from one index to the next, in every dimension except the first; multiples of 16."""
    box: tuple[int, ...]
    """The number of elements that a box spans along each dimension, at most 256."""
    element_strides: tuple[int, ...] = ()
    """The steps between copied elements along each dimension, 1 to 8; the first is ignored.  Empty means all are 1."""
    swizzle: int = 0
    """The bytes of the swizzle in shared memory: 0, 32, 64 or 128."""
    fill: str = "zero"
    """The value for elements out of bounds, one of `FILL_MODES`."""
    interleave: int = 0
    """The interleaved layout; must be 0, which means none."""
    base: torch.Tensor | None = field(default=None, compare=False, repr=False)
    """The tensor at `address`, for a map of the host whose tensor is not itself an argument of the launch."""

    def __post_init__(self) -> None:
        if not self.element_strides:
            object.__setattr__(self, "element_strides", (1,) * self.rank)
        if not 1 <= self.rank <= 5:
            raise ValueError(f"dims: expected 1 to 5 dimensions, got {self.rank}")
        if self.element not in ELEMENT_TYPES:
            raise ValueError(f"element: expected one of {ELEMENT_TYPES}, got {self.element!r}")
        for name, expected_length in (("strides", self.rank - 1), ("box", self.rank), ("element_strides", self.rank)):
            if len(getattr(self, name)) != expected_length:
                raise ValueError(
                    f"{name}: expected {expected_length} for {self.rank} dimensions, got {getattr(self, name)}"
                )
        self._check_sizes()
        self._check_modes()

    def _check_sizes(self) -> None:
        if self.address < 0 or self.address % 16:
            raise ValueError(f"address: expected a multiple of 16, got {self.address:#x}")
        if not all(0 < dim_size <= 1 << 32 for dim_size in self.dims):
            raise ValueError(f"dims: expected 1 to 2**32 elements, got {self.dims}")
        if not all(0 <= stride < 1 << 40 and stride % 16 == 0 for stride in self.strides):
            raise ValueError(f"strides: expected multiples of 16 bytes below 2**40, got {self.strides}")
        if not all(0 < dim_size <= 256 for dim_size in self.box):
            raise ValueError(f"box: expected 1 to 256 elements, got {self.box}")
        if not all(0 < element_step <= 8 for element_step in self.element_strides):
            raise ValueError(f"element_strides: expected 1 to 8, got {self.element_strides}")
        if self.row_bytes % 16:
            raise ValueError(f"box: expected rows of a multiple of 16 bytes, got {self.box[0]} {self.element}")

    def _check_modes(self) -> None:
        if self.interleave:
            raise ValueError(f"interleave: only 0, none, is emulated, got {self.interleave}")
        if self.swizzle not in SWIZZLES:
            raise ValueError(f"swizzle: expected one of {SWIZZLES} bytes, got {self.swizzle}")
        if self.swizzle and self.row_bytes > self.swizzle:
            raise ValueError(f"box: expected rows of at most {self.swizzle} bytes, the swizzle, got {self.row_bytes}")
        if self.fill not in FILL_MODES:
            raise ValueError(f"fill: expected one of {FILL_MODES}, got {self.fill!r}")
        if self.fill == "nan" and self.element[0] in "us":
            raise ValueError(f"fill: nan needs a floating-point element, got {self.element}")

    @property
    def rank(self) -> int:
        """Returns the number of dimensions."""
        return len(self.dims)

    @property
    def element_bytes(self) -> int:
        """Returns the bytes of an element."""
        return ELEMENT_BYTES[self.element]

    @cached_property
    def row_bytes(self) -> int:
        """Returns the bytes of one row of a box (along the first dimension)."""
        return self.box[0] * self.element_bytes

    @cached_property
    def steps(self) -> tuple[int, ...]:
        """Returns the step along each dimension, in elements of the tensor, from one copied element to the next."""
        return (1, *self.element_strides[1:])

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """Returns the number of copied elements along each dimension: `ceil(box / element_stride)`."""
        return tuple(-(-box_size // element_step) for box_size, element_step in zip(self.box, self.steps, strict=True))

    @cached_property
    def box_bytes(self) -> int:
        """Returns the bytes of shared memory that a copy accesses.  A load's mbarrier counts all of these bytes."""
        return int(np.prod(self.counts)) * self.element_bytes

    def pack(self) -> bytes:
        """Packs the map into 128 bytes, for `unpack` and `replace`."""
        map_record = np.zeros((), _MAP_DTYPE)
        map_record["magic"], map_record["global_address"] = _MAGIC_NUMBER, self.address
        array_fields = {"global_dim": self.dims, "global_stride": self.strides, "box_dim": self.box}
        for field_name, field_values in {**array_fields, "element_stride": self.element_strides}.items():
            map_record[field_name][: len(field_values)] = field_values
        map_record["rank"], map_record["elemtype"] = self.rank - 1, ELEMENT_TYPES.index(self.element)
        map_record["swizzle_mode"], map_record["fill_mode"] = SWIZZLES.index(self.swizzle), FILL_MODES.index(self.fill)
        return map_record.tobytes()


@lru_cache(maxsize=1024)
def unpack(raw: bytes) -> TensorMap:
    """Reads a map from 128 bytes.  Raises `ValueError` on bytes that `pack` did not make, and on an invalid map."""
    map_record = _record(raw)
    if not int(map_record["magic"]):
        raise ValueError("tensor map: expected one that was filled in, got 128 zero bytes")
    rank = int(map_record["rank"]) + 1
    if rank > 5:
        raise ValueError(f"tensor map: expected a rank of 1 to 5, got {rank}")
    return TensorMap(
        int(map_record["global_address"]),
        ELEMENT_TYPES[int(map_record["elemtype"])],
        tuple(map_record["global_dim"][:rank].tolist()),
        tuple(map_record["global_stride"][: rank - 1].tolist()),
        tuple(map_record["box_dim"][:rank].tolist()),
        tuple(map_record["element_stride"][:rank].tolist()),
        SWIZZLES[int(map_record["swizzle_mode"])],
        FILL_MODES[int(map_record["fill_mode"])],
        int(map_record["interleave_layout"]),
    )


def replace(raw: bytes, field: str, ordinal: int, value: int, *, stride_unit: int = 1) -> bytes:
    """Returns the tensor map `raw` (128 bytes) with one field changed, as `tensormap.replace.tile` does.

    `field` is a field name in PTX ISA 8.7, `tensormap.replace`.  `ordinal` is the dimension, or 0 if the field has
    none.  `value` is the new value, as PTX codes it.  For example, the field `rank` gets the rank minus one.

    A global_stride counts units of `stride_unit` bytes.  The unit is 16 in code for PTX up to 8.5, such as Triton's.
    Raises `ValueError` on an unknown field or a value that does not fit."""
    map_record = _record(raw)
    if field not in (_MAP_DTYPE.names or ())[1:-1]:
        raise ValueError(f"field: expected one of {(_MAP_DTYPE.names or ())[1:-1]}, got {field!r}")
    field_entries = map_record[field].reshape(-1)
    if not 0 <= ordinal < field_entries.size:
        raise ValueError(f"ordinal: expected 0 to {field_entries.size - 1} for {field}, got {ordinal}")
    value = int(value) * (stride_unit if field == "global_stride" else 1)
    value_limit = _CODE_COUNTS.get(field, np.iinfo(field_entries.dtype).max + 1)
    if not 0 <= value < value_limit:
        raise ValueError(f"{field}: expected 0 to {value_limit - 1}, got {value}")
    if map_record[field].ndim:
        map_record[field][ordinal] = value
    else:
        map_record[field] = value
    map_record["magic"] = _MAGIC_NUMBER
    return map_record.tobytes()


def _record(raw: bytes) -> np.ndarray:
    """Parses the bytes of a tensor map into a writable record of its fields. Raises `ValueError` for bytes that are
    neither from `pack` nor all zero."""
    if len(raw) != MAP_BYTES:
        raise ValueError(f"tensor map: expected {MAP_BYTES} bytes, got {len(raw)}")
    map_record = np.frombuffer(raw, _MAP_DTYPE).copy().reshape(())
    if int(map_record["magic"]) != _MAGIC_NUMBER and any(raw):
        raise ValueError(f"tensor map: expected bytes that a TensorMap packed, got {bytes(raw[:16]).hex()}...")
    return map_record


@dataclass(frozen=True)
class TileIndex:
    """Describes a box as n units of `unit_bytes` bytes.  A unit is wholly inside or wholly outside of the tensor."""

    global_addresses: np.ndarray
    """The units' global addresses: (n,) int64, multiples of `unit_bytes`; meaningless where a unit is outside."""
    shared_addresses: np.ndarray
    """The units' addresses in shared memory: (n,) int64, in bytes."""
    inside: np.ndarray | None
    """Whether each unit is inside of the tensor: (n,) bool; None if all units are."""
    unit_bytes: int
    """The bytes of a unit: 16, or less if the coordinates or the tensor's edge cut a chunk; at least one element."""


def tile_index(tensor: TensorMap, coords: Sequence[int], shared_address: int) -> TileIndex:
    """Returns the global and shared memory addresses of a TMA box.  In the tensor, the box begins at the element
    `coords`.  In shared memory, it begins at the byte `shared_address`.

    `coords` has one signed number per dimension.  Raises `ValueError` on a wrong number of coordinates, on a shared
    address that is not a multiple of 128, or on rows narrower than the swizzle."""
    if len(coords) != tensor.rank:
        raise ValueError(f"coords: expected {tensor.rank}, got {len(coords)}")
    if shared_address % BOX_ALIGNMENT:
        raise ValueError(f"shared_address: expected a multiple of {BOX_ALIGNMENT}, got {shared_address:#x}")
    box_starts = [int(coordinate) for coordinate in coords]
    element_bytes = tensor.element_bytes
    is_in_bounds = [
        start >= 0 and start + (count - 1) * step < tensor_length
        for start, count, step, tensor_length in zip(box_starts, tensor.counts, tensor.steps, tensor.dims, strict=True)
    ]
    unit_bytes = math.gcd(
        CHUNK_BYTES, box_starts[0] * element_bytes, 0 if is_in_bounds[0] else tensor.dims[0] * element_bytes
    )
    swizzle_phase = shared_address % SWIZZLE_PERIOD
    origin_address = tensor.address + box_starts[0] * element_bytes
    origin_address += sum(start * stride for start, stride in zip(box_starts[1:], tensor.strides, strict=True))
    global_offsets, shared_offsets = _offsets(tensor, unit_bytes, swizzle_phase)
    return TileIndex(
        global_offsets + origin_address,
        shared_offsets + (shared_address - swizzle_phase),
        None if all(is_in_bounds) else _inside(tensor, box_starts, unit_bytes),
        unit_bytes,
    )


@lru_cache(maxsize=1024)
def _offsets(tensor: TensorMap, unit: int, phase: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the byte offset of each unit of the box in global memory and in shared memory. `phase` is the position of
    the box's first byte in the swizzle pattern."""
    if 0 < tensor.row_bytes < tensor.swizzle:
        raise ValueError(f"box: expected rows of the {tensor.swizzle} bytes of the swizzle, got {tensor.row_bytes}")
    offsets = np.arange(0, tensor.row_bytes, unit, dtype=np.int64)
    for count, step, stride in zip(tensor.counts[1:], tensor.steps[1:], tensor.strides, strict=True):
        offsets = np.add.outer(np.arange(count, dtype=np.int64) * (step * stride), offsets)
    shared_addresses = phase + np.arange(0, tensor.box_bytes, unit, dtype=np.int64)
    return offsets.reshape(-1), swizzled(shared_addresses, tensor.swizzle)


def _inside(tensor: TensorMap, starts: Sequence[int], unit: int) -> np.ndarray:
    """Tells for each unit (piece) of the box whether it lies inside the tensor: `[units]`."""
    element_bytes = tensor.element_bytes
    positions = np.arange(0, tensor.row_bytes, unit, dtype=np.int64) + starts[0] * element_bytes
    is_inside = (positions >= 0) & (positions < tensor.dims[0] * element_bytes)
    other_dims = zip(starts[1:], tensor.counts[1:], tensor.steps[1:], tensor.dims[1:], strict=True)
    for start, count, step, tensor_length in other_dims:
        positions = start + np.arange(count, dtype=np.int64) * step
        is_inside = np.logical_and.outer((positions >= 0) & (positions < tensor_length), is_inside)
    return is_inside.reshape(-1)


def fill_unit(tensor: TensorMap, unit_bytes: int) -> np.ndarray:
    """Returns the bytes that a load writes for a unit outside of the tensor: (unit_bytes,) uint8.

    The bytes are zeros.  If the map's `fill` is nan, each element is PTX's canonical NaN: all bits except the sign are
    1.  The ISA says "special NaN" and gives no bits."""
    element_bytes = tensor.element_bytes
    if tensor.fill == "zero":
        return np.zeros(unit_bytes, np.uint8)
    nan_bits = np.array((1 << (8 * element_bytes - 1)) - 1, UNSIGNED[element_bytes])
    return np.tile(nan_bits.reshape(1).view(np.uint8), unit_bytes // element_bytes)


def loaded(bits: np.ndarray, element: str) -> np.ndarray:
    """Converts raw elements (unsigned, any shape) as a load through a map of type `element` does.

    tf32 and tf32.ftz are rounded to 10 bits of mantissa, to nearest even.  The .ftz types turn subnormals into zeros of
    the same sign.  Elements of all other types are copied."""
    if element.endswith(".ftz"):
        bits = np.where(bits & np.uint32(0x7F800000), bits, bits & np.uint32(0x80000000))
    if element.startswith("tf32"):
        bits = np.asarray(encode(bits.view(np.float32), "tf32")).view(np.uint32)
    return bits
