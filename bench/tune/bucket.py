"""Tunes kernels for one range of row counts (a bucket): searches configs, then checks and times the best configs."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from typing import Any

import torch

from rooflab.bench.base.system_time import time
from rooflab.bench.compile.cases import KernelCase
from rooflab.bench.compile.static import CompileFailure, compile_kernels
from rooflab.bench.core import (
    Failed,
    Measurement,
    Record,
    Rotation,
    RunWriter,
    Settings,
    Status,
    time_functions,
    timer_for,
)
from rooflab.bench.tune.search import SearchResult, Seconds, least_s, search
from rooflab.kernels.registry import Kernel
from rooflab.reference.spec import Case, OpSpec, Scheme
from rooflab.roofline.device import Device, identify
from rooflab.roofline.model import Cost
from rooflab.roofline.occupancy import occupancy

QUICK_BUDGET_S, MIN_QUICK_SAMPLES = 0.01, 5
"""Seconds, and the least number of samples, for one config on one case in the search."""


def config_name(config: Any) -> str:
    """Returns a tuning config as one line of text, such as `block_m=64,num_warps=4`."""
    return ",".join(f"{name}={param_value}" for name, param_value in asdict(config).items())


class DeviceTimes:
    """Times several configs of one kernel, interleaved, on each given case.  A case's inputs are made only once."""

    def __init__(
        self, kernel: Kernel, spec: OpSpec, cases: Sequence[Case], scheme: Scheme, device: torch.device, seed: int
    ):
        self._kernel, self._spec, self._device, self._seed = kernel, spec, device, seed
        self._cases, self._scheme = cases, scheme
        self._compiled: set[Any] = set()
        self._timer = timer_for(device)
        self._inputs = [Rotation.copies(spec, case, scheme, device, seed) for case in cases]

    def __call__(self, configs: Sequence[Any]) -> dict[Any, Seconds | str]:
        """Returns the median seconds of each config on each case. A config that failed gets an error text instead."""
        times_by_config: dict[Any, Seconds | str] = {**dict.fromkeys(configs, ()), **self._compile(configs)}
        for inputs in self._inputs:
            ready_calls = {}
            for config in configs:
                if isinstance(times_by_config[config], str):
                    continue
                try:
                    rotation = Rotation(self._kernel.with_config(config), self._spec, inputs)
                    rotation()  # compiles
                    ready_calls[config_name(config)] = rotation
                except Failed.errors() as error:
                    times_by_config[config] = Failed.of(error, "").reason
            if not ready_calls:
                break
            samples_by_name = time_functions(
                ready_calls,
                self._device,
                budget_s=QUICK_BUDGET_S * len(ready_calls),
                min_samples=MIN_QUICK_SAMPLES,
                seed=self._seed,
                timer=self._timer,
            )
            for config in configs:
                earlier_times = times_by_config[config]
                if not isinstance(earlier_times, str):
                    times_by_config[config] = (*earlier_times, samples_by_name[config_name(config)].median_s)
        return times_by_config

    def _compile(self, configs: Sequence[Any]) -> dict[Any, str]:
        """Compiles the new configs into Triton's cache, on all CPU cores. Returns an error text for each failed config.

        One process alone would take about 1 s per config. Later launches find the compiled code in the cache."""
        new_configs = [config for config in configs if config not in self._compiled]
        self._compiled.update(new_configs)
        is_rooflab_kernel = self._kernel.fn.__module__.startswith("rooflab.")
        if self._device.type != "cuda" or self._kernel.backend not in ("triton", "gluon") or not is_rooflab_kernel:
            return {}
        case = self._cases[0]
        compile_requests = [
            KernelCase(self._spec.name, self._kernel.name, case, self._scheme, config=config) for config in new_configs
        ]
        compile_answers = zip(new_configs, compile_kernels(compile_requests), strict=True)
        return {config: str(answer) for config, answer in compile_answers if isinstance(answer, CompileFailure)}


def made_up(configs: Sequence[Any]) -> dict[Any, Seconds | str]:
    """Returns invented times for a dry run, from 0.5 to 1.5 ms.  The same config always gets the same time."""
    return {config: (random.Random(config_name(config)).uniform(0.5e-3, 1.5e-3),) for config in configs}


SEARCH_SHARE = 0.6
"""The share of the time for the search.  The recorded checks and measurements get the rest."""
MAX_FINAL_BUDGET_S, MIN_FINAL_BUDGET_S = 0.5, 0.02
"""The most and the least seconds of samples for one contender on one case of the recorded measurement."""


