"""Code that targets share: it times kernels beside each other on given cases, and compares the times."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import geometric_mean
from typing import Any

import torch

from rooflab.bench.commands import MIN_TIMING_S, TIMING_SHARE
from rooflab.bench.core.measure import Measurement
from rooflab.bench.core.record import Record
from rooflab.bench.core.record_files import RunWriter
from rooflab.bench.core.select import default_scheme
from rooflab.bench.core.settings import Settings
from rooflab.bench.suite.entries import BarStatus, Context, EntryOutcome
from rooflab.bench.suite.passed import passed_on_card
from rooflab.kernels import registry
from rooflab.kernels.registry import Kernel
from rooflab.kernels.tuning import bucket_of, recorded_choice, rows_of
from rooflab.reference.spec import DTYPE_NAMES, Case, get_scheme
from rooflab.roofline.model import Ceilings

Own = Sequence[tuple[str, float | None]]
"""Kernels that a launcher takes without a record, each with the most rows for which it is taken; None: any number."""
MANY_ROWS = 1024
KERNEL_S, DRY_KERNEL_S = 0.3, 0.02
"""The seconds for the samples of one kernel on one case."""
_DTYPES = (*DTYPE_NAMES.values(), "tf32", "fp8_e4m3")
NO_LIMITS = Ceilings("none, a dry run", "datasheet", 1e18, dict.fromkeys(_DTYPES, 1e18), 1e18)
"""The ceilings of a dry run, whose figures do not count: measuring the CPU's ceilings would take too long."""


def usable(context: Context, op: str) -> list[Kernel]:
    """The kernels of `op` that this run may launch: no kernel that broke another process of the run."""
    return [kernel for kernel in registry.kernels(op).values() if kernel.id not in registry.excluded()]


def contenders(context: Context, op: str, rungs: Sequence[str] = ()) -> list[Kernel]:
    """The library's kernel, the optimized kernels and the peers; of the optimized only `rungs`, if any are named."""
    found = [kernel for kernel in usable(context, op) if kernel.role != "naive"]
    return [kernel for kernel in found if not rungs or kernel.role != "optimized" or kernel.name in rungs]


def optimized(context: Context, op: str) -> list[Kernel]:
    """The optimized kernels of `op` that this run may launch."""
    return [kernel for kernel in usable(context, op) if kernel.role == "optimized"]


def cases_of(context: Context, op: str, texts: Sequence[str], dry: int = 1) -> list[Case]:
    """The cases that `texts` name; in a dry run, the first `dry` small cases of the op."""
    spec = registry.get_op(op)
    return list(spec.get_cases("smoke")[:dry]) if context.dry_run else [spec.check_case(Case.parse(t)) for t in texts]


def measure(
    context: Context, op: str, kernels: Sequence[Kernel], cases: Sequence[Case], scheme: str | None = None
) -> tuple[list[Record], bool]:
    """Checks and times `kernels` against each other on each case, within the time that is left.

    Returns the records, written as they came, and whether cases were left out.  Continues the run in the folder.
    Raises `ContextBroken` if a kernel makes all further work in this process impossible.
    """
    device, spec = torch.device(context.device), registry.get_op(op)
    name = default_scheme(device) if scheme is None or context.dry_run else scheme
    if name not in spec.schemes and (context.dry_run or scheme is None):
        name = scheme or spec.schemes[0]
    writer, before = RunWriter.going_on(context.out)
    found = [record for record in before if record.op == op]
    if kernels:
        done = {(record.kernel, record.case_id) for record in found}
        cases = [case for case in cases if any((kernel.name, case.id) not in done for kernel in kernels)]
    if not kernels or not cases:
        return found, bool(cases)
    share = TIMING_SHARE * context.seconds / (len(kernels) * len(cases))
    budget_s = DRY_KERNEL_S if context.dry_run else min(KERNEL_S, max(MIN_TIMING_S, share))
    planted = passed_on_card(kernels, name, device)
    asked = Settings(device=context.device, seed=context.seed, budget_s=budget_s, limit_s=context.seconds)
    roofs = NO_LIMITS if context.dry_run else None
    run = Measurement(spec, get_scheme(name), asked, writer.run_id, ceilings=roofs, planted_before=planted)
    new = 0
    for record in run.records(kernels, cases):
        writer.write(record)
        found.append(record)
        new += 1
        if context.left_s < 0 and new % len(kernels) == 0:
            break
    return found, new < len(kernels) * len(cases)


