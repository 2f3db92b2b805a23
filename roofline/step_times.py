"""Computes the time of a model's step (one forward pass) from published kernel times.

The ops of a step are matrix products, attention, all-reduces and others.  The first three have published times of
vLLM's kernels (`published.py`).  An op without a published time counts with its roofline bound.  The model has no gaps
between ops, so the sum does not contain the time that the host adds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil

from rooflab.roofline.architecture import Architecture
from rooflab.roofline.device import Device
from rooflab.roofline.model import bound
from rooflab.roofline.published import Table, Time, committed
from rooflab.roofline.steps import ITEM_BYTES, Kind, OpCost, activation_dtype, all_reduce_s, link, step_ops

_FRAMEWORKS = ("vllm", "nccl")
"""The libraries whose kernels a step runs: one engine, and the library of its collectives."""


@dataclass(frozen=True)
class OpTime:
    """The total time of all calls of one op, such as one projection of all layers, in a step."""

    op: str
    site: str
    calls: int
    ms: float
    basis: str
    """`published`, `interpolated` between published shapes, or `bound`."""
    source: str
    """The library and its kernel, or for a bound, why the table has no time; empty if the op is in no table."""
    includes: tuple[str, ...] = ()
    """The other ops whose work is in the time."""


@dataclass(frozen=True)
class StepTime:
    """The time of one step of a model.  It is the sum of the times of the step's ops."""

    ms: float
    ops: tuple[OpTime, ...]

    @property
    def published_share(self) -> float:
        """Returns the fraction of the step's time that comes from published or interpolated kernel times."""
        return sum(op.ms for op in self.ops if op.basis != "bound") / self.ms

    def parts_ms(self) -> dict[str, float]:
        """Returns the milliseconds of matrix products, attention, all-reduces, and other ops (`rest`, a bound)."""
        parts: dict[str, float] = {}
        for op in self.ops:
            category = _PARTS.get(op.op, "rest")
            parts[category] = parts.get(category, 0.0) + op.ms
        return parts


_PARTS = {
    "gemm": "products",
    "flash_attention": "attention",
    "paged_attention": "attention",
    "all_reduce": "all-reduces",
}


def step_time(
    arch: Architecture,
    device: Device,
    kind: Kind,
    batch: int,
    context: int,
    weight_dtype: str = "bf16",
    kv_dtype: str = "bf16",
    gpus: int = 1,
) -> StepTime | None:
    """Returns the time of a step on `gpus` devices.  Returns None if no table of published times has this device.
    `step_ops` lists the ops of the step.  Raises `ValueError` as `step_ops` does.
    """
    ops = step_ops(arch, kind, batch, context, weight_dtype, kv_dtype, gpus)
    rows = batch * context if kind == "prefill" else batch
    return _step_time(arch, device, ops, rows, weight_dtype, kv_dtype, gpus)


def loaded_itl_ms(
    arch: Architecture,
    device: Device,
    concurrency: int,
    prompt: int,
    output: int,
    weight_dtype: str = "bf16",
    kv_dtype: str = "bf16",
    gpus: int = 1,
) -> float | None:
    """Returns the mean milliseconds between tokens while `concurrency` requests are always in flight.

    Returns None if no table of published times has this device.  Each request has `prompt` tokens and generates
    `output` tokens.  The next request follows at once.  While each sequence generates `output` tokens, the GPU also
    computes one prompt per sequence.  Every sequence waits for all these prompts.  The mean context has `prompt +
    output // 2` tokens."""
    options = weight_dtype, kv_dtype, gpus
    step = step_time(arch, device, "decode", concurrency, prompt + output // 2, *options)
    prefill = step_time(arch, device, "prefill", 1, prompt, *options)
    if step is None or prefill is None:
        return None
    return step.ms + concurrency / output * prefill.ms


def _step_time(
    arch: Architecture, device: Device, ops: Sequence[OpCost], rows: int, weight_dtype: str, kv_dtype: str, gpus: int
) -> StepTime | None:
    tables = [table for table in committed() if table.gpu == device.name and table.framework in _FRAMEWORKS]
    if not tables:
        return None
    times = [_op_time(op, device, tables, kv_dtype) for op in ops]
    if gpus > 1:
        size = rows * arch.hidden_size * ITEM_BYTES[activation_dtype(weight_dtype)]
        min_seconds = all_reduce_s(size, gpus, link(device, gpus))
        reduces = [table for table in tables if table.op == "all_reduce"]
        shape = {"gpus": gpus, "bytes": size}
        times.append(_timed("all_reduce", "all_reduce", 2 * arch.num_layers, min_seconds, reduces, shape))
    including_ops = {name: op for op in times for name in op.includes}
    times = [
        replace(op, ms=0.0, basis=including_ops[op.op].basis, source=f"in the time of {including_ops[op.op].op}")
        if op.op in including_ops
        else op
        for op in times
    ]
    return StepTime(sum(op.ms for op in times), tuple(times))


def _op_time(op: OpCost, device: Device, tables: Sequence[Table], kv_dtype: str) -> OpTime:
    min_seconds = bound(op.cost, device.ceilings()).seconds
    (dtype,) = op.cost.tensor_flops or ("",)
    if op.op == "gemm":
        name = "gemm_fp8" if dtype == "fp8_e4m3" else "gemm"
        matching = [t for t in tables if t.op == name and t.scheme == dtype and t.case.get("scales") != "block"]
        return _in_pieces(op, min_seconds, matching)
    scheme = "kv_fp8" if op.op == "paged_attention" and kv_dtype == "fp8_e4m3" else dtype
    matching = [t for t in tables if t.op == op.op and t.scheme == scheme]
    return _timed(op.op, op.site, op.calls, min_seconds, matching, op.shape)


def _in_pieces(op: OpCost, least_s: float, tables: Sequence[Table]) -> OpTime:
    """Returns the time of a matrix product.  If it is wider than its table, splits it along N into equal products."""
    widest = max((key[table.axes.index("N")] for table in tables for key in table.times), default=0)
    pieces = ceil(op.shape["N"] / widest) if widest else 1
    shape = dict(op.shape) | {"N": ceil(op.shape["N"] / pieces)}
    piece_time = _timed(op.op, op.site, op.calls * pieces, least_s / pieces, tables, shape)
    if pieces == 1 or piece_time.basis == "bound":
        return piece_time
    return replace(piece_time, calls=op.calls, source=f"{piece_time.source}, as {pieces} of N = {shape['N']}")


def _timed(op: str, site: str, calls: int, least_s: float, tables: Sequence[Table], shape: Mapping[str, int]) -> OpTime:
    """Returns the fastest published time for `shape`.  Without a published time, returns the roofline bound."""
    times: list[Time] = [table.time(shape) for table in tables]
    published = [(time.seconds, time) for time in times if time.seconds is not None]
    if not published:
        reason = times[0].how if times else ""
        return OpTime(op, site, calls, calls * least_s * 1e3, "bound", reason)
    seconds, best = min(published, key=lambda pair: pair[0])
    source = f"{best.table.framework} {best.table.version} {best.table.kernel}"
    return OpTime(op, site, calls, calls * seconds * 1e3, best.how, source, best.table.includes)
