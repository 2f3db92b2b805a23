"""Reads tritonbench's results, the JSON of `--output-json`.

A value belongs to one input (`x`), one implementation (`provider`) and one metric.  `latency` is in ms, `tflops` in
10**12 FLOP/s, `gbps` in 10**9 bytes/s, `gpu_peak_mem` in GB.  A metric for which a record has no field goes into
`metrics` under its own name.  The files contain no raw samples.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from rooflab.bench.base.decode import decoded
from rooflab.bench.core import Status
from rooflab.bench.exchange import files
from rooflab.reference.spec import Case

TOOL = "tritonbench"
MODES = ("fwd_no_grad", "fwd_bwd", "fwd", "bwd")
OPS = {"rms_norm": "rmsnorm", "rope": "rope", "gemm": "gemm", "embedding": "embedding"}
"""By operator of tritonbench, our op with the same computation."""
FIELDS = {"tflops": ("flops_per_s", 1e12), "gbps": ("bytes_per_s", 1e9), "gpu_peak_mem": ("peak_memory_bytes", 1e9)}
"""By metric: the record's field, and the factor of the metric's unit."""
AVERAGE_REASON = "an average over inputs of different sizes"
_METRIC_KEY = re.compile(r"tritonbench_(?P<name>[^\[]+)\[x_(?P<x>.*)-(?P<provider>[^-\]]*)\]_(?P<metric>.+)", re.DOTALL)
_MEAN_KEY = re.compile(r"tritonbench_[^\[]+\[[^\]]*\]-.+-avg")


@dataclass(frozen=True)
class TritonbenchFile:
    """Holds a JSON file of tritonbench: its metrics and its environment.  Older files have no environment."""

    metrics: Mapping[str, Any]
    environ: Mapping[str, Any] | None = None


class _Cells(NamedTuple):
    """Holds the file's values for one implementation on one input."""

    op: str
    provider: str
    case: Case
    place: str
    cells: dict[str, object]
    """By metric: a number, or a text, which is an error message or a config."""


def read(paths: Sequence[Path]) -> files.Imported:
    """Implements the entry point `tritonbench`: calls `read_tritonbench` on each file."""
    return sum(map(read_tritonbench, paths), files.Imported())


def read_tritonbench(path: Path) -> files.Imported:
    """Returns one record per implementation and input.

    Raises `ValueError` with the file and the place if the file is not from tritonbench."""
    text = files.read_text(path)
    values = files.parse_json(text, path.name)
    has_only_metrics = isinstance(values, dict) and "metrics" not in values
    file = decoded(TritonbenchFile, {"metrics": values} if has_only_metrics else values, path.name)
    environ = file.environ or {}
    date_text = environ.get("benchmark_date")
    iso_date = re.sub(r"^(\d{8})(\d{6})$", r"\1T\2", str(date_text))  # tritonbench writes `20250815103000`, or ISO 8601
    timestamp = files.when(iso_date, f"{path.name}, benchmark_date") if date_text else files.file_time(path)
    source = files.ResultFile(TOOL, timestamp, text, _environment(environ, path.name))
    for reading in _readings(file.metrics, path.name, source):
        _add(reading, source)
    if not source.records and not source.skipped:
        raise ValueError(f"{path.name}: expected results of tritonbench, got none")
    return source.imported()


def _environment(around: Mapping[str, Any], name: str) -> dict[str, Any]:
    values = {key: str(value) for key, value in around.items() if value and value != "unknown"}
    device = values.get("device")
    revisions = {key: value for key, value in values.items() if key.endswith(("_commit", "_branch"))}
    cuda_version = values.get("cuda_version")
    return files.environment(
        TOOL, device or "unknown", device, torch=None, cuda=cuda_version, file=name, revisions=revisions or None
    )


def _readings(metrics: Mapping[str, Any], name: str, source: files.ResultFile) -> list[_Cells]:
    readings: dict[tuple[str, str, str], _Cells] = {}
    for key, value in metrics.items():
        match = _METRIC_KEY.fullmatch(key)
        if _MEAN_KEY.fullmatch(key) or (match and match["x"] in ("average", "hashes")):
            source.skip(key, AVERAGE_REASON)
            continue
        if not match:
            raise ValueError(f"{name}, {key!r}: expected tritonbench_<op>_<mode>[x_<input>-<provider>]_<metric>")
        mode = next((mode for mode in MODES if match["name"].endswith(f"_{mode}")), "")
        op = match["name"].removesuffix(f"_{mode}") if mode else match["name"]
        op = op if mode in ("", "fwd", "fwd_no_grad") else f"{op}_{mode}"
        location = f"{match['name']}[{match['x']}-{match['provider']}]"
        case = _case(match["x"])
        case = case.but(mode=mode) if mode == "fwd_no_grad" else case  # `fwd` and this mode have the same op
        cells = _Cells(op, match["provider"], case, location, {})
        readings.setdefault((match["name"], match["x"], match["provider"]), cells).cells[match["metric"]] = value
    return list(readings.values())


def _case(text: str) -> Case:
    """Converts a text such as `(16, 32)` to the case `x0=16,x1=32`.  Any other text becomes the value of `x`."""
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        value = text
    values = value if isinstance(value, tuple) else (value,)
    input_names = ["x"] if len(values) == 1 else [f"x{index}" for index in range(len(values))]
    return files.make_case(dict(zip(input_names, values, strict=True)))


def _add(reading: _Cells, source: files.ResultFile) -> None:
    """Adds the record of one implementation on one input.  Skips a result that has neither a time nor a failure."""
    metrics: dict[str, float] = {}
    text_by_metric: dict[str, str] = {}
    for name, value in reading.cells.items():
        if isinstance(value, int | float):
            metrics[name] = float(value)
        elif value not in (None, ""):
            text_by_metric[name] = str(value)
    status, reason = _status(metrics, text_by_metric)
    if "latency" not in metrics and status == "OK":
        value_names = ", ".join(sorted({*metrics, *text_by_metric})) or "nothing"
        source.finite(metrics, reading.place)
        source.skip(reading.place, f"it has no latency, only {value_names}")
        return
    latency_ms = metrics.pop("latency", None)
    metrics = source.finite(metrics, reading.place)
    values: dict[str, Any] = {"status": status, "reason": reason}
    values |= {"op": OPS.get(reading.op, reading.op), "kernel": reading.provider, "metrics": metrics}
    for name, (record_field, unit_factor) in FIELDS.items():
        if name in metrics and (status == "OK" or name == "gpu_peak_mem"):
            values[record_field] = metrics.pop(name) * unit_factor
    source.add(reading.place, reading.case, latency_ms if status == "OK" else None, values)


def _status(metrics: Mapping[str, float], words: Mapping[str, str]) -> tuple[Status, str]:
    """Returns the status and its reason.  tritonbench writes an error message in place of the first metric."""
    error_text = words.get("error_msg") or words.get("latency") or ("" if metrics else next(iter(words.values()), ""))
    if error_text:
        out_of_memory = re.search(r"out of memory|\bOOM\b", error_text, re.IGNORECASE)
        return ("OUT_OF_MEMORY" if out_of_memory else "RUNTIME_ERROR"), " ".join(error_text.split())
    if metrics.get("accuracy") == 0.0:
        return "INCORRECT", "tritonbench found its result to differ from the baseline's"
    return "OK", ""
