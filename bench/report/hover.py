"""What a point says when it is asked: in lines short enough for a phone, with every name escaped."""

from __future__ import annotations

from html import escape

from rooflab.bench.report.ladders import Ratio
from rooflab.bench.report.places import Place
from rooflab.bench.report.words import digits, percent, times
from rooflab.roofline.points import si

_LINE = 42


def hover_text(place: Place) -> str:
    """Kernel, case, time, ratios, bound, rates, traffic, check, and the record's file and line."""
    row, point = place.row, place.point
    head = f"<b>{escape(f'{point.op} / {point.label}')}</b>"
    lines = [f"{row.role}, {row.backend}", *_folded(place.case_id), place.scheme]
    if row.latency_ms is None:
        lines += [f"not timed: {row.status}", f"at best {digits(1e6 * point.bound_s, 4)} µs ({row.limiter})"]
    else:
        lines.append(f"{digits(1e3 * row.latency_ms, 4)} µs" + _spread(row.p20_ms, row.p80_ms))
        ratios = [f"{times(ratio.value)} {name}" for name, ratio in _ratios(place)]
        if ratios:
            lines.append(" · ".join(ratios) + " (as fast)")
        if row.bound_fraction is not None:
            lines.append(f"{percent(row.bound_fraction)} of the bound, by {row.limiter}")
        rate = [f"{si(row.flops_per_s)}FLOP/s"] if row.flops_per_s else []
        lines.append(" · ".join([*rate, *([f"{si(row.bytes_per_s)}B/s"] if row.bytes_per_s else [])]))
    intensity = f", {digits(point.intensity)} FLOP/byte" if point.flops else ""
    lines.append(f"{si(point.traffic_bytes)}B {row.traffic}{intensity}")
    lines.append(f"checked by {row.checked_by}")
    lines += [f"{label} {value}" for label, value in row.facts if label in ("timer", "config", "commit")]
    lines.append(f"record {row.source.run_id}, line {row.source.line}")
    return "<br>".join([head, *(escape(line) for text in lines if text for line in _folded(text))])


def _ratios(place: Place) -> list[tuple[str, Ratio]]:
    found = (("library", place.row.over_library), ("naive", place.row.over_naive))
    return [(name, ratio) for name, ratio in found if ratio is not None]


def _spread(p20_ms: float | None, p80_ms: float | None) -> str:
    if p20_ms is None or p80_ms is None:
        return ""
    return f" (p20 {digits(1e3 * p20_ms, 4)}, p80 {digits(1e3 * p80_ms, 4)})"


def _folded(text: str) -> list[str]:
    """`text` in lines of at most `_LINE` characters, broken after commas and blanks where there are some."""
    lines, line = [], ""
    for piece in text.replace(",", ",\0").replace(" ", " \0").split("\0"):
        while len(piece) > _LINE:
            if line:
                lines.append(line)
                line = ""
            lines.append(piece[:_LINE])
            piece = piece[_LINE:]
        if len(line) + len(piece.rstrip()) > _LINE:
            lines.append(line)
            line = ""
        line += piece
    return [line.strip() for line in (*lines, line) if line.strip()]
