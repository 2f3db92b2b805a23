"""Keeps Hopper's tensor cores busy with wgmma: B from shared memory, A from shared memory or from registers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from rooflab.bench.core.ceilings.microkernels import microkernel

ROW_BYTES = 128
"""Bytes of K in one stage: one row of the 128-byte swizzle."""
STAGES = 4
RESTART = 8
"""Number of passes over the stages after which the accumulators restart at zero."""
Source = Literal["shared", "registers"]


@dataclass(frozen=True)
class WgmmaLaunch:
    """The instruction's N, and the warpgroups per block; one block per SM."""

    n: int
    warpgroups: int

    @property
    def m(self) -> int:
        """Rows of A that a block holds."""
        return 64 * self.warpgroups

    def shared_bytes(self, a_from: Source) -> int:
        return STAGES * ROW_BYTES * (self.n + (self.m if a_from == "shared" else 0))


SHAPES = (WgmmaLaunch(256, 2), WgmmaLaunch(256, 1), WgmmaLaunch(128, 2))
"""Two warpgroups take turns on the tensor cores, so that one waits while the other computes."""


def groups(card: microkernel.Card, load: microkernel.Load) -> microkernel.Groups:
    """Yields two groups for each dtype, with A from shared memory and from registers; only on Hopper."""
    if card.sm != 90:
        return
    for dtype in microkernel.DTYPES:
        yield microkernel.MicrokernelGroup(
            f"{dtype} wgmma shared", [_kernel(card, load, dtype, shape, "shared") for shape in SHAPES]
        )
        yield microkernel.MicrokernelGroup(
            f"{dtype} wgmma registers", [_kernel(card, load, dtype, shape, "registers") for shape in SHAPES]
        )


def prelude(dtype: str, n: int) -> str:
    """The macros `WGMMA_SHARED` and `WGMMA_REGISTERS`: d (N / 2 floats) = a * b + d, or a * b if `add` is 0."""
    return _macro("WGMMA_SHARED", dtype, n, "shared") + _macro("WGMMA_REGISTERS", dtype, n, "registers")


def _macro(name: str, dtype: str, n: int, a_from: Source) -> str:
    kind = microkernel.DTYPES[dtype]
    d = n // 2
    # The operands are numbered in this order: d..., a (a descriptor or four registers), b, add.
    a_count = 1 if a_from == "shared" else 4
    a = f"%{d}" if a_from == "shared" else "{" + ", ".join(f"%{d + i}" for i in range(4)) + "}"
    a_operands = '"l"(a)' if a_from == "shared" else ", ".join(f'"r"((a)[{i}])' for i in range(4))
    b, add = f"%{d + a_count}", f"%{d + a_count + 1}"
    # The signs of a and b come first; then, only for 16-bit types, a transpose flag of each operand in shared memory.
    transposed = (", 0" if a_from == "registers" else ", 0, 0") if kind.bytes == 2 else ""
    accumulators = ", ".join(f"%{i}" for i in range(d))
    instruction = (
        f"wgmma.mma_async.sync.aligned.m64n{n}k{microkernel.STEP_BYTES // kind.bytes}.f32.{kind.ptx}.{kind.ptx} "
        f"{{{accumulators}}}, {a}, {b}, adds, 1, 1{transposed};"
    )
    text = f"{{\\n\\t.reg .pred adds;\\n\\tsetp.ne.b32 adds, {add}, 0;\\n\\t{instruction}\\n\\t}}"
    outputs = ", ".join(f'"+f"((d)[{i}])' for i in range(d))
    return f'#define {name}(d, a, b, add) asm volatile("{text}" : {outputs} : {a_operands}, "l"(b), "r"(add))\n'


def _kernel(
    card: microkernel.Card, load: microkernel.Load, dtype: str, shape: WgmmaLaunch, a_from: Source
) -> microkernel.Microkernel:
    """The microkernel of one dtype and shape, in which all blocks compute the same product."""
    options = microkernel.defines(N=shape.n, WARPGROUPS=shape.warpgroups, STAGES=STAGES, RESTART=RESTART)
    kernel = load(microkernel.source("wgmma", prelude(dtype, shape.n)), f"wgmma_{a_from}", options=options)
    operands = microkernel.Operands.random(dtype, shape.m, shape.n, STAGES * ROW_BYTES, card.device)

    def expected(passes: int) -> torch.Tensor:
        since_restart = (passes - 1) % RESTART + 1
        # A warp holds 16 rows of the product.
        return since_restart * microkernel.per_thread(operands.product().reshape(-1, 16, shape.n)).flatten()

    run = microkernel.Sums(
        kernel,
        card.sms,
        128 * shape.warpgroups,
        (operands.a, operands.b),
        torch.zeros(card.sms, 128 * shape.warpgroups, device=card.device),
        expected,
        microkernel.DTYPES[dtype].tolerance,
        "sums of accumulators",
        shared_bytes=shape.shared_bytes(a_from),
    )
    config = {"n": shape.n, "warpgroups": shape.warpgroups, "a_from": a_from}
    k = STAGES * ROW_BYTES // microkernel.DTYPES[dtype].bytes
    return run.measuring(f"{dtype} wgmma {a_from}", "flop", 2.0 * card.sms * shape.m * shape.n * k, config, dtype)
