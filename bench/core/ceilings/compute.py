"""Builds microkernels that measure the rates of fp32 multiply-adds, special functions, and matrix products."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch

from rooflab.bench.core.ceilings.microkernel import Card, Load, Microkernel, compiled, summing

ROTATION_ANGLE = 0.0625
"""Each step of the fp32 microkernel rotates a point by about this angle in radians.  The value is exact in fp32."""
FMA_TOLERANCE = 0.01
"""The allowed error: roundings of tens of thousands of steps.  A step too many or too few is an error of 0.06."""
SPECIAL_TOLERANCE = 2e-3
"""The allowed error: roundings of sums of tens of thousands of terms, and errors in the last bits of the functions."""


class VectorShape(NamedTuple):
    """A launch shape: threads per thread block, thread blocks per SM, and independent computations per thread."""

    threads: int
    blocks_per_sm: int
    pairs: int
    steps: int
    """Steps in the unrolled loop body.  The loop's own instructions are less than 1% of the steps."""


FMA_SHAPES = (VectorShape(256, 8, 4, 64), VectorShape(512, 2, 8, 32), VectorShape(256, 4, 4, 64))
SPECIAL_SHAPES = (VectorShape(256, 8, 4, 64), VectorShape(512, 2, 4, 64))


def vector(card: Card, load: Load) -> Iterator[list[Microkernel]]:
    """Yields microkernels for fp32 multiply-adds, then for 2**x.  The other special functions have the same rate."""
    yield [_fma(card, load, kernel_shape) for kernel_shape in FMA_SHAPES]
    yield [_special(card, load, kernel_shape) for kernel_shape in SPECIAL_SHAPES]


def _fma(card: Card, load: Load, shape: VectorShape) -> Microkernel:
    """Returns the fp32 multiply-add microkernel for one launch shape.  All CTAs start with the same random values."""
    generator = torch.Generator(card.device).manual_seed(0)
    start_points = torch.randn(shape.pairs, shape.threads, 2, generator=generator, device=card.device)
    sums = torch.zeros(card.sms * shape.blocks_per_sm, shape.threads, 2, device=card.device)

    def expected(rounds: int) -> torch.Tensor:
        rotation_matrix = np.array([[1.0, ROTATION_ANGLE], [-ROTATION_ANGLE, 1.0 - ROTATION_ANGLE * ROTATION_ANGLE]])
        step_power = torch.from_numpy(np.linalg.matrix_power(rotation_matrix, rounds * shape.steps)).to(card.device)
        return start_points.double().sum(0) @ step_power.T

    return summing(
        compiled(load, "arithmetic.cu", "fma_fp32", shape._asdict(), ""),
        [start_points],
        sums,
        expected,
        FMA_TOLERANCE,
        limit="fma",
        config=shape._asdict(),
        work=2.0 * sums.numel() * shape.pairs * shape.steps,  # two fused multiply-adds of a point (x, y)
        scalars=lambda rounds: (np.float32(ROTATION_ANGLE), np.uint32(rounds)),
    )


def _special(card: Card, load: Load, shape: VectorShape) -> Microkernel:
    """Returns the 2**x microkernel for one launch shape.  The values of x start in [1, 2) and grow to at most 3."""
    generator = torch.Generator(card.device).manual_seed(0)
    start_values = 1 + torch.rand(shape.threads, generator=generator, device=card.device)
    sums = torch.zeros(card.sms * shape.blocks_per_sm, shape.threads, device=card.device)

    def step(rounds: int) -> np.float32:
        return np.float32(1.0 / (rounds * shape.steps))

    def expected(rounds: int) -> torch.Tensor:
        step_count = rounds * shape.steps
        thread_sums = torch.zeros(shape.threads, dtype=torch.float64, device=card.device)
        for first_step in range(0, step_count, 4096):
            n = torch.arange(first_step, min(first_step + 4096, step_count), dtype=torch.float64, device=card.device)
            thread_sums += torch.exp2(start_values.double()[:, None] + n * float(step(rounds))).sum(1)
        return thread_sums

    return summing(
        compiled(load, "arithmetic.cu", "special_function", shape._asdict(), ""),
        [start_values],
        sums,
        expected,
        SPECIAL_TOLERANCE,
        limit="ex2",
        config=shape._asdict(),
        work=float(sums.numel() * shape.steps),
        scalars=lambda rounds: (step(rounds), np.uint32(rounds)),
    )


STEP_BYTES = 32
"""The size of K in one tensor-core instruction, in bytes, for every dtype."""
ROW_BYTES = 128
"""The size of K in one stage of wgmma, in bytes: one row of the 128-byte swizzle."""
WGMMA_STAGES = 4
RESTART_PASSES = 8
"""The accumulators restart at zero after this many passes over the operands."""


