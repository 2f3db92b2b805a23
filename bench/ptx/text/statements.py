"""Cuts a PTX text into statements: braces that open and close scopes, labels, directives and instructions."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from rooflab.bench.ptx.text.syntax import PtxError

_COMMENT = re.compile(r'("[^"\n]*")|//[^\n]*|/\*.*?\*/', re.DOTALL)
"""Or a string, in which `//` begins no comment."""
_INLINED = re.compile(r"(\.loc[^\n/]*)//[^\n]*@\[\s*([^\s:\]]+):(\d+):\d+[\s\]]*$", re.MULTILINE)
"""What LLVM says of inlining beside a `.loc`: the outermost call comes last."""
_SPACE = re.compile(r"\s+")
_LABEL = re.compile(r"([\w$%]+)\s*:(?!:)\s*")
_LINE = re.compile(r"\.(?:loc|file|version|target|address_size)\b[^\n]*")
_STATEMENT = re.compile(r'(?:[^;"]|"(?:[^"\\]|\\.)*")*?;')
_ENTRY = re.compile(r"\.(?:entry|func)\b")
_NAME = re.compile(r"[\w$.%]+")


class Statement(NamedTuple):
    """One statement; `kind` is `open`, `close`, `label`, `line` (`.loc`, `.file`) or `text`, without its semicolon."""

    kind: str
    text: str


class Function(NamedTuple):
    """A `.entry` or `.func`: what stands before its body, and the body between the braces."""

    is_entry: bool
    name: str
    returns: str
    parameters: str
    directives: str
    body: str


def strip_comments(text: str) -> str:
    """The text without comments; line ends stay, because `.loc` ends with its line.

    What a comment says of a line's outermost call is kept, as `.loc 2 43 17 called name line`.
    """
    return _COMMENT.sub(lambda found: found[1] or " ", _INLINED.sub(r"\1 called \2 \3", text))


def statements(body: str) -> Iterator[Statement]:
    """The statements of a body, in order."""
    place, end = 0, len(body)
    while place < end:
        if found := _SPACE.match(body, place):
            place = found.end()
            continue
        sign = body[place]
        if sign in "{}":
            yield Statement("open" if sign == "{" else "close", "")
            place += 1
        elif sign == ";":
            place += 1
        elif found := _LINE.match(body, place):
            yield Statement("line", found[0])
            place = found.end()
        elif found := _LABEL.match(body, place):
            yield Statement("label", found[1])
            place = found.end()
        elif found := _STATEMENT.match(body, place):
            yield Statement("text", found[0][:-1].strip())
            place = found.end()
        else:
            raise PtxError(f"PTX: expected a statement that ends with ';', got {body[place : place + 60]!r}")


def split_module(text: str) -> tuple[list[str], list[Function]]:
    """The module's own directives and declarations, and its functions.  `text` is without comments."""
    outer: list[str] = []
    functions: list[Function] = []
    place = 0
    while found := _ENTRY.search(text, place):
        start = max(text.rfind(sign, place, found.start()) for sign in ";}\n") + 1
        outer.append(text[place : max(start, place)])
        function, place = _function(text, found)
        if function is not None:
            functions.append(function)
    rest = text[place:]
    # Sections of debug information follow the code.
    outer.append(re.split(r"(?m)^\s*\.section\b", rest)[0])
    return outer, functions


def _function(text: str, found: re.Match[str]) -> tuple[Function | None, int]:
    place = _skip(text, found.end())
    returns = ""
    if text[place] == "(":
        close = _closing(text, place, "()")
        returns, place = text[place + 1 : close], _skip(text, close + 1)
    name = _NAME.match(text, place)
    if name is None:
        raise PtxError(f"PTX: expected the name of a function, got {text[place : place + 40]!r}")
    place = _skip(text, name.end())
    parameters = ""
    if text[place] == "(":
        close = _closing(text, place, "()")
        parameters, place = text[place + 1 : close], close + 1
    opening, ending = text.find("{", place), text.find(";", place)
    if opening < 0 or 0 <= ending < opening:
        return None, ending + 1  # a declaration
    close = _closing(text, opening, "{}")
    is_entry = found[0] == ".entry"
    return (
        Function(is_entry, name[0], returns, parameters, text[place:opening], text[opening + 1 : close]),
        close + 1,
    )


def _skip(text: str, place: int) -> int:
    found = _SPACE.match(text, place)
    return found.end() if found else place


def _closing(text: str, place: int, pair: str) -> int:
    depth = 0
    for found in re.compile(f"[{re.escape(pair)}]").finditer(text, place):
        depth += 1 if found[0] == pair[0] else -1
        if not depth:
            return found.start()
    raise PtxError(f"PTX: expected {pair[1]!r} for the {pair[0]!r} of {text[place : place + 40]!r}")
