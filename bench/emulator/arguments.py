"""Prepares a kernel launch: registers the memory of its tensors, and packs its arguments into bytes for the kernel."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from operator import index
from typing import Any

import numpy as np
import torch

from rooflab.bench.emulator.machine.memory import GlobalMemory
from rooflab.bench.emulator.machine.view_bounds import ViewBounds
from rooflab.bench.emulator.text.syntax import Parameter, PtxKernel, SizeTriple
from rooflab.bench.emulator.tiles.tensor_map import TensorMap

_FLOAT_CODES = {"f16": "<e", "f32": "<f", "f64": "<d", "b32": "<f", "b64": "<d"}
"""By parameter type: the `struct` format of a float.  b16 is missing, because it may hold f16 or bf16."""


@dataclass(frozen=True)
class PtxLaunch:
    """Describes a PTX kernel with its launch settings.  The grid and the arguments are not included."""

    ptx: str
    name: str | None = None
    block: SizeTriple | None = None
    """The sizes of a CTA in threads; None if the PTX gives them (`.reqntid`)."""
    dynamic_shared: int = 0
    """Bytes of `extern .shared` memory."""
    cluster: SizeTriple = (1, 1, 1)
    dependent: bool = False
    """Whether the kernel may begin before the one before it ends (programmatic dependent launch)."""
    names: tuple[str, ...] = ()
    """The parameters' names in the source, for messages; if empty, messages use the PTX's names."""


def whole_numbers(name: str, values: Iterable[int]) -> list[int]:
    """Returns `values` as a list.  Raises `ValueError` if `values` is not a list of integers."""
    try:
        return [index(whole_number) for whole_number in values]
    except TypeError:
        raise ValueError(f"{name}: expected a list of integers, got {_shown(values)}") from None


def checked_tensors(name: str, values: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Returns `values` as a list.  Raises `ValueError` if `values` is not a list of tensors."""
    tensors = [values] if isinstance(values, torch.Tensor | str) else list(values)
    if any(not isinstance(tensor, torch.Tensor) for tensor in tensors) or isinstance(values, torch.Tensor):
        raise ValueError(f"{name}: expected a list of tensors, got {_shown(values)}")
    return tensors


def bound_arguments(kernel: PtxKernel, args: Sequence[Any], memory: GlobalMemory, names: Sequence[str]) -> bytes:
    """Returns the bytes of a kernel's parameters, and registers the tensors among `args` in `memory`.

    `names` are the parameters' names in the source.  Raises `ValueError` on an argument that does not fit.
    """
    if not isinstance(args, list | tuple):
        raise ValueError(f"args: expected a list, got {_shown(args)}")
    if len(args) != len(kernel.parameters):
        signature = ", ".join(f"{parameter.type} {parameter.name}" for parameter in kernel.parameters)
        raise ValueError(f"args: expected {len(kernel.parameters)} for {kernel.name} ({signature}), got {len(args)}")
    packed_bytes = b""
    for arg_index, (arg_value, parameter) in enumerate(zip(args, kernel.parameters, strict=True)):
        if arg_index < len(names):
            parameter = replace(parameter, name=names[arg_index])
        packed_bytes += bytes(-len(packed_bytes) % parameter.align)
        packed_bytes += _packed(arg_value, parameter, memory)
    return packed_bytes


def add_tensor(memory: GlobalMemory, tensor: torch.Tensor, name: str) -> int:
    """Registers a tensor's storage and returns its address.  If `memory` is bounded by views, also bounds the storage
    by the elements of the tensor.  Raises `ValueError` on a tensor without CPU memory."""
    if tensor.device.type != "cpu":
        raise ValueError(f"{name}: expected a tensor on the CPU, got one on {tensor.device}")
    if tensor.layout != torch.strided:
        raise ValueError(f"{name}: expected a tensor in plain memory, got one of layout {tensor.layout}")
    tensor_storage = tensor.untyped_storage()
    allocation = memory.add(name, tensor_storage.data_ptr(), tensor_storage.nbytes(), tensor)
    if memory.by_view and allocation is not None:
        allocation.bounds = allocation.bounds or ViewBounds(allocation.base, allocation.size)
        allocation.bounds.add(name, tensor)
    return tensor.data_ptr()


def _packed(value: Any, parameter: Parameter, memory: GlobalMemory) -> bytes:
    """Converts one kernel argument to the bytes of its PTX parameter. Raises `ValueError` if the type or the size does
    not fit."""
    name, ptx_type = parameter.name, parameter.type
    if isinstance(value, TensorMap):
        if value.base is not None:
            add_tensor(memory, value.base, name)
        value = value.pack()
    if isinstance(value, bytes):
        if len(value) != parameter.size:
            raise ValueError(f"{name}: expected {parameter.size} bytes, got {len(value)}")
        return value
    if ptx_type == "bytes":
        raise ValueError(f"{name}: expected {parameter.size} bytes or a TensorMap, got {type(value).__name__}")
    if isinstance(value, torch.Tensor):
        if ptx_type not in ("u64", "b64", "s64"):
            raise ValueError(f"{name}: expected a number (.{ptx_type}), got a tensor")
        return add_tensor(memory, value, name).to_bytes(8, "little")
    if value is None:
        value = 0
    return _number(value.item() if isinstance(value, np.generic) else value, parameter)


def _number(value: Any, parameter: Parameter) -> bytes:
    ptx_type, value_limit = parameter.type, 1 << 8 * parameter.size
    argument_error = ValueError(f"{parameter.name}: expected a number that fits .{ptx_type}, got {_shown(value)}")
    if not isinstance(value, bool | int | float):
        raise argument_error
    if isinstance(value, float) or ptx_type.startswith("f"):
        # A float in an untyped parameter is passed as C would pass it.
        try:
            return struct.pack(_FLOAT_CODES[ptx_type], float(value))
        except (KeyError, OverflowError):
            raise argument_error from None
    if not -(value_limit // 2) <= value < value_limit:
        raise argument_error
    return (int(value) % value_limit).to_bytes(parameter.size, "little")


def _shown(value: Any) -> str:
    """Returns a value as text for error messages. Shows only the type if the text is too long or the type is
    unusual."""
    text = repr(value) if isinstance(value, bool | int | float | str | list | tuple | None) else ""
    return text if 0 < len(text) <= 80 and "\n" not in text else f"a value of type {type(value).__name__}"
