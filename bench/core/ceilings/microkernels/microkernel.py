"""The interface of every microkernel: launches with a requested amount of work, and a check of a launch's output."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch

from rooflab.reference.spec import Scalar

Unit = Literal["byte", "flop", "op", "launch"]
HERE = Path(__file__).parent
Launchable = Callable[..., None]
"""A kernel as `rooflab.kernels._cuda.load` returns it: `kernel(grid, block, *arguments, shared_bytes=0)`."""
Load = Callable[..., Launchable]
"""Compiles a source to a kernel: `load(source, name, options=())`."""


@dataclass(frozen=True)
class Card:
    """The facts about a GPU that the microkernels need."""

    device: torch.device
    sm: int
    """Compute capability, 90 for Hopper."""
    sms: int
    l2_bytes: int
    free_bytes: float
    """Memory that the microkernels may allocate."""


@dataclass(frozen=True)
class Microkernel:
    """One microkernel in one launch shape."""

    limit: str
    """The limit that the microkernel measures: `hbm_read`, `l2_copy`, `fma`, `ex2`, `bf16 wgmma`..."""
    config: Mapping[str, Scalar]
    """The launch shape, and the source of the operands."""
    unit: Unit
    work: float
    """Units of work in one repeat of one launch."""
    launch: Callable[[int], None]
    """`launch(repeats)` enqueues one launch."""
    wrong: Callable[[int], str]
    """`wrong(repeats)` poisons the outputs, launches once more, and returns the fault of the outputs, or ""."""
    clock_hz: Callable[[], float | None] = lambda: None
    """The SM clock during the last launch, in Hz; None if the kernel does not read the clock."""
    dtype: str | None = None
    """Operand dtype of matrix products."""
    cold: bool = False
    """Whether the timer must empty L2 before each launch."""
    fixed_repeats: int | None = None
    """Repeats per launch if the data size fixes the time of a launch; None lets the timer choose the repeats."""


@dataclass(frozen=True)
class MicrokernelGroup:
    """Microkernels that measure the same limit; the fastest one sets the limit."""

    limit: str
    kernels: Sequence[Microkernel]


Groups = Iterator[MicrokernelGroup]


@cache
def source(name: str, prelude: str = "") -> str:
    """The source text: `common.cu`, then `prelude`, then `<name>.cu`."""
    return f"{(HERE / 'common.cu').read_text()}\n{prelude}\n{(HERE / f'{name}.cu').read_text()}"


def defines(**values: int) -> tuple[str, ...]:
    """Compiler options that define macros, such as `-DTHREADS=256`."""
    return tuple(f"-D{name}={value}" for name, value in values.items())


@dataclass(frozen=True)
class Sums:
    """Launches one shape of a kernel whose threads store sums, and checks these sums.

    The kernel takes, in this order, the inputs, the sums, the clocks, and `scalars(repeats)`.
    """

    kernel: Launchable
    blocks: int
    threads: int
    inputs: tuple[torch.Tensor, ...] = field(repr=False)
    sums: torch.Tensor = field(repr=False)
    expected: Callable[[int], torch.Tensor]
    """`expected(repeats)`: the right sums after `repeats`, in fp64; they broadcast to the shape of `sums`."""
    tolerance: float
    what: str
    scalars: Callable[[int], tuple[object, ...]] = lambda repeats: (np.uint32(repeats),)
    shared_bytes: int = 0

    @cached_property
    def clocks(self) -> torch.Tensor:
        """(blocks, 2), int64: the cycles and the nanoseconds of each block's work in the last launch."""
        return torch.zeros(self.blocks, 2, dtype=torch.int64, device=self.sums.device)

    def clock_hz(self) -> float | None:
        """The median clock over the blocks of the last launch, in Hz; None if the timer did not advance."""
        counts = self.clocks.cpu().numpy().astype(np.float64)
        ran = counts[counts[:, 1] > 0]
        return float(np.median(ran[:, 0] / ran[:, 1]) * 1e9) if len(ran) else None

    def launch(self, repeats: int) -> None:
        arguments = (*self.inputs, self.sums, self.clocks, *self.scalars(repeats))
        self.kernel((self.blocks,), (self.threads,), *arguments, shared_bytes=self.shared_bytes)

    def wrong(self, repeats: int) -> str:
        """Poisons the sums, launches, and returns the fault of the sums or of the compiled code, or ""."""
        self.sums.fill_(float("nan"))
        self.launch(repeats)
        log: str = getattr(self.kernel, "log", "")
        if "serialized" in log:  # ptxas did it: each wgmma then waits for the previous one
            return f"the compiler serialized its wgmma instructions: {log}"
        return disagreement(self.sums, self.expected(repeats), self.tolerance, self.what)

    def measuring(
        self, limit: str, unit: Unit, work: float, config: Mapping[str, Scalar], dtype: str | None = None
    ) -> Microkernel:
        return Microkernel(limit, config, unit, work, self.launch, self.wrong, self.clock_hz, dtype)


