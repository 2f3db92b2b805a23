"""Emulates launches of kernels that Triton or Gluon compiled.  Packs the arguments for their PTX parameters."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from rooflab.bench.emulator.arguments import PtxLaunch
from rooflab.bench.emulator.machine.run import MOST_THREADS
from rooflab.bench.emulator.tiles.tensor_map import DRIVER_ELEMENTS, ELEMENT_TYPES, SWIZZLES, TensorMap
from rooflab.bench.emulator.tuning import Configs, tuned

SCRATCH_ALIGN = 128
DTYPES = {
    torch.float64: ("fp64",), torch.float32: ("fp32",), torch.float16: ("fp16",), torch.bfloat16: ("bf16",),
    torch.int64: ("i64",), torch.int32: ("i32",), torch.int16: ("i16",), torch.int8: ("i8",),
    torch.uint8: ("u8",), torch.bool: ("i1", "u1"),
}  # fmt: skip
"""Triton's names of the dtypes whose names are the same in all versions."""
LaunchHandler = Callable[[Any, tuple[int, ...], list[Any]], None]
"""A function that takes a compiled kernel, its grid and its arguments."""


def bound(compiled: Any, grid: Sequence[int], args: Sequence[Any]) -> tuple[PtxLaunch, list[Any], list[torch.Tensor]]:
    """Binds a compiled kernel to `args`.  Returns its `PtxLaunch`, the values of its PTX parameters, and the tensors
    that its tensor maps describe.

    `grid` counts CTAs.  `args` are the arguments of the kernel's signature without its constexprs.  Raises `ValueError`
    if the number of `args` differs from the signature."""
    metadata = compiled.metadata
    ptx = compiled.asm["ptx"]
    argument_types = [kind for kind in compiled.src.signature.values() if kind != "constexpr"]
    argument_names = [_name(compiled, key) for key, kind in compiled.src.signature.items() if kind != "constexpr"]
    if not isinstance(args, list | tuple):
        raise ValueError(f"args: expected a list, got a value of type {type(args).__name__}")
    if len(args) != len(argument_types):
        raise ValueError(f"args: expected {len(argument_types)} for {metadata.name}, got {len(args)}")
    values: list[Any] = []
    parameter_names: list[str] = []
    map_tensors: list[torch.Tensor] = []
    descriptor_metadata = iter(getattr(metadata, "tensordesc_meta", None) or ())
    for name, python_argument, argument_kind in zip(argument_names, args, argument_types, strict=True):
        for value, kind in _flat([python_argument], [argument_kind]):
            if isinstance(kind, str) and kind.startswith("tensordesc"):
                values += _descriptor(value, next(descriptor_metadata, None))
                map_tensors.append(value.base)
            else:
                values.append(_float(value, kind) if isinstance(value, int | float) else _memory(name, value, kind))
        parameter_names += [name] * (len(values) - len(parameter_names))
    cta_count = math.prod(map(int, grid))
    for scratch_bytes in (int(metadata.global_scratch_size), int(getattr(metadata, "profile_scratch_size", 0) or 0)):
        values.append(torch.zeros(cta_count * scratch_bytes + SCRATCH_ALIGN, dtype=torch.uint8) if scratch_bytes else 0)
    entry_match = re.search(rf"\.entry {re.escape(metadata.name)}\s*\(([^)]*)\)", ptx)
    parameter_count = entry_match[1].count(".param ") if entry_match is not None else 0
    # The PTX has parameters also for unused arguments; scratch pointers exist only since Triton 3.x.
    values = values[:parameter_count] if len(values) > parameter_count else values
    parameter_names += ["scratch memory"] * (len(values) - len(parameter_names))
    sizes, is_dependent = (None, int(metadata.shared), _cluster(metadata)), bool(getattr(metadata, "launch_pdl", False))
    return PtxLaunch(ptx, metadata.name, *sizes, is_dependent, tuple(parameter_names)), values, map_tensors


def _memory(name: str, value: Any, kind: Any) -> Any:
    """Returns the tensor behind a pointer argument, also from the wrapper of `triton.reinterpret`.

    Raises `ValueError` if the kernel was compiled for another dtype."""
    if isinstance(value, torch.Tensor):
        type_names = DTYPES.get(value.dtype)
        if type_names and isinstance(kind, str) and kind.removeprefix("*").removeprefix("k") not in type_names:
            raise ValueError(
                f"{name}: expected {kind}, for which the kernel was compiled, got a tensor of {value.dtype}"
            )
        return value
    base_tensor = getattr(value, "base", None)
    return base_tensor if isinstance(base_tensor, torch.Tensor) else value


def _name(compiled: Any, key: Any) -> str:
    """Returns the name of a kernel argument in the source code.  `key` is Triton's own identifier of the argument.  It
    is the name itself, the argument's index, or a tuple that begins with the index."""
    return key if isinstance(key, str) else str(compiled.src.fn.arg_names[key[0] if isinstance(key, tuple) else key])


def in_ctas(compiled: Any, grid: Sequence[int]) -> tuple[int, ...]:
    """Returns the grid in CTAs, as Triton's driver launches it.  A Triton program with `num_ctas` CTAs is a cluster."""
    grid_sizes = [*map(int, grid), 1, 1][:3]
    return tuple(grid_size * ctas for grid_size, ctas in zip(grid_sizes, _cluster(compiled.metadata), strict=True))


def _cluster(metadata: Any) -> tuple[int, int, int]:
    x, y, z = getattr(metadata, "cluster_dims", None) or (int(metadata.num_ctas), 1, 1)
    return x, y, z


