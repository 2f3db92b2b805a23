"""Reads kernel times that others published, and interpolates between the published shapes.

`rooflab import published` writes the tables of times. `results/published/tables.json` gives each table's device,
library, op, timing method and source. Between two shapes, log(time / bound) is interpolated linearly in the logarithm
of each axis. Nothing is extrapolated.
"""

from __future__ import annotations

import csv
import io
import json
import lzma
from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
from math import exp, log
from pathlib import Path
from statistics import median
from typing import Any

from rooflab.roofline.device import get_device
from rooflab.roofline.model import Cost, bound
from rooflab.roofline.steps import (
    ITEM_BYTES,
    all_reduce_s,
    decode_attention_cost,
    gemm_cost,
    link,
    prefill_attention_cost,
    rmsnorm_cost,
)

TABLES_FOLDER = Path(__file__).resolve().parents[1] / "results" / "published"
"""The folder of the committed tables, which are part of the wheel.  An import writes the same format to any folder."""
INDEX_FILE = "tables.json"
_KERNEL_START_S = 2e-6
"""Seconds that are added to the bound before interpolation: about the time of a launch, whatever the shape.  The
constant only scales the two ends; no result contains it."""

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Table:
    """The published times of one kernel by shape, for one library on one GPU."""

    file: str
    gpu: str
    """The GPU's name in `roofline/device.py`."""
    device: str
    """The GPU's name as the source gives it."""
    op: str
    """An op of Rooflab, or `all_reduce`."""
    scheme: str
    case: Mapping[str, Any]
    """The values that all rows share: the rest of the case of Rooflab's op."""
    exact: tuple[str, ...]
    """The columns that are never interpolated."""
    axes: tuple[str, ...]
    """The columns between whose values a time is interpolated."""
    kernel: str
    """The name of the kernel that ran, as the source gives it."""
    framework: str
    version: str
    copies: int
    """The number of sets of weights that the source uses in turn; with 1, a call finds in L2 the data that the previous
    call left there."""
    rows: int
    timing: str
    """The source's method of timing."""
    includes: tuple[str, ...]
    """The other ops whose work is in the time."""
    note: str
    """Remarks on the time or its inputs."""
    source: str
    licence: str
    url: str
    folder: Path = TABLES_FOLDER

    @cached_property
    def times(self) -> dict[Shape, float]:
        """Returns seconds by shape (the values in columns `exact` and `axes`). Raises `ValueError` on a bad file."""
        csv_path = self.folder / self.file
        try:
            csv_text = lzma.decompress(csv_path.read_bytes()).decode()
            header_row, *csv_rows = csv.reader(io.StringIO(csv_text))
            if header_row != [*self.exact, *self.axes, "us"]:
                raise ValueError(f"columns {', '.join(header_row)}")
            times = {tuple(map(int, csv_row[:-1])): float(csv_row[-1]) * 1e-6 for csv_row in csv_rows}
        except (OSError, EOFError, lzma.LZMAError, ValueError) as error:
            raise ValueError(f"published: {csv_path} is not the table that {INDEX_FILE} describes: {error}") from error
        if len(times) != self.rows:
            raise ValueError(f"published: expected {self.rows} rows in {csv_path}, got {len(times)}")
        return times

    @cached_property
    def _values(self) -> dict[Shape, list[list[int]]]:
        """Returns the sorted published sizes along each axis. The key of the dict is a combination of values in the
        columns `exact`, which are never interpolated."""
        values_by_key: dict[Shape, list[set[int]]] = {}
        for shape in self.times:
            axis_value_sets = values_by_key.setdefault(shape[: len(self.exact)], [set() for _ in self.axes])
            for sizes, axis_value in zip(axis_value_sets, shape[len(self.exact) :], strict=True):
                sizes.add(axis_value)
        return {key: [sorted(sizes) for sizes in axis_value_sets] for key, axis_value_sets in values_by_key.items()}

    def least_s(self, shape: Mapping[str, int], cached: bool = False) -> float:
        """Returns the roofline bound of a shape in seconds, from the data sheet.

        With `cached`, data in L2 from earlier calls need not be read from HBM. The published benchmark uses `copies`
        sets of weights in turn, which share L2. So a call finds the L2 size divided by `copies` in L2. Reads from L2
        add no time, because no L2 rate is published."""
        device = get_device(self.gpu)
        if self.op == "all_reduce":
            return all_reduce_s(shape["bytes"], shape["gpus"], link(device, shape["gpus"]))
        cost = COSTS[self.op](self.scheme, shape)
        if cached:
            cost = replace(cost, read_bytes=max(0.0, cost.bytes - device.l2_bytes / self.copies), write_bytes=0.0)
        return bound(cost, device.ceilings()).seconds

    def time(self, shape: Mapping[str, int]) -> Time:
        """Returns the published or interpolated time of a shape. Outside the table, the result's `seconds` is None."""
        exact_key = tuple(shape[size_name] for size_name in self.exact)
        if exact_key not in self._values:
            exact_text = ", ".join(f"{size_name} = {shape[size_name]}" for size_name in self.exact)
            return Time(None, f"no row with {exact_text}", self)
        axis_values = tuple(shape[size_name] for size_name in self.axes)
        for size_name, size, published_values in zip(self.axes, axis_values, self._values[exact_key], strict=True):
            if not published_values[0] <= size <= published_values[-1]:
                return Time(
                    None, f"{size_name} = {size} is outside of {published_values[0]} to {published_values[-1]}", self
                )
        if (exact_key + axis_values) in self.times:
            return Time(self.times[exact_key + axis_values], "published", self)
        log_ratio = self._log_ratio(exact_key, axis_values)
        if log_ratio is None:
            return Time(None, "the rows around it are missing", self)
        return Time(exp(log_ratio) * self._scale(exact_key, axis_values), "interpolated", self)

    def _scale(self, key: Shape, point: Shape) -> float:
        return self.least_s(dict(zip((*self.exact, *self.axes), key + point, strict=True))) + _KERNEL_START_S

    def _log_ratio(self, key: Shape, point: Shape) -> float | None:
        """Returns log(published time / roofline bound) at `point`, which has one size for each axis of the table.
        Interpolates if the table lacks `point`.

        If a size is not in the table, interpolates along its axis. If only the combination of sizes is missing,
        interpolates along each axis and returns the median. Returns None if the table has no neighbours of `point`."""
        if (key + point) in self.times:
            return log(self.times[key + point] / self._scale(key, point))
        for axis, axis_value in enumerate(point):
            published_values = self._values[key][axis]
            upper_index = bisect_left(published_values, axis_value)
            if published_values[upper_index] != axis_value:
                end_points = [
                    _replaced(point, axis, end) for end in published_values[upper_index - 1 : upper_index + 1]
                ]
                return _between(point, axis, end_points, [self._log_ratio(key, end) for end in end_points])
        axis_ratios = [ratio for axis in range(len(point)) if (ratio := self._along(key, point, axis)) is not None]
        return median(axis_ratios) if axis_ratios else None

    def _along(self, key: Shape, point: Shape, axis: int) -> float | None:
        """Interpolates along one axis of a table, between the nearest published sizes. Returns None if the table lacks
        a smaller or a larger size."""
        published_values = [v for v in self._values[key][axis] if (key + _replaced(point, axis, v)) in self.times]
        upper_index = bisect_left(published_values, point[axis])
        if not 0 < upper_index < len(published_values):
            return None
        end_points = [_replaced(point, axis, end) for end in published_values[upper_index - 1 : upper_index + 1]]
        return _between(point, axis, end_points, [self._log_ratio(key, end) for end in end_points])


