"""Measures an op's kernels: checked, then timed against each other, then placed under the roofline, as records."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, Protocol, cast

import torch

from rooflab.bench.calls import (
    Rotation,
    free_bytes,
    input_bytes,
    kernel_file_sha256,
    kernel_traffic,
    short_of_memory,
)
from rooflab.bench.ceilings import ceilings_for, limits_for, raise_cpu_ceilings, raise_cuda_ceilings
from rooflab.bench.environment import Environment, last_level_cache_bytes, snapshot
from rooflab.bench.flush import FlushBy
from rooflab.bench.plausible import above_limits
from rooflab.bench.reading import reading_fields, why_invalid
from rooflab.bench.records import CheckedBy, DeviceType, Record, Status, new_run_id
from rooflab.bench.stopwatch import check_timer
from rooflab.bench.timed import observe, time_together, wrong_calls
from rooflab.bench.timing import Samples
from rooflab.kernels.configs import config_for
from rooflab.kernels.precision import pin_matmul_precision
from rooflab.kernels.registry import Kernel
from rooflab.reference.compare import ErrorStats
from rooflab.reference.spec import Case, Inputs, OpSpec, Scheme
from rooflab.roofline.model import Bound, Ceilings, Cost, Traffic, bound

COPIES = 3
"""Sets of inputs that a kernel cycles through, so that no call finds the last one's memory."""
RAISE_CUDA_S = 20.0
"""Seconds for measuring a GPU's ceilings again, which a run does at most once."""
INTERPRETED = "on a CPU it runs in Triton's interpreter, whose time is not the kernel's; `rooflab check` runs it there"


class CheckOutcome(Protocol):
    """What a check says of one kernel on one case."""

    @property
    def status(self) -> Status:
        """OK, or why not."""

    @property
    def checked_by(self) -> CheckedBy:
        """What ran the kernel."""

    @property
    def errors(self) -> Sequence[ErrorStats]:
        """One for each output."""

    @property
    def weak(self) -> Sequence[str]:
        """Wrong answers that the case would let pass."""

    @property
    def reason(self) -> str:
        """Why the status is not OK."""


Check = Callable[[Kernel, OpSpec, Case, Scheme, torch.device, int], CheckOutcome]


def measure_op(
    spec: OpSpec,
    kernels: Sequence[Kernel],
    cases: Sequence[Case],
    scheme: Scheme,
    device: torch.device | str = "cpu",
    *,
    budget_s: float = 0.5,
    run_id: str | None = None,
    seed: int = 0,
    check: Check | None = None,
    ceilings: Ceilings | None = None,
    environment: Environment | None = None,
    raise_ceilings: Callable[[Ceilings], Ceilings] = raise_cpu_ceilings,
    timer: str | None = None,
    flush: FlushBy = "read",
    locked_sm_clock_mhz: float | None = None,
) -> Iterator[Record]:
    """One record for each kernel of each case, in that order, a case at a time.

    Every kernel is checked first, and none that fails publishes a time.  `budget_s` is the time for one kernel on one
    case; the kernels of a case are timed interleaved.  What cannot run here gets a record with its reason and the
    bound.  By default `check` is `check.check_kernel`: with the planted inputs on the op's first small case, once a
    kernel, and without them, which take seconds at a model's sizes, on each case.  The ceilings are this machine's.
    `timer` and `flush` are `time_functions`'; `locked_sm_clock_mhz` is the clock that the caller has locked the GPU to.
    """
    device = torch.device(device)
    check_timer(timer, device.type)
    pin_matmul_precision()
    gate: Check | None = None
    if check is None:
        from rooflab.bench.check import check_kernel

        check, gate = partial(check_kernel, planted=False), check_kernel
    run = _Run(
        spec=spec,
        scheme=scheme,
        device=device,
        budget_s=budget_s,
        run_id=run_id or new_run_id(),
        seed=seed,
        check=check,
        environment=environment or snapshot(device.index or 0),
        raise_ceilings=raise_ceilings,
        ceilings=ceilings or ceilings_for(device),
        gate=gate,
        timing={"timer": timer, "flush": flush},
        locked_sm_clock_mhz=locked_sm_clock_mhz,
    )
    for case in cases:
        yield from run.case(kernels, case)


