"""Helpers for tests of ops: an op's kernels that run here, their refusals with the messages, and the judge."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import pytest
import torch

from rooflab.bench.core.check_data import CheckResult, CheckTask
from rooflab.bench.core.outside import Checkers
from rooflab.bench.emulate import emulators
from rooflab.bench.emulate.ours import emulating_cuda
from rooflab.bench.emulator.launch import emulate
from rooflab.bench.emulator.results import LaunchResult
from rooflab.kernels import registry
from rooflab.kernels.registry import Kernel, kernels
from rooflab.reference.spec import Inputs, OpSpec, Scheme

CPU, META = torch.device("cpu"), torch.device("meta")


@pytest.fixture
def own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ops and kernels that a test registers are gone after it."""
    registry.every_kernel()
    monkeypatch.setattr(registry, "_ops", dict(registry._ops))
    monkeypatch.setattr(registry, "_kernels", dict(registry._kernels))


def here(op: str, backend: str | None = None) -> list[Kernel]:
    """The op's kernels that run on this machine, of one backend or of all."""
    found = [kernel for kernel in kernels(op).values() if kernel.why_not_here(CPU) is None]
    return [kernel for kernel in found if backend in (None, kernel.backend)]


def check_emulated(asked: Sequence[CheckTask]) -> list[CheckResult]:
    """Makes the checks on all cores, the kernels' compiled code in the emulator; gives their results in order."""
    return [*emulators().threads.map(Checkers(CPU, emulators()), asked)]


def emulated(kernel: Kernel, *args: Any, order: int = 0, **named: Any) -> tuple[Any, list[LaunchResult]]:
    """A call of CUDA C++ in the emulator, in this process: its result, and its launches, which must race nowhere in an
    order of the warps."""
    launches: list[LaunchResult] = []
    with emulating_cuda(lambda *launch: launches.append(emulate(*launch, seed=order))):
        found = kernel.fn(*args, **named)
    assert [launch.races for launch in launches] == [()] * len(launches)
    return found, launches


def each(every: Iterable[Kernel]) -> pytest.MarkDecorator:
    """A test for each of the kernels, by name."""
    return pytest.mark.parametrize("kernel", list(every), ids=lambda kernel: kernel.name)


def refuses(
    call: Callable[..., Any], good: Callable[[], Mapping[str, Any]], changes: Sequence[tuple[dict[str, Any], str]]
) -> None:
    """Each change to the good arguments, which are made anew for it, is refused in these words, in one line; but for
    changes of arguments that the function lacks."""
    taken = inspect.signature(call.fn if isinstance(call, Kernel) else call).parameters.keys()
    chosen = [(change, message) for change, message in changes if change.keys() <= taken]
    assert chosen
    for change, message in chosen:
        with pytest.raises(ValueError, match=message) as error:
            call(**{**good(), **change})
        assert "\n" not in str(error.value)


def is_right(spec: OpSpec, found: Any, inputs: Inputs, scheme: Scheme) -> bool:
    """Whether what a kernel returned is within the tolerance of the oracle."""
    errors = spec.judge(found if isinstance(found, tuple) else (found,), spec.oracle(inputs), inputs, scheme)
    return all(error.passed for error in errors)


def assert_right(spec: OpSpec, found: Any, inputs: Inputs, scheme: Scheme) -> None:
    """What a kernel returned is within the tolerance of the oracle."""
    errors = spec.judge(found if isinstance(found, tuple) else (found,), spec.oracle(inputs), inputs, scheme)
    assert all(error.passed for error in errors), [error.describe() for error in errors]


def slow(*values: Any) -> Any:
    """A case of `make test-full` alone."""
    return pytest.param(*values, marks=pytest.mark.slow)


def python_without_interpreter(*arguments: str) -> str:
    """What a Python process prints in which Triton compiles.  It must end well."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout
