"""Predictions for registered kernels on their cases: priced, compiled, added up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rooflab.bench.calls.calls import kernel_traffic
from rooflab.bench.compile.static import CompileFailure, Request, compile_kernels
from rooflab.bench.predict.model import Prediction, predict
from rooflab.kernels.configs import with_config
from rooflab.kernels.registry import Kernel, get_kernel, get_op
from rooflab.reference.spec import Case, Scheme
from rooflab.roofline.device import Device
from rooflab.roofline.model import Ceilings, Cost, Traffic

COMPILED_BACKENDS = ("triton", "gluon", "cuda")
"""Backends whose code `static.py` compiles with no GPU; the others are predicted from their traffic alone."""


@dataclass(frozen=True)
class Target:
    """One kernel on one case."""

    op: str
    kernel: str
    case: Case
    scheme: Scheme
    file: Path | None = None
    """The file that registers the kernel, where it is not in the tree."""
    config: Any = None
    """The config to hold a tunable kernel to; None leaves the choice to its launcher."""


@dataclass(frozen=True)
class Predicted:
    """A target's prediction, or why there is none."""

    target: Target
    cost: Cost
    traffic: Traffic | None
    prediction: Prediction | None
    reason: str = ""


def predict_all(
    targets: Sequence[Target],
    device: Device,
    ceilings: Ceilings | None = None,
    counted: Mapping[Target, Traffic] | None = None,
) -> list[Predicted]:
    """A prediction of every target on `device`, in their order; all that needs it is compiled at once, on all cores.

    `counted` traffic takes the place of what a kernel says of itself.  Raises `ValueError` on a name that is not
    registered, or a device that is not Hopper.
    """
    reasons = {}
    for target in targets:
        kernel = get_kernel(target.op, target.kernel)
        if target.scheme.name not in get_op(target.op).schemes:
            reasons[target] = f"UNSUPPORTED: {target.op} has no scheme {target.scheme.name}"
        else:
            reasons[target] = _refusal(kernel, target) or ""
    wanted = [target for target in targets if _compiles(target) and not reasons[target]]
    requests = [Request(t.op, t.kernel, t.case, t.scheme, t.file, t.config) for t in wanted]
    compiled = dict(zip(wanted, compile_kernels(requests), strict=True)) if wanted else {}
    found = []
    for target in targets:
        cost, traffic, flops = _price(target)
        traffic = (counted or {}).get(target, traffic)
        code = compiled.get(target, [])
        if isinstance(code, CompileFailure):
            found.append(Predicted(target, cost, traffic, None, f"COMPILE_ERROR: {code}"))
        elif reasons[target]:
            found.append(Predicted(target, cost, traffic, None, reasons[target]))
        else:
            prediction = predict(cost, traffic, code, device, ceilings, matrix_flops=flops)
            found.append(Predicted(target, cost, traffic, prediction))
    return found


def _compiles(target: Target) -> bool:
    kernel = get_kernel(target.op, target.kernel)
    return kernel.backend in COMPILED_BACKENDS and kernel.role != "peer"


def _refusal(kernel: Kernel, target: Target) -> str | None:
    """Why the kernel cannot do this on Hopper, or None."""
    if "cuda" not in kernel.devices:
        return f"UNSUPPORTED: {kernel.id} runs on {' and '.join(kernel.devices)}"
    return kernel.why_not_args(_inputs(target))


def _inputs(target: Target) -> dict[str, object]:
    return get_op(target.op).make_inputs(target.case, target.scheme, torch.device("meta"), 0)


def _price(target: Target) -> tuple[Cost, Traffic | None, float | None]:
    """Cost, traffic, and the matrix FLOPs that the kernel does, padding included, where its footprint says."""
    spec, kernel = get_op(target.op), get_kernel(target.op, target.kernel)
    if target.config is not None:
        kernel = with_config(kernel, target.config)
    inputs = _inputs(target)
    cost = spec.cost(**inputs)
    refused = kernel.why_not_args(inputs) is not None
    traffic = None if refused else kernel_traffic(kernel, inputs, "cuda")
    if refused or kernel.footprint is None or kernel.heuristic is None:
        return cost, traffic, None
    config = target.config if target.config is not None else kernel.heuristic(target.case, target.scheme)
    footprint = kernel.footprint(config, target.case, target.scheme)
    done = footprint.tensor_flops * footprint.ctas
    return cost, traffic, max(done, sum(cost.tensor_flops.values())) if done else None
