"""Every table of the command line is drawn by `show.table`, which cuts no number in a terminal of any width."""

import io
import random
import re

import pytest
from rich.console import Console

from rooflab.bench import show
from rooflab.roofline.numbers import digits

NUMBERS = "latency_ms", "bound_ms", "of_bound", "launches", "read_mb", "gflops_per_s"
COLUMNS = ("op", "case", "kernel", "status", "limiter", "why", *NUMBERS)


@pytest.mark.parametrize("width", [60, 80, 100, 120, 140])
def test_a_number_is_whole_at_any_width(width, monkeypatch):
    draw = random.Random(width)
    for count in range(1, len(COLUMNS) + 1):
        columns = draw.sample(COLUMNS, count)
        text = " ".join("x" * draw.randint(1, 40) for _ in range(2))
        rows = [{name: 10 ** draw.uniform(-4, 7) if name in NUMBERS else text for name in columns} for _ in range(3)]
        monkeypatch.setattr(show, "out", Console(highlight=False, width=width, file=io.StringIO()))
        show.table(rows, columns, "a title")
        shown = re.findall(r"(?<!\S)[\d.,]+[%kMG]?(?!\S)", show.out.file.getvalue())
        numbers = [(name, row[name]) for row in rows for name in columns if name in NUMBERS]
        wanted = [f"{number:.0%}" if name == "of_bound" else digits(number) for name, number in numbers]
        assert sorted(shown) == sorted(wanted), columns
