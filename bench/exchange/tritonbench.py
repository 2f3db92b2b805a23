"""Reads tritonbench's results, the JSON of `--output-json`.

A value belongs to one input (`x`), one implementation (`provider`) and one metric.  `latency` is in ms, `tflops` in
10**12 FLOP/s, `gbps` in 10**9 bytes/s, `gpu_peak_mem` in GB.  Other metrics keep their own names.
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
OUR_FIELDS = {"tflops": ("flops_per_s", 1e12), "gbps": ("bytes_per_s", 1e9), "gpu_peak_mem": ("peak_memory_bytes", 1e9)}
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
    """Holds all metrics of one implementation on one input, such as its latency, from a result file of tritonbench."""

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
    json_text = files.read_text(path)
    json_values = files.parse_json(json_text, path.name)
    has_only_metrics = isinstance(json_values, dict) and "metrics" not in json_values
    benchmark_file = decoded(TritonbenchFile, {"metrics": json_values} if has_only_metrics else json_values, path.name)
    environ = benchmark_file.environ or {}
    date_text = environ.get("benchmark_date")
    iso_date = re.sub(r"^(\d{8})(\d{6})$", r"\1T\2", str(date_text))  # tritonbench writes `20250815103000`, or ISO 8601
    timestamp = files.when(iso_date, f"{path.name}, benchmark_date") if date_text else files.file_time(path)
    result_file = files.ResultFile(TOOL, timestamp, json_text, _environment(environ, path.name))
    for result_cells in _readings(benchmark_file.metrics, path.name, result_file):
        _add(result_cells, result_file)
    if not result_file.records and not result_file.skipped:
        raise ValueError(f"{path.name}: expected results of tritonbench, got none")
    return result_file.imported()


def _environment(around: Mapping[str, Any], name: str) -> dict[str, Any]:
    known_values = {key: str(env_text) for key, env_text in around.items() if env_text and env_text != "unknown"}
    device = known_values.get("device")
    git_revisions = {key: env_text for key, env_text in known_values.items() if key.endswith(("_commit", "_branch"))}
    cuda_version = known_values.get("cuda_version")
    return files.environment(
        TOOL, device or "unknown", device, torch=None, cuda=cuda_version, file=name, revisions=git_revisions or None
    )


def _readings(metrics: Mapping[str, Any], name: str, source: files.ResultFile) -> list[_Cells]:
    cells_by_key: dict[tuple[str, str, str], _Cells] = {}
    for metric_key, value in metrics.items():
        match = _METRIC_KEY.fullmatch(metric_key)
        if _MEAN_KEY.fullmatch(metric_key) or (match and match["x"] in ("average", "hashes")):
            source.skip(metric_key, AVERAGE_REASON)
            continue
        if not match:
            raise ValueError(f"{name}, {metric_key!r}: expected tritonbench_<op>_<mode>[x_<input>-<provider>]_<metric>")
        pass_mode = next((pass_mode for pass_mode in MODES if match["name"].endswith(f"_{pass_mode}")), "")
        op = match["name"].removesuffix(f"_{pass_mode}") if pass_mode else match["name"]
        op = op if pass_mode in ("", "fwd", "fwd_no_grad") else f"{op}_{pass_mode}"
        metric_place = f"{match['name']}[{match['x']}-{match['provider']}]"
        case = _case(match["x"])
        case = case.but(mode=pass_mode) if pass_mode == "fwd_no_grad" else case  # `fwd` and this mode have the same op
        cells = _Cells(op, match["provider"], case, metric_place, {})
        cells_by_key.setdefault((match["name"], match["x"], match["provider"]), cells).cells[match["metric"]] = value
    return list(cells_by_key.values())


def _case(text: str) -> Case:
    """Converts an input such as `(16, 32)` to the case `x0=16,x1=32`. Any other input becomes the value of `x`."""
    try:
        case_value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        case_value = text
    case_values = case_value if isinstance(case_value, tuple) else (case_value,)
    input_names = ["x"] if len(case_values) == 1 else [f"x{input_index}" for input_index in range(len(case_values))]
    return files.make_case(dict(zip(input_names, case_values, strict=True)))


def _add(reading: _Cells, source: files.ResultFile) -> None:
    """Adds the record of one implementation on one input. Skips a result without a time and without an error."""
    metrics: dict[str, float] = {}
    text_by_metric: dict[str, str] = {}
    for metric_name, metric_value in reading.cells.items():
        if isinstance(metric_value, int | float):
            metrics[metric_name] = float(metric_value)
        elif metric_value not in (None, ""):
            text_by_metric[metric_name] = str(metric_value)
    result_status, status_reason = _status(metrics, text_by_metric)
    if "latency" not in metrics and result_status == "OK":
        names_text = ", ".join(sorted({*metrics, *text_by_metric})) or "nothing"
        source.finite(metrics, reading.place)
        source.skip(reading.place, f"it has no latency, only {names_text}")
        return
    latency_ms = metrics.pop("latency", None)
    metrics = source.finite(metrics, reading.place)
    record_values: dict[str, Any] = {"status": result_status, "reason": status_reason}
    record_values |= {"op": OPS.get(reading.op, reading.op), "kernel": reading.provider, "metrics": metrics}
    for metric_name, (record_field, unit_factor) in OUR_FIELDS.items():
        if metric_name in metrics and (result_status == "OK" or metric_name == "gpu_peak_mem"):
            record_values[record_field] = metrics.pop(metric_name) * unit_factor
    source.add(reading.place, reading.case, latency_ms if result_status == "OK" else None, record_values)


def _status(metrics: Mapping[str, float], words: Mapping[str, str]) -> tuple[Status, str]:
    """Returns a result's status and the reason. tritonbench writes an error message in place of the first metric."""
    error_text = words.get("error_msg") or words.get("latency") or ("" if metrics else next(iter(words.values()), ""))
    if error_text:
        memory_match = re.search(r"out of memory|\bOOM\b", error_text, re.IGNORECASE)
        return ("OUT_OF_MEMORY" if memory_match else "RUNTIME_ERROR"), " ".join(error_text.split())
    if metrics.get("accuracy") == 0.0:
        return "INCORRECT", "tritonbench found its result to differ from the baseline's"
    return "OK", ""
