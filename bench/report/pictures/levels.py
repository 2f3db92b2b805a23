"""Counts the bytes that kernels move at each memory level on one case, and returns records for `canvas.py` to draw.

The emulator counts the bytes of compiled kernels.  For a naive kernel, they are computed from the operands of its torch
calls (`kernels/traffic.py`).  L2 is assumed to be empty before each launch or torch call.

A matrix product of torch reads rows and columns once per tile of 128 x 128 results.  This tile is an assumption,
because torch's library chooses the real one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from rooflab.bench.compile.cases import KernelCase
from rooflab.bench.core import Environment, Record, RunWriter, choose_kernels
from rooflab.bench.emulate import calls as emulated_calls
from rooflab.bench.emulator import SECTOR
from rooflab.bench.predict.predictions import choose_cases, choose_scheme
from rooflab.kernels import registry
from rooflab.kernels.registry import Kernel
from rooflab.kernels.traffic import TorchCall, calls_of, held
from rooflab.reference.spec import Case, Scheme

PRODUCT_TILE = 128
PRODUCT_CALLS = ("mm", "bmm", "addmm", "baddbmm")


def bytes_of(call: TorchCall) -> dict[str, int]:
    """Returns the bytes that a torch call moves to and from HBM and L2.  The L2 reads of a matrix product depend on its
    tile size, which is assumed.  `l2_modelled_bytes` repeats such reads, and is 0 for other calls."""
    result_size = max((item.numel() for item in call.written), default=0)  # a call may write nothing
    if is_matrix_product := call.name in PRODUCT_CALLS:
        (*_, rows, columns), batch_size = call.written[0].shape, math.prod(call.written[0].shape[:-2])
        tile_columns, tile_rows = math.ceil(columns / PRODUCT_TILE), math.ceil(rows / PRODUCT_TILE)
        lhs, rhs = call.read[-2:]
        inner_size = lhs.shape[-1]
        l2_bytes = batch_size * inner_size * (rows * tile_columns * lhs.itemsize + columns * tile_rows * rhs.itemsize)
        l2_bytes += sum(item.nbytes for item in call.read[:-2])
    else:
        l2_bytes = sum(
            item.itemsize * (max(item.numel(), result_size) if call.elementwise else item.numel()) for item in call.read
        )
    return {
        "hbm_read_bytes": sum(map(_sectors, call.read)),
        "hbm_write_bytes": sum(map(_sectors, call.written)),
        "l2_read_bytes": l2_bytes,
        "l2_write_bytes": sum(item.nbytes for item in call.written),
        "l2_modelled_bytes": l2_bytes if is_matrix_product else 0,
    }


def _sectors(x: torch.Tensor) -> int:
    """Returns the bytes that the distinct elements of `x` take in memory, rounded up to whole memory sectors."""
    return -(-held(x) // SECTOR) * SECTOR


METRIC_PREFIX = "moved_"
"""The prefix of the metrics: `moved_hbm_read_bytes` and so on."""
META = torch.device("meta")


def move(op: str, kernels: Sequence[str], case: str, scheme: str | None = None, seed: int = 0) -> list[Record]:
    """Counts the bytes that each kernel moves on one case. Returns one record per kernel, in the order of `kernels`.

    Raises `ValueError` in these cases:
    - A name is unknown.
    - A kernel rejects the case, or its result is wrong.
    - A kernel has no compiled code, unless it is the naive kernel in torch."""
    spec = registry.get_op(op)
    dtypes = choose_scheme(spec, scheme)
    (shape,) = choose_cases(spec, [case], dtypes)
    environment, run_id = Environment.now(), f"bytes-{RunWriter(Path()).run_id}"
    records = []
    for kernel in choose_kernels(op, kernels):
        inputs = spec.make_inputs(shape, dtypes, META, seed)
        refusal_reason = kernel.why_not_args(inputs)
        if refusal_reason:
            raise ValueError(f"kernel: {kernel.id}: {refusal_reason}")
        record = environment.record("check", kernel, shape, dtypes.name, run_id)
        record = _emulated(record, kernel, shape, dtypes, seed) if kernel.has_code else _torch(record, kernel, inputs)
        config = kernel.tuning.heuristic(shape, dtypes) if kernel.tuning is not None else None
        record = replace(
            record,
            config=None if config is None else asdict(config),
            device="cpu",
            seed=seed,
            traffic_bytes=sum(
                record.metrics[f"{METRIC_PREFIX}hbm_{io_direction}_bytes"] for io_direction in ("read", "write")
            ),
            least_bytes=spec.cost_of(inputs).bytes,
        )
        records.append(record)
    return records


def _emulated(record: Record, kernel: Kernel, case: Case, scheme: Scheme, seed: int) -> Record:
    call_result = emulated_calls.call(KernelCase(kernel.op, kernel.name, case, scheme), seed, races=False).answer
    launch_results = call_result["launches"]
    if call_result["status"] != "OK" or not launch_results:
        raise ValueError(f"kernel: {kernel.id} at {case.id}: {call_result['status']}: {call_result['reason']}")
    metrics = levels([launch_result["bytes"] for launch_result in launch_results])
    for name in ("shared_wavefronts", "shared_wavefronts_least"):
        metrics[f"{METRIC_PREFIX}{name}"] = float(sum(launch_result[name] for launch_result in launch_results))
    return replace(
        record,
        reason=call_result["reason"],
        checked_by="emulator" if call_result["errors"] else "none",
        errors=tuple(call_result["errors"]),
        metrics={**metrics, "launches": float(len(launch_results))},
        traffic_basis="counted",
    )


def levels(moved: Sequence[dict[str, int]]) -> dict[str, float]:
    """Sums the bytes of all launches in `moved` at each memory level: HBM, L2 and shared memory.

    A launch has the fields of `emulator.results.Bytes`.  An atomic counts as a read and a write of L2.  Stores,
    `cp.async` and TMA loads write to shared memory.  Loads, TMA stores and the operands of wgmma read from it."""

    def total(*names: str) -> float:
        return float(sum(launch_bytes[name] for launch_bytes in moved for name in names))

    bytes_by_level = {
        "hbm_read_bytes": total("hbm_read"),
        "hbm_write_bytes": total("hbm_write"),
        "l2_read_bytes": total("global_read", "copy_read", "atomic"),
        "l2_write_bytes": total("global_write", "copy_write", "atomic"),
        "l2_read_sector_bytes": total("global_read_sectors", "copy_read", "atomic"),
        "l2_write_sector_bytes": total("global_write_sectors", "copy_write", "atomic"),
        "shared_read_bytes": total("shared_read", "shared_matrix", "tma_store"),
        "shared_write_bytes": total("shared_write", "tma_load"),
    }
    return {f"{METRIC_PREFIX}{name}": num_bytes for name, num_bytes in bytes_by_level.items()}


def _torch(record: Record, kernel: Kernel, inputs: Any) -> Record:
    if kernel.role != "naive" or kernel.backend != "torch":
        raise ValueError(
            f"kernel: expected a naive one, whose calls of torch are kernels each, or compiled code, got {kernel.id}"
        )
    calls = [bytes_of(call) for call in calls_of(lambda: kernel(**inputs))]
    metrics = {
        f"{METRIC_PREFIX}{name}": float(sum(call[name] for call in calls)) for name in (calls[0] if calls else ())
    }
    return replace(
        record,
        reason="the operands of torch's calls, on meta tensors; nothing was computed",
        metrics=metrics | {"launches": len(calls)},
        traffic_basis="modelled",
    )
