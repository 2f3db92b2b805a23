"""What the two `gemv` rungs share on the host: configs, which rows they take, and the launch."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import torch
import triton

from rooflab.kernels import _cuda
from rooflab.kernels._device import HOPPER_SMS
from rooflab.kernels.gemm_w4a16._stream_device import SOURCE
from rooflab.kernels.tuning import REGISTERS_PER_THREAD, Footprint
from rooflab.reference.spec import Case

WARP = 32
ROWS = 16
"""Rows of the weight that a warp multiplies: the m of mma.m16n8k16."""
COLUMNS = 8
"""Its n."""
MOST_COLUMNS = 16
"""Two mma for each 16 x 16 codes; from there on activations fill the registers that the stream needs."""
MOST_M = 8
VECTOR_BYTES = 16
QUAD_BYTES = 64
"""Of a row that a warp loads at once."""
OTHER_REGISTERS = 32
"""Addresses, scales and dequantised codes, at least."""
MAGIC = 0x43004300
"""128 in bf16, twice."""
SCALES = {torch.float32: 4, torch.bfloat16: 2, torch.float16: 1}
"""What the source calls each dtype of a scale."""


@dataclass(frozen=True)
class Config:
    """How the weight is shared out."""

    warps: int
    """Warps of a CTA."""
    warps_k: int
    """Those that share 16 rows, each with every `warps_k * split`-th chunk of K."""
    split: int
    """CTAs, a cluster, that share 16 rows."""
    depth: int
    """Chunks that a warp has asked for ahead of the one that it multiplies."""


def all_configs() -> tuple[Config, ...]:
    """Every way to split K over three warps or more, and two to eight chunks on their way."""
    shared = [(4, 1), (4, 2), *((warps, warps) for warps in (3, 4, 5, 6, 8))]
    sizes = itertools.product(shared, (1, 2, 4, 8), (2, 4, 6, 8))
    return tuple(Config(*warps, split, depth) for warps, split, depth in sizes)


def chunks(K: int, bits: int) -> int:
    """Pieces of 64 bytes in a row of codes."""
    return -(-K * bits // (8 * QUAD_BYTES))


def column_tiles(M: int, subgroups: int) -> int:
    """Tiles of eight columns that M rows of a take, with a column for each group that a quad holds at once."""
    return -(-M * subgroups // COLUMNS)


def warps_per_sm(tiles: int, zeros: bool) -> int:
    """Warps that the registers of an SM hold: 128 each, 168 with a second tile of activations or with zero points, and
    255 with both."""
    return {0: 16, 1: 12, 2: 8}[(tiles > 1) + zeros]


def footprint(config: Config, case: Case, bits: int, subgroups: int) -> Footprint:
    """Codes on their way, and activations of this chunk and the next, in registers; sums of each warp in shared
    memory."""
    M, N = min(int(case["M"]), MOST_M, MOST_COLUMNS // subgroups), int(case["N"])
    tiles = column_tiles(M, subgroups)
    return Footprint(
        threads=WARP * config.warps,
        registers=8 * config.depth + 2 * tiles * 64 // bits + 8 * tiles,
        shared_bytes=4 * ROWS * config.warps * M,
        ctas=triton.cdiv(N, ROWS * (config.warps // config.warps_k)) * config.split,
    )


def is_legal(config: Config, case: Case, bits: int, subgroups: int) -> bool:
    """A chunk for every share of K at least, and what is on its way within a thread's registers."""
    shares = config.warps_k * config.split
    needs = footprint(config, case, bits, subgroups)
    return (
        (shares == 1 or shares <= chunks(int(case["K"]), bits))
        and needs.fits
        and needs.registers <= REGISTERS_PER_THREAD - OTHER_REGISTERS
    )


def heuristic(case: Case, bits: int, subgroups: int) -> Config:
    """One wave: as many shares of K as fill every SM's warps once, and no more than K has chunks."""
    rows, most = max(triton.cdiv(int(case["N"]), ROWS), 1), chunks(int(case["K"]), bits)
    tiles = column_tiles(min(int(case["M"]), MOST_M, MOST_COLUMNS // subgroups), subgroups)
    warps = warps_per_sm(tiles, bool(case.get("zeros")))
    depth = 6 if warps <= 8 else 4
    shares = max(min(HOPPER_SMS * warps // rows, most), 1)
    if shares <= 2:
        return Config(4, shares, 1, depth)
    split = next(split for split in (1, 2, 4, 8) if shares <= 8 * split or split == 8)
    shared = min(shares // split, 8)
    return Config(shared, shared, split, depth)


def vectors_of(a: torch.Tensor) -> bool:
    """Whether each row of a is a whole number of 16-byte loads."""
    bits = a.data_ptr() | 2 * a.shape[1] | (2 * a.stride(0) if a.shape[0] > 1 else 0)
    return bits % VECTOR_BYTES == 0


def launch(
    config: Config,
    a: torch.Tensor,
    codes: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor | None,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    *,
    bits: int,
    subgroups: int,
) -> None:
    """One launch.  codes: packed, int32 (N, words); scale and zero of groups, of one layout, rows contiguous."""
    (M, K), N = a.shape, codes.shape[0]
    tiles = column_tiles(M, subgroups)
    sizes = {
        "BITS": bits,
        "A_VECTORS": int(vectors_of(a)),
        "SCALE": SCALES[scale.dtype],
        "ZEROS": int(zero is not None),
        "M": M,
        "SUB": subgroups,
        "N_TILES": tiles,
        "WARPS": config.warps,
        "WARPS_K": config.warps_k,
        "SPLIT": config.split,
        "DEPTH": config.depth,
        "CTAS_PER_SM": max(warps_per_sm(tiles, zero is not None) // config.warps, 1),
    }
    kernel = _cuda.load(SOURCE, "gemv", options=tuple(f"-D{name}={value}" for name, value in sizes.items()))
    kernel(
        (triton.cdiv(N, ROWS * (config.warps // config.warps_k)) * config.split,),
        (WARP * config.warps,),
        a,
        codes,
        scale,
        zero,
        bias,
        out,
        np.int32(N),
        np.int32(K),
        np.int32(scale.shape[-1]),
        np.int64(a.stride(0) if M > 1 else 0),
        np.int64(4 * codes.stride(0)),
        np.int64(scale.stride(0) if N > 1 else 0),
        np.int64(out.stride(0)),
        np.uint32(MAGIC),
    )
