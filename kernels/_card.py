"""A card for files that ask for one when they are imported, on a machine that has none."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

pretended: Callable[[], AbstractContextManager[object]] | None = None
"""Pretends one.  A process that compiles or emulates kernels, or asks others to, sets it (`bench/cli/app.py`)."""
