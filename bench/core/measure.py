"""Measures an op's kernels: checks them, times them interleaved, and yields records with times and roofline bounds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, cast

import torch

from rooflab.bench.core.call import Rotation, copies_of, short_of_memory
from rooflab.bench.core.ceilings.ceilings import ceilings_for, limits_for, raise_cpu_ceilings, raise_cuda_ceilings
from rooflab.bench.core.check import BROKEN, CheckResult, already_broken, check_kernel
from rooflab.bench.core.check_runs import KEPT
from rooflab.bench.core.environment import identity, last_level_cache_bytes, snapshot
from rooflab.bench.core.failed import Failed, failed_by, failure, known_errors
from rooflab.bench.core.noise import ABOVE, RATES, Samples, above_limits, reading_fields, shared, why_invalid
from rooflab.bench.core.record import DeviceType, Record, new_run_id
from rooflab.bench.core.running import note
from rooflab.bench.core.select import first_case
from rooflab.bench.core.settings import Settings
from rooflab.bench.core.timed import INTERPRETED, observe, time_together
from rooflab.bench.core.timers.timing import FirstCall, check_timer
from rooflab.bench.core.unseen import Unseen
from rooflab.kernels.configs import config_for
from rooflab.kernels.precision import pin_matmul_precision
from rooflab.kernels.registry import CPU_BACKENDS, Kernel
from rooflab.reference.spec import Case, Inputs, OpSpec, Scheme
from rooflab.roofline.model import Ceilings, Cost, Traffic, bound

RAISE_CUDA_S = 20.0
"""Seconds for measuring a GPU's ceilings again, which a run does at most once."""
Checker = Callable[[Kernel, OpSpec, Case, Scheme, torch.device, int], CheckResult]
"""`check.check_kernel`, or a function that replaces it."""


