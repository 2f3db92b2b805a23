"""Reads tables of kernel times that others published, for `roofline/published.py`.

A TOML file in `sources/` describes the files of each source: aiconfigurator-core or Liger-Kernel.  It gives the rows,
Rooflab's op and scheme (dtypes), and the column of each size.
"""

from __future__ import annotations

import io
import json
import lzma
import re
import tomllib
import zipfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from typing import Any

import pandas as pd
from packaging.version import Version, parse

from rooflab.bench.base.plain import number_in
from rooflab.bench.exchange.files import MS
from rooflab.kernels._files import write_whole
from rooflab.roofline.device import identify
from rooflab.roofline.published import INDEX_FILE, TABLES_FOLDER, Table

SOURCES_FOLDER = Path(__file__).with_name("sources")
PATH_HELP = (
    "a wheel or folder of aiconfigurator-core (pip download --no-deps aiconfigurator-core==0.12.0), Liger-Kernel's "
    "h100_all_benchmark_data.csv, or a .toml that describes a table"
)
SIGNIFICANT_DIGITS = 4
"""The significant digits of a kept time; the rounding changes a time by at most 0.05%."""
_MAX_OUTLIER_SHARE = 0.02
"""The largest share of a table's rows that may lie below the bound.  If more do, the unit or the device is wrong."""


@dataclass(frozen=True)
class Placed:
    """Holds one table of published times before it is written, with the rows of a data file that belong to it."""

    table: Table
    rows: pd.DataFrame
    """The columns of the table, with the column `us` for times."""
    below: tuple[str, ...] = ()
    """The rows that are left out because they are faster than the bound, even if the bound counts on L2."""
    selected: bool = False
    """Whether the description selects the table for the repository."""

    def row(self) -> dict[str, Any]:
        """Returns the table as a row of a printed list."""
        table = self.table
        extra_columns = {"library": f"{table.framework} {table.version}", "below_bound": len(self.below) or None}
        return {name: getattr(table, name) for name in ("gpu", "op", "scheme", "kernel", "rows")} | extra_columns


@dataclass
class Published:
    """Holds the tables that an import found, and counts the rows that belong to no table."""

    placed: list[Placed] = field(default_factory=list)
    left: Counter[str] = field(default_factory=Counter)
    """By family and reason, the number of rows that fit none of our tables."""

    read: int = 0
    """The number of rows that were read: the rows of the tables, rows left out, and repeated rows."""

    def summary(self) -> dict[str, Any]:
        """Returns the results of the import as JSON values."""
        table_rows = [published_table.row() | {"left_out": published_table.below} for published_table in self.placed]
        return {"rows": self.read, "tables": table_rows, "no_place": dict(self.left)}


def read_published(paths: Sequence[Path]) -> Published:
    """Reads tables of published times.  Each path is one of these:

    - a wheel or a folder of aiconfigurator-core;
    - a data file that a description in `sources/` describes, such as Liger-Kernel's CSV;
    - a TOML description, with its data files in the same folder.

    Raises `ValueError` on any other path, on an unreadable file, on a missing column, and on impossible times."""
    import_result = Published()
    if not paths:
        raise ValueError(f"path: expected {PATH_HELP}, got none")
    for path in paths:
        (description, matching_files), old_row_count = _described(path), import_result.read
        for file_name, file_content in matching_files:
            _read_file(description, file_name, file_content, import_result)
        if import_result.read == old_row_count:
            raise ValueError(f"path: expected files {description['files']} in {str(path)!r}, got none: a newer layout?")
    return import_result


