"""The traffic of a composition: every step's reads and writes, one launch each."""

from __future__ import annotations

from rooflab.roofline.model import Traffic


def steps(*moves: tuple[float, float]) -> Traffic:
    """Traffic of launches one after another; `moves` holds bytes read and bytes written by each."""
    return Traffic(
        read_bytes=sum(read for read, _ in moves),
        write_bytes=sum(written for _, written in moves),
        launches=len(moves),
    )