class Dtype(NamedTuple):
    """An operand dtype of matrix multiplications."""

    ptx: str
    values: torch.dtype
    tolerance: float
    """The allowed error of a sum of accumulators, relative to the root mean square of the sums."""


DTYPES = {
    "bf16": Dtype("bf16", torch.bfloat16, 0.005),
    "fp16": Dtype("f16", torch.float16, 0.005),
    "tf32": Dtype("tf32", torch.float32, 0.005),
    # Hopper's tensor cores keep about 14 bits of the sum in an fp8 matrix product.
    "fp8_e4m3": Dtype("e4m3", torch.float8_e4m3fn, 0.05),
}
"""The operand dtypes by name.  All products accumulate in fp32."""


class WgmmaLaunch(NamedTuple):
    """A launch shape of wgmma: the size N, and the warpgroups per thread block.  Each SM has one thread block."""

    n: int
    warpgroups: int


class MmaShape(NamedTuple):
    """A launch shape.  Each warp multiplies `m_tiles` x `n_tiles` tiles of 16 x 8 elements, in `steps` steps of K."""

    threads: int
    blocks_per_sm: int
    m_tiles: int
    n_tiles: int
    steps: int


WGMMA_SHAPES = (WgmmaLaunch(256, 2), WgmmaLaunch(256, 1), WgmmaLaunch(128, 2))
"""With two warpgroups, one warpgroup waits while the other uses the tensor cores."""
MMA_SHAPES = (MmaShape(256, 2, 2, 4, 4), MmaShape(128, 2, 4, 4, 2), MmaShape(128, 4, 2, 4, 4))


def wgmma(card: Card, load: Load) -> Iterator[list[Microkernel]]:
    """Yields the microkernels of wgmma for each dtype, with operands in shared memory; only on Hopper."""
    if card.sm == 90:
        for dtype in DTYPES:
            yield [_wgmma(card, load, dtype, kernel_shape) for kernel_shape in WGMMA_SHAPES]


def mma_sync(card: Card, load: Load) -> Iterator[list[Microkernel]]:
    """Yields the microkernels of mma.sync for each dtype of the card; none below compute capability 8.0."""
    if card.sm >= 80:
        for dtype in dtypes_of(card.sm):
            yield [_mma_sync(card, load, dtype, kernel_shape) for kernel_shape in MMA_SHAPES]


def dtypes_of(sm: int) -> tuple[str, ...]:
    """Returns the dtypes to measure with mma.sync on compute capability `sm`; fp8 only on 8.9 and from 12.0 on.  On 9.0
    and 10.0, mma.sync multiplies fp8 operands as fp16."""
    return tuple(dtype for dtype in DTYPES if dtype != "fp8_e4m3" or sm == 89 or sm >= 120)


def _wgmma(card: Card, load: Load, dtype: str, shape: WgmmaLaunch) -> Microkernel:
    """Returns the wgmma microkernel for a dtype and launch shape.  All thread blocks do the same multiplication."""
    m = 64 * shape.warpgroups
    kernel_macros = {**shape._asdict(), "stages": WGMMA_STAGES, "restart": RESTART_PASSES}
    a, b = operands(dtype, m, shape.n, WGMMA_STAGES * ROW_BYTES, card.device)

    def expected(passes: int) -> torch.Tensor:
        passes_since_restart = (passes - 1) % RESTART_PASSES + 1
        # A warp holds 16 rows of the product.
        return passes_since_restart * per_thread((a.double() @ b.double().T).reshape(-1, 16, shape.n)).flatten()

    return summing(
        compiled(load, "wgmma.cu", "wgmma_products", kernel_macros, _wgmma_macro(dtype, shape.n)),
        [a, b],
        torch.zeros(card.sms, 128 * shape.warpgroups, device=card.device),
        expected,
        DTYPES[dtype].tolerance,
        limit=f"{dtype} wgmma shared",
        config=shape._asdict(),
        work=2.0 * card.sms * m * shape.n * a.shape[1],
        dtype=dtype,
        shared_bytes=WGMMA_STAGES * ROW_BYTES * (shape.n + m),
    )


