"""Tensor maps: what cuTensorMapEncodeTiled takes, checked as it checks, in 128 bytes of our own.

The true layout is secret, so maps made on the host and maps made on the device by `tensormap.replace` both use the one
here.  All zeros are an empty map, as on sm_90a, where a kernel may start from zeroed shared memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

BYTES = 128
"""Bytes of a tensor map."""
ELEMENTS = ("u8", "u16", "u32", "s32", "u64", "s64", "f16", "f32", "f32.ftz", "f64", "bf16", "tf32", "tf32.ftz")
"""Element types in the order of the .elemtype values of PTX ISA 8.7, `tensormap.replace`."""
DRIVER_ELEMENTS = ("u8", "u16", "u32", "s32", "u64", "s64", "f16", "f32", "f64", "bf16", "f32.ftz", "tf32", "tf32.ftz")
"""The same in the order of the driver's CUtensorMapDataType, which differs from 8 on."""
ELEMENT_BYTES = {name: 8 if "64" in name else 4 if "32" in name else 1 if name == "u8" else 2 for name in ELEMENTS}
SWIZZLES = (0, 32, 64, 128)
"""Bytes of the swizzle, in the order of PTX's .swizzle_mode and of the driver's CUtensorMapSwizzle."""
FILLS = ("zero", "nan")
"""What a load writes for elements out of bounds, in the order of .fill_mode."""

