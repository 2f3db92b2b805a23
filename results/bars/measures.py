"""What the bars share: they time kernels beside each other on given cases, and compare the times."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import geometric_mean
from typing import Any

import torch

from rooflab.bench.calls.selection import default_scheme
from rooflab.bench.check.check import BROKEN, already_broken
from rooflab.bench.check.isolated import passed_here
from rooflab.bench.commands import LEAST_S, TIMING_SHARE
from rooflab.bench.measure.measure import measure_op
from rooflab.bench.processes.running import ContextBroken, note
from rooflab.bench.records.files import going_on
from rooflab.bench.records.record import Record
from rooflab.bench.suite.entries import BarStatus, Context, Outcome
from rooflab.kernels import registry
from rooflab.kernels.choices import launch_bucket, rows_of
from rooflab.kernels.registry import Kernel
from rooflab.reference.spec import DTYPE_NAMES, Case, get_scheme
from rooflab.roofline.model import Ceilings

KERNEL_S, DRY_KERNEL_S = 0.3, 0.02
"""Seconds for the samples of one kernel on one case."""
_DTYPES = (*DTYPE_NAMES.values(), "tf32", "fp8_e4m3")
NO_LIMITS = Ceilings("none, a dry run", "datasheet", 1e18, dict.fromkeys(_DTYPES, 1e18), 1e18)
"""Ceilings of a dry run, whose figures do not count: measuring the CPU's ceilings would take as long as the rest."""


def usable(context: Context, op: str) -> list[Kernel]:
    """The kernels of `op` that this run may launch: none of those that broke another process of it."""
    return [kernel for kernel in registry.kernels(op).values() if kernel.id not in registry.excluded()]


def contenders(context: Context, op: str, rungs: Sequence[str] = ()) -> list[Kernel]:
    """The library's kernel, the optimized kernels and the peers; of the optimized, only `rungs` if any are named."""
    found = [kernel for kernel in usable(context, op) if kernel.role != "naive"]
    return [kernel for kernel in found if not rungs or kernel.role != "optimized" or kernel.name in rungs]


def optimized(context: Context, op: str) -> list[Kernel]:
    """The optimized kernels of `op` that this run may launch."""
    return [kernel for kernel in usable(context, op) if kernel.role == "optimized"]


def cases_of(context: Context, op: str, texts: Sequence[str], dry: int = 1) -> list[Case]:
    """The cases that `texts` name; in a dry run the first `dry` small cases of the op."""
    spec = registry.get_op(op)
    return list(spec.get_cases("smoke")[:dry]) if context.dry_run else [spec.check_case(Case.parse(t)) for t in texts]


def measure(
    context: Context, op: str, kernels: Sequence[Kernel], cases: Sequence[Case], scheme: str | None = None
) -> tuple[list[Record], bool]:
    """Checks and times `kernels` against each other on each case, as far as the time allows.

    Returns the records, written as they came, and whether cases were left out.  Continues the run in the folder.
    Raises `ContextBroken` if a kernel makes all further work in this process impossible.
    """
    device, spec = torch.device(context.device), registry.get_op(op)
    name = default_scheme(device) if scheme is None or context.dry_run else scheme
    if name not in spec.schemes and (context.dry_run or scheme is None):
        name = scheme or spec.schemes[0]
    writer, before = going_on(context.out)
    found = [record for record in before if record.op == op]
    if kernels:
        done = {(record.kernel, record.case_id) for record in found}
        cases = [case for case in cases if any((kernel.name, case.id) not in done for kernel in kernels)]
    if not kernels or not cases:
        return found, bool(cases)
    share = TIMING_SHARE * context.seconds / (len(kernels) * len(cases))
    budget_s = DRY_KERNEL_S if context.dry_run else min(KERNEL_S, max(LEAST_S, share))
    options: dict[str, Any] = {"ceilings": NO_LIMITS} if context.dry_run else {}
    passed = passed_here(kernels, device)
    options["planted_before"] = frozenset(kernel.name for kernel in kernels if (kernel.id, name) in passed)
    new = 0
    for record in measure_op(
        spec, kernels, cases, get_scheme(name), device,
        budget_s=budget_s, run_id=writer.run_id, seed=context.seed, **options,
    ):  # fmt: skip
        if not record.reason.startswith(BROKEN):  # a record with that reason says nothing of its kernel
            writer.write(record)
            found.append(record)
        new += 1
        if context.left_s < 0 and new % len(kernels) == 0:
            break
    broken = already_broken(device)
    if broken:
        raise ContextBroken(broken)
    note(())
    return found, new < len(kernels) * len(cases)


