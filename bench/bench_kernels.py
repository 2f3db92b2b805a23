"""The pytest-benchmark suite: every kernel of every op that can be timed here, on small cases and on SmolLM2's.

`pytest bench --benchmark`, `pytest bench --benchmark -k gemm`.  Each reading stands on the spec's own verdict on the
same inputs.  Kernels of one case form one group of the table.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from rooflab.bench.calls import Rotation
from rooflab.bench.pytest_plugin import SKIPPED
from rooflab.kernels.registry import Kernel, interpreting, kernels, ops
from rooflab.reference.spec import Case, Inputs, OpSpec, Outputs, as_tuple, get_scheme

SUITES = ("smoke", "smollm2_135m")
BUDGET_S = 0.1
"""Seconds of timing for one kernel on one case."""
MIN_SAMPLES = 3
"""Taken however long they last: a naive kernel may need seconds for each."""
SEED = 0


def device_here() -> torch.device:
    """The GPU where there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def scheme_here(spec: OpSpec) -> str:
    """The engine's default dtype on this device, where the op has it."""
    wanted = "bf16" if device_here().type == "cuda" else "fp32"
    return wanted if wanted in spec.schemes else spec.schemes[0]


def timeable() -> Iterator[Any]:
    """A pytest parameter for each kernel and case that can be timed on this device."""
    for spec in ops().values():
        cases = dict.fromkeys(case for suite in SUITES for case in spec.cases.get(suite, ()))
        for case in cases:
            for kernel in kernels(spec.name).values():
                interpreted = kernel.backend == "triton" and interpreting()
                if kernel.why_not_here(device_here()) is None and not interpreted:
                    group = pytest.mark.benchmark(
                        group=f"{spec.name} {case.id}", max_time=BUDGET_S, min_rounds=MIN_SAMPLES
                    )
                    yield pytest.param(spec, kernel, case, id=f"{kernel.id}-{case.id}", marks=group)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Lists the kernels with `--benchmark` alone: plain test runs must not import every kernel to skip it."""
    if metafunc.config.getoption("rooflab_benchmark"):
        found = list(timeable())
    else:
        found = [pytest.param(None, None, None, id="all", marks=pytest.mark.skip(reason=SKIPPED))]
    metafunc.parametrize(("spec", "kernel", "case"), found)


@functools.lru_cache(maxsize=1)
def inputs_and_oracle(op: str, case: Case) -> tuple[Inputs, Outputs]:
    """The inputs of a case and what must come of them; the kernels of a case follow one another and share both."""
    spec = ops()[op]
    inputs = spec.make_inputs(case, get_scheme(scheme_here(spec)), device_here(), SEED)
    return inputs, spec.oracle(inputs)


def own(inputs: Inputs, spec: OpSpec) -> Inputs:
    """The inputs with copies of those that the op changes."""
    return {name: value.clone() if name in spec.mutates else value for name, value in inputs.items()}


def outputs_of(kernel: Kernel, spec: OpSpec, inputs: Inputs) -> Outputs:
    """What the kernel gives for `inputs`, a weight packed where it packs one."""
    result = Rotation(kernel, spec, [inputs])()
    return tuple(inputs[name] for name in spec.outputs) if spec.mutates else as_tuple(result)


def test_kernel(kernel_benchmark: Callable[..., Any], spec: OpSpec, kernel: Kernel, case: Case) -> None:
    """Judged against the oracle, then timed."""
    inputs, oracle = inputs_and_oracle(spec.name, case)
    refusal = kernel.why_not_args(inputs)
    if refusal:
        pytest.skip(refusal)
    scheme = get_scheme(scheme_here(spec))
    judged = spec.judge(outputs_of(kernel, spec, own(inputs, spec)), oracle, inputs, scheme)
    assert all(stats.passed for stats in judged), "; ".join(stats.describe() for stats in judged)
    kernel_benchmark(Rotation(kernel, spec, [own(inputs, spec), own(inputs, spec)]), cost=spec.cost(**inputs))
