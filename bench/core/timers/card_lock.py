"""One run at a time on a card: a lock that every user of the machine shares."""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from rooflab.bench.core.environment import snapshot


@contextmanager
def card_lock(device: torch.device, say: Callable[[str], None]) -> Iterator[None]:
    """Holds the lock of the GPU `device` inside `with`; waits for it, and then says so once.

    The lock is on a file of the machine's temporary folder, named by the card; the system frees it when the process
    ends, however it ends.  Raises `ValueError` for a device that is no GPU.
    """
    gpu = snapshot(device.index or 0).gpu if device.type == "cuda" else None
    if gpu is None:
        raise ValueError(f"wait-for-gpu: expected a CUDA device, got {device}")
    path = Path(tempfile.gettempdir()) / f"rooflab-{gpu.uuid}.lock"
    handle = _opened(path)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"waiting for another run on {gpu.name} ({path})")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _opened(path: Path) -> int:
    """Opens the file, or makes one that every user may open."""
    try:  # without O_CREAT, which Linux refuses for another user's file in a shared temporary folder
        return os.open(path, os.O_RDWR)
    except FileNotFoundError:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        os.fchmod(handle, 0o666)  # whatever the umask says
        return handle
