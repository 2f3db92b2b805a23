"""Writes files atomically: a reader finds the complete file or no file."""

from __future__ import annotations

import os
import threading
from pathlib import Path


def write_whole(path: Path, content: str | bytes) -> Path:
    """Writes a complete file or nothing, and returns its path. Encodes text as UTF-8 and makes missing parent folders.

    A reader finds the old or the new file, even after a crash. Raises `ValueError` if `path` is a folder or a device,
    or if UTF-8 cannot encode the text.
    """
    path = Path(path)
    try:
        content = content.encode() if isinstance(content, str) else content
    except UnicodeEncodeError as error:
        raise ValueError(f"{path}: expected text that UTF-8 holds, got {content[error.start]!r} in it") from error
    if path.exists() and not path.is_file():
        raise ValueError(f"{path}: expected a file, got a folder or a device")
    path.parent.mkdir(parents=True, exist_ok=True)
    temp_path = path.with_name(f"{path.name}.{os.getpid()}-{threading.get_ident()}.part")
    try:
        with temp_path.open("wb") as temp_file:
            temp_file.write(content)
            temp_file.flush()
            os.fsync(temp_file.fileno())  # a machine that shuts down must not leave an empty file
        temp_path.replace(path)
    except OSError as error:
        error.filename = str(path)  # a full disk names no file
        raise
    finally:
        temp_path.unlink(missing_ok=True)
    return path
