"""Defines the limits of a server, and the middleware that checks every request against these limits."""

from __future__ import annotations

import re
import secrets
import time
import uuid
from dataclasses import dataclass

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rooflab.engine.serve.errors import ApiError

OPEN_PATHS = ("/", "/learn", "/health")
"""Paths that need no key: the pages have no data of the server, and a health probe has no key."""


@dataclass(frozen=True)
class Limits:
    """Holds the limits of one server."""

    max_queue: int = 256
    """The most answers that may wait for their first step, beside the answers that run."""
    max_body_bytes: int = 1 << 20
    """The most bytes of a request's body.  It is parsed on the event loop: 1 MiB takes up to 50 ms."""
    max_tokens: int | None = None
    """The most tokens of an answer.  None allows as many as the context holds."""
    timeout_s: float = 600.0
    """The longest time from a request's arrival to its last token."""
    api_key: str | None = None
    """The key that all routes but `OPEN_PATHS` require, as `Authorization: Bearer KEY`.  None requires no key."""
    origins: tuple[str, ...] = ()
    """Other sites whose pages may send requests (CORS)."""
    max_head_bytes: int = 1 << 16
    """The most bytes of a request line and its headers."""
    receive_s: float = 60.0
    """The longest time in seconds for a whole request, with its body, to arrive."""
    keep_alive_s: int = 120
    """Seconds that a connection stays open between requests.  Proxies keep connections for 60 to 90 s.  A proxy that
    sends a request while the server closes the connection gets no answer."""

    def __post_init__(self) -> None:
        for limit_name, limit_value in vars(self).items():
            least_value = int(limit_name in ("max_body_bytes", "max_tokens", "max_head_bytes"))
            if isinstance(limit_value, int | float) and not limit_value >= least_value:
                raise ValueError(f"{limit_name}: expected at least {least_value}, got {limit_value}")
        if self.api_key is not None and self.api_key.split() != [self.api_key]:
            raise ValueError("api_key: expected a text without white space")


class Guard:
    """Checks every request before its route (ASGI middleware).  Records the arrival time and refuses wrong headers.
    Stops reading a body that is too large.  Answers HEAD like GET, but without a body."""

    def __init__(self, app: ASGIApp, limits: Limits, hosts: list[str] | None, alone: bool):
        self.app, self.limits, self.hosts, self.alone = app, limits, hosts, alone

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        scope.setdefault("state", {})["arrival_s"] = time.perf_counter()
        headers, is_head_request = dict(scope["headers"]), scope["method"] == "HEAD"
        request_id = headers.get(b"x-request-id", uuid.uuid4().hex.encode())
        url_origin = re.match("https?://[^/]*", scope["path"])
        if url_origin:
            scope = {**scope, "path": scope["path"][url_origin.end() :] or "/"}
        read, whole = 0, b"expect" in headers

        async def counted() -> Message:
            nonlocal read, whole
            message = await receive()
            read, whole = read + len(message.get("body", b"")), not message.get("more_body")
            if read > self.limits.max_body_bytes:
                raise HTTPException(413, self._too_large().message)
            return message

        async def reply(message: Message) -> None:
            nonlocal whole
            is_reply_start = message["type"] == "http.response.start"
            while is_reply_start and not whole:  # a client that writes to a closed connection gets no answer
                whole = not (await receive()).get("more_body")
            if is_reply_start and self.alone:  # Ray's proxy adds its own
                message = {**message, "headers": [*message["headers"], (b"x-request-id", request_id)]}
            if is_reply_start or not is_head_request:
                await send(message)
            if is_reply_start and is_head_request:
                await send({"type": "http.response.body"})

        api_error = self._error(scope, headers)
        if api_error is not None:
            headers_by_status = {400: {"connection": "close"}, 401: {"www-authenticate": "Bearer"}}
            await api_error.reply(headers_by_status.get(api_error.status))(scope, receive, reply)
            return
        await self.app({**scope, "method": "GET"} if is_head_request else scope, counted, reply)

    def _error(self, scope: Scope, headers: dict[bytes, bytes]) -> ApiError | None:
        host = re.sub(rb":\d*$", b"", headers.get(b"host", b"")).decode("latin-1").lower()
        if self.hosts is not None and host not in self.hosts:  # a page whose name was bound to our address
            return ApiError(400, f"host: expected {self.hosts[0]} (or another --host), got {host[:80]!r}")
        if {b"content-length", b"transfer-encoding"} <= headers.keys():  # a proxy may go by the other one
            return ApiError(400, "http: expected Content-Length or Transfer-Encoding, got both")
        head_parts = (scope["path"], scope["query_string"], *(text for header in scope["headers"] for text in header))
        if sum(map(len, head_parts)) > self.limits.max_head_bytes:  # the parser takes what comes in one piece
            return ApiError(431, f"head: expected at most {self.limits.max_head_bytes} bytes")
        is_public = scope["path"] in OPEN_PATHS or scope["method"] == "OPTIONS"  # a browser asks without a key
        if self.limits.api_key is not None and not is_public:
            auth_scheme, _, bearer_key = headers.get(b"authorization", b"").partition(b" ")
            # In a time that does not depend on how much of it is right.
            has_valid_key = secrets.compare_digest(bearer_key.strip(), self.limits.api_key.encode())
            if not has_valid_key or auth_scheme.lower() != b"bearer":
                return ApiError(401, "Incorrect API key provided", code="invalid_api_key")
        if headers.get(b"content-encoding", b"identity").lower() != b"identity":
            return ApiError(415, "content-encoding: expected a body that is not compressed")
        body_length = headers.get(b"content-length", b"0")
        return self._too_large() if body_length.isdigit() and int(body_length) > self.limits.max_body_bytes else None

    def _too_large(self) -> ApiError:
        return ApiError(413, f"body: expected at most {self.limits.max_body_bytes} bytes")
