"""Raw samples in a record: compressed, and exact to the last bit."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Sequence

import numpy as np


def pack_samples(seconds: Sequence[float]) -> str:
    """Samples as float64 little-endian, zlib, base64; every bit is kept."""
    return base64.b64encode(zlib.compress(np.asarray(seconds, "<f8").tobytes(), 9)).decode()


def unpack_samples(text: str) -> list[float]:
    """The inverse of `pack_samples`.  Raises `ValueError` on a text that is not one."""
    try:
        values: list[float] = np.frombuffer(zlib.decompress(base64.b64decode(text, validate=True)), "<f8").tolist()
    except (ValueError, zlib.error) as error:
        raise ValueError(f"samples: expected base64 of zlib of float64 values, got {text[:20]!r}") from error
    return values
