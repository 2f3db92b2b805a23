"""Read, write, copy and triad through HBM and through L2."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch

from rooflab.bench.core.ceilings.microkernels import microkernel

VECTOR_BYTES = 16
LARGEST_CHUNK = 4096
"""Vectors in a block's largest chunk.  Arrays hold a multiple of this number, so no kernel has a remainder."""
HBM_TIMES_L2 = 32
"""Array size over L2 size.  A launch leaves at most 1/64 of the bytes of two passes in L2.  With a smaller factor that
share would grow, and a write would seem faster than HBM by that share."""
L2_SHARE = 4
"""L2 size over the working set in L2: if a card's L2 has two halves, each half may hold its own copy of its data."""
HBM_PASSES = 2
SCALE = 3.0
SLICE = 2**26
"""Number of words that one step of a check compares."""
POISON = -1
"""An int32 value whose bits are NaN in fp32."""


class TooLittleMemory(Exception):
    """Free memory is too small for arrays much larger than L2."""


@dataclass(frozen=True)
class MemoryShape:
    """A launch shape: threads per block, blocks per SM, vectors that each thread has in flight."""

    threads: int
    blocks_per_sm: int
    unroll: int
    every_chunk: bool = False
    """Launches one block for each chunk, instead of persistent blocks that take many chunks."""

    @property
    def chunk(self) -> int:
        """Vectors in one chunk, which a block processes in one turn."""
        return self.threads * self.unroll


SHAPES = (
    MemoryShape(256, 8, 4),
    MemoryShape(512, 4, 4),
    MemoryShape(1024, 2, 2),
    MemoryShape(512, 2, 8),
    MemoryShape(256, 4, 8),
)
"""In flight per SM: 64 KiB with the third shape, 128 KiB with the others; 4.8 TB/s on 132 SMs at 700 ns need 26 KiB."""
ONE_CHUNK_SHAPES = (MemoryShape(256, 8, 4, every_chunk=True), MemoryShape(512, 4, 2, every_chunk=True))
"""Shapes for HBM only, where a chunk takes long enough to pay for its own block."""
ACCESSES = {"read": 1, "write": 1, "copy": 2, "triad": 3}
"""Number of arrays that each kind of access reads or writes."""


def groups(card: microkernel.Card, load: microkernel.Load) -> microkernel.Groups:
    """Yields HBM's four accesses, then L2's.  Raises `TooLittleMemory` if HBM's arrays do not fit in free memory."""
    arrays = _arrays(card)
    for access in ACCESSES:
        shapes = SHAPES + (ONE_CHUNK_SHAPES if access != "read" else ())
        kernels = [_kernel(card, load, access, shape, arrays, HBM_PASSES) for shape in shapes]
        yield microkernel.MicrokernelGroup(f"hbm_{access}", kernels)
    for access, count in ACCESSES.items():
        words = _whole_chunks(card.l2_bytes / L2_SHARE / count)
        small = tuple(array[:words] for array in arrays)
        yield microkernel.MicrokernelGroup(
            f"l2_{access}", [_kernel(card, load, access, shape, small) for shape in SHAPES]
        )


def _whole_chunks(nbytes: float) -> int:
    """Words in the largest array of at most `nbytes` that consists of whole chunks; at least one chunk."""
    chunks = int(nbytes) // (LARGEST_CHUNK * VECTOR_BYTES)
    return max(1, chunks) * LARGEST_CHUNK * VECTOR_BYTES // 4


def _arrays(card: microkernel.Card) -> tuple[torch.Tensor, ...]:
    nbytes = HBM_TIMES_L2 * card.l2_bytes
    needed, free = 6 * nbytes, card.free_bytes
    if needed > free:
        raise TooLittleMemory(f"expected {needed / 1e9:.1f} GB free for arrays beyond L2, got {free / 1e9:.1f}")
    words = _whole_chunks(nbytes)
    generator = torch.Generator(card.device).manual_seed(0)
    # All fields of the numbers hold random bits, because the power of a transfer depends on the data.
    made = (torch.randn(words, generator=generator, device=card.device) for _ in range(3))
    return tuple(array.view(torch.int32) for array in made)


