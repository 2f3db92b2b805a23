"""Measures kernels of an op: checks the kernels, times them interleaved, and yields records with roofline bounds."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import cast

import torch

from rooflab.bench.base.plain import JsonObject
from rooflab.bench.core.call import Rotation, short_of_memory
from rooflab.bench.core.ceilings import ceilings_for, limits_for, raise_ceilings
from rooflab.bench.core.check import BROKEN_CONTEXT, already_broken, check_kernel
from rooflab.bench.core.check_data import CheckResult, CheckTask
from rooflab.bench.core.check_runs import KEPT_DATA
from rooflab.bench.core.environment import Environment
from rooflab.bench.core.failed import Failed
from rooflab.bench.core.noise import MAX_EXCESS, Samples, above_limits, shared, why_invalid, with_reading
from rooflab.bench.core.outside import Checkers
from rooflab.bench.core.record import DeviceType, Record, Status, new_run_id
from rooflab.bench.core.running import ContextBroken, Running
from rooflab.bench.core.select import first_case
from rooflab.bench.core.settings import Settings
from rooflab.bench.core.timed import INTERPRETED, Unseen, observe, time_together
from rooflab.kernels import registry
from rooflab.kernels.precision import pin_matmul_precision
from rooflab.kernels.registry import CPU_BACKENDS, Kernel
from rooflab.reference.spec import Case, Inputs, OpSpec, Scheme
from rooflab.roofline.model import Bound, Ceilings, Cost, Traffic, bound


@dataclass
class Measurement:
    """Holds the settings and the state of a measurement, for all records of a run.

    A kernel is first checked with adversarial (planted) inputs on a small case.  This check runs in a child process,
    because the kernel may hang or break its CUDA context.  Then the kernel is checked here on each case.  These checks
    have no adversarial inputs, which take seconds at a model's sizes."""

    spec: OpSpec
    scheme: Scheme
    settings: Settings = Settings()
    run_id: str = field(default_factory=new_run_id)
    ceilings: Ceilings | None = None
    """The ceilings that give the bounds; None means the ceilings of this machine."""
    running: Callable[[Sequence[str]], None] = Running.note
    """Called with the ids of the kernels that run next: one kernel, or all kernels that are timed together."""
    planted_before: frozenset[str] = frozenset()
    """Names of kernels that were checked before with adversarial inputs on this device."""
    wrap: Callable[[Rotation], Rotation] = lambda rotation: rotation
    """A function of a kernel's `Rotation`, whose result is timed in place of the `Rotation`."""
    gated: dict[str, CheckResult] = field(default_factory=dict, init=False)
    raised: bool = field(default=False, init=False)
    """Whether the ceilings were measured again in this run.  They are measured again at most once."""
    broken: str = field(default="", init=False)
    """The reason why no kernel can run any more; empty while kernels can run."""

    def __post_init__(self) -> None:
        self.device = torch.device(self.settings.device)
        if not self.settings.checked:
            pin_matmul_precision()
        self._known = Environment.now(self.device.index or 0)
        if self.ceilings is None and self.settings.roof:
            self.ceilings = ceilings_for(self.device)

    def records(self, kernels: Sequence[Kernel], cases: Iterable[Case]) -> Iterator[Record]:
        """Yields one record for each kernel of each input case, case by case.

        A kernel that fails its check gets no time.  A kernel that cannot run here gets a record with the reason and the
        roofline bound.  After a kernel has broken the CUDA context, no kernel runs.  A run with a time limit then
        raises `ContextBroken`, so that a new process can continue."""
        has_limit = self.settings.limit_s < math.inf
        try:
            for case in cases:
                for record in self._of_case(kernels, case):
                    if not (has_limit and record.reason.startswith(BROKEN_CONTEXT)):  # it says nothing of its kernel
                        yield record
                if has_limit and (context_error := self.broken or already_broken(self.device)):
                    raise ContextBroken(context_error)
        finally:
            self.running(())

    def _of_case(self, kernels: Sequence[Kernel], case: Case) -> Iterator[Record]:
        seed, cpu_threads = self.settings.seed, torch.get_num_threads()
        # The first sum of meta tensors imports torch._dynamo, which takes 1 s in each process of an A/B.
        meta_inputs = None if self.settings.paired else self._priced(case)
        oom_reason = short_of_memory(self.spec, meta_inputs, self.device) if meta_inputs and not self.broken else ""
        check_results, input_copies = dict[str, CheckResult](), list[Inputs]()
        failure_by_name, rotations = dict[str, Failed](), dict[str, Rotation]()
        for kernel in kernels:
            try:
                self._check_runnable(kernel, oom_reason)
                if not self.settings.checked:
                    check_results[kernel.name] = result = self._checked(kernel, case)
                    if result.status != "OK":
                        raise Failed(result.status, result.reason)
                input_copies = input_copies or Rotation.copies(self.spec, case, self.scheme, self.device, seed)
                rotations[kernel.name] = self._function(kernel, input_copies)
            except Failed as fault:
                failure_by_name[kernel.name] = fault
        KEPT_DATA.forget()
        is_judged = bool(rotations) and self.settings.judge
        new_data = Unseen(self.spec, case, self.scheme, self.device, input_copies, seed) if is_judged else None
        timings, failures, clock_readings = self._together(rotations, new_data)
        for name, error in new_data.wrong({name: rotations[name] for name in timings}).items() if new_data else ():
            failures[name] = Failed("INCORRECT", f"after timing: {error}")
        profiles, faults = observe({name: rotations[name] for name in timings if name not in failures}, self.device)
        torch.set_num_threads(cpu_threads)  # a kernel may have changed it
        failure_by_name |= failures | faults
        inputs = meta_inputs or (input_copies[0] if input_copies else self._priced(case))
        case_cost = self.spec.cost_of(inputs)
        for kernel in kernels:
            name = kernel.name
            record = self._record(kernel, case, case_cost, check_results.get(name), failure_by_name.get(name))
            samples = None if name in failure_by_name else timings[name]
            if samples is not None:
                record = self._with_time(record, samples, case_cost, clock_readings, profiles.get(name, {}))
            yield self._moved(record, kernel.traffic_of(inputs, self.device.type, self.spec), samples, case_cost)

    def _priced(self, case: Case) -> Inputs:
        return self.spec.make_inputs(case, self.scheme, torch.device("meta"), self.settings.seed)

    @staticmethod
    def why_not(kernel: Kernel, device: torch.device) -> Failed | None:
        """Returns the reason why `kernel` cannot be timed on `device`, whatever the inputs; None if it can be timed."""
        refusal = kernel.why_not_here(device)
        runs_in_software = device.type == "cpu" and kernel.backend not in CPU_BACKENDS
        if runs_in_software and (refusal is None or (refusal.status == "UNSUPPORTED" and "cpu" in kernel.devices)):
            return Failed("UNSUPPORTED", INTERPRETED)
        return Failed.by(refusal) if refusal else None

    def _check_runnable(self, kernel: Kernel, short: str) -> None:
        """Raises `Failed` if the kernel cannot run here, memory is too small, or a fault broke the CUDA context."""
        if refusal := self.why_not(kernel, self.device):
            raise refusal
        if short:
            raise Failed("OUT_OF_MEMORY", short)
        if self.broken:
            raise Failed("RUNTIME_ERROR", self.broken)

    def check_here(self, kernel: Kernel, case: Case, planted: bool = False) -> CheckResult:
        """Checks a kernel on an input case, in this process.  The kernel need not be registered."""
        seed = self.settings.seed
        return check_kernel(kernel, self.spec, case, self.scheme, self.device, seed, planted)

    def _checked(self, kernel: Kernel, case: Case) -> CheckResult:
        self.running([kernel.id])
        result = self._gate(kernel, case)
        if result is None or result.status == "OK":
            result = self.check_here(kernel, case)
        fault = self._fault(kernel.id)
        return replace(result, status="RUNTIME_ERROR", reason=fault) if fault and result.status == "OK" else result

    def _fault(self, who: str) -> str:
        """Returns the error that broke the CUDA context, or "". Stores the error and the name `who` in `broken`."""
        if broken_reason := already_broken(self.device):
            self.broken = f"{BROKEN_CONTEXT}, by {who}: {broken_reason}"
        return broken_reason

    def _together(
        self, ready: Mapping[str, Rotation], unseen: Unseen | None
    ) -> tuple[dict[str, Samples], dict[str, Failed], JsonObject | None]:
        """Times several kernels in the same rounds. Returns no times if one of them broke the CUDA context."""
        if self.broken:
            return {}, dict.fromkeys(ready, Failed("RUNTIME_ERROR", self.broken)), None
        if ready:
            self.running([f"{self.spec.name}/{name}" for name in ready])
        samples_by_name, timing_failures, clock_readings = time_together(ready, self.settings, unseen)
        if timing_failures and self._fault(f"one of {', '.join(ready)}") and len(ready) > 1:
            return {}, dict.fromkeys(ready, Failed("RUNTIME_ERROR", self.broken)), None
        return samples_by_name, timing_failures, clock_readings

    def _gate(self, kernel: Kernel, case: Case) -> CheckResult | None:
        """Checks a kernel once with adversarial inputs, and returns the result. The check uses a small case, or `case`
        if the kernel supports no small case. Returns None if an earlier run made this check."""
        if kernel.name not in self.gated and kernel.name not in self.planted_before:
            # `first_case` looks only at shapes; if the kernel refuses the small case's values or addresses, use `case`.
            for small_case in filter(None, (first_case(kernel, self.spec, self.scheme), case)):
                result = self._first(kernel, small_case)
                if result.status != "UNSUPPORTED":
                    self.gated[kernel.name] = result
                    break
        return self.gated.get(kernel.name)

    def _first(self, kernel: Kernel, case: Case) -> CheckResult:
        """Checks a kernel for the first time: in a child process if it is registered, otherwise in this process."""
        registered_op, seed = registry.get_op(kernel.op) if kernel.op in registry.ops() else None, self.settings.seed
        if registered_op is self.spec and registry.kernels(kernel.op).get(kernel.name) is kernel:
            return Checkers(self.device)(CheckTask(kernel, case, self.scheme, seed))
        return self.check_here(kernel, case, planted=True)

    def _function(self, kernel: Kernel, copies: Sequence[Inputs]) -> Rotation:
        """Returns a function to run the kernel on each input set in turn. Raises `Failed` on faults before timing."""
        try:
            input_rotation = Rotation(kernel, self.spec, copies)
            if self.device.type == "cuda" and not self.settings.checked:
                input_rotation()  # alone: timed together, one kernel's fault would fail all
                torch.cuda.synchronize(self.device)
            return self.wrap(input_rotation)
        except Failed.errors() as error:
            self._fault(kernel.id)
            raise Failed.of(error, "before timing") from error

    def _record(
        self, kernel: Kernel, case: Case, cost: Cost, result: CheckResult | None, fault: Failed | None
    ) -> Record:
        """Makes the record of a kernel, still without a time."""
        ceilings, kernel_config = self.ceilings, kernel.config_for(case, self.scheme, self.device)
        status, record_reason = (fault.status, fault.reason) if fault else ("OK", result.reason if result else "")
        if ceilings and ceilings.noise and self._bound(cost):
            record_reason = record_reason or f"its bound is NOISY: {ceilings.noise}"
        return replace(
            self._known.record("bench", kernel, case, self.scheme.name, self.run_id, status, record_reason),
            config=asdict(kernel_config) if kernel_config is not None else None,
            seed=self.settings.seed,
            device=cast(DeviceType, self.device.type),
            checked_by=result.checked_by if result else "none",
            errors=tuple(asdict(error_stats) for error_stats in result.errors) if result else (),
            weak=result.weak if result else (),
            flops=cost.flops,
            least_bytes=cost.bytes,
        )

    def _bound(self, cost: Cost) -> Bound | None:
        ceilings = self.ceilings
        has_all_rates = ceilings is not None and cost.tensor_flops.keys() <= ceilings.tensor_flops_per_s.keys()
        return bound(cost, ceilings) if ceilings and has_all_rates else None

    def _with_time(
        self, record: Record, samples: Samples, cost: Cost, clocks: JsonObject | None, seen: JsonObject
    ) -> Record:
        """Adds a measured time to the record. The record becomes INVALID if the clock is too coarse or the time is
        impossibly short. It becomes NOISY if the machine was busy."""
        self._raise_ceilings(samples, cost)
        noise_reason = samples.noise if samples.few or not self.settings.paired else ""
        if fault_cause := why_invalid(samples, cost, self._limits(), clocks):
            status, status_reason = "INVALID", fault_cause
        elif fault_cause := noise_reason or shared(clocks):
            status, status_reason = "NOISY", fault_cause
        else:
            status, status_reason = "OK", record.reason
        return replace(with_reading(record, samples, clocks), status=cast(Status, status), reason=status_reason, **seen)

    def _moved(self, record: Record, claimed: Traffic | None, samples: Samples | None, cost: Cost) -> Record:
        """Adds the roofline bound, the rates and the kernel's claimed traffic (bytes moved) to the record. A NOISY time
        gives no rates. Traffic that no memory here could move in the measured time is left out."""
        traffic, traffic_reason, machine_limits = claimed, record.reason, self._limits()
        median_s = samples.median_s if samples and math.isfinite(samples.median_s) and samples.median_s > 0 else None
        if traffic and median_s and machine_limits:
            fastest_rate = max(machine_limits.hbm_bytes_per_s, machine_limits.l2_bytes_per_s or 0.0)
            if traffic.bytes / median_s > MAX_EXCESS * fastest_rate:
                traffic_note = "its claimed traffic is left out: no memory here could have moved it in that time"
                traffic, traffic_reason = None, traffic_reason or traffic_note
        moved_bytes = traffic.bytes if traffic else cost.bytes
        time_s = median_s if record.status != "NOISY" else None
        ceilings, limit = self.ceilings, self._bound(cost)
        return replace(
            record,
            reason=traffic_reason,
            traffic_bytes=traffic.bytes if traffic else None,
            traffic_basis=traffic.basis if traffic else None,
            intensity=cost.flops / moved_bytes if moved_bytes else None,
            flops_per_s=cost.flops / time_s if time_s else None,
            bytes_per_s=moved_bytes / time_s if time_s else None,
            bound_ms=limit.seconds * 1e3 if limit else None,
            limiter=limit.limiter if limit else None,
            bound_fraction=limit.fraction(time_s) if limit and time_s and ceilings and not ceilings.noise else None,
            ceilings=asdict(ceilings) if ceilings else None,
        )

    def _limits(self) -> Ceilings | None:
        return limits_for(self.device, self.ceilings) if self.ceilings else None

    def _raise_ceilings(self, samples: Samples, cost: Cost) -> None:
        """Measures the peak rates again (once) if a kernel exceeds them; a busy machine may have lowered them."""
        ceilings = self.ceilings
        if self.raised or ceilings is None or ceilings.kind != "measured" or not samples.resolved or samples.fault:
            return
        limit_excess = samples.median_s > 0 and above_limits(samples, cost, ceilings)
        if limit_excess:
            self.ceilings, self.raised = raise_ceilings(ceilings, self.device), True
