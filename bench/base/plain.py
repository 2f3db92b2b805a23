"""Converts values to JSON types and to Markdown.  Does not import torch, so that processes without torch start fast."""

from __future__ import annotations

import math
import re
import string
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, is_dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rooflab.roofline.names import visible

Json = Any
"""A value in JSON's types: in a record, in a row of a table, or in a message between two processes."""
JsonObject = Mapping[str, Json]
Row = dict[str, Json]
"""One row of a table: values by the name of the column."""
_PUNCTUATION_ESCAPES = {ord(sign): f"&#{ord(sign)};" for sign in string.punctuation}


def plain(value: object) -> Json:
    """Converts `value` to JSON types.  Paths become strings, and so do numbers that JSON cannot represent."""
    if is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, Path) or (isinstance(value, float) and not math.isfinite(value)):
        return str(value)
    return value


def number_of(name: str, value: Json) -> float:
    """Returns `value` as a number.  Accepts `nan` and `inf` as strings too.  Raises `ValueError` on other values."""
    if isinstance(value, str) and value in ("nan", "inf", "-inf"):
        return float(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{name}: expected a number, got {value!r}")
    return value


def in_utc(text: str) -> str:
    """Converts an ISO 8601 time to UTC, so that text order is time order.  A time without a zone counts as UTC.

    Raises `ValueError` on any other text."""
    try:
        parsed_time = datetime.fromisoformat(text)
    except ValueError as error:
        raise ValueError(f"timestamp: expected a time in ISO 8601, got {text!r}") from error
    return (parsed_time if parsed_time.tzinfo else parsed_time.replace(tzinfo=UTC)).astimezone(UTC).isoformat()


_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|[1-9]\d{0,2}(,\d{3})+(\.\d*)?|\.\d+)(e[-+]?\d+)?|[-+]?(nan|inf|infinity)", re.I)
_DECIMAL_COMMA_REGEX = re.compile(r"[-+]?\d[\d.]*,\d+")


def number_in(text: str, place: str) -> float | None:
    """Returns the number in a text of another tool, such as `1,234.5` or `nan`; None if the text is not a number.

    Raises `ValueError`, with `place` in the message, on a decimal comma, because the number would be misread."""
    stripped_text = text.strip()
    if _NUMBER.fullmatch(stripped_text):
        return float(stripped_text.replace(",", ""))
    if _DECIMAL_COMMA_REGEX.fullmatch(stripped_text):
        raise ValueError(f"{place}: expected a number with a decimal point, got {stripped_text!r}")
    return None


def first_line(error: BaseException) -> str:
    """Returns the first non-blank line of an error's text.  CUDA's errors have advice in the later lines."""
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)


class Marked(str):
    """Marks a text as Markdown, so that it is not escaped again."""


def markdown_table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """Returns the lines of a Markdown table.  If a column's name ends with `:`, the column is aligned to the right.

    Markup in a cell is escaped, except in a `Marked` cell.  None gives an empty cell."""
    separator_line = "".join("--:|" if name.endswith(":") else "---|" for name in columns)
    return [_line(name.removesuffix(":") for name in columns), f"|{separator_line}", *map(_line, rows)]


def _line(cells: Iterable[object]) -> str:
    texts = ("" if cell is None else cell if isinstance(cell, Marked) else markdown_cell(str(cell)) for cell in cells)
    return f"| {' | '.join(texts)} |"


def markdown_cell(text: str) -> Marked:
    """Returns a text as one cell of a Markdown table, with all markup escaped."""
    return Marked(re.sub(r"([\\`*<|\[~&]|(?<![^\W_])_|_(?![^\W_]))", r"\\\1", visible(" ".join(text.split()))))


def markdown_code(name: str) -> Marked:
    """Returns a name as code in a table cell.  A backslash becomes an HTML entity, because Markdown parsers differ."""
    visible_name = visible(name)
    if visible_name.strip() == visible_name and not set("`|\\") & set(visible_name):
        return Marked(f"`{visible_name}`")
    return Marked(f"<code>{visible_name.translate(_PUNCTUATION_ESCAPES)}</code>")
