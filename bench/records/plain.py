"""Values as JSON's types and as Markdown.  Does not import torch, so a process that does not need torch starts fast."""

from __future__ import annotations

import math
import re
import string
from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from typing import Any

from rooflab.roofline.names import visible

_PUNCTUATION = {ord(sign): f"&#{ord(sign)};" for sign in string.punctuation}


def plain(value: Any) -> Any:
    """`value` in JSON's types; numbers that JSON cannot hold become texts."""
    if is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def markdown_cell(text: str) -> str:
    """A text as one cell of a Markdown table, in which no character is markup."""
    return re.sub(r"([\\`*<|\[~&]|(?<![^\W_])_|_(?![^\W_]))", r"\\\1", visible(" ".join(text.split())))


def markdown_code(name: str) -> str:
    """A name as code in a cell; as entities where a code span cannot hold it: parsers differ on a backslash there."""
    shown = visible(name)
    if shown.strip() == shown and not set("`|\\") & set(shown):
        return f"`{shown}`"
    return f"<code>{shown.translate(_PUNCTUATION)}</code>"
