"""Describes the tensors that an op takes and returns. `kernels/launcher.py` checks every call with this description.

A shape is a text of dimensions, such as `T H`. A name has the same value in all tensors of a call. A dimension may be
computed, such as `2I`, `K/2` or `B+1`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import torch

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
INDEX_DTYPES = (torch.int32, torch.int64)
LAYOUT_NAMES = ("rows", "contiguous", "any")
FP32_AND_FP64 = (torch.float32, torch.float64)
ANY_SHAPE = "..."
PACKED_TEXT = "a weight packed by this kernel's prepare"
CallArguments = Mapping[str, Any]
"""The arguments of a call by name, defaults included."""
Dims = dict[str, int]


@dataclass(frozen=True)
class Dim:
    """One dimension of a shape: an integer, or an expression `times * name / over + plus`.

    `K/16` is K // 16, rounded down. But with a factor (`times` > 1) K / 16 is rounded up: `4K/16` is 4 * ceil(K / 16).
    """

    text: str
    name: str | None
    times: int = 1
    over: int = 1
    plus: int = 0

    @classmethod
    def parse(cls, text: str) -> Dim:
        """Parses the text of a dimension, such as `2I` or `K/2`. Raises `ValueError` on any other form."""
        dim_match = re.fullmatch(r"(\d*)([A-Za-z_]\w*)?(?:([/+])(\d+))?", text)
        if dim_match is None or not (dim_match[1] or dim_match[2]):
            raise ValueError(f"shape: expected dimensions such as T, 2I, K/2 or B+1, got {text!r}")
        factor_text, name, op_text, op_value = dim_match.groups()
        extra_fields = {"over": int(op_value)} if op_text == "/" else {"plus": int(op_value)} if op_text == "+" else {}
        return cls(text, name, int(factor_text or 1), **extra_fields)

    def size(self, dims: Mapping[str, int]) -> int | None:
        """Returns the size of this dimension, or None if `dims` has no value for the dimension's name."""
        if self.name is None:
            return self.times
        named_size = dims.get(self.name)
        return (
            None
            if named_size is None
            else self.times * ((named_size + (self.over - 1) * (self.times > 1)) // self.over) + self.plus
        )

    def solve(self, size: int) -> int | None:
        """Returns the value of `name` for which this dimension has `size` elements. Returns None if no value fits."""
        named_size, size_remainder = divmod((size - self.plus) * self.over, self.times)
        return None if size_remainder or named_size < 0 else named_size


def _dims(shape: str) -> tuple[Dim, ...]:
    return tuple(Dim.parse(text) for text in shape.split())


@dataclass(frozen=True)
class Packed:
    """A weight that one kernel has packed into its own layout. Only this kernel takes the packed weight."""

    tensor: torch.Tensor
    shape: tuple[int, ...]
    """The shape of the original weight."""
    dtype: torch.dtype
    """The dtype of the original weight."""

    @property
    def device(self) -> torch.device:
        """Returns the device of the packed tensor."""
        return self.tensor.device

    @property
    def is_meta(self) -> bool:
        """Returns whether the packed tensor is on the device `meta`, and so has no values."""
        return self.tensor.is_meta

    @property
    def ndim(self) -> int:
        """Returns the number of dimensions that the weight had before it was packed."""
        return len(self.shape)

    def stride(self) -> tuple[int, ...]:
        """Returns an empty tuple, because only the kernel knows the layout."""
        return ()


@dataclass(frozen=True)
class Argument:
    """A tensor argument of an op, and the shape, dtype and layout that the op requires."""

    shape: str
    """The dimensions of the tensor, or `...` if `rules` checks them."""
    dtype: tuple[torch.dtype, ...] | str
    """The dtypes that the tensor may have, or the name of the argument with the same dtype."""
    layout: Literal["rows", "contiguous", "any"] = "rows"
    """The layout that the tensor must have; `rows`: stride 1 in the last dimension, any other strides."""
    optional: bool = False
    """Whether the argument may be None."""
    packed: type | None = None
    """The type of the packed weight if a kernel's `prepare` makes this argument, else None."""

    @cached_property
    def dims(self) -> tuple[Dim, ...]:
        """Returns the parsed dimensions of `shape`."""
        return () if self.shape == ANY_SHAPE else _dims(self.shape)

    def may_be(self, dtype: torch.dtype) -> bool:
        """Returns whether a reference accepts `dtype` for this argument, even if kernels refuse `dtype`."""
        if isinstance(self.dtype, str):
            return False
        return (
            dtype in (*FLOATS, torch.float64)
            if self.dtype[0] in FLOATS and len(self.dtype) > 1
            else (*self.dtype, dtype) == FP32_AND_FP64
        )


@dataclass(frozen=True)
class Result:
    """A tensor that an op returns, and its shape, dtype and layout."""

    shape: str
    dtype: torch.dtype | str | Callable[[CallArguments], torch.dtype]
    """The result's dtype, the name of the argument with the same dtype, or a function of the arguments."""
    when: str | None = None
    """The option that asks for the result; None if the result is always returned."""
    layout: Literal["rows", "contiguous", "any"] = "rows"
    """The layout that the caller's `out` must have."""

    @cached_property
    def dims(self) -> tuple[Dim, ...]:
        """Returns the parsed dimensions of `shape`."""
        return _dims(self.shape)

    def wanted(self, arguments: CallArguments) -> bool:
        """Returns whether a call with these arguments returns this result."""
        option_value = True if self.when is None else arguments.get(self.when)
        return option_value is not None and option_value is not False

    def dtype_of(self, arguments: CallArguments) -> torch.dtype:
        """Returns the dtype of this result in a call with these arguments."""
        if isinstance(self.dtype, torch.dtype):
            return self.dtype
        return arguments[self.dtype].dtype if isinstance(self.dtype, str) else self.dtype(arguments)


@dataclass(frozen=True)
class Contract:
    """The tensor arguments and the results of an op. The other arguments of the op are not tensors."""

    arguments: Mapping[str, Argument]
    results: Mapping[str, Result]
    """The results in the order of the op's outputs; empty for an op that changes its arguments.  A call of such an op
    is empty if its first tensor is empty."""
    rules: Callable[[CallArguments, Dims], None] | None = None
    """Raises `ValueError` where shapes and options do not fit together."""
    bounds: Callable[[CallArguments, Dims], None] | None = None
    """Raises `ValueError` on lengths, offsets or tables that point outside memory.  On a CPU every launch calls this
    function, because reading the values costs little; on a GPU only with `ROOFLAB_CHECK_VALUES`."""
    values: Callable[[CallArguments, Dims], None] | None = None
    """Raises `ValueError` on other wrong values.  It is called only with `ROOFLAB_CHECK_VALUES`."""
    scheme: Callable[[CallArguments], str] | None = None
    """The name of the scheme under which a config is looked up; by default the scheme of the first tensor's dtype."""
    case: Callable[[CallArguments], Mapping[str, bool | int]] | None = None
    """Keys of a case that no dimension shows, but that a config depends on, such as whether there is a residual."""

    def with_packed(self, name: str, packed: Argument | type[Packed]) -> Contract:
        """Returns a copy of the contract in which the argument `name` is a packed weight of type `packed`."""
        if not isinstance(packed, Argument):
            packed = replace(self.arguments[name], layout="any", packed=packed)
            return replace(self, arguments={**self.arguments, name: packed})
        # The packed weight comes last, because its shape shows no dimensions of the op.
        other_arguments = {arg_name: argument for arg_name, argument in self.arguments.items() if arg_name != name}
        return replace(self, arguments={**other_arguments, name: packed})

    def rows(self) -> list[tuple[str, str]]:
        """Returns the rows of a table: each argument or result with its description (`"(H) of x's dtype"`)."""
        rows = []
        for name, argument in self.arguments.items():
            dtypes = f"{argument.dtype}'s dtype" if isinstance(argument.dtype, str) else _names(argument.dtype)
            layout_text = [", rows contiguous", ", contiguous", ", any strides"][LAYOUT_NAMES.index(argument.layout)]
            rows.append(
                (name, f"({', '.join(argument.shape.split())}) {dtypes}{layout_text}{', or None' * argument.optional}")
            )
        for name, result in self.results.items():
            dtype_text = f"{result.dtype}'s dtype" if isinstance(result.dtype, str) else "of a dtype by the options"
            dtype_text = _names([result.dtype]) if isinstance(result.dtype, torch.dtype) else dtype_text
            condition_text = f", with {result.when}" if result.when else ""
            rows.append((f"returns {name}", f"({', '.join(result.shape.split())}) {dtype_text}{condition_text}"))
        return rows

    def sizes(self, arguments: CallArguments) -> Dims:
        """Returns the value of each dimension name, read from the tensors and integers of a call. Checks nothing."""
        dims = {name: value for name, value in arguments.items() if type(value) is int}
        for name, argument in self.arguments.items():
            tensor = arguments.get(name)
            if isinstance(tensor, torch.Tensor | Packed):
                for dim, size in zip(argument.dims, tensor.shape, strict=False):
                    if dim.name is not None and dim.name not in dims and (named_size := dim.solve(size)) is not None:
                        dims[dim.name] = named_size
        return dims

    def check(self, arguments: CallArguments, any_dtype: bool = False) -> Dims:
        """Checks the arguments of a call, and returns the value of each dimension name.

        Raises `ValueError` with the argument, the expected value and the actual value. With `any_dtype`, which
        references use, layouts are not checked and other float dtypes are allowed."""
        dims: Dims = {name: value for name, value in arguments.items() if type(value) is int}
        device_tensor: Any = None
        for name, argument in self.arguments.items():
            tensor: Any = arguments.get(name)
            if tensor is None and argument.optional:
                continue
            expected_type: Any = argument.packed or torch.Tensor
            if not isinstance(tensor, expected_type):
                expected_text = PACKED_TEXT if argument.packed else "a tensor"
                raise ValueError(f"{name}: expected {expected_text}, got {type(tensor).__name__}")
            device_tensor = tensor if device_tensor is None else device_tensor
            dtypes = (arguments[argument.dtype].dtype,) if isinstance(argument.dtype, str) else argument.dtype
            expected_text = " or ".join(map(str, dtypes))
            if argument.packed and tensor.dtype not in dtypes:  # before the shape, which may be another weight's
                raise ValueError(f"{name}: expected {PACKED_TEXT}, which is {expected_text}, got {tensor.dtype}")
            if argument.shape != ANY_SHAPE:
                check_shape(name, tensor, argument.dims, dims)
            if tensor.dtype not in dtypes and not (any_dtype and argument.may_be(tensor.dtype)):
                raise ValueError(f"{name}: expected {expected_text}, got {tensor.dtype}")
            check_layout(name, tensor, "any" if any_dtype else argument.layout)
            # The lengths beside meta tensors are real tensors, on another device.
            device_may_differ = device_tensor.is_meta or (tensor.is_meta and device_tensor.dtype in INDEX_DTYPES)
            if tensor.device != device_tensor.device and not device_may_differ:
                raise ValueError(f"{name}: expected a tensor on {device_tensor.device}, got one on {tensor.device}")
        if self.rules is not None:
            self.rules(arguments, dims)
        return dims

    def check_out(self, name: str, tensor: Any, result: Result, arguments: CallArguments, dims: Dims) -> None:
        """Raises `ValueError` if `tensor` cannot hold the result, or if two elements of `tensor` share memory."""
        if not isinstance(tensor, torch.Tensor):
            raise ValueError(f"{name}: expected a tensor, got {type(tensor).__name__}")
        check_shape(name, tensor, result.dims, dims)
        if tensor.dtype != (dtype := result.dtype_of(arguments)):
            raise ValueError(f"{name}: expected {dtype}, got {tensor.dtype}")
        check_layout(name, tensor, result.layout)
        covered_elements = 1
        for dim_stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
            if size > 1 and dim_stride < covered_elements:
                raise ValueError(f"{name}: expected elements with memory of their own, got strides {tensor.stride()}")
            covered_elements = max(covered_elements, dim_stride * size)
        device = next(arguments[arg_name].device for arg_name in self.arguments if arguments.get(arg_name) is not None)
        if tensor.device != device:
            raise ValueError(f"{name}: expected a tensor on {device}, got one on {tensor.device}")


def _names(dtypes: Iterable[torch.dtype]) -> str:
    return " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


def check_shape(name: str, tensor: torch.Tensor, expected: tuple[Dim, ...], dims: Dims) -> None:
    """Raises `ValueError` unless the shape of `tensor` fits `expected`, a tuple of named dimensions such as (T, H).
    `dims` maps the names to sizes that earlier tensors have set. If a name is not in `dims` yet, adds it with its
    size."""
    shape_fits = len(expected) == tensor.ndim
    for dim, size in zip(expected, tensor.shape, strict=False) if shape_fits else ():
        expected_size = dim.size(dims)
        if expected_size is None and dim.name is not None and (named_size := dim.solve(size)) is not None:
            dims[dim.name] = named_size
        elif expected_size != size:
            shape_fits = False
            break
    if not shape_fits:
        expected_sizes = [dim.size(dims) for dim in expected]
        text = ", ".join(
            dim.text if size is None or dim.name is None else f"{dim.text}={size}"
            for dim, size in zip(expected, expected_sizes, strict=True)
        )
        raise ValueError(f"{name}: expected shape ({text}), got {tuple(tensor.shape)}")


def check_layout(name: str, tensor: torch.Tensor, layout: str) -> None:
    """Raises `ValueError` if `layout` forbids the strides of `tensor`. A silent copy instead would cost time."""
    if layout == "contiguous" and not tensor.is_contiguous():
        raise ValueError(f"{name}: expected a contiguous tensor, got strides {tensor.stride()}")
    if layout == "rows" and tensor.ndim and tensor.shape[-1] > 1 and tensor.stride(-1) != 1 and tensor.numel():
        raise ValueError(f"{name}: expected stride 1 in the last dimension, got {tensor.stride(-1)}")
