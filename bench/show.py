"""Prints tables, progress and plain lines to the terminal with Rich."""

from __future__ import annotations

import json
import re
import sys
import textwrap
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from rooflab.bench.base.plain import plain
from rooflab.bench.base.system_time import time
from rooflab.roofline.names import visible
from rooflab.roofline.numbers import digits

# In a pipe or a file Rich would fold tables at 80 columns.
out = Console(highlight=False, emoji=False, width=None if sys.stdout.isatty() else 200)
err = Console(stderr=True, highlight=False, emoji=False)
HEARTBEAT_S = 10.0
"""The most seconds without a new line during a long step, if the output goes to a pipe or a file."""
COLUMN_GAP, TEXT = 2, 16
"""The characters between two columns, and the least width of a text column, whose texts are folded to fit."""
_OK, _FAULT_STATUSES = ("OK",), ("INCORRECT", "INVALID", "COMPILE_ERROR", "RUNTIME_ERROR", "OUT_OF_MEMORY", "TIMEOUT")


_as_json = False


@contextmanager
def chosen(as_json: bool) -> Iterator[None]:
    """Chooses what a `with` block prints: only the JSON result if `as_json` is true, else only tables and lines."""
    global out, _as_json
    old_console = out
    out, _as_json = Console(quiet=True) if as_json else out, as_json
    try:
        yield
    finally:
        out, _as_json = old_console, False


def beside_json() -> None:
    """Sends tables and lines to standard error if standard output contains JSON."""
    global out
    out = err if _as_json else out


def result(value: Any) -> None:
    """Prints the result of a command as JSON if the user requested JSON."""
    if _as_json:
        print(json.dumps(plain(value), indent=2, allow_nan=False))


def table(
    rows: Sequence[Mapping[str, Any]], columns: Iterable[str], title: str | None = None, *, filled: bool = False
) -> None:
    """Prints `rows` as a table.  `filled` omits empty columns.  Numbers are right-aligned, with three digits.

    If the terminal is narrow, texts continue on the next line.  If this is not enough, each row becomes lines of names
    and values.  Numbers are never shortened."""
    columns = [name for name in columns if not filled or any(row.get(name) not in (None, "") for row in rows)]
    is_numeric = [all(isinstance(row.get(name), int | float | None) for row in rows) for name in columns]
    cells = [[_cell(name, row.get(name)) for name in columns] for row in rows]
    widths = [max(len(name), *(row[col_index].cell_len for row in cells), 0) for col_index, name in enumerate(columns)]
    heading = None if title is None else Text(visible(title))
    gap_width = COLUMN_GAP * (len(columns) - 1)
    if (
        gap_width
        + sum(width if is_fixed else min(width, TEXT) for width, is_fixed in zip(widths, is_numeric, strict=True))
        > out.width
    ):
        return _as_lines(columns, cells, is_numeric, heading)
    grid = Table(title=heading, title_justify="left", header_style="bold", box=None, pad_edge=False, title_style="bold")
    for name, is_number in zip(columns, is_numeric, strict=True):
        is_fixed = is_number or (sum(widths) + gap_width <= out.width and name not in ("reason", "why", "case"))
        grid.add_column(Text(name), justify="right" if is_number else "left", no_wrap=is_fixed, overflow="fold")
    for row in cells:
        grid.add_row(*row)
    out.print(grid)


def _as_lines(
    columns: Sequence[str], cells: Sequence[Sequence[Text]], numeric: Sequence[bool], head: Text | None
) -> None:
    """Prints each table row as lines: first the cells before the first number, then the others with their names."""
    keys = max(1, numeric.index(True) if True in numeric else 1)
    if head is not None:
        out.print(head, style="bold")
    for row in cells:
        line("  ".join(cell.plain for cell in row[:keys] if cell.plain), "bold")
        texts = (f"{name}\xa0{cell.plain}" for name, cell in zip(columns[keys:], row[keys:], strict=True) if cell.plain)
        wrapped_lines = textwrap.wrap("  ".join(texts), max(out.width, 20), initial_indent="  ", subsequent_indent="  ")
        line("\n".join(wrapped_lines).replace("\xa0", " "))


def _cell(column: str, value: Any) -> Text:
    if value is None or value == "":
        return Text()
    if isinstance(value, bool):
        return Text("yes" if value else "no")
    if column == "of_bound" and isinstance(value, float):
        return Text(f"{value:.0%}")
    if isinstance(value, float):
        return Text(digits(value))
    colour = "green" if value in _OK else "red" if value in _FAULT_STATUSES else "yellow"
    text = " ".join(str(value).split()) if column in ("reason", "why") else str(value)
    return Text(visible(text), style=colour if column == "status" else "")


def pairs(rows: Iterable[tuple[str, str]]) -> None:
    """Prints a table with two columns: labels and values."""
    grid = Table(show_header=False, box=None, pad_edge=False)
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for row_label, cell_value in rows:
        grid.add_row(Text(visible(row_label)), Text(visible(cell_value, keep="\n\t")))
    out.print(grid)


def line(text: str = "", style: str | None = None) -> None:
    """Prints `text` unchanged.  Markup, emoji names and terminal commands in it have no effect."""
    out.print(visible(text, keep="\n\t"), style=style, markup=False, soft_wrap=True)


def piece(text: str) -> None:
    """Prints `text` immediately, without a newline at its end."""
    if not out.quiet:
        out.file.write(text)  # without Rich, which would turn `:smile:` into a picture and tabs into blanks
        out.file.flush()


def error(text: str) -> None:
    """Prints one sentence on standard error."""
    err.print(visible(text, keep="\n\t"), style="red", markup=False, soft_wrap=True)


