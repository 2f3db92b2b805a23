"""An entry of the page: the call of another project's kernel, and its expected result in fp64.

Behind the judge stands what entries of several projects share.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.functional import rms_norm

from compatibility.sources import Source
from rooflab.bench.core.functions import tolerance
from rooflab.reference.compare import ErrorStats, elementwise

DTYPES = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "i32": torch.int32,
    "i64": torch.int64,
    "i8": torch.int8,
    "bool": torch.bool,
    "u8": torch.uint8,
}
_INPUT = re.compile(r"(\w+)=([\dx]*)(?::(\w+))?(?:<(\d+))?")


@dataclass(frozen=True)
class Entry:
    """One call of an outside launcher, which may launch several kernels."""

    name: str
    inputs: str
    """Such as `x=7x96,w=96:bf16,ids=7:i64<50`: normal numbers in fp32 unless said, integers from 0 below a bound."""
    call: Callable[..., Any]
    """Takes the inputs; its tensors, or an input that it changes, are the outputs."""
    reference: Callable[..., Any]
    """Takes the inputs, floats in fp64."""
    grad: str = ""
    """Names of inputs whose gradients are outputs too: the backward kernels run."""
    allowed: float = 1.0
    """Multiplies the tolerance of `gate.judge`: where a product's operands are rounded inside."""
    configs: Mapping[str, Any] | None = None
    """Of an autotuned kernel."""


@dataclass(frozen=True)
class Project:
    """The entries of one source."""

    source: Source
    entries: tuple[Entry, ...] = field(default_factory=tuple)


def made(text: str, seed: int = 0) -> dict[str, torch.Tensor]:
    """The inputs that a text names."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for item in text.replace(" ", "").split(","):
        match = _INPUT.fullmatch(item)
        assert match is not None, item
        name, sizes, dtype, bound = match.groups()
        shape = [int(size) for size in sizes.split("x") if size]
        kind = DTYPES[dtype or "fp32"]
        if kind.is_floating_point:
            found[name] = torch.randn(shape, generator=generator).to(kind)
        else:
            found[name] = torch.randint(int(bound or 2), shape, generator=generator).to(kind)
    return found


def outputs(call: Callable[..., Any], inputs: Mapping[str, torch.Tensor], grad: str) -> list[torch.Tensor]:
    """What a call returns, and the gradients for a seeded gradient of each floating output."""
    given = {name: value.clone() for name, value in inputs.items()}
    names = [name for name in grad.split(",") if name]
    for name in names:
        given[name].requires_grad_()
    held = flat(call(*given.values()))
    if names:
        into = [out for out in held if out.requires_grad]
        gradients = [_gradient(out, number) for number, out in enumerate(into)]
        found = torch.autograd.grad(into, [given[name] for name in names], gradients)
        held += found
    return [out.detach() for out in held]


def _gradient(out: torch.Tensor, number: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 + number)
    return torch.randn(out.shape, generator=generator).to(torch.bfloat16).to(out.dtype)


def flat(value: Any) -> list[torch.Tensor]:
    """The tensors of a result, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for item in value for tensor in flat(item)] if isinstance(value, tuple | list) else []


def judged(entry: Entry, held: list[torch.Tensor], inputs: Mapping[str, torch.Tensor]) -> list[ErrorStats]:
    """Outputs against the reference's."""
    exact = {name: value.double() if value.is_floating_point() else value for name, value in inputs.items()}
    wanted = outputs(entry.reference, exact, entry.grad)
    assert len(wanted) == len(held), f"{len(held)} outputs, and the reference has {len(wanted)}"
    found = []
    for number, (out, oracle) in enumerate(zip(held, wanted, strict=True)):
        allowed = entry.allowed * tolerance(out.dtype, oracle)
        found.append(elementwise(f"output {number}", out, oracle.double(), allowed))
    return found


def largest(stats: list[ErrorStats]) -> float:
    """The largest error of all outputs, as a multiple of what is allowed."""
    return max((each.max_error_over_tolerance for each in stats), default=math.nan)


def into(call: Callable[..., Any], *out: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """What a launcher wrote."""
    call(*out)
    return out


def ints(*values: int) -> torch.Tensor:
    """Lengths, starts or rows in 32 bits."""
    return torch.tensor(values, dtype=torch.int32)


def rms(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """The norm of whole rows."""
    return rms_norm(x, x.shape[-1:], w, 1e-6)


def rotated(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    """Each head's left and right half, turned by the angles of its token."""
    a, b, cos, sin = *x.chunk(2, -1), t.cos()[:, None], t.sin()[:, None]
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


def interleaved(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    """Each head's even and odd elements, turned by the angles of its token."""
    a, b, cos, sin = x[..., ::2], x[..., 1::2], t.cos()[:, None], t.sin()[:, None]
    return torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)
