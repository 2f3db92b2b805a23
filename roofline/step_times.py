"""Computes the time of one forward pass (a step) of a model from published times of vLLM's kernels.

The step's time is the sum of the times of its matrix products, attention, all-reduces and other ops. The tables of
`published.py` give the measured times. An op without a measured time gets its roofline bound. The sum contains no gaps
between ops and no host time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil

from rooflab.roofline.architecture import Architecture
from rooflab.roofline.device import Device
from rooflab.roofline.model import bound
from rooflab.roofline.published import Table, Time, committed
from rooflab.roofline.steps import ITEM_BYTES, OpCost, StepKind, activation_dtype, all_reduce_s, link, step_ops

_TABLE_FRAMEWORKS = ("vllm", "nccl")
"""The libraries whose kernels a step runs: one engine, and the library of its collectives."""


@dataclass(frozen=True)
class OpTime:
    """The total time of all calls of one op in a step.  For example, the QKV projections of all layers are one op."""

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
        """Returns the fraction of the step's time that comes from published kernel times, not from roofline bounds."""
        return sum(op.ms for op in self.ops if op.basis != "bound") / self.ms

    def parts_ms(self) -> dict[str, float]:
        """Returns milliseconds per kind of op: `products` (of matrices), `attention`, `all-reduces` and `rest`."""
        category_ms: dict[str, float] = {}
        for op in self.ops:
            category = _OP_CATEGORIES.get(op.op, "rest")
            category_ms[category] = category_ms.get(category, 0.0) + op.ms
        return category_ms


_OP_CATEGORIES = {
    "gemm": "products",
    "flash_attention": "attention",
    "paged_attention": "attention",
    "all_reduce": "all-reduces",
}


def step_time(
    arch: Architecture,
    device: Device,
    kind: StepKind,
    batch: int,
    context: int,
    weight_dtype: str = "bf16",
    kv_dtype: str = "bf16",
    gpus: int = 1,
) -> StepTime | None:
    """Returns the time of a step on `gpus` GPUs, or None if no published table has times of the GPU type `device`.
    Raises `ValueError` if `step_ops` rejects the arguments."""
    ops = step_ops(arch, kind, batch, context, weight_dtype, kv_dtype, gpus)
    token_count = batch * context if kind == "prefill" else batch
    return _step_time(arch, device, ops, token_count, weight_dtype, kv_dtype, gpus)


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
    """Returns the mean milliseconds between tokens (ITL) of a server with `concurrency` running requests.

    A request has `prompt` tokens and generates `output` tokens. When a request ends, a new one starts, and the others
    wait for its prefill. So on average `concurrency / output` prefills happen per decode step. The ITL is one decode
    step at the mean context plus these prefills. Returns None without published times of the device."""
    step_options = weight_dtype, kv_dtype, gpus
    decode_step = step_time(arch, device, "decode", concurrency, prompt + output // 2, *step_options)
    prefill_step = step_time(arch, device, "prefill", 1, prompt, *step_options)
    if decode_step is None or prefill_step is None:
        return None
    return decode_step.ms + concurrency / output * prefill_step.ms


def _step_time(
    arch: Architecture, device: Device, ops: Sequence[OpCost], rows: int, weight_dtype: str, kv_dtype: str, gpus: int
) -> StepTime | None:
    tables = [table for table in committed() if table.gpu == device.name and table.framework in _TABLE_FRAMEWORKS]
    if not tables:
        return None
    op_times = [_op_time(op, device, tables, kv_dtype) for op in ops]
    if gpus > 1:
        reduce_bytes = rows * arch.hidden_size * ITEM_BYTES[activation_dtype(weight_dtype)]
        min_seconds = all_reduce_s(reduce_bytes, gpus, link(device, gpus))
        all_reduce_tables = [table for table in tables if table.op == "all_reduce"]
        shape = {"gpus": gpus, "bytes": reduce_bytes}
        op_times.append(_timed("all_reduce", "all_reduce", 2 * arch.num_layers, min_seconds, all_reduce_tables, shape))
    including_ops = {included_name: op for op in op_times for included_name in op.includes}
    op_times = [
        replace(op, ms=0.0, basis=including_ops[op.op].basis, source=f"in the time of {including_ops[op.op].op}")
        if op.op in including_ops
        else op
        for op in op_times
    ]
    return StepTime(sum(op.ms for op in op_times), tuple(op_times))


def _op_time(op: OpCost, device: Device, tables: Sequence[Table], kv_dtype: str) -> OpTime:
    min_seconds = bound(op.cost, device.ceilings()).seconds
    (dtype,) = op.cost.tensor_flops or ("",)
    if op.op == "gemm":
        name = "gemm_fp8" if dtype == "fp8_e4m3" else "gemm"
        matching_tables = [t for t in tables if t.op == name and t.scheme == dtype and t.case.get("scales") != "block"]
        return _in_pieces(op, min_seconds, matching_tables)
    table_scheme = "kv_fp8" if op.op == "paged_attention" and kv_dtype == "fp8_e4m3" else dtype
    matching_tables = [t for t in tables if t.op == op.op and t.scheme == table_scheme]
    return _timed(op.op, op.site, op.calls, min_seconds, matching_tables, op.shape)


def _in_pieces(op: OpCost, least_s: float, tables: Sequence[Table]) -> OpTime:
    """Returns the published time of a matrix product.  An N above the largest published N is cut into equal parts, and
    their times are added."""
    published_max_n = max((case_key[table.axes.index("N")] for table in tables for case_key in table.times), default=0)
    part_count = ceil(op.shape["N"] / published_max_n) if published_max_n else 1
    shape = dict(op.shape) | {"N": ceil(op.shape["N"] / part_count)}
    split_time = _timed(op.op, op.site, op.calls * part_count, least_s / part_count, tables, shape)
    if part_count == 1 or split_time.basis == "bound":
        return split_time
    return replace(split_time, calls=op.calls, source=f"{split_time.source}, as {part_count} of N = {shape['N']}")


def _timed(op: str, site: str, calls: int, least_s: float, tables: Sequence[Table], shape: Mapping[str, int]) -> OpTime:
    """Returns the fastest published time of `op` at the sizes `shape`.  If no table has these sizes, returns the
    roofline bound."""
    table_times: list[Time] = [table.time(shape) for table in tables]
    published_times = [(table_time.seconds, table_time) for table_time in table_times if table_time.seconds is not None]
    if not published_times:
        missing_reason = table_times[0].how if table_times else ""
        return OpTime(op, site, calls, calls * least_s * 1e3, "bound", missing_reason)
    least_seconds, shortest_time = min(published_times, key=lambda pair: pair[0])
    source = f"{shortest_time.table.framework} {shortest_time.table.version} {shortest_time.table.kernel}"
    return OpTime(op, site, calls, calls * least_seconds * 1e3, shortest_time.how, source, shortest_time.table.includes)
