"""Numbers for a reader: few digits, with a unit."""

from __future__ import annotations

from math import isfinite


def digits(value: float, count: int = 3) -> str:
    """`count` significant digits, zeros too, but all digits before the point, and no exponent from 1e-4 to 1e7."""
    if not isfinite(value):
        return {"inf": "infinite", "-inf": "-infinite"}.get(str(value), "not a number")
    if value == 0:
        return "0"
    exponent = int(f"{value:.{count - 1}e}".split("e")[1])
    if not -4 <= exponent < 7:
        return f"{value:.{count - 1}e}"
    return f"{value:,.{max(0, count - 1 - exponent)}f}"


def whole(value: float) -> str:
    """A whole number without a point; any other number with four digits."""
    return f"{value:,.0f}" if isfinite(value) and value == int(value) and abs(value) < 1e7 else digits(value, 4)


def percent(value: float, signed: bool = False) -> str:
    """`0.031` as `3.1%`; three digits below ten percent, otherwise at most one digit after the point."""
    if not isfinite(value):
        return digits(value)
    sign = "+" if signed and value > 0 else ""
    shown = f"{100 * value:.1f}" if abs(value) < 10 else f"{100 * value:,.0f}"
    return f"{sign}{'0.0' if shown == '-0.0' else shown}%"


def si(value: float) -> str:
    """Three digits and a decimal prefix: `989 T`, `3.35 T`, `46 G`; all digits above `999 E`."""
    for prefix, scale in (("E", 1e18), ("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= scale * 0.9995:  # 999.5 and more would print as 1e+03 with the smaller prefix
            return f"{three_digits(value / scale)} {prefix}"
    return f"{value:.3g} "


def three_digits(value: float) -> str:
    """Three digits without last zeros, but all digits before the point, and no exponent above: `0.188`, `2,276`."""
    return f"{value:.3g}" if value < 999.5 else f"{value:,.0f}"


def times(value: float) -> str:
    """A ratio, as `1.25×`."""
    return f"{digits(value)}×"


def counted(count: int, noun: str) -> str:
    """`1 check`, `2 checks`, `1,000 checks`."""
    return f"{count:,} {noun}{'s' * (count != 1)}"


def change(ratio: float | None) -> str:
    """`+3.1%`, or `24x` from a factor of ten on; empty for None and for a ratio that no pairs can bound."""
    if ratio is None or not isfinite(ratio):
        return ""
    return f"{ratio:+.1%}" if ratio < 9 else f"{1 + ratio:.0f}x"
