"""Every table of the command line is drawn by `show.table`, which cuts no number in a terminal of any width."""

import io
import random
import re

import pytest
from rich.console import Console

from rooflab.bench import show
from rooflab.roofline.numbers import digits

COLUMNS = (
    "op", "case", "scheme", "kernel", "role", "status", "latency_ms", "bound_ms", "of_bound", "limiter", "launches",
    "read_mb", "gflops_per_s", "why",
)  # fmt: skip


def value(column: str, draw: random.Random) -> object:
    if column in ("latency_ms", "bound_ms", "of_bound", "read_mb", "gflops_per_s"):
        return None if draw.random() < 0.1 else draw.uniform(0.1, 1) * 10 ** draw.randint(-3, 7)
    if column == "launches":
        return draw.randint(1, 10**6)
    return " ".join("x" * draw.randint(1, 40) for _ in range(draw.randint(1, 2)))


@pytest.mark.parametrize("width", [60, 80, 100, 120, 140])
def test_a_number_is_whole_at_any_width(width, monkeypatch):
    draw = random.Random(width)
    for count in range(1, len(COLUMNS) + 1):
        columns = draw.sample(COLUMNS, count)
        rows = [{name: value(name, draw) for name in columns} for _ in range(3)]
        monkeypatch.setattr(show, "out", Console(highlight=False, width=width, file=io.StringIO()))
        show.table(rows, columns, "a title")
        shown = re.findall(r"(?<!\S)[\d.,]+[%kMG]?(?!\S)", show.out.file.getvalue())
        numbers = [(name, row[name]) for row in rows for name in columns if isinstance(row[name], int | float)]
        wanted = [
            f"{n:.0%}" if name == "of_bound" else digits(n) if isinstance(n, float) else str(n) for name, n in numbers
        ]
        assert sorted(shown) == sorted(wanted), columns
