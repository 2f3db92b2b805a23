"""Defines the interface of microkernels: a launch with a requested amount of work, and a check of the output.

A microkernel is CUDA C++ that keeps one part of a GPU busy, to measure its limit.  `streams.py` moves bytes through HBM
and L2.  `compute.py` uses the fp32 pipe, the special-function unit and the tensor cores.  The check detects work that a
compiler removed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from rooflab.reference.spec import Scalar

SOURCE_FOLDER = Path(__file__).parent
Launchable = Callable[..., None]
"""A kernel as `rooflab.kernels._cuda.load` returns it: `kernel(grid, block, *arguments, shared_bytes=0)`."""
Load = Callable[..., Launchable]
"""A function that compiles a source to a kernel: `load(source, name, options=())`."""


@dataclass(frozen=True)
class Card:
    """Facts about a GPU that the microkernels need."""

    device: torch.device
    sm: int
    """The compute capability times 10: 90 for Hopper."""
    sms: int
    l2_bytes: int


@dataclass(frozen=True)
class Microkernel:
    """One microkernel in one launch shape."""

    limit: str
    """The limit that the microkernel measures: `hbm_read`, `l2_copy`, `fma`, `ex2`, `bf16 wgmma shared`..."""
    config: Mapping[str, Scalar]
    """The launch shape, and the source of the operands."""
    work: float
    """Bytes, FLOPs or operations in one repeat of one launch."""
    launch: Callable[[int], None]
    """`launch(repeats)` enqueues one launch."""
    wrong: Callable[[int], str]
    """`wrong(repeats)` poisons the outputs, launches again, and returns the fault of the outputs, or ""."""
    clock_hz: Callable[[], float | None] = lambda: None
    """The SM clock during the last launch, in Hz; None if the kernel does not read the clock."""
    dtype: str | None = None
    """The operand dtype of matrix products."""
    fixed_repeats: int | None = None
    """Repeats per launch, if the data size fixes the time of a launch.  Then the timer empties L2 before each launch.
    None lets the timer choose the repeats."""


def compiled(load: Load, file: str, name: str, macros: Mapping[str, int], prelude: str) -> Launchable:
    """Compiles the CUDA kernel `name`.  The source is `common.cu`, the text `prelude` and `file`, in this order.  Each
    name in `macros` becomes an upper-case macro with the given value."""
    source_text = f"{(SOURCE_FOLDER / 'common.cu').read_text()}\n{prelude}\n{(SOURCE_FOLDER / file).read_text()}"
    return load(source_text, name, options=tuple(f"-D{macro.upper()}={value}" for macro, value in macros.items()))


def summing(
    kernel: Launchable,
    inputs: Sequence[torch.Tensor],
    sums: torch.Tensor,
    expected: Callable[[int], torch.Tensor],
    tolerance: float,
    *,
    limit: str,
    config: Mapping[str, Scalar],
    work: float,
    dtype: str | None = None,
    scalars: Callable[[int], tuple[object, ...]] = lambda repeats: (np.uint32(repeats),),
    shared_bytes: int = 0,
) -> Microkernel:
    """Makes a microkernel from a kernel that stores one sum per thread, and checks these sums.

    The kernel's arguments are, in this order, `inputs`, `sums`, an array for clock readings, and `scalars(repeats)`.
    `sums` has shape `[thread blocks, threads, ...]`.  `expected(repeats)` returns the right sums.  The largest allowed
    error is `tolerance` times the root mean square of the right sums."""
    block_count, cta_size = sums.shape[:2]
    # The cycles and the nanoseconds of each block's work in the last launch.
    clock_readings = torch.zeros(block_count, 2, dtype=torch.int64, device=sums.device)

    def launch(repeats: int) -> None:
        kernel((block_count,), (cta_size,), *inputs, sums, clock_readings, *scalars(repeats), shared_bytes=shared_bytes)

    def wrong(repeats: int) -> str:
        sums.fill_(float("nan"))
        launch(repeats)
        compiler_log: str = getattr(kernel, "log", "")
        if "serialized" in compiler_log:  # ptxas did it: each wgmma then waits for the previous one
            return f"the compiler serialized its wgmma instructions: {compiler_log}"
        return disagreement(sums, expected(repeats), tolerance)

    def clock_hz() -> float | None:
        clock_counts = clock_readings.cpu().numpy().astype(np.float64)
        valid_counts = clock_counts[clock_counts[:, 1] > 0]
        return float(np.median(valid_counts[:, 0] / valid_counts[:, 1]) * 1e9) if len(valid_counts) else None

    return Microkernel(limit, config, work, launch, wrong, clock_hz, dtype)


def disagreement(sums: torch.Tensor, expected: torch.Tensor, tolerance: float) -> str:
    """Describes an error of `sums`, or returns "".  Allows `tolerance` times the root mean square of `expected`."""
    sums, expected = sums.double(), expected.double()
    error_limit = tolerance * float(expected.square().mean().sqrt())
    max_deviation = float((sums - expected).abs().max())
    if max_deviation <= error_limit:  # `<=` is false for NaN, so NaN fails
        return ""
    return f"sums differ by up to {max_deviation:.3g} from what arithmetic says, allowed are {error_limit:.3g}"
