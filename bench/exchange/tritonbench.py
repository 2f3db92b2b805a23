"""Reads tritonbench's results: the CSV of `--csv` and `--output`, and the JSON of `--output-json`.

A value belongs to one input (`x`), one implementation (`provider`) and one metric.  `latency` is in ms, `tflops` in
10**12 FLOP/s, `gbps` in 10**9 bytes/s, `gpu_peak_mem` in GB.  A number without its own field in a record goes into
`metrics` under its own name.  The files hold no raw samples, and the CSV does not name the machine.
"""

from __future__ import annotations

import ast
import csv
import io
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from rooflab.bench.base.decode import decoded
from rooflab.bench.base.plain import number_in
from rooflab.bench.core import Status
from rooflab.bench.exchange import files
from rooflab.reference.spec import Case

TOOL = "tritonbench"
MODES = ("fwd_no_grad", "fwd_bwd", "fwd", "bwd")
OPS = {"rms_norm": "rmsnorm", "rope": "rope", "gemm": "gemm", "embedding": "embedding"}
"""By operator of tritonbench, our op that computes the same."""
FIELDS = {"tflops": ("flops_per_s", 1e12), "gbps": ("bytes_per_s", 1e9), "gpu_peak_mem": ("peak_memory_bytes", 1e9)}
"""By metric: the field of a record, and the factor of the metric's unit."""
AVERAGE = "an average over inputs of different sizes"
_KEY = re.compile(r"tritonbench_(?P<name>[^\[]+)\[x_(?P<x>.*)-(?P<provider>[^-\]]*)\]_(?P<metric>.+)", re.DOTALL)
_MEAN_KEY = re.compile(r"tritonbench_[^\[]+\[[^\]]*\]-.+-avg")
_SPREAD = re.compile(r"\s*\(.*%\)\s*")
"""The text that may follow a number."""


@dataclass(frozen=True)
class TritonbenchFile:
    """The JSON file with its environment; older files hold only the metrics."""

    metrics: Mapping[str, Any]
    environ: Mapping[str, Any] | None = None


class _Cells(NamedTuple):
    """The file's values for one implementation on one input."""

    op: str
    provider: str
    case: Case
    place: str
    cells: dict[str, object]
    """By metric: a number, or a text that is a number, an error message or a config."""


def read(paths: Sequence[Path], ops: Sequence[str] = ()) -> files.Imported:
    """The entry point `tritonbench`: `read_tritonbench` of each file.  Raises `ValueError` on several ops."""
    op = files.only(ops, "op") if ops else None
    return sum((read_tritonbench(path, op) for path in paths), files.Imported())


def read_tritonbench(path: Path, op: str | None = None) -> files.Imported:
    """Returns one record per implementation and input.  `op` gives the operator if the CSV's file name does not.

    Raises `ValueError` with file and place if the file is not from tritonbench.
    """
    text, metrics = files.read_text(path), None
    around: Mapping[str, Any] = {}
    if path.suffix == ".json":
        values = files.parse_json(text, path.name)
        bare = isinstance(values, dict) and "metrics" not in values
        file = decoded(TritonbenchFile, {"metrics": values} if bare else values, path.name)
        around, metrics = file.environ or {}, file.metrics
    date = around.get("benchmark_date")
    iso = re.sub(r"^(\d{8})(\d{6})$", r"\1T\2", str(date))  # tritonbench writes `20250815103000`, or ISO 8601
    timestamp = files.when(iso, f"{path.name}, benchmark_date") if date else files.file_time(path)
    source = files.ResultFile(TOOL, timestamp, text, _environment(around, path.name))
    if metrics is None:
        readings = _from_csv(text, path.name, op or _op_of(path), source)
    else:
        readings = _from_json(metrics, path.name, source)
    for reading in readings:
        _add(reading, source)
    if not source.records and not source.skipped:
        raise ValueError(f"{path.name}: expected results of tritonbench, got none")
    return source.imported()


def _op_of(path: Path) -> str:
    found = re.fullmatch(r"op_(\w+)_\w+", path.stem)
    if not found:
        raise ValueError(f"op: expected the operator of {path.name}, whose name is not of the form op_<operator>_*.csv")
    return found[1]


def _environment(around: Mapping[str, Any], name: str) -> dict[str, Any]:
    known = {key: str(value) for key, value in around.items() if value and value != "unknown"}
    device = known.get("device")
    commits = {key: value for key, value in known.items() if key.endswith(("_commit", "_branch"))}
    cuda = known.get("cuda_version")
    return files.environment(
        TOOL, device or "unknown", device, torch=None, cuda=cuda, file=name, revisions=commits or None
    )