@dataclass(frozen=True)
class Time:
    """The time that a published table gives for a shape."""

    seconds: float | None
    """The seconds; None if the shape is outside the table."""
    how: str
    """`published`, `interpolated`, or the reason why there is no time."""
    table: Table


def _replaced(point: Shape, axis: int, value: int) -> Shape:
    return (*point[:axis], value, *point[axis + 1 :])


def _between(point: Shape, axis: int, ends: list[Shape], ratios: list[float | None]) -> float | None:
    low_ratio, high_ratio = ratios
    if low_ratio is None or high_ratio is None:
        return None
    log_size, low_log, high_log = (log(shape[axis]) for shape in (point, *ends))
    return low_ratio + (high_ratio - low_ratio) * (log_size - low_log) / (high_log - low_log)


def _product(scheme: str, shape: Mapping[str, int]) -> Cost:
    return gemm_cost(shape["M"], shape["N"], shape["K"], scheme, "bf16")


def _prefill(scheme: str, shape: Mapping[str, int]) -> Cost:
    return prefill_attention_cost(**shape, dtype=scheme)


def _decode(scheme: str, shape: Mapping[str, int]) -> Cost:
    return decode_attention_cost(**shape, dtype="bf16", kv_dtype="fp8_e4m3" if scheme == "kv_fp8" else scheme)


