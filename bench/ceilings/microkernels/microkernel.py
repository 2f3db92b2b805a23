"""What every microkernel offers: launches of as much work as asked for, and a check of what the last one left."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch

from rooflab.reference.spec import Scalar

Unit = Literal["byte", "flop", "op", "launch"]
HERE = Path(__file__).parent
Launchable = Callable[..., None]
"""A loaded kernel, as `rooflab.kernels._cuda.load` gives it: `kernel(grid, block, *arguments, shared_bytes=0)`."""
Load = Callable[..., Launchable]
"""How a source becomes a kernel: `load(source, name, options=())`."""


@dataclass(frozen=True)
class Card:
    """What the microkernels need to know of a GPU."""

    device: torch.device
    sm: int
    """Compute capability, 90 for Hopper."""
    sms: int
    l2_bytes: int
    free_bytes: float
    """Memory that may be taken."""


@dataclass(frozen=True)
class Microkernel:
    """One microkernel in one launch shape."""

    limit: str
    """What it finds out: `hbm_read`, `l2_copy`, `fma`, `ex2`, `bf16 wgmma`..."""
    config: Mapping[str, Scalar]
    """The launch shape, and where operands come from."""
    unit: Unit
    work: float
    """Units of work in one repeat of one launch."""
    launch: Callable[[int], None]
    """`launch(repeats)` enqueues one launch."""
    wrong: Callable[[int], str]
    """`wrong(repeats)` launches once more, into poisoned outputs, and says what is wrong with them, or nothing."""
    clock_hz: Callable[[], float | None] = lambda: None
    """The SM clock that the last launch held, where the kernel reads it."""
    dtype: str | None = None
    """Operand dtype of matrix products."""
    cold: bool = False
    """Whether L2 is to be emptied before a launch."""
    fixed_repeats: int | None = None
    """Repeats of a launch where the data's size sets how long it takes; else as many as the timer wants."""


@dataclass(frozen=True)
class Group:
    """Microkernels that find out one limit, of which the fastest counts."""

    limit: str
    kernels: Sequence[Microkernel]


Groups = Iterator[Group]


@cache
def source(name: str, prelude: str = "") -> str:
    """The text of `<name>.cu` behind what all have in common and `prelude`."""
    return f"{(HERE / 'common.cu').read_text()}\n{prelude}\n{(HERE / f'{name}.cu').read_text()}"


def defines(**values: int) -> tuple[str, ...]:
    """`-DTHREADS=256` and so on."""
    return tuple(f"-D{name}={value}" for name, value in values.items())


@dataclass(frozen=True)
class Clocks:
    """A buffer in which every block leaves how many cycles and nanoseconds it worked."""

    counts: torch.Tensor = field(repr=False)
    """(blocks, 2), int64."""

    @classmethod
    def of(cls, blocks: int, device: torch.device) -> Clocks:
        """A buffer for a launch of `blocks`."""
        return cls(torch.zeros(blocks, 2, dtype=torch.int64, device=device))

    def hz(self) -> float | None:
        """The median over the blocks of the last launch; None where the timer did not move."""
        counts = self.counts.cpu().numpy().astype(np.float64)
        ran = counts[counts[:, 1] > 0]
        return float(np.median(ran[:, 0] / ran[:, 1]) * 1e9) if len(ran) else None