@dataclass(frozen=True)
class Ratio:
    """The speed of one kernel relative to the library's kernel over a set of cases; above 1 the kernel is faster."""

    kernel: str
    by_case: Mapping[str, float]
    base: Mapping[str, str] = field(default_factory=dict)
    """By case, the library's kernel, or the backend of torch that a peer names, whichever is fastest there."""

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
        own = {"kernel": self.kernel, "geomean": self.geomean, "worst": self.worst, "worst case": self.worst_case}
        counts = Counter(self.base.values())
        return own | {"over": ", ".join(f"{name} at {count}" for name, count in counts.most_common())}


def latencies(records: Sequence[Record]) -> dict[str, dict[str, float]]:
    """The median latency in ms by kernel and case, for the kernels that were checked and timed."""
    found: dict[str, dict[str, float]] = {}
    for record in records:
        if record.status == "OK" and record.latency_median_ms is not None and record.basis == "measured":
            found.setdefault(str(record.kernel), {})[str(record.case_id)] = record.latency_median_ms
    return found


def ratios(records: Sequence[Record], cases: Sequence[str]) -> list[Ratio]:
    """Returns a ratio for each optimized kernel timed on all `cases` where the library was timed too, the best first.

    The library is torch's best at each case: its own choice, or a backend or a math mode that a peer names.
    """
    times = latencies(records)
    own = next((str(record.kernel) for record in records if record.role == "library" and record.kernel in times), None)
    named = {str(record.kernel) for record in records if record.role == "peer" and record.backend == "torch"}
    rungs = {str(record.kernel) for record in records if record.role == "optimized"}
    rivals = {own: times[own]} | {name: times[name] for name in sorted(named & times.keys())} if own else {}
    base = {
        case: min((one for one in rivals if case in rivals[one]), key=lambda one: rivals[one][case])
        for case in cases
        if own and case in rivals[own]
    }
    found = []
    for name in rungs & times.keys():
        if cases and all(case in base and case in times[name] for case in cases):
            by_case = {case: rivals[base[case]][case] / times[name][case] for case in cases}
            found.append(Ratio(name, by_case, base))
    return sorted(found, key=lambda ratio: -ratio.geomean)


def launched(op: str, records: Sequence[Record], cases: Sequence[Case], own: Own) -> Ratio | None:
    """The kernels that are chosen before timing: by a committed record of this card, or else as `own` says.

    Returns None if one of these kernels was not timed.
    """
    card = next((str((record.environment.get("gpu") or {}).get("name")) for record in records), "")
    by_kernel: dict[str, list[str]] = {}
    for case in cases:
        rows = rows_of(case) or 1
        first = next(rung for rung, most in own if most is None or rows <= most)
        by_kernel.setdefault(recorded_choice(op, card, bucket_of(rows)).get("kernel", first), []).append(case.id)
    parts = [(name, {one.kernel: one for one in ratios(records, ids)}.get(name)) for name, ids in by_kernel.items()]
    if any(part is None for _, part in parts):
        return None
    by_case = {case: ratio for _, part in parts if part for case, ratio in part.by_case.items()}
    base = {case: name for _, part in parts if part for case, name in part.base.items()}
    return Ratio(", ".join(by_kernel), by_case, base)


def dispatched(op: str, records: Sequence[Record], cases: Sequence[Case]) -> Ratio | None:
    """The ladder as an engine uses it: the best rung in each bucket of rows; None if a bucket has no rung.

    Its name is the name of the rung, or says which rung serves which bucket.
    """
    buckets: dict[str, list[str]] = {}
    for case in cases:
        buckets.setdefault(bucket_of(rows_of(case) or 1), []).append(case.id)
    best_in = {bucket: next(iter(ratios(records, own)), None) for bucket, own in buckets.items()}
    found = [best for best in best_in.values() if best is not None]
    if len(found) < len(buckets) or not found:
        return None
    names = {bucket: best.kernel for bucket, best in best_in.items() if best is not None}
    several = len(set(names.values())) > 1
    name = ", ".join(f"{kernel} in {bucket}" for bucket, kernel in names.items()) if several else found[0].kernel
    by_case = {case: ratio for best in found for case, ratio in best.by_case.items()}
    return Ratio(name, by_case, {case: one for best in found for case, one in best.base.items()})


