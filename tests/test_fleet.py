"""A sweep over a local Ray cluster of CPU workers, one of which is killed mid-run."""

import contextlib
import json
import os
import signal
import tempfile
import threading
import time
from pathlib import Path

import pytest
import ray
from commands_in_process import run_command
from needs import skip_without

from rooflab.bench.suite import sweep as module
from rooflab.bench.suite.sweep import FILE, Shard, Sweep, SweepWorker, sweep

SHARDS = [Shard("environment", 120.0, dry_run=True), Shard("flush", 120.0, dry_run=True)]


@pytest.fixture
def cluster():
    skip_without("shared memory")
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.mark.slow  # a minute
def test_a_killed_worker_costs_no_shard(cluster, tmp_path):
    """It is killed once it has written something; another one goes on."""
    said, killed = [], []

    def kill():
        ends = time.monotonic() + 120
        while time.monotonic() < ends and not killed:
            state = json.loads((tmp_path / FILE).read_text()) if (tmp_path / FILE).is_file() else {"id": "none"}
            if any(Path(tempfile.gettempdir()).glob(f"rooflab-sweep-{state['id']}-*/plan.json")):
                killed.append(state["workers"][0]["pid"])
                os.kill(killed[0], signal.SIGKILL)
            time.sleep(0.02)

    killer = threading.Thread(target=kill, daemon=True)
    killer.start()
    state = sweep(None, SHARDS[:1], tmp_path, 1, False, said.append)
    killer.join(10)
    assert len(killed) == 1 and state.complete, state.shards
    ((name, found),) = state.shards.items()
    key = state.workers[0]["machine_key"]
    assert name == f"{key}/environment" and said[-1] == f"{name}: DONE"
    assert found["worker_pid"] != killed[0], "begun again in another process"
    assert not list(Path(tempfile.gettempdir()).glob(f"rooflab-sweep-{state.id}-*"))
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == [key], "records lie by machine key"
    assert json.loads((tmp_path / name / "environment.json").read_text())["machine_key"] == key
    assert not list(tmp_path.rglob("*.part"))
    with pytest.raises(ValueError, match="holds a sweep; add --resume"):
        sweep(None, SHARDS, tmp_path, 1, False, lambda text: None)


def test_a_worker_with_other_sources_or_that_does_not_start_is_refused(monkeypatch, tmp_path):
    here = module.tree_hash(module.ROOT)
    answers = [{"machine_key": "m", "device": "d", "tree": tree} for tree in (here, "another")]
    answers.append(ray.exceptions.RayError("no memory\nadvice"))
    asked, killed = iter(answers), []

    class Actor:
        options = property(lambda self: lambda **resources: self)
        identify = property(lambda self: self)

        def remote(self):
            return self

    def get(actor, timeout):
        answer = next(asked)
        if isinstance(answer, Exception):
            raise answer
        return answer

    actors = [Actor() for _ in answers]
    made = iter(actors)
    monkeypatch.setattr(module.ray, "remote", lambda worker: next(made))
    monkeypatch.setattr(module.ray, "get", get)
    monkeypatch.setattr(module.ray, "kill", killed.append)
    state, said = Sweep(), []
    assert module._start(3, True, state, said.append) == [(actors[0], "m")] and killed == actors[1:]
    assert state.workers == answers[:1] and said == ["worker on d (m)", *state.refused]
    assert "m has other source files (another, here" in said[1] and said[2] == "a worker did not start: no memory"
    monkeypatch.setattr(module, "_start", lambda *args: [])
    monkeypatch.setattr(module, "_cluster", lambda address: contextlib.nullcontext())
    with pytest.raises(ValueError, match="ray: no worker can be used"):
        sweep(None, SHARDS, tmp_path, 1, False, lambda text: None)


def test_a_shard_that_cannot_run_says_why():
    key = SweepWorker().identify()["machine_key"]
    for budget_s, where, why in ((-1.0, key, "budget: expected seconds above 0"), (1.0, "m", "expected a machine m")):
        assert why in SweepWorker().run(Shard("rope", budget_s, dry_run=True), where, {}, "rooflab-sweep-test")["error"]


def test_a_damaged_state_is_refused(tmp_path):
    (tmp_path / FILE).write_text("{")
    with pytest.raises(ValueError, match="expected the state of a sweep"):
        sweep(None, SHARDS, tmp_path, 1, True, lambda text: None)


def test_a_shard_is_done_where_its_entries_are():
    for end, status, reason in [
        ({"entries": {"a": "DONE", "b": "UNSUPPORTED"}, "stopped": ""}, "DONE", ""),
        ({"entries": {"a": "FAILED", "b": "BLOCKED"}}, "FAILED", "FAILED: a; BLOCKED: b"),
        ({"entries": {"a": "DONE", "b": "BLOCKED"}}, "FAILED", "BLOCKED: b"),
        ({"entries": {"a": "DONE", "b": "NOT_REACHED", "c": "PARTIAL"}}, "PARTIAL", "NOT_REACHED: b; PARTIAL: c"),
        ({"entries": {"a": "DONE"}, "stopped": "the device is gone"}, "FAILED", "the device is gone"),
        ({"error": "ValueError: no"}, "FAILED", "ValueError: no"),
    ]:
        assert module._verdict(end) == (status, reason)


def test_a_sweep_ends_with_what_it_found(tmp_path, monkeypatch):
    for found, code in [
        ({"status": "DONE", "excluded": {}}, 0),
        ({"status": "PARTIAL"}, 11),
        ({"status": "DONE", "excluded": {"rope/fused": "INCORRECT"}}, 11),
    ]:
        monkeypatch.setattr(module, "sweep", lambda *args, f=found: Sweep(shards={"m/rope": {"reason": "", **f}}))
        status, shown, _ = run_command(("sweep", "--only", "rope", "--out", str(tmp_path), "--dry-run", "--json"))
        assert status == code
        assert shown["excluded"] == {f"m: {kernel}": why for kernel, why in found.get("excluded", {}).items()}


def test_workers_of_each_kind_do_all_shards_and_a_lost_one_costs_its_shard_alone(tmp_path, monkeypatch):
    """Two kinds of machine; a shard that ends its worker each time is LOST, and the others are done."""

    class Actor:
        run = property(lambda self: self)

        def remote(self, shard, key, files, place):
            return shard.name, key, place

    def get(answer):
        if answer[0] == "flush":
            raise ray.exceptions.RayError("the worker died\nadvice")
        return {"entries": {"x": "DONE"}, "files": {"made.txt": answer[1].encode()}}

    killed = []
    monkeypatch.setattr(module.ray, "get", get)
    monkeypatch.setattr(module.ray, "wait", lambda running: (running[:1], running[1:]))
    monkeypatch.setattr(module.ray, "kill", killed.append)
    state = Sweep(shards={"m/environment": {"status": "DONE"}})
    actors = [Actor(), Actor(), Actor()]
    module._hand_out(SHARDS, list(zip(actors, "mmn", strict=True)), tmp_path, state, lambda text: None)
    assert {name: found["status"] for name, found in state.shards.items()} == {
        "m/environment": "DONE", "m/flush": "LOST", "n/environment": "DONE", "n/flush": "LOST",
    }  # fmt: skip
    assert state.shards["m/flush"]["reason"] == "the worker died" and killed == actors
    assert [path.read_text() for path in tmp_path.rglob("made.txt")] == ["n"], "what was done is not done again"
