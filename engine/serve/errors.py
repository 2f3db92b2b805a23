"""Errors in OpenAI's form: `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from http import HTTPStatus
from typing import Any

from fastapi.responses import JSONResponse
from pydantic import BaseModel

_TYPES = {401: "authentication_error", 404: "not_found_error", 408: "timeout_error", 429: "rate_limit_error"}

_OF_UNION = re.compile(r"str|(list|dict|constrained|literal)\W.*")
"""What pydantic adds to a place where a field has one of several types."""


class ErrorBody(BaseModel):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    """The field that is wrong."""
    code: str | None


class ErrorReply(BaseModel):
    """The body of every reply that is an error."""

    error: ErrorBody


class ApiError(Exception):
    """An error that the user sees, with its HTTP status."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    def body(self) -> dict[str, Any]:
        """As JSON."""
        kind = _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def event(self) -> bytes:
        """As an event of a stream that has begun."""
        return b"data: %b\n\n" % json.dumps(self.body()).encode()

    def reply(self, headers: dict[str, str] | None = None) -> JSONResponse:
        """As a reply."""
        return JSONResponse(self.body(), self.status, headers)


def of_engine(error: ValueError) -> ApiError:
    """What the engine refuses: its sentences begin with the argument."""
    param, colon, _ = str(error).partition(":")
    return ApiError(400, str(error), param if colon and param.isidentifier() else None)


def of_validation(errors: Sequence[Any]) -> ApiError:
    """What pydantic found wrong in a body: the first that names the most specific field."""
    first = max(errors, key=lambda error: len(error["loc"]) if error["type"] != "extra_forbidden" else 99)
    place = [str(part) for part in first["loc"] if part != "body" and not _OF_UNION.fullmatch(str(part))]
    if first["type"] == "json_invalid":
        return ApiError(400, f"body: expected JSON: {first['ctx']['error']}")
    if first["type"] == "extra_forbidden":
        return ApiError(400, f"Unrecognized request argument supplied: {place[-1]}", place[-1], "unknown_parameter")
    if not place:  # a combination of fields, or no body at all
        message = first["msg"].removeprefix("Value error, ")
        return ApiError(400, message, message.partition(":")[0] if first["type"] == "value_error" else None)
    given = repr(first["input"])
    found = "" if first["type"] == "missing" else f", got {given[:80]}{'...' * (len(given) > 80)}"
    return ApiError(400, f"{'.'.join(place)}: {first['msg']}{found}", place[0])


def of_status(status: int, detail: object) -> ApiError:
    """An error of the web framework: no such path, another method."""
    words = HTTPStatus(status).phrase
    return ApiError(status, words if detail in (None, words) else f"{words}: {detail}")