@dataclass(frozen=True)
class Ratio:
    """The speed of one kernel relative to the library's over a set of cases; above 1 the kernel is faster."""

    kernel: str
    by_case: Mapping[str, float]

    @property
    def geomean(self) -> float:
        return geometric_mean(self.by_case.values())

    @property
    def worst_case(self) -> str:
        """The case in which the kernel is slowest relative to the library's."""
        return min(self.by_case, key=lambda case: self.by_case[case])

    @property
    def worst(self) -> float:
        return self.by_case[self.worst_case]

    @property
    def figures(self) -> dict[str, Any]:
        return {"kernel": self.kernel, "geomean": self.geomean, "worst": self.worst, "worst case": self.worst_case}


def latencies(records: Sequence[Record]) -> dict[str, dict[str, float]]:
    """Median latency in ms by kernel and case, of the kernels that were checked and timed."""
    found: dict[str, dict[str, float]] = {}
    for record in records:
        if record.status == "OK" and record.latency_median_ms is not None and record.basis == "measured":
            found.setdefault(str(record.kernel), {})[str(record.case_id)] = record.latency_median_ms
    return found


def ratios(records: Sequence[Record], cases: Sequence[str]) -> list[Ratio]:
    """One ratio for each optimized kernel timed on all `cases`, where the library's was timed too, best geomean first.

    The library is torch's best at each case: its own choice, or a backend that a peer names.
    """
    times = latencies(records)
    libraries = {str(record.kernel) for record in records if record.role == "library"}
    named = {str(record.kernel) for record in records if record.role == "peer" and record.backend == "torch"}
    rungs = {str(record.kernel) for record in records if record.role == "optimized"}
    own = next((times[name] for name in libraries if name in times), {})
    base = {
        case: min(ms, *(times[name].get(case, math.inf) for name in named & times.keys()), math.inf)
        for case, ms in own.items()
    }
    found = []
    for name in rungs & times.keys():
        if cases and all(case in base and case in times[name] for case in cases):
            found.append(Ratio(name, {case: base[case] / times[name][case] for case in cases}))
    return sorted(found, key=lambda ratio: -ratio.geomean)


def dispatched(op: str, records: Sequence[Record], cases: Sequence[Case]) -> Ratio | None:
    """The ladder as an engine uses it: the best rung in each bucket of rows; None if a bucket has no rung.

    Its name is the name of the rung, or says which rung serves which bucket.
    """
    buckets: dict[str, list[str]] = {}
    for case in cases:
        buckets.setdefault(launch_bucket(op, rows_of(case) or 1), []).append(case.id)
    chosen = {bucket: next(iter(ratios(records, own)), None) for bucket, own in buckets.items()}
    found = [best for best in chosen.values() if best is not None]
    if len(found) < len(buckets) or not found:
        return None
    names = {bucket: best.kernel for bucket, best in chosen.items() if best is not None}
    several = len(set(names.values())) > 1
    name = ", ".join(f"{kernel} in {bucket}" for bucket, kernel in names.items()) if several else found[0].kernel
    return Ratio(name, {case: ratio for best in found for case, ratio in best.by_case.items()})


def why_unmeasured(records: Sequence[Record]) -> str:
    """Why there is no figure; each fault is named once."""
    faults = dict.fromkeys(
        f"{record.op}/{record.kernel}: {record.status}: {record.reason}"
        for record in records
        if record.status != "OK" and record.role != "naive"
    )
    return "; ".join(list(faults)[:4]) or "no optimized kernel was timed on every case"


def unmeasured(records: Sequence[Record], cut: bool, needed: str) -> Outcome:
    """The outcome of a bar without a figure, because of a fault or for lack of time; a resumed run may have it."""
    why = why_unmeasured(records)
    reason = f"no time for every case; {why}" if cut else why
    return Outcome("PARTIAL" if cut else "DONE", reason, "UNMEASURED", needed)


