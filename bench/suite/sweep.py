"""The driver: shards handed to workers, their files kept as they come, a lost worker's shard given to another.

The folder of a sweep holds one folder a machine key, in it one a shard, which is an ordinary suite run; GPUs of one
kind share the shards, and each kind runs all of them, since times of different machines are never merged into one.
`sweep.json` says what became of each, so that an interrupted sweep goes on where it stopped.
"""

from __future__ import annotations

import json
import os
import queue
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import ray

from rooflab.bench.records.environment import ROOT, tree_hash
from rooflab.bench.records.files import write_whole

FILE = "sweep.json"
SILENT_S = 120.0
"""A worker that sends nothing for so long is lost: it sends something every second."""
START_S = 300.0
"""Longest that a worker may take to start and to say what it is."""
ATTEMPTS = 3
"""How often a shard is begun before it is given up: it may be what kills its workers."""
Say = Callable[[str], None]


class Lost(Exception):
    """A worker died, or is silent; the text is Ray's."""


@dataclass
class Sweep:
    """The state of a sweep, kept in `sweep.json`."""

    shards: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By `machine key/shard`: status (RUNNING, DONE, PARTIAL, FAILED, LOST), attempts, and what the suite said."""
    workers: list[dict[str, Any]] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    """Workers that were not used, and why."""

    @property
    def complete(self) -> bool:
        """Whether every shard of every kind of machine is done."""
        return bool(self.shards) and all(found["status"] == "DONE" for found in self.shards.values())

    @property
    def excluded(self) -> dict[str, str]:
        """Kernels that were not run any more, by `machine key: kernel`, with the reason."""
        found = {}
        for name, shard in self.shards.items():
            for kernel, reason in shard.get("excluded", {}).items():
                found[f"{name.partition('/')[0]}: {kernel}"] = str(reason)
        return found


def sweep(
    address: str | None, shards: Sequence[Shard], out: Path, workers: int | None, resume: bool, say: Say
) -> Sweep:
    """Runs `shards` on the cluster at `address` (None starts one on this machine) and returns what became of them.

    `workers` is one for each GPU of the cluster without it.  Raises `ValueError` on a folder that holds another sweep
    and no `resume`, on a cluster that cannot be reached, or where no worker can be used.
    """
    state = _load(out)
    if state.shards and not resume:
        raise ValueError(f"out: {out} holds a sweep; add --resume to go on with it, or take another folder")
    dry_run = any(shard.dry_run for shard in shards)
    started = not ray.is_initialized()
    if started:
        try:
            ray.init(address=address, log_to_driver=False, include_dashboard=False, ignore_reinit_error=True)
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise ValueError(f"ray: expected a cluster at {address!r}, got {error}") from error
    try:
        return _Driver(list(shards), out, state, dry_run, say).run(workers)
    finally:
        if started:
            ray.shutdown()


def _load(out: Path) -> Sweep:
    path = out / FILE
    if not path.is_file():
        return Sweep()
    try:
        return Sweep(shards=json.loads(path.read_text())["shards"])
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path}: expected the state of a sweep, got {error}") from error


class _Driver:
    """A sweep as it goes; each worker has a thread here that waits for it."""

    def __init__(self, shards: list[Shard], out: Path, state: Sweep, dry_run: bool, say: Say):
        self.shards, self.out, self.state, self.dry_run, self.say = shards, out, state, dry_run, say
        self.lock = threading.Lock()
        self.waiting: dict[str, queue.SimpleQueue[Shard]] = {}
        self.unfinished: dict[str, set[str]] = {}
        """By machine key, the shards that some worker may still be given."""
        self.tree = tree_hash(ROOT)

    def run(self, workers: int | None) -> Sweep:
        """Starts the workers, hands out the shards, and waits for all."""
        count = workers or int(ray.cluster_resources().get("CPU" if self.dry_run else "GPU", 0))
        if count < 1:
            raise ValueError("ray: expected a cluster with GPUs, got none (--dry-run runs on CPUs)")
        usable = [found for found in (self._start() for _ in range(count)) if found is not None]
        if not usable:
            raise ValueError(f"ray: no worker can be used: {'; '.join(self.state.refused)}")
        for key in {who["machine_key"] for _, who in usable}:
            left = [shard for shard in self.shards if self._status(key, shard) != "DONE"]
            self.waiting[key] = queue.SimpleQueue()
            self.unfinished[key] = {shard.name for shard in left}
            for shard in left:
                self.waiting[key].put(shard)
        self._save()
        threads = [threading.Thread(target=self._serve, args=found, daemon=True) for found in usable]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self._save()
        return self.state

    def _start(self) -> tuple[Any, dict[str, Any]] | None:
        """A worker and what it said of itself; None where it cannot be used, with the reason in `refused`."""
        resources: dict[str, Any] = {"num_cpus": 1} if self.dry_run else {"num_cpus": 1, "num_gpus": 1}
        actor = ray.remote(Worker).options(max_restarts=0, **resources).remote()
        try:
            who: dict[str, Any] = ray.get(actor.identify.remote(), timeout=START_S)
        except ray.exceptions.RayError as error:
            ray.kill(actor)
            self._refuse(f"a worker did not start: {_first_line(error)}")
            return None
        if who["tree"] != self.tree:
            ray.kill(actor)
            self._refuse(f"{who['machine_key']} has other source files ({who['tree']}, here {self.tree})")
            return None
        with self.lock:
            self.state.workers.append(who)
        self.say(f"worker on {who['device']} ({who['machine_key']})")
        return actor, who

    def _refuse(self, reason: str) -> None:
        with self.lock:
            self.state.refused.append(reason)
        self.say(reason)

    def _serve(self, actor: Any, who: Mapping[str, Any]) -> None:
        """Gives one worker shards until all of its kind of machine are finished; a lost worker is replaced."""
        key = str(who["machine_key"])
        while self.unfinished[key]:
            try:
                shard = self.waiting[key].get(timeout=1.0)
            except queue.Empty:
                continue  # another worker has the last one, and may lose it
            try:
                self._begin(key, shard, int(who["pid"]))
                self._finish(key, shard, self._shard(actor, key, shard))
            except Lost as lost:
                self._give_back(key, shard, str(lost))
                ray.kill(actor)
                found = self._start()
                if found is None:
                    return
                actor, who = found
                if who["machine_key"] != key:
                    break  # of another kind, whose shards have workers of their own
            except BaseException as error:
                # This thread ends: the other threads must not wait for a shard that no worker has.
                ray.kill(actor)
                self._note(key, shard, {"status": "FAILED", "reason": _first_line(error)}, finished=True)
                raise
        ray.kill(actor)

    def _shard(self, actor: Any, key: str, shard: Shard) -> dict[str, Any]:
        """Runs a shard on a worker and keeps its files; returns its end.  Raises `Lost`."""
        folder = self.out / key / shard.name
        have = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        answers = actor.run.options(num_returns="streaming").remote(shard, have)
        try:
            while True:
                ready, _ = ray.wait([answers], timeout=SILENT_S)
                if not ready:
                    raise Lost(f"silent for {SILENT_S:.0f} s")
                answer = ray.get(next(answers))
                for name, content in answer["files"].items():
                    write_whole(folder / name, content)
                if "end" in answer:
                    end: dict[str, Any] = answer["end"]
                    return end
        except StopIteration:
            raise Lost("it ended before the shard did") from None
        except ray.exceptions.RayError as error:
            raise Lost(_first_line(error)) from error

    def _status(self, key: str, shard: Shard) -> str:
        return str(self.state.shards.get(f"{key}/{shard.name}", {}).get("status", ""))

    def _begin(self, key: str, shard: Shard, pid: int) -> None:
        name = f"{key}/{shard.name}"
        with self.lock:
            attempts = int(self.state.shards.get(name, {}).get("attempts", 0))
            found = {"status": "RUNNING", "reason": "", "worker_pid": pid, "attempts": attempts + 1}
            self.state.shards[name] = found
        self._save()

    def _finish(self, key: str, shard: Shard, end: Mapping[str, Any]) -> None:
        status, reason = _verdict(end)
        self._note(key, shard, {"status": status, "reason": reason, **end}, finished=True)

    def _give_back(self, key: str, shard: Shard, reason: str) -> None:
        """The shard of a lost worker, to the next one that is free, unless it has been begun often enough."""
        again = int(self.state.shards[f"{key}/{shard.name}"]["attempts"]) < ATTEMPTS
        try:
            self._note(key, shard, {"status": "LOST", "reason": reason}, finished=not again)
        finally:  # a state that cannot be written must not keep it from the others
            if again:
                self.waiting[key].put(shard)

    def _note(self, key: str, shard: Shard, found: dict[str, Any], finished: bool) -> None:
        name = f"{key}/{shard.name}"
        with self.lock:
            self.state.shards[name] = found | {"attempts": self.state.shards.get(name, {}).get("attempts", 1)}
            if finished:
                self.unfinished[key].discard(shard.name)
        self._save()
        self.say(f"{name}: {found['status']}{': ' + found['reason'] if found['reason'] else ''}")

    def _save(self) -> None:
        with self.lock:
            write_whole(self.out / FILE, json.dumps(asdict(self.state), indent=1) + "\n")


def _verdict(end: Mapping[str, Any]) -> tuple[str, str]:
    """Status and reason of a shard by what its suite said of its entries."""
    by_status: dict[str, list[str]] = {}
    for name, status in end.get("entries", {}).items():
        by_status.setdefault(str(status), []).append(name)
    listed = "; ".join(
        f"{status}: {', '.join(names)}" for status, names in by_status.items() if status not in ("DONE", "UNSUPPORTED")
    )
    reason = str(end.get("error") or end.get("stopped") or "")
    if reason or by_status.keys() & {"FAILED", "BLOCKED"}:
        return "FAILED", "; ".join(text for text in (reason, listed) if text)
    return ("PARTIAL", listed) if listed else ("DONE", "")


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:300] if lines else type(error).__name__


HEARTBEAT_S = 1.0
"""Between two looks at the shard's folder; each sends what has changed, or that nothing has."""