def why_unmeasured(records: Sequence[Record]) -> str:
    """The reasons why there is no figure; each fault is named once."""
    faults = dict.fromkeys(
        f"{record.op}/{record.kernel}: {record.status}: {record.reason}"
        for record in records
        if record.status != "OK" and record.role != "naive"
    )
    return "; ".join(list(faults)[:4]) or "no optimized kernel was timed on every case"


def unmeasured(records: Sequence[Record], cut: bool, needed: str) -> EntryOutcome:
    """The outcome of a target without a figure, after a fault or for lack of time; a resumed run may give a figure."""
    why = why_unmeasured(records)
    reason = f"no time for every case; {why}" if cut else why
    return EntryOutcome("PARTIAL" if cut else "DONE", reason, "UNMEASURED", needed)


def answer(context: Context, met: bool, needed: str, figures: Mapping[str, Any], lacks: str = "") -> EntryOutcome:
    """The outcome of a target; a dry run has no answer, nor has a run that `lacks` a kernel to compare with."""
    reason = "dry run" if context.dry_run else lacks
    bar: BarStatus = "UNMEASURED" if reason else "MET" if met else "MISSED"
    return EntryOutcome("DONE", reason, bar, needed, figures)


def without_bandwidth(records: Sequence[Record]) -> str:
    """The reason why shares of bandwidth mean nothing here: the records' ceilings were not measured on this card."""
    kinds = {str((record.ceilings or {}).get("kind")) for record in records}
    return "" if kinds == {"measured"} else "no bandwidth was measured on this card"


def against_library(
    context: Context,
    op: str,
    cases: Sequence[str],
    geomean: float,
    own: Own,
    worst: float | None = None,
    scheme: str = "bf16",
    rungs: Sequence[str] = (),
    rivals: Sequence[str] = (),
) -> EntryOutcome:
    """Compares the kernels that a launcher takes with the library's: geometric mean over the cases, and worst case.

    `own` says which it takes, `launched`; the best of all rungs, which is known only afterwards, is a figure beside it.
    `rungs` are the kernels that are meant for these cases; without `rungs`, all are.  `rivals` are kernels without
    which the target says nothing about cases of 1,024 rows and more.
    """
    wanted = cases_of(context, op, cases)
    needed = f"geomean >= {geomean:.2f}" + (f", worst >= {worst:.2f}" if worst is not None else "")
    records, cut = measure(context, op, contenders(context, op, rungs), wanted, scheme)
    best = dispatched(op, records, wanted)
    taken = best if context.dry_run else launched(op, records, wanted, own)
    if best is None or taken is None:
        return unmeasured(records, cut, needed)
    met = taken.geomean >= geomean and (worst is None or taken.worst >= worst)
    beside, lacks = over_rivals(records, taken, wanted, rivals)
    figures = taken.figures | best_of(best) | beside | peak_figures(records, taken)
    return answer(context, met, needed, figures, lacks)


def best_of(best: Ratio) -> dict[str, Any]:
    """Describes the best of all rungs."""
    return {"best of all rungs": f"{best.kernel}: geomean {best.geomean:.3f}, worst {best.worst:.3f}"}


def over_rivals(
    records: Sequence[Record], taken: Ratio, cases: Sequence[Case], rivals: Sequence[str]
) -> tuple[dict[str, Any], str]:
    """The speed relative to each rival, on the cases that it took; and the rivals that are missing for many rows."""
    times = latencies(records)
    large = [case.id for case in cases if (rows_of(case) or 0) >= MANY_ROWS]
    figures = {}
    for name in rivals:
        shared = [case for case in taken.by_case if case in times.get(name, {})]
        if shared:
            own = {case: times[taken.base[case]][case] / taken.by_case[case] for case in shared}
            over = geometric_mean(times[name][case] / own[case] for case in shared)
            figures[f"over {name}"] = f"geomean {over:.3f} of {len(shared)} cases"
    lacking = [name for name in rivals if any(case not in times.get(name, {}) for case in large)]
    return figures, f"no time of {' and of '.join(lacking)} at {MANY_ROWS} rows and more" if lacking else ""


