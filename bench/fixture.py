"""What the fixture `kernel_benchmark` does once it is called: the correctness gate, device time, and the roofs."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from types import FrameType
from typing import Any

import torch

from rooflab.bench.calls import free_bytes
from rooflab.bench.ceilings import ceilings_for, limits_for
from rooflab.bench.environment import snapshot
from rooflab.bench.measure import ABOVE, CAUSES, COPIES
from rooflab.bench.timing import Samples, time_functions
from rooflab.reference.compare import ErrorStats, elementwise
from rooflab.reference.spec import nbytes
from rooflab.roofline.model import Cost, bound

HALF_EPSILONS = 4
"""Roundings to a dtype of 16 bits or fewer that a kernel may be off by, the reference's own included."""
FULL_EPSILONS = 64
"""The same in fp32 and fp64, where the order of a long sum shows: sqrt(4096) roundings of its running value."""


def judge(actual: object, expected: object) -> list[ErrorStats]:
    """One verdict per output of a kernel against its reference's; NaN never passes.

    Integers must be equal. Floats may differ by a few roundings to the kernel's output dtype, relative to the larger
    of the element and the root mean square of its tensor: a sum's error grows with its terms, not with their sum.
    Raises `ValueError` where either is not a tensor or a tuple of tensors, or there are more of one than of the other.
    """
    actuals, oracles = _tensors("fn", actual), _tensors("reference", expected)
    if len(actuals) != len(oracles):
        raise ValueError(f"fn: expected {len(oracles)} outputs as of the reference, got {len(actuals)}")
    return [
        elementwise(f"output {index}", output, oracle, tolerance(output.dtype, oracle))
        for index, (output, oracle) in enumerate(zip(actuals, oracles, strict=True))
    ]


def tolerance(dtype: torch.dtype, oracle: torch.Tensor) -> torch.Tensor:
    """The largest absolute error allowed in each element of an output of `dtype`."""
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


def check(
    fn: Callable[..., Any], args: Sequence[Any], reference: Callable[..., Any] | None
) -> tuple[Any, list[str], bool]:
    """What `fn` returned, what is wrong with it, and whether Triton's interpreter ran it.  `args` stay as they are."""
    expected = reference(*_copy(args)) if reference is not None else None
    result, interpreted = _watched(partial(fn, *_copy(args)))
    if reference is None:
        return result, [], interpreted
    return result, [stats.describe() for stats in judge(result, expected) if not stats.passed], interpreted


def _copy(args: Sequence[Any]) -> list[Any]:
    return [_same_layout(value) if isinstance(value, torch.Tensor) else value for value in args]


def _same_layout(tensor: torch.Tensor) -> torch.Tensor:
    """A copy with the same strides, which `clone` would tidy up."""
    if tensor.is_meta or torch._debug_has_internal_overlap(tensor):
        return tensor.clone()
    strided = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    return strided.copy_(tensor)


def _device_of(*values: Any) -> torch.device:
    """The CUDA device of the first tensor on one, in containers too; else the one in use, where CUDA is in use."""
    pending = list(values)
    while pending:
        value = pending.pop(0)
        if isinstance(value, torch.Tensor) and value.is_cuda:
            return value.device
        if isinstance(value, tuple | list):
            pending.extend(value)
        elif isinstance(value, dict):
            pending.extend(value.values())
    # A closure hides its tensors: CUDA work must not be timed by a clock that sees only its launch.
    tensors = any(isinstance(value, torch.Tensor) for value in values)
    if torch.cuda.is_available() and not tensors:
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _watched(call: Callable[[], Any]) -> tuple[Any, bool]:
    """Calls, and says whether a frame of Triton's interpreter was entered, which only that environment allows."""
    if os.environ.get("TRITON_INTERPRET", "0") != "1":
        return call(), False
    seen: list[bool] = []

    def profile(frame: FrameType, event: str, argument: object) -> None:
        if not seen and frame.f_code.co_filename.replace("\\", "/").endswith("triton/runtime/interpreter.py"):
            seen.append(True)

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        return call(), bool(seen)
    finally:
        sys.setprofile(before)


def time_kernel(
    fn: Callable[..., Any], args: Sequence[Any], result: object, *, budget_s: float, min_samples: int
) -> tuple[Samples, torch.device]:
    """Times `fn(*args)` by `timing.time_functions` on the device of its tensors, over several copies of them."""
    tensors = [value for value in (*args, result) if isinstance(value, torch.Tensor)]
    device = _device_of(*args, result)
    fit = int(free_bytes(device) / 4 / max(1, nbytes(*tensors)))
    turns = itertools.cycle([partial(fn, *_copy(args)) for _ in range(max(1, min(COPIES, fit)))])
    timed = time_functions({"fn": lambda: next(turns)()}, device, budget_s=budget_s, min_samples=min_samples)
    return timed["fn"], device


def extra_info(samples: Samples, device: torch.device, cost: Cost | None) -> dict[str, Any]:
    """The JSON scalars that go beside pytest-benchmark's statistics."""
    environment = snapshot(device.index or 0)
    info: dict[str, Any] = {
        "device": environment.gpu.name if device.type == "cuda" and environment.gpu else environment.cpu,
        "device_type": device.type,
        "timer": samples.method,
        "l2_state": samples.l2_state,
        "status": "OK" if samples.resolved else "INVALID: UNRESOLVED: the timer is too coarse for it",
    }
    if cost is None:
        return info
    seconds = samples.median_s
    info |= {
        "flops": cost.flops,
        "bytes": cost.bytes,
        "flops_per_s": cost.flops / seconds,
        "bytes_per_s": cost.bytes / seconds,
    }
    if cost.bytes:
        info["intensity_flop_per_byte"] = cost.intensity
    ceilings = ceilings_for(device)
    if ceilings is None:
        return info | {"roof": "unknown: no data sheet of this device is in the table"}
    if any(dtype not in ceilings.tensor_flops_per_s for dtype in cost.tensor_flops):
        return info | {"roof": f"unknown: {ceilings.device} has no rate for {', '.join(cost.tensor_flops)}"}
    limit = bound(cost, ceilings)
    info |= {"limiter": limit.limiter, f"fraction_of_{ceilings.kind}_roof": limit.fraction(seconds)}
    for part, part_s in limit.parts.items():
        if part_s:
            info[f"fraction_of_{ceilings.kind}_{part}_roof"] = part_s / seconds
    physical = bound(cost, limits_for(device, ceilings))
    if physical.fraction(seconds) > ABOVE:
        times = physical.fraction(seconds)
        info["status"] = f"INVALID: {times:.2f} times the {physical.limiter} ceiling; {CAUSES[physical.limiter]}"
    return info
