"""Runs Nsight Compute (ncu) on one kernel call, compares its counts with the prediction, and makes a record.

The counts are bytes, pipe use and stalls. `ncu --csv --page raw` prints a line of names, a line of units, and a line
for each launch. If the installed ncu does not know a metric, its newer name (`NEW_NAMES`) is tried. A metric without a
newer name is left out.
"""

from __future__ import annotations

import csv
import glob
import math
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from subprocess import TimeoutExpired
from typing import Any

import torch

from rooflab.bench.base.plain import number_in
from rooflab.bench.compile.cases import KernelCase
from rooflab.bench.core import Child, Environment, Record
from rooflab.bench.predict.explain import Explanation
from rooflab.bench.predict.launch_once import CALL_MARK, arguments
from rooflab.bench.predict.model import LAUNCH
from rooflab.kernels import registry
from rooflab.roofline.device import get_device
from rooflab.roofline.model import Traffic

READ_METRIC, WRITE, DURATION = "dram__bytes_read.sum", "dram__bytes_write.sum", "gpu__time_duration.sum"
L2_METRIC = "lts__t_bytes.sum"
PIPE_METRICS = {
    "tensor": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
    "fma": "sm__pipe_fma_cycles_active.avg.pct_of_peak_sustained_active",
    "alu": "sm__pipe_alu_cycles_active.avg.pct_of_peak_sustained_active",
    "sfu": "sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_active",
    "load/store": "sm__inst_executed_pipe_lsu.avg.pct_of_peak_sustained_active",
    "issue": "sm__inst_issued.avg.pct_of_peak_sustained_active",
    "sm": "sm__throughput.avg.pct_of_peak_sustained_elapsed",
    "hbm": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "occupancy": "sm__warps_active.avg.pct_of_peak_sustained_active",
}
"""By pipe or unit: the metric of its use, in percent of the peak."""
STALL_REASONS = (
    *("barrier", "branch_resolving", "dispatch_stall", "drain", "gmma", "imc_miss", "lg_throttle", "long_scoreboard"),
    *("math_pipe_throttle", "membar", "mio_throttle", "misc", "no_instruction", "not_selected", "selected"),
    *("short_scoreboard", "sleeping", "tex_throttle", "wait"),
)
"""The reasons for which a warp waits; their metrics count waiting warps per issued instruction."""
STALL_METRICS = tuple(f"smsp__average_warps_issue_stalled_{name}_per_issue_active.ratio" for name in STALL_REASONS)
METRICS = (READ_METRIC, WRITE, DURATION, L2_METRIC, *PIPE_METRICS.values(), *STALL_METRICS)
NEW_NAMES = {READ_METRIC: "dram__bytes_op_read.sum", WRITE: "dram__bytes_op_write.sum"}
"""By metric, its name since Nsight Compute 2025."""
WARM_UP_CALLS = 3
TOOL_FOLDERS = ("/usr/local/cuda/bin", "/usr/local/cuda-*/bin", "/opt/nvidia/nsight-compute/*")
"""The folders where installers put the tools without adding them to the PATH; the newest version first."""
_STALL_PATTERN = re.compile(r"issue_stalled_(\w+?)_per_issue_active")
_UNKNOWN_PATTERN = re.compile(r"Failed to find metric (?:regex:\^?)?([A-Za-z0-9_.]+)")
_UNIT_FACTORS = {"byte": 1.0, "kbyte": 1e3, "mbyte": 1e6, "gbyte": 1e9, "tbyte": 1e12}
_UNIT_FACTORS |= {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}
_UNIT_FACTORS |= {"nsecond": 1e-9, "usecond": 1e-6, "msecond": 1e-3, "second": 1.0}


@dataclass(frozen=True)
class NcuCounters:
    """Holds the values that Nsight Compute (ncu) counted for one kernel launch."""

    kernel: str
    grid: str
    block: str
    values: Mapping[str, float]
    """By metric, the value in bytes or seconds.  Metrics that ncu did not collect are missing."""

    @property
    def pipes(self) -> dict[str, float]:
        """Returns how busy each pipe or unit was, in percent of its peak."""
        return {name: self.values[metric] for name, metric in PIPE_METRICS.items() if metric in self.values}

    @property
    def stalls(self) -> dict[str, float]:
        """Returns the average waiting warps per issued instruction for each stall reason, the largest first."""
        stalls = {match[1]: value for name, value in self.values.items() if (match := _STALL_PATTERN.search(name))}
        return dict(sorted(((k, v) for k, v in stalls.items() if k != "selected"), key=lambda entry: -entry[1]))


