"""Words for a reader: metrics by name and unit, one unit in a column, JSON values in a line, moments, anchors."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import datetime
from math import isfinite
from typing import Any

from rooflab.bench.base.plain import in_utc
from rooflab.roofline.numbers import digits, percent, si, whole

_SUFFIXES: tuple[tuple[str, str], ...] = (
    ("_bytes_per_s", "B/s"),
    ("_flops_per_s", "FLOP/s"),
    ("_ops_per_s", "op/s"),
    ("_tokens_per_s", "tokens/s"),
    ("_requests_per_s", "requests/s"),
    ("_per_s", "/s"),
    ("_bytes", "B"),
    ("_gib", "GiB"),
    ("_mhz", "MHz"),
    ("_hz", "Hz"),
    ("_ms", "ms"),
    ("_us", "us"),
    ("_ns", "ns"),
    ("_s", "s"),
    ("_w", "W"),
    ("_c", "C"),
)
_PREFIXED = ("B/s", "FLOP/s", "op/s", "B", "Hz")
_INITIALS = {
    name: name.upper() for name in ("cpu", "ecc", "hbm", "itl", "l2", "mig", "os", "sfu", "sm", "tpot", "ttft")
}
_INITIALS |= {"sms": "SMs", "e2e": "end to end"}


def time_unit(latencies_ms: list[float]) -> str:
    """`us` if the median of a table's times is below a millisecond, otherwise `ms`; one unit for one table."""
    ordered = sorted(latencies_ms)
    return "us" if ordered and ordered[len(ordered) // 2] < 1.0 else "ms"


def in_unit(ms: float, unit: str) -> str:
    """A time with four digits: the reader can still tell two kernels apart that differ by one part in a thousand."""
    return digits(ms * 1e3 if unit == "us" else ms, 4)


def metric_unit(name: str) -> tuple[str, str]:
    """A metric's name without its unit, and the unit: `itl_p50_ms` is (`itl_p50`, `ms`)."""
    for suffix, unit in _SUFFIXES:
        if name.endswith(suffix) and len(name) > len(suffix):
            return name.removesuffix(suffix), unit
    return name, ""


def metric_label(name: str) -> str:
    """`itl_p50_ms` as `ITL p50 (ms)`."""
    stem, unit = metric_unit(name)
    label = " ".join(_INITIALS.get(word, word) for word in stem.split("_"))
    return f"{label} ({unit})" if unit and unit not in _PREFIXED else label


def metric_text(name: str, value: float) -> str:
    """A metric's value; with its unit if the unit has a prefix (`3.91 TB/s`), otherwise the label has the unit."""
    unit = metric_unit(name)[1]
    if unit in _PREFIXED and isfinite(value) and value > 0:
        return f"{si(value)}{unit}"
    if name in ("effect", "prediction_error", "noise_floor") or name.endswith(("_fraction", "_share")):
        return percent(value)
    return digits(value)


def plain_value(value: Any) -> str:
    """Any JSON value in one line: lists joined, objects as `key value`, numbers with few digits."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}" if abs(value) >= 10_000 else str(value)
    if isinstance(value, float):
        return whole(value)
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {plain_value(item)}" for key, item in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(plain_value(item) for item in value)
    return str(value)


def commit_text(commit: str | None, dirty: bool | None) -> str:
    """Eight digits of a commit, and whether the tree had changes."""
    if not commit:
        return "no commit"
    return f"{commit[:8]} dirty" if dirty else commit[:8]


def moment(timestamp: str) -> str:
    """An ISO 8601 time to the minute, in UTC: `2026-11-21 05:53 UTC`."""
    return f"{datetime.fromisoformat(in_utc(timestamp)):%Y-%m-%d %H:%M} UTC"


def slug(text: str) -> str:
    """`text` as an anchor: letters, digits and hyphens."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-") or "unnamed"