def _mma_sync(card: Card, load: Load, dtype: str, shape: MmaShape) -> Microkernel:
    """Returns the mma.sync microkernel for one dtype and launch shape.  All warps compute the same matrix product."""
    m, n, block_count = 16 * shape.m_tiles, 8 * shape.n_tiles, card.sms * shape.blocks_per_sm
    a, b = operands(dtype, m, n, shape.steps * STEP_BYTES, card.device)

    def expected(restarts: int) -> torch.Tensor:
        sums = per_thread((a.double() @ b.double().T).reshape(shape.m_tiles, 16, n)).sum(0)
        return RESTART_PASSES * sums.repeat(shape.threads // 32)

    return summing(
        compiled(
            load, "mma_sync.cu", "mma_registers", {**shape._asdict(), "restart": RESTART_PASSES}, _mma_macro(dtype)
        ),
        [a, b],
        torch.zeros(block_count, shape.threads, device=card.device),
        expected,
        DTYPES[dtype].tolerance,
        limit=f"{dtype} mma.sync",
        config=shape._asdict(),
        work=2.0 * block_count * shape.threads // 32 * m * n * a.shape[1] * RESTART_PASSES,
        dtype=dtype,
    )


def _wgmma_macro(dtype: str, n: int) -> str:
    """Returns the C macro `WGMMA(d, a, b, add)`: `d = a * b + (add ? d : 0)`.  A thread has `n / 2` floats of `d`."""
    operand, d = DTYPES[dtype], n // 2
    # The operands are numbered in this order: d..., the descriptors of a and b, add.  The signs of a and b come first;
    # then, only for 16-bit types, a transpose flag of each.
    transpose_flags = ", 0, 0" if operand.values.itemsize == 2 else ""
    instruction = (
        f"wgmma.mma_async.sync.aligned.m64n{n}k{STEP_BYTES // operand.values.itemsize}.f32.{operand.ptx}.{operand.ptx} "
        f"{_numbers(0, d)}, %{d}, %{d + 1}, adds, 1, 1{transpose_flags};"
    )
    ptx_text = f"{{\\n\\t.reg .pred adds;\\n\\tsetp.ne.b32 adds, %{d + 2}, 0;\\n\\t{instruction}\\n\\t}}"
    return _macro("WGMMA(d, a, b, add)", ptx_text, d, '"l"(a), "l"(b), "r"(add)')


def _mma_macro(dtype: str) -> str:
    """Returns the C macro `MMA(d, a, b)`: `d += a * b`.  A thread has 4 floats of `d`, 4 registers of `a`, 2 of `b`."""
    operand = DTYPES[dtype]
    name = f"mma.sync.aligned.m16n8k{STEP_BYTES // operand.values.itemsize}.row.col.f32.{operand.ptx}.{operand.ptx}.f32"
    ptx_text = f"{name} {_numbers(0, 4)}, {_numbers(4, 4)}, {_numbers(8, 2)}, {_numbers(0, 4)};"
    return _macro("MMA(d, a, b)", ptx_text, 4, f"{_values('a', 4)}, {_values('b', 2)}")


def _macro(call: str, text: str, accumulators: int, inputs: str) -> str:
    """Returns the C macro `call`, which runs the PTX code `text` on float accumulators `d` and operands `inputs`."""
    return f'#define {call} asm volatile("{text}" : {_values("d", accumulators, "+f")} : {inputs})\n'


def _numbers(first: int, count: int) -> str:
    return "{" + ", ".join(f"%{first + i}" for i in range(count)) + "}"


def _values(name: str, count: int, constraint: str = "r") -> str:
    return ", ".join(f'"{constraint}"(({name})[{i}])' for i in range(count))


def operands(dtype: str, m: int, n: int, k_bytes: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns normal random matrices `a: [m, K]` and `b: [n, K]`, exact in `dtype`.  A row has `k_bytes` bytes."""
    generator = torch.Generator(device).manual_seed(0)
    torch_dtype = DTYPES[dtype].values
    values = (torch.randn(rows, k_bytes // torch_dtype.itemsize, generator=generator, device=device) for rows in (m, n))
    if dtype == "tf32":  # keeps 10 bits of mantissa: tensor cores ignore the other 13
        values = ((operand_value.view(torch.int32) & ~0x1FFF).view(torch.float32) for operand_value in values)
    a, b = (operand_value.to(torch_dtype) for operand_value in values)
    return a, b


def per_thread(product: torch.Tensor) -> torch.Tensor:
    """Sums the elements of a matrix tile that each of a warp's 32 threads accumulates: `[..., 16, n]` to `[..., 32]`.

    8 divides `n`.  The threads hold the elements as in wgmma and mma.m16n8 (PTX ISA, "Register Fragments").  Thread t
    holds rows `t / 4` and `t / 4 + 8`, and of every 8 columns `2 * (t % 4)` and `2 * (t % 4) + 1`."""
    *outer_dims, _, n = product.shape
    output_tiles = product.reshape(*outer_dims, 2, 8, n // 8, 4, 2)
    return output_tiles.sum(dim=(-5, -3, -1)).reshape(*outer_dims, 32)
