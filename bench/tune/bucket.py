"""Tunes kernels for one range of row numbers (a bucket): searches configs, then checks and times the best."""

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

QUICK_S, QUICK_SAMPLES = 0.01, 5
"""Seconds, and the least number of samples, for one config on one case in the search."""


def config_name(config: Any) -> str:
    """Returns a config as one line of text, such as `block_m=64,num_warps=4`."""
    return ",".join(f"{name}={value}" for name, value in asdict(config).items())


class DeviceTimes:
    """Times the configs of one kernel interleaved, on each given case.  A case's inputs are made only once."""

    def __init__(
        self, kernel: Kernel, spec: OpSpec, cases: Sequence[Case], scheme: Scheme, device: torch.device, seed: int
    ):
        self._kernel, self._spec, self._device, self._seed = kernel, spec, device, seed
        self._cases, self._scheme = cases, scheme
        self._compiled: set[Any] = set()
        self._timer = timer_for(device)
        self._inputs = [Rotation.copies(spec, case, scheme, device, seed) for case in cases]

    def __call__(self, configs: Sequence[Any]) -> dict[Any, Seconds | str]:
        """Returns, for each config, its median seconds on each case, or the reason why it failed."""
        times: dict[Any, Seconds | str] = {**dict.fromkeys(configs, ()), **self._compile(configs)}
        for inputs in self._inputs:
            ready = {}
            for config in configs:
                if isinstance(times[config], str):
                    continue
                try:
                    rotation = Rotation(self._kernel.with_config(config), self._spec, inputs)
                    rotation()  # compiles
                    ready[config_name(config)] = rotation
                except Failed.errors() as error:
                    times[config] = Failed.of(error, "").reason
            if not ready:
                break
            samples = time_functions(
                ready,
                self._device,
                budget_s=QUICK_S * len(ready),
                min_samples=QUICK_SAMPLES,
                seed=self._seed,
                timer=self._timer,
            )
            for config in configs:
                earlier_times = times[config]
                if not isinstance(earlier_times, str):
                    times[config] = (*earlier_times, samples[config_name(config)].median_s)
        return times

    def _compile(self, configs: Sequence[Any]) -> dict[Any, str]:
        """Compiles the new configs of a group into Triton's cache, on all cores.  Returns an error text for each config
        that failed.

        One process would compile the configs in sequence, about 1 s each.  A later launch finds the compiled code in
        the cache."""
        new = [config for config in configs if config not in self._compiled]
        self._compiled.update(new)
        ours = self._kernel.fn.__module__.startswith("rooflab.")
        if self._device.type != "cuda" or self._kernel.backend not in ("triton", "gluon") or not ours:
            return {}
        case = self._cases[0]
        requests = [KernelCase(self._spec.name, self._kernel.name, case, self._scheme, config=config) for config in new]
        answers = zip(new, compile_kernels(requests), strict=True)
        return {config: str(answer) for config, answer in answers if isinstance(answer, CompileFailure)}


def made_up(configs: Sequence[Any]) -> dict[Any, Seconds | str]:
    """Returns invented times from 0.5 to 1.5 ms for a dry run.  Each time depends only on the config."""
    return {config: (random.Random(config_name(config)).uniform(0.5e-3, 1.5e-3),) for config in configs}


SEARCH_SHARE = 0.6
"""The share of the time for the search.  The recorded checks and measurements get the rest."""
FINAL_S, LEAST_FINAL_S = 0.5, 0.02
"""The most and the least seconds of samples for one contender on one case of the recorded measurement."""


@dataclass(frozen=True)
class BucketResult:
    """Holds the tuning result of one kernel for one range of row numbers (a bucket)."""

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
        gain = "" if self.faster is None else f", {self.faster:.3f}x"
        return ", ".join(f"{name}={value}" for name, value in self.best.items()) + gain