@dataclass(frozen=True)
class Shard:
    """A part of the plan, which one worker runs."""

    name: str
    """An op, a family or an entry, as `rooflab suite --only` takes it."""
    budget_s: float
    dry_run: bool = False
    seed: int = 0


class Worker:
    """An actor: one GPU, or without one (`dry_run`) one CPU."""

    def identify(self) -> dict[str, Any]:
        """Machine key, source and process of this worker."""
        from rooflab.bench.records.environment import ROOT, snapshot, tree_hash

        found = snapshot()
        name = found.gpu.name if found.gpu else found.cpu
        return {"machine_key": found.machine_key, "device": name, "tree": tree_hash(ROOT), "pid": os.getpid()}

    def run(self, shard: Shard, files: Mapping[str, bytes]) -> Iterator[dict[str, Any]]:
        """Runs `shard`, going on from `files` (relative path to content), and yields `files` that changed.

        The last answer holds `end`: what the suite says of its entries, or why it could not run.
        """
        with tempfile.TemporaryDirectory(prefix="rooflab-sweep-") as place:
            folder = Path(place) / "run"
            for name, content in files.items():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).write_bytes(content)
            ended: dict[str, Any] = {}
            suite = threading.Thread(target=_run_shard, args=(shard, folder, ended), daemon=True)
            suite.start()
            sent = dict(files)
            while suite.is_alive():
                suite.join(HEARTBEAT_S)
                yield {"files": _changed(folder, sent)}
            yield {"files": _changed(folder, sent), "end": ended or {"error": "the suite ended without a word"}}


def _run_shard(shard: Shard, folder: Path, ended: dict[str, Any]) -> None:
    from rooflab.bench.suite.plan import make_plan
    from rooflab.bench.suite.runner import Settings, run_suite

    settings = Settings(folder, shard.budget_s, shard.dry_run, resume=True, seed=shard.seed, only=(shard.name,))
    try:
        progress = run_suite(make_plan(settings.only), settings, lambda text: None, lambda text: None)
    except (ValueError, OSError, RuntimeError) as error:
        ended["error"] = f"{type(error).__name__}: {error}"
        return
    ended["entries"] = {name: outcome.status for name, outcome in progress.outcomes.items()}
    ended["stopped"] = progress.stopped
    ended["excluded"] = progress.excluded()


def _changed(folder: Path, sent: dict[str, bytes]) -> dict[str, bytes]:
    """Files of `folder` that are not as they were last sent; notes them as sent."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.suffix == ".part" or not path.is_file():
            continue
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            continue  # the suite took it away between the two looks
        if sent.get(name) != content:
            found[name] = sent[name] = content
    return found