@dataclass(frozen=True)
class Profile:
    """Holds the values that Nsight Compute (ncu) counted for each launch of one kernel call."""

    launches: tuple[NcuCounters, ...]

    def total(self, metric: str) -> float | None:
        """Returns the sum of a metric over all launches.  Returns None if the metric is missing for a launch."""
        values = [entry.values.get(metric) for entry in self.launches]
        return None if any(value is None for value in values) else sum(value for value in values if value is not None)

    @property
    def traffic(self) -> Traffic | None:
        """Returns the HBM bytes that ncu counted, or None if it counted none.  Bytes still in L2 are not included."""
        read_bytes, written_bytes = self.total(READ_METRIC), self.total(WRITE)
        if read_bytes is None or written_bytes is None:
            return None
        return Traffic(read_bytes, written_bytes, len(self.launches), "counted")


def find_tool(name: str) -> str | None:
    """Returns the path of an NVIDIA tool, or None.  Searches PATH and the installers' folders."""
    folders = (f"{os.environ['CUDA_HOME']}/bin" if "CUDA_HOME" in os.environ else "", *TOOL_FOLDERS)
    tool_dirs = [match for folder in folders if folder for match in sorted(glob.glob(folder), reverse=True)]
    return shutil.which(name) or next((path for match in tool_dirs if (path := shutil.which(name, path=match))), None)


def command(target: KernelCase, seed: int, metrics: Sequence[str], log: Path, ncu: str) -> list[str]:
    """Returns the command line that runs ncu on one kernel call.  ncu empties the caches before each launch."""
    return [
        *(ncu, "--profile-from-start", "off", "--cache-control", "all", "--clock-control", "none"),
        *("--csv", "--page", "raw", "--print-units", "base", "--metrics", ",".join(metrics), "--log-file", str(log)),
        sys.executable,
        *arguments(target, seed, WARM_UP_CALLS),
    ]


def profile(target: KernelCase, seed: int = 0, timeout_s: float = 600.0) -> Profile:
    """Runs ncu on this machine's GPU, and returns its counter values for one call of `target`.

    Raises `ValueError` if ncu is missing, may not count, or counted nothing.  The message says how to fix this."""
    ncu_path = find_tool("ncu")
    if ncu_path is None:
        raise ValueError(
            "ncu: expected Nsight Compute on the PATH or in /usr/local/cuda, found none; install it (it comes with the "
            "CUDA toolkit), "
            "or use `rooflab explain`, which needs no counters"
        )
    with tempfile.TemporaryDirectory() as folder:
        return _take(target, seed, ncu_path, Path(folder), timeout_s)


def _take(target: KernelCase, seed: int, ncu: str, folder: Path, timeout_s: float) -> Profile:
    """Profiles a kernel with ncu, and leaves out metrics that ncu does not know."""
    metrics = list(METRICS)
    env_variables = {name: variable_value for name, variable_value in os.environ.items() if name != "TRITON_INTERPRET"}
    while metrics:
        log_path = folder / f"{len(metrics)} {metrics[0]}.csv"
        command_line = command(target, seed, metrics, log_path, ncu)
        try:
            process = Child.run(command_line, timeout_s, env_variables | {"LC_ALL": "C"})
        except TimeoutExpired as error:
            expected_end = f"an end within {timeout_s:.0f} s"
            raise ValueError(f"ncu: expected {expected_end}, got none; a smaller --case is counted faster") from error
        output = process.stdout + process.stderr
        log_text = log_path.read_text(errors="replace") if log_path.is_file() else ""
        unknown_names = _UNKNOWN_PATTERN.findall(output + log_text)
        unknown_metrics = [name for name in metrics if _names(name, unknown_names)]
        if not unknown_metrics:
            return read(log_text, output)
        renamed_metrics = [NEW_NAMES.get(name, "") if name in unknown_metrics else name for name in metrics]
        metrics = [name for name in renamed_metrics if name]
    raise ValueError(
        f"ncu: expected to know one of {len(METRICS)} metrics, {READ_METRIC} among them, and it knows none"
    )


