"""Streams and events of the pretended GPU that order launches.  `torch.cuda` answers with them inside `emulating`.

A stream of torch does not wait for the default stream, nor the default stream for it (cudaStreamNonBlocking).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch

from rooflab.bench.compile import pretended_torch
from rooflab.bench.compile.pretended import OnGpu
from rooflab.bench.compile.pretended_graph import Capture
from rooflab.bench.emulator.machine.launch_order import Clock, LaunchOrder


class _Event(pretended_torch.Event):
    order: LaunchOrder
    clock: Clock = {}

    def record(self, stream: Any = None) -> None:
        self.clock = (stream or self.order.streams[self.order.stream]).clock

    def wait(self, stream: Any = None) -> None:
        (stream or self.order.streams[self.order.stream]).wait_event(self)

    def synchronize(self) -> None:  # type: ignore[override]
        self.order.wait(None, self.clock)

    def query(self) -> bool:
        self.synchronize()  # the host may ask until it hears True
        return True


class _Stream(_Event, pretended_torch.Stream):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.cuda_stream = self.stream_id = len(self.order.streams)
        self.order.streams.append(self)
        self._before: list[int] = []

    @property
    def clock(self) -> Clock:  # type: ignore[override]
        return self.order.event(self.stream_id)

    def record_event(self, event: Any = None) -> Any:
        event = event or torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self)
        return event

    def wait_event(self, event: Any) -> None:  # type: ignore[override]
        self.order.wait(self.stream_id, event.clock)

    wait_stream = wait_event  # type: ignore[assignment]

    def __enter__(self) -> _Stream:
        self._before.append(self.order.enter(self.stream_id))
        return self

    def __exit__(self, *error: Any) -> None:
        self.order.enter(self._before.pop())


@contextmanager
def ordered_streams(order: LaunchOrder, gpu: OnGpu) -> Iterator[None]:
    """Lets the streams and events of the pretended `torch.cuda` tell `order` what waits for what."""
    event, stream = (type(kind.__name__[1:], (kind,), {"order": order}) for kind in (_Event, _Stream))
    default_stream = stream()
    gpu.on_host_read = lambda: order.synchronize([order.stream])

    def synchronize(*device: Any) -> None:
        order.synchronize(range(len(order.streams)))

    fakes: dict[str, Any] = {
        "current_stream": lambda *device: order.streams[order.stream],
        "set_stream": lambda new: order.enter(new.stream_id) and None,
        "synchronize": synchronize,
    }
    only_cuda: dict[str, Any] = {
        "default_stream": lambda *device: default_stream,
        "stream": lambda new: new or nullcontext(),
        "StreamContext": lambda new: new or nullcontext(),
        "ExternalStream": lambda *args, **kwargs: default_stream,  # it may be one that waits for the default stream
        "Event": event,
        "Stream": stream,
        "graph": lambda *args, **kwargs: synchronize() or Capture(*args, **kwargs),  # type: ignore[func-returns-value]
    }
    with (
        patch.multiple(torch.cuda, **fakes, **only_cuda),
        patch.multiple(torch.accelerator, **fakes),
        patch.multiple(torch, Stream=stream, Event=event),
    ):
        yield
