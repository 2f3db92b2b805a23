"""Whether a kernel is right: against the fp64 oracle, and against the ways in which a wrong kernel looks right.

A kernel runs on guarded copies of its inputs (`trial.py`, `poison.py`): on some data; on other data in padded layouts
(a cached answer, an assumed contiguity); on the first again, into the caller's outputs, which hold NaN and then an old
answer, twice (bit for bit); on other data at the same addresses (an answer kept for them); and on planted inputs.
Uninitialised memory is NaN, results are read as soon as the current stream is done and are overwritten afterwards, and
nothing but the outputs may change. What a wrong result has of a cheat is named (`cheats.py`); a kernel that replaces
what it is judged or timed with is INVALID (`timing/tamper.py`). Code in one process is never safe from other code in
it: this finds what kernels have been seen to do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import cast

import torch

from rooflab.bench.calls.calls import short_of_memory
from rooflab.bench.check.emulating import emulating
from rooflab.bench.check.runs import Check
from rooflab.bench.check.trial import Failed
from rooflab.bench.records.environment import Environment
from rooflab.bench.records.record import CheckedBy, DeviceType, Record, Status
from rooflab.kernels.precision import pin_matmul_precision
from rooflab.kernels.registry import Kernel, interpreting
from rooflab.reference.compare import ErrorStats
from rooflab.reference.spec import Case, OpSpec, Scheme


@dataclass(frozen=True)
class CheckResult:
    """What came of checking one kernel on one case."""

    op: str
    kernel: str
    backend: str
    case: Case
    scheme: str
    device: str
    seed: int
    status: Status
    checked_by: CheckedBy
    errors: tuple[ErrorStats, ...] = ()
    """The worst of all runs, one per output."""
    reason: str = ""
    """Why the status is not OK."""
    labels: tuple[str, ...] = ()
    """The runs, in order; the failing one is the last."""
    weak: tuple[str, ...] = ()
    """Wrong answers that this case's tolerance lets pass (`c: zeros`)."""

    @property
    def discriminating(self) -> bool:
        """Whether the case rejects zeros, the mean, and the oracle shifted by one."""
        return not self.weak

    def describe(self) -> str:
        """One line for a person."""
        text = self.reason or "; ".join(error.describe() for error in self.errors)
        if self.weak:
            text += f" (not discriminating: {', '.join(self.weak)} would pass)"
        return f"{self.op}/{self.kernel} {self.case.id} {self.scheme}: {self.status}: {text}"


def check_kernel(
    kernel: Kernel,
    spec: OpSpec,
    case: Case,
    scheme: Scheme,
    device: torch.device | str = "cpu",
    seed: int = 0,
    planted: bool = True,
) -> CheckResult:
    """Checks one kernel, which need not be registered, on one case, up to the first fault.

    A CUDA context that an earlier kernel has broken is a RUNTIME_ERROR that begins with `BROKEN`.  Raises
    what the spec raises on a case that it does not know.
    """
    device = torch.device(device)
    pin_matmul_precision()
    priced = spec.make_inputs(case, scheme, torch.device("meta"), seed)
    check = Check(kernel, spec, case, scheme, device)
    status: Status = "OK"
    reason = ""
    try:
        broken = already_broken(device)
        if broken:
            raise Failed("RUNTIME_ERROR", f"{BROKEN}: {broken}")
        short = short_of_memory(spec, priced, device)
        if short and kernel.why_not_here(device) is None:
            raise Failed("OUT_OF_MEMORY", short)
        check.run(seed, planted)
    except Failed as failed:
        status = failed.status
        reason = f"{check.labels[-1]}: {failed.reason}" if check.labels else failed.reason
    except (torch.cuda.OutOfMemoryError, MemoryError) as error:
        status, reason = "OUT_OF_MEMORY", f"of the inputs or the reference: {error}"
    except RuntimeError:
        faulted = already_broken(device)  # by this kernel, and seen only when inputs or an oracle were made
        if not faulted:
            raise
        status, reason = "RUNTIME_ERROR", f"{check.labels[-1]}: {faulted}" if check.labels else faulted
    return CheckResult(
        op=spec.name,
        kernel=kernel.name,
        backend=kernel.backend,
        case=case,
        scheme=scheme.name,
        device=str(device),
        seed=seed,
        status=status,
        checked_by=_checked_by(kernel, device, status),
        errors=tuple(check.worst.values()),
        reason=reason,
        labels=tuple(check.labels),
        weak=tuple(check.weak),
    )


def check_record(
    result: CheckResult,
    kernel: Kernel,
    run_id: str,
    environment: Environment,
    moved: Mapping[str, int] | None = None,
) -> Record:
    """The record of a check; `moved` are bytes that the emulator counted, by their names."""
    traffic = None if moved is None else float(moved["hbm_read"] + moved["hbm_write"])
    return Record(
        kind="check",
        run_id=run_id,
        status=result.status,
        **environment.record_fields(),
        reason=result.reason,
        op=result.op,
        kernel=result.kernel,
        role=kernel.role,
        backend=kernel.backend,
        case_id=result.case.id,
        case=dict(result.case),
        scheme=result.scheme,
        seed=result.seed,
        device=cast(DeviceType, torch.device(result.device).type),
        checked_by=result.checked_by,
        errors=tuple(asdict(error) for error in result.errors),
        weak=result.weak,
        traffic_bytes=traffic,
        traffic_basis=None if traffic is None else "counted",
        metrics={f"{name}_bytes": float(value) for name, value in (moved or {}).items()},
    )


def _checked_by(kernel: Kernel, device: torch.device, status: Status) -> CheckedBy:
    if status not in ("OK", "INCORRECT"):
        return "none"
    if emulating() and kernel.backend in ("triton", "gluon", "cuda"):
        return "emulator"
    if kernel.backend in ("triton", "gluon") and interpreting():
        return "interpreter"
    return "gpu" if device.type == "cuda" else "torch"


BROKEN = "the CUDA context was already broken"
"""Begins the reason of a kernel that could not run because an earlier one had faulted: it is no fault of its own."""


def already_broken(device: torch.device) -> str:
    """Why nothing can run on `device` any more in this process, as after an illegal access; empty where it can.

    Waits for the device.
    """
    if device.type != "cuda":
        return ""
    try:
        torch.cuda.synchronize(device)
    except RuntimeError as error:
        return str(error).strip().partition("\n")[0]
    return ""
