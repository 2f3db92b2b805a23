"""Holds host code of the `cluster` kernels of norms, softmax and gated activations: configs, launch of `rows.cu`."""

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

SOURCE = (_cuda.LIB / "rows.cu").read_text()
OPS = {"rmsnorm": 0, "fused_add_rmsnorm": 1, "layernorm": 2, "softmax": 3, "silu_and_mul": 4, "gelu_and_mul": 5}
"""The number that stands for each op in the CUDA source."""
QUANTIZED = {torch.int8: 1, torch.float8_e4m3fn: 2}
"""The number that stands for each dtype of quantised results in the CUDA source."""
TWO_INPUTS = ("fused_add_rmsnorm", "silu_and_mul", "gelu_and_mul")
WEIGHTS = {"rmsnorm": 1, "fused_add_rmsnorm": 1, "layernorm": 2}
"""The number of weight or bias vectors that are loaded with each vector of a row, by op."""
VECTOR_BYTES = 16
WARP = 32
MOST_LANES, MOST_VALUES, MOST_CLUSTER = 512, 64, 8
"""Three maxima: threads of a CTA that share a row, values per thread, and CTAs of a portable cluster."""
CTA_THREADS = 256
"""The number of threads of a CTA that has several rows."""
VECTORS = 4
"""Vectors per thread where many rows are in progress: a thread requests 64 bytes before it uses the first."""
RESIDENT_THREADS = 768
"""The number of threads per SM in a persistent grid.  With up to 80 registers each, all of them run at once."""
MOST_WIDTH = MOST_LANES * MOST_VALUES * MOST_CLUSTER
"""The most values of a row that a cluster's registers hold.  Of two rows in fp32, they hold half as many each."""
MOST_PAIRED = 8
"""The most vectors that a thread holds of each input, for ops with two inputs."""
PAIR_BYTES = MOST_LANES * MOST_CLUSTER * MOST_PAIRED * VECTOR_BYTES
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
    """Returns the largest number of 16-byte vectors per thread: 64 values, or eight vectors of each of two inputs."""
    return min(MOST_VALUES * itemsize // VECTOR_BYTES, MOST_PAIRED if op in TWO_INPUTS else 16)


def may_persist(config: Config) -> bool:
    """Returns whether registers can hold two rows at once, as a persistent grid needs.  Larger configs would spill."""
    return config.vectors <= VECTORS and config.lanes * config.rows <= CTA_THREADS


def ctas_of(config: Config, groups: int, sms: int = HOPPER_SMS) -> int:
    """Returns the number of CTAs of a persistent grid: 768 threads per SM, in whole clusters."""
    resident = sms * max(1, RESIDENT_THREADS // (config.lanes * config.rows))
    return max(config.cluster, min(groups, resident // config.cluster * config.cluster))


def configs(case: Case, scheme: Scheme = BF16) -> tuple[Config, ...]:
    """Returns all configs in powers of two that cover a row and leave at most half of the threads idle.

    A CTA has whole warps and at most 512 threads.  A CTA of a cluster has one row and at least four warps.
    """
    row_vectors = vectors_of(case, scheme)
    divisions: list[Config] = []
    for vectors, cluster, persistent in itertools.product((1, 2, 4, 8, 16), (1, 2, 4, 8), (False, True)):
        lanes = next_power_of_2(cdiv(row_vectors, vectors * cluster))
        if lanes <= MOST_LANES and (cluster == 1 or lanes >= 4 * WARP):
            min_rows = max(1, WARP // lanes)
            max_rows = 1 if cluster > 1 else max(min_rows, MOST_LANES // lanes)
            rows = [rows for rows in (1, 2, 4, 8, 16, 32, 64) if min_rows <= rows <= max_rows]
            divisions += [Config(lanes, vectors, cta_rows, cluster, persistent) for cta_rows in rows]
    return tuple(divisions)


def tuning(op: str) -> Tuning:
    """Returns the tuning of the kernel `cluster` of `op`."""
    inputs = 1 + (op in TWO_INPUTS)

    def footprint(config: Config, case: Case, scheme: Scheme = BF16) -> Footprint:
        """Returns the registers for the row, the weights, the values in fp32, and the next row of a persistent grid.

        The number of registers for values is read from compiled code.  It is 28, plus `6 * vectors / itemsize`, plus 12
        for two sums or a quantisation."""
        heavy = op == "layernorm" or scheme.output.itemsize == 1
        weights = WEIGHTS.get(op, 0) if config.vectors <= VECTORS else 0
        row_registers = 4 * config.vectors * (1 + weights + config.persistent * inputs)
        groups = cdiv(int(case["T"]), config.rows) * config.cluster
        return Footprint(
            threads=config.lanes * config.rows,
            registers=row_registers + 28 + 6 * config.vectors // scheme.activation.itemsize + 12 * heavy,
            shared_bytes=8 * cdiv(config.lanes * config.rows, WARP) + 8,
            ctas=ctas_of(config, groups) if config.persistent else groups,
        )

    def heuristic(case: Case, scheme: Scheme = BF16) -> Config:
        """Returns the default config.  A thread has one vector if rows are few, and 64 bytes if rows are many."""
        T, needed = int(case["T"]), vectors_of(case, scheme)
        many, cluster = T > HOPPER_SMS, 1
        vectors = min(VECTORS // inputs if many else 1, next_power_of_2(needed))
        while needed > MOST_LANES * vectors * cluster:
            # More CTAs share a row before a thread takes more vectors: where there are many rows, where SMs would be
            # idle, and where a thread has the most vectors.
            full = vectors == most_vectors(op, scheme.activation.itemsize)
            if cluster < MOST_CLUSTER and (many or full or T * 2 * cluster <= HOPPER_SMS):
                cluster *= 2
            else:
                vectors *= 2
        lanes = next_power_of_2(cdiv(needed, vectors * cluster))
        rows = 1 if cluster > 1 else max(1, WARP // lanes, CTA_THREADS // lanes if many else 1)
        config = Config(lanes, vectors, rows, cluster, False)
        many_waves = cdiv(T, rows) * cluster > 4 * ctas_of(config, T * cluster)
        return dataclasses.replace(config, persistent=many_waves and may_persist(config))

    def rule(config: Config, case: Case, scheme: Scheme = BF16) -> bool:
        """Returns whether the threads of the config hold a whole row.  A CTA of a cluster must have exactly one row."""
        covered = config.lanes * config.vectors * config.cluster >= vectors_of(case, scheme)
        covered = covered and (config.cluster == 1 or config.rows == 1)
        fits_registers = config.vectors <= most_vectors(op, scheme.activation.itemsize)
        return covered and fits_registers and config.persistent <= may_persist(config)

    return Tuning(Config, configs, heuristic, footprint, rule)


def rung(op: str, over_fused: str, wide: str | None = None, **takes: Any) -> Callable[[Function], Function]:
    """Registers the decorated launcher as the kernel `cluster` of `op`.  `takes` are further arguments of `kernel`.

    `over_fused` states how the code differs from the code of `fused`.  In the case `wide`, a cluster shares a row.
    """
    shows = {"": f"LDG_E_NA_128 in (4, 8) and LDG == LDG__128; STG_E_128 == global_store; {over_fused}"}
    if op in TWO_INPUTS:
        width = "H" if op == "fused_add_rmsnorm" else "I"
        reason = f"rows of at most {PAIR_BYTES} bytes, which registers hold"
        takes["holds"] = {f"{width} * itemsize <= {PAIR_BYTES}": reason}
    if wide is not None:
        shows[wide] = "UCGABAR_ARV >= 2 and barrier > 0 and stack_bytes == 0"
    return kernel(
        backend="cuda",
        min_sm=90,
        devices=("cuda",),
        requires=("cupy",),
        traffic=get_op(op).least,
        tuning=tuning(op),
        over="fused",
        shows=shows,
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
    """Runs `op` on rows of `x` (T, N) and `second` (T, N).  Writes `out` (T, N), `sums` (T, N) and `scale` (T,).

    The caller has checked all arguments.
    """
    T, width = out.shape
    tensors = [tensor for tensor in (x, second, weight, bias, out, sums) if tensor is not None]
    options = _cuda.macros(
        OP=OPS[op],
        ELEMENT=_cuda.ELEMENTS[x.dtype],
        QUANTIZE=QUANTIZED[out.dtype] if scale is not None else 0,
        PIECE=_piece(width, VECTOR_BYTES // x.element_size(), tensors),
        LANES=config.lanes,
        ROWS=config.rows,
        VECTORS=config.vectors,
        CLUSTER=config.cluster,
        PERSISTENT=config.persistent,
        ROUND_FIRST=round_first,
    )
    groups = cdiv(T, config.rows) * config.cluster
    grid = ctas_of(config, groups, sm_count(x.device)) if config.persistent else groups
    kernel = _cuda.load(SOURCE, "rows", options=options)
    strides = [np.int64(0 if tensor is None else tensor.stride(0)) for tensor in (x, second, out, sums)]
    kernel(
        (grid,), (config.lanes * config.rows,), x, second, weight, bias, out, sums, scale, np.int64(T), np.int32(width),
        *strides, np.float32(eps), np.float32(weight_offset),
    )  # fmt: skip


def _piece(width: int, vector: int, tensors: list[torch.Tensor]) -> int:
    """Returns the elements per access: the largest power of two that divides the width and the row addresses."""
    bits = width | vector
    for tensor in tensors:
        bits |= address_of(tensor) // tensor.element_size()
        bits |= tensor.stride(0) if tensor.ndim == 2 and tensor.shape[0] > 1 else 0
    return bits & -bits
