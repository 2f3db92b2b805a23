"""Reads a GGUF file: its keys with their values, and its tensors by name (format: ggml's docs/gguf.md).

The reader in the package `gguf` takes half a minute for a vocabulary of 128,256 tokens.  This file takes half a second.
The package still decodes quantised blocks.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

_DTYPES = dict(enumerate(("u1", "i1", "<u2", "<i2", "<u4", "<i4", "<f4", "?"))) | {10: "<u8", 11: "<i8", 12: "<f8"}
_TEXT_TYPE, _ARRAY_TYPE = 8, 9


@dataclass(frozen=True)
class GGUFTensor:
    """Describes a tensor in a GGUF file: its shape in torch's order, and the position of its bytes in the file."""

    name: str
    shape: tuple[int, ...]
    kind: int
    """The number that ggml gives to the dtype or quantisation."""
    path: Path
    start: int
    """The offset of the first byte in the file."""
    size: int
    """The number of bytes."""

    def values(self) -> np.ndarray:
        """Reads the tensor into a new fp32 array.  Raises `ValueError` if its quantisation is not supported."""
        from gguf import GGMLQuantizationType, quants

        raw_data = np.memmap(self.path, np.uint8, "r", self.start, (self.size,)) if self.size else np.empty(0, np.uint8)
        byte_rows = raw_data.reshape(*self.shape[:-1], -1) if self.size else raw_data.reshape(self.shape)
        try:
            return np.array(quants.dequantize(byte_rows, GGMLQuantizationType(self.kind)), np.float32)
        except (NotImplementedError, ValueError) as error:
            raise ValueError(f"model: cannot dequantise {self.name}: {error}") from error


@dataclass(frozen=True)
class GGUFFile:
    """Holds the header of a GGUF file: every key with its value, and every tensor by its name."""

    path: Path
    fields: dict[str, Any]
    tensors: dict[str, GGUFTensor]


def read_gguf(path: Path) -> GGUFFile:
    """Reads the keys and the list of tensors of a GGUF file, but no tensor data.

    Raises `ValueError` if the file is incomplete, has a version other than 2 or 3, or repeats a key or a tensor."""
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise ValueError(f"model: {path.name} is not a whole GGUF file: it does not begin with GGUF")
        try:
            gguf_version, num_tensors, num_keys = struct.unpack("<IQQ", _exactly(file, 20))
            if gguf_version not in (2, 3):
                raise ValueError(f"version {gguf_version}")
            fields: dict[str, Any] = {}
            for _ in range(num_keys):
                _add(fields, _text(file), _value(file, *struct.unpack("<I", _exactly(file, 4))))
            return GGUFFile(path, fields, _tensors(file, path, num_tensors, fields.get("general.alignment", 32)))
        except (ValueError, UnicodeDecodeError) as error:
            raise ValueError(f"model: {path.name} is not a whole GGUF file: {error}") from error


def _add(entries: dict[str, Any], name: str, value: Any) -> None:
    if name in entries:
        raise ValueError(f"{name} stands twice")
    entries[name] = value


def _tensors(file: BinaryIO, path: Path, count: int, alignment: Any) -> dict[str, GGUFTensor]:
    if type(alignment) is not int or alignment < 1:
        raise ValueError(f"general.alignment {alignment!r}")
    tensor_entries: dict[str, tuple[tuple[int, ...], int, int, int]] = {}
    for _ in range(count):
        name = _text(file)
        (num_dimensions,) = struct.unpack("<I", _exactly(file, 4))
        if num_dimensions > 4:
            raise ValueError(f"{name} has {num_dimensions} dimensions")
        *file_shape, type_id, offset = struct.unpack(f"<{num_dimensions}QIQ", _exactly(file, 8 * num_dimensions + 12))
        _add(tensor_entries, name, (tuple(reversed(file_shape)), type_id, offset, _bytes(name, file_shape, type_id)))
    data_start = -(-file.tell() // alignment) * alignment
    file_size, next_offset, last_name = path.stat().st_size, 0, "the header"
    tensors = {}
    for name, (shape, type_id, offset, size) in tensor_entries.items():
        if data_start + offset + size > file_size:
            raise ValueError(f"it is cut short: tensor {name} lies beyond its {file_size} bytes")
        if offset != next_offset:
            raise ValueError(f"{last_name} ends at {next_offset} by its type and shape, and {name} begins at {offset}")
        next_offset, last_name = -(-(offset + size) // alignment) * alignment, f"{name} of type {type_id}"
        tensors[name] = GGUFTensor(name, shape, type_id, path, data_start + offset, size)
    return tensors


def _bytes(name: str, shape: list[int], kind: int) -> int:
    """Returns the size of a GGUF tensor in bytes.  `shape` has the file's order: the length of a row comes first."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    if kind not in set(GGMLQuantizationType):
        raise ValueError(f"{name} is of type {kind}")
    block_values, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
    if shape and shape[0] % block_values:
        raise ValueError(f"{name}: a row of {shape[0]} is no multiple of the {block_values} values of a block")
    return int(math.prod(shape) // block_values * block_bytes)


def _exactly(file: BinaryIO, size: int) -> bytes:
    data_bytes = file.read(size) if size < 2**31 else b""
    if len(data_bytes) != size:
        raise ValueError("it is cut short")
    return data_bytes


def _text(file: BinaryIO) -> str:
    return _exactly(file, int.from_bytes(_exactly(file, 8), "little")).decode()


def _value(file: BinaryIO, kind: int) -> Any:
    if kind == _TEXT_TYPE:
        return _text(file)
    if kind != _ARRAY_TYPE:
        return _numbers(file, kind, 1)[0]
    item_type, num_items = struct.unpack("<IQ", _exactly(file, 12))
    return [_text(file) for _ in range(num_items)] if item_type == _TEXT_TYPE else _numbers(file, item_type, num_items)


def _numbers(file: BinaryIO, kind: int, count: int) -> list[Any]:
    if kind not in _DTYPES:  # arrays of arrays too, which no model has
        raise ValueError(f"a value of type {kind}")
    dtype = np.dtype(_DTYPES[kind])
    return list(np.frombuffer(_exactly(file, count * dtype.itemsize), dtype).tolist())