def _described(path: Path) -> tuple[Mapping[str, Any], Iterator[tuple[str, bytes]]]:
    """Returns the description of the data source at a path, and the names and contents of the files to read."""
    if path.suffix == ".toml" and path.is_file():
        description = _description(path)
        return description, _inside(path.parent, description["files"])
    if path.is_dir() or path.suffix == ".whl":
        wheel_description = _description(SOURCES_FOLDER / "aiconfigurator.toml")
        return wheel_description, _inside(path, wheel_description["files"])
    for toml_file in sorted(SOURCES_FOLDER.glob("*.toml")):
        file_description = _description(toml_file)
        if path.is_file() and _matches(path.name, file_description["files"]):
            return file_description, iter([(path.name, path.read_bytes())])
    raise ValueError(f"path: expected {PATH_HELP}, got {str(path)!r}")


def _description(path: Path) -> Mapping[str, Any]:
    try:
        toml_data = tomllib.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ValueError(f"{path.name}: not TOML: {error}") from error
    for key_name in ("name", "version", "licence", "url", "files", "timing", "unit", "table"):
        if key_name not in toml_data:
            raise ValueError(f"{path.name}: expected {key_name!r}, got a description without it")
    if toml_data["unit"] not in MS:
        raise ValueError(f"{path.name}: expected the latency's unit, one of {', '.join(MS)}, got {toml_data['unit']!r}")
    for table_number, table in enumerate(toml_data["table"], 1):
        for key_name in ("op", "scheme", "axes"):
            if key_name not in table:
                raise ValueError(f"{path.name}, table {table_number}: expected {key_name!r}, got a table without it")
    return toml_data


def _matches(name: str, pattern: str) -> bool:
    """Tells whether a path fits an `fnmatch` pattern. In the pattern, `{a,b}` stands for `a` or `b`."""
    brace_match = re.search(r"\{([^}]*)\}", pattern)
    if brace_match is None:
        return fnmatch(name, pattern)
    return any(
        _matches(name, pattern.replace(brace_match[0], alternative)) for alternative in brace_match[1].split(",")
    )


def _inside(path: Path, pattern: str) -> Iterator[tuple[str, bytes]]:
    """Yields name and content of files in a folder or wheel that fit `pattern`. Raises `ValueError` on a bad wheel."""
    if path.is_dir():
        for data_file in sorted(path.rglob("*")):
            if data_file.is_file() and _matches(file_name := data_file.relative_to(path).as_posix(), pattern):
                yield file_name, data_file.read_bytes()
        return
    try:
        with zipfile.ZipFile(path) as wheel_archive:
            for file_name in sorted(wheel_archive.namelist()):
                if _matches(file_name, pattern):
                    yield file_name, wheel_archive.read(file_name)
    except (zipfile.BadZipFile, FileNotFoundError) as error:
        raise ValueError(f"path: expected a wheel, got {str(path)!r}: {error}") from error


def _frame(name: str, content: bytes, json_column: str | None) -> pd.DataFrame:
    try:
        if name.endswith(".parquet"):
            data_frame = pd.read_parquet(io.BytesIO(content))
        else:
            data_frame = pd.read_csv(io.BytesIO(content), keep_default_na=False)  # a kernel may be called `null`
            if not isinstance(data_frame.index, pd.RangeIndex):  # pandas took the first cell for a row's name
                raise ValueError("expected as many cells in a row as columns, got more")
    except ImportError as error:
        raise ValueError("pyarrow: expected it, to read parquet: pip install 'rooflab[published]'") from error
    except (OSError, ValueError) as error:  # pyarrow's errors are of these two classes
        raise ValueError(f"{name}: not a whole table: {error}") from error
    if json_column is None:
        return data_frame
    try:
        json_values = [json.loads(json_text) for json_text in _column(data_frame, json_column, name)]
    except json.JSONDecodeError as error:
        raise ValueError(f"{name}, column {json_column!r}: expected JSON: {error}") from error
    return data_frame.join(pd.DataFrame(json_values, index=data_frame.index))


def _column(frame: pd.DataFrame, column: str, place: str) -> pd.Series[Any]:
    if column not in frame:
        raise ValueError(f"{place}: expected a column {column!r}, got {', '.join(map(str, frame.columns))}")
    return frame[column]


