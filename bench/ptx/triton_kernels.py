"""Kernels that Triton or Gluon compiled: packs their PTX's arguments, and emulates their launches."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from rooflab.bench.ptx.arguments import Launch
from rooflab.bench.ptx.tiles.tensor_map import DRIVER_ELEMENTS, ELEMENTS, SWIZZLES, TensorMap

SCRATCH_ALIGN = 128
Handle = Callable[[Any, tuple[int, ...], list[Any]], None]
"""Takes a compiled kernel, its grid and its arguments."""


def bound(compiled: Any, grid: Sequence[int], args: Sequence[Any]) -> tuple[Launch, list[Any], list[torch.Tensor]]:
    """A `Launch` of a `CompiledKernel`, the values of its PTX's parameters, and the tensors of its maps.

    `grid` counts CTAs.  `args` are the arguments of the kernel's signature without its constexprs.  Raises `ValueError`
    where their number differs from the signature's.
    """
    metadata = compiled.metadata
    ptx = compiled.asm["ptx"]
    signature = [kind for kind in compiled.src.signature.values() if kind != "constexpr"]
    own = [_name(compiled, key) for key, kind in compiled.src.signature.items() if kind != "constexpr"]
    if not isinstance(args, list | tuple):
        raise ValueError(f"args: expected a list, got a value of type {type(args).__name__}")
    if len(args) != len(signature):
        raise ValueError(f"args: expected {len(signature)} for {metadata.name}, got {len(args)}")
    values: list[Any] = []
    names: list[str] = []
    reached: list[torch.Tensor] = []
    maps = iter(getattr(metadata, "tensordesc_meta", None) or ())
    for name, given, wanted_kind in zip(own, args, signature, strict=True):
        for value, kind in _flat([given], [wanted_kind]):
            if isinstance(kind, str) and kind.startswith("tensordesc"):
                values += _descriptor(value, next(maps, None))
                reached.append(value.base)
            else:
                values.append(_float(value, kind) if isinstance(value, int | float) else value)
        names += [name] * (len(values) - len(names))
    ctas = math.prod(map(int, grid))
    for size in (int(metadata.global_scratch_size), int(getattr(metadata, "profile_scratch_size", 0) or 0)):
        values.append(torch.zeros(ctas * size + SCRATCH_ALIGN, dtype=torch.uint8) if size else 0)
    entry = re.search(rf"\.entry {re.escape(metadata.name)}\s*\(([^)]*)\)", ptx)
    wanted = entry[1].count(".param ") if entry is not None else 0
    # The PTX has parameters also for unused arguments; scratch pointers exist only since Triton 3.x.
    values = values[:wanted] if len(values) > wanted else values
    names += ["scratch memory"] * (len(values) - len(names))
    launch = Launch(ptx, metadata.name, None, int(metadata.shared), _cluster(metadata), tuple(names))
    return launch, values, reached


def _name(compiled: Any, key: Any) -> str:
    """The name of an argument in the source; Triton's key is the name, the index, or a tuple with the index."""
    return key if isinstance(key, str) else str(compiled.src.fn.arg_names[key[0] if isinstance(key, tuple) else key])


def in_ctas(compiled: Any, grid: Sequence[int]) -> tuple[int, ...]:
    """The grid as Triton's driver launches it: a program with `num_ctas` CTAs is a cluster."""
    sizes = [*map(int, grid), 1, 1][:3]
    return tuple(size * own for size, own in zip(sizes, _cluster(compiled.metadata), strict=True))


def _cluster(metadata: Any) -> tuple[int, int, int]:
    x, y, z = getattr(metadata, "cluster_dims", None) or (int(metadata.num_ctas), 1, 1)
    return x, y, z


def _flat(values: Sequence[Any], kinds: Sequence[Any]) -> Iterator[tuple[Any, Any]]:
    """Values with their types; tuples are flattened, and values that Triton specialised away are left out."""
    for value, kind in zip(values, kinds, strict=True):
        if isinstance(kind, tuple | list):
            yield from _flat(value, kind)
        elif kind != "constexpr":
            yield value, kind


def _float(value: float, kind: Any) -> Any:
    """A number as Triton's launcher passes it: an annotation may make an integer a float, or a float half as wide."""
    if kind == "fp16":
        return np.float16(value).tobytes()
    if kind == "bf16":
        return np.float32(value).tobytes()[2:]  # the launcher truncates
    return float(value) if kind in ("fp32", "fp64") else value


def _descriptor(value: Any, meta: Any) -> list[Any]:
    """The parameters of a tensor descriptor: a map, or the tensor with its shape and strides."""
    shape, strides = [int(size) for size in value.shape], [int(stride) for stride in value.strides]
    if meta is None:
        flags = value.padding == "nan", bool(getattr(value, "round_f32_to_tf32", False))
        return [value.base, *shape, *strides, *flags, *shape, *strides]
    size = int(meta["elem_size"])
    kind = ELEMENTS[int(meta["elem_type"])]
    if getattr(value, "round_f32_to_tf32", False):
        kind = DRIVER_ELEMENTS[11]
    made = TensorMap(
        address=value.base.data_ptr(),
        element=kind,
        dims=tuple(reversed(shape)),
        strides=tuple(stride * size for stride in reversed(strides[:-1])),
        box=tuple(reversed([int(length) for length in meta["block_size"]])),
        swizzle=SWIZZLES[int(meta["swizzle"])],
        fill="nan" if value.padding == "nan" else "zero",
    )
    return [made, *shape, *strides]


@contextmanager
def emulating_triton(sm: int, properties: Mapping[str, int], handle: Handle) -> Iterator[None]:
    """Compiles each launch for `sm` and gives it to `handle`; an autotuned kernel runs with its first config."""
    # Imported here, because Triton reads its environment at import, and `emulate` does not need Triton.
    import triton
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.jit import JITFunction

    from rooflab.bench.compile.capture import FakeDriver, check_internals

    check_internals()
    run, tune = JITFunction.run, Autotuner.run

    def instead(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        if warmup:
            return kernel
        values = _bound(self, args, kwargs)
        if callable(grid):
            grid = grid(values)
        if 0 in grid:
            return kernel  # Triton's launcher skips such a launch too
        handle(kernel, tuple(int(size) for size in grid), _runtime(kernel, values))
        return kernel

    def first_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.nargs = dict(zip(self.arg_names, args, strict=False))
        config = next(iter(self.prune_configs(kwargs) if len(self.configs) > 1 else self.configs))
        if config.pre_hook is not None:
            config.pre_hook({**self.nargs, **kwargs, **config.all_kwargs()})
        kernel = self.fn.run(*args, **kwargs, **config.all_kwargs())
        self.nargs = None
        return kernel

    triton.runtime.driver.set_active(FakeDriver(sm, properties))
    JITFunction.run, Autotuner.run = instead, first_config
    try:
        yield
    finally:
        JITFunction.run, Autotuner.run = run, tune


def _bound(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """All arguments of the kernel's signature by name."""
    names = set(function.arg_names)
    own = {name: value for name, value in kwargs.items() if name in names}
    given = inspect.signature(function.fn).bind(*args, **own)
    given.apply_defaults()
    return dict(given.arguments)


def _runtime(kernel: Any, values: Mapping[str, Any]) -> list[Any]:
    """The arguments that the compiled kernel takes, without its constexprs."""
    return [values[_name(kernel, key)] for key, kind in kernel.src.signature.items() if kind != "constexpr"]
