"""The names of the tree's ops and kernels by the text of their files, without the import of torch, which takes seconds.

`tests/test_registry.py` holds them to the registry's.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

ENTRY_POINT_GROUP = "rooflab.kernels"
"""Plug-ins register further ones."""
_REGISTRATION = re.compile(r'\b(?:register\(\s*op=|peer\(\s*)"(\w+)",\s*(?:name=)?"(\w+)"')


@cache
def kernels_by_op() -> dict[str, list[str]]:
    """The names of each op's kernels."""
    found: dict[str, list[str]] = {}
    for file in sorted(Path(__file__).parent.glob("*/*.py")):
        for op, name in _REGISTRATION.findall(file.read_text()):
            found.setdefault(op, []).append(name)
    return dict(sorted(found.items()))
