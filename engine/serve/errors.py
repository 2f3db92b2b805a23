"""Errors in OpenAI's format: `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

import json
import re
import reprlib
from collections.abc import Sequence
from typing import Any

from fastapi.responses import JSONResponse
from pydantic import BaseModel

_TYPES = {401: "authentication_error", 404: "not_found_error", 408: "timeout_error", 429: "rate_limit_error"}

TIMED_OUT = 408, "the answer took longer than the server's timeout", None, "timeout"
"""The arguments of the `ApiError` for an answer that took too long."""
_SHORT = 80
"""The most characters of a request's body that an error message shows."""
_SHOWN = reprlib.Repr()
_SHOWN.maxstring = _SHOWN.maxother = _SHOWN.maxlong = _SHORT
_SHOWN.maxlevel = 1  # below, it would sort a dict of any size
_NOT_YET = {
    **dict.fromkeys(("role", "tools", "tool_calls", "functions"), " (there are no tools yet)"),
    "type": " (there is nothing but text yet)",
}

_OF_UNION = re.compile(r"str|(list|dict|constrained|literal)\W.*")
"""The names that pydantic adds to the path of a field that may have one of several types."""


class ErrorBody(BaseModel):
    """The error that a user sees."""

    message: str
    type: str
    param: str | None
    """The name of the wrong field."""
    code: str | None


class ErrorReply(BaseModel):
    """The body of every reply that is an error."""

    error: ErrorBody


class ApiError(Exception):
    """An error that the user sees, with its HTTP status."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.status, self.message, self.code = status, _in_utf8(message), code
        self.param = None if param is None else _in_utf8(param)

    def body(self) -> dict[str, Any]:
        """Returns the error in OpenAI's format."""
        kind = _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def event(self) -> bytes:
        """Returns the error as an event of a stream that has already begun."""
        return b"data: %b\n\n" % json.dumps(self.body(), allow_nan=False).encode()

    def reply(self, headers: dict[str, str] | None = None) -> JSONResponse:
        """Returns the error as the reply to a request."""
        return JSONResponse(self.body(), self.status, headers)


def of_validation(errors: Sequence[Any]) -> ApiError:
    """Chooses one of pydantic's errors: a wrong name (such as a part's `type`), else an unknown field, else a value,
    else a type (a union reports the types of all its members).  Of equal errors the deepest counts."""
    ranks = {"literal_error": 3, "extra_forbidden": 2}
    first = max(errors, key=lambda err: (ranks.get(err["type"], not err["type"].endswith("_type")), len(err["loc"])))
    place = [str(part)[:_SHORT] for part in first["loc"] if part != "body" and not _OF_UNION.fullmatch(str(part))]
    if first["type"] == "json_invalid":
        return ApiError(400, f"body: expected JSON: {first['ctx']['error']}")
    if first["type"] == "extra_forbidden":
        message = f"Unrecognized request argument supplied: {place[-1]}{_NOT_YET.get(place[-1], '')}"
        return ApiError(400, message, place[-1], "unknown_parameter")
    message = first["msg"].removeprefix("Value error, ")
    if not place:  # a combination of fields, or no body at all
        return ApiError(400, message, message.partition(":")[0] if first["type"] == "value_error" else None)
    if first["type"] == "value_error":
        return ApiError(400, f"{'.'.join(place)}: {message}", place[0])
    value = "an object" if isinstance(first["input"], dict) else _SHOWN.repr(first["input"])
    got = "" if first["type"] == "missing" else f", got {value}"
    return ApiError(400, f"{'.'.join(place)}: {message}{_NOT_YET.get(place[-1], '')}{got}", place[0])


def _in_utf8(text: str) -> str:
    """Escapes the parts of `text` that UTF-8 cannot hold, such as the lone surrogate of JSON's `"\\ud800"`."""
    return text.encode("utf-8", "backslashreplace").decode()