def note(text: str | None) -> None:
    """Prints `text` on standard error, unless it is empty.  Standard output is only for results."""
    if text:
        err.print(visible(text, keep="\n\t"), style="dim", markup=False, soft_wrap=True)


@contextmanager
def progress(what: str, total: int, lines: bool = False, ended: bool = True) -> Iterator[Any]:
    """Shows a progress bar on standard error.  Yields the function `advance(text)`, to call once for each item.

    If `ended` is true, a line with the total time follows.  If `lines` is true, each item's text is printed on its own
    line.  Without a terminal, the number of finished items is printed every `HEARTBEAT_S` seconds."""
    start_s, done = time.monotonic(), 0

    def state() -> str:
        return f"{what.strip()}: {done} of {total} in {time.monotonic() - start_s:.0f} s"

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    item_col = TextColumn("{task.fields[now]}", style="dim", markup=False)
    with _beating(state), Progress(*columns, item_col, console=err, transient=True, disable=not err.is_terminal) as bar:
        task_id = bar.add_task(what, total=total, now="")

        def advance(text: str) -> None:
            nonlocal done
            done += 1
            bar.update(task_id, advance=1, now="" if lines else visible(text[:60]))
            if lines and text and not _as_json:
                note(text)

        yield advance
    if ended:
        note(state())


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """Shows a spinner on standard error during long work.  Without a terminal, prints a line every `HEARTBEAT_S`."""
    start_s = time.monotonic()
    with _beating(lambda: f"{what.strip()}: {time.monotonic() - start_s:.0f} s"), err.status(what):
        yield


@contextmanager
def _beating(state: Callable[[], str]) -> Iterator[None]:
    """Prints the text of `state()` to standard error every `HEARTBEAT_S` seconds. A terminal gets no such lines."""
    end_event = threading.Event()

    def beat() -> None:
        while not end_event.wait(HEARTBEAT_S):
            note(state())

    thread = threading.Thread(target=beat, daemon=True)
    if not err.is_terminal:
        thread.start()
    try:
        yield
    finally:
        end_event.set()
        if thread.ident is not None:
            thread.join()


def bench_table(rows: Sequence[Mapping[str, Any]]) -> None:
    """Prints a table of kernel times, then the kernels without a time and the reason, then one line per failure."""
    timed_rows = [row for row in rows if row["latency_ms"] is not None and row["status"] in ("OK", "NOISY")]
    status = ("status",) if any(row["status"] == "NOISY" for row in timed_rows) else ()
    time_columns = ("latency_ms", "p20_ms", "p80_ms", "bound_ms", "of_bound", "limiter", "gflops_per_s", "gbytes_per_s")
    table(timed_rows, ("op", "case", "scheme", "kernel", "role", *status, *time_columns))
    fine_statuses = ("OK", "UNSUPPORTED", "UNAVAILABLE")
    untimed_rows = [row for row in rows if row["latency_ms"] is None and row["status"] in fine_statuses]
    noisy_rows = [row for row in rows if row["status"] == "NOISY"]
    notes = [row for row in rows if row["status"] == "OK" and row["reason"]]
    for kind, kind_rows, line_style in (
        ("not timed", untimed_rows, "dim"),
        ("NOISY", noisy_rows, "yellow"),
        ("note", notes, "yellow"),
    ):
        groups: dict[str, list[Mapping[str, Any]]] = {}
        for row in kind_rows:  # NOISY readings with one cause differ only in the numbers
            groups.setdefault(re.sub(r"\d.*", "", row["reason"]) if kind == "NOISY" else row["reason"], []).append(row)
        for group in groups.values():
            names = dict.fromkeys(f"{row['op']}/{row['kernel']}" for row in group)
            row_hint = " (the first one's numbers)" if any(row["reason"] != group[0]["reason"] for row in group) else ""
            line(f"{kind}: {', '.join(names)}: {group[0]['reason']}{row_hint}", line_style)
    if noisy_rows:
        line("A quieter machine, fewer threads (OMP_NUM_THREADS=1) or a longer --budget helps against NOISY.", "yellow")
    for row in rows:
        if row["status"] not in (*fine_statuses, "NOISY"):
            failure(row)


def failure(row: Mapping[str, Any]) -> None:
    """Prints one line for a kernel that failed."""
    line(f"{row['op']}/{row['kernel']} {row['case']} {row['scheme']}: {row['status']}: {row['reason']}", "red")


def engine_summary(result: Mapping[str, Any]) -> None:
    """Prints lines about a generated answer: its model, kernels, tokens and latencies."""
    rows = [
        ("model", f"{result['model']} on {result['device']} in {result['dtype']}"),
        ("kernels", ", ".join(f"{op}={kernel}" for op, kernel in result["kernels"].items())),
        ("tokens", f"{result['prompt_tokens']} in, {len(result['token_ids'])} out, ended by {result['finish_reason']}"),
    ]
    if "ttft_p50_ms" in result:
        rows.append(("TTFT", f"{result['ttft_p50_ms']:.1f} ms"))
        if result["itl_p50_ms"] is not None:
            itl_text = " / ".join(f"{result[f'itl_p{percentile}_ms']:.1f}" for percentile in (50, 90, 99))
            rows.append(("ITL p50 / p90 / p99", f"{itl_text} ms"))
        if result["reason"]:
            rows.append((result["status"], result["reason"]))
        rows.append(("throughput", f"{result['output_tokens_per_s']:.1f} tokens/s, prompt included"))
    else:
        rows.append(("times", "none: Triton's interpreter ran kernels, and its times say nothing about them"))
    pairs(rows)