@dataclass
class TuningRun:
    """Tunes kernels for each range of row numbers (bucket), and holds the results so far."""

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
        """Returns the name of the file with the records.  The list is empty if there are no records."""
        return [self.writer.path.name] if self.records else []

    @property
    def rows(self) -> list[dict[str, Any]]:
        """Returns one table row for each kernel and each range of row numbers (bucket)."""
        return [asdict(result) | {"result": result.summary} for result in self.results]

    def bucket(self, name: str, cases: Sequence[Case], seconds: float) -> None:
        """Searches and measures configs for the cases of one range of row numbers (a bucket), in about `seconds`."""
        cases = sorted(cases, key=self._work)
        searched = []
        for kernel in self.kernels:
            deadline = time.monotonic() + SEARCH_SHARE * seconds / len(self.kernels)
            searched.append((kernel, *self._search(kernel, name, cases, deadline)))
        if self.dry_run:
            self.results += [self._dry_result(*row) for row in searched]
            return
        finalists = {kernel.name: result.finalists(start) for kernel, start, result, _ in searched}
        records = self._measure(cases, finalists, (1 - SEARCH_SHARE) * seconds)
        self.results += [self._result(*row, records) for row in searched]

    def _cost(self, case: Case) -> Cost:
        return self.spec.cost_of(self.spec.make_inputs(case, self.scheme, torch.device("meta"), self.seed))

    def _work(self, case: Case) -> float:
        cost = self._cost(case)
        return cost.flops + cost.bytes

    def _search(
        self, kernel: Kernel, bucket: str, cases: Sequence[Case], ends: float
    ) -> tuple[Any, SearchResult, dict[str, Any]]:
        """Searches the configs of a kernel on the largest and the smallest case.  Returns the launcher's own choice for
        the largest case, the result of the search, and the numbers of configs."""
        probes, tuning = list(dict.fromkeys((cases[-1], cases[0]))), kernel.tunable
        start = kernel.config_for(cases[-1], self.scheme, self.device)
        legal = [
            config
            for config in kernel.tunable.legal_configs(cases[-1], self.scheme)
            if all(tuning.is_legal(config, case, self.scheme) for case in cases)
        ]
        offered = len({*tuning.configs(cases[-1], self.scheme), start})
        counts = {"kernel": kernel.name, "bucket": bucket, "cases": len(cases)}
        counts |= {"configs": offered, "illegal": offered - len(legal)}
        costs = [self._cost(case) for case in probes]
        bounds = {config: self._by_arithmetic(kernel, config, probes, costs) for config in legal}
        random.Random(self.seed).shuffle(legal)
        legal.sort(key=lambda config: (math.prod(bounds[config][0]), -bounds[config][1]))
        times = made_up if self.dry_run else DeviceTimes(kernel, self.spec, probes, self.scheme, self.device, self.seed)
        result = search(start, legal, lambda config: bounds[config][0], times, ends)
        counts |= {"bounded": result.bounded, "dropped": result.dropped}
        return start, result, counts | {"failed": len(result.failures), "left": result.left}

    def _by_arithmetic(
        self, kernel: Kernel, config: Any, probes: Sequence[Case], costs: Sequence[Cost]
    ) -> tuple[Seconds, float]:
        """Computes the least seconds of a config on each case at the GPU's highest clock.  Also computes the config's
        occupancy on the first case, which orders configs with equal seconds.  Unknown values are 0."""
        card, footprint = _card(self.device), kernel.tunable.footprint
        if card is None:
            return tuple(0.0 for _ in probes), 0.0
        ceilings = card.ceilings(card.max_clock_hz)
        sizes = [footprint(config, case, self.scheme) if footprint else None for case in probes]
        least_times = tuple(least_s(cost, ceilings, size, card.sms) for cost, size in zip(costs, sizes, strict=True))
        size = sizes[0]
        return least_times, occupancy(card, size.threads, size.registers, size.shared_bytes).fraction if size else 0.0

    def _measure(self, cases: Sequence[Case], finalists: Mapping[str, Sequence[Any]], seconds: float) -> list[Record]:
        """Measures every kernel with its launcher's own choice, and each finalist config.  Returns the records."""
        by_name = {kernel.name: kernel for kernel in self.kernels}
        candidates = [
            replace(by_name[name].with_config(config), name=f"{name}#{number}")
            for name, configs in finalists.items()
            for number, config in enumerate(configs)
        ]
        contenders = [*self.kernels, *candidates, *self.beside]
        budget_s = min(FINAL_S, max(LEAST_FINAL_S, seconds / 2 / (len(contenders) * len(cases))))
        settings, records = Settings(device=str(self.device), seed=self.seed, budget_s=budget_s), []
        run = Measurement(self.spec, self.scheme, settings, self.writer.run_id)
        for record in run.records(contenders, cases):
            name, _, number = str(record.kernel).partition("#")
            if name in by_name:
                default_config = by_name[name].config_for(Case(**record.case), self.scheme, self.device)
                config = finalists[name][int(number)] if number else default_config
                record = replace(record, kernel=name, config=asdict(config))
            self.writer.write(record)
            records.append(record)
        self.records += records
        return records

    def _dry_result(self, kernel: Kernel, start: Any, result: SearchResult, counts: dict[str, Any]) -> BucketResult:
        """Returns the config with the least invented time, and checks it on one small case."""
        small = self.spec.get_cases("smoke")[0]
        config = next(iter(result.finalists(start)), start)
        settings = Settings(device=str(self.device), seed=self.seed, roof=False)
        run = Measurement(self.spec, self.scheme, settings)
        outcome = run.check_here(kernel.with_config(config), small)
        reason = "" if outcome.status == "OK" else f"{outcome.status}: {outcome.reason}"
        return BucketResult(**counts, best=asdict(config), reason=reason, status=outcome.status)

    def _result(
        self, kernel: Kernel, start: Any, result: SearchResult, counts: dict[str, Any], records: Sequence[Record]
    ) -> BucketResult:
        """Returns the fastest config of a kernel over all cases, or the launcher's own choice, by the recorded times.

        The launcher may choose another config for each case.  Its time on a case is the time of the config that it
        chooses there."""
        if start in result.failures:
            return BucketResult(**counts, reason=f"the launcher's own choice failed: {result.failures[start]}")
        by_config: dict[str, tuple[dict[str, Any], dict[str, float]]] = {}
        launched: dict[str, float] = {}
        case_ids = {str(record.case_id) for record in records}
        for record in records:
            if record.kernel == kernel.name and record.status == "OK" and record.latency_median_ms:
                values, case = dict(record.config or {}), str(record.case_id)
                times = by_config.setdefault(str(sorted(values.items())), (values, {}))[1]
                times[case] = math.log(record.latency_median_ms)
                if values == asdict(kernel.config_for(Case(**record.case), self.scheme, self.device)):
                    launched.setdefault(case, times[case])  # the launcher's record precedes the finalists' records
        if launched.keys() != case_ids:
            faults = [record for record in records if record.kernel == kernel.name and record.status != "OK"]
            reason = f"{faults[0].case_id}: {faults[0].status}: {faults[0].reason}" if faults else "nothing was timed"
            return BucketResult(**counts, reason=reason)
        default = sum(launched.values())
        complete = [(values, sum(times.values())) for values, times in by_config.values() if times.keys() == case_ids]
        values, total = min(complete, key=lambda entry: entry[1], default=({}, default))
        if total >= default:
            return BucketResult(**counts)
        return BucketResult(**counts, best=values, faster=math.exp((default - total) / len(case_ids)))


@cache
def _card(device: torch.device) -> Device | None:
    """Returns the data sheet of a GPU.  Returns None for a CPU, and for a GPU that is not in the table."""
    return identify(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
