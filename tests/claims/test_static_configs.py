"""Legal configs of every tunable kernel compile for Hopper and fit an SM: all, or a sample where they are many.

A config that spills registers is legal too: it may still be the fastest, and tuning measures it.
"""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest

from rooflab.bench.compile.cases import KernelCase, Query
from rooflab.bench.compile.static import CompileFailure, compile_kernels
from rooflab.bench.compile.store import Store
from rooflab.kernels.registry import Kernel, kernels, ops
from rooflab.reference.spec import SCHEMES
from rooflab.roofline.occupancy import HOPPER

LIKE_OTHERS = ("fp16", "tf32", "w4a16_g32", "w4a16_g64")
"""Dtypes left out for the time: fp16 and TF32 take what bf16 takes by other names, the others other groups."""
ORDER_ONLY = ("group_m",)
"""Fields that only say in which order tiles are visited: of configs that differ in nothing else, one is compiled."""
SAMPLE = 24
"""Of a kernel in one dtype: thousands of configs are legal, and the largest take seconds each."""


def label(config: Any) -> str:
    """`block_m=64,num_warps=4`."""
    return ",".join(f"{key}={value}" for key, value in dataclasses.asdict(config).items() if key not in ORDER_ONLY)


def sampled(kernel: Kernel, scheme: str) -> list[KernelCase]:
    """Of a kernel's legal configs at the most work of llama3_8b; none in a dtype that it does not take."""
    chosen = Query(kernel.op, (kernel.name,), ("llama3_8b",), (), (scheme,)).select()
    if not chosen:
        return []
    (item,) = chosen
    legal = sorted(kernel.tunable.legal_configs(item.case, SCHEMES[scheme]), key=dataclasses.astuple)
    configs = list({label(config): config for config in legal}.values())
    if len(configs) > SAMPLE:
        configs = random.Random(0).sample(configs, SAMPLE)
    return [item._replace(config=config) for config in configs]


TRIED = [
    pytest.param(kernel, scheme, id=f"{kernel.id} {scheme}")
    for op, spec in ops().items()
    for kernel in kernels(op).values()
    for scheme in spec.schemes
    if kernel.tuning is not None and scheme not in LIKE_OTHERS
]


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("kernel", "scheme"), TRIED)
def test_legal_configs_compile_and_fit_an_sm(kernel, scheme):
    requests = sampled(kernel, scheme)
    for request, result in zip(requests, compile_kernels(requests, Store()), strict=True):
        assert not isinstance(result, CompileFailure), f"{request.config}: {result}"
        assert max(info.shared_bytes for info in result) <= HOPPER.shared_bytes_per_cta, request.config
