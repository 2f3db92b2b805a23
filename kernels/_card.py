"""Holds a variable for a function that makes a fake GPU. Some kernel files cannot be imported without a GPU. Programs
that compile kernels without a GPU set the variable, and the kernel registry calls the function."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

make_fake_gpu: Callable[[], AbstractContextManager[object]] | None = None
"""Makes a context that pretends to have a GPU.  Code that compiles or emulates kernels sets it (`bench/cli/app.py`)."""
