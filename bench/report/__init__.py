"""One HTML file from records: it asks nothing of any network, and every number in it names the line that it is from."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rooflab.bench.report.content import Content, gather
from rooflab.bench.report.page import render
from rooflab.bench.report.sources import load

TITLE = "Rooflab report"


@dataclass(frozen=True)
class Report:
    """A report that was written."""

    file: str
    bytes: int
    figures: int
    content: Content


def write_report(paths: Sequence[Path], out: Path, title: str = TITLE, plots: bool = True) -> Report:
    """Reads the records of `paths` (files, or folders at any depth) and writes the page to `out`, whole or not at all.

    Raises `ValueError` on a damaged record, naming file and line, where there is none, and where `out` is a folder.
    """
    out = Path(out)
    if out.is_dir():
        raise ValueError(f"out: expected a file, got the folder {str(out)!r}")
    if not title.strip():
        raise ValueError("title: expected a text, got an empty one")
    content = gather(*load(paths), title)
    page = render(content, plots).encode()
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(page)
        temporary.replace(out)
    finally:
        temporary.unlink(missing_ok=True)
    return Report(str(out), len(page), len(content.rooflines) if plots else 0, content)
