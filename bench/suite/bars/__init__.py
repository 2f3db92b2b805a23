"""The bars of the project that need a GPU.  A file here holds `BARS`, a tuple of entries; no list of them is edited.

A bar whose measure is common (`measures.against_library`, `measures.of_bandwidth`) is data alone; another names a
function of its own file, which takes a `Context` and the entry's arguments and returns an `Outcome`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rooflab.bench.suite.entries import Entry

AGAINST_LIBRARY = "rooflab.bench.suite.measures:against_library"
OF_BANDWIDTH = "rooflab.bench.suite.measures:of_bandwidth"


def bar(
    id: str, text: str, ops: tuple[str, ...], call: str, arguments: Mapping[str, Any], cost_s: float, value: float
) -> Entry:
    """The entry of a bar about kernels: it waits for their first checks, and comes after the ceilings."""
    return Entry(f"bar:{id}", text, call, arguments, cost_s, value, ("environment", "first"), ("ceilings",), ops)