def _names(metric: str, unknown: Sequence[str]) -> bool:
    """Tells whether ncu reported `metric` as unknown. ncu may cut off the end of a name in `unknown`."""
    return any(metric == name.rstrip(".") or metric.startswith(f"{name.rstrip('.')}.") for name in unknown)


def read(text: str, output: str) -> Profile:
    """Parses ncu's log `text`, or else its printed `output`.  Raises `ValueError` if neither contains a launch."""
    all_text = f"{text}\n{output}"
    if "ERR_NVGPUCTRPERM" in all_text:
        raise ValueError(
            "ncu: this user may not read the GPU's counters (ERR_NVGPUCTRPERM); run as root, or have the driver loaded "
            "with NVreg_RestrictProfilingToAdminUsers=0, in a container with --cap-add=SYS_ADMIN"
        )
    launches = parse(text) or parse(output)
    if CALL_MARK not in all_text:
        raise ValueError(f"ncu: the call that it watched did not end: {last_words(all_text)}")
    if not launches:
        raise ValueError(f"ncu: expected counters of at least one launch, got none: {last_words(all_text)}")
    return Profile(tuple(launches))


def last_words(text: str) -> str:
    """Returns the line that explains a failure best: the last error message, or else the last line of `text`."""
    lines = [line.strip() for line in text.splitlines() if line.strip() and CALL_MARK not in line]
    error_marks = ("==ERROR==", "==WARNING==", "Error", "rooflab: ")
    error_lines = [line for line in lines if any(error_mark in line for error_mark in error_marks)]
    return (error_lines or lines or ["it printed nothing"])[-1]


def parse(text: str) -> list[NcuCounters]:
    """Parses the output of `ncu --csv --page raw`.  Returns the counter values of each launch, and ignores other lines.

    Raises `ValueError` if the table is incomplete."""
    lines = text.splitlines()
    header_index = next((i for i, line in enumerate(lines) if line.startswith('"ID","Process ID"')), None)
    if header_index is None:
        return []
    launch_table = csv.DictReader(line for line in lines[header_index:] if line.startswith('"'))
    metric_units, rows = next(launch_table, {}), []
    old_names = {new_name: old_name for old_name, new_name in NEW_NAMES.items()}
    for cells in launch_table:
        if None in (*cells, *cells.values()):
            raise ValueError(f"ncu: expected {len(metric_units)} columns in each line of its table, got another number")
        values = {
            old_names.get(name, name): metric_value
            for name, cell in cells.items()
            if "__" in name and (metric_value := _number(cell, metric_units[name])) is not None
        }
        rows.append(NcuCounters(cells["Kernel Name"], cells.get("Grid Size", ""), cells.get("Block Size", ""), values))
    return rows


def _number(cell: str, unit: str) -> float | None:
    """Converts a table cell to a number in bytes or seconds; other units stay. Returns None if there is no number."""
    number = number_in(cell, "ncu")
    return number * _UNIT_FACTORS.get(unit.lower(), 1.0) if number is not None and math.isfinite(number) else None


NON_PIPE_UNITS = ("hbm", "sm", "occupancy", "issue")
"""The entries in the table of pipes that are not pipes."""
_LAUNCH_COLUMNS = (("read_mbytes", READ_METRIC, 1e-6), ("write_mbytes", WRITE, 1e-6), ("us", DURATION, 1e6))
NOT_A_TIME_REASON = "counted by Nsight Compute, which runs each launch alone: its duration is no time by the protocol"


def launch_rows(profile: Profile) -> list[dict[str, Any]]:
    """Returns one table row per launch: its bytes, time, busiest pipe, and the main stall reasons of its warps."""
    rows = []
    for entry in profile.launches:
        pipes = {name: busy_percent for name, busy_percent in entry.pipes.items() if name not in NON_PIPE_UNITS}
        pipe = max(pipes, key=lambda name: pipes[name], default=None)
        stall_texts = [f"{stall_reason} {warps:.2f}" for stall_reason, warps in list(entry.stalls.items())[:3]]
        rows.append(
            {
                "launch": entry.kernel,
                "grid": entry.grid,
                **{
                    name: unit_factor * entry.values[metric] if metric in entry.values else None
                    for name, metric, unit_factor in _LAUNCH_COLUMNS
                },
                **{f"{name}_percent": entry.pipes.get(name) for name in NON_PIPE_UNITS},
                "busiest_pipe": None if pipe is None else f"{pipe} {pipes[pipe]:.0f}%",
                "stalls": ", ".join(stall_texts),
            }
        )
    return rows


