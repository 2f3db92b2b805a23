"""Values as JSON's types and as Markdown.  Does not import torch, so a process that does not need torch starts fast."""

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
"""A value in the types of JSON: in a record, in a row that is shown, or between two processes."""
JsonObject = Mapping[str, Json]
Row = dict[str, Json]
"""A row of a table."""
_PUNCTUATION = {ord(sign): f"&#{ord(sign)};" for sign in string.punctuation}


def plain(value: object) -> Json:
    """`value` in JSON's types; paths, and numbers that JSON cannot hold, become texts."""
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
    """The number that `plain` wrote, in which `nan` and `inf` are texts.  Raises `ValueError` on anything else."""
    if isinstance(value, str) and value in ("nan", "inf", "-inf"):
        return float(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{name}: expected a number, got {value!r}")
    return value


def in_utc(text: str) -> str:
    """Converts an ISO 8601 time to UTC, so that times sort as their texts do; a time without a zone counts as UTC.

    Raises `ValueError` on any other text.
    """
    try:
        moment = datetime.fromisoformat(text)
    except ValueError as error:
        raise ValueError(f"timestamp: expected a time in ISO 8601, got {text!r}") from error
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).astimezone(UTC).isoformat()


_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|[1-9]\d{0,2}(,\d{3})+(\.\d*)?|\.\d+)(e[-+]?\d+)?|[-+]?(nan|inf|infinity)", re.I)
_COMMA = re.compile(r"[-+]?\d[\d.]*,\d+")


def number_in(text: str, place: str) -> float | None:
    """The number that another tool wrote, also as `1,234.5` or `nan`; None if the text is words.

    Raises `ValueError` with the place on a decimal comma: without the comma it would be another number.
    """
    stripped = text.strip()
    if _NUMBER.fullmatch(stripped):
        return float(stripped.replace(",", ""))
    if _COMMA.fullmatch(stripped):
        raise ValueError(f"{place}: expected a number with a decimal point, got {stripped!r}")
    return None


def first_line(error: BaseException) -> str:
    """The first non-blank line of an error's text; CUDA's errors continue with advice."""
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)


class Marked(str):
    """A text that already is Markdown."""


def markdown_table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """The lines of a Markdown table; a column whose name ends with `:` holds numbers and is aligned to the right.

    No character of a cell is markup, except in a `Marked` cell; None is an empty cell.
    """
    rule = "".join("--:|" if name.endswith(":") else "---|" for name in columns)
    return [_line(name.removesuffix(":") for name in columns), f"|{rule}", *map(_line, rows)]


def _line(cells: Iterable[object]) -> str:
    shown = ("" if cell is None else cell if isinstance(cell, Marked) else markdown_cell(str(cell)) for cell in cells)
    return f"| {' | '.join(shown)} |"


def markdown_cell(text: str) -> Marked:
    """A text as one cell of a Markdown table, in which no character is markup."""
    return Marked(re.sub(r"([\\`*<|\[~&]|(?<![^\W_])_|_(?![^\W_]))", r"\\\1", visible(" ".join(text.split()))))


def markdown_code(name: str) -> Marked:
    """A name as code in a cell; as entities if a code span cannot hold it, because parsers differ on a backslash."""
    shown = visible(name)
    if shown.strip() == shown and not set("`|\\") & set(shown):
        return Marked(f"`{shown}`")
    return Marked(f"<code>{shown.translate(_PUNCTUATION)}</code>")