def _rmsnorm(scheme: str, shape: Mapping[str, int]) -> Cost:
    return rmsnorm_cost(shape["T"], shape["H"], ITEM_BYTES[scheme])


COSTS: Mapping[str, Callable[[str, Mapping[str, int]], Cost]] = {
    "gemm": _product,
    "gemm_fp8": _product,
    "flash_attention": _prefill,
    "paged_attention": _decode,
    "rmsnorm": _rmsnorm,
}
"""For each op that has published times: a function from the scheme and a row's shape to the cost."""


@cache
def committed() -> tuple[Table, ...]:
    """Returns the tables that are committed to git in `results/published`. Reads them only once."""
    return tuple(load())


def times_of(op: str, scheme: str, case: Mapping[str, Any], gpu: str) -> list[Time]:
    """Returns the published times of a test case of one of our ops on a GPU. Each table that covers the case gives one
    time, published or interpolated. The list is empty if no table covers the case."""
    shape = _shape(op, case)
    if shape is None:
        return []
    times = []
    for table in committed():
        if (table.op, table.scheme, table.gpu) != (op, scheme, gpu):
            continue
        columns = (*table.exact, *table.axes)
        leftover = {axis: size_value for axis, size_value in shape.items() if axis not in columns}
        if leftover == table.case and (time := table.time({axis: shape[axis] for axis in columns})).seconds is not None:
            times.append(time)
    return times


def _shape(op: str, case: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns the sizes of a test case, named like the columns of the published tables. Returns None if the tables do
    not time such a case. Leaves out the page size, because each source has its own."""
    shape = {size_name: size_value for size_name, size_value in case.items() if size_name not in ("eps", "block_size")}
    if op == "flash_attention":
        if not shape.pop("causal") or shape.pop("T") != shape["S"]:
            return None
        shape["context"] = shape.pop("S")
    if op == "paged_attention" and shape.pop("ragged"):
        return None
    return {"window": 0} | shape if "attention" in op else shape


def load(folder: Path = TABLES_FOLDER) -> list[Table]:
    """Returns the tables of `folder`. Raises `ValueError` if the folder's index file is missing or cannot be read."""
    index_path = folder / INDEX_FILE
    if not index_path.is_file():
        raise ValueError(f"published: expected the tables of published times in {folder}, found none")
    try:
        table_entries = json.loads(index_path.read_text(encoding="utf-8"))["tables"]
        return [
            Table(**row | {field: tuple(row[field]) for field in ("exact", "axes", "includes")}, folder=folder)
            for row in table_entries
        ]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"published: {index_path} is no index of tables: {error}") from error
