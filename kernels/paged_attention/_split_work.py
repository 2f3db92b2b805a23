"""How `split_kv` shares its work out, in numbers: the host's half of what `_split_device.py` does with seq_lens."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rooflab.kernels._device import sm_count
from rooflab.reference.spec import Scheme

UNIT = 16
"""Keys that a warp multiplies at once: the k of mma.m16n8k16 in the second product."""
MOST_HEAD_DIM = 256
"""A warp's accumulator is then 128 registers."""
MOST_ROWS = 16
"""Query heads that a warp takes: the m of mma.m16n8k16."""
ALIGNMENT_BYTES = 16
"""What cp.async copies at once."""


def rows_of_tile(group: int) -> tuple[int, int]:
    """Query heads of a KV head that a warp takes, and how many warps so take all of its group."""
    return min(group, MOST_ROWS), -(-group // MOST_ROWS)


def virtual_heads(H: int, H_kv: int) -> int:
    """KV heads, each as often as its group has 16 query heads."""
    return H_kv * rows_of_tile(H // H_kv)[1]


def ring_bytes(warps: int, stages: int, D: int, group: int, scheme: Scheme) -> int:
    """Of a CTA: keys and values of each warp's units, with the 16 bytes between keys that keep ldmatrix free of
    conflicts, and the queries where registers have no room for them."""
    size = D * scheme.weight.itemsize
    pitch = size + (0 if size // ALIGNMENT_BYTES % 2 else ALIGNMENT_BYTES)
    queries = 2 * MOST_ROWS * D if D > 128 and group > MOST_ROWS // 2 else 0
    return warps * (stages * 2 * UNIT * pitch + queries)


def grid(B: int, slots: int, window: int | None, sets: int, ctas_per_sm: int, least: int, device: torch.device) -> int:
    """CTAs of the first launch: what the card holds at once, or fewer where the longest lengths that a table of `slots`
    slots has room for would leave a share less than `least` units."""
    most = B * sets * -(-min(slots, window or slots) // UNIT)
    return max(min(sm_count(device) * ctas_per_sm, most // least), 1)


def parts(lengths: Sequence[int], sets: int, ctas: int, least: int) -> int:
    """Segments, a sequence's keys for a set of heads, that shares leave unfinished, counted once for each share."""
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
    """Whether a key of the cache begins elsewhere than at a multiple of 16 bytes."""
    strides = [stride for size, stride in zip(cache.shape[:-1], cache.stride(), strict=False) if size > 1]
    address = cache.storage_offset() * cache.element_size() if cache.is_meta else cache.data_ptr()
    return any(offset % ALIGNMENT_BYTES for offset in (address, *(s * cache.element_size() for s in strides)))
