"""Reads files of `rooflab capture`: test cases with the shapes of a program's op calls, the slowest calls first."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

FILE_VERSION = 1


def is_file(suite: str) -> bool:
    """Returns whether `suite` is the name of a `.json` file, and not the name of a built-in suite."""
    return suite.endswith(".json")


def cases_of(op: str, suite: str) -> list[str]:
    """Returns the test cases of one op in the file `suite`, the slowest first. Raises `ValueError` as `read` does."""
    return list(dict.fromkeys(case_row["case"] for case_row in read(suite)["ops"].get(op, ())))


@cache
def read(suite: str) -> Mapping[str, Any]:
    """Returns the parsed JSON of the file `suite`. Raises `ValueError` if `rooflab capture` did not write this file."""
    try:
        file_content = json.loads(Path(suite).read_text(encoding="utf-8"))
        if file_content["rooflab_suite"] != FILE_VERSION or not all(
            case_row["case"] for op_rows in file_content["ops"].values() for case_row in op_rows
        ):
            raise ValueError("of another version")
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"suite: expected a file of `rooflab capture`, got {suite!r}: {error}") from error
    return dict(file_content)
