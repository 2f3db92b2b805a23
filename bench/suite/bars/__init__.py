"""The bars of the project that need a GPU.  Each file here holds `BARS`, a tuple of entries; there is no common list.

A bar with a common measure (`measures.against_library`, `measures.of_bandwidth`) is data alone.  Any other bar names a
function of its own file, which takes a `Context` and the entry's arguments and returns an `Outcome`.
"""

from __future__ import annotations

from typing import Any

from rooflab.bench.suite.entries import Entry

AGAINST_LIBRARY = "rooflab.bench.suite.measures:against_library"
OF_BANDWIDTH = "rooflab.bench.suite.measures:of_bandwidth"


def bar(id: str, text: str, call: str, *more_ops: str, cost_s: float, value: float, **arguments: Any) -> Entry:
    """The entry of a bar about kernels of `more_ops` and of the op that begins its id.  The entry waits for the first
    checks of these kernels and runs after the ceilings.  `call` gets the op and the other arguments."""
    op = id.partition(".")[0]
    about = {"op": op, **arguments}
    return Entry(
        f"bar:{id}", text, call, about, cost_s, value, ("environment", "first"), ("ceilings",), (op, *more_ops)
    )