def _kernel(
    card: microkernel.Card,
    load: microkernel.Load,
    access: str,
    shape: MemoryShape,
    arrays: tuple[torch.Tensor, ...],
    passes: int | None = None,
) -> microkernel.Microkernel:
    """The microkernel of one access and shape.  `passes` is given for HBM, where a launch's repeats are fixed."""
    level = "hbm" if passes else "l2"
    options = microkernel.defines(
        THREADS=shape.threads, BLOCKS_PER_SM=shape.blocks_per_sm, UNROLL=shape.unroll, LEVEL_L2=int(level == "l2")
    )
    kernel = load(microkernel.source("memory"), f"stream_{access}", options=options)
    if access == "triad":  # the same count as its launch bounds
        shape = replace(shape, blocks_per_sm=(shape.blocks_per_sm + 1) // 2)
    stream = _StreamRun(card, shape, arrays, kernel)
    launch: Callable[[int], None] = getattr(stream, access)
    check: Callable[[int], str] = getattr(stream, f"wrong_{access}")
    return microkernel.Microkernel(
        limit=f"{level}_{access}",
        config={
            "threads": shape.threads,
            "blocks_per_sm": 0 if shape.every_chunk else shape.blocks_per_sm,
            "unroll": shape.unroll,
            "array_bytes": arrays[0].nbytes,
        },
        unit="byte",
        work=float(ACCESSES[access] * arrays[0].nbytes),
        launch=launch,
        wrong=check,
        cold=level == "hbm",
        fixed_repeats=passes,
    )


class _StreamRun:
    """Launches and checks one shape on one set of arrays."""

    def __init__(
        self,
        card: microkernel.Card,
        shape: MemoryShape,
        arrays: tuple[torch.Tensor, ...],
        kernel: microkernel.Launchable,
    ):
        self._shape = shape
        self._a, self._b, self._c = arrays
        self._kernel = kernel
        self._chunks = self._a.numel() // 4 // shape.chunk
        self._blocks = card.sms * shape.blocks_per_sm
        self._sums = torch.zeros(self._blocks * shape.threads, dtype=torch.int32, device=card.device)

    def _launch(self, passes: int, *arguments: object) -> None:
        blocks = self._chunks * passes if self._shape.every_chunk else self._blocks
        counts = (np.uint32(self._chunks), np.uint32(passes))
        self._kernel((blocks,), (self._shape.threads,), *arguments, *counts)

    def read(self, passes: int) -> None:
        self._launch(passes, self._b, self._sums)

    def write(self, passes: int) -> None:
        self._launch(passes, self._a)

    def copy(self, passes: int) -> None:
        self._launch(passes, self._a, self._b)

    def triad(self, passes: int) -> None:
        self._launch(passes, self._a, self._b, self._c, np.float32(SCALE))

    def wrong_read(self, passes: int) -> str:
        self._sums.fill_(POISON)
        self.read(passes)
        found = int(self._sums.sum(dtype=torch.int64)) % 2**32
        expected = passes * int(self._b.sum(dtype=torch.int64)) % 2**32
        return "" if found == expected else f"the words read add up to {found}, expected {expected}"

    def wrong_write(self, passes: int) -> str:
        self._a.fill_(POISON)
        self.write(passes)
        return _first_wrong(self._a, self._written)

    def wrong_copy(self, passes: int) -> str:
        self._a.fill_(POISON)
        self.copy(passes)
        return _first_wrong(self._a, lambda at: self._b[at])

    def wrong_triad(self, passes: int) -> str:
        self._a.fill_(POISON)
        self.triad(passes)
        for at in _slices(self._a):
            a, b, c = (array[at].view(torch.float32) for array in (self._a, self._b, self._c))
            # The kernel rounds once (fused multiply-add), this check twice.
            if not bool(((a - (b + SCALE * c)).abs() <= 1e-6 * (b.abs() + SCALE * c.abs())).all()):
                return f"a != b + {SCALE} c among the words from {at.start} on"
        return ""

    def _written(self, at: slice) -> torch.Tensor:
        words = torch.arange(at.start, at.stop, device=self._a.device)
        values = (words // 4 * 2654435761 + words % 4) % 2**32
        return torch.where(values < 2**31, values, values - 2**32).to(torch.int32)


def _slices(array: torch.Tensor) -> Iterator[slice]:
    for start in range(0, array.numel(), SLICE):
        yield slice(start, min(start + SLICE, array.numel()))


def _first_wrong(found: torch.Tensor, expected: Callable[[slice], torch.Tensor]) -> str:
    for at in _slices(found):
        wrong = (found[at] != expected(at)).nonzero()
        if len(wrong):
            more = f", nor are {len(wrong) - 1} more" if len(wrong) > 1 else ""
            return f"word {at.start + int(wrong[0])} is not what was written there{more}"
    return ""
