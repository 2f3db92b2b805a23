"""Times every kernel that can run here with pytest-benchmark, on small cases and on the cases of SmolLM2.

Run `pytest bench --benchmark`, or `pytest bench --benchmark -k gemm` for one op.  A kernel is timed only if it passes
the check on the op's first small case.  The outputs of the timed calls are checked too.  In the table, the kernels of
one case form a group.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from rooflab.bench.core import Checkers, CheckTask, Rotation, Unseen, default_scheme, pick_device
from rooflab.bench.plugin.plugin import SKIP_REASON, asked
from rooflab.kernels.registry import get_kernel, get_op, interpreting, kernels, ops
from rooflab.reference.spec import Case, OpSpec, get_scheme

SUITE_NAMES = ("smoke", "smollm2_135m")
BUDGET_S = 0.1
"""Seconds of timing for one kernel on one case."""
MIN_SAMPLES = 3
"""The least number of samples, however long they take: a naive kernel may need seconds for each sample."""
SEED = 0


def scheme_here(spec: OpSpec) -> str:
    """Returns the engine's default dtype on this device, or the op's first scheme if the op lacks that dtype."""
    engine_scheme = default_scheme(pick_device(None))
    return engine_scheme if engine_scheme in spec.schemes else spec.schemes[0]


def timeable() -> Iterator[Any]:
    """Yields a pytest parameter for each kernel and case that can be timed on this device."""
    for spec in ops().values():
        cases = dict.fromkeys(case for suite_name in SUITE_NAMES for case in spec.cases.get(suite_name, ()))
        for case in cases:
            for kernel in kernels(spec.name).values():
                is_interpreted = kernel.backend == "triton" and interpreting()
                if kernel.why_not_here(pick_device(None)) is None and not is_interpreted:
                    scheme = scheme_here(spec)
                    benchmark_mark = pytest.mark.benchmark(
                        group=f"{spec.name} {case.id} {scheme}", max_time=BUDGET_S, min_rounds=MIN_SAMPLES
                    )
                    # Texts: pytest-benchmark can store texts, and group new and stored results by texts.
                    param_values = (spec.name, kernel.name, case.id, scheme)
                    yield pytest.param(*param_values, id=f"{kernel.id}-{case.id}-{scheme}", marks=benchmark_mark)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Lists the kernels only for a benchmark run.  Other test runs would import every kernel only to skip it."""
    if asked(metafunc.config):
        pytest_params = list(timeable())
    else:
        pytest_params = [pytest.param(None, None, None, None, id="all", marks=pytest.mark.skip(reason=SKIP_REASON))]
    metafunc.parametrize(("op", "kernel", "case", "scheme"), pytest_params)


@functools.cache
def gate(op: str, name: str) -> tuple[str, str]:
    """Checks a kernel once, on the op's first small case with adversarial inputs.  Returns status and reason."""
    spec, kernel = get_op(op), get_kernel(op, name)
    case, scheme = spec.get_cases("smoke")[0], get_scheme(scheme_here(spec))
    check_result = Checkers(pick_device(None))(CheckTask(kernel, case, scheme, SEED))
    return check_result.status, check_result.reason


def test_kernel(kernel_benchmark: Callable[..., Any], op: str, kernel: str, case: str, scheme: str) -> None:
    """Checks the kernel, times it, and then checks the outputs of the timed calls."""
    spec, target_kernel, kernel_scheme = get_op(op), get_kernel(op, kernel), get_scheme(scheme)
    input_args = spec, spec.check_case(Case.parse(case)), kernel_scheme, pick_device(None)
    if skip_reason := target_kernel.why_not_args(spec.make_inputs(*input_args[1:3], torch.device("meta"), SEED), spec):
        pytest.skip(str(skip_reason))
    gate_status, reason = gate(op, kernel)
    assert gate_status in ("OK", "UNSUPPORTED"), f"{gate_status}: {reason}"  # UNSUPPORTED holds for the small case only
    input_copies = Rotation.copies(*input_args, SEED)
    input_rotation, first_check = Rotation(target_kernel, spec, input_copies), Unseen(*input_args, input_copies, SEED)

    def afterwards() -> str | None:
        if check_fault := first_check.wrong({"": input_rotation}).get(""):
            return check_fault
        second_check = Unseen(*input_args, input_copies, SEED)
        for _ in input_copies:
            input_rotation()
        return second_check.wrong({"": input_rotation}).get("")

    kernel_benchmark(input_rotation, cost=spec.cost_of(input_copies[0]), afterwards=afterwards)
