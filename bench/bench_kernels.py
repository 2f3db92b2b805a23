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

from rooflab.bench.core import Checked, Checkers, CheckTask, FunctionOp, Measurement, Selection, default_scheme
from rooflab.bench.plugin.plugin import asked
from rooflab.kernels.registry import get_kernel, get_op
from rooflab.reference.spec import get_scheme

SUITE_NAMES = ("smoke", "smollm2_135m")
BUDGET_S = 0.1
"""Seconds of timing for one kernel on one case."""
MIN_SAMPLES = 3
"""The least number of samples, however long they take: a naive kernel may need seconds for each sample."""


def timeable() -> Iterator[Any]:
    """Yields a pytest parameter for each kernel and case that can be timed on this device.

    The scheme is the engine's default dtype on this device, or the op's first scheme if the op lacks that dtype."""
    selection = Selection.of(None, None, SUITE_NAMES, None, None, None)
    for op, op_kernels in selection.kernels.items():
        spec = get_op(op)
        scheme = default_scheme(selection.device, spec)
        for case in selection.cases_of(spec):
            for kernel in op_kernels:
                if Measurement.why_not(kernel, selection.device) is None:
                    benchmark_mark = pytest.mark.benchmark(
                        group=f"{spec.name} {case.id} {scheme}", max_time=BUDGET_S, min_rounds=MIN_SAMPLES
                    )
                    # Texts: pytest-benchmark can store texts, and group new and stored results by texts.
                    param_values = (spec.name, kernel.name, case.id, scheme)
                    yield pytest.param(*param_values, id=f"{kernel.id}-{case.id}-{scheme}", marks=benchmark_mark)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Lists the kernels only for a benchmark run.  Other test runs would import every kernel only to skip it."""
    pytest_params = list(timeable()) if asked(metafunc.config) else [pytest.param(None, None, None, None, id="all")]
    metafunc.parametrize(("op", "kernel", "case", "scheme"), pytest_params)


@functools.cache
def gate_fault(op: str, name: str, scheme: str, device: torch.device) -> str:
    """Checks a kernel once, on the op's first small case with adversarial inputs.  Returns the fault, or ""."""
    task = CheckTask(get_kernel(op, name), get_op(op).get_cases("smoke")[0], get_scheme(scheme))
    result = Checkers(device)(task)
    # UNSUPPORTED holds for the small case only
    return "" if result.status in ("OK", "UNSUPPORTED") else f"{result.status}: {result.reason}"


def test_kernel(kernel_benchmark: Callable[..., Any], op: str, kernel: str, case: str, scheme: str) -> None:
    """Checks the kernel, and times it with values that change; the outputs of the last timed calls are checked."""
    spec, kernel_scheme, selection = get_op(op), get_scheme(scheme), Selection.of(op, [kernel], (), [case], None, None)
    (target_kernel,), (checked_case,) = selection.kernels[op], selection.cases
    measured = FunctionOp(target_kernel, spec, checked_case, kernel_scheme, selection.device)
    meta_inputs = spec.make_inputs(measured.case, kernel_scheme, torch.device("meta"), 0)
    if skip_reason := target_kernel.why_not_args(meta_inputs, spec):
        pytest.skip(str(skip_reason))
    fault = gate_fault(op, kernel, scheme, measured.device)
    checked = Checked(None, fault, interpreted=False, op=measured, judged=True, again=str)
    kernel_benchmark(checked, cost=spec.cost_of(meta_inputs))
