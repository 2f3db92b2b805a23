"""What a rung takes of its op's calls, as data: dtypes, sizes, options that must be off, and strides; and `Refusal`.

`kernel(...)` of `kernels/launcher.py` has these fields; the sentence of a refusal is made here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch

from rooflab.kernels._tma import ALIGNMENT, STRIDE_LIMIT, address_of
from rooflab.reference.contract import Contract
from rooflab.reference.spec import Arguments

OWN = ("out", "config", "plan")
"""Arguments that a kernel may have in addition to those of the reference."""
HALVES = (torch.float16, torch.bfloat16)
Unsupported = Callable[[Arguments], str | None]
Limit = int | range | tuple[int, ...]
"""The most that a size may be; a range, whose step is what it must be a multiple of; or its only values."""


@dataclass(frozen=True)
class Refusal:
    """Why a kernel cannot run; as text `UNSUPPORTED: needs sm90, found sm80`."""

    status: Literal["UNSUPPORTED", "UNAVAILABLE"]
    reason: str

    def __str__(self) -> str:
        return f"{self.status}: {self.reason}"


@dataclass(frozen=True)
class Takes:
    """The calls that a rung takes; each field is empty where the rung takes what the op takes."""

    dtypes: Mapping[str, tuple[torch.dtype, ...]] = field(default_factory=dict)
    """Of tensors by name."""
    limits: Mapping[str, Limit] = field(default_factory=dict)
    """Of dimensions of the op's contract and of integer options, by name."""
    off: Mapping[str, str] = field(default_factory=dict)
    """Arguments that must be None, with the reason."""
    contiguous: tuple[str, ...] = ()
    """Tensors that must be contiguous."""
    mapped: Mapping[str, int] = field(default_factory=dict)
    """Tensors of which TMA makes a map, with the dimension (-1: the last) along which their stride must be 1; their
    address and other strides must be whole 16 bytes."""
    instead: str | None = None
    """A kernel that takes what this one refuses."""

    def check(self, contract: Contract, parameters: Collection[str]) -> None:
        """Raises `TypeError` on a name that the op does not have."""
        dims = {dim.name for argument in contract.arguments.values() for dim in argument.dims}
        known = {*parameters, *dims}
        for name in (*self.dtypes, *self.limits, *self.off, *self.contiguous, *self.mapped):
            if name not in known:
                raise TypeError(f"{name}: expected an argument or a dimension of the op")

    def why_not(self, inputs: Arguments, contract: Contract, rest: Unsupported | None = None) -> str | None:
        """Why a call with these arguments is refused, by this data or else by `rest`, or None."""
        reason = self._why_not(inputs, contract)
        if reason is None:
            return None if rest is None else rest(inputs)
        return reason if self.instead is None else f"{reason}; {self.instead} takes it"

    def _why_not(self, inputs: Arguments, contract: Contract) -> str | None:
        given = vars(inputs)
        for name, dtypes in self.dtypes.items():
            if (x := given.get(name)) is not None and x.dtype not in dtypes:
                return f"{name}: expected {' or '.join(map(str, dtypes))}, got {x.dtype}"
        for name, reason in self.off.items():
            if given.get(name) is not None:
                return f"{name}: expected none, because {reason}"
        sizes = contract.sizes(given) if self.limits else {}
        for name, limit in self.limits.items():
            if name in sizes and not (sizes[name] <= limit if isinstance(limit, int) else sizes[name] in limit):
                return _refused(contract, name, limit, sizes[name])
        for name in self.contiguous:
            if (x := given.get(name)) is not None and not x.is_contiguous():
                return f"{name}: expected a contiguous tensor, got strides {x.stride()}"
        for name, inner in self.mapped.items():
            if (x := given.get(name)) is not None and (why := why_not_mapped(x, inner)):
                return f"{name}: {why}"
        return None


def why_not_mapped(x: torch.Tensor, inner: int = -1) -> str | None:
    """Why TMA cannot make a map of x, whose stride along `inner` is to be 1, or None."""
    strides = [stride * x.element_size() for stride in x.stride()]
    inner %= x.ndim
    steps = [step for dim, step in enumerate(strides) if dim != inner and x.shape[dim] > 1]
    aligned = address_of(x) % ALIGNMENT == 0 and all(
        0 < step < STRIDE_LIMIT and step % ALIGNMENT == 0 for step in steps
    )
    if not x.numel() or (aligned and (x.shape[inner] == 1 or x.stride(inner) == 1)):
        return None
    where = f"address % {ALIGNMENT} = {address_of(x) % ALIGNMENT} and strides of {', '.join(map(str, strides))} bytes"
    wanted = f"stride 1 in dimension {inner}, and an address and other strides of whole {ALIGNMENT} bytes, for TMA"
    return f"expected {wanted}, got {where}"


def _refused(contract: Contract, name: str, limit: Limit, size: int) -> str:
    tensors = (each for each, argument in contract.arguments.items() if name in [dim.name for dim in argument.dims])
    tensor = next(tensors, None)
    wanted = f"at most {limit}"
    if isinstance(limit, tuple):
        wanted = f"{', '.join(map(str, limit[:-1]))} or {limit[-1]}" if limit[1:] else str(limit[0])
    elif isinstance(limit, range):
        whole = f" in multiples of {limit.step}" if limit.step > 1 else ""
        wanted = (f"{limit[0]} to " if limit[0] > limit.step else "at most ") + f"{limit[-1]}{whole}"
    return f"{tensor}: expected {name} of {wanted}, got {size}" if tensor else f"{name}: expected {wanted}, got {size}"
