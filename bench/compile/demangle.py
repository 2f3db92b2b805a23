"""Shows C++ names as they stand in the source: `copy<float>` for `_Z4copyIfEvPKf`."""

from __future__ import annotations

import re
from functools import cache

_MANGLED = re.compile(r"\b_Z\w+")
_ANONYMOUS = "(anonymous namespace)"


def demangled(text: str) -> str:
    """Returns `text` with each mangled C++ name replaced by its plain name, without the types of its arguments."""
    return _MANGLED.sub(lambda match: source_name(match[0]), text)


@cache
def source_name(mangled: str) -> str:
    """Returns the plain name of one mangled name.  Returns `mangled` itself if it is no name of C++."""
    import torch  # not at the top, because the command line starts without it

    name, depth, start = torch._C._demangle(mangled).replace(_ANONYMOUS, "\0"), 0, 0
    for index, sign in enumerate(name):
        depth += (sign == "<") - (sign == ">")
        if depth == 0 and sign == " ":  # behind the type of the result
            start = index + 1
        elif depth == 0 and sign == "(":
            name = name[:index]
            break
    return name[start:].replace("\0", _ANONYMOUS)
