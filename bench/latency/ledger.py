"""Makes the ledger of a prefill or decode step: a row for each op with its shape, cost, bound and time.

A measured ledger has the engine's own calls as rows.  Every second step runs with timers; their cost has its own row.
In any other ledger, the times are published times or bounds.  The rows and the host add up to the step's time.

On a GPU these steps run without CUDA graphs, so the ITL with graphs may be shorter.  Events around the launch give an
op's time, so it includes waits for slow launches.
"""

from __future__ import annotations

import math
import random
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch

from rooflab.bench.base.system_time import time
from rooflab.bench.core import ceilings_for, raise_ceilings, why_noisy
from rooflab.bench.latency.engine_calls import inputs_of, shape_of, site_of
from rooflab.bench.latency.step_model import KernelTimes
from rooflab.engine.choose.model_shapes import DECODE_OP
from rooflab.engine.choose.op_times import wrapped_ops
from rooflab.engine.llm import LLM, SamplingParams
from rooflab.kernels._waiting import run_times, waiting_since
from rooflab.kernels.registry import Kernel, get_op
from rooflab.kernels.tuning import bucket_of
from rooflab.roofline.model import Bound, Ceilings, Cost, bound
from rooflab.roofline.steps import StepKind, step_ops

TimeMark = float | torch.cuda.Event
"""A point in time: seconds of the host's clock, or an event on a GPU."""
MAX_OPS_RATIO = 1.05
"""The highest allowed ratio of two times: the sum of the ops' median times, and the step's median time."""


@dataclass(frozen=True)
class LedgerRow:
    """Describes all calls of one op with one shape in a step."""

    op: str
    site: str
    """Where in the model the op is called: the name of a product's weight, or the name of the op."""
    kernel: str
    shape: str
    cost: Cost | None
    """The least work of one call.  None for an all-reduce."""
    traffic_bytes: float | None
    """The bytes that one call moves, as the kernel declares.  None if the kernel declares nothing."""
    calls: int = 1
    ms: float = 0.0
    """The milliseconds of all calls together."""
    bound: Bound | None = None
    """The least time of one call.  None if the device's ceilings or the cost are not known."""
    basis: str = "measured"

    @property
    def bound_ms(self) -> float | None:
        """Returns the sum of the roofline bounds of all calls, in milliseconds."""
        return 1e3 * self.calls * self.bound.seconds if self.bound else None

    def to_row(self, step_ms: float) -> dict[str, Any]:
        """Returns the row as one line of a table."""
        return {
            "op": self.op,
            "site": self.site if self.site != self.op else "",
            "kernel": self.kernel,
            "calls": self.calls,
            "shape": self.shape,
            "MFLOP": self.calls * self.cost.flops / 1e6 if self.cost else 0.0,
            "MB": self.calls * self.cost.bytes / 1e6 if self.cost else 0.0,
            "moved_MB": None if self.traffic_bytes is None else self.calls * self.traffic_bytes / 1e6,
            "bound_ms": self.bound_ms,
            "limiter": self.bound.limiter if self.bound else "",
            "ms": self.ms,
            "share": self.ms / step_ms,
            "x_bound": self.ms / self.bound_ms if self.ms and self.bound_ms else None,
            "basis": self.basis,
        }


