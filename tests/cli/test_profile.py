"""`rooflab profile`: the command of Nsight Compute, the reading of its output, and the message if nothing is found."""

from __future__ import annotations

import json
import stat
import sys
from dataclasses import asdict, replace

import pytest
import torch

from rooflab.bench.compile.cases import KernelCase
from rooflab.bench.core import record_files
from rooflab.bench.core.environment import Environment
from rooflab.bench.predict import launch_once as _launch_once
from rooflab.bench.predict import ncu
from rooflab.bench.predict.explain import Explanation
from rooflab.bench.predict.model import LAUNCH
from rooflab.bench.report.sources import Located, Source, choose
from rooflab.kernels import registry
from rooflab.reference.spec import Case, get_scheme

CASE = Case(T=16, H=4096, eps=1e-5)
TARGET = KernelCase("rmsnorm", "library", CASE, get_scheme("bf16"))
COMMAND = ("profile", "rmsnorm", "library", "--case", CASE.id, "--gpu", "h100")
STALL = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
PREFIX = (
    "ID,Process ID,Process Name,Host Name,Kernel Name,Context,Stream,Block Size,Grid Size,Device,CC,Section Name"
).split(",")
PIPES = [ncu.PIPE_METRICS["tensor"], ncu.PIPE_METRICS["fma"], ncu.PIPE_METRICS["hbm"], ncu.PIPE_METRICS["occupancy"]]
STALLS = [STALL.format(reason) for reason in ("long_scoreboard", "wait", "selected")]
COLUMNS = {ncu.READ_METRIC: "byte", ncu.WRITE: "byte", ncu.DURATION: "ns"}
COLUMNS |= dict.fromkeys(PIPES, "%") | dict.fromkeys(STALLS, "inst")
DENIED = (
    "==PROF== Connected to process 42 (/usr/bin/python3.12)\n"
    "==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access NVIDIA GPU Performance Counters on the "
    "target device 0. For instructions on enabling permissions and to get more information see "
    "https://developer.nvidia.com/ERR_NVGPUCTRPERM\n"
)


HEAD = """\
#!/bin/sh
'''exec' '{python}' "$0" "$@"
' '''
import json, os, sys, time
arguments = sys.argv[1:]
open({calls!r}, 'a').write(json.dumps([arguments, dict(os.environ)]) + '\\n')
"""
"""A shell starts Python, because no path with a space can stand behind `#!`."""