def _numbers(frame: pd.DataFrame, column: str, place: str, kind: type[int] | type[float]) -> pd.Series[Any]:
    values = _column(frame, column, place)
    if not pd.api.types.is_numeric_dtype(values):
        parsed_cells = [number_in(str(cell_value), f"{place}, column {column!r}") for cell_value in values]
        if None in parsed_cells:
            raise ValueError(
                f"{place}, column {column!r}: expected only numbers, got {values.iloc[parsed_cells.index(None)]!r}"
            )
        values = pd.Series(parsed_cells, index=values.index, dtype=float)
    try:
        numbers = values.astype(kind)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{place}, column {column!r}: expected only numbers: {error}") from error
    if kind is int and not (numbers == values).all():
        raise ValueError(f"{place}, column {column!r}: expected whole numbers, got {values[numbers != values].iloc[0]}")
    return numbers


def _read_file(description: Mapping[str, Any], name: str, content: bytes, published: Published) -> None:
    """Adds the tables of one file to `published`, and counts the rows that belong to no table."""
    data_frame = _frame(name, content, description.get("json"))
    used_mask = pd.Series(False, index=data_frame.index)
    for table in description["table"]:
        if not _matches(name, table.get("files", "*")):
            continue
        row_mask = pd.Series(True, index=data_frame.index)
        for column_name, allowed_values in table.get("where", {}).items():
            row_mask &= _column(data_frame, column_name, name).isin(allowed_values)
        if (row_mask & used_mask).any():
            raise ValueError(f"{name}: two tables of the description take the same rows")
        used_mask |= row_mask
        published.placed += _placed(description, table, name, data_frame[row_mask])
    published.read += len(data_frame)
    unused_rows = int((~used_mask).sum())
    family_or_file = PurePosixPath(name).parts[-4] if name.count("/") >= 3 else PurePosixPath(name).name
    if unused_rows:
        published.left[family_or_file] += unused_rows


def _placed(
    description: Mapping[str, Any], table: Mapping[str, Any], name: str, frame: pd.DataFrame
) -> Iterator[Placed]:
    """Yields one table for each pair of a device and a kernel in the rows of a file."""
    columns = {**table.get("exact", {}), **table["axes"]}
    latencies = _numbers(frame, description.get("latency", "latency"), name, float)
    if not latencies.between(0, float("inf"), inclusive="neither").all():
        raise ValueError(f"{name}: expected finite times above 0, got {latencies.min()} to {latencies.max()}")
    table_data = pd.DataFrame({axis_name: _numbers(frame, column, name, int) for axis_name, column in columns.items()})
    for axis_name, scale_factor in table.get("scale", {}).items():
        table_data[axis_name] *= scale_factor
    for axis_name, axis_offset in table.get("add", {}).items():
        table_data[axis_name] += axis_offset
    table_data["us"] = latencies * (MS[description["unit"]] * 1e3)
    group_columns = [
        _column(frame, description.get(name_key, default_column), name)
        for name_key, default_column in (("device", "device"), ("kernel", "kernel_source"))
    ]
    for (device_name, kernel), rows in table_data.groupby(group_columns, sort=True, dropna=False):
        new_table = _table(description, table, name, str(device_name), str(kernel))
        selected_names = {new_table.framework, f"{new_table.framework}:{new_table.kernel}", new_table.kernel} & set(
            table.get("selected", ())
        )
        yield replace(_checked(new_table, rows, list(columns), description["unit"]), selected=bool(selected_names))


