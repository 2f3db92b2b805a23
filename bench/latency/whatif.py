"""Predicts and measures how TTFT and ITL change if the engine uses another kernel for one op."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch

from rooflab.bench.core import time_functions, why_noisy
from rooflab.bench.latency.engine_calls import weight_shape
from rooflab.bench.latency.ledger import Ledger, LedgerRow, chosen, measured, seconds_of, stepping
from rooflab.engine.choose.model_shapes import DECODE_OP, FUSED_OP, MATMUL_OPS, model_inputs, packed, real
from rooflab.engine.llm import LLM
from rooflab.kernels._waiting import run_times, waiting_since
from rooflab.kernels.registry import Kernel
from rooflab.roofline.steps import StepKind

CALLS_PER_KERNEL = 30
"""The number of timed calls of each kernel outside the engine."""
BUDGET_S = 0.5
"""Seconds to time all kernels on one shape."""
MAX_WIN_TIME_RATIO = 0.97
"""A kernel or an engine has won if its time is at most this share of the earlier time."""


@dataclass(frozen=True)
class PhaseChange:
    """Holds the latency of prefill or decode with the old kernel and with the new kernel of one op."""

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
        """Returns one table row.  If `noise` is not empty, the times cannot be compared, so the row has no ratios."""
        row = {name: field_value for name, field_value in asdict(self).items() if name != "noise"}
        for name in ("predicted", "measured"):
            row[f"{name}_%"] = None if row[f"{name}_ms"] is None else 100 * (row[f"{name}_ms"] / self.before_ms - 1)
        return row | (dict.fromkeys(("kernel", "share", "predicted_%", "measured_%")) if self.noise else {})

    def verdict(self) -> str:
        """Returns a sentence that says whether the new kernel makes the engine faster."""
        if self.noise:
            return f"{self.figure} with {self.op}/{self.after}: NOISY, and so no verdict: {self.noise}"
        engine = (self.predicted_ms if self.measured_ms is None else self.measured_ms) / self.before_ms
        change_text = (
            f"{self.op}/{self.after} takes {self.kernel:.2f} of {self.before}'s time, {self.share:.0%} of the step; "
        )
        change_text += f"{self.figure} {engine:.2f} of before{', predicted' * (self.measured_ms is None)}"
        return "the kernel won, the engine did not: " * (self.kernel <= MAX_WIN_TIME_RATIO < engine) + change_text


def scale(ledger: Ledger, factors: Mapping[str, float]) -> list[PhaseChange]:
    """Predicts, for each op in `factors`, the time of an engine step if the op takes `factors[op]` times as long."""
    phase_changes = []
    for op, op_factor in factors.items():
        if ms := ledger.ms_of(op):
            old_kernel = next(row.kernel or row.basis for row in ledger.rows if row.op == op)
            phase_changes.append(_predicted(ledger, op, old_kernel, f"{op_factor:g}x", op_factor, ms * (op_factor - 1)))
    return phase_changes


def _predicted(ledger: Ledger, op: str, before: str, after: str, ratio: float, change_ms: float) -> PhaseChange:
    figure = "ITL" if ledger.kind == "decode" else "TTFT"
    op_share = ledger.ms_of(op) / ledger.step_ms
    predicted_ms = ledger.step_ms + change_ms
    return PhaseChange(figure, op, before, after, ratio, op_share, ledger.step_ms, predicted_ms, noise=ledger.noise)


def swap(llm: LLM, other: LLM, op: str, kernel: Kernel, kind: StepKind, batch: int, context: int) -> PhaseChange | None:
    """Predicts and measures the time of an engine step if `kernel` computes `op`.

    The engine `llm` uses the old kernel, and `other` the new one.  The prediction adds the difference of both kernels'
    times, at the step's shapes.  A ratio would be worse: for a norm it predicted +13%, but +4% was measured.

    On a GPU, and for matrix products on a CPU, both are timed with an empty cache.  Other ops on a CPU are timed after
    a read of one layer's weights.  Returns None if the step does not call the op."""
    is_prefill = kind == "prefill"
    old_ledger = measured(llm, kind, batch, context, steps=6 if is_prefill else 16)
    rows = [row for row in old_ledger.rows if row.op == op]
    kernels, other_kernels = (chosen(engine, kind, batch, context) for engine in (llm, other))
    old_kernel = kernels.get(op)
    if not rows or old_kernel is None:
        return None
    old_run_times = run_times()
    times_ms = _alone_ms(rows, kind, (old_kernel, kernel), llm, context)
    time_ratio = times_ms[kernel.name] / times_ms[old_kernel.name]
    phase_change = _predicted(
        old_ledger, op, old_kernel.name, kernel.name, time_ratio, times_ms[kernel.name] - times_ms[old_kernel.name]
    )
    num_rounds, steps_per_round = (5, 1) if is_prefill else (16, 3)
    steps = num_rounds * steps_per_round + 1
    with stepping(llm, kind, batch, context, steps) as old_fn, stepping(other, kind, batch, context, steps) as new_step:
        steps_and_samples = (old_fn, base_step_s := list[float]()), (new_step, new_times_s := list[float]())
        old_fn(), new_step()
        for _ in range(num_rounds):
            for step, seconds in steps_and_samples:
                seconds += [seconds_of(step) for _ in range(steps_per_round)]
    remaining_ops = kernels.keys() - {op, DECODE_OP, FUSED_OP, *MATMUL_OPS}
    other_ops = sorted(name for name in remaining_ops if kernels[name] != other_kernels.get(name))
    noise = f"the second engine has another kernel for {', '.join(other_ops)} too" if other_ops else phase_change.noise
    noise = noise or why_noisy(base_step_s, waiting_since(old_run_times)) or why_noisy(new_times_s, None)
    # The ratio of both in turn, on the step of the ledger: what the machine does between them is in both.
    time_ratio = statistics.median(new_times_s) / statistics.median(base_step_s)
    return replace(phase_change, measured_ms=phase_change.before_ms * time_ratio, noise=noise)


