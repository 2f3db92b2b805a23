"""Cancels the work on a reply when the reader of the reply disconnects."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing, suppress
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

T = TypeVar("T")


async def while_there(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Returns the result of `work`.  If the reader disconnects first, cancels `work` and raises `ClientDisconnect`."""

    async def leaves() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    result_task, disconnect_task = asyncio.ensure_future(work), asyncio.ensure_future(leaves())
    try:
        await asyncio.wait((result_task, disconnect_task), return_when=asyncio.FIRST_COMPLETED)
        if result_task.done():
            return result_task.result()
        raise ClientDisconnect
    finally:
        for task in (result_task, disconnect_task):
            task.cancel()
        await asyncio.wait((result_task, disconnect_task))


class EventStream(StreamingResponse):
    """Sends a stream of server-sent events.  Each event is sent as soon as it is made.

    At its end, or if the reader disconnects, closes the generator `events` and always calls `close` after that."""

    def __init__(self, events: AsyncGenerator[bytes, None], close: Callable[[], None]):
        # A proxy must neither keep a stream nor gather its events.
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(events, headers=headers, media_type="text/event-stream")
        self._events, self._close = events, close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with aclosing(self._events):
                with suppress(ClientDisconnect):
                    await while_there(receive, self.stream_response(send))
        finally:
            self._close()
