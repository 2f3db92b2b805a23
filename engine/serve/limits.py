"""What a server allows, and the guard in front of every route."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rooflab.engine.serve.errors import ApiError

OPEN_PATHS = ("/", "/health")
"""For these no key is asked: the page has no data of its own, and a probe has no key."""


@dataclass(frozen=True)
class Limits:
    """What one server allows."""

    max_queue: int = 256
    """Answers that may wait for their first step, beside those that run."""
    max_body_bytes: int = 1 << 20
    """It is parsed on the event loop: 1 MiB in up to 50 ms."""
    max_tokens: int | None = None
    """Most tokens of an answer; None: what the context holds."""
    timeout_s: float = 600.0
    """From a request's arrival to its last token."""
    api_key: str | None = None
    """Asked of all routes but `OPEN_PATHS`, as `Authorization: Bearer KEY`."""

    def __post_init__(self) -> None:
        for name, least in (("max_queue", 0), ("max_body_bytes", 1), ("max_tokens", 1), ("timeout_s", 0)):
            value = getattr(self, name)
            if value is not None and not value >= least:
                raise ValueError(f"{name}: expected at least {least}, got {value}")
        if self.api_key == "":
            raise ValueError("api_key: expected a text that is not empty, got ''")


class Guard:
    """ASGI middleware: notes when a request arrives, refuses one without the key, and a body over the limit before it
    is read whole."""

    def __init__(self, app: ASGIApp, limits: Limits):
        self.app = app
        self.limits = limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As ASGI."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        scope.setdefault("state", {})["arrival_s"] = time.perf_counter()
        headers = dict(scope["headers"])
        if self.limits.api_key is not None and scope["path"] not in OPEN_PATHS:
            given, wanted = headers.get(b"authorization", b""), b"Bearer " + self.limits.api_key.encode()
            if not secrets.compare_digest(given, wanted):  # in a time that does not depend on how much of it is right
                error = ApiError(401, "Incorrect API key provided", code="invalid_api_key")
                await error.reply({"www-authenticate": "Bearer"})(scope, receive, send)
                return
        most, read = self.limits.max_body_bytes, 0
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > most:
            await self._too_large().reply({"connection": "close"})(scope, receive, send)
            return

        async def counted() -> Message:
            nonlocal read
            message = await receive()
            read += len(message.get("body", b""))
            if read > most:
                raise HTTPException(413, self._too_large().message)
            return message

        await self.app(scope, counted, send)

    def _too_large(self) -> ApiError:
        return ApiError(413, f"body: expected at most {self.limits.max_body_bytes} bytes")
