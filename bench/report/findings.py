"""Finds default kernels that are slower than the library, and kernels that are slower than naive."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from rooflab.bench.core import Record
from rooflab.reference.spec import Case

SLOWER = 1.05
"""A kernel is slower if its time divided by the other time exceeds this.  One run cannot show a smaller difference."""


def findings(records: Iterable[Record], default_of: Callable[[str, Case], str | None]) -> list[str]:
    """Returns one sentence for each kernel that is too slow, the worst first.  A default kernel is compared with the
    library, and every kernel is compared with the naive kernel.

    `default_of(op, case)` gives the kernel that an engine would use, or None.  Only records with status OK are
    compared."""
    groups: dict[tuple[str, str, str], dict[str, float]] = {}
    cases: dict[str, Case] = {}
    for record in records:
        if record.kind == "bench" and record.status == "OK" and record.latency_median_ms:
            op, case = str(record.op), str(record.case_id)
            groups.setdefault((op, case, str(record.scheme)), {})[str(record.kernel)] = record.latency_median_ms
            cases[case] = Case(**record.case)
    ratios: dict[tuple[str, str], list[tuple[float, str]]] = {}
    for (op, case, scheme), times in groups.items():
        default = default_of(op, cases[case])
        for kernel, ms in times.items():
            for base, subject in (("library", f"{op}: the default {kernel}"), ("naive", f"{op}: {kernel}")):
                if base in times and kernel not in (base, "naive") and (base == "naive" or kernel == default):
                    ratios.setdefault((subject, base), []).append((ms / times[base], f"{case} {scheme}"))
    worst_ratios = {key: max(case_ratios) for key, case_ratios in ratios.items() if max(case_ratios)[0] > SLOWER}
    sentences = []
    for key, (ratio, case) in sorted(worst_ratios.items(), key=lambda item: -item[1][0]):
        slower = sum(case_ratio > SLOWER for case_ratio, _ in ratios[key])
        location = f"in {slower} of {len(ratios[key])} cases, most at" if len(ratios[key]) > 1 else "at"
        sentences.append(f"{key[0]} is slower than {key[1]} {location} {case}: {ratio:.2f} times its time")
    return sentences
