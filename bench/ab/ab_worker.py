"""Checks or times the kernels of one job, in a fresh process of an A/B comparison.  Can slow calls on purpose.

The process sends an answer after each kernel.  So the parent knows at which kernel the process died or hangs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from rooflab.bench.ab.sides import Target
from rooflab.bench.base.system_time import time
from rooflab.bench.core import Environment, Failed, Measurement, Record, Rotation, Settings, Status
from rooflab.bench.revisions.repository import kernels_in
from rooflab.kernels import registry
from rooflab.kernels.precision import pin_matmul_precision
from rooflab.reference.spec import Case, OpSpec, Scheme, get_scheme

SideJob = Mapping[str, Any]
"""The job that `pairs.JobRunner` gives to a process: the fields of a `Side`, and settings to check, measure or list."""


def answer(job: SideJob) -> Iterator[dict[str, Any]]:
    """Yields the answers to a job: first the environment, then two answers per kernel, its start and its record."""
    device = torch.device(job["device"])
    pin_matmul_precision()
    yield {"environment": Environment.now(device.index or 0).to_dict()}
    for file in job["files"] if not job["within"] else ():
        registry.load_file(Path(file))
    file_by_kernel = kernels_in(Path(job["within"]), tuple(map(Path, job["files"]))) if job["within"] else None
    if job["mode"] == "list":
        yield {"list": listing(job, device, file_by_kernel)}
    for key, target_fields in job["targets"].items():
        target = Target(**target_fields)
        blank_record = target.record(job["device"], job["seed"])
        yield {"start": key}
        if job["functions"]:
            target_record = _function(blank_record, job)
        elif job["mode"] == "check":
            target_record = check(target, blank_record, job, device)
        else:
            target_record = _timed(*_resolve(target), blank_record, job, device)
        yield {"key": key, "record": target_record.to_json()}


def listing(job: SideJob, device: torch.device, file_of: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Lists the cases and kernels of each op in this source tree.  A kernel that cannot run here comes with the reason.

    `file_of` is only for kernels of another repository.  It maps each kernel to its file, and selects these kernels."""
    from rooflab.bench.ab.sides import largest

    op_entries, op_specs = {}, registry.ops()
    for op in job["ops"] or op_specs:
        if op not in op_specs:
            continue  # the other side may have this op; its comparison is then MISSING here
        spec = op_specs[op]
        chosen_kernels = {name: it for name, it in registry.kernels(op).items() if file_of is None or it.id in file_of}
        if file_of is not None and not chosen_kernels:
            continue
        refusals = {name: Measurement.why_not(kernel, device) for name, kernel in chosen_kernels.items()}
        kernels = {name: f"{cause.status}: {cause.reason}" if cause else None for name, cause in refusals.items()}
        cases = spec.cases_in(job["suite"])
        op_entries[op] = {
            "kernels": kernels,
            "cases": [case.id for case in cases],
            "largest": [case.id for case in largest(spec, cases)],
            "taken": [case.id for case_text in job["cases"] if (case := _case_of(spec, case_text)) is not None],
            "schemes": list(spec.schemes),
            "files": sorted({file_of[kernel.id] for kernel in chosen_kernels.values()}) if file_of else [],
        }
    return op_entries


def _case_of(spec: OpSpec, text: str) -> Case | None:
    """Parses `text` as an input case.  Returns None if the op does not accept the case."""
    try:
        return spec.check_case(Case.parse(text))
    except ValueError:
        return None


def check(target: Target, blank: Record, job: SideJob, device: torch.device) -> Record:
    """Checks a kernel twice: on the op's first small case with adversarial inputs, and on `target`'s with usual inputs.

    If the kernel does not support the small case, checks it only on `target`'s case, with adversarial inputs."""
    kernel, spec, case, scheme = _resolve(target)
    if (refusal := Measurement.why_not(kernel, device)) is not None:
        return _emulated(kernel, spec, scheme, blank, job["seed"]) or _ended(blank, refusal.status, refusal.reason)
    measurement = Measurement(spec, scheme, Settings(device=str(device), seed=job["seed"], roof=False))
    check_result = measurement.check_here(kernel, spec.get_cases("smoke")[0], planted=True)
    if check_result.status in ("OK", "UNSUPPORTED"):  # a kernel may take this case and not the small one
        check_result = measurement.check_here(kernel, case, planted=check_result.status == "UNSUPPORTED")
    return _ended(blank, check_result.status, check_result.reason)


def _ended(blank: Record, status: Status, reason: str) -> Record:
    return replace(blank, status=status, reason=reason)


def _emulated(kernel: registry.Kernel, spec: OpSpec, scheme: Scheme, blank: Record, seed: int) -> Record | None:
    """Without a GPU, checks a compiled kernel in the emulator.  Returns a record if the kernel is wrong, else None."""
    from rooflab.bench.core import Checkers, CheckTask
    from rooflab.bench.emulate import emulators

    if not kernel.has_code or torch.cuda.is_available():
        return None
    cpu_checkers = Checkers(torch.device("cpu"), emulators())
    result = cpu_checkers(CheckTask(kernel, spec.get_cases("smoke")[0], scheme, seed))
    return _ended(blank, result.status, result.reason) if result.status in ("INCORRECT", "INVALID") else None


