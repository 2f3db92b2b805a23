"""A sweep over workers of a cluster: refused workers, lost workers, and the shards that run again."""

from types import SimpleNamespace

import pytest
import ray

from rooflab.bench.suite import sweep as module
from rooflab.bench.suite.entries import EntryOutcome
from rooflab.bench.suite.runner import SuiteSettings
from rooflab.bench.suite.state import Progress, write_summary
from rooflab.bench.suite.sweep import sweep

NAMES = ["environment", "flush"]


def settings(out, resume=False, budget_s=120.0):
    return SuiteSettings(out, budget_s, True, resume)


class Actor:
    """A worker: it says who it is, and answers with what `work` gives for a shard and a machine; an error is raised."""

    def __init__(self, who, work):
        self.identify = SimpleNamespace(remote=lambda: lambda: who)
        self.run = SimpleNamespace(remote=lambda shard, key, *files: lambda: work(shard.only[0], key))


@pytest.fixture
def actors(monkeypatch):
    """`actors(who, ...)` makes a cluster of such workers, which stands for Ray; it notes in `killed` whom it ended."""

    def get(ask, timeout=None):
        if isinstance(found := ask(), Exception):
            raise found
        return found

    def of(*told, work=lambda name, key: pytest.fail("no worker")):
        made = [Actor(who, work) for who in told]
        coming, killed = iter(made), []
        new = SimpleNamespace(options=lambda **resources: SimpleNamespace(remote=lambda: next(coming)))
        cluster = SimpleNamespace(
            is_initialized=lambda: True,
            remote=lambda worker: new,
            get=get,
            kill=killed.append,
            made=made,
            wait=lambda running: (running[:1], running[1:]),
            killed=killed,
            exceptions=ray.exceptions,
        )
        monkeypatch.setattr(module, "ray", cluster)
        return cluster

    return of


def who(key, tree=None):
    return {"machine_key": key, "device": "d", "tree": tree or module.Environment.tree(), "pid": 1}


def test_a_worker_with_other_sources_or_that_does_not_start_is_refused(actors, tmp_path):
    bad = [who("m", "another"), ray.exceptions.RayError("no memory\nadvice")]
    cluster, said = actors(who("m"), *bad), []
    state = sweep(None, [], settings(tmp_path), 3, said.append)
    assert state.workers == [who("m")] and said == ["worker on d (m, process 1)", *state.refused]
    assert cluster.killed == [*cluster.made[1:], cluster.made[0]], "the last at the end"
    assert "m has other source files (another, here" in said[1] and said[2] == "a worker did not start: no memory"
    actors(*bad)
    with pytest.raises(ValueError, match="ray: no worker can be used: m has other source files"):
        sweep(None, NAMES, settings(tmp_path), 2, said.append)


def ended(folder, stopped="", **entries):
    """A suite's folder as it leaves it."""
    progress = Progress({name: EntryOutcome(status) for name, status in entries.items()}, stopped)
    write_summary(folder, progress, {}, {})
    return folder


@pytest.mark.parametrize(
    ("entries", "stopped", "status", "reason"),
    [
        ({"a": "DONE", "b": "UNSUPPORTED"}, "", "DONE", ""),
        ({"a": "FAILED", "b": "BLOCKED"}, "", "FAILED", "FAILED: a; BLOCKED: b"),
        ({"a": "DONE", "b": "NOT_REACHED", "c": "PARTIAL"}, "", "PARTIAL", "NOT_REACHED: b; PARTIAL: c"),
        ({"a": "DONE"}, "the device is gone", "FAILED", "the device is gone"),
    ],
)
def test_a_shard_is_done_where_its_entries_are(tmp_path, actors, entries, stopped, status, reason):
    ended(tmp_path / "m" / "shard", stopped, **entries)
    with pytest.raises(ValueError, match="holds a sweep; add --resume"):
        sweep(None, NAMES, settings(tmp_path), 1, print)
    actors(who("m"))
    state = sweep(None, [], settings(tmp_path, resume=True), 1, print)
    assert state.shards["m/shard"] == {"status": status, "reason": reason, "excluded": {}}


def test_workers_of_each_kind_do_all_shards_and_a_lost_one_costs_its_shard_alone(tmp_path, actors):
    """Two kinds of machine; a shard that ends its worker each time is LOST, and the others are done."""
    out = tmp_path / "out"
    ended(out / "m" / "environment", x="DONE")

    def work(name, key):
        made = ended(tmp_path / "made", x="DONE") / "summary.json"
        files = {"made.txt": key.encode(), "summary.json": made.read_bytes()}
        return ray.exceptions.RayError("the worker died\nadvice") if name == "flush" else ("", files)

    cluster = actors(who("m"), who("m"), who("n"), work=work)
    state = sweep(None, NAMES, settings(out, resume=True), 3, lambda text: None)
    assert {name: found["status"] for name, found in state.shards.items()} == {
        "m/environment": "DONE",
        "m/flush": "LOST",
        "n/environment": "DONE",
        "n/flush": "LOST",
    }
    assert state.shards["m/flush"]["reason"] == "the worker died" and cluster.killed == cluster.made
    assert [path.read_text() for path in out.rglob("made.txt")] == ["n"], "what was done is not done again"
