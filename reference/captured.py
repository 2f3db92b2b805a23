"""A suite of cases in a file: the shapes that a program called, weighted by their time (`rooflab capture`)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

VERSION = 1


def is_file(suite: str) -> bool:
    """Returns whether the name of a suite is a file's name."""
    return suite.endswith(".json")


def cases_of(op: str, suite: str) -> list[str]:
    """Returns the cases of an op in the file `suite`, the slowest case first.  Raises `ValueError` as `read` does."""
    return list(dict.fromkeys(row["case"] for row in read(suite)["ops"].get(op, ())))


@cache
def read(suite: str) -> Mapping[str, Any]:
    """Returns the content of the file.  Raises `ValueError` if the file is not a suite of `rooflab capture`."""
    try:
        data = json.loads(Path(suite).read_text(encoding="utf-8"))
        if data["rooflab_suite"] != VERSION or not all(row["case"] for rows in data["ops"].values() for row in rows):
            raise ValueError("of another version")
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"suite: expected a file of `rooflab capture`, got {suite!r}: {error}") from error
    return dict(data)
