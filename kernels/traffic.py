"""Counts the bytes that torch calls move.  The calls run on `meta` tensors, so nothing is computed.

Each call reads its operands once and writes its results, as torch's kernels do for tensors larger than L2.  A view or
an allocation moves nothing.  A broadcast operand counts by its distinct elements, and an indexed tensor by the rows
that are used.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from rooflab.kernels import _device
from rooflab.roofline.model import Traffic

MAX_KEPT_ELEMENTS = 2**18
"""The largest integer tensor, in elements, whose values are kept, because kernels read lengths and slots."""
VALUE_DTYPES = (torch.int32, torch.int64, torch.bool)
"""The dtypes of tensors whose values kernels read."""
ROW_READS = ("index", "index_select", "gather", "embedding")
"""The calls that read some rows of their first operand."""
ROW_WRITES = ("index_put_", "index_copy_", "scatter_")
"""The calls that write some rows of their first operand."""
OVERWRITE_CALLS = ("copy_", "fill_", "zero_", *ROW_WRITES)
"""The calls that overwrite their first operand without reading it."""
ELEMENTWISE_CALLS = (
    "masked_fill",
    "masked_fill_",
    "where",
    "copy_",
    "clone",
    "_to_copy",
    "floor_divide",
    "cumsum",
    "cumprod",
)
"""The elementwise calls that torch does not tag as pointwise."""
ALLOCATION_CALLS = ("empty", "new_empty", "empty_like", "empty_strided", "empty_permuted", "new_empty_strided")
aten = torch.ops.aten


@dataclass(frozen=True)
class TorchCall:
    """Describes a torch call that moves data.  Its tensors have the sizes of the data that is read and written."""

    name: str
    """The name of the call, such as `mm`, without namespace and overload."""
    elementwise: bool
    """Whether some result has the shape to which the operands are broadcast."""
    read: tuple[torch.Tensor, ...]
    written: tuple[torch.Tensor, ...]


def steps(*moves: tuple[float, float]) -> Traffic:
    """Returns the traffic of successive launches.  Each launch is a pair in `moves`: bytes read and bytes written."""
    return Traffic(
        read_bytes=sum(read for read, _ in moves), write_bytes=sum(written for _, written in moves), launches=len(moves)
    )


def counted(kernel: Callable[..., Any], inputs: Mapping[str, Any], device: str) -> Traffic | None:
    """Returns the traffic of the torch calls that `kernel` makes with these real or `meta` inputs, as on `device` (cpu
    or cuda).  Returns None if the kernel refuses the inputs with a `ValueError`."""
    with torch.inference_mode(False):
        meta_arguments = {name: _without_data(x) if isinstance(x, torch.Tensor) else x for name, x in inputs.items()}
        try:
            torch_calls = calls_of(lambda: kernel(**meta_arguments), device)
        except ValueError:
            return None
    return steps(*[(sum(map(held, call.read)), sum(map(held, call.written))) for call in torch_calls])


def calls_of(run: Callable[[], object], device: str = "cuda") -> list[TorchCall]:
    """Calls `run()` and returns its torch calls that move data, in order.  Kernels in `run` make the calls that they
    would make on `device` (cpu or cuda)."""
    torch_calls: list[TorchCall] = []
    previous_device, _device.counted_device_type = _device.counted_device_type, device
    try:
        with _Whole(torch_calls), _Calls(torch_calls):
            run()
    finally:
        _device.counted_device_type = previous_device
    return torch_calls


def is_elementwise(func: Any, name: str) -> bool:
    """Returns whether the call is elementwise: a result has the broadcast shape of the operands."""
    return name in ELEMENTWISE_CALLS or torch.Tag.pointwise in getattr(func, "tags", ())


def held(x: torch.Tensor) -> int:
    """Returns the bytes of the tensor's distinct elements in memory."""
    return math.prod(size for size, stride in zip(x.shape, x.stride(), strict=True) if stride) * x.itemsize


class _Whole(TorchFunctionMode):
    """Records torch functions that are one kernel on a GPU, such as layer_norm, but several calls on `meta`."""

    def __init__(self, calls: list[TorchCall]) -> None:
        self.calls = calls

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in (F.rms_norm, F.layer_norm, F.scaled_dot_product_attention):
            return func(*args, **kwargs)
        tensors = [x for x in tree_leaves((args, kwargs)) if type(x) is torch.Tensor]  # not torch's causal mask
        last_dim = tensors[2 if func is F.scaled_dot_product_attention else 0].shape[-1]
        result = torch.empty((*tensors[0].shape[:-1], last_dim), dtype=tensors[0].dtype, device="meta")
        self.calls.append(TorchCall(func.__name__, False, tuple(tensors), (result,)))
        return result


