"""When and where each tile of a launch ran, recorded by the kernel itself, for a picture of its schedule.

Outside of `kept_in` a kernel is compiled without this code.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer, smid

NEVER = -1
"""The value in rows that no tile has filled."""
TIMELINE: ContextVar[torch.Tensor | None] = ContextVar("timeline", default=None)
"""The tensor that launches fill, or None: (tiles, 3) int64, one row per tile, head after head: its SM, and the device's
nanosecond timer at its start and end."""


@contextmanager
def kept_in(timeline: torch.Tensor) -> Iterator[None]:
    """Launches inside this context fill `timeline`."""
    token = TIMELINE.set(timeline)
    try:
        yield
    finally:
        TIMELINE.reset(token)


def new_timeline(tiles: int, device: torch.device) -> torch.Tensor:
    """An empty timeline for a launch of `tiles` tiles: (tiles, 3) int64."""
    return torch.full((tiles, 3), NEVER, dtype=torch.int64, device=device)


@triton.jit
def keep(timeline_ptr, tile, began):
    """Fills the row of a tile that started at `began` and ends now; its stores may still be in flight."""
    row = timeline_ptr + tile.to(tl.int64) * 3
    tl.store(row, smid().to(tl.int64))
    tl.store(row + 1, began)
    tl.store(row + 2, globaltimer())
