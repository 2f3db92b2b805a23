"""Holds host code of the `cluster` kernels of norms, softmax and gated activations: configs and launch."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from rooflab.kernels import _cuda
from rooflab.kernels._device import HOPPER_SMS, sm_count
from rooflab.kernels._sizes import cdiv, next_power_of_2
from rooflab.kernels._tma import address_of
from rooflab.kernels.launcher import kernel
from rooflab.kernels.registry import Function, get_op
from rooflab.kernels.tuning import BF16, Footprint, Tuning
from rooflab.reference.spec import Case, Scheme

SOURCE = (_cuda.LIB_FOLDER / "rows.cu").read_text()
OP_CODES = {"rmsnorm": 0, "fused_add_rmsnorm": 1, "layernorm": 2, "softmax": 3, "silu_and_mul": 4, "gelu_and_mul": 5}
"""The number that stands for each op in the CUDA source."""
QUANTIZED_DTYPE_CODES = {torch.int8: 1, torch.float8_e4m3fn: 2}
"""The number that stands for each dtype of quantised results in the CUDA source."""
TWO_INPUT_OPS = ("fused_add_rmsnorm", "silu_and_mul", "gelu_and_mul")
WEIGHT_COUNTS = {"rmsnorm": 1, "fused_add_rmsnorm": 1, "layernorm": 2}
"""The number of weight or bias vectors that are loaded with each vector of a row, by op."""
VECTOR_BYTES = 16
WARP_THREADS = 32
MAX_LANES, MAX_THREAD_VALUES, MAX_CLUSTER_CTAS = 512, 64, 8
"""Three maxima: threads of a CTA that share a row, values per thread, and CTAs of a portable cluster."""
CTA_THREADS = 256
"""The number of threads of a CTA that has several rows."""
TARGET_THREAD_VECTORS = 4
"""Vectors per thread where many rows are in progress: a thread requests 64 bytes before it uses the first."""
RESIDENT_THREADS_PER_SM = 768
"""The number of threads per SM in a persistent grid.  With up to 80 registers each, all of them run at once."""
MAX_WIDTH = MAX_LANES * MAX_THREAD_VALUES * MAX_CLUSTER_CTAS
"""The most values of a row that a cluster's registers hold.  Of two rows in fp32, they hold half as many each."""
MAX_PAIRED_VECTORS = 8
"""The most vectors that a thread holds of each input, for ops with two inputs."""
MAX_PAIR_BYTES = MAX_LANES * MAX_CLUSTER_CTAS * MAX_PAIRED_VECTORS * VECTOR_BYTES
"""The most bytes per row and input that a cluster's registers hold, for ops with two inputs."""


@dataclass(frozen=True)
class Config:
    """Describes how the rows are divided among threads and CTAs."""

    lanes: int
    """The number of threads of a CTA that share a row."""
    vectors: int
    """The number of 16-byte vectors of a row that a thread holds."""
    rows: int
    """The number of rows of a CTA."""
    cluster: int
    """The number of CTAs that share a row: a cluster."""
    persistent: bool
    """Whether the grid has only as many CTAs as run at once.  They take all rows, and request the next row early."""


def vectors_of(case: Case, scheme: Scheme = BF16) -> int:
    """Returns the number of 16-byte vectors in a row."""
    return max(1, cdiv(int(case["H"] if "H" in case else case["I"]) * scheme.activation.itemsize, VECTOR_BYTES))


