"""`rooflab profile` with Nsight Compute: the command, its output read, and every way in which it says nothing."""

from __future__ import annotations

import json
import re
import shlex
import sys
from pathlib import Path

import pytest
import torch
from fake_tools import command_line, fake_tools

from rooflab.bench.predict import launch_once as _launch_once
from rooflab.bench.predict import ncu
from rooflab.bench.predict.cases import Target
from rooflab.bench.predict.model import LAUNCH
from rooflab.bench.records import files as record_files
from rooflab.kernels import registry
from rooflab.reference.spec import Case, get_scheme

CASE = Case(T=16, H=4096, eps=1e-5)
TARGET = Target("rmsnorm", "library", CASE, get_scheme("bf16"))
COMMAND = ("profile", "rmsnorm", "library", "--case", CASE.id, "--gpu", "h100")
STALL = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
LEADING = (
    "ID",
    "Process ID",
    "Process Name",
    "Host Name",
    "Kernel Name",
    "Context",
    "Stream",
    "Block Size",
    "Grid Size",
)
PREFIX = [*LEADING, "Device", "CC", "Section Name"]
PIPES = [ncu.PIPES["tensor"], ncu.PIPES["fma"], ncu.PIPES["hbm"], ncu.PIPES["occupancy"]]
NAMES = [
    ncu.READ,
    ncu.WRITE,
    ncu.DURATION,
    *PIPES,
    STALL.format("long_scoreboard"),
    STALL.format("wait"),
    STALL.format("selected"),
]
UNITS = ["byte", "byte", "ns", "%", "%", "%", "%", "inst", "inst", "inst"]
DENIED = (
    "==PROF== Connected to process 42 (/usr/bin/python3.12)\n"
    "==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access NVIDIA GPU Performance Counters on the "
    "target device 0. For instructions on enabling permissions and to get more information see "
    "https://developer.nvidia.com/ERR_NVGPUCTRPERM\n"
)


def table(*launches, names=NAMES, units=UNITS) -> str:
    """What `ncu --csv --page raw` prints: names, units, and a line for each (kernel, values)."""
    lines = [[*PREFIX, *names], [""] * len(PREFIX) + list(units)]
    for number, (kernel, values) in enumerate(launches):
        fixed = [
            str(number),
            "42",
            "python3.12",
            "127.0.0.1",
            kernel,
            "1",
            "7",
            "(512, 1, 1)",
            "(16, 1, 1)",
            "0",
            "9.0",
            "",
        ]
        lines.append(fixed + list(values))
    quoted = (",".join(f'"{cell}"' for cell in line) for line in lines)
    return "==PROF== Connected to process 42 (/usr/bin/python3.12)\n" + "\n".join(quoted) + "\n"


ONE = ("_rmsnorm(bf16*, bf16*)", ["139,264", "131,072", "2,848", "0", "12.5", "61.25", "24.1", "7.5", "1.25", "1"])
TWO = ("reduce_kernel<512, 1>(at::R)", ["1000", "24", "1152", "0", "3", "9", "n/a", "nan", "0.5", "1"])


@pytest.fixture
def rooflab(monkeypatch, capfd, tmp_path):
    """Runs a command in an empty folder and gives its exit status, output and errors."""
    return command_line(monkeypatch, capfd, tmp_path)


@pytest.fixture
def tool(monkeypatch, tmp_path):
    """Puts a program of a name on the PATH, which then holds nothing else."""
    return fake_tools(monkeypatch, tmp_path)


def logging_ncu(text: str, printed: str = _launch_once.MARK, status: int = 0) -> str:
    """A program that writes `text` to its --log-file, prints, and ends with `status`."""
    return (
        f"open(arguments[arguments.index('--log-file') + 1], 'w').write({text!r})\n"
        f"print({printed!r})\nsys.exit({status})"
    )


