"""What code a record is of where no commit names it: hashes of the source files."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path
from typing import Any

from rooflab.bench.calls.calls import kernel_file_sha256
from rooflab.bench.records.environment import Environment
from rooflab.kernels.registry import Kernel

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("roofline", "reference", "kernels", "engine", "bench")


def tree_hash(root: Path = ROOT) -> str:
    """A hash of every source file: what names the code where there is no commit, or not that alone."""
    total = hashlib.sha256()
    for folder in FOLDERS:
        for path in sorted((root / folder).rglob("*")):
            if path.suffix in (".py", ".cu", ".json") and path.is_file():
                total.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes() + b"\0")
    return total.hexdigest()[:16]


_own_tree = cache(tree_hash)


def circumstances(environment: Environment, kernel: Kernel) -> dict[str, Any]:
    """The environment as a record has it, with hashes of the code that no commit covers.

    `kernel_file_sha256` is of a kernel from outside, `tree` of a checkout without git.
    """
    found = environment.to_dict()
    file = kernel_file_sha256(kernel)
    if file:
        found["kernel_file_sha256"] = file
    if environment.commit is None:
        found["tree"] = _own_tree()
    return found
