"""What is done before a kernel is called: once at load its weight is packed, once a step it plans."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch

from rooflab.kernels.registry import Kernel

NOT_PLANNED_FOR = ("out", "config", "plan")
"""Arguments that only a kernel has, as `kernels` says too; the older side of an A/B has no such list to be imported."""


def packed(prepare: Callable[..., Any], weight: str, inputs: Mapping[str, Any]) -> Any:
    """The argument `weight` of `inputs` as `prepare` packs it from it and the others that it names."""
    beside = list(inspect.signature(prepare).parameters)[1:]
    return prepare(inputs[weight], **{name: inputs[name] for name in beside})


def planned(kernel: Kernel, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """`arguments`, and a new plan for them where the kernel plans; of tensors of floats it sees the shape alone."""
    plan = getattr(kernel, "plan", None)  # an A/B's older side has no kernel that plans
    if plan is None:
        return dict(arguments)
    seen = {name: value for name, value in arguments.items() if name in kernel.accepted.difference(NOT_PLANNED_FOR)}
    return {**arguments, "plan": plan(**{name: _shape_alone(value) for name, value in seen.items()})}


def _shape_alone(value: Any) -> Any:
    """A tensor of floats with its memory left out; any other value as it is."""
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
