"""Checks a kernel against the fp64 reference (oracle), and looks for known ways in which a wrong kernel seems right.

The kernel runs on guarded copies of its inputs (`trial.py`, `poison.py`), by default in this process.  `rooflab check`
runs the kernel in a child process, which never gets the oracle or the verdict (`outside.py`).  The kernel runs

1. on the first data;
2. on other data, in padded layouts and with a grid for two SMs;
3. on the first data again, also in another thread; all results must be equal bit for bit;
4. on other data at the same addresses, with a grid for one SM;
5. on the same data in other layouts, with rows of stride 0, with outputs in the memory of inputs, with other options;
6. on adversarial inputs, which the code calls planted.

Uninitialised memory is NaN, and only the outputs may change.  Results are read as soon as the current stream is done.
If a wrong result looks like a known fault, the reason names the fault (`why.py`).  A kernel is INVALID if it replaces a
function of the timer or of the check (`timers/__init__.py`).

The check finds mistakes, and known tricks of written or generated kernels.  It does not defend against a kernel that
attacks its process (os._exit, atexit, replaced builtins, memory written through addresses).  Two tricks make only the
time wrong: a kernel may compute its result only when the result is read, or cache results for values that repeat within
a sample.  The check does not look for data left in L2 or kept for later processes.
"""

from __future__ import annotations

from typing import Any

import torch

from rooflab.bench.core.call import short_of_memory
from rooflab.bench.core.check_data import CheckResult, Planted
from rooflab.bench.core.check_runs import Check
from rooflab.bench.core.failed import Failed
from rooflab.bench.core.record import Status
from rooflab.bench.core.trial import Runner
from rooflab.kernels.registry import Kernel
from rooflab.reference.spec import Case, OpSpec, Scheme


def check_kernel(
    kernel: Kernel,
    spec: OpSpec,
    case: Case,
    scheme: Scheme,
    device: torch.device | str = "cpu",
    seed: int = 0,
    planted: Planted = True,
    runner: Runner | None = None,
) -> CheckResult:
    """Checks one kernel on one input case, and stops at the first fault.  The kernel need not be registered.

    `runner` runs the kernel, by default in this process.  With a broken CUDA context, the status is RUNTIME_ERROR, and
    the reason begins with `BROKEN_CONTEXT`.  Raises the op's error if the op refuses the case."""
    device = torch.device(device)
    meta_inputs = spec.make_inputs(case, scheme, torch.device("meta"), seed)
    runner = runner or Runner(kernel, spec, scheme, device)
    check = Check(kernel, spec, case, scheme, device, runner)
    status: Status = "OK"
    reason = ""
    try:
        context_error = already_broken(device)
        if context_error:
            raise Failed("RUNTIME_ERROR", f"{BROKEN_CONTEXT}: {context_error}")
        memory_shortage = short_of_memory(spec, meta_inputs, device)
        if memory_shortage and kernel.why_not_here(device) is None:
            raise Failed("OUT_OF_MEMORY", memory_shortage)
        check.run(seed, planted)
    except Failed as failed:
        status = failed.status
        reason = f"{check.labels[-1]}: {failed.reason}" if check.labels else failed.reason
    except (torch.cuda.OutOfMemoryError, MemoryError) as error:
        status, reason = "OUT_OF_MEMORY", f"for the inputs or the reference: {error}"
    except RuntimeError:
        context_fault = already_broken(device)  # this kernel broke it; making inputs or an oracle showed it
        if not context_fault:
            raise
        status, reason = "RUNTIME_ERROR", f"{check.labels[-1]}: {context_fault}" if check.labels else context_fault
    runner_fields: dict[str, Any] = {"checked_by": "none"}
    try:
        runner_fields = runner.seen() if status in ("OK", "INCORRECT") else runner_fields
    except Failed as failed:  # its process ended after the last run
        status, reason = failed.status, failed.reason
    if status == "OK" and runner_fields.get("races"):
        status, reason = "INCORRECT", runner_fields["races"][0]
    return CheckResult(
        op=spec.name,
        kernel=kernel.name,
        backend=kernel.backend,
        case=case,
        scheme=scheme.name,
        device=str(device),
        seed=seed,
        status=status,
        errors=tuple(check.worst.values()),
        reason=reason,
        labels=tuple(check.labels),
        beyond=check.beyond,
        weak=tuple(check.weak),
        **runner_fields,
    )


BROKEN_CONTEXT = "the CUDA context was already broken"
"""The reason begins with this text if a kernel could not run because an earlier kernel had broken the context."""


def already_broken(device: torch.device) -> str:
    """Waits for `device`, and returns the CUDA error that has broken its context; empty if there is no error."""
    if device.type != "cuda":
        return ""
    try:
        torch.cuda.synchronize(device)
    except RuntimeError as error:
        return str(error).strip().partition("\n")[0]
    return ""