def most_vectors(op: str, itemsize: int) -> int:
    """Returns the largest number of 16-byte vectors of an input per thread.  They hold at most 64 values.  If an op has
    two inputs, a thread has at most eight vectors of each."""
    return min(MAX_THREAD_VALUES * itemsize // VECTOR_BYTES, MAX_PAIRED_VECTORS if op in TWO_INPUT_OPS else 16)


def may_persist(config: Config) -> bool:
    """Returns whether the grid may be persistent.  Then the registers hold two rows; a larger config would spill."""
    return config.vectors <= TARGET_THREAD_VECTORS and config.lanes * config.rows <= CTA_THREADS


def ctas_of(config: Config, groups: int, sms: int = HOPPER_SMS) -> int:
    """Returns the number of CTAs of a persistent grid: 768 threads per SM, in whole clusters."""
    resident_ctas = sms * max(1, RESIDENT_THREADS_PER_SM // (config.lanes * config.rows))
    return max(config.cluster, min(groups, resident_ctas // config.cluster * config.cluster))


def configs(case: Case, scheme: Scheme = BF16) -> tuple[Config, ...]:
    """Returns all configs with sizes in powers of two that cover a row.  At most half of the threads are idle.

    A CTA has whole warps and at most 512 threads.  In a cluster, a CTA has one row and at least four warps."""
    row_vectors = vectors_of(case, scheme)
    row_configs: list[Config] = []
    for vectors, cluster, is_persistent in itertools.product((1, 2, 4, 8, 16), (1, 2, 4, 8), (False, True)):
        lanes = next_power_of_2(cdiv(row_vectors, vectors * cluster))
        if lanes <= MAX_LANES and (cluster == 1 or lanes >= 4 * WARP_THREADS):
            min_rows = max(1, WARP_THREADS // lanes)
            max_rows = 1 if cluster > 1 else max(min_rows, MAX_LANES // lanes)
            rows = [rows for rows in (1, 2, 4, 8, 16, 32, 64) if min_rows <= rows <= max_rows]
            row_configs += [Config(lanes, vectors, cta_rows, cluster, is_persistent) for cta_rows in rows]
    return tuple(row_configs)


def tuning(op: str) -> Tuning:
    """Returns the tuning of the kernel `cluster` of `op`."""
    inputs = 1 + (op in TWO_INPUT_OPS)

    def footprint(config: Config, case: Case, scheme: Scheme = BF16) -> Footprint:
        """Returns the resources of a CTA.  Registers hold the row and the weights, and in a persistent grid also the
        next row.  The number of registers for all other values was read in compiled code."""
        has_extra_sums = op == "layernorm" or scheme.output.itemsize == 1
        weight_vectors = WEIGHT_COUNTS.get(op, 0) if config.vectors <= TARGET_THREAD_VECTORS else 0
        row_registers = 4 * config.vectors * (1 + weight_vectors + config.persistent * inputs)
        needed_ctas = cdiv(int(case["T"]), config.rows) * config.cluster
        return Footprint(
            threads=config.lanes * config.rows,
            registers=row_registers + 28 + 6 * config.vectors // scheme.activation.itemsize + 12 * has_extra_sums,
            shared_bytes=8 * cdiv(config.lanes * config.rows, WARP_THREADS) + 8,
            ctas=ctas_of(config, needed_ctas) if config.persistent else needed_ctas,
        )

    def heuristic(case: Case, scheme: Scheme = BF16) -> Config:
        """Returns the default config.  With few rows, a thread has one vector.  With many rows, it has 64 bytes."""
        T, needed_vectors = int(case["T"]), vectors_of(case, scheme)
        has_many_rows, cluster = T > HOPPER_SMS, 1
        vectors = min(TARGET_THREAD_VECTORS // inputs if has_many_rows else 1, next_power_of_2(needed_vectors))
        while needed_vectors > MAX_LANES * vectors * cluster:
            # More CTAs share a row before a thread takes more vectors: where there are many rows, where SMs would be
            # idle, and where a thread has the most vectors.
            has_max_vectors = vectors == most_vectors(op, scheme.activation.itemsize)
            if cluster < MAX_CLUSTER_CTAS and (has_many_rows or has_max_vectors or T * 2 * cluster <= HOPPER_SMS):
                cluster *= 2
            else:
                vectors *= 2
        lanes = next_power_of_2(cdiv(needed_vectors, vectors * cluster))
        rows = 1 if cluster > 1 else max(1, WARP_THREADS // lanes, CTA_THREADS // lanes if has_many_rows else 1)
        config = Config(lanes, vectors, rows, cluster, False)
        has_many_waves = cdiv(T, rows) * cluster > 4 * ctas_of(config, T * cluster)
        return dataclasses.replace(config, persistent=has_many_waves and may_persist(config))

    def rule(config: Config, case: Case, scheme: Scheme = BF16) -> bool:
        """Returns whether the threads of the config hold a whole row.  In a cluster, a CTA must have one row."""
        covers_row = config.lanes * config.vectors * config.cluster >= vectors_of(case, scheme)
        covers_row = covers_row and (config.cluster == 1 or config.rows == 1)
        fits_registers = config.vectors <= most_vectors(op, scheme.activation.itemsize)
        return covers_row and fits_registers and config.persistent <= may_persist(config)

    return Tuning(Config, configs, heuristic, footprint, rule)


def rung(op: str, over_fused: str, wide: str | None = None, **takes: Any) -> Callable[[Function], Function]:
    """Returns a decorator that registers a launcher as the kernel `cluster` of `op`.  This kernel improves on the
    kernel `fused`.

    `over_fused` states the improvement: a condition on instruction counts in the compiled code of `cluster` and
    `fused`.  `wide` names a case with rows so long that a cluster of CTAs shares each row.  `takes` are further
    arguments of the decorator `kernel`."""
    sass_checks = {"": f"LDG_E_NA_128 in (4, 8) and LDG == LDG__128; STG_E_128 == global_store; {over_fused}"}
    if op in TWO_INPUT_OPS:
        width_name = "H" if op == "fused_add_rmsnorm" else "I"
        width_limit_text = f"rows of at most {MAX_PAIR_BYTES} bytes, which registers hold"
        takes["holds"] = {f"{width_name} * itemsize <= {MAX_PAIR_BYTES}": width_limit_text}
    if wide is not None:
        sass_checks[wide] = "UCGABAR_ARV >= 2 and barrier > 0 and stack_bytes == 0"
    return kernel(
        backend="cuda",
        min_sm=90,
        devices=("cuda",),
        requires=("cupy",),
        traffic=get_op(op).least,
        tuning=tuning(op),
        over="fused",
        shows=sass_checks,
        **takes,
    )


def launch(
    op: str,
    x: torch.Tensor,
    out: torch.Tensor,
    *,
    second: torch.Tensor | None = None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    sums: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    eps: float = 0.0,
    weight_offset: float = 0.0,
    round_first: bool = False,
    config: Config,
) -> None:
    """Runs `op` on the rows of `x` and `second`.  Writes `out`, `sums` (`x + second`, (T, N)) and `scale` (T,).

    The caller has checked all arguments."""
    T, width = out.shape
    tensors = [tensor for tensor in (x, second, weight, bias, out, sums) if tensor is not None]
    compile_options = _cuda.macros(
        OP=OP_CODES[op],
        ELEMENT=_cuda.ELEMENT_CODES[x.dtype],
        QUANTIZE=QUANTIZED_DTYPE_CODES[out.dtype] if scale is not None else 0,
        PIECE=_piece(width, VECTOR_BYTES // x.element_size(), tensors),
        LANES=config.lanes,
        ROWS=config.rows,
        VECTORS=config.vectors,
        CLUSTER=config.cluster,
        PERSISTENT=config.persistent,
        ROUND_FIRST=round_first,
    )
    needed_ctas = cdiv(T, config.rows) * config.cluster
    grid = ctas_of(config, needed_ctas, sm_count(x.device)) if config.persistent else needed_ctas
    kernel = _cuda.load(SOURCE, "rows", options=compile_options)
    strides = [np.int64(0 if tensor is None else tensor.stride(0)) for tensor in (x, second, out, sums)]
    kernel(
        (grid,), (config.lanes * config.rows,), x, second, weight, bias, out, sums, scale, np.int64(T), np.int32(width),
        *strides, np.float32(eps), np.float32(weight_offset),
    )  # fmt: skip


def _piece(width: int, vector: int, tensors: list[torch.Tensor]) -> int:
    """Returns the number of elements per memory access.  It is the largest power of two that divides `width`, `vector`,
    and all row strides and addresses, counted in elements."""
    divisor_bits = width | vector
    for tensor in tensors:
        divisor_bits |= address_of(tensor) // tensor.element_size()
        divisor_bits |= tensor.stride(0) if tensor.ndim == 2 and tensor.shape[0] > 1 else 0
    return divisor_bits & -divisor_bits
