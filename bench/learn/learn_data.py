"""Reads the recorded data of the page, and packs them so that a browser can unpack them without a network."""

from __future__ import annotations

import gzip
import json
import tomllib
from base64 import b64encode
from pathlib import Path

from rooflab.bench.base.plain import JsonObject

FOLDER = Path(__file__).parent
DATA_FOLDER = FOLDER / "data"
"""A file `NAME.json`, or `NAME.json.gz` if it is large.  Each is an object with the keys `command` and `made`."""


def load(folder: Path = DATA_FOLDER) -> dict[str, JsonObject]:
    """Returns the content of each data file in `folder` by its name.

    Raises `ValueError` if a file is damaged, or does not say by which command it was made."""
    data: dict[str, JsonObject] = {}
    for path in sorted(folder.glob("*.json*")):
        try:
            raw = path.read_bytes()
            content = json.loads(gzip.decompress(raw) if path.suffix == ".gz" else raw)
        except (ValueError, EOFError, gzip.BadGzipFile) as error:
            raise ValueError(f"data: {path.name}: expected JSON, got {error}") from error
        if not isinstance(content, dict) or not {"command", "made"} <= content.keys():
            raise ValueError(f"data: {path.name}: expected an object with the keys command and made")
        data[path.name.partition(".")[0]] = content
    return data


def packed(content: JsonObject) -> str:
    """Returns `content` as JSON, compressed by gzip and written in base64.  Equal contents give equal texts."""
    text = json.dumps(content, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return b64encode(gzip.compress(text.encode(), 9, mtime=0)).decode()


def glossary() -> dict[str, str]:
    """Returns the definition of each term of the page."""
    return tomllib.loads((FOLDER / "glossary.toml").read_text())
