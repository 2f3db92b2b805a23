"""Keeps the tensor cores busy with mma.sync, with operands in registers."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rooflab.bench.core.ceilings.microkernels import microkernel

RESTART = 8
"""Number of passes after which the accumulators restart at zero."""


@dataclass(frozen=True)
class MmaShape:
    """Threads per block, blocks per SM, and a warp's product: tiles of 16 rows, tiles of 8 columns, and steps of K."""

    threads: int
    blocks_per_sm: int
    m_tiles: int
    n_tiles: int
    steps: int


SHAPES = (MmaShape(256, 2, 2, 4, 4), MmaShape(128, 2, 4, 4, 2), MmaShape(128, 4, 2, 4, 4))


def groups(card: microkernel.Card, load: microkernel.Load) -> microkernel.Groups:
    """Yields one group for each dtype that mma.sync multiplies on this card; no group below compute capability 8.0."""
    if card.sm < 80:
        return
    for dtype in dtypes_of(card.sm):
        yield microkernel.MicrokernelGroup(f"{dtype} mma.sync", [_kernel(card, load, dtype, shape) for shape in SHAPES])


def dtypes_of(sm: int) -> tuple[str, ...]:
    """All dtypes, but fp8 only on 8.9 and from 12.0 on: on 9.0 and 10.0 mma.sync converts fp8 and multiplies fp16."""
    return tuple(dtype for dtype in microkernel.DTYPES if dtype != "fp8_e4m3" or sm == 89 or sm >= 120)


def prelude(dtype: str) -> str:
    """The macro `MMA`: d (4 floats) += a (4 registers) * b (2 registers)."""
    kind = microkernel.DTYPES[dtype]
    name = f"mma.sync.aligned.m16n8k{microkernel.STEP_BYTES // kind.bytes}.row.col.f32.{kind.ptx}.{kind.ptx}.f32"
    d = "{%0, %1, %2, %3}"
    outputs = ", ".join(f'"+f"((d)[{i}])' for i in range(4))
    inputs = ", ".join([*(f'"r"((a)[{i}])' for i in range(4)), *(f'"r"((b)[{i}])' for i in range(2))])
    text = f"{name} {d}, {{%4, %5, %6, %7}}, {{%8, %9}}, {d};"
    return f'#define MMA(d, a, b) asm volatile("{text}" : {outputs} : {inputs})\n'


def _kernel(card: microkernel.Card, load: microkernel.Load, dtype: str, shape: MmaShape) -> microkernel.Microkernel:
    """The microkernel of one dtype and shape, in which all warps compute the same product."""
    options = microkernel.defines(
        THREADS=shape.threads,
        BLOCKS_PER_SM=shape.blocks_per_sm,
        M_TILES=shape.m_tiles,
        N_TILES=shape.n_tiles,
        STEPS=shape.steps,
        RESTART=RESTART,
    )
    blocks = card.sms * shape.blocks_per_sm
    operands = microkernel.Operands.random(
        dtype, 16 * shape.m_tiles, 8 * shape.n_tiles, shape.steps * microkernel.STEP_BYTES, card.device
    )

    def expected(restarts: int) -> torch.Tensor:
        tiles = operands.product().reshape(shape.m_tiles, 16, 8 * shape.n_tiles)
        return RESTART * microkernel.per_thread(tiles).sum(0)

    warps = blocks * shape.threads // 32
    run = microkernel.Sums(
        load(microkernel.source("mma_sync", prelude(dtype)), "mma_registers", options=options),
        blocks,
        shape.threads,
        (operands.a, operands.b),
        torch.zeros(warps, 32, device=card.device),
        expected,
        microkernel.DTYPES[dtype].tolerance,
        "sums of accumulators",
    )
    config = {
        "threads": shape.threads,
        "blocks_per_sm": shape.blocks_per_sm,
        "m_tiles": shape.m_tiles,
        "n_tiles": shape.n_tiles,
    }
    m, n, k = (
        16 * shape.m_tiles,
        8 * shape.n_tiles,
        shape.steps * microkernel.STEP_BYTES // microkernel.DTYPES[dtype].bytes,
    )
    return run.measuring(f"{dtype} mma.sync", "flop", 2.0 * warps * m * n * k * RESTART, config, dtype)
