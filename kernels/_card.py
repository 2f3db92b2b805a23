"""A pretended GPU for files that ask for one when they are imported, on a machine without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

pretended: Callable[[], AbstractContextManager[object]] | None = None
"""Makes a context that pretends a GPU; a process that compiles or emulates kernels sets it (`bench/cli/app.py`)."""