@dataclass(frozen=True)
class Sums:
    """Launches of one shape of a kernel whose threads leave sums, and the check of these.

    The kernel takes the inputs, the sums, the clocks and the scalars of as many repeats, in this order.
    """

    kernel: Launchable
    blocks: int
    threads: int
    inputs: tuple[torch.Tensor, ...] = field(repr=False)
    sums: torch.Tensor = field(repr=False)
    clocks: Clocks
    expected: Callable[[int], torch.Tensor]
    """The sums after as many repeats, in fp64; they broadcast to those of a launch."""
    tolerance: float
    what: str
    scalars: Callable[[int], tuple[object, ...]] = lambda repeats: (np.uint32(repeats),)
    shared_bytes: int = 0

    def launch(self, repeats: int) -> None:
        arguments = (*self.inputs, self.sums, self.clocks.counts, *self.scalars(repeats))
        self.kernel((self.blocks,), (self.threads,), *arguments, shared_bytes=self.shared_bytes)

    def wrong(self, repeats: int) -> str:
        """Launches into poisoned sums, and says what is wrong with them or with the compiled code, or nothing."""
        self.sums.fill_(float("nan"))
        self.launch(repeats)
        log: str = getattr(self.kernel, "log", "")
        if "serialized" in log:  # by ptxas: each wgmma then waits for the one before
            return f"the compiler serialized its wgmma instructions: {log}"
        return disagreement(self.sums, self.expected(repeats), self.tolerance, self.what)

    def measuring(
        self, limit: str, unit: Unit, work: float, config: Mapping[str, Scalar], dtype: str | None = None
    ) -> Microkernel:
        return Microkernel(limit, config, unit, work, self.launch, self.wrong, self.clocks.hz, dtype)


def disagreement(found: torch.Tensor, expected: torch.Tensor, tolerance: float, what: str) -> str:
    """What is wrong with `found`, or nothing: it may differ from `expected` by `tolerance` of its root mean square."""
    found, expected = found.double(), expected.double()
    allowed = tolerance * float(expected.square().mean().sqrt())
    worst = float((found - expected).abs().max())
    if worst <= allowed:  # not the other way round, so that NaN fails
        return ""
    return f"{what}: differ by up to {worst:.3g} from what arithmetic says, allowed are {allowed:.3g}"


STEP_BYTES = 32
"""K of one tensor-core instruction, in bytes, whatever the dtype."""


class Dtype(NamedTuple):
    """An operand dtype."""

    ptx: str
    bytes: int
    tolerance: float
    """Allowed error of a sum of accumulators, over its root mean square."""


DTYPES = {
    "bf16": Dtype("bf16", 2, 0.005),
    "fp16": Dtype("f16", 2, 0.005),
    "tf32": Dtype("tf32", 4, 0.005),
    # Hopper's tensor cores keep about 14 bits of an fp8 product's sum.
    "fp8_e4m3": Dtype("e4m3", 1, 0.05),
}
"""With fp32 accumulators."""


@dataclass(frozen=True)
class Operands:
    """a: (M, K) and b: (N, K), both K-major, normally distributed, exact in their dtype."""

    a: torch.Tensor
    b: torch.Tensor

    @classmethod
    def random(cls, dtype: str, m: int, n: int, k_bytes: int, device: torch.device) -> Operands:
        """K is `k_bytes` over the dtype's size."""
        generator = torch.Generator(device).manual_seed(0)
        k = k_bytes // DTYPES[dtype].bytes
        return cls(*(_random(dtype, rows, k, generator, device) for rows in (m, n)))

    def product(self) -> torch.Tensor:
        """a b^T in fp64: (M, N)."""
        return self.a.double() @ self.b.double().T


def _random(dtype: str, rows: int, k: int, generator: torch.Generator, device: torch.device) -> torch.Tensor:
    values = torch.randn(rows, k, generator=generator, device=device)
    if dtype == "tf32":  # 10 bits of mantissa: the other 13 are what the tensor cores do not read
        return (values.view(torch.int32) & ~0x1FFF).view(torch.float32)
    kinds = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8_e4m3": torch.float8_e4m3fn}
    return values.to(kinds[dtype])


def per_thread(product: torch.Tensor) -> torch.Tensor:
    """Sums over the elements of a 16 x (a multiple of 8) tile that each of a warp's 32 threads accumulates.

    Thread t holds rows t / 4 and 8 further, and columns 2 (t % 4) and one further of every 8 (PTX ISA, "Register
    Fragments" of wgmma and of mma.m16n8).  `product`: (..., 16, n); returns (..., 32).
    """
    *outer, _, n = product.shape
    split = product.reshape(*outer, 2, 8, n // 8, 4, 2)
    return split.sum(dim=(-5, -3, -1)).reshape(*outer, 32)
