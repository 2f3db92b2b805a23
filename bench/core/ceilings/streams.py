"""Read, write, copy and triad through HBM and through L2; an empty kernel, and one that only waits for memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from rooflab.bench.core.ceilings.microkernel import Card, Launchable, Load, Microkernel, compiled

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


class StreamShape(NamedTuple):
    """A launch shape: threads per block, blocks per SM, vectors that each thread has in flight."""

    threads: int
    blocks_per_sm: int
    unroll: int
    every_chunk: bool = False
    """Launches one block for each chunk, instead of persistent blocks that take many chunks."""


SHAPES = (
    StreamShape(256, 8, 4),
    StreamShape(512, 4, 4),
    StreamShape(1024, 2, 2),
    StreamShape(512, 2, 8),
    StreamShape(256, 4, 8),
)
"""In flight per SM: 64 KiB with the third shape, 128 KiB with the others; 4.8 TB/s on 132 SMs at 700 ns need 26 KiB."""
ONE_CHUNK_SHAPES = (StreamShape(256, 8, 4, every_chunk=True), StreamShape(512, 4, 2, every_chunk=True))
"""Shapes for HBM only, where a chunk takes long enough to pay for its own block."""
ACCESSES = {"read": 1, "write": 1, "copy": 2, "triad": 3}
"""Number of arrays that each kind of access reads or writes."""


def streams(card: Card, load: Load) -> Iterator[list[Microkernel]]:
    """Yields those of HBM's four accesses, then of L2's.

    Raises `torch.cuda.OutOfMemoryError` if HBM's arrays do not fit in free memory.
    """
    arrays = _arrays(card)
    for access in ACCESSES:
        shapes = SHAPES + (ONE_CHUNK_SHAPES if access != "read" else ())
        yield [_stream(card, load, access, shape, arrays, HBM_PASSES) for shape in shapes]
    for access, count in ACCESSES.items():
        words = _whole_chunks(card.l2_bytes / L2_SHARE / count)
        small = [array[:words] for array in arrays]
        yield [_stream(card, load, access, shape, small) for shape in SHAPES]


def _whole_chunks(nbytes: float) -> int:
    """Words in the largest array of at most `nbytes` that consists of whole chunks; at least one chunk."""
    chunks = int(nbytes) // (LARGEST_CHUNK * VECTOR_BYTES)
    return max(1, chunks) * LARGEST_CHUNK * VECTOR_BYTES // 4


def _arrays(card: Card) -> list[torch.Tensor]:
    nbytes = HBM_TIMES_L2 * card.l2_bytes
    needed, free = 6 * nbytes, card.free_bytes
    if needed > free:
        text = f"expected {needed / 1e9:.1f} GB free for arrays beyond L2, got {free / 1e9:.1f}"
        raise torch.cuda.OutOfMemoryError(text)
    words = _whole_chunks(nbytes)
    generator = torch.Generator(card.device).manual_seed(0)
    # All fields of the numbers hold random bits, because the power of a transfer depends on the data.
    made = (torch.randn(words, generator=generator, device=card.device) for _ in range(3))
    return [array.view(torch.int32) for array in made]


def _stream(
    card: Card, load: Load, access: str, shape: StreamShape, arrays: list[torch.Tensor], passes: int | None = None
) -> Microkernel:
    """The microkernel of one access and shape.  `passes` is given for HBM, where a launch's repeats are fixed."""
    threads, blocks_per_sm, unroll, every_chunk = shape
    level = "hbm" if passes else "l2"
    macros = {"threads": threads, "blocks_per_sm": blocks_per_sm, "unroll": unroll, "level_l2": int(level == "l2")}
    kernel = compiled(load, "memory", f"stream_{access}", macros)
    if access == "triad":  # the same count as its launch bounds
        blocks_per_sm = (blocks_per_sm + 1) // 2
    a, b, c = arrays
    chunks, blocks = a.numel() // 4 // (threads * unroll), card.sms * blocks_per_sm
    sums = torch.zeros(blocks * threads, dtype=torch.int32, device=card.device)
    taken = {"read": (b, sums), "write": (a,), "copy": (a, b), "triad": (a, b, c, np.float32(SCALE))}[access]

    def launch(passes: int) -> None:
        grid = chunks * passes if every_chunk else blocks
        kernel((grid,), (threads,), *taken, np.uint32(chunks), np.uint32(passes))

    def wrong(passes: int) -> str:
        (sums if access == "read" else a).fill_(POISON)
        launch(passes)
        return _wrong_sum(sums, b, passes) if access == "read" else _first_wrong(partial(DIFFERS[access], a, b, c), a)

    return Microkernel(
        limit=f"{level}_{access}",
        config={
            "threads": threads,
            "blocks_per_sm": 0 if every_chunk else blocks_per_sm,
            "unroll": unroll,
            "array_bytes": a.nbytes,
        },
        work=float(ACCESSES[access] * a.nbytes),
        launch=launch,
        wrong=wrong,
        cold=level == "hbm",
        fixed_repeats=passes,
    )