def settled(target: KernelCase, profile: Profile) -> tuple[Traffic | None, str]:
    """Returns the HBM bytes of a profiled call, and a note that says why they are inexact.  The note is empty if they
    are exact.  The bytes are None if ncu did not count them.

    ncu does not count writes still in L2 after the call.  So the written bytes are at least what the op must write."""
    counted = profile.traffic
    if counted is None:
        return None, ""
    notes = []
    if len(profile.launches) > 1:
        notes.append("launches counted apart: what they hand on through L2 counts as read from HBM")
    spec = registry.get_op(target.op)
    least_bytes = spec.cost_of(spec.make_inputs(target.case, target.scheme, torch.device("meta"), 0)).write_bytes
    if counted.write_bytes < least_bytes:
        gap_text = f"{counted.write_bytes / 1e6:.3g} of {least_bytes / 1e6:.3g} MB were counted, and the least is taken"
        notes.append(f"writes still in L2: {gap_text}")
    return replace(counted, write_bytes=max(counted.write_bytes, least_bytes)), "; ".join(notes)


def compared(modelled: Explanation, profile: Profile) -> list[dict[str, Any]]:
    """Compares the model's numbers for a call with the counted numbers, in table rows.  Both times exclude the launch
    time, because ncu flushes the caches and runs each launch alone."""
    traffic, seconds = settled(modelled.target, profile)[0], profile.total(DURATION)
    modelled_ms = modelled.modelled_ms or 0.0
    launch_ms = sum(time_step.ms for time_step in modelled.parts if time_step.name == LAUNCH)
    rows = [
        ("HBM bytes, MB", modelled.bytes / 1e6, None if traffic is None else traffic.bytes / 1e6),
        ("launches", float(modelled.launches), float(len(profile.launches))),
        ("ncu's duration, us", (modelled_ms - launch_ms) * 1e3, None if seconds is None else seconds * 1e6),
    ]
    return [
        {"what": quantity, "modelled": model, "counted": count, "ratio": count / model if count and model else None}
        for quantity, model, count in rows
    ]


def counted_record(explained: Explanation, profile: Profile, seed: int) -> Record:
    """Makes a record of the values that Nsight Compute (ncu) counted. The record has no latency, because ncu runs each
    launch alone. ncu's duration is stored as the metric `ncu_duration_ms`."""
    target = explained.target
    traffic, traffic_note = settled(target, profile)
    environment = Environment.now()
    kernel = target.registered
    # Tests replace ncu, so this machine may have no GPU for which to choose a config.
    device = torch.device("cuda" if torch.cuda.is_available() else "meta")
    config = target.config or kernel.config_for(target.case, target.scheme, device)
    metrics: dict[str, float] = {}
    if (seconds := profile.total(DURATION)) is not None:
        metrics["ncu_duration_ms"] = seconds * 1e3
    if (l2_bytes := profile.total(L2_METRIC)) is not None:
        metrics["l2_bytes"] = l2_bytes
    longest_launch = max(profile.launches, key=lambda entry: entry.values.get(DURATION, 0.0))
    metrics |= {f"{name.replace('/', '_')}_percent": value for name, value in longest_launch.pipes.items()}
    metrics |= {f"stall_{name}_warps_per_issue": value for name, value in longest_launch.stalls.items()}
    record_reason = "; ".join(text for text in (NOT_A_TIME_REASON, traffic_note) if text)
    return replace(
        environment.record("bench", kernel, target.case, target.scheme.name, reason=record_reason),
        config=None if config is None else asdict(config),
        seed=seed,
        device="cuda",
        flops=explained.flops,
        least_bytes=explained.least_bytes,
        traffic_bytes=traffic.bytes if traffic else None,
        traffic_basis="counted" if traffic else None,
        intensity=explained.flops / traffic.bytes if traffic and traffic.bytes else None,
        bound_ms=explained.bound_ms,
        limiter=explained.limiter,
        ceilings=asdict(get_device(explained.gpu).ceilings()),
        predicted_ms=explained.predicted_ms,
        compiled=explained.compiled,
        device_kernels=tuple(entry.kernel for entry in profile.launches),
        metrics=metrics,
    )