@pytest.fixture
def tool(monkeypatch, tmp_path):
    """Puts programs on a PATH that holds nothing else: Python that sees `arguments`; returns the file of its calls."""
    programs, calls = tmp_path / "bin", tmp_path / "calls.jsonl"
    programs.mkdir()
    monkeypatch.setenv("PATH", str(programs))

    def install(name, body):
        path = programs / name
        path.write_text(HEAD.format(python=sys.executable, calls=str(calls)) + body + "\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        return calls

    return install


def table(*launches, columns=COLUMNS) -> str:
    """What `ncu --csv --page raw` prints: names, units, and a line for each (kernel, values)."""
    lines = [[*PREFIX, *columns], [""] * len(PREFIX) + list(columns.values())]
    for number, (kernel, values) in enumerate(launches):
        fixed = [str(number), "42", "python3.12", "127.0.0.1", kernel, "1", "7", "(512, 1, 1)", "(16, 1, 1)", "0"]
        fixed += ["9.0", ""]
        lines.append(fixed + list(values))
    quoted = (",".join(f'"{cell}"' for cell in line) for line in lines)
    return "==PROF== Connected to process 42 (/usr/bin/python3.12)\n" + "\n".join(quoted) + "\n"


ONE = ("_rmsnorm(bf16*, bf16*)", ["139,264", "131,072", "2,848", "0", "12.5", "61.25", "24.1", "7.5", "1.25", "1"])
TWO = ("reduce_kernel<512, 1>(at::R)", ["1000", "24", "1152", "0", "3", "9", "n/a", "nan", "0.5", "1"])


def logging_ncu(text: str, printed: str = _launch_once.CALL_MARK, status: int = 0) -> str:
    """A program that writes `text` to its --log-file, prints, and ends with `status`."""
    return (
        f"open(arguments[arguments.index('--log-file') + 1], 'w').write({text!r})\n"
        f"print({printed!r})\nsys.exit({status})"
    )


def taken(*launches, columns=COLUMNS) -> ncu.Profile:
    """What is read of such a table."""
    return ncu.Profile(tuple(ncu.parse(table(*launches, columns=columns))))


def test_the_raw_table_is_read_in_bytes_and_seconds():
    found = taken(ONE, TWO)
    first, second = found.launches
    assert first.kernel == "_rmsnorm(bf16*, bf16*)" and (first.grid, first.block) == ("(16, 1, 1)", "(512, 1, 1)")
    assert first.values[ncu.READ_METRIC] == 139264 and first.values[ncu.DURATION] == pytest.approx(2.848e-6)
    assert first.pipes == {"tensor": 0, "fma": 12.5, "hbm": 61.25, "occupancy": 24.1}
    assert first.stalls == {"long_scoreboard": 7.5, "wait": 1.25}  # the commonest first, the issued left out
    assert "occupancy" not in second.pipes and list(second.stalls) == ["wait"]
    assert (found.traffic.read_bytes, found.traffic.write_bytes, found.traffic.launches) == (140264, 131096, 2)
    assert found.traffic.basis == "counted" and found.total(ncu.DURATION) == pytest.approx(4.0e-6)
    assert found.total(ncu.PIPE_METRICS["occupancy"]) is None


def test_larger_units_and_the_newer_names_are_understood_and_what_was_not_counted_is_no_zero():
    columns = {ncu.NEW_NAMES[ncu.READ_METRIC]: "Mbyte", ncu.NEW_NAMES[ncu.WRITE]: "Kbyte", ncu.DURATION: "usecond"}
    found = taken(("k", ["1.5", "2", "3.25"]), columns=columns)
    assert found.traffic.bytes == 1.502e6 and found.total(ncu.DURATION) == pytest.approx(3.25e-6)
    uncounted = taken(("k", ["n/a", "5", "100"]), columns=columns)
    assert uncounted.traffic is None and uncounted.total(ncu.DURATION) == pytest.approx(1e-4)


def test_profile_joins_the_counters_and_the_prediction(rooflab, tool, tmp_path):
    calls = tool("ncu", logging_ncu(table(ONE)))
    status, out, _ = rooflab(*COMMAND, "--out", tmp_path / "records", "--json")
    found = json.loads(out)
    assert status == 0 and found["traffic_basis"] == "counted" and found["bytes"] == 139264 + 131072
    assert found["measured_ms"] is None, "ncu's duration is no time by the protocol"
    compared = {row["what"]: row for row in found["compared"]}
    duration, counted = compared["ncu's duration, us"], compared["HBM bytes, MB"]
    launch = next(part["ms"] for part in found["parts"] if part["part"] == LAUNCH)
    assert duration["counted"] == pytest.approx(2.848)
    assert duration["modelled"] == pytest.approx((sum(part["ms"] for part in found["parts"]) - launch) * 1e3, rel=0.1)
    assert counted["counted"] == pytest.approx(0.270336) and counted["ratio"] == pytest.approx(1, abs=0.1)
    [record] = record_files.read(tmp_path / "records")
    assert (record.traffic_basis, record.traffic_bytes, record.latency_median_ms) == ("counted", 270336, None)
    assert record.metrics["ncu_duration_ms"] == pytest.approx(2.848e-3) and record.metrics["fma_percent"] == 12.5
    assert record.metrics["stall_long_scoreboard_warps_per_issue"] == 7.5
    assert record.predicted_ms is found["predicted_ms"] is None, "the library's code was not read"
    assert record.device_kernels == ("_rmsnorm(bf16*, bf16*)",) and "no time by the protocol" in record.reason
    arguments, environment = json.loads(calls.read_text().splitlines()[0])
    assert "TRITON_INTERPRET" not in environment and environment["LC_ALL"] == "C" and '"library"' in arguments[-1]


NO_KERNELS = "==WARNING== No kernels were profiled."
KNOWS_NONE = (
    "metrics = arguments[arguments.index('--metrics') + 1].split(',')\n"
    "for name in metrics[: len(metrics) // 2 + 1]: print('==ERROR== Failed to find metric', name)\n"
    "sys.exit(1)"
)


@pytest.mark.parametrize(
    "body, message",
    [
        (logging_ncu(DENIED, printed="", status=1), "ERR_NVGPUCTRPERM); run as root"),
        (logging_ncu(DENIED), "ERR_NVGPUCTRPERM); run as root"),  # the call went on without counters
        (logging_ncu(NO_KERNELS), f"expected counters of at least one launch, got none: {NO_KERNELS}"),
        (
            logging_ncu("", printed="rooflab: gemm/x: UNSUPPORTED", status=2),
            "did not end: rooflab: gemm/x: UNSUPPORTED",
        ),
        ("time.sleep(30)", "expected an end within 1 s, got none; a smaller --case is counted faster"),
        (KNOWS_NONE, f"expected to know one of {len(ncu.METRICS)} metrics"),
    ],
)
def test_a_run_that_counts_nothing_says_what_to_do(rooflab, tool, body, message):
    tool("ncu", body)
    status, _, err = rooflab(*COMMAND, "--timeout", "1" if "sleep" in body else "60")
    assert status == 2 and "Traceback" not in err
    (line,) = (line for line in err.splitlines() if line.startswith("rooflab: ncu: "))
    assert message in line


def test_a_missing_tool_is_one_sentence_and_the_newest_off_the_path_is_found(rooflab, tool, monkeypatch, tmp_path):
    tool("ncu", "")
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.setattr(ncu, "TOOL_FOLDERS", (str(tmp_path / "20*"),))
    status, _, err = rooflab(*COMMAND)
    assert status == 2 and "ncu: expected Nsight Compute on the PATH or in /usr/local/cuda, found none; i" in err
    for version in ("2024.1", "2025.2"):
        (tmp_path / version).mkdir()
        (tmp_path / version / "ncu").hardlink_to(tmp_path / "bin" / "ncu")
    assert ncu.find_tool("ncu") == str(tmp_path / "2025.2" / "ncu") and ncu.find_tool("nsys") is None


IN_L2 = (ONE[0], ["139,264", "24", *ONE[1][2:]])
"""16 rows of 4096 in bf16 are 131,072 bytes, of which hardly any reaches HBM before the kernel ends."""


@pytest.mark.parametrize(
    ("body", "bytes_", "note"),
    [
        (logging_ncu(table(ONE, TWO)), 271360, "counted apart"),
        (logging_ncu(table(IN_L2)), 139264 + 131072, "writes still in L2: 2.4e-05 of 0.131 MB were counted"),
    ],
    ids=["two launches", "in L2"],
)
def test_bytes_that_were_not_counted_as_one_or_not_at_all_say_so(rooflab, tool, tmp_path, body, bytes_, note):
    tool("ncu", body)
    status, out, _ = rooflab(*COMMAND, "--json", "--out", tmp_path / "records")
    found = json.loads(out)
    assert status == 0 and (found["bytes"], found["traffic_basis"]) == (bytes_, "counted") and note in found["note"]
    [record] = record_files.read(tmp_path / "records")
    assert record.traffic_bytes == bytes_ and note in record.reason


def joined(own, profile):
    """Whether a report takes the profile's bytes for those of the timed kernel."""
    located = [Located(one, Source("made.jsonl", 1, line, one.run_id)) for line, one in enumerate((own, profile), 1)]
    (found,) = choose(located)
    return found.counted is not None and found.record.traffic_bytes == profile.traffic_bytes


@pytest.mark.parametrize("commit", [None, "0123abc"])
def test_a_profile_is_joined_to_the_tunable_kernel_that_was_timed(monkeypatch, commit):
    """In a bare checkout too, where the tree's hash names the code."""
    monkeypatch.setattr(Environment, "tree", lambda: "this tree")
    here = replace(Environment.now(), commit=commit, dirty=None if commit is None else False)
    monkeypatch.setattr(ncu.Environment, "now", lambda: here)
    target, kernel = TARGET._replace(kernel="fused"), registry.get_kernel("rmsnorm", "fused")
    config = kernel.config_for(target.case, target.scheme, torch.device("meta"))
    explained = Explanation(target, "optimized", "h100-sxm", 1.0, 1.0, 1.0, 1, "counted")
    profile = ncu.counted_record(explained, taken(ONE), 0)
    assert profile.config == asdict(config) and profile.environment.get("tree") == (None if commit else "this tree")
    own = replace(
        profile,
        run_id="timed",
        config=asdict(config),
        reason="",
        basis="measured",
        latency_median_ms=0.01,
        checked_by="gpu",
        traffic_basis="modelled",
        traffic_bytes=1.0,
    )
    assert joined(own, profile)
    other = next(one for one in kernel.tuning.configs(target.case) if one != config)
    named = "kernel_file_sha256" if commit else "tree"
    for change in ({"config": asdict(other)}, {"dirty": True}, {"environment": {**own.environment, named: "another"}}):
        assert not joined(replace(own, **change), profile), change
