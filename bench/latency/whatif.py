"""What another kernel changes in TTFT and ITL: predicted from the ledger and the kernels alone, and measured."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from rooflab.bench.latency.ledger import Kind, Ledger, measured, seconds_of, stepping
from rooflab.bench.timing.timing import time_functions
from rooflab.engine.llm import LLM
from rooflab.engine.probes import PRODUCTS, packed, probes, real
from rooflab.kernels import registry
from rooflab.kernels.choices import Phase, bucket_of
from rooflab.kernels.registry import Kernel

BUDGET_S = 0.5
"""For the kernels of one call."""
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
    """One change for each op of the step whose kernel would take `factors[op]` of its time."""
    found = []
    for op, factor in factors.items():
        if own := ledger.ms_of(op):
            before = next(row.kernel or row.basis for row in ledger.rows if row.op == op)
            found.append(_predicted(ledger, op, before, f"{factor:g}x", factor, own * (factor - 1)))
    return found


def _predicted(ledger: Ledger, op: str, before: str, after: str, ratio: float, change_ms: float) -> Change:
    figure = "ITL" if ledger.kind == "decode" else "TTFT"
    share = ledger.ms_of(op) / ledger.step_ms
    return Change(figure, op, before, after, ratio, share, ledger.step_ms, ledger.step_ms + change_ms)


def swap(llm: LLM, other: LLM, op: str, kernel: str, kind: Kind, batch: int, context: int) -> Change | None:
    """A step of `llm`, and of `other`, which has `kernel` for `op`: the change predicted, and measured in turn.

    The prediction adds to the step, for each call, the difference of both kernels' times alone on the step's shapes, by
    the bench's protocol: the step, too, finds each layer's data in no cache.  The ratio of both would multiply what a
    call costs in the engine alone: it said +13% for a norm that measured +4%.

    None if a step of this kind does not call the op.
    """
    few = kind == "prefill"
    before = measured(llm, kind, batch, context, steps=6 if few else 16)
    calls = sum(row.calls for row in before.rows if row.op == op)
    if not calls:
        return None
    phase: Phase = kind
    rows = batch if kind == "decode" else context
    bucket = bucket_of(phase, rows)
    current = next(one.kernel for one in llm.ops.choices if (one.op, one.bucket) == (op, bucket))
    asked = registry.get_kernel(op, kernel)
    times = _alone_ms(op, phase, rows, (current, asked), llm, context)
    change_ms = (times[asked.name] - times[current.name]) * (1 if op in PRODUCTS else calls)
    found = _predicted(before, op, current.name, kernel, times[asked.name] / times[current.name], change_ms)
    base, changed = _in_turn(llm, other, kind, batch, context, *((5, 1) if few else (9, 4)))
    # The ratio of both in turn, on the step of the ledger: what the machine does between them is in both.
    return replace(found, measured_ms=found.step_ms * changed / base)


def _alone_ms(op: str, phase: Phase, rows: int, kernels: Sequence[Kernel], llm: LLM, context: int) -> dict[str, float]:
    """Milliseconds of a call by kernel; of products, of all calls of a step."""
    sums = dict.fromkeys((kernel.name for kernel in kernels), 0.0)
    each = probes(op, phase, rows, llm.limits)
    for place, meta in enumerate(each):
        inputs = {
            name: value.to(llm.device) if isinstance(value, torch.Tensor) else value
            for name, value in real(meta, llm.limits.block_size, context).items()
        }
        calls = {kernel.name: partial(kernel.fn, **_taken(kernel, inputs)) for kernel in kernels}
        timed = time_functions(calls, llm.device, budget_s=BUDGET_S)
        # The head's product comes last, and once.
        times = llm.arch.num_layers if op in PRODUCTS and place + 1 < len(each) else 1
        for name, samples in timed.items():
            sums[name] += 1e3 * times * samples.median_s
    return sums


def _taken(kernel: Kernel, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """What the kernel takes of the inputs, a weight as it packs it."""
    found = {name: value for name, value in inputs.items() if name in kernel.accepted}
    if kernel.op in PRODUCTS:
        beside = {"scale": inputs["scale"]} if "scale" in inputs else {}
        found["b"] = packed(kernel.prepare, inputs["b"], **beside)
    return found


def _in_turn(llm: LLM, other: LLM, kind: Kind, batch: int, context: int, rounds: int, each: int) -> tuple[float, float]:
    """Median seconds of a step of each engine."""
    contexts = [stepping(one, kind, batch, context, rounds * each + 1) for one in (llm, other)]
    samples: tuple[list[float], list[float]] = [], []
    with contexts[0] as first, contexts[1] as second:
        for step in (first, second):
            step()
        for _ in range(rounds):
            for step, own in zip((first, second), samples, strict=True):
                own += [seconds_of(step) for _ in range(each)]
    return statistics.median(samples[0]), statistics.median(samples[1])
