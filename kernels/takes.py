"""Describes the calls that a kernel takes: dtypes, sizes, options and memory layouts.  Also describes refusals.

The function `kernel` of `kernels/launcher.py` has the fields of `Takes` as arguments.  The class `Refusal` holds the
reason why a kernel refuses a call.  This file also writes the text of the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from types import CodeType
from typing import Literal

import torch

from rooflab.kernels._device import kind_of
from rooflab.kernels._tma import ALIGNMENT, STRIDE_LIMIT, address_of
from rooflab.reference.contract import CallArguments, Contract
from rooflab.reference.spec import Arguments

EXTRA_ARGUMENTS = ("out", "config", "plan")
"""The arguments that a kernel may have in addition to the reference's arguments."""
HALF_DTYPES = (torch.float16, torch.bfloat16)
FIRST_TENSOR_NAMES = ("itemsize", "device")
"""Further names for `holds`: the bytes of an element, and the device type, of the call's first tensor."""
Unsupported = Callable[[Arguments], str | None]
Limit = int | range | tuple[int, ...]
"""A limit of a size: an int is the largest value, the step of a range divides the size, a tuple has all values."""
Inner = int | tuple[int, ...]
"""The dimension, or the possible dimensions, of a tensor that must be innermost in memory."""


@dataclass(frozen=True)
class Refusal:
    """Holds the reason why a kernel cannot run.  Its text is, for example, `UNSUPPORTED: needs sm90, found sm80`."""

    status: Literal["UNSUPPORTED", "UNAVAILABLE"]
    reason: str

    def __str__(self) -> str:
        return f"{self.status}: {self.reason}"


@dataclass(frozen=True)
class Takes:
    """Describes the calls that a kernel takes.  An empty field sets no limit beyond the op's own limits."""

    dtypes: Mapping[str, tuple[torch.dtype, ...]] = field(default_factory=dict)
    """The dtypes that the rung takes, by the names of tensors."""
    limits: Mapping[str, Limit] = field(default_factory=dict)
    """The limits of dimensions (of the op's contract) and of integer options, by name."""
    off: Mapping[str, str] = field(default_factory=dict)
    """The arguments that must be None, each with its reason."""
    holds: Mapping[str, str] = field(default_factory=dict)
    """Conditions in Python, each with its meaning in words: `{"D == rotary": "heads that are rotated whole"}`.  A name
    is a dimension, an option, or a tensor, which stands for its strides.  A refusal names the first name."""
    contiguous: tuple[str, ...] = ()
    """The tensors that must be contiguous."""
    whole: Mapping[str, Inner] = field(default_factory=dict)
    """The tensors whose address and strides (except the innermost stride) must be multiples of 16 bytes."""
    mapped: Mapping[str, Inner] = field(default_factory=dict)
    """The tensors with a TMA map: as in `whole`, and the innermost stride is 1, and no other stride is 0."""

    def check(self, contract: Contract, parameters: Collection[str]) -> None:
        """Checks the names in the conditions that a kernel sets for its calls.  Raises `TypeError` unless each name is
        an argument or a dimension of the op, `itemsize` or `device`."""
        dim_names = {dim.name for argument in contract.arguments.values() for dim in argument.dims}
        known_names = {*parameters, *dim_names, *FIRST_TENSOR_NAMES}
        used_names = [name for condition in self.holds for name in _compiled(condition).co_names]
        for name in (*self.dtypes, *self.limits, *self.off, *used_names, *self.contiguous, *self.whole, *self.mapped):
            if name not in known_names:
                raise TypeError(f"{name}: expected an argument or a dimension of the op")

    def why_not(self, inputs: Arguments, contract: Contract, rest: Unsupported | None = None) -> str | None:
        """Returns why a call is refused, or None.  First checks the fields, then the kernel's own check, `rest`."""
        reason = next(self._refused(vars(inputs), contract), None)
        return rest(inputs) if reason is None and rest is not None else reason

    def _refused(self, arguments: CallArguments, contract: Contract) -> Iterator[str]:
        """Yields one sentence for each condition of the kernel that the arguments of a call violate."""
        tensors = {name: x for name in contract.arguments if (x := arguments.get(name)) is not None}
        for name, dtypes in self.dtypes.items():
            if name in tensors and tensors[name].dtype not in dtypes:
                yield f"{name}: expected {' or '.join(map(str, dtypes))}, got {tensors[name].dtype}"
        for name, reason in self.off.items():
            if arguments.get(name) is not None:
                yield f"{name}: expected none, because {reason}"
        sizes = contract.sizes(arguments) if self.limits or self.holds else {}
        for name, limit in self.limits.items():
            if name in sizes and not (sizes[name] <= limit if isinstance(limit, int) else sizes[name] in limit):
                argument = _argument(contract, name)
                expected_text = _words(limit) if argument == name else f"{name} of {_words(limit)}"
                yield f"{argument}: expected {expected_text}, got {sizes[name]}"
        if self.holds:
            tensor0, strides = next(iter(tensors.values())), {name: x.stride() for name, x in tensors.items()}
            values = {**arguments, **strides, **sizes, "itemsize": tensor0.element_size(), "device": kind_of(tensor0)}
            for condition, expected_text in self.holds.items():
                names = _compiled(condition).co_names
                if values.keys() >= {*names} and not eval(_compiled(condition), {"__builtins__": {}}, values):
                    got_text = ", ".join(f"{name}={values[name]}" for name in names) if names[1:] else values[names[0]]
                    yield f"{_argument(contract, names[0])}: expected {expected_text}, got {got_text}"
        for name in self.contiguous:
            if name in tensors and not tensors[name].is_contiguous():
                yield f"{name}: expected a contiguous tensor, got strides {tensors[name].stride()}"
        for is_for_tma, layouts in ((False, self.whole), (True, self.mapped)):
            for name, inner_dims in layouts.items():
                if name in tensors and (refusal := why_not_mapped(tensors[name], inner_dims, is_for_tma)):
                    yield f"{name}: {refusal}"