def test_the_raw_table_is_read_in_bytes_and_seconds():
    first, second = ncu.parse(table(ONE, TWO))
    assert first.kernel == "_rmsnorm(bf16*, bf16*)" and (first.grid, first.block) == ("(16, 1, 1)", "(512, 1, 1)")
    assert first.values[ncu.READ] == 139264 and first.values[ncu.DURATION] == pytest.approx(2.848e-6)
    assert first.pipes == {"tensor": 0, "fma": 12.5, "hbm": 61.25, "occupancy": 24.1}
    assert first.stalls == {"long_scoreboard": 7.5, "wait": 1.25}  # the commonest first, the issued left out
    assert second.kernel == "reduce_kernel<512, 1>(at::R)" and "occupancy" not in second.pipes
    assert list(second.stalls) == ["wait"]
    taken = ncu.Profile((first, second))
    assert taken.traffic.read_bytes == 140264 and taken.traffic.write_bytes == 131096 and taken.traffic.launches == 2
    assert taken.traffic.basis == "counted" and taken.duration_s == pytest.approx(4.0e-6)
    assert taken.total(ncu.PIPES["occupancy"]) is None


def test_larger_units_and_the_newer_names_are_understood():
    names = [ncu.RENAMED[ncu.READ], ncu.RENAMED[ncu.WRITE], ncu.DURATION]
    text = table(("k", ["1.5", "2", "3.25"]), names=names, units=["Mbyte", "Kbyte", "usecond"])
    assert ncu.Profile(tuple(ncu.parse(text))).traffic.bytes == 1.502e6
    assert ncu.parse(text)[0].values[ncu.DURATION] == pytest.approx(3.25e-6)


def test_counters_that_were_not_collected_are_no_zero():
    taken = ncu.Profile(tuple(ncu.parse(table(("k", ["n/a", "5", "100"]), names=NAMES[:3], units=UNITS[:3]))))
    assert taken.traffic is None and taken.duration_s == pytest.approx(1e-7)


def test_lines_of_tool_and_program_around_the_table_are_left_out():
    text = "hello\n" + table(ONE) + "==PROF== Disconnected from process 42\n"
    assert len(ncu.parse(text)) == 1 and ncu.parse("==WARNING== No kernels were profiled.\n") == []
    with pytest.raises(ValueError, match="ncu: expected 22 columns in each line of its table, got 21"):
        ncu.parse(table(("k", ONE[1][:-1])))


def test_the_command_profiles_the_one_call_only():
    line = ncu.command(TARGET, 7, ncu.METRICS, Path("log.csv"))
    options = dict(zip(line[1::2], line[2::2], strict=False))
    assert line[0] == "ncu" and options["--profile-from-start"] == "off" and options["--cache-control"] == "all"
    assert line.index("--csv") < line.index(sys.executable) and "raw" in line and "base" in line
    assert "dram__bytes_read.sum,dram__bytes_write.sum,gpu__time_duration.sum" in line[line.index("--metrics") + 1]
    rest = line[line.index(sys.executable) + 1 :]
    assert rest[:4] == ["-m", "rooflab.bench.predict.launch_once", "rmsnorm", "library"]
    assert rest[4:] == ["--case", CASE.id, "--scheme", "bf16", "--seed", "7", "--warm-up", "3"]


