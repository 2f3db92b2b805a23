"""Predicts and measures how another kernel changes TTFT and ITL.  The prediction uses the times of ops and kernels."""

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
"""The number of timed calls of each kernel outside the engine."""
BUDGET_S = 0.5
"""Seconds to time all kernels on one shape."""
WON = 0.97
"""A kernel or an engine has won if its time is at most this share of the earlier time."""


@dataclass(frozen=True)
class PhaseChange:
    """Holds the latency of prefill or decode before and after a change of one kernel."""

    figure: str
    """The name of the latency, TTFT or ITL.  The time of a step stands for the latency."""
    op: str
    before: str
    after: str
    """The name of the new kernel; `before` is the name of the old kernel."""
    kernel: float
    """The time of the new kernel, divided by the time of the old kernel.  Each is timed outside the engine."""
    share: float
    """The op's share of the step's time."""
    before_ms: float
    """The milliseconds of the step with the old kernel."""
    predicted_ms: float
    measured_ms: float | None = None
    noise: str = ""
    """Why the times are NOISY; empty if they are not."""

    def row(self) -> dict[str, Any]:
        """Returns the values of one table row.  If the times are NOISY, the row has no ratios."""
        row = {name: value for name, value in asdict(self).items() if name != "noise"}
        for name in ("predicted", "measured"):
            row[f"{name}_%"] = None if row[f"{name}_ms"] is None else 100 * (row[f"{name}_ms"] / self.before_ms - 1)
        return row | (dict.fromkeys(("kernel", "share", "predicted_%", "measured_%")) if self.noise else {})

    def verdict(self) -> str:
        """Returns a sentence that says whether the faster kernel makes the engine faster."""
        if self.noise:
            return f"{self.figure} with {self.op}/{self.after}: NOISY, and so no verdict: {self.noise}"
        engine = (self.predicted_ms if self.measured_ms is None else self.measured_ms) / self.before_ms
        words = (
            f"{self.op}/{self.after} takes {self.kernel:.2f} of {self.before}'s time, {self.share:.0%} of the step; "
        )
        words += f"{self.figure} {engine:.2f} of before{', predicted' * (self.measured_ms is None)}"
        return "the kernel won, the engine did not: " * (self.kernel <= WON < engine) + words


def scale(ledger: Ledger, factors: Mapping[str, float]) -> list[PhaseChange]:
    """Predicts a step's time for each op in `factors`, if the op's kernel took `factors[op]` times its present time."""
    changes = []
    for op, factor in factors.items():
        if ms := ledger.ms_of(op):
            old_kernel = next(row.kernel or row.basis for row in ledger.rows if row.op == op)
            changes.append(_predicted(ledger, op, old_kernel, f"{factor:g}x", factor, ms * (factor - 1)))
    return changes


def _predicted(ledger: Ledger, op: str, before: str, after: str, ratio: float, change_ms: float) -> PhaseChange:
    figure = "ITL" if ledger.kind == "decode" else "TTFT"
    share = ledger.ms_of(op) / ledger.step_ms
    predicted_ms = ledger.step_ms + change_ms
    return PhaseChange(figure, op, before, after, ratio, share, ledger.step_ms, predicted_ms, noise=ledger.noise)


def swap(llm: LLM, other: LLM, op: str, kernel: Kernel, kind: Kind, batch: int, context: int) -> PhaseChange | None:
    """Predicts and measures how the time of a step changes if `kernel` computes `op`.  The engine `other` uses
    `kernel`; the engine `llm` uses the present kernel.

    The prediction adds the time difference of the two kernels to the step, for each call.  Both kernels are timed
    outside the engine with the shapes of the call.  Matrix products, and all ops on a GPU, are timed with an empty
    cache.  On a CPU, other ops are timed after reading as many bytes as one layer's weights.  Scaling by the ratio of
    the kernels' times would also scale the other costs of the call: it predicted +13% for a norm that measured +4%.

    Returns None if this kind of step does not call the op."""
    short = kind == "prefill"
    old_step = measured(llm, kind, batch, context, steps=6 if short else 16)
    rows = [row for row in old_step.rows if row.op == op]
    kernels, other_kernels = (chosen(engine, kind, batch, context) for engine in (llm, other))
    current = kernels.get(op)
    if not rows or current is None:
        return None
    start_times = run_times()
    times = _alone_ms(rows, kind, (current, kernel), llm, context)
    ratio = times[kernel.name] / times[current.name]
    change = _predicted(old_step, op, current.name, kernel.name, ratio, times[kernel.name] - times[current.name])
    rounds, steps_each = (5, 1) if short else (16, 3)
    steps = rounds * steps_each + 1
    with stepping(llm, kind, batch, context, steps) as first, stepping(other, kind, batch, context, steps) as new_step:
        steps_and_samples = (first, base := list[float]()), (new_step, new_seconds := list[float]())
        first(), new_step()
        for _ in range(rounds):
            for step, seconds in steps_and_samples:
                seconds += [seconds_of(step) for _ in range(steps_each)]
    unswapped_ops = kernels.keys() - {op, DECODE, FUSED, *PRODUCTS}
    differs = sorted(name for name in unswapped_ops if kernels[name] != other_kernels.get(name))
    noise = f"the second engine has another kernel for {', '.join(differs)} too" if differs else change.noise
    noise = noise or why_noisy(base, waiting_since(start_times)) or why_noisy(new_seconds, None)
    # The ratio of both in turn, on the step of the ledger: what the machine does between them is in both.
    ratio = statistics.median(new_seconds) / statistics.median(base)
    return replace(change, measured_ms=change.before_ms * ratio, noise=noise)


def _alone_ms(
    rows: Sequence[LedgerRow], kind: Kind, kernels: Sequence[Kernel], llm: LLM, context: int
) -> dict[str, float]:
    """Times all calls of an op in one step, outside the engine, and returns the total milliseconds for each kernel."""
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
    """Returns the arguments for the call in the ledger row `row`, as tensors on the meta device."""
    first, *_ = sizes = [int(size) for size in re.findall(r"\d+", row.shape)]
    candidates = model_inputs(DECODE if (row.op, kind) == ("paged_attention", "decode") else row.op, first, llm.limits)
    return next(inputs for inputs in candidates if "b" not in inputs or list(inputs["b"].shape[::-1]) == sizes[1:])


def _behind_weights(calls: Mapping[str, Callable[[], Any]], llm: LLM) -> dict[str, float]:
    """Returns the median seconds of each call on a CPU.  The calls are interleaved.  Before each call the function
    reads as many bytes as the weights of one layer.

    The benchmark's usual protocol would also empty the last-level cache.  But in a real step this cache holds the
    kernel's code and inputs.  For kernels with several small calls the usual protocol measured twice the time of the
    real step."""
    parts = llm.arch.parameters()
    weights = torch.ones((parts.attention + parts.mlp) // llm.arch.num_layers, dtype=llm.dtype)
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for repeat in range(ROUNDS + 2):
        for name, call in calls.items():
            weights.sum()
            seconds = seconds_of(call)
            if repeat >= 2:
                samples[name].append(seconds)
    return {name: statistics.median(seconds) for name, seconds in samples.items()}


def _taken(kernel: Kernel, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Returns only the inputs that the kernel accepts.  The weight is packed in the kernel's layout."""
    accepted_inputs = {name: value for name, value in inputs.items() if name in kernel.accepted}
    if kernel.op in PRODUCTS:
        other_inputs = {name: value for name, value in inputs.items() if name != "b"}
        accepted_inputs["b"] = packed(kernel.prepare, inputs["b"], **other_inputs)
    return accepted_inputs
