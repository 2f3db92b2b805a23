"""Which ops a difference between two revisions touches: a kernel's file its op, a shared file all of them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from pathlib import PurePosixPath

MEASURED = ("kernels", "reference", "roofline")
SETTINGS = ("pyproject.toml", "constraints.txt")


def touched_ops(changed: Iterable[str], ops: Sequence[str], harness: Collection[str] = ()) -> list[str]:
    """The ops among `ops` that the changed files (paths from the checkout's root) touch, in the order of `ops`.

    A file of an op's folder, or its reference, touches the op; any other file of `kernels`, `reference` or `roofline`,
    the packages pinned, and the `harness` (files of `bench` that decide a reading) touch all; documents, tests, results
    and the engine touch none.
    """
    found: set[str] = set()
    for text in changed:
        parts = PurePosixPath(text).parts
        if parts[0] in MEASURED:
            named = parts[1] if parts[0] == "kernels" and len(parts) > 2 else PurePosixPath(text).stem
            if named in ops and parts[0] != "roofline":
                found.add(named)
            elif _is_code(parts):
                return list(ops)
        elif text in SETTINGS or text in harness:
            return list(ops)
    return [op for op in ops if op in found]


def _is_code(parts: tuple[str, ...]) -> bool:
    """A folder of an op that neither side has is no shared file; neither is a note."""
    in_op_folder = parts[0] == "kernels" and len(parts) > 2
    return not in_op_folder and not parts[-1].endswith((".md", ".txt")) and parts[-1] != "plot.py"
