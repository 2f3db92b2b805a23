"""How `split_kv` divides its work: the host's counterpart of what `_split_device.cu` does with seq_lens."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rooflab.kernels._device import sm_count
from rooflab.reference.spec import Scheme

UNIT = 16
"""Keys that a warp multiplies at once: the K of mma.m16n8k16 in the second product."""
MOST_HEAD_DIM = 256
"""With this head_dim a warp's accumulator takes 128 registers."""
MOST_ROWS = 16
"""Query heads per warp: the M of mma.m16n8k16."""
WIDTH = 12
"""The most parts that one warp adds: more are added in about sqrt(count) groups, and then the groups' sums."""
ALIGNMENT_BYTES = 16
"""Bytes that cp.async copies at once, and of which a bulk copy copies a multiple."""


def rows_of_tile(group: int) -> tuple[int, int]:
    """Query heads of a KV head per warp, and the number of warps for its group."""
    return min(group, MOST_ROWS), -(-group // MOST_ROWS)


def virtual_heads(H: int, H_kv: int) -> int:
    """Number of virtual heads: one per KV head and 16 query heads of its group."""
    return H_kv * rows_of_tile(H // H_kv)[1]


def ring_bytes(warps: int, stages: int, D: int, group: int, scheme: Scheme, bulk: bool = False) -> int:
    """Bytes per CTA: keys and values of each warp's units, or with `bulk` of all heads' units, with 16 bytes between
    keys that avoid bank conflicts of ldmatrix, and the queries if registers have no room for them."""
    size = D * scheme.weight.itemsize * (warps // rows_of_tile(group)[1] if bulk else 1)
    pitch = size + (0 if size // ALIGNMENT_BYTES % 2 else ALIGNMENT_BYTES)
    queries = 2 * MOST_ROWS * D if D > 128 and group > MOST_ROWS // 2 else 0
    return (1 if bulk else warps) * stages * 2 * UNIT * pitch + warps * queries


def grid(B: int, slots: int, window: int | None, sets: int, ctas_per_sm: int, least: int, device: torch.device) -> int:
    """CTAs of the first launch: as many as fit on the GPU, or fewer if with a table of `slots` slots a share would have
    less than `least` units."""
    most = B * sets * -(-min(slots, window or slots) // UNIT)
    return max(min(sm_count(device) * ctas_per_sm, most // least), 1)


def parts(lengths: Sequence[int], sets: int, ctas: int, least: int) -> int:
    """Unfinished parts: for each segment (a sequence's keys for a set of heads) that is cut, its number of shares."""
    units = [-(-length // UNIT) for length in lengths]
    total = sum(units) * sets
    shares = max(min(ctas, total // least), 1)
    left = start = 0
    for count in units:
        for _ in range(sets if count else 0):
            first, last = (((unit + 1) * shares - 1) // total for unit in (start, start + count - 1))
            left += last - first + 1 if last > first else 0
            start += count
    return left


def unaligned(cache: torch.Tensor) -> bool:
    """Whether a key of the cache begins at an address that is not a multiple of 16 bytes."""
    strides = [stride for size, stride in zip(cache.shape[:-1], cache.stride(), strict=False) if size > 1]
    address = cache.storage_offset() * cache.element_size() if cache.is_meta else cache.data_ptr()
    return any(offset % ALIGNMENT_BYTES for offset in (address, *(s * cache.element_size() for s in strides)))
