"""The check of the fixture `kernel_benchmark`: a function's result must be right, and must not change afterwards."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from rooflab.bench.core.cheats import changes_later
from rooflab.bench.core.timers import tampered
from rooflab.bench.core.trial import wait_for_own
from rooflab.reference.compare import ErrorStats, elementwise

HALF_EPSILONS = 4
"""Allowed roundings in a dtype of 16 bits or fewer, the reference's own included."""
FULL_EPSILONS = 64
"""Allowed roundings in fp32 and fp64, where the order of a long sum matters: sqrt(4096) roundings of the sum."""


def judge(actual: object, expected: object) -> list[ErrorStats]:
    """One verdict per output of a kernel against its reference's; NaN never passes.

    An output has its reference's dtype; a float may have a reference in fp64.  Integers must be equal.  Floats may
    differ by a few roundings to the kernel's output dtype, relative to the larger of the element and the root mean
    square of its tensor: a sum's error grows with its terms, not with its value.  Raises `ValueError` if one is not a
    tensor or a tuple of tensors, or if the numbers or dtypes of outputs differ.
    """
    actuals, oracles = _tensors("fn", actual), _tensors("reference", expected)
    if len(actuals) != len(oracles):
        raise ValueError(f"fn: expected {len(oracles)} outputs, as from the reference, got {len(actuals)}")
    verdicts = []
    for index, (output, oracle) in enumerate(zip(actuals, oracles, strict=True)):
        name = f"output {index}"
        if oracle.dtype != output.dtype and not (oracle.dtype == torch.float64 and output.is_floating_point()):
            raise ValueError(f"{name}: expected {oracle.dtype}, as from the reference, got {output.dtype}")
        verdicts.append(elementwise(name, output, oracle, tolerance(output.dtype, oracle)))
    return verdicts


def wrong(actual: object, expected: object) -> list[str]:
    """What `judge` finds wrong, one sentence each."""
    try:
        return [stats.describe() for stats in judge(actual, expected) if not stats.passed]
    except ValueError as error:
        return [str(error)]


def _shifted(args: Sequence[Any]) -> list[Any]:
    """Copies of the arguments; the elements of float tensors have moved by one place along the last dimension."""
    others = copied(args)
    for value in others:
        if isinstance(value, torch.Tensor) and value.is_floating_point() and value.ndim and not value.is_meta:
            raw = value.detach().view(torch.uint8) if value.dtype.itemsize == 1 else value.detach()
            raw.copy_(raw.roll(1, -1))
    return others


def tolerance(dtype: torch.dtype, oracle: torch.Tensor) -> torch.Tensor:
    """The largest allowed absolute error of each element of an output of `dtype`."""
    magnitude = oracle.detach().to("cpu", torch.float64).abs()
    if not dtype.is_floating_point or not magnitude.numel():
        return torch.zeros_like(magnitude)
    eps = torch.finfo(dtype).eps
    finite = torch.isfinite(magnitude)
    rms = magnitude[finite].square().mean().sqrt() if finite.any() else torch.zeros((), dtype=torch.float64)
    allowed = (HALF_EPSILONS if eps > 1e-4 else FULL_EPSILONS) * eps * torch.maximum(magnitude, rms)
    return torch.where(finite, allowed, 0.0)  # an infinity must be met exactly


def _tensors(name: str, value: object) -> tuple[torch.Tensor, ...]:
    values = (value,) if isinstance(value, torch.Tensor) else value
    if not isinstance(values, tuple | list) or not all(isinstance(item, torch.Tensor) for item in values):
        raise ValueError(f"{name}: expected a tensor or a tuple of tensors, got {type(value).__name__}")
    return tuple(values)


@dataclass(frozen=True)
class Checked:
    """The result of checking a function before it is timed."""

    result: Any
    """The function's return value."""
    expected: Any
    """The reference's return value; None without a reference."""
    faults: tuple[str, ...]
    """One sentence for each fault."""
    interpreted: bool
    """Whether Triton's interpreter ran it."""


def check(fn: Callable[..., Any], args: Sequence[Any], reference: Callable[..., Any] | None) -> Checked:
    """Calls `fn` and `reference`, each on copies of `args`, and compares.

    The result is read as soon as the current stream is done, and may not change afterwards.  A call on the same
    values, each shifted by one place, must be right too.
    """
    expected = reference(*copied(args)) if reference is not None else None
    threads = threading.active_count()
    result, interpreted = _watched(partial(fn, *copied(args)))
    if tampering := tampered():
        return Checked(result, expected, (f"INVALID: {tampering}",), interpreted)
    outputs = _plain(result)
    read = tuple(output.clone() for output in outputs)
    wait_for_own(device_of(*args, result))
    late = changes_later(outputs, read) if threading.active_count() > threads else None
    faults = [late] if late else []
    if reference is not None:
        faults += wrong(read or result, expected)
        if not faults:
            others = _shifted(args)
            faults += [f"{fault}, on other values" for fault in wrong(fn(*copied(others)), reference(*others))]
    return Checked(result, expected, tuple(faults), interpreted)


def _plain(result: object) -> tuple[torch.Tensor, ...]:
    """`result` as a tuple of tensors; empty if it holds anything else."""
    with suppress(ValueError):
        return _tensors("fn", result)
    return ()


def copied(args: Sequence[Any]) -> list[Any]:
    """The arguments; tensors are copied with the same strides."""
    return [_same_layout(value) if isinstance(value, torch.Tensor) else value for value in args]


def _same_layout(tensor: torch.Tensor) -> torch.Tensor:
    """A copy with the same strides; `clone` would not keep all of them."""
    if tensor.is_meta or torch._debug_has_internal_overlap(tensor):
        return tensor.clone()
    strided = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    return strided.copy_(tensor)


def device_of(*values: Any) -> torch.device:
    """The CUDA device of the first CUDA tensor, in containers too; if there is no tensor, the current CUDA device."""
    pending = list(values)
    while pending:
        value = pending.pop(0)
        if isinstance(value, torch.Tensor) and value.is_cuda:
            return value.device
        if isinstance(value, tuple | list):
            pending.extend(value)
        elif isinstance(value, dict):
            pending.extend(value.values())
    # A closure hides its tensors; a CPU clock would time only the launch of CUDA work.
    tensors = any(isinstance(value, torch.Tensor) for value in values)
    if torch.cuda.is_available() and not tensors:
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _watched(call: Callable[[], Any]) -> tuple[Any, bool]:
    """The result of `call`, and whether Triton's interpreter ran a program in it."""

    def builder() -> Any:
        return getattr(sys.modules.get("triton.runtime.interpreter"), "interpreter_builder", None)

    if known := builder():
        known.grid_idx = None
    result = call()
    return result, getattr(builder(), "grid_idx", None) is not None
