"""What ncu's counters are taken for: the bytes of a call of several launches, writes that L2 still holds, a record."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from datetime import UTC, datetime

import pytest
import torch
from fake_tools import command_line, fake_tools
from test_profile import COMMAND, ONE, PREFIX, TARGET, TWO, logging_ncu, table

from rooflab.bench.predict import counted, ncu
from rooflab.bench.predict import launch_once as _launch_once
from rooflab.bench.predict.explain import Explanation
from rooflab.bench.records import source_tree
from rooflab.bench.records.environment import snapshot
from rooflab.bench.records.record import Record
from rooflab.bench.report.newest import choose
from rooflab.bench.report.sources import Located, Source
from rooflab.kernels import registry
from rooflab.kernels.configs import config_for, make_config

RANGE = table(("range", ["139,264", "131,072"]), names=[ncu.READ, ncu.WRITE], units=["byte", "byte"])
BY_MODE = f"text = {RANGE!r} if 'app-range' in arguments else {table(ONE, TWO)!r}\n"
WRITTEN = "open(arguments[arguments.index('--log-file') + 1], 'w').write(text)\n" + f"print({_launch_once.MARK!r})"
META = torch.device("meta")


@pytest.fixture
def rooflab(monkeypatch, capfd, tmp_path):
    """Runs a command in an empty folder and gives its exit status, output and errors."""
    return command_line(monkeypatch, capfd, tmp_path)


@pytest.fixture
def tool(monkeypatch, tmp_path):
    """Puts a program of a name on the PATH, which then holds nothing else."""
    return fake_tools(monkeypatch, tmp_path)


def test_a_call_of_several_launches_is_counted_as_one_range(tool):
    calls = tool("ncu", BY_MODE + WRITTEN)
    found = ncu.profile(TARGET)
    assert len(found.launches) == 2 and found.whole.kernel == "range" and not found.apart
    assert (found.traffic.read_bytes, found.traffic.write_bytes, found.traffic.launches) == (139264, 131072, 2)
    alone, whole = (json.loads(line)[0] for line in calls.read_text().splitlines())
    assert "--profile-from-start" in alone and "--profile-from-start" not in whole
    assert whole[whole.index("--replay-mode") + 1] == "app-range"
    assert whole[whole.index("--metrics") + 1].split(",") == list(ncu.BYTES)


def test_where_no_range_can_be_counted_the_bytes_say_so(rooflab, tool):
    refused = "if 'app-range' in arguments: sys.exit('==ERROR== Range replay is not supported')\n"
    tool("ncu", refused + BY_MODE + WRITTEN)
    status, out, _ = rooflab(*COMMAND, "--json")
    found = json.loads(out)
    assert status == 0 and found["bytes"] == 140264 + 131096
    assert found["note"] == "launches counted apart: what they hand on through L2 counts as read from HBM"
    _, out, _ = rooflab(*COMMAND)
    assert "launches counted apart" in out


def test_writes_that_l2_still_holds_are_the_costs(rooflab, tool, tmp_path):
    """16 rows of 4096 in bf16 are 131,072 bytes, of which hardly any reaches HBM before the kernel ends."""
    tool("ncu", logging_ncu(table((ONE[0], ["139,264", "24", *ONE[1][2:]]))))
    status, out, _ = rooflab(*COMMAND, "--json", "--out", tmp_path / "records")
    found = json.loads(out)
    assert status == 0 and found["bytes"] == 139264 + 131072 and found["traffic_basis"] == "counted"
    assert found["note"].startswith("writes still in L2: 2.4e-05 of 0.131 MB were counted")
    assert {row["what"]: row["counted"] for row in found["compared"]}["HBM bytes, MB"] == pytest.approx(0.270336)
    [line] = (tmp_path / "records").glob("*.jsonl")
    record = Record.from_json(line.read_text())
    assert record.traffic_bytes == 270336 and "writes still in L2" in record.reason


def test_the_issue_slots_are_no_pipe():
    names = [ncu.PIPES["fma"], ncu.PIPES["issue"]]
    launches = ncu.parse(table(("k", ["12.5", "88"]), names=names, units=["%", "%"]))
    (row,) = counted.launch_rows(ncu.Profile(tuple(launches)))
    assert row["busiest_pipe"] == "fma 12%" and row["issue_percent"] == 88 and len(PREFIX) == 12


def located(record, line):
    return Located(record, Source("made.jsonl", 1, line, record.run_id), datetime(2026, 1, line, tzinfo=UTC))


def joined(own, profile):
    """Whether a report takes the profile's bytes for those of the timed kernel."""
    (found,) = choose([located(own, 1), located(profile, 2)])
    return found.counted is not None and found.record.traffic_bytes == profile.traffic_bytes


@pytest.mark.parametrize("commit", [None, "0123abc"])
def test_a_profile_is_joined_to_the_tunable_kernel_that_was_timed(monkeypatch, commit):
    """In a bare checkout too, where the tree's hash names the code."""
    monkeypatch.setattr(source_tree, "_own_tree", lambda: "this tree")
    here = replace(snapshot(), commit=commit, dirty=None if commit is None else False)
    monkeypatch.setattr(counted, "snapshot", lambda: here)
    target = replace(TARGET, kernel="fused")
    kernel = registry.get_kernel("rmsnorm", "fused")
    config = config_for(kernel, target.case, target.scheme, META)
    explained = Explanation(target, "optimized", "h100-sxm", 1.0, 1.0, 1.0, 1, "counted")
    profile = counted.counted_record(explained, ncu.Profile(tuple(ncu.parse(table(ONE)))), 0)
    assert profile.config == asdict(config) and profile.environment.get("tree") == (None if commit else "this tree")
    own = replace(
        profile, run_id="timed", config=asdict(config), reason="", basis="measured", latency_median_ms=0.01,
        checked_by="gpu", traffic_basis="modelled", traffic_bytes=1.0,
    )  # fmt: skip
    assert joined(own, profile)
    other = make_config(kernel, asdict(next(one for one in kernel.configs(target.case) if one != config)))
    assert not joined(replace(own, config=asdict(other)), profile)
    assert not joined(replace(own, dirty=True), profile)
    assert not joined(replace(own, environment={**own.environment, "kernel_file_sha256": "another"}), profile)
    if commit is None:
        assert not joined(replace(own, environment={**own.environment, "tree": "another"}), profile)
        bare = {name: value for name, value in own.environment.items() if name != "tree"}
        assert not joined(replace(own, environment=bare), replace(profile, environment=bare)), "no name for the code"