def _flat(values: Sequence[Any], kinds: Sequence[Any]) -> Iterator[tuple[Any, Any]]:
    """Yields each value with its type. Flattens nested tuples and leaves out constexpr arguments."""
    for nested_value, kind in zip(values, kinds, strict=True):
        if isinstance(kind, tuple | list):
            yield from _flat(nested_value, kind)
        elif kind != "constexpr":
            yield nested_value, kind


def _float(value: float, kind: Any) -> Any:
    """Converts a number to the float type `kind`, as Triton's launcher does. Returns it unchanged for other types."""
    if kind == "fp16":
        return np.float16(value).tobytes()
    if kind == "bf16":
        return np.float32(value).tobytes()[2:]  # the launcher truncates
    return float(value) if kind in ("fp32", "fp64") else value


def _descriptor(value: Any, meta: Any) -> list[Any]:
    """Returns the kernel parameters of a Triton tensor descriptor: a tensor map or the tensor itself, then the shape
    and the strides."""
    tensor_shape, tensor_strides = [int(size) for size in value.shape], [int(stride) for stride in value.strides]
    if meta is None:
        padding_flags = value.padding == "nan", bool(getattr(value, "round_f32_to_tf32", False))
        return [value.base, *tensor_shape, *tensor_strides, *padding_flags, *tensor_shape, *tensor_strides]
    size = int(meta["elem_size"])
    kind = ELEMENT_TYPES[int(meta["elem_type"])]
    if getattr(value, "round_f32_to_tf32", False):
        kind = DRIVER_ELEMENTS[11]
    tensor_map = TensorMap(
        address=value.base.data_ptr(),
        element=kind,
        dims=tuple(reversed(tensor_shape)),
        strides=tuple(stride * size for stride in reversed(tensor_strides[:-1])),
        box=tuple(reversed([int(box_length) for box_length in meta["block_size"]])),
        swizzle=SWIZZLES[int(meta["swizzle"])],
        fill="nan" if value.padding == "nan" else "zero",
    )
    return [tensor_map, *tensor_shape, *tensor_strides]


@contextmanager
def emulating_triton(
    sm: int,
    properties: Mapping[str, int],
    handle: LaunchHandler,
    configs: Configs | None = None,
    marks: Counter[str] | None = None,
) -> Iterator[None]:
    """Compiles Triton kernels for `sm` (such as 90), and passes every launch to `handle`.

    `configs` and `marks` are the arguments of `tuned`."""
    # Imported here, because Triton reads its environment at import, and `emulate` does not need Triton.
    from triton.compiler import CompiledKernel
    from triton.runtime.errors import OutOfResources

    from rooflab.bench.compile.capture import FakeDriver, check_internals, driven_by, ptxas_log

    check_internals()

    def ready(self: Any) -> None:
        """Prepares a kernel for emulated launches.  Replaces Triton's code that loads a kernel onto a GPU.

        Raises Triton's `OutOfResources` if the kernel needs more shared memory than a CTA can have."""
        if self.metadata.shared > properties["max_shared_mem"]:
            raise OutOfResources(self.metadata.shared, properties["max_shared_mem"], "shared memory")
        self.module = self.function = self.name
        self._run = partial(_launched, self)

    def missing(self: Any, name: str) -> int:
        """Computes a missing attribute of a kernel: its registers, spilled words or maximum threads."""
        if name not in ("n_regs", "n_spills", "n_max_threads"):
            raise AttributeError(name)
        usage_match = re.search(r"(\d+) bytes spill stores.*?Used (\d+) registers", ptxas_log(self), re.DOTALL)
        assert usage_match is not None, "ptxas says both"
        self.n_regs, self.n_spills, self.n_max_threads = int(usage_match[2]), int(usage_match[1]) // 4, MOST_THREADS
        return int(getattr(self, name))

    _launch_handlers.append(handle)
    try:
        with (
            patch.multiple(CompiledKernel, create=True, _init_handles=ready, __getattr__=missing),
            driven_by(FakeDriver(sm, properties, "cuda:0")),
            tuned(configs, Counter() if marks is None else marks),
        ):
            yield
    finally:
        _launch_handlers.pop()


_launch_handlers: list[LaunchHandler] = []
"""The handles of the open contexts.  A kernel keeps its launcher, so the launcher looks up the newest handle here."""


def _launched(kernel: Any, x: int, y: int, z: int, *others: Any) -> None:
    """Runs a kernel launch in the emulator, with the arguments of Triton's launcher. Skips an empty grid."""
    args = others[6:]  # after stream, function, two of metadata and two hooks
    argument_kinds = list(kernel.src.signature.values())
    if len(args) == len(argument_kinds):
        args = tuple(argument for argument, kind in zip(args, argument_kinds, strict=True) if kind != "constexpr")
    if not _launch_handlers:
        raise RuntimeError(f"{kernel.name}: was compiled for the emulator, and is launched outside of it")
    if x * y * z:
        _launch_handlers[-1](kernel, (int(x), int(y), int(z)), [_pointer(value) for value in args])


def _pointer(value: Any) -> Any:
    """Returns the address behind an argument that is no tensor and has only `data_ptr()`; returns others unchanged."""
    has_tensor = isinstance(value, torch.Tensor) or isinstance(getattr(value, "base", None), torch.Tensor)
    return int(value.data_ptr()) if not has_tensor and hasattr(value, "data_ptr") else value
