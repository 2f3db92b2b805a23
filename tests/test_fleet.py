"""A sweep over a local Ray cluster of CPU workers, one of which is killed mid-run."""

import json
import os
import signal
import threading
import time

import pytest

ray = pytest.importorskip("ray")

from commands_in_process import run_command  # noqa: E402

from rooflab.bench.records.files import read  # noqa: E402
from rooflab.bench.suite import sweep as module  # noqa: E402
from rooflab.bench.suite.sweep import FILE, HEARTBEAT_S, SILENT_S, Shard, Sweep, Worker, sweep  # noqa: E402  # noqa: E402

SHARDS = [Shard("check:rope", 120.0, dry_run=True), Shard("environment", 120.0, dry_run=True)]


@pytest.fixture(scope="module")
def cluster():
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def swept(cluster, tmp_path_factory):
    """A sweep of two shards on two workers; the first worker that has written records is killed."""
    out = tmp_path_factory.mktemp("sweep")
    said = []
    killed = []

    def kill_one():
        ends = time.monotonic() + 120
        while time.monotonic() < ends and not killed:
            state = json.loads((out / FILE).read_text()) if (out / FILE).is_file() else {"shards": {}}
            running = [found for name, found in state["shards"].items() if found["status"] == "RUNNING"]
            # Not before it has sent something: what it had done must be kept.
            if running and any(out.glob("*/*/progress.json")):
                killed.append(running[0]["worker_pid"])
                os.kill(killed[0], signal.SIGKILL)
            time.sleep(0.02)

    killer = threading.Thread(target=kill_one, daemon=True)
    killer.start()
    state = sweep(None, SHARDS, out, 2, False, said.append)
    killer.join(10)
    return out, state, said, killed


def test_a_killed_worker_costs_no_shard(swept):
    _, state, said, killed = swept
    assert len(killed) == 1
    assert state.complete, state.shards
    assert {name.split("/")[1] for name in state.shards} == {shard.name for shard in SHARDS}
    assert sum(found["attempts"] for found in state.shards.values()) == 3  # one was begun twice
    assert any(": LOST" in text for text in said)
    assert len(state.workers) == 3


def test_the_records_lie_by_machine_key_and_name_it(swept):
    out, state, _, _ = swept
    keys = {who["machine_key"] for who in state.workers}
    assert {path.name for path in out.iterdir() if path.is_dir()} == keys
    found = [record for path in out.rglob("*.jsonl") for record in read(path)]
    assert {record.op for record in found} == {"rope"}
    assert {record.environment["machine_key"] for record in found} == keys
    assert not list(out.rglob("*.part"))


def test_a_finished_sweep_is_resumed_without_doing_it_again(swept, cluster):
    out, state, _, _ = swept
    began = time.monotonic()
    again = sweep(None, SHARDS, out, 1, True, lambda text: None)
    assert again.complete and again.shards == state.shards
    assert time.monotonic() - began < 60
    with pytest.raises(ValueError, match="holds a sweep; add --resume"):
        sweep(None, SHARDS, out, 1, False, lambda text: None)


def test_a_worker_with_other_sources_is_refused(cluster, tmp_path, monkeypatch):
    monkeypatch.setattr("rooflab.bench.suite.sweep.tree_hash", lambda root: "another tree")
    with pytest.raises(ValueError, match="ray: no worker can be used: .* has other source files"):
        sweep(None, SHARDS, tmp_path, 1, False, lambda text: None)


def test_a_worker_is_heard_of_well_before_it_counts_as_lost():
    assert 10 * HEARTBEAT_S < SILENT_S


def test_a_shard_that_cannot_run_says_why(tmp_path):
    answers = list(Worker().run(Shard("rope", -1.0, dry_run=True), {}))
    assert "budget: expected seconds above 0" in answers[-1]["end"]["error"]


def test_a_damaged_state_is_refused(tmp_path):
    (tmp_path / FILE).write_text("{")
    with pytest.raises(ValueError, match="expected the state of a sweep"):
        sweep(None, SHARDS, tmp_path, 1, True, lambda text: None)


