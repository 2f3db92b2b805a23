"""Reads a GGUF file: its keys with their values, and its tensors by name (the format: ggml's docs/gguf.md).

The reader of the `gguf` package makes an array of each text.  That takes half a minute for a vocabulary of 128,256
tokens with its merges; this file takes half a second.  The package still decodes quantised blocks.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

_SCALARS = dict(enumerate(("u1", "i1", "<u2", "<i2", "<u4", "<i4", "<f4", "?"))) | {10: "<u8", 11: "<i8", 12: "<f8"}
_TEXT, _ARRAY = 8, 9


@dataclass(frozen=True)
class GGUFTensor:
    """A tensor of a GGUF file: the shape in torch's order, and the position of its bytes in the file."""

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
        """Reads the numbers as fp32 into new memory.  Raises `ValueError` if the quantisation is not known."""
        from gguf import GGMLQuantizationType, quants

        codes = np.memmap(self.path, np.uint8, "r", self.start, (self.size,)) if self.size else np.empty(0, np.uint8)
        rows = codes.reshape(*self.shape[:-1], -1) if self.size else codes.reshape(self.shape)
        try:
            return np.array(quants.dequantize(rows, GGMLQuantizationType(self.kind)), np.float32)
        except (NotImplementedError, ValueError) as error:
            raise ValueError(f"model: cannot dequantise {self.name}: {error}") from error


@dataclass(frozen=True)
class GGUFFile:
    """The header of a GGUF file: every key with its value, and every tensor by its name."""

    path: Path
    fields: dict[str, Any]
    tensors: dict[str, GGUFTensor]


def read_gguf(path: Path) -> GGUFFile:
    """Reads the keys and the list of tensors.  Reads no tensor's data.

    Raises `ValueError` unless the file is complete, has version 2 or 3, and repeats no key and no tensor.
    """
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise ValueError(f"model: {path.name} is not a whole GGUF file: it does not begin with GGUF")
        try:
            version, tensors, keys = struct.unpack("<IQQ", _exactly(file, 20))
            if version not in (2, 3):
                raise ValueError(f"version {version}")
            fields: dict[str, Any] = {}
            for _ in range(keys):
                _add(fields, _text(file), _value(file, *struct.unpack("<I", _exactly(file, 4))))
            return GGUFFile(path, fields, _tensors(file, path, tensors, fields.get("general.alignment", 32)))
        except (ValueError, UnicodeDecodeError) as error:
            raise ValueError(f"model: {path.name} is not a whole GGUF file: {error}") from error


def _add(entries: dict[str, Any], name: str, value: Any) -> None:
    if name in entries:
        raise ValueError(f"{name} stands twice")
    entries[name] = value


def _tensors(file: BinaryIO, path: Path, count: int, alignment: Any) -> dict[str, GGUFTensor]:
    if type(alignment) is not int or alignment < 1:
        raise ValueError(f"general.alignment {alignment!r}")
    listed: dict[str, tuple[tuple[int, ...], int, int, int]] = {}
    for _ in range(count):
        name = _text(file)
        (dimensions,) = struct.unpack("<I", _exactly(file, 4))
        if dimensions > 4:
            raise ValueError(f"{name} has {dimensions} dimensions")
        *rows, kind, offset = struct.unpack(f"<{dimensions}QIQ", _exactly(file, 8 * dimensions + 12))
        _add(listed, name, (tuple(reversed(rows)), kind, offset, _bytes(name, rows, kind)))
    begin = -(-file.tell() // alignment) * alignment
    whole, behind, last = path.stat().st_size, 0, "the header"
    tensors = {}
    for name, (shape, kind, offset, size) in listed.items():
        if begin + offset + size > whole:
            raise ValueError(f"it is cut short: tensor {name} lies beyond its {whole} bytes")
        if offset != behind:
            raise ValueError(f"{last} ends at {behind} by its type and shape, and {name} begins at {offset}")
        behind, last = -(-(offset + size) // alignment) * alignment, f"{name} of type {kind}"
        tensors[name] = GGUFTensor(name, shape, kind, path, begin + offset, size)
    return tensors


def _bytes(name: str, shape: list[int], kind: int) -> int:
    """Returns a tensor's number of bytes.  The first dimension of `shape` is the length of a row, as in the file."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    if kind not in set(GGMLQuantizationType):
        raise ValueError(f"{name} is of type {kind}")
    block, size = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
    if shape and shape[0] % block:
        raise ValueError(f"{name}: a row of {shape[0]} is no multiple of the {block} values of a block")
    return int(math.prod(shape) // block * size)


def _exactly(file: BinaryIO, size: int) -> bytes:
    content = file.read(size) if size < 2**31 else b""
    if len(content) != size:
        raise ValueError("it is cut short")
    return content


def _text(file: BinaryIO) -> str:
    return _exactly(file, int.from_bytes(_exactly(file, 8), "little")).decode()


def _value(file: BinaryIO, kind: int) -> Any:
    if kind == _TEXT:
        return _text(file)
    if kind != _ARRAY:
        return _numbers(file, kind, 1)[0]
    inner, count = struct.unpack("<IQ", _exactly(file, 12))
    return [_text(file) for _ in range(count)] if inner == _TEXT else _numbers(file, inner, count)


def _numbers(file: BinaryIO, kind: int, count: int) -> list[Any]:
    if kind not in _SCALARS:  # arrays of arrays too, which no model has
        raise ValueError(f"a value of type {kind}")
    dtype = np.dtype(_SCALARS[kind])
    return list(np.frombuffer(_exactly(file, count * dtype.itemsize), dtype).tolist())
