"""Checks and escapes the names of kernels, cases and tests. Such a name is data and may hold any character."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar
from unicodedata import bidirectional, category

Value = TypeVar("Value")
_HIDDEN_CLASSES = ("Cc", "Cs", "Cn", "Zl", "Zp")
"""Unicode categories of control characters, of line ends, and of characters that XML or UTF-8 cannot hold."""
_BIDI_CLASSES = ("LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI")
"""Bidirectional classes of characters that reverse the order of the text after them."""


def visible(text: str, keep: str = "") -> str:
    r"""Returns `text` with each invisible character replaced by an escape such as `\x1b`. Characters in `keep` stay."""
    if text.isprintable():
        return text
    hidden_chars = {
        char for char in text if category(char) in _HIDDEN_CLASSES or bidirectional(char) in _BIDI_CLASSES
    } - set(keep)
    return text.translate({ord(char): char.encode("unicode_escape").decode() for char in hidden_chars})


def check_name(argument: str, name: str) -> None:
    """Raises `ValueError` if a table cannot show the name: it is empty or blank, or has an invisible character."""
    if not name.strip() or not name.isprintable():
        raise ValueError(f"{argument}: expected a name of characters that can be seen, got {name!r}")


def values_by_name(
    texts: Iterable[str], expected: str, read: Callable[[str, str], Value], sign: str = "="
) -> dict[str, Value]:
    """Parses texts of the form `NAME=VALUE` into a dict that maps each name to `read(name, value)`.

    Raises `ValueError` with the text `expected` if a text has another form, if a name comes twice, or if `read` raises.
    """
    typed_values: dict[str, Value] = {}
    for text in texts:
        value_name, separator, value_text = text.strip().partition(sign)
        try:
            if not (value_name and separator and value_text) or value_name in typed_values:
                raise ValueError
            typed_values[value_name] = read(value_name, value_text)
        except ValueError as error:
            raise ValueError(f"{expected}, got {text!r}") from error
    return typed_values
