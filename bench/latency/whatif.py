"""What another kernel changes in TTFT and ITL: predicted from the ledger and the kernels alone, and measured."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rooflab.bench.latency.ledger import Kind, Ledger, measured, seconds_of, stepping
from rooflab.engine.llm import LLM
from rooflab.engine.settle import time_kernels
from rooflab.kernels import registry
from rooflab.kernels.choices import Phase, bucket_of

WON = 0.97
"""A kernel, or an engine, that takes at most so much of the time before has won."""


@dataclass(frozen=True)
class Change:
    """One phase before and after a swap; times in milliseconds."""

    figure: str
    """TTFT or ITL, as the time of a step."""
    op: str
    before: str
    after: str
    """Names of kernels."""
    kernel_ratio: float
    """Time of the kernel after over that before, each alone."""
    share: float
    """Of the op in the step."""
    step_ms: float
    predicted_ms: float
    measured_ms: float | None = None

    def row(self) -> dict[str, Any]:
        """One line of a table."""
        predicted = self.predicted_ms / self.step_ms - 1
        actual = None if self.measured_ms is None else self.measured_ms / self.step_ms - 1
        return {
            "figure": self.figure, "op": self.op, "before": self.before, "after": self.after,
            "kernel": self.kernel_ratio, "share": self.share, "before_ms": self.step_ms,
            "predicted_ms": self.predicted_ms, "measured_ms": self.measured_ms,
            "predicted_%": 100 * predicted, "measured_%": None if actual is None else 100 * actual,
        }  # fmt: skip

    def verdict(self) -> str:
        """In words, whether the kernel's win is one of the engine."""
        after = self.predicted_ms if self.measured_ms is None else self.measured_ms
        engine = after / self.step_ms
        kernel = f"{self.op}/{self.after} takes {self.kernel_ratio:.2f} of {self.before}'s time"
        said = f"{self.figure} {engine:.2f} of before" + ("" if self.measured_ms is not None else ", predicted")
        if self.kernel_ratio <= WON < engine:
            return f"the kernel won, the engine did not: {kernel}, {self.share:.0%} of the step; {said}"
        return f"{kernel}, {self.share:.0%} of the step; {said}"


def scale(ledger: Ledger, factors: Mapping[str, float]) -> list[Change]:
    """One change for each op whose kernel would take `factors[op]` of its time.

    Raises `ValueError` on an op that the step does not have.
    """
    ops = dict.fromkeys(row.op for row in ledger.rows)
    found = []
    for op, factor in factors.items():
        if op not in ops:
            raise ValueError(f"kernel: expected one of {', '.join(ops)}, got {op!r}")
        before = next(row.kernel or row.basis for row in ledger.rows if row.op == op)
        found.append(_predicted(ledger, op, before, f"{factor:g}x", factor))
    return found


def _predicted(ledger: Ledger, op: str, before: str, after: str, ratio: float) -> Change:
    own = ledger.ms_of(op)
    figure = "ITL" if ledger.kind == "decode" else "TTFT"
    after_ms = ledger.step_ms + own * (ratio - 1)
    return Change(figure, op, before, after, ratio, own / ledger.step_ms, ledger.step_ms, after_ms)


def swap(
    options: Mapping[str, Any], op: str, kernel: str, kind: Kind, batch: int, context: int, rounds: int = 9
) -> Change:
    """The engine with its own kernels and with `kernel` for `op`: predicted, and measured in turn.

    The prediction is the op's time in the ledger, multiplied by the ratio of both kernels' times alone on the shapes of
    the step (`settle.time_kernels`, with weights in more copies than a cache holds).  Raises `ValueError` where the
    engine cannot take the kernel.
    """
    llm = LLM(**options)
    own = dict(options.get("swap") or {}) | {op: kernel}
    other = LLM(**{**options, "swap": own})
    before = measured(llm, kind, batch, context)
    phase: Phase = kind
    rows = batch if kind == "decode" else context
    bucket = bucket_of(phase, rows)
    current = next((one.kernel for one in llm.ops.choices if (one.op, one.bucket) == (op, bucket)), None)
    if current is None:
        raise ValueError(f"swap: expected an op of a step of {kind}, got {op!r}")
    asked = registry.get_kernel(op, kernel)
    ratio = 1.0
    if current is not asked:
        times = time_kernels(op, bucket, rows, [current, asked], llm.limits, context)
        ratio = times[asked.name] / times[current.name]
    found = _predicted(before, op, current.name, kernel, ratio)
    base, changed = _in_turn(llm, other, kind, batch, context, rounds)
    # The ratio of both in turn, on the step of the ledger: what the machine does between them is in both.
    return Change(**{**vars(found), "measured_ms": found.step_ms * changed / base})


def _in_turn(llm: LLM, other: LLM, kind: Kind, batch: int, context: int, rounds: int) -> tuple[float, float]:
    """Median seconds of a step of each engine."""
    each = 4
    contexts = [stepping(one, kind, batch, context, (rounds + 1) * each) for one in (llm, other)]
    samples: tuple[list[float], list[float]] = [], []
    with contexts[0] as first, contexts[1] as second:
        for step in (first, second):
            step()
        for _ in range(rounds):
            for step, own in zip((first, second), samples, strict=True):
                own += [seconds_of(step) for _ in range(each)]
    return statistics.median(samples[0]), statistics.median(samples[1])
