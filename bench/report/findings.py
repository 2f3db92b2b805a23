"""Finds slow kernels: default kernels slower than the library, and kernels slower than the naive kernel."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from rooflab.bench.core import Record
from rooflab.reference.spec import Case

SLOWER_RATIO = 1.05
"""A kernel is slower if its time divided by the other time exceeds this.  One run cannot show a smaller difference."""


def findings(records: Iterable[Record], default_of: Callable[[str, Case], str | None]) -> list[str]:
    """Returns one sentence for each slow kernel, the slowest first.  A default kernel is compared with the library
    kernel. Every kernel is compared with the naive kernel.

    `default_of(op, case)` returns the kernel that the engine uses by default, or None.  Only records with status OK are
    compared."""
    times_by_case: dict[tuple[str, str, str], dict[str, float]] = {}
    cases: dict[str, Case] = {}
    for record in records:
        if record.kind == "bench" and record.status == "OK" and record.latency_median_ms:
            op, case = str(record.op), str(record.case_id)
            times_by_case.setdefault((op, case, str(record.scheme)), {})[str(record.kernel)] = record.latency_median_ms
            cases[case] = Case(**record.case)
    ratios: dict[tuple[str, str], list[tuple[float, str]]] = {}
    for (op, case, scheme_name), ms_by_kernel in times_by_case.items():
        default_kernel = default_of(op, cases[case])
        for kernel, kernel_ms in ms_by_kernel.items():
            for base_role, subject_text in (("library", f"{op}: the default {kernel}"), ("naive", f"{op}: {kernel}")):
                if (
                    base_role in ms_by_kernel
                    and kernel not in (base_role, "naive")
                    and (base_role == "naive" or kernel == default_kernel)
                ):
                    ratios.setdefault((subject_text, base_role), []).append(
                        (kernel_ms / ms_by_kernel[base_role], f"{case} {scheme_name}")
                    )
    worst_ratios = {key: max(case_ratios) for key, case_ratios in ratios.items() if max(case_ratios)[0] > SLOWER_RATIO}
    sentences = []
    for key, (time_ratio, case) in sorted(worst_ratios.items(), key=lambda item: -item[1][0]):
        num_slower = sum(case_ratio > SLOWER_RATIO for case_ratio, _ in ratios[key])
        location_text = f"in {num_slower} of {len(ratios[key])} cases, most at" if len(ratios[key]) > 1 else "at"
        sentences.append(f"{key[0]} is slower than {key[1]} {location_text} {case}: {time_ratio:.2f} times its time")
    return sentences