@dataclass(frozen=True, kw_only=True)
class Ledger:
    """Holds the times of one step, op by op."""

    model: str
    device: str
    kind: StepKind
    batch: int
    context: int
    """The number of tokens of each sequence.  In a prefill, the number of tokens of the prompt."""
    rows: tuple[LedgerRow, ...]
    host_ms: float
    """The milliseconds of a timed step outside its ops: launch gaps and the host's work."""
    timers_ms: float = 0.0
    """The milliseconds that the timers add to a step."""
    step_ms: float
    """The milliseconds of a step without timers.  If nothing was measured, the sum of the rows."""
    itl_ms: float | None = None
    """The milliseconds between two tokens of `LLM.generate`.  None if this was not measured."""
    dtype: str
    noise: str = ""
    """Why the times are NOISY; empty if they are not."""

    @property
    def ops_ms(self) -> float:
        """Returns the sum of the times of all ops, in milliseconds."""
        return sum(op_row.ms for op_row in self.rows)

    @property
    def residual(self) -> float:
        """Returns the share of a step's time that ops and host do not explain: `(step - ops - host + timers) / step`.

        The step was measured without timers, the ops and the host with timers.  So the timers' cost is added.  The
        residual of one step is 0; for medians of many steps it may not be 0."""
        return (self.step_ms - self.ops_ms - self.host_ms + self.timers_ms) / self.step_ms

    def table(self) -> list[dict[str, Any]]:
        """Returns rows for ops (slowest first), other parts of the step, and sums.  A NOISY step has no ratios."""
        table_rows = [row.to_row(self.step_ms) for row in sorted(self.rows, key=lambda row: -row.ms)]
        other_rows = [
            ("host and gaps", self.host_ms),
            ("less the timers' time", -self.timers_ms),
            ("residual", self.residual * self.step_ms),
            ("step", self.step_ms),
        ]
        other_rows = other_rows if self.host_ms else []
        if self.itl_ms is not None:
            other_rows += [("between steps", self.itl_ms - self.step_ms), ("ITL", self.itl_ms)]
        table_rows += [{"op": row_name, "ms": ms, "share": ms / self.step_ms} for row_name, ms in other_rows]
        return [row | {"share": None, "x_bound": None} for row in table_rows] if self.noise else table_rows

    def metrics(self) -> dict[str, float]:
        """Returns the times of an engine step by name, in milliseconds, to store in a benchmark record.  They are the
        time and the roofline bound of each op, the host's time, and the time of the whole step."""
        op_metrics = {f"{row.op}.{row.site}.{row.shape}_ms": row.ms for row in self.rows}
        op_metrics |= {f"{row.op}.{row.site}.{row.shape}_bound_ms": row.bound_ms for row in self.rows if row.bound_ms}
        op_metrics |= {"host_ms": self.host_ms, "timers_ms": self.timers_ms, "step_ms": self.step_ms}
        return op_metrics | ({} if self.itl_ms is None else {"itl_ms": self.itl_ms})

    def ms_of(self, op: str) -> float:
        """Returns the milliseconds of all rows of an op."""
        return sum(op_row.ms for op_row in self.rows if op_row.op == op)


def from_kernels(model: KernelTimes, kind: StepKind, batch: int, context: int) -> Ledger:
    """Makes the ledger of a step from the kernel times or bounds of `model`, which also gives the host's time."""
    op_costs = step_ops(model.arch, kind, batch, context, model.weight_dtype, model.kv_dtype, model.gpus)
    cost_by_site, ceilings, rows = {(cost.op, cost.site): cost for cost in op_costs}, model.device.ceilings(), []
    for op in model.ops(kind, batch, context):
        row = LedgerRow(op.op, op.site, "", "", None, None, 0, op.ms, basis=op.basis if op.ms else op.source)
        if op_cost := cost_by_site.get((op.op, op.site)):
            shape = ",".join(f"{name}={value}" for name, value in op_cost.shape.items() if value or name != "window")
            row = replace(row, shape=shape, cost=op_cost.cost, calls=op_cost.calls, bound=bound(op_cost.cost, ceilings))
        rows.append(row)
    return Ledger(
        model=model.arch.name,
        device=f"{model.gpus} x {model.device.name}",
        kind=kind,
        batch=batch,
        context=context,
        rows=tuple(rows),
        host_ms=model.host_ms,
        step_ms=sum(row.ms for row in rows) + model.host_ms,
        dtype=model.weight_dtype,
    )