@dataclass
class _Run:
    """What all records of a run share."""

    spec: OpSpec
    scheme: Scheme
    device: torch.device
    budget_s: float
    run_id: str
    seed: int
    check: Check
    environment: Environment
    raise_ceilings: Callable[[Ceilings], Ceilings]
    ceilings: Ceilings | None
    gate: Check | None = None
    timing: dict[str, Any] = field(default_factory=dict)
    """`timer` and `flush`."""
    locked_sm_clock_mhz: float | None = None
    gated: dict[str, CheckOutcome] = field(default_factory=dict)
    raised: bool = field(default=False)
    """Whether the ceilings were measured again in this run; once is enough."""

    def case(self, kernels: Sequence[Kernel], case: Case) -> Iterator[Record]:
        """The records of one case."""
        priced = self.spec.make_inputs(case, self.scheme, torch.device("meta"), self.seed)
        cost = self.spec.cost(**priced)
        known: dict[str, dict[str, Any]] = {}
        ready: dict[str, Rotation] = {}
        short = short_of_memory(self.spec, priced, self.device)
        copies: list[Inputs] = []
        for kernel in kernels:
            known[kernel.name] = found = self._checked(kernel, case, short)
            if found["status"] != "OK":
                continue
            copies = copies or self._copies(case, priced)
            function = self._function(kernel, copies, found)
            if function is not None:
                ready[kernel.name] = function
        gpu = self.environment.gpu.uuid if self.environment.gpu and self.device.type == "cuda" else None
        timed, failures, clocks = time_together(ready, self.device, self.budget_s, self.seed, gpu, **self.timing)
        if clocks and self.locked_sm_clock_mhz:
            clocks = clocks | {"locked_sm_clock_mhz": self.locked_sm_clock_mhz}
        done = {name: ready[name] for name in timed}
        wrong = wrong_calls(done, self.spec, case, self.scheme, self.device, self.seed)
        seen, broken = observe({name: ready[name] for name in timed if name not in wrong}, self.device)
        for name, failed in (failures | broken).items():
            known[name] |= {"status": failed.status, "reason": failed.reason}
            timed.pop(name, None)
        for kernel in kernels:
            fields = known[kernel.name]
            samples = timed.get(kernel.name)
            if kernel.name in wrong:
                fields |= {"status": "INCORRECT", "reason": f"after timing: {wrong[kernel.name]}"}
                samples = None
            elif samples is not None:
                fields |= self._judged(samples, cost, clocks) | {"clocks": clocks} | asdict(seen[kernel.name])
            yield self._record(kernel, case, cost, kernel_traffic(kernel, priced, self.device.type), samples, fields)

    def _checked(self, kernel: Kernel, case: Case, short: str) -> dict[str, Any]:
        """Status, reason and errors of the check."""
        refusal = kernel.why_not_here(self.device)
        if refusal:
            status, _, reason = refusal.partition(": ")
            return {"status": status, "reason": reason}
        if self.device.type == "cpu" and kernel.backend != "torch":
            return {"status": "UNSUPPORTED", "reason": INTERPRETED}  # checking here would take minutes and time nothing
        if short:
            return {"status": "OUT_OF_MEMORY", "reason": short}
        outcome = self._gate(kernel)
        if outcome is None or outcome.status == "OK":
            outcome = self.check(kernel, self.spec, case, self.scheme, self.device, self.seed)
        return {
            "status": outcome.status,
            "reason": outcome.reason,
            "checked_by": outcome.checked_by,
            "errors": tuple(asdict(stats) for stats in outcome.errors),
            "weak": tuple(outcome.weak),
        }

    def _gate(self, kernel: Kernel) -> CheckOutcome | None:
        """The kernel's check on the op's first small case, planted inputs included, once a run."""
        if self.gate is not None and kernel.name not in self.gated:
            small = self.spec.get_cases("smoke")[0]
            self.gated[kernel.name] = self.gate(kernel, self.spec, small, self.scheme, self.device, self.seed)
        return self.gated.get(kernel.name)

    def _copies(self, case: Case, priced: Inputs) -> list[Inputs]:
        fit = int(free_bytes(self.device) / 4 / max(1, input_bytes(priced)))
        # Made anew and not cloned, so that strides, views and lengths are those of the case.
        return [
            self.spec.make_inputs(case, self.scheme, self.device, self.seed) for _ in range(max(1, min(COPIES, fit)))
        ]

    def _function(self, kernel: Kernel, copies: Sequence[Inputs], found: dict[str, Any]) -> Rotation | None:
        """The kernel over its inputs in turn, or None with the failure in `found`."""
        from rooflab.bench.trial import failure, known_errors

        try:
            return Rotation(kernel, self.spec, copies)
        except known_errors() as error:
            failed = failure(error, "before timing")
            found |= {"status": failed.status, "reason": failed.reason}
            return None

    def _judged(self, samples: Samples, cost: Cost, clocks: dict[str, Any] | None) -> dict[str, Any]:
        """The status of a reading: INVALID where the clock could not see it or the machine cannot have done it."""
        self._raise_ceilings(samples, cost)
        limits = limits_for(self.device, self.ceilings) if self.ceilings else None
        if limits and self.ceilings and limits.l2_bytes_per_s is None:  # no data sheet of a Hopper states one
            limits = replace(limits, l2_bytes_per_s=self.ceilings.l2_bytes_per_s)
        reason = why_invalid(samples, cost, limits, clocks)
        return {"status": "INVALID", "reason": reason} if reason else {"status": "OK"}

    def _raise_ceilings(self, samples: Samples, cost: Cost) -> None:
        """Measures measured ceilings again after the first reading above them; a busy machine may have lowered them."""
        known = self.ceilings
        if self.raised or known is None or known.kind != "measured" or not samples.resolved or samples.fault:
            return
        seconds = samples.median_s
        above = seconds > 0 and above_limits(seconds, cost, known, method=samples.method, l2_state=samples.l2_state)
        in_cache = self.device.type == "cpu" and cost.bytes <= last_level_cache_bytes()
        if above and not (above.part == "memory" and in_cache):
            again = self.raise_ceilings
            if self.device.type == "cuda" and again is raise_cpu_ceilings:
                again = partial(raise_cuda_ceilings, device=self.device, budget_s=RAISE_CUDA_S)
            self.ceilings, self.raised = again(known), True

    def _bound(self, cost: Cost, ceilings: Ceilings | None) -> Bound | None:
        if ceilings is None or any(dtype not in ceilings.tensor_flops_per_s for dtype in cost.tensor_flops):
            return None
        return bound(cost, ceilings)

    def _circumstances(self, kernel: Kernel) -> dict[str, Any]:
        """The environment, and a hash of the kernel's file where no commit covers it."""
        file = kernel_file_sha256(kernel)
        return self.environment.to_dict() | ({"kernel_file_sha256": file} if file else {})

    def _record(
        self,
        kernel: Kernel,
        case: Case,
        cost: Cost,
        traffic: Traffic | None,
        samples: Samples | None,
        fields: dict[str, Any],
    ) -> Record:
        """The record of one kernel on one case."""
        limit = self._bound(cost, self.ceilings)
        config = config_for(kernel, case, self.scheme, self.device)
        moved = traffic.bytes if traffic else cost.bytes
        return Record(
            kind="bench",
            run_id=self.run_id,
            environment=self._circumstances(kernel),
            commit=self.environment.commit,
            dirty=self.environment.dirty,
            op=self.spec.name,
            kernel=kernel.name,
            role=kernel.role,
            backend=kernel.backend,
            case_id=case.id,
            case=dict(case),
            scheme=self.scheme.name,
            config=asdict(config) if config is not None else None,
            seed=self.seed,
            device=cast(DeviceType, self.device.type),
            flops=cost.flops,
            least_bytes=cost.bytes,
            traffic_bytes=traffic.bytes if traffic else None,
            traffic_basis=traffic.basis if traffic else None,
            intensity=cost.flops / moved if moved else None,
            bound_ms=limit.seconds * 1e3 if limit else None,
            limiter=limit.limiter if limit else None,
            ceilings=asdict(self.ceilings) if self.ceilings else None,
            **(reading_fields(samples, cost, moved, limit) if samples else {}),
            **fields,
        )