def disagreement(found: torch.Tensor, expected: torch.Tensor, tolerance: float, what: str) -> str:
    """The fault of `found`, or "": it may differ from `expected` by `tolerance` times the RMS of `expected`."""
    found, expected = found.double(), expected.double()
    allowed = tolerance * float(expected.square().mean().sqrt())
    worst = float((found - expected).abs().max())
    if worst <= allowed:  # `<=` is false for NaN, so NaN fails
        return ""
    return f"{what}: differ by up to {worst:.3g} from what arithmetic says, allowed are {allowed:.3g}"


STEP_BYTES = 32
"""K of one tensor-core instruction, in bytes; the same for every dtype."""


class Dtype(NamedTuple):
    """An operand dtype."""

    ptx: str
    bytes: int
    tolerance: float
    """Allowed error of a sum of accumulators, relative to the root mean square of the sums."""


DTYPES = {
    "bf16": Dtype("bf16", 2, 0.005),
    "fp16": Dtype("f16", 2, 0.005),
    "tf32": Dtype("tf32", 4, 0.005),
    # Hopper's tensor cores keep about 14 bits of the sum in an fp8 matrix product.
    "fp8_e4m3": Dtype("e4m3", 1, 0.05),
}
"""Operand dtypes by name; all accumulate in fp32."""


@dataclass(frozen=True)
class Operands:
    """a: (M, K) and b: (N, K), both K-major, with normally distributed values that are exact in their dtype."""

    a: torch.Tensor
    b: torch.Tensor

    @classmethod
    def random(cls, dtype: str, m: int, n: int, k_bytes: int, device: torch.device) -> Operands:
        """Random operands, where K is `k_bytes` divided by the dtype's size in bytes."""
        generator = torch.Generator(device).manual_seed(0)
        k = k_bytes // DTYPES[dtype].bytes
        return cls(*(_random(dtype, rows, k, generator, device) for rows in (m, n)))

    def product(self) -> torch.Tensor:
        """a b^T in fp64: (M, N)."""
        return self.a.double() @ self.b.double().T


def _random(dtype: str, rows: int, k: int, generator: torch.Generator, device: torch.device) -> torch.Tensor:
    values = torch.randn(rows, k, generator=generator, device=device)
    if dtype == "tf32":  # keeps 10 bits of mantissa: tensor cores ignore the other 13
        return (values.view(torch.int32) & ~0x1FFF).view(torch.float32)
    kinds = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8_e4m3": torch.float8_e4m3fn}
    return values.to(kinds[dtype])


def per_thread(product: torch.Tensor) -> torch.Tensor:
    """One sum for each of a warp's 32 threads: over the elements of a 16 x n tile that the thread accumulates.

    Thread t holds rows t / 4 and t / 4 + 8, and of every 8 columns the columns 2 (t % 4) and 2 (t % 4) + 1 (PTX ISA,
    "Register Fragments" of wgmma and of mma.m16n8).  `product`: (..., 16, n), 8 divides n; returns (..., 32).
    """
    *outer, _, n = product.shape
    split = product.reshape(*outer, 2, 8, n // 8, 4, 2)
    return split.sum(dim=(-5, -3, -1)).reshape(*outer, 32)
