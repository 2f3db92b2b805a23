"""One measurement: a kernel and a case, checked, timed, placed under the roof, written as a record.

What users import stands here; it is loaded when it is asked for, so that reading records imports no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rooflab.bench.core.measure import Measurement
    from rooflab.bench.core.record import Record
    from rooflab.bench.core.record_files import read, read_all
    from rooflab.bench.core.settings import Settings

__all__ = ["Measurement", "Record", "Settings", "read", "read_all"]
_FILES = {
    "Measurement": "measure",
    "Record": "record",
    "Settings": "settings",
    "read": "record_files",
    "read_all": "record_files",
}


def __getattr__(name: str) -> object:
    if name not in _FILES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_FILES[name]}"), name)