@dataclass
class Measurement:
    """The settings and the state of a measurement, shared by all records of a run.

    Raises `ValueError` on a timer that the device does not have.
    """

    spec: OpSpec
    scheme: Scheme
    device: torch.device
    settings: Settings = Settings()
    run_id: str = field(default_factory=new_run_id)
    check: Checker | None = None
    """By default `check.check_kernel`: once with planted inputs, on the first small case that a kernel takes, then on
    each case without planted inputs, which take seconds at a model's sizes."""
    ceilings: Ceilings | None = None
    """By default the machine's ceilings."""
    locked_sm_clock_mhz: float | None = None
    """The SM clock to which the caller has locked the GPU."""
    running: Callable[[Sequence[str]], None] = note
    """Called with the ids of the kernels that run next: one kernel, or all kernels that are timed together."""
    planted_before: frozenset[str] = frozenset()
    """Names of kernels whose check with planted inputs was made on this device before."""
    gated: dict[str, CheckResult] = field(default_factory=dict, init=False)
    raised: bool = field(default=False, init=False)
    """Whether the ceilings were measured again in this run, which happens at most once."""
    broken: str = field(default="", init=False)
    """Why no kernel can run any more; empty while kernels can run."""
    first: dict[str, FirstCall] = field(default_factory=dict, init=False)
    """Each checked kernel's function, which notes the first calls of its checks on the case."""

    def __post_init__(self) -> None:
        check_timer(self.settings.timer, self.device.type)
        pin_matmul_precision()
        self._known = snapshot(self.device.index or 0)
        self.ceilings = self.ceilings or ceilings_for(self.device)

    def records(self, kernels: Sequence[Kernel], cases: Iterable[Case]) -> Iterator[Record]:
        """Yields one record for each kernel of each case, case by case.

        Every kernel is checked first; a kernel that fails publishes no time.  A kernel that cannot run here gets a
        record with the reason and the bound.  Once a kernel has broken the CUDA context, no other kernel runs.  Their
        records then say so.
        """
        for case in cases:
            yield from self._of_case(kernels, case)

    def _of_case(self, kernels: Sequence[Kernel], case: Case) -> Iterator[Record]:
        seed = self.settings.seed
        priced = self.spec.make_inputs(case, self.scheme, torch.device("meta"), seed)
        cost = self.spec.cost_of(priced)
        cpu_threads = torch.get_num_threads()
        short = "" if self.broken else short_of_memory(self.spec, priced, self.device)
        checked = dict[str, CheckResult]()
        failed, ready, copies = dict[str, Failed](), dict[str, Rotation](), list[Inputs]()
        for kernel in kernels:
            try:
                checked[kernel.name] = found = self._checked(kernel, case, short)
                if found.status != "OK":
                    raise Failed(found.status, found.reason)
                copies = copies or copies_of(self.spec, case, self.scheme, self.device, seed)
                ready[kernel.name] = self._function(kernel, copies)
            except Failed as fault:
                failed[kernel.name] = fault
        KEPT.forget()
        unseen = Unseen(self.spec, case, self.scheme, self.device, copies, seed) if ready else None
        timed, failures, clocks = self._together(ready, unseen)
        for name, wrong in unseen.wrong({name: ready[name] for name in timed}).items() if unseen else ():
            failures[name] = Failed("INCORRECT", f"after timing: {wrong}")
        seen, broken = observe({name: ready[name] for name in timed if name not in failures}, self.device)
        torch.set_num_threads(cpu_threads)  # a kernel may have changed it
        failed |= failures | broken
        for kernel in kernels:
            name = kernel.name
            fields = _fields_of(checked.get(name))
            samples = None if name in failed else timed[name]
            if samples is None:
                fields |= {"status": failed[name].status, "reason": failed[name].reason}
            else:
                fields |= self._judged(samples, cost, clocks) | {"clocks": clocks} | asdict(seen[name])
            claimed = kernel.traffic_of(priced, self.device.type, self.spec)
            traffic = self._believed(claimed, samples)
            if claimed and not traffic and not fields.get("reason"):
                fields["reason"] = "its claimed traffic is left out: no memory here could have moved it in that time"
            yield self._record(kernel, case, cost, traffic, samples, fields)

    def _checked(self, kernel: Kernel, case: Case, short: str) -> CheckResult:
        """The kernel's check.  Raises `Failed` where it is not run."""
        if refusal := kernel.why_not_here(self.device):
            raise failed_by(refusal)
        if self.device.type == "cpu" and kernel.backend not in CPU_BACKENDS:
            raise Failed("UNSUPPORTED", INTERPRETED)  # checking here would take minutes and time nothing
        if short:
            raise Failed("OUT_OF_MEMORY", short)
        if self.broken:
            raise Failed("RUNTIME_ERROR", self.broken)
        self.running([kernel.id])
        first = self.first.setdefault(kernel.name, FirstCall(kernel.fn))
        first.due, first.first_call_s = True, 0.0
        noting = replace(kernel, fn=first)
        found = self._gate(noting, case)
        if found is None or found.status == "OK":
            first.due = True  # another case than the gate's may compile again
            check = self.check or partial(check_kernel, planted=False)
            found = check(noting, self.spec, case, self.scheme, self.device, self.settings.seed)
        fault = self._fault(kernel.id)
        return replace(found, status="RUNTIME_ERROR", reason=fault) if fault and found.status == "OK" else found

    def _fault(self, who: str) -> str:
        """What has broken the CUDA context, also noted in `broken`; empty where nothing has."""
        if why := already_broken(self.device):
            self.broken = f"{BROKEN}, by {who}: {why}"
        return why

    def _together(
        self, ready: Mapping[str, Rotation], unseen: Unseen | None
    ) -> tuple[dict[str, Samples], dict[str, Failed], dict[str, Any] | None]:
        """`time_together` of the kernels in `ready`; no samples if one of them has broken the CUDA context."""
        if self.broken:
            return {}, dict.fromkeys(ready, Failed("RUNTIME_ERROR", self.broken)), None
        if ready:
            self.running([f"{self.spec.name}/{name}" for name in ready])
        gpu = self._known.gpu.uuid if self._known.gpu and self.device.type == "cuda" else None
        asked = self.settings
        how: dict[str, Any] = {"timer": asked.timer, "flush": asked.flush, "renew": unseen, "patient": True}
        timed, failures, clocks = time_together(ready, self.device, asked.budget_s, asked.seed, gpu, **how)
        if failures and self._fault(f"one of {', '.join(ready)}") and len(ready) > 1:
            return {}, dict.fromkeys(ready, Failed("RUNTIME_ERROR", self.broken)), None
        if clocks and self.locked_sm_clock_mhz:
            clocks = clocks | {"locked_sm_clock_mhz": self.locked_sm_clock_mhz}
        return timed, failures, clocks

    def _gate(self, kernel: Kernel, case: Case) -> CheckResult | None:
        """The kernel's check with planted inputs, once per run: on the first small case that the kernel takes, or else
        on `case`; None if it was made before."""
        if self.check is None and kernel.name not in self.gated and kernel.name not in self.planted_before:
            # `first_case` looks only at shapes; if the kernel refuses the small case's values or addresses, use `case`.
            for small in filter(None, (first_case(kernel, self.spec, self.scheme), case)):
                found = check_kernel(kernel, self.spec, small, self.scheme, self.device, self.settings.seed)
                if found.status != "UNSUPPORTED":
                    self.gated[kernel.name] = found
                    break
        return self.gated.get(kernel.name)

    def _function(self, kernel: Kernel, copies: Sequence[Inputs]) -> Rotation:
        """The kernel as a function that cycles through `copies`.  Raises `Failed`."""
        try:
            rotation = Rotation(kernel, self.spec, copies)
            rotation.first_call_s = max(rotation.first_call_s, self.first[kernel.name].first_call_s)
            if self.device.type == "cuda":
                rotation()  # alone: timed together, one kernel's fault would fail all
                torch.cuda.synchronize(self.device)
            return rotation
        except known_errors() as error:
            self._fault(kernel.id)
            raise failure(error, "before timing") from error

    def _judged(self, samples: Samples, cost: Cost, clocks: dict[str, Any] | None) -> dict[str, Any]:
        """The status of a reading: INVALID if the clock cannot resolve it or if it exceeds the machine's limits, NOISY
        if the machine was busy; a noisy time gives no rates."""
        self._raise_ceilings(samples, cost)
        limits = limits_for(self.device, self.ceilings) if self.ceilings else None
        reason = why_invalid(samples, cost, limits, clocks)
        if reason:
            return {"status": "INVALID", "reason": reason}
        noise = samples.noise or shared(clocks)
        if noise:
            return {"status": "NOISY", "reason": noise, **dict.fromkeys(RATES)}
        return {"status": "OK"}

    def _believed(self, traffic: Traffic | None, samples: Samples | None) -> Traffic | None:
        """The traffic that a kernel claims; None if no memory of the device could have moved it in the time read."""
        limits = limits_for(self.device, self.ceilings) if self.ceilings else None
        if traffic is None or samples is None or limits is None or not samples.median_s > 0:
            return traffic
        fastest = max(limits.hbm_bytes_per_s, limits.l2_bytes_per_s or 0.0)
        return traffic if traffic.bytes / samples.median_s <= ABOVE * fastest else None

    def _raise_ceilings(self, samples: Samples, cost: Cost) -> None:
        """After a first reading above measured ceilings, measures them again: a busy machine may have lowered them."""
        known = self.ceilings
        if self.raised or known is None or known.kind != "measured" or not samples.resolved or samples.fault:
            return
        above = samples.median_s > 0 and above_limits(samples, cost, known)
        in_cache = self.device.type == "cpu" and cost.bytes <= last_level_cache_bytes()
        if above and not (above[0] == "memory" and in_cache):
            on_cuda = self.device.type == "cuda"
            again = raise_cuda_ceilings(known, self.device, RAISE_CUDA_S) if on_cuda else raise_cpu_ceilings(known)
            self.ceilings, self.raised = again, True

    def _record(
        self,
        kernel: Kernel,
        case: Case,
        cost: Cost,
        traffic: Traffic | None,
        samples: Samples | None,
        fields: dict[str, Any],
    ) -> Record:
        roofs = self.ceilings
        has_rates = roofs is not None and cost.tensor_flops.keys() <= roofs.tensor_flops_per_s.keys()
        limit = bound(cost, roofs) if roofs and has_rates else None
        config = config_for(kernel, case, self.scheme, self.device)
        moved = traffic.bytes if traffic else cost.bytes
        read = (reading_fields(samples, cost, moved, limit) if samples else {}) | fields
        if limit and (noise := self.ceilings and self.ceilings.noise):
            read |= {"bound_fraction": None, "reason": read.get("reason") or f"its bound is NOISY: {noise}"}
        return Record(
            kind="bench",
            run_id=self.run_id,
            **identity(kernel, case, self.scheme.name, self._known),
            config=asdict(config) if config is not None else None,
            seed=self.settings.seed,
            device=cast(DeviceType, self.device.type),
            flops=cost.flops,
            least_bytes=cost.bytes,
            traffic_bytes=traffic.bytes if traffic else None,
            traffic_basis=traffic.basis if traffic else None,
            intensity=cost.flops / moved if moved else None,
            bound_ms=limit.seconds * 1e3 if limit else None,
            limiter=limit.limiter if limit else None,
            ceilings=asdict(self.ceilings) if self.ceilings else None,
            **read,
        )


def _fields_of(found: CheckResult | None) -> dict[str, Any]:
    """The fields of a record that a check fills; none without one."""
    if found is None:
        return {}
    errors = tuple(asdict(stats) for stats in found.errors)
    return {"reason": found.reason, "checked_by": found.checked_by, "errors": errors, "weak": tuple(found.weak)}