def test_profile_joins_the_counters_and_the_prediction(rooflab, tool, tmp_path):
    calls = tool("ncu", logging_ncu(table(ONE)))
    status, out, _ = rooflab(*COMMAND, "--out", tmp_path / "records", "--json")
    found = json.loads(out)
    assert status == 0 and found["traffic_basis"] == "counted" and found["bytes"] == 139264 + 131072
    assert found["measured_ms"] is None, "ncu's duration is no time by the protocol"
    launch = next(part["ms"] for part in found["parts"] if part["part"] == LAUNCH)
    duration = {row["what"]: row for row in found["compared"]}["ncu's duration, us"]
    assert duration["counted"] == pytest.approx(2.848)
    assert duration["modelled"] == pytest.approx((found["predicted_ms"] - launch) * 1e3, rel=0.1)
    counted = {row["what"]: row for row in found["compared"]}["HBM bytes, MB"]
    assert counted["counted"] == pytest.approx(0.270336) and counted["ratio"] == pytest.approx(1, abs=0.1)
    assert found["counted"][0]["stalls"].startswith("long_scoreboard 7.50, wait 1.25")
    assert found["counted"][0]["busiest_pipe"] == "fma 12%"
    [record] = record_files.read(tmp_path / "records")
    assert (record.traffic_basis, record.traffic_bytes, record.latency_median_ms) == ("counted", 270336, None)
    assert record.metrics["ncu_duration_ms"] == pytest.approx(2.848e-3) and record.metrics["fma_percent"] == 12.5
    assert (
        record.metrics["stall_long_scoreboard_warps_per_issue"] == 7.5 and record.predicted_ms == found["predicted_ms"]
    )
    assert record.device_kernels == ("_rmsnorm(bf16*, bf16*)",) and "no time by the protocol" in record.reason
    arguments, environment = json.loads(calls.read_text().splitlines()[0])
    assert "TRITON_INTERPRET" not in environment and environment["LC_ALL"] == "C" and "library" in arguments
    status, out, _ = rooflab(*COMMAND)
    assert status == 0 and "modelled and counted" in out and "long_scoreboard 7.50" in out and "measured" not in out


def test_metrics_that_this_ncu_does_not_know_are_renamed_or_left_out(tool):
    body = (
        "metrics = arguments[arguments.index('--metrics') + 1].split(',')\n"
        "log = open(arguments[arguments.index('--log-file') + 1], 'w')\n"
        "gone = [m for m in metrics if m == 'dram__bytes_read.sum' or 'gmma' in m]\n"
        "for m in gone: log.write(f'==ERROR== Failed to find metric regex:^{m.split(\".\")[0]}\\n')\n"
        "if gone: sys.exit(1)\n"
        f"log.write({table(ONE)!r}.replace('dram__bytes_read.sum', 'dram__bytes_op_read.sum'))\n"
        f"print({_launch_once.MARK!r})"
    )
    calls = tool("ncu", body)
    assert ncu.profile(TARGET).traffic.read_bytes == 139264
    asked = [json.loads(line)[0] for line in calls.read_text().splitlines()]
    second = asked[1][asked[1].index("--metrics") + 1].split(",")
    assert len(asked) == 2 and "dram__bytes_op_read.sum" in second and not any("gmma" in name for name in second)


DENIAL = r"ncu: this user may not read the GPU's counters \(ERR_NVGPUCTRPERM\); run as root"
NO_KERNELS = "==WARNING== No kernels were profiled."
REFUSED = "rooflab: gemm/x: UNSUPPORTED: needs sm90, found sm80"
KNOWS_NONE = (
    "first = arguments[arguments.index('--metrics') + 1].split(',')[0]\n"
    "print('==ERROR== Failed to find metric', first); sys.exit(1)"
)


@pytest.mark.parametrize(
    "body, message",
    [
        (logging_ncu(DENIED, printed="", status=1), DENIAL),
        (logging_ncu(DENIED), DENIAL),  # the call went on without counters
        (logging_ncu(NO_KERNELS), f"ncu: expected counters of at least one launch, got none: {NO_KERNELS}"),
        (logging_ncu("", printed=REFUSED, status=2), f"did not end: {REFUSED}"),
        (logging_ncu(table(ONE), printed="CUDA error: an illegal access", status=1), "watched did not end: CUDA error"),
        ("time.sleep(30)", "ncu: expected an end within 1 s, got none; a smaller --case is counted faster"),
        (KNOWS_NONE, f"expected to know one of {len(ncu.METRICS)} metrics"),
    ],
)
def test_a_run_that_counts_nothing_says_what_to_do(rooflab, tool, body, message):
    tool("ncu", body)
    status, out, err = rooflab(*COMMAND, "--timeout", "1" if "sleep" in body else "60")
    assert status == 2 and re.search(message, err) and "Traceback" not in err
    assert len([line for line in err.splitlines() if line.startswith("rooflab: ncu: ")]) == 1


