"""Names of kernels, cases and tests are data and may hold any character; an output shows or refuses a name."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar
from unicodedata import bidirectional, category

Value = TypeVar("Value")
_HIDDEN = ("Cc", "Cs", "Cn", "Zl", "Zp")
"""Unicode categories of control characters, of line ends, and of characters that XML or UTF-8 cannot hold."""
_TURNS = ("LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI")
"""Bidirectional classes of characters that reverse the order of the text after them."""


def visible(text: str, keep: str = "") -> str:
    """Returns `text` with an escape such as `\\x1b` for each invisible character, except those in `keep`."""
    if text.isprintable():
        return text
    hidden = {each for each in text if category(each) in _HIDDEN or bidirectional(each) in _TURNS} - set(keep)
    return text.translate({ord(each): each.encode("unicode_escape").decode() for each in hidden})


def check_name(argument: str, name: str) -> None:
    """Raises `ValueError` on a name that a table cannot show: an empty or blank name, or an invisible character."""
    if not name.strip() or not name.isprintable():
        raise ValueError(f"{argument}: expected a name of characters that can be seen, got {name!r}")


def values_by_name(
    texts: Iterable[str], expected: str, read: Callable[[str, str], Value], sign: str = "="
) -> dict[str, Value]:
    """Reads `NAME=VALUE` texts into a mapping from each name to `read(name, value)`.

    Raises `ValueError` with `expected` if a text has another form, if a name comes twice, or if `read` raises.
    """
    values: dict[str, Value] = {}
    for text in texts:
        name, between, value = text.strip().partition(sign)
        try:
            if not (name and between and value) or name in values:
                raise ValueError
            values[name] = read(name, value)
        except ValueError as error:
            raise ValueError(f"{expected}, got {text!r}") from error
    return values