class _Calls(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the torch calls that move data.  Functions that are one kernel on a GPU, such as `layer_norm`, do not
    reach this class.  The class `_Whole` records them."""

    def __init__(self, calls: list[TorchCall]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls = calls

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Returns False, because with True torch imports its compiler, which takes 1 s."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in COMPOSED_CALLS:
            with self:
                return COMPOSED_CALLS[func](*args, **kwargs)
        name = func._schema.name.removeprefix("aten::")
        operands, changed_tensors = _operands(func, name, args, kwargs)
        result = _result(func, name, args, kwargs, changed_tensors)
        results = [x for x in tree_leaves(result) if isinstance(x, torch.Tensor)]
        outputs = changed_tensors or [x for x in results if not any(_shared(x, operand) for operand in operands)]
        if outputs and name not in ALLOCATION_CALLS:
            if name in ROW_READS:
                operands = [results[0], *operands[1:]]
            elif name in ROW_WRITES:
                outputs = [_put(args, name)]
            moved_tensors = [tuple(x for x in group if x.numel() > (x.dim() == 0)) for group in (operands, outputs)]
            if any(moved_tensors):
                self.calls.append(TorchCall(name, is_elementwise(func, name), *moved_tensors))
        return result


def _logsumexp(x: torch.Tensor, dim: list[int], keepdim: bool = False) -> torch.Tensor:
    """Computes `logsumexp` with the same calls as torch's own code (ATen/native/ReduceOps.cpp).  Each call is one
    kernel."""
    if not x.numel():
        empty_sum: torch.Tensor = aten.sum(x.exp(), dim, keepdim)
        return empty_sum.log_()
    max_values = aten.amax(x, dim, True)
    result_max = max_values if keepdim else aten.squeeze(max_values, dim)
    result_max.masked_fill_(result_max.abs() == math.inf, 0)
    exp_sum: torch.Tensor = aten.sum((x - max_values).exp_(), dim, keepdim)
    return exp_sum.log_().add_(result_max)


COMPOSED_CALLS: Mapping[Any, Callable[..., torch.Tensor]] = {
    aten.logsumexp.default: _logsumexp,
    aten.stack.default: lambda tensors, dim=0: aten.cat([x.unsqueeze(dim) for x in tensors], dim),
    aten.mean.dim: lambda x, dim, keepdim=False, **dtype: aten.sum(x, dim, keepdim, **dtype),
}
"""For each call, the function that runs instead: the parts of the call, or a call that moves the same bytes."""
RESULT_SHAPES: Mapping[str, Callable[..., Sequence[int]]] = {
    "addmm": lambda addend, a, b, **options: (a.shape[0], b.shape[1]),
    "any": lambda x, dim: [size for axis, size in enumerate(x.shape) if axis != dim % x.dim()],
    "cat": lambda tensors, dim=0: [
        sum(x.shape[axis] for x in tensors) if axis == dim % tensors[0].dim() else size
        for axis, size in enumerate(tensors[0].shape)
    ],
}
"""The result shapes of calls that torch would compute in Python on `meta`, after an import of its compiler (1 s)."""


def _without_data(x: torch.Tensor) -> torch.Tensor:
    """Returns a meta tensor in place of `x`.  Copies a small integer or bool tensor to the CPU instead, because a
    kernel may read its values."""
    if not x.is_meta and x.dtype in VALUE_DTYPES and x.numel() <= MAX_KEPT_ELEMENTS:
        return x.cpu().clone()
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")


def _operands(
    func: Any, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Returns the tensors that a torch call reads, and the tensors that the call changes."""
    read_tensors, changed_tensors = list[torch.Tensor](), list[torch.Tensor]()
    schema = {argument.name: argument for argument in func._schema.arguments}
    for argument, value in [*zip(schema.values(), args, strict=False), *((schema[key], kwargs[key]) for key in kwargs)]:
        tensors = [x for x in tree_leaves(value) if isinstance(x, torch.Tensor)]
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        if is_written:
            changed_tensors += tensors
        if not is_written or not (argument.is_out or name in OVERWRITE_CALLS):
            read_tensors += tensors
    return read_tensors, changed_tensors


def _result(func: Any, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], changed: list[torch.Tensor]) -> Any:
    """Returns the result of a torch call.  The result has values if all operands are small and have values; else it is
    a meta tensor."""
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    is_pointwise = is_elementwise(func, name)
    shape = torch.broadcast_shapes(*(x.shape for x in tensors)) if is_pointwise else ()  # type: ignore[no-untyped-call]
    has_few_elements = max([math.prod(shape), *(x.numel() for x in tensors)]) <= MAX_KEPT_ELEMENTS
    if not any(x.is_meta for x in tensors) and (has_few_elements or func.is_view):
        return func(*args, **kwargs)
    if changed:
        return changed[0] if len(changed) == 1 else tuple(changed)
    if name in RESULT_SHAPES:
        dtype = torch.bool if name == "any" else tensors[0].dtype
        return torch.empty(RESULT_SHAPES[name](*args, **kwargs), dtype=dtype, device="meta")
    if is_pointwise:  # torch would do this in Python too
        ones = tree_map_only(torch.Tensor, lambda x: torch.ones((1,) * x.dim(), dtype=x.dtype), (args, dict(kwargs)))
        dtype = func(*ones[0], **ones[1]).dtype
        stride_source = next((x for x in tensors if x.shape == shape), torch.empty(shape, device="meta"))
        memory_format = kwargs.get("memory_format") or torch.preserve_format
        return torch.empty_like(stride_source, dtype=dtype, device="meta", memory_format=memory_format)
    keeps_values = name in ROW_READS and not any(x.is_meta for x in tensors[1:])  # a mask must have values
    meta_args = [x if keeps_values and index else tree_map_only(torch.Tensor, _meta, x) for index, x in enumerate(args)]
    return func(*meta_args, **tree_map_only(torch.Tensor, _meta, dict(kwargs)))


def _meta(x: torch.Tensor) -> torch.Tensor:
    return x if x.is_meta else torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")


def _shared(first: torch.Tensor, second: torch.Tensor) -> bool:
    return bool(first.untyped_storage()._cdata == second.untyped_storage()._cdata)


def _put(args: tuple[Any, ...], name: str) -> torch.Tensor:
    """Returns a meta tensor with the shape of the elements that a call like `index_put_` writes."""
    target_tensor = _meta(args[0])
    if name == "index_put_":
        written_elements: torch.Tensor = aten.index.Tensor(target_tensor, args[1])
        return written_elements
    return target_tensor.new_empty(args[3 if name == "index_copy_" else 2].shape)
