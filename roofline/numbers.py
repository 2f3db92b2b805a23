"""Formats numbers for a reader, with few digits and a unit. The unit of a metric comes from the end of its name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Any


def digits(value: float, count: int = 3) -> str:
    """Formats `value` with at least `count` significant digits: 0.5 as `0.500`. Uses no exponent from 1e-4 to 1e7."""
    if not isfinite(value):
        return {"inf": "infinite", "-inf": "-infinite"}.get(str(value), "not a number")
    if value == 0:
        return "0"
    decimal_exponent = int(f"{value:.{count - 1}e}".split("e")[1])
    if not -4 <= decimal_exponent < 7:
        return f"{value:.{count - 1}e}"
    return f"{value:,.{max(0, count - 1 - decimal_exponent)}f}"


def whole(value: float) -> str:
    """Formats an integer value without a decimal point, and any other number with four digits."""
    return f"{value:,.0f}" if isfinite(value) and value == int(value) and abs(value) < 1e7 else digits(value, 4)


def percent(value: float, signed: bool = False) -> str:
    """Formats `0.031` as `3.1%`. From `1,000%` on, there is no digit after the decimal point."""
    if not isfinite(value):
        return digits(value)
    sign_text = "+" if signed and value > 0 else ""
    percent_text = f"{100 * value:.1f}" if abs(value) < 10 else f"{100 * value:,.0f}"
    return f"{sign_text}{'0.0' if percent_text == '-0.0' else percent_text}%"


def si(value: float) -> str:
    """Formats a number with three digits and an SI prefix: `989 T`, `3.35 T`. Above `999 E` it shows all digits."""
    for si_prefix, prefix_value in (("E", 1e18), ("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= prefix_value * 0.9995:  # 999.5 and more would print as 1e+03 with the smaller prefix
            return f"{three_digits(value / prefix_value)} {si_prefix}"
    return f"{value:.3g} "


def three_digits(value: float) -> str:
    """Formats a number with three digits and no trailing zeros (`0.188`). A large number keeps all digits (`2,276`)."""
    return f"{value:.3g}" if value < 999.5 else f"{value:,.0f}"


def times(value: float) -> str:
    """Formats a ratio with a multiplication sign, such as `1.25×`."""
    return f"{digits(value)}×"


def counted(count: int, noun: str) -> str:
    """Formats a count with its noun: `1 check`, `2 checks`, `1,000 checks`."""
    return f"{count:,} {noun}{'s' * (count != 1)}"


def change(ratio: float | None) -> str:
    """Formats a relative change as a percentage: 0.031 gives `+3.1%`. A change of 9 or more is given as new value / old
    value: 9 gives `10x`. NaN, infinity and None give an empty text."""
    if ratio is None or not isfinite(ratio):
        return ""
    return f"{ratio:+.1%}" if ratio < 9 else f"{1 + ratio:.0f}x"


_UNIT_SUFFIXES: tuple[tuple[str, str], ...] = (
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
_SI_UNITS = ("B/s", "FLOP/s", "op/s", "B", "Hz")
_WORD_LABELS = {
    name: name.upper() for name in ("cpu", "ecc", "hbm", "itl", "l2", "mig", "os", "sfu", "sm", "tpot", "ttft")
}
_WORD_LABELS |= {"sms": "SMs", "e2e": "end to end"}


def time_unit(latencies_ms: Sequence[float]) -> str:
    """Returns the time unit of a table: `us` if the median latency is below a millisecond, otherwise `ms`."""
    sorted_latencies = sorted(latencies_ms)
    return "us" if sorted_latencies and sorted_latencies[len(sorted_latencies) // 2] < 1.0 else "ms"


def in_unit(ms: float, unit: str) -> str:
    """Formats a time in `unit` (`us` or `ms`) with four digits, to show a difference of 0.1% between two kernels."""
    return digits(ms * 1e3 if unit == "us" else ms, 4)


def metric_unit(name: str) -> tuple[str, str]:
    """Splits a metric's name into the name without its unit, and the unit: `itl_p50_ms` gives (`itl_p50`, `ms`)."""
    for name_suffix, unit in _UNIT_SUFFIXES:
        if name.endswith(name_suffix) and len(name) > len(name_suffix):
            return name.removesuffix(name_suffix), unit
    return name, ""


def metric_label(name: str) -> str:
    """Returns the label of a metric for readers: `itl_p50_ms` gives `ITL p50 (ms)`."""
    unitless_name, unit = metric_unit(name)
    label_text = " ".join(_WORD_LABELS.get(name_word, name_word) for name_word in unitless_name.split("_"))
    return f"{label_text} ({unit})" if unit and unit not in _SI_UNITS else label_text


def metric_text(name: str, value: float) -> str:
    """Formats a metric's value. A rate has a prefix and a unit (`3.91 TB/s`), and a fraction is in per cent. Any other
    text has no unit, because the unit is in the metric's label (`metric_label`)."""
    unit = metric_unit(name)[1]
    if unit in _SI_UNITS and isfinite(value) and value > 0:
        return f"{si(value)}{unit}"
    if name in ("effect", "prediction_error", "noise_floor") or name.endswith(("_fraction", "_share")):
        return percent(value)
    return digits(value)


def plain_value(value: Any) -> str:
    """Formats any JSON value in one line: lists are joined, objects become `key value`, and numbers get few digits."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}" if abs(value) >= 10_000 else str(value)
    if isinstance(value, float):
        return whole(value)
    if isinstance(value, Mapping):
        return ", ".join(f"{item_name} {plain_value(item_value)}" for item_name, item_value in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(plain_value(item_value) for item_value in value)
    return str(value)
