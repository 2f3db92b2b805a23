"""When and where each tile of a launch ran, kept by the kernel itself: for a picture of its schedule.

Outside of `kept_in` a kernel is compiled without a trace of this.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer, smid

COLUMNS = ("sm", "began_ns", "ended_ns")
"""Of a timeline, a row for each tile: the number of its SM, and the device's nanosecond timer at its first warp."""
NEVER = -1
"""In a row that no tile has filled in."""


TIMELINE: ContextVar[torch.Tensor | None] = ContextVar("timeline", default=None)
"""What launches fill in, or None: (tiles, 3) int64, a row for each tile, those of a head after each other."""


@contextmanager
def kept_in(timeline: torch.Tensor) -> Iterator[None]:
    """Launches inside fill in `timeline`."""
    token = TIMELINE.set(timeline)
    try:
        yield
    finally:
        TIMELINE.reset(token)


def new_timeline(tiles: int, device: torch.device) -> torch.Tensor:
    """The timeline of a launch of `tiles` tiles that have not run yet: (tiles, 3) int64."""
    return torch.full((tiles, len(COLUMNS)), NEVER, dtype=torch.int64, device=device)


@triton.jit
def keep(timeline_ptr, tile, began):
    """Fills in the row of a tile that began at `began` and ends now.  Its stores may still be on their way."""
    row = timeline_ptr + tile.to(tl.int64) * 3
    tl.store(row, smid().to(tl.int64))
    tl.store(row + 1, began)
    tl.store(row + 2, globaltimer())