def answer(context: Context, met: bool, needed: str, figures: Mapping[str, Any], lacks: str = "") -> Outcome:
    """A bar's outcome; a dry run gives no answer, and neither does a run that `lacks` what the bar is compared with."""
    reason = "dry run" if context.dry_run else lacks
    bar: BarStatus = "UNMEASURED" if reason else "MET" if met else "MISSED"
    return Outcome("DONE", reason, bar, needed, figures)


def without_bandwidth(records: Sequence[Record]) -> str:
    """Why shares of bandwidth mean nothing here: the ceilings of the records were not measured on this card."""
    kinds = {str((record.ceilings or {}).get("kind")) for record in records}
    return "" if kinds == {"measured"} else "no bandwidth was measured on this card"


def against_library(
    context: Context,
    op: str,
    cases: Sequence[str],
    geomean: float,
    worst: float | None = None,
    scheme: str = "bf16",
    rungs: Sequence[str] = (),
) -> Outcome:
    """The best optimized kernel of each bucket against the library's: geometric mean over the cases, and the worst.

    `rungs` are the kernels that are meant for these cases; without `rungs`, all are.
    """
    wanted = cases_of(context, op, cases)
    needed = f"geomean >= {geomean:.2f}" + (f", worst >= {worst:.2f}" if worst is not None else "")
    records, cut = measure(context, op, contenders(context, op, rungs), wanted, scheme)
    best = dispatched(op, records, wanted)
    if best is None:
        return unmeasured(records, cut, needed)
    met = best.geomean >= geomean and (worst is None or best.worst >= worst)
    return answer(context, met, needed, best.figures | peak_figures(records, best))


def peak_figures(records: Sequence[Record], ratio: Ratio) -> dict[str, Any]:
    """How near the kernels of a ratio came to their bound, at best, and under which ceilings."""
    named = {name.split(" in ")[0] for name in ratio.kernel.split(", ")}
    own = [record for record in records if record.kernel in named and record.bound_fraction is not None]
    if not own:
        return {}
    best = max(own, key=lambda record: record.bound_fraction or 0.0)
    clocks = (best.clocks or {}).get("sm_clock_mhz")
    kind = (best.ceilings or {}).get("kind")
    return {"of bound at best": best.bound_fraction, "ceilings": kind} | ({"sm_clock_mhz": clocks} if clocks else {})


def of_bandwidth(context: Context, op: str, least: Mapping[str, float], scheme: str = "bf16") -> Outcome:
    """The best optimized kernel's least bytes over its time, as a share of the bandwidth measured on this card.

    `least` maps each case to the share that the bar requires there.
    """
    cases = cases_of(context, op, list(least))
    wanted = {case.id: share for case, share in zip(cases, least.values(), strict=False)}
    needed = ", ".join(f"{share:.0%} at {case}" for case, share in wanted.items())
    records, cut = measure(context, op, optimized(context, op), cases, scheme)
    shares = bandwidth_shares(records)
    complete = {name: found for name, found in shares.items() if found.keys() == wanted.keys()}
    if not complete:
        return unmeasured(records, cut, needed)
    best = max(complete, key=lambda name: min(complete[name][case] / wanted[case] for case in wanted))
    figures: dict[str, Any] = {"kernel": best} | {f"share at {case}": share for case, share in complete[best].items()}
    met = all(complete[best][case] >= share for case, share in wanted.items())
    lacks = without_bandwidth([record for record in records if record.kernel == best])
    return answer(context, met, needed, figures, lacks)


def bandwidth_shares(records: Sequence[Record]) -> dict[str, dict[str, float]]:
    """Least bytes over time, divided by the bandwidth of the ceilings, by kernel and case."""
    found: dict[str, dict[str, float]] = {}
    for record in records:
        rate = (record.ceilings or {}).get("hbm_bytes_per_s")
        if record.status == "OK" and record.latency_median_ms and record.least_bytes and rate:
            share = record.least_bytes / (record.latency_median_ms * 1e-3) / float(rate)
            found.setdefault(str(record.kernel), {})[str(record.case_id)] = share
    return found