def peak_figures(records: Sequence[Record], ratio: Ratio) -> dict[str, Any]:
    """The share of their bound that the kernels of a ratio reached at best, the ceilings behind the bound, and the
    clock and power of the card at that time."""
    named = {name.split(" in ")[0] for name in ratio.kernel.split(", ")}
    own = [record for record in records if record.kernel in named and record.bound_fraction is not None]
    if not own:
        return {}
    best = max(own, key=lambda record: record.bound_fraction or 0.0)
    kind = (best.ceilings or {}).get("kind")
    return {"of bound at best": best.bound_fraction, "ceilings": kind} | card_figures(best)


def card_figures(record: Record) -> dict[str, Any]:
    """The clock and the power of the card while a kernel was timed: the least and the most that NVML read."""
    clocks = record.clocks or {}
    return {name: clocks[name] for name in ("sm_clock_mhz", "power_w") if clocks.get(name)}


def of_bandwidth(
    context: Context,
    op: str,
    least: Mapping[str, float],
    own: str,
    access: str,
    scheme: str = "bf16",
    rivals: Sequence[str] = (),
) -> EntryOutcome:
    """The bandwidth of the kernel `own` for its least bytes, as a share of what an `access` reached on this card.

    `least` maps each case to the share that the target requires there.  The best of all rungs is a figure beside it.
    With `rivals`, the target says nothing where none of them was timed.
    """
    cases = cases_of(context, op, list(least))
    wanted = {case.id: share for case, share in zip(cases, least.values(), strict=False)}
    needed = ", ".join(f"{share:.0%} at {case}" for case, share in wanted.items())
    kernels = [*optimized(context, op), *(one for one in usable(context, op) if one.name in rivals)]
    records, cut = measure(context, op, kernels, cases, scheme)
    rungs = {kernel.name for kernel in optimized(context, op)}
    shares = {name: found for name, found in bandwidth_shares(records, access).items() if name in rungs}
    complete = {name: found for name, found in shares.items() if found.keys() == wanted.keys()}
    best = max(complete, key=lambda name: min(complete[name][case] / wanted[case] for case in wanted), default=None)
    taken = best if context.dry_run else own
    if best is None or taken not in complete:
        return unmeasured(records, cut, needed)
    figures: dict[str, Any] = {"kernel": taken}
    figures |= {f"share at {case}": share for case, share in complete[taken].items()}
    figures["best of all rungs"] = f"{best}: " + ", ".join(f"{share:.1%}" for share in complete[best].values())
    times = latencies(records)
    beside = {
        case: min((times[name][case], name) for name in rivals if case in times.get(name, {}))
        for case in wanted
        if any(case in times.get(name, {}) for name in rivals)
    }
    figures |= {f"over {name} at {case}": ms / times[taken][case] for case, (ms, name) in beside.items()}
    mine = [record for record in records if record.kernel == taken]
    met = all(complete[taken][case] >= share for case, share in wanted.items())
    lacks = without_bandwidth(mine) or (f"none of {', '.join(rivals)} was timed" if rivals and not beside else "")
    return answer(context, met, needed, figures | card_figures(mine[-1]), lacks)


def bandwidth_shares(records: Sequence[Record], access: str) -> dict[str, dict[str, float]]:
    """By kernel and case, the least bytes over the time, divided by the bandwidth of an access (`read`, `copy`)."""
    found: dict[str, dict[str, float]] = {}
    for record in records:
        rate = ((record.ceilings or {}).get("access_bytes_per_s") or {}).get(access)
        if record.status == "OK" and record.latency_median_ms and record.least_bytes and rate:
            share = record.least_bytes / (record.latency_median_ms * 1e-3) / float(rate)
            found.setdefault(str(record.kernel), {})[str(record.case_id)] = share
    return found