@cache
def _compiled(text: str) -> CodeType:
    return compile(text, "holds", "eval")


def why_not_mapped(x: torch.Tensor, inner: Inner = -1, tma: bool = True) -> str | None:
    """Returns the reason why TMA cannot make a tensor map of `x`, or None.  With `tma=False`, only checks that the
    address and the outer strides are multiples of 16 bytes."""
    dims = [dim % x.ndim for dim in (inner if isinstance(inner, tuple) else (inner,))]
    address, strides = address_of(x) % ALIGNMENT, [stride * x.element_size() for stride in x.stride()]
    for dim in dims:
        steps = [step for axis, step in enumerate(strides) if axis != dim and x.shape[axis] > 1]
        is_aligned = address == 0 and all(step % ALIGNMENT == 0 for step in steps)
        strides_fit = all(0 < step < STRIDE_LIMIT for step in steps) and (x.shape[dim] == 1 or x.stride(dim) == 1)
        if not x.numel() or (is_aligned and (strides_fit or not tma)):
            return None
    strides_text = f"strides of whole {ALIGNMENT} bytes"
    tma_text = f"stride 1 in dimension {' or '.join(map(str, dims))}, and an address and other {strides_text}, for TMA"
    got_text = f"address % {ALIGNMENT} = {address} and strides of {', '.join(map(str, strides))} bytes"
    return f"expected {tma_text if tma else f'an address and {strides_text}'}, got {got_text}"


def _argument(contract: Contract, name: str) -> str:
    """Returns the name of the op's first argument with the dimension `name`.  Returns `name` itself if no argument has
    this dimension."""
    tensors = contract.arguments.items()
    return next((argument for argument, x in tensors if name in [dim.name for dim in x.dims]), name)


def _words(limit: Limit) -> str:
    if isinstance(limit, tuple):
        return f"{', '.join(map(str, limit[:-1]))} or {limit[-1]}" if limit[1:] else str(limit[0])
    if isinstance(limit, int):
        return f"at most {limit}"
    step_text = f" in multiples of {limit.step}" if limit.step > 1 else ""
    return (f"{limit[0]} to " if limit[0] > limit.step else "at most ") + f"{limit[-1]}{step_text}"