def _from_csv(text: str, name: str, op: str, source: files.ResultFile) -> list[_Cells]:
    rows = list(csv.reader(io.StringIO(text, newline=""), delimiter=";"))
    if not rows or len(rows[0]) < 2:
        raise ValueError(f"{name}, line 1: expected columns separated by ';', the first of them the input")
    header = rows[0]
    twice = [column for column, count in Counter(header).items() if count > 1]
    if twice:
        raise ValueError(f"{name}, line 1: expected each column once, got {twice[0]!r} twice")
    inputs: Counter[str] = Counter()
    readings: list[_Cells] = []
    for line, row in enumerate(rows[1:], 2):
        place = f"{name}, line {line}"
        if not row:
            continue
        if len(row) != len(header):
            raise ValueError(f"{place}: expected {len(header)} cells, got {len(row)}")
        if row[0] in ("average", "hashes"):
            source.skip(place, AVERAGE if row[0] == "average" else "hashes of sources")
            continue
        inputs[row[0]] += 1
        case = _case(row[0], header[0])
        if inputs[row[0]] > 1:  # another input has the same text
            case = case.but(number=inputs[row[0]])
        found: dict[str, _Cells] = {}
        for column, cell in zip(header[1:], row[1:], strict=True):
            provider, separator, metric = column.rpartition("-")
            if not separator:  # a column of the input, not of an implementation
                continue
            reading = found.setdefault(provider, _Cells(op, provider, case, f"{place}, {provider}", {}))
            reading.cells[metric] = cell
        readings += found.values()
    return readings


def _from_json(metrics: Mapping[str, Any], name: str, source: files.ResultFile) -> list[_Cells]:
    found: dict[tuple[str, str, str], _Cells] = {}
    for key, value in metrics.items():
        parts = _KEY.fullmatch(key)
        if _MEAN_KEY.fullmatch(key) or (parts and parts["x"] in ("average", "hashes")):
            source.skip(key, AVERAGE)
            continue
        if not parts:
            raise ValueError(f"{name}, {key!r}: expected tritonbench_<op>_<mode>[x_<input>-<provider>]_<metric>")
        mode = next((mode for mode in MODES if parts["name"].endswith(f"_{mode}")), "")
        op = parts["name"].removesuffix(f"_{mode}") if mode else parts["name"]
        op = op if mode in ("", "fwd", "fwd_no_grad") else f"{op}_{mode}"
        place = f"{parts['name']}[{parts['x']}-{parts['provider']}]"
        case = _case(parts["x"], "x")
        case = case.but(mode=mode) if mode == "fwd_no_grad" else case  # `fwd` and this mode have the same op
        reading = _Cells(op, parts["provider"], case, place, {})
        found.setdefault((parts["name"], parts["x"], parts["provider"]), reading).cells[parts["metric"]] = value
    return list(found.values())


def _case(text: str, label: str) -> Case:
    """`(16, 32, 64)` with label `(M, N, K)` becomes M=16,N=32,K=64; x0, x1, ... if the label does not name all."""
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return files.make_case({"x": text})
    names = re.findall(r"\w+", label)
    values = value if isinstance(value, tuple) else (value,)
    if len(names) != len(values) or len(set(names)) < len(names):
        names = ["x"] if len(values) == 1 else [f"x{number}" for number in range(len(values))]
    return files.make_case(dict(zip(names, values, strict=True)))


def _add(reading: _Cells, source: files.ResultFile) -> None:
    """Adds the record of a reading; skips it if it holds neither a time nor a failure."""
    metrics: dict[str, float] = {}
    words: dict[str, str] = {}
    for name, value in reading.cells.items():
        number = float(value) if isinstance(value, int | float) else None
        if number is None and value not in (None, ""):
            number = number_in(_SPREAD.sub("", str(value)), f"{reading.place}, {name}")
            words |= {name: str(value)} if number is None else {}
        metrics |= {} if number is None else {name: number}
    status, reason = _status(metrics, words)
    if "latency" not in metrics and status == "OK":
        listed = ", ".join(sorted({*metrics, *words})) or "nothing"
        source.finite(metrics, reading.place)
        source.skip(reading.place, f"it has no latency, only {listed}")
        return
    latency = metrics.pop("latency", None)
    metrics = source.finite(metrics, reading.place)
    values: dict[str, Any] = {"status": status, "reason": reason}
    values |= {"op": OPS.get(reading.op, reading.op), "kernel": reading.provider, "metrics": metrics}
    for name, (field, factor) in FIELDS.items():
        if name in metrics and (status == "OK" or name == "gpu_peak_mem"):
            values[field] = metrics.pop(name) * factor
    source.add(reading.place, reading.case, latency if status == "OK" else None, values)


def _status(metrics: Mapping[str, float], words: Mapping[str, str]) -> tuple[Status, str]:
    """The status and the reason, from accuracy and texts: tritonbench writes an error in place of the first metric."""
    message = words.get("error_msg") or words.get("latency") or ("" if metrics else next(iter(words.values()), ""))
    if message:
        memory = re.search(r"out of memory|\bOOM\b", message, re.IGNORECASE)
        return ("OUT_OF_MEMORY" if memory else "RUNTIME_ERROR"), " ".join(message.split())
    if metrics.get("accuracy") == 0.0:
        return "INCORRECT", "tritonbench found its result to differ from the baseline's"
    return "OK", ""