_MAGIC = 0x70616D5F62616C66
_FIELDS = np.dtype(
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
_CODES = {"elemtype": len(ELEMENTS), "interleave_layout": 3, "swizzle_mode": len(SWIZZLES), "fill_mode": len(FILLS)}


@dataclass(frozen=True)
class TensorMap:
    """A tiled tensor in global memory and the box that one copy moves; the dimension that is contiguous comes first.

    Raises `ValueError`, naming the argument, where cuTensorMapEncodeTiled would refuse it (CUDA driver API, "Tensor Map
    Object Management"), and on an interleaved layout, which is not emulated.
    """

    address: int
    """Global address of the first element, a multiple of 16."""
    element: str
    """One of `ELEMENTS`."""
    dims: tuple[int, ...]
    """Elements of each of 1 to 5 dimensions."""
    strides: tuple[int, ...]
    """Bytes from one index to the next of every dimension but the first, multiples of 16."""
    box: tuple[int, ...]
    """Elements that a box spans along each dimension, at most 256."""
    element_strides: tuple[int, ...] = ()
    """Every how many elements one is taken along each dimension, 1 to 8; the first is ignored.  Empty: all 1."""
    swizzle: int = 0
    """Bytes of the swizzle in shared memory: 0, 32, 64 or 128."""
    fill: str = "zero"
    """One of `FILLS`."""
    interleave: int = 0
    """Only 0, none."""

    def __post_init__(self) -> None:
        if not self.element_strides:
            object.__setattr__(self, "element_strides", (1,) * self.rank)
        if not 1 <= self.rank <= 5:
            raise ValueError(f"dims: expected 1 to 5 dimensions, got {self.rank}")
        if self.element not in ELEMENTS:
            raise ValueError(f"element: expected one of {ELEMENTS}, got {self.element!r}")
        for name, wanted in (("strides", self.rank - 1), ("box", self.rank), ("element_strides", self.rank)):
            if len(getattr(self, name)) != wanted:
                raise ValueError(f"{name}: expected {wanted} for {self.rank} dimensions, got {getattr(self, name)}")
        self._check_sizes()
        self._check_modes()

    def _check_sizes(self) -> None:
        if self.address < 0 or self.address % 16:
            raise ValueError(f"address: expected a multiple of 16, got {self.address:#x}")
        if not all(0 < size <= 1 << 32 for size in self.dims):
            raise ValueError(f"dims: expected 1 to 2**32 elements, got {self.dims}")
        if not all(0 <= stride < 1 << 40 and stride % 16 == 0 for stride in self.strides):
            raise ValueError(f"strides: expected multiples of 16 bytes below 2**40, got {self.strides}")
        if not all(0 < size <= 256 for size in self.box):
            raise ValueError(f"box: expected 1 to 256 elements, got {self.box}")
        if not all(0 < step <= 8 for step in self.element_strides):
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
        if self.fill not in FILLS:
            raise ValueError(f"fill: expected one of {FILLS}, got {self.fill!r}")
        if self.fill == "nan" and self.element[0] in "us":
            raise ValueError(f"fill: nan needs a floating-point element, got {self.element}")

    @property
    def rank(self) -> int:
        """Number of dimensions."""
        return len(self.dims)

    @property
    def element_bytes(self) -> int:
        """Bytes of an element."""
        return ELEMENT_BYTES[self.element]

    @cached_property
    def row_bytes(self) -> int:
        """Bytes of a box along the first dimension."""
        return self.box[0] * self.element_bytes

    @cached_property
    def steps(self) -> tuple[int, ...]:
        """Every how many elements a copy takes one along each dimension."""
        return (1, *self.element_strides[1:])

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """Elements that a copy moves along each dimension: the box over the element strides, rounded up."""
        return tuple(-(-size // step) for size, step in zip(self.box, self.steps, strict=True))

    @cached_property
    def box_bytes(self) -> int:
        """Bytes that a copy writes to or reads from shared memory; a load's mbarrier counts them all, filled or not."""
        return int(np.prod(self.counts)) * self.element_bytes

    def pack(self) -> bytes:
        """The map in 128 bytes, for `unpack` and `replace`."""
        record = np.zeros((), _FIELDS)
        record["magic"], record["global_address"] = _MAGIC, self.address
        arrays = {"global_dim": self.dims, "global_stride": self.strides, "box_dim": self.box}
        for name, values in {**arrays, "element_stride": self.element_strides}.items():
            record[name][: len(values)] = values
        record["rank"], record["elemtype"] = self.rank - 1, ELEMENTS.index(self.element)
        record["swizzle_mode"], record["fill_mode"] = SWIZZLES.index(self.swizzle), FILLS.index(self.fill)
        return record.tobytes()


@lru_cache(maxsize=1024)
def unpack(raw: bytes) -> TensorMap:
    """The map in 128 bytes.  Raises `ValueError` on bytes that are no map of ours, or hold one that is not valid."""
    record = _record(raw)
    if not int(record["magic"]):
        raise ValueError("tensor map: expected one that was filled in, got 128 zero bytes")
    rank = int(record["rank"]) + 1
    if rank > 5:
        raise ValueError(f"tensor map: expected a rank of 1 to 5, got {rank}")
    return TensorMap(
        int(record["global_address"]),
        ELEMENTS[int(record["elemtype"])],
        tuple(record["global_dim"][:rank].tolist()),
        tuple(record["global_stride"][: rank - 1].tolist()),
        tuple(record["box_dim"][:rank].tolist()),
        tuple(record["element_stride"][:rank].tolist()),
        SWIZZLES[int(record["swizzle_mode"])],
        FILLS[int(record["fill_mode"])],
        int(record["interleave_layout"]),
    )


def replace(raw: bytes, field: str, ordinal: int, value: int, *, stride_unit: int = 1) -> bytes:
    """The map in `raw` (128 bytes, or zeros) with one field changed, as `tensormap.replace.tile` does.

    PTX ISA 8.7, `tensormap.replace`: `field` is global_address, rank, box_dim, global_dim, global_stride,
    element_stride, elemtype, interleave_layout, swizzle_mode or fill_mode; `ordinal` counts dimensions, 0 where the
    field has none; `value` is one less than the rank, the number of PTX's table for the modes, else the value itself.
    A global_stride is in bytes; code for PTX versions up to 8.5 has it in units of 16 (`stride_unit` 16), because
    ptxas shifted it (Triton writes it so).  The other fields may still be missing.  Raises `ValueError` on an unknown
    field or a value that no map can hold.
    """
    record = _record(raw)
    if field not in (_FIELDS.names or ())[1:-1]:
        raise ValueError(f"field: expected one of {(_FIELDS.names or ())[1:-1]}, got {field!r}")
    room = record[field].reshape(-1)
    if not 0 <= ordinal < room.size:
        raise ValueError(f"ordinal: expected 0 to {room.size - 1} for {field}, got {ordinal}")
    value = int(value) * (stride_unit if field == "global_stride" else 1)
    limit = _CODES.get(field, np.iinfo(room.dtype).max + 1)
    if not 0 <= value < limit:
        raise ValueError(f"{field}: expected 0 to {limit - 1}, got {value}")
    if record[field].ndim:
        record[field][ordinal] = value
    else:
        record[field] = value
    record["magic"] = _MAGIC
    return record.tobytes()


def _record(raw: bytes) -> np.ndarray:
    """A writable copy of the fields, where the bytes are ours or all zero."""
    if len(raw) != BYTES:
        raise ValueError(f"tensor map: expected {BYTES} bytes, got {len(raw)}")
    record = np.frombuffer(raw, _FIELDS).copy().reshape(())
    if int(record["magic"]) != _MAGIC and any(raw):
        raise ValueError(f"tensor map: expected bytes that a TensorMap packed, got {bytes(raw[:16]).hex()}...")
    return record