def _function(blank: Record, job: SideJob) -> Record:
    """Checks or times a function that the user passed to `compare`.  Returns the record."""
    from rooflab.bench.ab.compare import prepare_functions

    sys.path[:0] = [path_entry for path_entry in job["functions"]["path"] if path_entry not in sys.path]
    try:
        prepared_op = prepare_functions(job["functions"], job["seed"])
        if job["mode"] == "check":
            settings = Settings(device=str(prepared_op.device), seed=job["seed"], roof=False)
            measurement = Measurement(prepared_op.spec, prepared_op.scheme, settings)
            check_result = measurement.check_here(prepared_op.kernel, prepared_op.case, planted=True)
            return _ended(blank, check_result.status, check_result.reason)
    except Failed.errors() as error:
        run_failure = Failed.of(error, "the functions")
        return _ended(blank, run_failure.status, run_failure.reason)
    return _timed(*prepared_op[:4], blank, job, prepared_op.device)


_RESULT_FIELDS = (
    "status",
    "role",
    "backend",
    "sample_count",
    "timer",
    "l2_state",
    "activity_hash",
    "device_kernels",
    "least_bytes",
    "flops",
)


def _timed(
    kernel: registry.Kernel, spec: OpSpec, case: Case, scheme: Scheme, blank: Record, job: SideJob, device: torch.device
) -> Record:
    """Times one kernel, and then checks the outputs of the timed calls.  Returns the record with the time samples."""
    slowdown = job["slow_down"]
    timing_settings = Settings(
        device=job["device"],
        seed=job["seed"],
        budget_s=job["kernel_s"],
        checked=True,
        judge=job["judge"],
        paired=True,
        roof=device.type == "cuda",  # a CPU has no limits that are known without a measurement
    )
    measurement = Measurement(spec, scheme, timing_settings)
    if slowdown:
        measurement.wrap = lambda rotation: Slowed(rotation, slowdown, device)
    (result,) = measurement.records([kernel], [case])
    timed_record = replace(
        blank,
        **{name: getattr(result, name) for name in _RESULT_FIELDS},
        reason=result.reason if result.status != "OK" else "",
    )
    if result.status != "OK":
        return timed_record
    return replace(timed_record, basis="measured", latency_median_ms=result.latency_median_ms, samples=result.samples)


def _resolve(target: Target) -> tuple[registry.Kernel, OpSpec, Case, Scheme]:
    kernel, spec = registry.get_kernel(target.op, target.kernel), registry.get_op(target.op)
    return kernel, spec, spec.check_case(Case.parse(target.case_id)), get_scheme(target.scheme)


NUM_PROBES = 7
PROBE_CYCLES = 10_000_000


class Slowed(Rotation):
    """Calls a kernel on copies of its inputs, and waits after each call for `share` times the duration of the call. On
    a CPU a loop waits; on CUDA the device waits."""

    def __init__(self, rotation: Rotation, share: float, device: torch.device):
        self.__dict__ |= vars(rotation)
        self._share = share
        self._cycles = share * _cycles(rotation) if device.type == "cuda" else None

    @property
    def first(self) -> Callable[[], Any]:
        """Returns a function that calls the kernel on the first set of inputs, and then waits to slow the call."""
        return partial(self._later, super().first)

    def __call__(self) -> Any:
        """Calls the kernel on the next set of inputs, waits, and returns the result."""
        return self._later(super().__call__)

    def _later(self, call: Callable[[], Any]) -> Any:
        if self._cycles is not None:
            result = call()
            _cuda._sleep(int(self._cycles))
            return result
        # The wait follows this very call: a call that finds its data in a cache waits less than one that does not.
        start_s = time.perf_counter()
        result = call()
        end_s = time.perf_counter()
        deadline_s = end_s + self._share * (end_s - start_s)
        while time.perf_counter() < deadline_s:
            pass
        return result


_cuda: Any = torch.cuda
"""`torch.cuda` without types, because torch does not annotate events and `_sleep`."""


def _cycles(function: Callable[[], object]) -> float:
    """Returns the duration of one call of `function`, in device clock cycles as `torch.cuda._sleep` counts them."""
    call_times_ms = sorted(_elapsed_ms(function) for _ in range(NUM_PROBES))
    return call_times_ms[NUM_PROBES // 2] * PROBE_CYCLES / _elapsed_ms(lambda: _cuda._sleep(PROBE_CYCLES))


def _elapsed_ms(function: Callable[[], object]) -> float:
    start_event, end_event = _cuda.Event(enable_timing=True), _cuda.Event(enable_timing=True)
    _cuda._sleep(1_000_000)  # this wait hides the launch
    start_event.record()
    function()
    end_event.record()
    end_event.synchronize()
    return float(start_event.elapsed_time(end_event))
