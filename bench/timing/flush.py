"""Emptying the last-level cache before a sample: by reading a buffer larger than it, or by writing one.

A flush by reading leaves clean lines, which the next kernel's data displaces at no cost.  One by writing leaves dirty
lines, which are written back inside the timed kernel; on the other hand no card promises that reading displaces all.
So both are here, and `flush_comparison.compare_flushes` says which of the two is the cleaner on a card.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch

from rooflab.bench.timing import tamper

FlushBy = Literal["read", "write"]
TIMES_THE_CACHE = 2
"""Size of the buffer over that of the cache."""


class Flush:
    """Empties a cache of `cache_bytes` on `device` when called; of 0 bytes it does nothing.

    Raises `ValueError` on a way that is neither `read` nor `write`.
    """

    def __init__(self, device: torch.device | str, cache_bytes: int, by: FlushBy = "read"):
        if by not in get_args(FlushBy):
            raise ValueError(f"flush: expected one of {', '.join(get_args(FlushBy))}, got {by!r}")
        self.by = by
        # Ones, because on a CPU pages of zeros that nothing has written to are all one page.
        self._buffer = torch.ones(TIMES_THE_CACHE * cache_bytes // 4, device=device)
        self._sink = torch.empty((), device=device)

    @property
    def nbytes(self) -> int:
        """Bytes read or written by one call."""
        return self._buffer.nbytes

    @property
    def note(self) -> str:
        """What a timing method's name says of it: nothing of the default."""
        return ", flushed by writing" if self.by == "write" and self._buffer.numel() else ""

    def __call__(self) -> None:
        if not self._buffer.numel():
            return
        if self.by == "read":
            tamper.tensor_sum(self._buffer, dim=0, out=self._sink)
        else:
            tamper.tensor_fill(self._buffer, 1.0)
