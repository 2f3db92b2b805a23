"""What the kernels over rows share: outputs in eight bits, and the configs and launch of the `cluster` rungs."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import torch
import triton

from rooflab.kernels import _cuda
from rooflab.kernels._checks import output
from rooflab.kernels._device import HOPPER_SMS, sm_count
from rooflab.kernels._rows_device import SOURCE
from rooflab.kernels._tma import address_of
from rooflab.kernels.configs import default_config
from rooflab.kernels.tuning import BF16, Footprint, Tuning
from rooflab.reference.spec import Case, Scheme

LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
"""The value that the largest magnitude of a row becomes, by dtype."""
VECTOR_BYTES = 16
WARP = 32
MOST_LANES, MOST_VECTORS, MOST_CLUSTER = 1024, 8, 8
"""Threads of a CTA that share a row, vectors of a thread, and CTAs of a portable cluster."""
CTA_THREADS = 256
"""Threads of a CTA with several rows."""
VECTORS = 4
"""Vectors of a thread where many rows are under way: 64 bytes asked for before the first is used."""


def check_quantize(quantize: torch.dtype | None) -> None:
    """Raises `ValueError` unless `quantize` is None, int8 or e4m3."""
    if quantize is not None and quantize not in LARGEST:
        raise ValueError(f"quantize: expected None, torch.int8 or torch.float8_e4m3fn, got {quantize}")


def row_outputs(
    out: torch.Tensor | tuple[torch.Tensor, ...] | None,
    shape: tuple[int, int],
    like: torch.Tensor,
    quantize: torch.dtype | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The result (T, N), and the scales (T,) fp32 if it is quantised: from `out`, or new.

    Raises `ValueError` where `out` or `quantize` does not fit.
    """
    check_quantize(quantize)
    if quantize is None:
        assert not isinstance(out, tuple), "one output"
        return output(out, shape, like), None
    codes, scale = out or (None, None)
    return output(codes, shape, like, quantize), output(scale, shape[:1], like, torch.float32)


def written_bytes(x: torch.Tensor, values: int, quantize: torch.dtype | None) -> int:
    """Bytes of a result of so many values, with the scales of its rows."""
    return values * x.element_size() if quantize is None else values + 4 * x.shape[0]


def quantize_rows(values: torch.Tensor, out: torch.Tensor, scale: torch.Tensor) -> None:
    """Writes the codes (T, N) of fp32 `values` to `out` and the scales (T,) to `scale`, in torch steps."""
    largest = values.abs().amax(dim=1) if values.shape[1] else values.new_zeros(values.shape[0])
    scale.copy_(torch.where(largest > 0, largest / LARGEST[out.dtype], 1.0))
    codes = values / scale[:, None]
    out.copy_(codes.round() if out.dtype == torch.int8 else codes)


@dataclass(frozen=True)
class Config:
    """How threads and CTAs divide the rows."""

    lanes: int
    """Threads of a CTA that share a row."""
    vectors: int
    """16-byte vectors of a row that a thread holds."""
    rows: int
    """Rows of a CTA."""
    cluster: int
    """CTAs that share a row."""
    persistent: bool
    """Whether as many CTAs as run at once take all rows, and ask for the next row early."""


def _width(case: Case) -> int:
    return int(case["H"] if "H" in case else case["I"])