def measured(llm: LLM, kind: StepKind, batch: int, context: int, steps: int = 16) -> Ledger:
    """Measures each op's time in an engine step on this machine.  Returns a `Ledger` with medians of `steps` steps.

    In a decode step, `batch` sequences of `context` tokens decode.  In a prefill step, one prompt of `context` tokens
    is computed, and `batch` is 1.  Raises `ValueError` on sizes that no step of the engine has."""
    if kind == "prefill" and (batch != 1 or context > llm.scheduler.max_num_batched_tokens):
        raise ValueError(f"context: expected one prompt that a step computes, got {batch} of {context}")
    if batch > llm.scheduler.max_num_seqs or context + 2 * steps + 8 > llm.max_model_len:
        raise ValueError(f"batch: expected what the engine has room for, got {batch} of {context} tokens")
    ceilings, old_run_times = ceilings_for(llm.device), run_times()
    with stepping(llm, kind, batch, context, 2 * steps + 2) as step:
        step()
        calls = calls_of(llm, step, kind, batch, context)
        untimed_s, timed_s, ops_s = list[float](), list[float](), list[list[float]]()
        for _ in range(steps):
            # Without CUDA graphs, as the timed step is; the ITL below is with them, where the engine has some.
            is_on_gpu = llm.device.type == "cuda"
            with wrapped_ops(llm.runner, lambda op, function: function) if is_on_gpu else nullcontext():
                untimed_s.append(seconds_of(step))
            time_spans: list[tuple[TimeMark, TimeMark]] = []
            with wrapped_ops(
                llm.runner, partial(_timed, time_spans, clock_of(is_on_gpu)), partial(_note_time, time_spans)
            ):
                timed_s.append(seconds_of(step))
            ops_s.append([seconds_between(*time_span) for time_span in time_spans])
    rows, call_indices = list[LedgerRow](), defaultdict[tuple[str, str, str], list[int]](list)
    for index, call in enumerate(calls):
        call_indices[call.op, call.site, call.shape].append(index)
    for group in call_indices.values():
        ms, call = 1e3 * statistics.median(sum(times_s[index] for index in group) for times_s in ops_s), calls[group[0]]
        rows.append(replace(call, calls=len(group), ms=ms))
    rows = _bounded(rows, ceilings)
    bounds_ms, ops_ms = sum(row.bound_ms or 0.0 for row in rows), sum(row.ms for row in rows)
    if ceilings and ceilings.kind == "measured" and bounds_ms > ops_ms:
        rows = _bounded(rows, raise_ceilings(ceilings, llm.device))  # a busy machine may have lowered them
    step_ms = 1e3 * statistics.median(untimed_s)
    itl_ms = _itl_ms(llm, batch, context, 2 * steps) if kind == "decode" else None
    noise = why_noisy(untimed_s, waiting_since(old_run_times))
    if not noise and ops_ms > MAX_OPS_RATIO * step_ms:
        noise = f"the ops together took {ops_ms / step_ms:.2f} times as long as the step"
    return Ledger(
        model=llm.arch.name,
        device=llm.device.type,
        kind=kind,
        batch=batch,
        context=context,
        rows=tuple(rows),
        host_ms=1e3 * statistics.median(step_s - sum(ops) for step_s, ops in zip(timed_s, ops_s, strict=True)),
        timers_ms=1e3 * statistics.median(step_s - base_s for step_s, base_s in zip(timed_s, untimed_s, strict=True)),
        step_ms=step_ms,
        itl_ms=itl_ms,
        dtype=llm.dtype_name,
        noise=noise,
    )


def _bounded(rows: list[LedgerRow], ceilings: Ceilings | None) -> list[LedgerRow]:
    return [replace(row, bound=bound(row.cost, ceilings) if row.cost and ceilings else None) for row in rows]