@pytest.mark.parametrize(
    ("end", "status", "reason"),
    [
        ({"entries": {"a": "DONE", "b": "UNSUPPORTED"}, "stopped": ""}, "DONE", ""),
        ({"entries": {"a": "FAILED", "b": "BLOCKED"}}, "FAILED", "FAILED: a; BLOCKED: b"),
        ({"entries": {"a": "DONE", "b": "BLOCKED"}}, "FAILED", "BLOCKED: b"),
        ({"entries": {"a": "DONE", "b": "NOT_REACHED", "c": "PARTIAL"}}, "PARTIAL", "NOT_REACHED: b; PARTIAL: c"),
        ({"entries": {"a": "DONE"}, "stopped": "the device is gone"}, "FAILED", "the device is gone"),
        ({"error": "ValueError: no"}, "FAILED", "ValueError: no"),
    ],
)
def test_a_shard_is_done_where_its_entries_are(end, status, reason):
    assert module._verdict(end) == (status, reason)


@pytest.mark.parametrize(
    ("shards", "code"),
    [
        ({"m/rope": {"status": "DONE", "excluded": {}}}, 0),
        ({"m/rope": {"status": "PARTIAL"}}, 11),
        ({"m/rope": {"status": "DONE", "excluded": {"rope/fused": "INCORRECT"}}}, 11),
    ],
)
def test_a_sweep_ends_with_what_it_found(tmp_path, monkeypatch, shards, code):
    rows = {name: {"attempts": 1, "reason": "", **found} for name, found in shards.items()}
    monkeypatch.setattr(module, "sweep", lambda *args: Sweep(rows))
    status, found, _ = run_command(("sweep", "--only", "rope", "--out", str(tmp_path), "--dry-run", "--json"))
    assert status == code and found["excluded"] == {
        f"m: {kernel}": why for one in rows.values() for kernel, why in one.get("excluded", {}).items()
    }


def driver(tmp_path, monkeypatch, names=("rope",)):
    """A driver with one kind of machine, whose actors are only killed."""
    killed = []
    monkeypatch.setattr(module.ray, "kill", killed.append)
    shards = [Shard(name, 1.0) for name in names]
    found = module._Driver(shards, tmp_path, Sweep(), True, lambda text: None)
    found.waiting["m"] = module.queue.SimpleQueue()
    found.unfinished["m"] = set(names)
    for shard in shards:
        found.waiting["m"].put(shard)
    return found, killed


def test_a_driver_that_cannot_write_ends_and_leaves_no_shard_behind(tmp_path, monkeypatch):
    """A thread that died with a shard in hand left the others waiting for it for ever."""
    found, killed = driver(tmp_path, monkeypatch)

    def full(actor, key, shard):
        raise OSError("No space left on device")

    monkeypatch.setattr(found, "_shard", full)
    with pytest.raises(OSError, match="No space left"):
        found._serve("actor", {"machine_key": "m", "pid": 1})
    assert found.state.shards["m/rope"]["status"] == "FAILED" and killed == ["actor"]
    assert found.state.shards["m/rope"]["reason"] == "No space left on device"
    found._serve("another", {"machine_key": "m", "pid": 2})  # ends


def test_a_lost_shard_is_given_to_another_even_where_no_state_can_be_written(tmp_path, monkeypatch):
    found, _ = driver(tmp_path, monkeypatch)
    shard = found.waiting["m"].get()
    found._begin("m", shard, 1)

    def full(*args):
        raise OSError("No space left on device")

    monkeypatch.setattr(module, "write_whole", full)
    with pytest.raises(OSError):
        found._give_back("m", shard, "it died")
    assert found.waiting["m"].get(timeout=1.0) == shard and found.unfinished["m"] == {"rope"}


def test_a_file_that_vanishes_between_two_looks_is_left_out(tmp_path, monkeypatch):
    for name in ("gone.json", "here.json"):
        (tmp_path / name).write_text(name)
    read_bytes = module.Path.read_bytes

    def vanishing(path):
        if path.name == "gone.json":
            raise FileNotFoundError(path)
        return read_bytes(path)

    monkeypatch.setattr(module.Path, "read_bytes", vanishing)
    assert module._changed(tmp_path, {}) == {"here.json": b"here.json"}