def test_a_missing_tool_is_one_sentence(rooflab, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.setattr(ncu, "FOLDERS", ())
    status, _, err = rooflab(*COMMAND)
    assert status == 2 and "ncu: expected Nsight Compute on the PATH or in /usr/local/cuda, found none; install" in err


def test_a_tool_off_the_path_is_found_the_newest_first(tool, monkeypatch, tmp_path):
    tool("ncu", "")
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CUDA_HOME", raising=False)
    for version in ("2024.1", "2025.2"):
        (tmp_path / version).mkdir()
        (tmp_path / version / "ncu").hardlink_to(tmp_path / "bin" / "ncu")
    monkeypatch.setattr(ncu, "FOLDERS", (str(tmp_path / "none"), str(tmp_path / "20*")))
    assert ncu.find_tool("ncu") == str(tmp_path / "2025.2" / "ncu")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert ncu.find_tool("ncu") == str(tmp_path / "bin" / "ncu")
    assert ncu.find_tool("nsys") is None


def test_the_command_is_printed_and_a_log_from_elsewhere_is_read(rooflab, tmp_path):
    status, out, _ = rooflab(*COMMAND, "--command")
    assert status == 0 and shlex.split(out)[0] == "ncu" and "rooflab.bench.predict.launch_once" in out
    (tmp_path / "ncu.csv").write_text(table(ONE))
    status, out, _ = rooflab(*COMMAND, "--log", "ncu.csv", "--json")
    assert status == 0 and json.loads(out)["traffic_basis"] == "counted"
    (tmp_path / "empty.csv").write_text("nothing")
    status, _, err = rooflab(*COMMAND, "--log", "empty.csv")
    assert status == 2 and "log: expected what `ncu --csv --page raw` printed, got empty.csv without its table" in err


class Called:
    """A kernel's stand-in that notes when it was called."""

    def __init__(self, seen):
        self.seen = seen

    def __call__(self):
        self.seen.append("call")


def test_only_the_last_call_is_watched(monkeypatch, capsys):
    seen = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: seen.append("wait"))
    monkeypatch.setattr(torch.cuda.profiler, "start", lambda: seen.append("start"))
    monkeypatch.setattr(torch.cuda.profiler, "stop", lambda: seen.append("stop"))
    monkeypatch.setattr(_launch_once, "prepare", lambda *arguments: Called(seen))
    line = _launch_once.arguments("rmsnorm", "library", CASE, "bf16", 0, 2, None)
    _launch_once.main(line[2:])
    assert seen == ["call", "call", "wait", "start", "call", "wait", "stop"]
    assert capsys.readouterr().out.strip() == _launch_once.MARK


def test_the_launcher_runs_a_kernel_and_refuses_one_that_cannot_run(capsys, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "from rooflab.kernels.registry import register\n"
        '@register(op="rmsnorm", name="test_counts", role="optimized", backend="torch")\n'
        "def mine(x, weight, eps=1e-6):\n    print('ran', tuple(x.shape), x.dtype)\n    return x\n"
    )
    try:
        line = _launch_once.arguments("rmsnorm", "test_counts", CASE, "fp32", 0, 2, file)
        _launch_once.main(line[2:], device="cpu")
    finally:
        registry._kernels["rmsnorm"].pop("test_counts", None)
    assert capsys.readouterr().out.splitlines() == ["ran (16, 4096) torch.float32"] * 3 + [_launch_once.MARK]
    cpu_only = _launch_once.arguments("gemm", "packed", registry.get_op("gemm").cases["smoke"][0], "fp32", 0, 0, None)
    with pytest.raises(ValueError, match="UNSUPPORTED: runs on cpu, found meta"):
        _launch_once.main(cpu_only[2:], device="meta")


@pytest.mark.gpu
def test_on_a_gpu_the_launcher_reaches_its_mark(capsys):
    line = _launch_once.arguments("rmsnorm", "fused", CASE, "bf16", 0, 1, None)
    _launch_once.main(line[2:])
    assert _launch_once.MARK in capsys.readouterr().out
