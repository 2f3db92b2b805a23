"""Small ops, whose first smoke case shows the checker's verdict on a kernel within milliseconds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from rooflab.kernels.registry import Kernel
from rooflab.reference import flash_attention, kv_cache_write
from rooflab.reference.compare import ErrorStats
from rooflab.reference.spec import FP32_ROUNDOFF, Arguments, Case, Inputs, OpSpec, Outputs, Scheme, randn
from rooflab.roofline.model import Cost

Tensor = torch.Tensor


def no_cost(args: Arguments) -> Cost:
    return Cost(0, 0)


# project: one product, whose weight can be packed.


def project_inputs(case: Case, scheme: Scheme, device: torch.device, seed: int) -> Inputs:
    T, K, N = int(case["T"]), int(case["K"]), int(case["N"])
    return {
        "x": randn(T, K, dtype=scheme.activation, device=device, seed=seed),
        "weight": randn(K, N, dtype=scheme.weight, device=device, seed=seed + 1),
    }


def project_tolerance(inputs: Inputs, oracle: Outputs, scheme: Scheme) -> Outputs:
    x, weight = inputs["x"].double().abs(), inputs["weight"].double().abs()
    return (4 * FP32_ROUNDOFF * x.shape[1] ** 0.5 * (x @ weight) + scheme.unit_roundoff * oracle[0].abs(),)


def project_planted(case: Case, scheme: Scheme, device: torch.device, seed: int) -> Iterator[tuple[str, Inputs]]:
    inputs = project_inputs(case, scheme, device, seed)
    inputs["x"][:, -1] *= 64
    yield "last k", inputs


PROJECT = OpSpec(
    name="project",
    reference=lambda x, weight: x.double() @ weight.double(),
    make_inputs=project_inputs,
    cost=no_cost,
    outputs=("y",),
    cases={"smoke": (Case(T=5, K=96, N=7),)},
    tolerance=project_tolerance,
    planted=project_planted,
    prepared="weight",
)
PAIR = replace(
    PROJECT,
    outputs=("y", "one"),
    reference=lambda x, weight: (x.double() @ weight.double(), torch.ones(1).double()),
    tolerance=lambda inputs, oracle, scheme: (*project_tolerance(inputs, oracle, scheme), torch.zeros(1)),
)
LOOSE = replace(PROJECT, tolerance=lambda inputs, oracle, scheme: (torch.full_like(oracle[0], torch.inf),))
LENIENT = replace(
    PROJECT, tolerance=None, compare=lambda actual, oracle, inputs, scheme: [ErrorStats("y", True, 0.0, 0.0, 0, 35)]
)
SCALE = OpSpec(
    name="scale",
    reference=lambda x, factor=1.0: x.double() * factor,
    make_inputs=lambda case, scheme, device, seed: {
        "x": randn(int(case["T"]), 8, dtype=scheme.activation, device=device, seed=seed),
        "factor": case["factor"],
    },
    cost=no_cost,
    outputs=("y",),
    cases={"smoke": (Case(T=3, factor=1.0),), "edge": (Case(T=3, factor=0.0),)},
    tolerance=lambda inputs, oracle, scheme: (scheme.unit_roundoff * oracle[0].abs(),),
    in_place={"y": "x"},
)
MANY_KEYS = replace(
    flash_attention.SPEC,
    cases={"smoke": (Case(B=1, T=1, S=16384, H=1, H_kv=1, D=64, causal=False),)},
    planted=lambda *place: (found for found in flash_attention.planted(*place) if found[0] == "key 16383"),
)
STORE = kv_cache_write.SPEC


def kernel_of(spec: OpSpec, fn: Callable[..., Any], **options: Any) -> Kernel:
    """`fn` as an unregistered kernel of `spec`."""
    return Kernel(spec.name, fn.__name__, "optimized", options.pop("backend", "torch"), fn, **options)
