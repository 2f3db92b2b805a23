"""Values passed between two processes: tensors through a file in shared memory, the rest as JSON."""

from __future__ import annotations

import mmap
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

SHARED_MEMORY = Path("/dev/shm")
ALIGNMENT = 64
"""Bytes; a tensor keeps its own place behind a multiple of them, because kernels specialise on alignment."""
SPARE = 2
"""A new file has room for this many times the bytes that are asked for."""


class Writer:
    """Copies tensors into a file of `folder`, and into a larger one if they do not fit."""

    def __init__(self, folder: str):
        self._folder = folder
        self._path = ""
        self._room = torch.empty(0, dtype=torch.uint8)

    def write(self, value: Any) -> Any:
        """`value` as JSON values, for `Reader.read`; sequences become tuples.  Raises `OSError` if the disk is full."""
        tensors: list[torch.Tensor] = []
        plain = _without_tensors(value, tensors)
        flat = [_flat(tensor) for tensor in tensors]
        places, end = [], 0
        for tensor, values in zip(tensors, flat, strict=True):
            places.append(end + tensor.data_ptr() % ALIGNMENT)
            end = -(-(places[-1] + values.nbytes) // ALIGNMENT) * ALIGNMENT
        if end > self._room.numel() or not self._path:
            self._make_room(SPARE * end)
        described = []
        for tensor, values, place in zip(tensors, flat, places, strict=True):
            self._room[place : place + values.nbytes].copy_(values)
            dtype = str(tensor.dtype).removeprefix("torch.")
            described.append([dtype, list(tensor.shape), list(tensor.stride()), place, values.nbytes])
        return {"file": self._path, "values": plain, "tensors": described}

    def _make_room(self, size: int) -> None:
        if self._path:
            Path(self._path).unlink(missing_ok=True)
        descriptor, self._path = tempfile.mkstemp(dir=self._folder)
        with open(descriptor, "r+b") as file:
            # A place on a full disk that was not allocated would end the process when it is written.
            os.posix_fallocate(file.fileno(), 0, max(size, mmap.PAGESIZE))
            self._room = torch.frombuffer(mmap.mmap(file.fileno(), 0), dtype=torch.uint8)


class Reader:
    """Reads what a `Writer` wrote."""

    def __init__(self) -> None:
        self._path = ""
        self._room = torch.empty(0, dtype=torch.uint8)

    def read(self, message: Any, device: torch.device) -> Any:
        """The value of a message; its tensors are copies on `device` with the same strides and alignment."""
        if message["file"] != self._path:
            self._path = message["file"]
            with open(self._path, "r+b") as file:
                self._room = torch.frombuffer(mmap.mmap(file.fileno(), 0), dtype=torch.uint8)
        tensors = []
        for dtype, shape, stride, place, nbytes in message["tensors"]:
            own = torch.empty(nbytes + ALIGNMENT, dtype=torch.uint8, device=device)
            skew = (place - own.data_ptr()) % ALIGNMENT
            own[skew : skew + nbytes].copy_(self._room[place : place + nbytes])
            flat = own[skew : skew + nbytes].view(getattr(torch, dtype))
            tensors.append(flat.as_strided(shape, stride, flat.storage_offset()))
        return _with_tensors(message["values"], tensors)


def shared_folder(bytes_: int) -> tempfile.TemporaryDirectory[str]:
    """A folder in shared memory, or on the disk if shared memory has too little room for the bytes."""
    there = SHARED_MEMORY.is_dir() and shutil.disk_usage(SHARED_MEMORY).free > 8 * bytes_
    return tempfile.TemporaryDirectory(prefix="rooflab-", dir=SHARED_MEMORY if there else None)


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of the memory between a tensor's first and last element."""
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    extent = 1 + sum((size - 1) * stride for size, stride in pairs) if tensor.numel() else 0
    return tensor.detach().as_strided((extent,), (1,)).view(torch.uint8)


def _without_tensors(value: Any, tensors: list[torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return {"tensor": len(tensors) - 1}
    if isinstance(value, Mapping):
        return {"mapping": {name: _without_tensors(item, tensors) for name, item in value.items()}}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_without_tensors(item, tensors) for item in value]
    return value


def _with_tensors(value: Any, tensors: Sequence[torch.Tensor]) -> Any:
    if isinstance(value, list):
        return tuple(_with_tensors(item, tensors) for item in value)
    if not isinstance(value, dict):
        return value
    if "tensor" in value:
        return tensors[value["tensor"]]
    return {name: _with_tensors(item, tensors) for name, item in value["mapping"].items()}