def _wrong_sum(sums: torch.Tensor, words: torch.Tensor, passes: int) -> str:
    found = int(sums.sum(dtype=torch.int64)) % 2**32
    expected = passes * int(words.sum(dtype=torch.int64)) % 2**32
    return "" if found == expected else f"the words read add up to {found}, expected {expected}"


def _first_wrong(differs: Callable[[slice], torch.Tensor], array: torch.Tensor) -> str:
    for start in range(0, array.numel(), SLICE):
        wrong = differs(slice(start, min(start + SLICE, array.numel()))).nonzero()
        if len(wrong):
            more = f", nor are {len(wrong) - 1} more" if len(wrong) > 1 else ""
            return f"word {start + int(wrong[0])} is not what was written there{more}"
    return ""


def _not_written(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, at: slice) -> torch.Tensor:
    words = torch.arange(at.start, at.stop, device=a.device)
    values = (words // 4 * 2654435761 + words % 4) % 2**32
    return a[at] != torch.where(values < 2**31, values, values - 2**32).to(torch.int32)


def _not_scaled(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, at: slice) -> torch.Tensor:
    a, b, c = (array[at].view(torch.float32) for array in (a, b, c))
    # The kernel rounds once (fused multiply-add), this check twice.
    return ~((a - (b + SCALE * c)).abs() <= 1e-6 * (b.abs() + SCALE * c.abs()))


DIFFERS: dict[str, Callable[[torch.Tensor, torch.Tensor, torch.Tensor, slice], torch.Tensor]] = {
    "write": _not_written,
    "copy": lambda a, b, c, at: a[at] != b[at],
    "triad": _not_scaled,
}
"""Whether each word of `a` is another than an access writes from `b` and `c`: `(a, b, c, slice)`."""
CHAIN_THREADS = 128
CHAIN_STEP = 2**18
"""Words between two loads of a thread: each load touches memory lines, pages and channels that no earlier load did."""
CHAIN = """
extern "C" __global__ void __launch_bounds__(THREADS) chain(const unsigned* next, unsigned* ends) {
    unsigned at = threadIdx.x;
#pragma unroll
    for (int load = 0; load < DEPTH; ++load) at = next[at];
    ends[threadIdx.x] = at;
}
"""


def empty(load: Load) -> Launchable:
    """A kernel of one thread that returns at once: the shortest possible launch, `empty(load)()`."""
    return partial(load('extern "C" __global__ void nothing(unsigned int) {}', "nothing"), (1,), (1,), np.uint32(1))


def chain(load: Load, device: torch.device, depth: int) -> Microkernel:
    """One CTA; each thread does `depth` dependent loads, each from the address that the last load gave, and one store.

    The kernel's time is about the least time of any kernel with `depth` dependent loads and a store.
    Raises `ValueError` if `depth` is less than 1.
    """
    if depth < 1:
        raise ValueError(f"depth: expected at least 1, got {depth}")
    kernel = load(CHAIN, "chain", options=(f"-DTHREADS={CHAIN_THREADS}", f"-DDEPTH={depth}"))
    following = torch.arange(CHAIN_STEP, depth * CHAIN_STEP + CHAIN_THREADS, dtype=torch.int32, device=device)
    ends = torch.empty(CHAIN_THREADS, dtype=torch.int32, device=device)

    def launch(repeats: int) -> None:
        kernel((1,), (CHAIN_THREADS,), following, ends)

    def wrong(repeats: int) -> str:
        ends.fill_(POISON)
        launch(repeats)
        expected = depth * CHAIN_STEP + torch.arange(CHAIN_THREADS, dtype=torch.int32, device=device)
        found = int((ends != expected).sum())
        return f"{found} of {CHAIN_THREADS} threads did not end where their loads lead" if found else ""

    config = {"threads": CHAIN_THREADS, "depth": depth}
    return Microkernel("dependent loads", config, 1.0, launch, wrong, cold=True)