def _alone_ms(
    rows: Sequence[LedgerRow], kind: StepKind, kernels: Sequence[Kernel], llm: LLM, context: int
) -> dict[str, float]:
    """Times all calls of one op in an engine step, outside the engine. Returns the total ms of each kernel."""
    total_ms = dict.fromkeys((kernel.name for kernel in kernels), 0.0)
    for row in rows:
        real_inputs = real(_probe_of(row, kind, llm), llm.limits.block_size, context)
        inputs = {name: x.to(llm.device) if isinstance(x, torch.Tensor) else x for name, x in real_inputs.items()}
        kernel_calls = {kernel.name: partial(kernel.fn, **_taken(kernel, inputs)) for kernel in kernels}
        if row.op in MATMUL_OPS or llm.device.type == "cuda":
            timings = time_functions(kernel_calls, llm.device, budget_s=BUDGET_S)
            seconds = {name: samples.median_s for name, samples in timings.items()}
        else:
            seconds = _behind_weights(kernel_calls, llm)
        for name in total_ms:
            total_ms[name] += 1e3 * row.calls * seconds[name]
    return total_ms


def _probe_of(row: LedgerRow, kind: StepKind, llm: LLM) -> dict[str, Any]:
    """Returns the arguments of an op call with the op and the shape in `row`. The tensors are on the meta device."""
    rows, *_ = shape_sizes = [int(dim_size) for dim_size in re.findall(r"\d+", row.shape)]
    input_sets = model_inputs(
        DECODE_OP if (row.op, kind) == ("paged_attention", "decode") else row.op, rows, llm.limits
    )
    return next(inputs for inputs in input_sets if "b" not in inputs or list(weight_shape(inputs)) == shape_sizes[1:])


def _behind_weights(calls: Mapping[str, Callable[[], Any]], llm: LLM) -> dict[str, float]:
    """Times interleaved calls on a CPU, each after a read of one layer's weights.  Returns each call's median seconds.

    Rooflab's benchmark of kernels empties the last-level cache instead.  But in a real step this cache holds the
    kernel's code and inputs.  For several small calls, the benchmark measured twice the time of a real step."""
    parameter_counts = llm.arch.parameters()
    weights = torch.ones((parameter_counts.attention + parameter_counts.mlp) // llm.arch.num_layers, dtype=llm.dtype)
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for repeat_index in range(CALLS_PER_KERNEL + 2):
        for name, kernel_call in calls.items():
            weights.sum()
            seconds = seconds_of(kernel_call)
            if repeat_index >= 2:
                samples[name].append(seconds)
    return {name: statistics.median(seconds) for name, seconds in samples.items()}


def _taken(kernel: Kernel, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the inputs that the kernel accepts. A matrix product gets its weight `b` packed for the kernel."""
    kernel_inputs = {name: input_value for name, input_value in inputs.items() if name in kernel.accepted}
    if kernel.op in MATMUL_OPS:
        other_inputs = {name: input_value for name, input_value in inputs.items() if name != "b"}
        kernel_inputs["b"] = packed(kernel.prepare, inputs["b"], **other_inputs)
    return kernel_inputs
