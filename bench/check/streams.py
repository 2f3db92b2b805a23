"""The rule of streams: a kernel works on the current stream, or that stream waits for the others that it uses.

A run is queued behind a pause of its own stream. What is queued on another stream with no wait for this one then finds
NaN in place of its inputs, and what this stream does not wait for has not been written when its output is read. On a
CPU nothing is queued.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from rooflab.bench.check.poison import NAN_BYTE, Guarded

PAUSE_CYCLES = 2_000_000
"""About 1 ms: longer than the host needs to queue one call and the reading of its output."""

_cuda: Any = torch.cuda
"""Untyped, because torch leaves `_sleep` without annotations."""


@contextmanager
def queued(device: torch.device, inputs: Iterable[Guarded], alone: bool) -> Iterator[None]:
    """Inside it a kernel is called; `alone`, on an idle device, and else behind a pause and then its inputs' values."""
    if device.type != "cuda":
        yield
        return
    with _cuda.device(device):
        _cuda.synchronize(device)
        if not alone:
            # Not the integers: an index of -1 would read outside its table, and end the process with the kernel.
            floats = [tensor for tensor in inputs if tensor.buffer.dtype.is_floating_point]
            for tensor in floats:
                tensor.buffer.view(torch.uint8).fill_(NAN_BYTE)
            _cuda._sleep(PAUSE_CYCLES)
            for tensor in floats:
                tensor.buffer.view(torch.uint8).copy_(tensor.pristine.view(torch.uint8))
        yield


def wait_for_own(device: torch.device) -> None:
    """Waits for the current stream, and for no other."""
    if device.type == "cuda":
        _cuda.current_stream(device).synchronize()


def wait_for_all(device: torch.device) -> None:
    """Waits for every stream."""
    if device.type == "cuda":
        _cuda.synchronize(device)


def several(device: torch.device) -> bool:
    """Whether `device` has streams, that one may be waited for and another not."""
    return device.type == "cuda"
