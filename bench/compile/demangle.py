"""Shows C++ names as they stand in the source: `copy<float>` for `_Z4copyIfEvPKf`."""

from __future__ import annotations

import re
import shutil
import subprocess
from functools import cache

_MANGLED = re.compile(r"\b_Z\w+")
_PART = re.compile(r"(\d+)")


def demangled(text: str) -> str:
    """Returns `text` with each mangled C++ name replaced by its plain name, without the types of its arguments."""
    return _MANGLED.sub(lambda match: source_name(match[0]), text)


@cache
def source_name(mangled: str) -> str:
    """Returns the plain name of one mangled name: by `c++filt` if it is there, else by `plain_name`."""
    tool = shutil.which("c++filt")
    if tool is None:
        return plain_name(mangled)
    command = [tool, "--no-params", mangled]
    return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()


def plain_name(mangled: str) -> str:
    """Returns the names in a mangled name up to its template arguments, such as `cutlass::Kernel`.

    Returns `mangled` itself if it does not begin with a name."""
    parts, index = list[str](), len("_ZNK" if mangled.startswith("_ZNK") else "_ZN" if "_ZN" in mangled else "_Z")
    while match := _PART.match(mangled, index):
        parts.append(mangled[match.end() : match.end() + int(match[1])])
        index = match.end() + int(match[1])
        if not mangled.startswith("_ZN"):
            break
    return "::".join(parts).replace("_GLOBAL__N_1", "(anonymous namespace)") or mangled