def calls_of(llm: LLM, step: Callable[[], None], kind: StepKind, batch: int, context: int) -> list[LedgerRow]:
    """Returns the calls of one step in order, with their shapes and costs, but without times."""
    kernels, calls = chosen(llm, kind, batch, context), list[LedgerRow]()

    def watched(op: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            op_result = function(*arguments, **options)
            kernel = kernels[llm.ops.matmul_op(arguments[1]) if op == "gemm" else op]
            call_inputs = inputs_of(kernel.op, arguments, options, op_result)
            op_traffic, cost = kernel.traffic_of(call_inputs, llm.device.type), get_op(kernel.op).cost_of(call_inputs)
            call_site = site_of(llm.arch, call_inputs) if "b" in call_inputs else kernel.op
            moved_bytes = op_traffic.bytes if op_traffic else None
            calls.append(LedgerRow(kernel.op, call_site, kernel.name, shape_of(call_inputs), cost, moved_bytes))
            return op_result

        return call

    with wrapped_ops(llm.runner, watched):
        step()
    return calls


def chosen(llm: LLM, kind: StepKind, batch: int, context: int) -> dict[str, Kernel]:
    """Returns the kernel of each op of a step.  In a decode step, `paged_attention` has the decode kernel."""
    size_bucket = bucket_of(batch if kind == "decode" else context)
    kernels = {op_choice.op: op_choice.kernel for op_choice in llm.ops.choices if op_choice.bucket == size_bucket}
    if kind == "decode":
        del kernels["flash_attention_varlen"]
        kernels["paged_attention"] = kernels[DECODE_OP]
    return kernels


def seconds_of(step: Callable[[], Any]) -> float:
    """Runs `step` and returns its seconds."""
    start_s = time.perf_counter()
    step()
    return time.perf_counter() - start_s


def _note_time(time_spans: list[tuple[TimeMark, TimeMark]], kernel: str, seconds: float) -> None:
    time_spans.append((0.0, seconds))


def _timed(
    time_spans: list[tuple[TimeMark, TimeMark]], clock: Callable[[], TimeMark], op: str, function: Callable[..., Any]
) -> Callable[..., Any]:
    def call(*arguments: Any, **options: Any) -> Any:
        start_mark = clock()
        call_result = function(*arguments, **options)
        time_spans.append((start_mark, clock()))
        return call_result

    return call


def clock_of(on_gpu: bool) -> Callable[[], TimeMark]:
    """Returns a function that marks a point in time, by an event in a GPU's current stream or by the host's clock."""
    return _event if on_gpu else time.perf_counter


def _event() -> torch.cuda.Event:
    cuda_event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    cuda_event.record()
    return cuda_event


def seconds_between(begin: TimeMark, end: TimeMark) -> float:
    """Returns the seconds between two marks.  If the marks are events of a GPU, waits until they have completed."""
    if isinstance(begin, float) or isinstance(end, float):
        return cast(float, end) - cast(float, begin)
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


def draw_prompts(llm: LLM, count: int, length: int, seed: int | None = None) -> list[list[int]]:
    """Returns prompts of random token ids.  Without `seed`, every call returns different prompts."""
    generator = random.Random(seed)
    return [generator.choices(range(llm.arch.vocab_size), k=length) for _ in range(count)]


@contextmanager
def stepping(llm: LLM, kind: StepKind, batch: int, context: int, steps: int) -> Iterator[Callable[[], None]]:
    """Yields a function that runs one decode step of `batch` sequences, or computes one prompt of `context` tokens.

    The caller may call this function up to `steps` times."""
    prompts, request_ids = draw_prompts(llm, steps if kind == "prefill" else 0, context), list[int]()

    def prefill() -> None:
        llm.add_request(prompts.pop(), SamplingParams(max_tokens=1, ignore_eos=True))
        while llm.has_work:
            llm.step()

    def decode() -> None:
        llm.step()
        assert llm.core.last is not None and llm.core.last.num_decodes == batch, "all decode"

    try:
        for prompt_count, length, later_tokens in _joining(llm, batch, context) if kind == "decode" else ():
            run_params = SamplingParams(max_tokens=steps + 2 + later_tokens, ignore_eos=True)
            request_ids += [llm.add_request(prompt, run_params) for prompt in draw_prompts(llm, prompt_count, length)]
            while llm.scheduler.waiting or llm.scheduler.prefilling:
                llm.step()
        yield decode if kind == "decode" else prefill
    finally:
        for request_id in request_ids:
            llm.abort(request_id)


def _joining(llm: LLM, batch: int, context: int) -> list[tuple[int, int, int]]:
    """Plans when `batch` prompts start, so that all sequences then decode together with `context` tokens each.

    Returns groups `(prompts, length, later_tokens)` in order: the number of prompts, their tokens, and the tokens that
    each generates during the prefill of later groups.  Raises `ValueError` if `context` is too short."""
    scheduler, prompt_groups, remaining_prompts, later_tokens = llm.scheduler, list[tuple[int, int, int]](), batch, 0
    while remaining_prompts:
        prompt_length = context - 1 - later_tokens
        if prompt_length < 1:
            raise ValueError(f"context: expected more, so that {batch} prompts can be computed before, got {context}")
        token_budget = min(scheduler.prefill_chunk, scheduler.max_num_batched_tokens - remaining_prompts)
        prompt_count = min(remaining_prompts, max(1, token_budget // prompt_length))
        remaining_prompts -= prompt_count
        prompt_groups.append((prompt_count, prompt_length, later_tokens))
        token_budget = min(scheduler.prefill_chunk, scheduler.max_num_batched_tokens - remaining_prompts)
        later_tokens += math.ceil(prompt_count * prompt_length / token_budget)
    return prompt_groups[::-1]


def _itl_ms(llm: LLM, batch: int, context: int, tokens: int) -> float:
    outputs = llm.generate(draw_prompts(llm, batch, context - 1), SamplingParams(max_tokens=tokens, ignore_eos=True))
    return statistics.median(float(gap_ms) for request_output in outputs for gap_ms in request_output.timeline.itl_ms)