@dataclass(frozen=True)
class BucketResult:
    """Holds the tuning result of one kernel for one range of row counts (a bucket)."""

    kernel: str
    bucket: str
    cases: int
    configs: int
    """The number of configs that the kernel offers."""
    illegal: int
    bounded: int
    """The number of configs that were never compiled, because their own bound is above the best time."""
    dropped: int
    """The number of configs that were dropped after their first samples."""
    failed: int
    left: int
    """The number of configs that were not tried in the given time."""
    best: Mapping[str, Any] | None = None
    """The fastest correct config.  None if the config that the launcher chooses by itself is the fastest."""
    faster: float | None = None
    """The time of the launcher's own choice divided by the best config's, geometric mean.  None without times."""
    reason: str = ""
    """Why the kernel has no result in the bucket."""
    status: Status = "OK"
    """The result of the check of `best` in a dry run."""

    @property
    def summary(self) -> str:
        if self.reason:
            return self.reason
        if self.best is None:
            return "the launcher's own choice is the fastest"
        speedup_text = "" if self.faster is None else f", {self.faster:.3f}x"
        return ", ".join(f"{name}={param_value}" for name, param_value in self.best.items()) + speedup_text


@dataclass
class TuningRun:
    """Tunes the kernels of an op for each range of row counts (bucket), and holds the results so far."""

    spec: OpSpec
    kernels: Sequence[Kernel]
    """The kernels whose configs the run searches."""
    beside: Sequence[Kernel]
    """The other kernels.  They are timed together with `kernels`, so that the choice is among all kernels."""
    scheme: Scheme
    device: torch.device
    writer: RunWriter
    seed: int = 0
    dry_run: bool = False
    results: list[BucketResult] = field(default_factory=list)
    records: list[Record] = field(default_factory=list)
    stopped: str = ""
    """The point that the run reached, if the budget ended before all buckets were tuned."""

    @property
    def files(self) -> list[str]:
        """Returns a list with the name of the file of records.  The list is empty if there are no records."""
        return [self.writer.path.name] if self.records else []

    @property
    def rows(self) -> list[dict[str, Any]]:
        """Returns one table row for each kernel and each range of row counts (bucket)."""
        return [asdict(result) | {"result": result.summary} for result in self.results]

    def bucket(self, name: str, cases: Sequence[Case], seconds: float) -> None:
        """Tunes the kernels for one range of row counts (a bucket), on the cases in this range, in about `seconds`."""
        cases = sorted(cases, key=self._work)
        search_results = []
        for kernel in self.kernels:
            search_deadline = time.monotonic() + SEARCH_SHARE * seconds / len(self.kernels)
            search_results.append((kernel, *self._search(kernel, name, cases, search_deadline)))
        if self.dry_run:
            self.results += [self._dry_result(*search_row) for search_row in search_results]
            return
        finalists = {kernel.name: result.finalists(start_config) for kernel, start_config, result, _ in search_results}
        records = self._measure(cases, finalists, (1 - SEARCH_SHARE) * seconds)
        self.results += [self._result(*search_row, records) for search_row in search_results]

    def _cost(self, case: Case) -> Cost:
        return self.spec.cost_of(self.spec.make_inputs(case, self.scheme, torch.device("meta"), self.seed))

    def _work(self, case: Case) -> float:
        cost = self._cost(case)
        return cost.flops + cost.bytes

    def _search(
        self, kernel: Kernel, bucket: str, cases: Sequence[Case], ends: float
    ) -> tuple[Any, SearchResult, dict[str, Any]]:
        """Searches the configs of a kernel on its largest and smallest case. Returns the launcher's own config, the
        search result, and counts such as the illegal configs."""
        probe_cases, tuning = list(dict.fromkeys((cases[-1], cases[0]))), kernel.tunable
        start_config = kernel.config_for(cases[-1], self.scheme, self.device)
        legal_configs = [
            config
            for config in kernel.tunable.legal_configs(cases[-1], self.scheme)
            if all(tuning.is_legal(config, case, self.scheme) for case in cases)
        ]
        num_offered_configs = len({*tuning.configs(cases[-1], self.scheme), start_config})
        result_counts = {"kernel": kernel.name, "bucket": bucket, "cases": len(cases)}
        result_counts |= {"configs": num_offered_configs, "illegal": num_offered_configs - len(legal_configs)}
        costs = [self._cost(case) for case in probe_cases]
        bounds_by_config = {config: self._by_arithmetic(kernel, config, probe_cases, costs) for config in legal_configs}
        random.Random(self.seed).shuffle(legal_configs)
        legal_configs.sort(key=lambda config: (math.prod(bounds_by_config[config][0]), -bounds_by_config[config][1]))
        times = (
            made_up
            if self.dry_run
            else DeviceTimes(kernel, self.spec, probe_cases, self.scheme, self.device, self.seed)
        )
        result = search(start_config, legal_configs, lambda config: bounds_by_config[config][0], times, ends)
        result_counts |= {"bounded": result.bounded, "dropped": result.dropped}
        return start_config, result, result_counts | {"failed": len(result.failures), "left": result.left}

    def _by_arithmetic(
        self, kernel: Kernel, config: Any, probes: Sequence[Case], costs: Sequence[Cost]
    ) -> tuple[Seconds, float]:
        """Computes the least possible seconds of a config on each case, at the GPU's highest clock. Also returns the
        occupancy on the first case, which breaks ties. Unknown values are 0."""
        gpu, footprint_fn = _card(self.device), kernel.tunable.footprint
        if gpu is None:
            return tuple(0.0 for _ in probes), 0.0
        ceilings = gpu.ceilings(gpu.max_clock_hz)
        cta_sizes = [footprint_fn(config, case, self.scheme) if footprint_fn else None for case in probes]
        min_times_s = tuple(least_s(cost, ceilings, size, gpu.sms) for cost, size in zip(costs, cta_sizes, strict=True))
        size = cta_sizes[0]
        return min_times_s, occupancy(gpu, size.threads, size.registers, size.shared_bytes).fraction if size else 0.0

    def _measure(self, cases: Sequence[Case], finalists: Mapping[str, Sequence[Any]], seconds: float) -> list[Record]:
        """Times every kernel with the launcher's own config, and with the best configs of the search."""
        kernel_by_name = {kernel.name: kernel for kernel in self.kernels}
        candidate_kernels = [
            replace(kernel_by_name[name].with_config(config), name=f"{name}#{config_number}")
            for name, configs in finalists.items()
            for config_number, config in enumerate(configs)
        ]
        timed_kernels = [*self.kernels, *candidate_kernels, *self.beside]
        budget_s = min(MAX_FINAL_BUDGET_S, max(MIN_FINAL_BUDGET_S, seconds / 2 / (len(timed_kernels) * len(cases))))
        timing_settings, records = Settings(device=str(self.device), seed=self.seed, budget_s=budget_s), []
        kernel_measurement = Measurement(self.spec, self.scheme, timing_settings, self.writer.run_id)
        for record in kernel_measurement.records(timed_kernels, cases):
            name, _, config_number = str(record.kernel).partition("#")
            if name in kernel_by_name:
                default_config = kernel_by_name[name].config_for(Case(**record.case), self.scheme, self.device)
                config = finalists[name][int(config_number)] if config_number else default_config
                record = replace(record, kernel=name, config=asdict(config))
            self.writer.write(record)
            records.append(record)
        self.records += records
        return records

    def _dry_result(self, kernel: Kernel, start: Any, result: SearchResult, counts: dict[str, Any]) -> BucketResult:
        """Returns the config with the least invented time (no GPU), after a check on one small case."""
        small_case = self.spec.get_cases("smoke")[0]
        config = next(iter(result.finalists(start)), start)
        timing_settings = Settings(device=str(self.device), seed=self.seed, roof=False)
        kernel_measurement = Measurement(self.spec, self.scheme, timing_settings)
        check_outcome = kernel_measurement.check_here(kernel.with_config(config), small_case)
        reason = "" if check_outcome.status == "OK" else f"{check_outcome.status}: {check_outcome.reason}"
        return BucketResult(**counts, best=asdict(config), reason=reason, status=check_outcome.status)

    def _result(
        self, kernel: Kernel, start: Any, result: SearchResult, counts: dict[str, Any], records: Sequence[Record]
    ) -> BucketResult:
        """Returns the config that is fastest over all cases. Returns no config if the launcher's own choice is as fast.

        The launcher may choose a different config for each case."""
        if start in result.failures:
            return BucketResult(**counts, reason=f"the launcher's own choice failed: {result.failures[start]}")
        timings: dict[str, tuple[dict[str, Any], dict[str, float]]] = {}
        default_logs: dict[str, float] = {}
        case_ids = {str(record.case_id) for record in records}
        for record in records:
            if record.kernel == kernel.name and record.status == "OK" and record.latency_median_ms:
                values, case = dict(record.config or {}), str(record.case_id)
                times = timings.setdefault(str(sorted(values.items())), (values, {}))[1]
                times[case] = math.log(record.latency_median_ms)
                if values == asdict(kernel.config_for(Case(**record.case), self.scheme, self.device)):
                    default_logs.setdefault(case, times[case])  # the launcher's record precedes the finalists' records
        if default_logs.keys() != case_ids:
            faults = [record for record in records if record.kernel == kernel.name and record.status != "OK"]
            reason = f"{faults[0].case_id}: {faults[0].status}: {faults[0].reason}" if faults else "nothing was timed"
            return BucketResult(**counts, reason=reason)
        default_log_sum = sum(default_logs.values())
        log_ms_sums = [(values, sum(times.values())) for values, times in timings.values() if times.keys() == case_ids]
        values, best_log_sum = min(log_ms_sums, key=lambda entry: entry[1], default=({}, default_log_sum))
        if best_log_sum >= default_log_sum:
            return BucketResult(**counts)
        return BucketResult(**counts, best=values, faster=math.exp((default_log_sum - best_log_sum) / len(case_ids)))


@cache
def _card(device: torch.device) -> Device | None:
    """Returns the data-sheet values of a GPU. Returns None for a CPU or an unknown GPU."""
    return identify(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
