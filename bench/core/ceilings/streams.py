"""Builds microkernels that read, write, copy and do a triad (`a = b + s * c`) in HBM and L2, and an empty kernel."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from rooflab.bench.core.ceilings.microkernel import Card, Launchable, Load, Microkernel, compiled

VECTOR_BYTES = 16
LARGEST_CHUNK = 4096
"""Vectors in a thread block's largest chunk.  Array sizes are multiples of this number, so there is no remainder."""
HBM_TIMES_L2 = 32
"""The array size divided by the L2 size.  A launch leaves at most 1/64 of the bytes of two passes in L2.  With a
smaller factor this share would grow, and a write would seem faster than HBM by this share."""
L2_OVER_ARRAYS = 4
"""The L2 size divided by the working set in L2.  If L2 has two halves, each half may hold a copy of the same data."""
HBM_PASSES = 2
TRIAD_SCALE = 3.0
CHECK_SLICE_WORDS = 2**26
"""The number of words that one step of a check compares."""
POISON_WORD = -1
"""An int32 value whose bits are NaN in fp32."""


class StreamShape(NamedTuple):
    """A launch shape: threads per thread block, thread blocks per SM, and vectors that each thread moves at once."""

    threads: int
    blocks_per_sm: int
    unroll: int
    every_chunk: bool = False
    """Whether each chunk has its own thread block; otherwise persistent thread blocks take many chunks."""


STREAM_SHAPES = (
    StreamShape(256, 8, 4),
    StreamShape(512, 4, 4),
    StreamShape(1024, 2, 2),
    StreamShape(512, 2, 8),
    StreamShape(256, 4, 8),
)
"""An SM has 64 KiB in flight with the third shape, 128 KiB with the others.  4.8 TB/s, 132 SMs and 700 ns: 26 KiB."""
ONE_CHUNK_SHAPES = (StreamShape(256, 8, 4, every_chunk=True), StreamShape(512, 4, 2, every_chunk=True))
"""Launch shapes for HBM only, where a chunk takes long enough to pay for its own thread block."""
ARRAYS_PER_ACCESS = {"read": 1, "write": 1, "copy": 2, "triad": 3}
"""The number of arrays that each kind of access reads or writes."""


def streams(card: Card, load: Load) -> Iterator[list[Microkernel]]:
    """Yields the microkernels for HBM (read, write, copy, triad), and then those for L2."""
    word_count = _whole_chunks(HBM_TIMES_L2 * card.l2_bytes)
    generator = torch.Generator(card.device).manual_seed(0)
    # All fields of the numbers hold random bits, because the power of a transfer depends on the data.
    random_arrays = (torch.randn(word_count, generator=generator, device=card.device) for _ in range(3))
    arrays = [stream_array.view(torch.int32) for stream_array in random_arrays]
    for access_kind in ARRAYS_PER_ACCESS:
        stream_shapes = STREAM_SHAPES + (ONE_CHUNK_SHAPES if access_kind != "read" else ())
        yield [_stream(card, load, access_kind, stream_shape, arrays, HBM_PASSES) for stream_shape in stream_shapes]
    for access_kind, array_count in ARRAYS_PER_ACCESS.items():
        word_count = _whole_chunks(card.l2_bytes / L2_OVER_ARRAYS / array_count)
        l2_arrays = [stream_array[:word_count] for stream_array in arrays]
        yield [_stream(card, load, access_kind, stream_shape, l2_arrays) for stream_shape in STREAM_SHAPES]


def _whole_chunks(nbytes: float) -> int:
    """Rounds `nbytes` down to whole chunks of 64 KiB, but to at least one chunk.  Returns the size in 4-byte words."""
    chunk_count = int(nbytes) // (LARGEST_CHUNK * VECTOR_BYTES)
    return max(1, chunk_count) * LARGEST_CHUNK * VECTOR_BYTES // 4


def _stream(
    card: Card, load: Load, access: str, shape: StreamShape, arrays: list[torch.Tensor], passes: int | None = None
) -> Microkernel:
    """Returns the memory microkernel for one launch shape and one kind of `access`: read, write, copy or triad.  For
    HBM, `passes` is the number of times that a launch repeats the access."""
    threads, blocks_per_sm, unroll, every_chunk = shape
    macros = {"threads": threads, "blocks_per_sm": blocks_per_sm, "unroll": unroll}
    # HBM: through the read-only path, with nothing kept in L1.  L2: past L1.
    instruction = "ld.global.nc.L1::no_allocate" if passes else "ld.global.cg"
    kernel = compiled(load, "memory.cu", f"stream_{access}", macros, f'#define LOAD "{instruction}"')
    if access == "triad":  # as in its launch bounds
        blocks_per_sm = (blocks_per_sm + 1) // 2
    a, b, c = arrays
    chunk_count, blocks = a.numel() // 4 // (threads * unroll), card.sms * blocks_per_sm
    sums = torch.zeros(blocks * threads, dtype=torch.int32, device=card.device)
    arguments = {"read": (b, sums), "write": (a,), "copy": (a, b), "triad": (a, b, c, np.float32(TRIAD_SCALE))}[access]

    def launch(passes: int) -> None:
        grid = chunk_count * passes if every_chunk else blocks
        kernel((grid,), (threads,), *arguments, np.uint32(chunk_count), np.uint32(passes))

    def wrong(passes: int) -> str:
        (sums if access == "read" else a).fill_(POISON_WORD)
        launch(passes)
        if access == "read":
            total, right_sum = (int(words.sum(dtype=torch.int64)) for words in (sums, b))
            sum_matches = (total - passes * right_sum) % 2**32 == 0
            return "" if sum_matches else f"the words read add up to {total}, expected {passes * right_sum} modulo 2^32"
        for start in range(0, a.numel(), CHECK_SLICE_WORDS):
            wrong_at = differs(access, start, *(array[start : start + CHECK_SLICE_WORDS] for array in arrays)).nonzero()
            if len(wrong_at):
                return f"word {start + int(wrong_at[0])} and {len(wrong_at) - 1} more are not what was written there"
        return ""

    return Microkernel(
        limit=f"{'hbm' if passes else 'l2'}_{access}",
        config=macros | {"blocks_per_sm": 0 if every_chunk else blocks_per_sm, "array_bytes": a.nbytes},
        work=float(ARRAYS_PER_ACCESS[access] * a.nbytes),
        launch=launch,
        wrong=wrong,
        fixed_repeats=passes,
    )


def differs(access: str, start: int, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """Returns a mask of the words of `a` that a memory benchmark wrote wrong.  `access` names the benchmark.  After
    `copy`, `a` must equal `b`.  After `triad`, `a` must equal `b + s * c`.

    After `write`, each word's value depends on its index in the whole array.  `start` is the index of `a[0]`."""
    if access == "copy":
        return a != b
    if access == "triad":
        a, b, c = (words.view(torch.float32) for words in (a, b, c))
        # The kernel rounds once (fused multiply-add), this check twice.
        return ~((a - (b + TRIAD_SCALE * c)).abs() <= 1e-6 * (b.abs() + TRIAD_SCALE * c.abs()))
    words = torch.arange(start, start + len(a), device=a.device)
    right_words = (words // 4 * 2654435761 + words % 4) % 2**32
    return a != torch.where(right_words < 2**31, right_words, right_words - 2**32).to(torch.int32)


def empty(load: Load) -> Launchable:
    """Returns a function that launches an empty kernel of one thread.  No launch is shorter."""
    return partial(load('extern "C" __global__ void nothing(unsigned int) {}', "nothing"), (1,), (1,), np.uint32(1))