def vectors_of(width: int, scheme: Scheme = BF16) -> int:
    """16-byte vectors of a row."""
    return max(1, -(-width * scheme.activation.itemsize // VECTOR_BYTES))


def configs(case: Case, scheme: Scheme = BF16) -> tuple[Config, ...]:
    """Every division by powers of two that covers a row and does not leave more than half of the threads idle."""
    needed = vectors_of(_width(case), scheme)
    found = []
    for vectors, cluster, persistent in itertools.product((1, 2, 4, 8), (1, 2, 4, 8), (False, True)):
        lanes = triton.next_power_of_2(triton.cdiv(needed, vectors * cluster))
        if lanes <= MOST_LANES and (cluster == 1 or lanes >= 4 * WARP):
            found += [Config(lanes, vectors, rows, cluster, persistent) for rows in _rows(lanes, cluster)]
    return tuple(found)


def _rows(lanes: int, cluster: int) -> list[int]:
    """Rows of a CTA: whole warps, and not more than 512 threads."""
    least = max(1, WARP // lanes)
    most = 1 if cluster > 1 else max(least, 512 // lanes)
    return [rows for rows in (1, 2, 4, 8, 16, 32, 64) if least <= rows <= most]


def footprint(config: Config, case: Case, scheme: Scheme = BF16) -> Footprint:
    """Registers for the row, the weight, a second input, the next row, and the results in fp32."""
    held = config.vectors * VECTOR_BYTES // 4
    values = config.vectors * VECTOR_BYTES // scheme.activation.itemsize
    groups = triton.cdiv(int(case["T"]), config.rows) * config.cluster
    return Footprint(
        threads=config.lanes * config.rows,
        registers=held * (3 if config.persistent else 2) + (values if scheme.output.itemsize == 1 else 8) + 24,
        shared_bytes=8 * triton.cdiv(config.lanes * config.rows, WARP) + 8,
        ctas=_ctas(config, groups) if config.persistent else groups,
    )


def _ctas(config: Config, groups: int, sms: int = HOPPER_SMS) -> int:
    """CTAs of a persistent grid: 1,024 threads an SM, in whole clusters."""
    resident = sms * max(1, MOST_LANES // (config.lanes * config.rows))
    return min(groups, resident // config.cluster * config.cluster)


def heuristic(case: Case, scheme: Scheme = BF16) -> Config:
    """Few rows: as many threads and CTAs as a row has vectors, for latency.  Many: 64 bytes a thread, persistent."""
    T, needed = int(case["T"]), vectors_of(_width(case), scheme)
    many = T > HOPPER_SMS
    vectors = min(VECTORS if many else 1, needed)
    cluster = 1
    while cluster < MOST_CLUSTER and needed > MOST_LANES * vectors * cluster:
        if not many and T * 2 * cluster > HOPPER_SMS:
            break
        cluster *= 2
    while needed > MOST_LANES * vectors * cluster:
        vectors *= 2
    lanes = triton.next_power_of_2(triton.cdiv(needed, vectors * cluster))
    rows = 1 if cluster > 1 else max(1, WARP // lanes, CTA_THREADS // lanes if many else 1)
    threads = lanes * rows
    persistent = many and T > 4 * rows * HOPPER_SMS * (2048 // threads) // cluster
    return Config(lanes, int(vectors), rows, cluster, persistent)


def is_legal(config: Config, case: Case, scheme: Scheme = BF16) -> bool:
    """It covers the row and fits an SM; 1,024 threads have 64 registers each."""
    covered = config.lanes * config.vectors * config.cluster >= vectors_of(_width(case), scheme)
    return covered and config.vectors <= MOST_VECTORS and footprint(config, case, scheme).fits


TUNING = Tuning(Config, configs, heuristic, footprint, is_legal=is_legal)


def why_not_taken(x: torch.Tensor, width: int) -> str | None:
    """Why a row does not fit in the registers of a cluster, or None."""
    most = MOST_LANES * MOST_VECTORS * MOST_CLUSTER * VECTOR_BYTES // x.element_size()
    return f"holds a row in registers, at most {most} wide, got {width}" if width > most else None


ELEMENTS = {torch.float32: 4, torch.bfloat16: 2, torch.float16: 1}
OPS = {"rmsnorm": 0, "fused_add_rmsnorm": 1, "layernorm": 2, "softmax": 3, "silu_and_mul": 4, "gelu_and_mul": 5}
QUANTIZED = {None: 0, torch.int8: 1, torch.float8_e4m3fn: 2}
"""The numbers that the source uses."""


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
    config: Config | None = None,
) -> None:
    """Runs `op` on rows of x (T, N) and `second` (T, N) into `out` (T, N), `sums` (T, N) and `scale` (T,).

    All arguments were checked before.  Raises `ValueError` on a row that is too wide.
    """
    T, width = out.shape
    reason = why_not_taken(x, width)
    if reason:
        raise ValueError(f"x: {reason}")
    if not out.numel():
        return
    quantize = out.dtype if scale is not None else None
    if config is None:
        scheme = {None: None, torch.int8: "out_int8", torch.float8_e4m3fn: "out_fp8"}[quantize] or x.dtype
        dims = {"I" if op in ("silu_and_mul", "gelu_and_mul") else "H": width}
        config = default_config(op, "cluster", scheme, x.device, T=T, **dims)
    tensors = [tensor for tensor in (x, second, weight, bias, out, sums) if tensor is not None]
    macros = {
        "OP": OPS[op],
        "ELEMENT": ELEMENTS[x.dtype],
        "QUANTIZE": QUANTIZED[quantize],
        "PIECE": _piece(width, VECTOR_BYTES // x.element_size(), tensors),
        "LANES": config.lanes,
        "ROWS": config.rows,
        "VECTORS": config.vectors,
        "CLUSTER": config.cluster,
        "PERSISTENT": int(config.persistent),
        "ROUND_FIRST": int(round_first),
    }
    groups = triton.cdiv(T, config.rows) * config.cluster
    grid = _ctas(config, groups, sm_count(x.device)) if config.persistent else groups
    kernel = _cuda.load(SOURCE, "rows", options=tuple(f"-D{name}={value}" for name, value in macros.items()))
    strides = [np.int64(0 if tensor is None else tensor.stride(0)) for tensor in (x, second, out, sums)]
    kernel(
        (grid,), (config.lanes * config.rows,), x, second, weight, bias, out, sums, scale, np.int64(T), np.int32(width),
        *strides, np.float32(eps), np.float32(weight_offset),
    )  # fmt: skip


def _piece(width: int, vector: int, tensors: list[torch.Tensor]) -> int:
    """Elements that one access may move: the largest power of two that divides the width and every row's address."""
    bits = width | vector
    for tensor in tensors:
        bits |= address_of(tensor) // tensor.element_size()
        bits |= tensor.stride(0) if tensor.ndim == 2 and tensor.shape[0] > 1 else 0
    return bits & -bits
