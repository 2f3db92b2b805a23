"""What another kernel changes in TTFT and ITL: predicted from the ledger and the kernels alone, and measured."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch

from rooflab.bench.core import time_functions, why_noisy
from rooflab.bench.latency.ledger import Ledger, LedgerRow, chosen, measured, seconds_of, stepping
from rooflab.engine.choose.model_shapes import DECODE, FUSED, PRODUCTS, model_inputs, packed, real
from rooflab.engine.llm import LLM
from rooflab.kernels._waiting import run_times, waiting_since
from rooflab.kernels.registry import Kernel
from rooflab.roofline.steps import Kind

ROUNDS = 30
"""The number of timed calls of each kernel alone."""
BUDGET_S = 0.5
"""Seconds of timing for the kernels of one call."""
WON = 0.97
"""A kernel or an engine has won if it takes at most this share of the time before."""


@dataclass(frozen=True)
class PhaseChange:
    """One phase before and after a swap."""

    figure: str
    """TTFT or ITL, as the time of a step."""
    op: str
    before: str
    after: str
    """The names of the kernels."""
    kernel: float
    """The time of the kernel after over the time of the kernel before, each alone."""
    share: float
    """The share of the op in the step."""
    before_ms: float
    """Milliseconds of the step with the kernel before."""
    predicted_ms: float
    measured_ms: float | None = None
    noise: str = ""
    """Why the times are NOISY; empty if they are not."""

    def row(self) -> dict[str, Any]:
        """One line of a table.  NOISY times give no ratio."""
        row = {name: value for name, value in asdict(self).items() if name != "noise"}
        for name in ("predicted", "measured"):
            row[f"{name}_%"] = None if row[f"{name}_ms"] is None else 100 * (row[f"{name}_ms"] / self.before_ms - 1)
        return row | (dict.fromkeys(("kernel", "share", "predicted_%", "measured_%")) if self.noise else {})

    def verdict(self) -> str:
        """Says in words whether a faster kernel makes a faster engine."""
        if self.noise:
            return f"{self.figure} with {self.op}/{self.after}: NOISY, and so no verdict: {self.noise}"
        engine = (self.predicted_ms if self.measured_ms is None else self.measured_ms) / self.before_ms
        words = (
            f"{self.op}/{self.after} takes {self.kernel:.2f} of {self.before}'s time, {self.share:.0%} of the step; "
        )
        words += f"{self.figure} {engine:.2f} of before{', predicted' * (self.measured_ms is None)}"
        return "the kernel won, the engine did not: " * (self.kernel <= WON < engine) + words


def scale(ledger: Ledger, factors: Mapping[str, float]) -> list[PhaseChange]:
    """One change for each op of the step whose kernel would take `factors[op]` of its time."""
    changes = []
    for op, factor in factors.items():
        if ms := ledger.ms_of(op):
            before = next(row.kernel or row.basis for row in ledger.rows if row.op == op)
            changes.append(_predicted(ledger, op, before, f"{factor:g}x", factor, ms * (factor - 1)))
    return changes


def _predicted(ledger: Ledger, op: str, before: str, after: str, ratio: float, change_ms: float) -> PhaseChange:
    figure = "ITL" if ledger.kind == "decode" else "TTFT"
    share = ledger.ms_of(op) / ledger.step_ms
    predicted_ms = ledger.step_ms + change_ms
    return PhaseChange(figure, op, before, after, ratio, share, ledger.step_ms, predicted_ms, noise=ledger.noise)


def swap(llm: LLM, other: LLM, op: str, kernel: Kernel, kind: Kind, batch: int, context: int) -> PhaseChange | None:
    """A step of `llm`, and of `other`, which has `kernel` for `op`: the change predicted, and measured in turn.

    The prediction adds to the step, for each call, the difference of both kernels' times alone on the call's shape, as
    in a step: products behind an empty cache, by the bench's protocol; other ops of a CPU behind a layer's weights.
    The ratio of both would multiply what a call costs in the engine alone: it said +13% for a norm that measured +4%.

    None if a step of this kind does not call the op.
    """
    short = kind == "prefill"
    before = measured(llm, kind, batch, context, steps=6 if short else 16)
    rows = [row for row in before.rows if row.op == op]
    kernels, others = (chosen(engine, kind, batch, context) for engine in (llm, other))
    current = kernels.get(op)
    if not rows or current is None:
        return None
    began = run_times()
    times = _alone_ms(rows, kind, (current, kernel), llm, context)
    ratio = times[kernel.name] / times[current.name]
    change = _predicted(before, op, current.name, kernel.name, ratio, times[kernel.name] - times[current.name])
    rounds, each = (5, 1) if short else (16, 3)
    steps = rounds * each + 1
    with stepping(llm, kind, batch, context, steps) as first, stepping(other, kind, batch, context, steps) as second:
        pair = (first, base := list[float]()), (second, changed := list[float]())
        first(), second()
        for _ in range(rounds):
            for step, seconds in pair:
                seconds += [seconds_of(step) for _ in range(each)]
    same = kernels.keys() - {op, DECODE, FUSED, *PRODUCTS}
    differs = sorted(name for name in same if kernels[name] != others.get(name))
    noise = f"the second engine has another kernel for {', '.join(differs)} too" if differs else change.noise
    noise = noise or why_noisy(base, waiting_since(began)) or why_noisy(changed, None)
    # The ratio of both in turn, on the step of the ledger: what the machine does between them is in both.
    ratio = statistics.median(changed) / statistics.median(base)
    return replace(change, measured_ms=change.before_ms * ratio, noise=noise)


def _alone_ms(
    rows: Sequence[LedgerRow], kind: Kind, kernels: Sequence[Kernel], llm: LLM, context: int
) -> dict[str, float]:
    """Milliseconds of all calls of an op in a step, by kernel."""
    sums = dict.fromkeys((kernel.name for kernel in kernels), 0.0)
    for row in rows:
        probe = real(_probe_of(row, kind, llm), llm.limits.block_size, context)
        inputs = {name: x.to(llm.device) if isinstance(x, torch.Tensor) else x for name, x in probe.items()}
        calls = {kernel.name: partial(kernel.fn, **_taken(kernel, inputs)) for kernel in kernels}
        if row.op in PRODUCTS or llm.device.type == "cuda":
            timed = time_functions(calls, llm.device, budget_s=BUDGET_S)
            seconds = {name: samples.median_s for name, samples in timed.items()}
        else:
            seconds = _behind_weights(calls, llm)
        for name in sums:
            sums[name] += 1e3 * row.calls * seconds[name]
    return sums


def _probe_of(row: LedgerRow, kind: Kind, llm: LLM) -> dict[str, Any]:
    """The arguments of such a call, as meta tensors."""
    first, *_ = sizes = [int(size) for size in re.findall(r"\d+", row.shape)]
    each = model_inputs(DECODE if (row.op, kind) == ("paged_attention", "decode") else row.op, first, llm.limits)
    return next(inputs for inputs in each if "b" not in inputs or list(inputs["b"].shape[::-1]) == sizes[1:])


def _behind_weights(calls: Mapping[str, Callable[[], Any]], llm: LLM) -> dict[str, float]:
    """Median seconds of calls in turn on a CPU, with as many bytes read before each as a layer's weights have.

    The bench's protocol empties the last-level cache too, which holds a kernel's code and its inputs in a step: for
    kernels of several small calls it said twice what the step showed.
    """
    parts = llm.arch.parameters()
    weights = torch.ones((parts.attention + parts.mlp) // llm.arch.num_layers, dtype=llm.dtype)
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(ROUNDS + 2):
        for name, call in calls.items():
            weights.sum()
            seconds = seconds_of(call)
            if turn >= 2:
                samples[name].append(seconds)
    return {name: statistics.median(seconds) for name, seconds in samples.items()}


def _taken(kernel: Kernel, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """The inputs that the kernel accepts, with a weight as it packs it."""
    taken = {name: value for name, value in inputs.items() if name in kernel.accepted}
    if kernel.op in PRODUCTS:
        others = {name: value for name, value in inputs.items() if name != "b"}
        taken["b"] = packed(kernel.prepare, inputs["b"], **others)
    return taken
