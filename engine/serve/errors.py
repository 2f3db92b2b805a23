"""Builds errors in OpenAI's format: `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

import json
import re
import reprlib
from collections.abc import Sequence
from typing import Any

from fastapi.responses import JSONResponse
from pydantic import BaseModel

_ERROR_TYPES = {401: "authentication_error", 404: "not_found_error", 408: "timeout_error", 429: "rate_limit_error"}

TIMED_OUT = 408, "the answer took longer than the server's timeout", None, "timeout"
"""The arguments of the `ApiError` for an answer that took too long."""
_MAX_TEXT_LENGTH = 80
"""The most characters of a request's body that an error message shows."""
_VALUE_SHORTENER = reprlib.Repr()
_VALUE_SHORTENER.maxstring = _VALUE_SHORTENER.maxother = _VALUE_SHORTENER.maxlong = _MAX_TEXT_LENGTH
_VALUE_SHORTENER.maxlevel = 1  # below, it would sort a dict of any size
_UNSUPPORTED_NOTES = {
    **dict.fromkeys(("role", "tools", "tool_calls", "functions"), " (there are no tools yet)"),
    "type": " (there is nothing but text yet)",
}

_TYPE_RE = re.compile(r"str|(list|dict|constrained|literal)\W.*")
"""The names that pydantic adds to the path of a field that may have one of several types."""


class ErrorBody(BaseModel):
    """Describes the error that a user sees."""

    message: str
    type: str
    param: str | None
    """The name of the wrong field."""
    code: str | None


class ErrorReply(BaseModel):
    """Describes the body of every error reply."""

    error: ErrorBody


class ApiError(Exception):
    """Reports an error that the user sees, with its HTTP status."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.status, self.message, self.code = status, _in_utf8(message), code
        self.param = None if param is None else _in_utf8(param)

    def body(self) -> dict[str, Any]:
        """Returns the error in OpenAI's format."""
        error_type = _ERROR_TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": error_type, "param": self.param, "code": self.code}}

    def event(self) -> bytes:
        """Returns the error as an event of a stream that has already begun."""
        return b"data: %b\n\n" % json.dumps(self.body(), allow_nan=False).encode()

    def reply(self, headers: dict[str, str] | None = None) -> JSONResponse:
        """Returns the error as the reply to a request."""
        return JSONResponse(self.body(), self.status, headers)


def of_validation(errors: Sequence[Any]) -> ApiError:
    """Converts the most helpful of pydantic's errors to an `ApiError`. A wrong literal (such as a part's `type`) comes
    first, then an unknown field, then a wrong value, then a wrong type. Of equal errors, takes the most nested, because
    a union reports the errors of all its members."""
    rank_of = {"literal_error": 3, "extra_forbidden": 2}
    error = max(errors, key=lambda err: (rank_of.get(err["type"], not err["type"].endswith("_type")), len(err["loc"])))
    path = [str(key)[:_MAX_TEXT_LENGTH] for key in error["loc"] if key != "body" and not _TYPE_RE.fullmatch(str(key))]
    if error["type"] == "json_invalid":
        return ApiError(400, f"body: expected JSON: {error['ctx']['error']}")
    if error["type"] == "extra_forbidden":
        message = f"Unrecognized request argument supplied: {path[-1]}{_UNSUPPORTED_NOTES.get(path[-1], '')}"
        return ApiError(400, message, path[-1], "unknown_parameter")
    message = error["msg"].removeprefix("Value error, ")
    if not path:  # a combination of fields, or no body at all
        return ApiError(400, message, message.partition(":")[0] if error["type"] == "value_error" else None)
    if error["type"] == "value_error":
        return ApiError(400, f"{'.'.join(path)}: {message}", path[0])
    short_value = "an object" if isinstance(error["input"], dict) else _VALUE_SHORTENER.repr(error["input"])
    value_text = "" if error["type"] == "missing" else f", got {short_value}"
    return ApiError(400, f"{'.'.join(path)}: {message}{_UNSUPPORTED_NOTES.get(path[-1], '')}{value_text}", path[0])


def _in_utf8(text: str) -> str:
    r"""Escapes the parts of `text` that UTF-8 cannot encode, such as the lone surrogate of JSON's `"\ud800"`."""
    return text.encode("utf-8", "backslashreplace").decode()