def _table(description: Mapping[str, Any], table: Mapping[str, Any], name: str, device: str, kernel: str) -> Table:
    gpu = identify(device)
    if gpu is None:
        raise ValueError(f"{name}: expected a GPU that roofline/device.py knows, got {device!r}")
    path_parts = PurePosixPath(name).parts
    framework, lib_version = path_parts[-3:-1] if len(path_parts) > 3 else (description["name"], description["version"])
    file_slug = re.sub(
        r"[^a-z0-9.]+", "-", f"{gpu.name}.{table['op']}.{table['scheme']}.{framework}-{lib_version}.{kernel}".lower()
    )
    return Table(
        file=f"{file_slug}.csv.xz",
        gpu=gpu.name,
        device=device,
        op=table["op"],
        scheme=table["scheme"],
        case=table.get("case", {}),
        exact=tuple(table.get("exact", ())),
        axes=tuple(table["axes"]),
        kernel=kernel,
        framework=framework,
        version=lib_version,
        copies=table.get("copies", 1),
        rows=0,
        timing=table.get("timing", description["timing"]),
        includes=tuple(table.get("includes", ())),
        note=table.get("note", ""),
        source=f"{description['name']} {description['version']}, {name}",
        licence=description["licence"],
        url=description["url"],
    )


def _checked(table: Table, rows: pd.DataFrame, columns: list[str], unit: str) -> Placed:
    """Returns a table with the median time of each shape. Leaves out times below the roofline bound. Raises
    `ValueError` if there are too many of them."""
    times = rows.groupby(columns)["us"].median()
    plausible_rows, outlier_texts = [], []
    for axis_values, time_us in times.items():
        value_tuple = axis_values if isinstance(axis_values, tuple) else (axis_values,)
        shape = {axis_name: int(axis_value) for axis_name, axis_value in zip(columns, value_tuple, strict=True)}
        bound_us = table.least_s(shape, cached=True) * 1e6
        if time_us >= bound_us:
            plausible_rows.append((*shape.values(), time_us))
        else:
            shape_text = ", ".join(f"{axis_name} = {axis_value}" for axis_name, axis_value in shape.items())
            outlier_texts.append(f"{shape_text}: {time_us:.4g} us, bound {bound_us:.4g} us")
    share = len(outlier_texts) / len(times)
    if share > _MAX_OUTLIER_SHARE:
        raise ValueError(
            f"{table.source}: {share:.0%} of {len(times)} times of {table.kernel} are faster than a {table.device} can "
            f"be: is the latency in {unit}?"
        )
    data_frame = pd.DataFrame(plausible_rows, columns=[*columns, "us"])
    return Placed(replace(table, rows=len(data_frame)), data_frame, tuple(outlier_texts))


def selected(published: Published) -> list[Placed]:
    """Returns the tables of published kernel times that the repository keeps.  A TOML file describes each source of
    times, and marks the tables to keep.  If several versions of a library have tables, only the newest is kept."""
    newest_versions: dict[tuple[str, ...], Version] = {}
    versioned_tables = [
        (_library(each.table), parse(each.table.version), each) for each in published.placed if each.selected
    ]
    for library_name, version, _ in versioned_tables:
        newest_versions[library_name] = max(version, newest_versions.get(library_name, version))
    return [each for library_name, version, each in versioned_tables if version == newest_versions[library_name]]


def _library(table: Table) -> tuple[str, ...]:
    return table.gpu, table.op, table.scheme, table.kernel, table.framework, str(table.case)


def write_published(placed: Sequence[Placed], folder: Path = TABLES_FOLDER) -> Path:
    """Writes the tables and then their index file.  Returns the path of the index file."""
    packed_files = {each.table.file: _packed(each) for each in placed}
    if len(packed_files) != len(placed):
        raise ValueError("published: two tables have the same device, op, scheme, library and kernel")
    for name, packed_content in packed_files.items():
        write_whole(folder / name, packed_content)
    index_entries = [{name: value for name, value in asdict(each.table).items() if name != "folder"} for each in placed]
    return write_whole(folder / INDEX_FILE, json.dumps({"tables": index_entries}, indent=1, allow_nan=False) + "\n")


def _packed(placed: Placed) -> bytes:
    rows = placed.rows.assign(us=placed.rows["us"].map(lambda us: float(f"{us:.{SIGNIFICANT_DIGITS}g}")))
    return lzma.compress(rows.to_csv(index=False).encode(), preset=9)
