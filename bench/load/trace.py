"""Defines the trace of a load run: the times of each request and of each chunk of its answer.

A trace file has JSON lines: the first describes the run, and each further line a request.  Its name ends with
`.ndjson`, because a report reads every `.jsonl` file as records.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from rooflab.bench.base.plain import plain
from rooflab.kernels._files import write_whole


class StreamEvent(NamedTuple):
    """Describes one event with data in the stream of an answer."""

    time_s: float
    kind: str
    """`text`; `role` or `empty`, if a choice has no text; `usage`, if there is no choice; or `done`."""
    tokens: int | None = None
    """The number of tokens that the event reports, or None."""
    answer: int = 0
    """The index of the answer among the several answers of a request (`n`)."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """Describes one request of a trace.  All times come from `perf_counter`, in seconds."""

    index: int
    scheduled_s: float
    """The time when the request was due according to the arrivals alone."""
    sent_s: float
    first_byte_s: float | None
    end_s: float | None
    chunks: tuple[StreamEvent, ...]
    asked_prompt_tokens: int | None = None
    asked_output_tokens: int | None = None
    prompt_tokens: int | None = None
    """The number of prompt tokens according to the server's usage."""
    output_tokens: int | None = None
    """The number of output tokens according to the server's usage."""
    finish_reason: str | None = None
    error: str = ""
    """The reason of the failure; empty if the request did not fail."""


@dataclass(frozen=True)
class Trace:
    """Holds the trace of a load run: its settings, its requests and the server's steps."""

    begin_s: float
    """The time from which the arrivals are counted."""
    last_arrival_s: float
    requests: tuple[Request, ...]
    case: Mapping[str, Any] = field(default_factory=dict)
    steps: tuple[Mapping[str, Any], ...] | None = None
    """The server's steps, on the clock of this trace.  None if the server does not report its steps."""
    repeated: int = 0
    """The number of requests that had already been sent before, in the run or in its warm-up."""

    def save(self, path: Path) -> Path:
        """Writes the trace to a file and returns its path."""
        run_fields = {name: field_value for name, field_value in plain(asdict(self)).items() if name != "requests"}
        trace_lines = [{"trace": 2, **run_fields}, *(plain(asdict(request)) for request in self.requests)]
        return write_whole(
            path, "".join(json.dumps(line, separators=(",", ":"), allow_nan=False) + "\n" for line in trace_lines)
        )


def load_trace(path: Path) -> Trace:
    """Reads a trace file, or the newest trace file in a folder.  Raises `ValueError` if there is no such file."""
    files = sorted(path.rglob("trace*.ndjson"), key=lambda file: file.stat().st_mtime) or [path]
    if not (path := files[-1]).is_file():
        raise ValueError(f"trace: expected a file, or a folder with one, got {str(path)!r}")
    try:
        run_fields, *rows = map(json.loads, path.read_text(encoding="utf-8").splitlines())
        if run_fields.pop("trace") != 2:
            raise ValueError("of another version")
        requests = (Request(**{**row, "chunks": tuple(StreamEvent(*chunk) for chunk in row["chunks"])}) for row in rows)
        steps = None if run_fields["steps"] is None else tuple(run_fields["steps"])
        return Trace(**{**run_fields, "steps": steps, "requests": tuple(requests)})
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"trace: expected a trace of `rooflab load`, got {str(path)!r}: {error}") from error
