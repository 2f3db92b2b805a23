"""The traffic of several launches, each with its own reads and writes."""

from __future__ import annotations

from rooflab.roofline.model import Traffic


def steps(*moves: tuple[float, float]) -> Traffic:
    """Traffic of launches one after another; `moves` holds the bytes that each reads and writes."""
    return Traffic(
        read_bytes=sum(read for read, _ in moves), write_bytes=sum(written for _, written in moves), launches=len(moves)
    )
