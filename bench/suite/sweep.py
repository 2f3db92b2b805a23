"""The suite over the GPUs of a Ray cluster: workers run shards, and Ray starts the shard of a lost worker again.

A sweep's folder holds one folder for each machine key, and in it one for each shard, which is an ordinary suite run.
GPUs of one kind share the shards; each kind runs all shards, because times of different machines are never merged.
`sweep.json` keeps the result of each shard, so that an interrupted sweep continues where it stopped.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import ray

from rooflab.bench.core.environment import ROOT, snapshot, tree_hash
from rooflab.bench.core.failed import first_line
from rooflab.bench.suite.plan import make_plan
from rooflab.bench.suite.runner import SuiteSettings, run_suite
from rooflab.kernels._files import write_whole

FILE = "sweep.json"
START_S = 300.0
"""Time limit in seconds for a worker to start and to identify its machine."""
AGAIN = 2
"""How often a shard whose worker was lost is started again: the shard itself may kill its workers."""
Say = Callable[[str], None]


@dataclass(frozen=True)
class Shard:
    """A part of the plan that one worker runs."""

    name: str
    """An op, a family or an entry, in the form of `rooflab suite --only`."""
    budget_s: float
    dry_run: bool = False
    seed: int = 0


@dataclass
class Sweep:
    """The state of a sweep, kept in `sweep.json`."""

    id: str = field(default_factory=lambda: secrets.token_hex(8))
    shards: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By `machine key/shard`: status (RUNNING, DONE, PARTIAL, FAILED, LOST), reason, and what the suite reported."""
    workers: list[dict[str, Any]] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    """Workers that the sweep did not use, with the reason."""

    @property
    def complete(self) -> bool:
        """Whether every shard of every kind of machine is done."""
        return bool(self.shards) and all(found["status"] == "DONE" for found in self.shards.values())

    @property
    def excluded(self) -> dict[str, str]:
        """Kernels that the sweep stopped running, by `machine key: kernel`, with the reason."""
        found = {}
        for name, shard in self.shards.items():
            for kernel, reason in shard.get("excluded", {}).items():
                found[f"{name.partition('/')[0]}: {kernel}"] = str(reason)
        return found


class SweepWorker:
    """A Ray actor: one GPU, or in a dry run one CPU."""

    def identify(self) -> dict[str, Any]:
        found = snapshot()
        name = found.gpu.name if found.gpu else found.cpu
        return {"machine_key": found.machine_key, "device": name, "tree": tree_hash(ROOT), "pid": os.getpid()}

    def run(self, shard: Shard, key: str, files: Mapping[str, bytes], place: str) -> dict[str, Any]:
        """Runs `shard`.  Continues from `files` (relative path to content), or from the files that an earlier, lost
        worker left in the temporary folder `place` of this machine.

        Returns what the suite reports of its `entries`, or the `error` that prevented the run, and all `files`.
        """
        folder = Path(tempfile.gettempdir()) / place
        if not folder.exists():
            _write(folder, files)
        settings = SuiteSettings(
            folder, shard.budget_s, shard.dry_run, resume=True, seed=shard.seed, only=(shard.name,)
        )
        end: dict[str, Any]
        try:
            if (here := snapshot().machine_key) != key:  # Ray may start a lost worker again on another node
                raise ValueError(f"worker: expected a machine {key}, got {here}")
            progress = run_suite(make_plan(settings.only), settings, lambda text: None, lambda text: None)
            entries = {name: outcome.status for name, outcome in progress.outcomes.items()}
            end = {"entries": entries, "stopped": progress.stopped, "excluded": progress.excluded()}
        except (ValueError, OSError, RuntimeError) as error:
            end = {"error": f"{type(error).__name__}: {error}"}
        end |= {"worker_pid": os.getpid(), "files": _read(folder)}
        shutil.rmtree(folder, ignore_errors=True)
        return end


def sweep(
    address: str | None, shards: Sequence[Shard], out: Path, workers: int | None, resume: bool, say: Say
) -> Sweep:
    """Runs `shards` on the cluster at `address` (None starts one on this machine) and returns the state of the sweep.

    Without `workers`, there is one for each GPU of the cluster.  Raises `ValueError` if the folder holds another sweep
    without `resume`, if the cluster cannot be reached, or if no worker can be used.
    """
    state = _load(out)
    if state.shards and not resume:
        raise ValueError(f"out: {out} holds a sweep; add --resume to go on with it, or take another folder")
    with _cluster(address):
        dry_run = any(shard.dry_run for shard in shards)
        count = workers or int(ray.cluster_resources().get("CPU" if dry_run else "GPU", 0))
        if count < 1:
            raise ValueError("ray: expected a cluster with GPUs, got none (--dry-run runs on CPUs)")
        idle = _start(count, dry_run, state, say)
        if not idle:
            raise ValueError(f"ray: no worker can be used: {'; '.join(state.refused)}")
        _hand_out(shards, idle, out, state, say)
    return state


@contextmanager
def _cluster(address: str | None) -> Iterator[None]:
    started = not ray.is_initialized()
    if started:
        try:
            ray.init(address=address, log_to_driver=False, include_dashboard=False, ignore_reinit_error=True)
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise ValueError(f"ray: expected a cluster at {address!r}, got {error}") from error
    try:
        yield
    finally:
        if started:
            ray.shutdown()


def _load(out: Path) -> Sweep:
    path = out / FILE
    if not path.is_file():
        return Sweep()
    try:
        known = json.loads(path.read_text())
        return Sweep(known["id"], known["shards"])
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path}: expected the state of a sweep, got {error}") from error


def _start(count: int, dry_run: bool, state: Sweep, say: Say) -> list[tuple[Any, str]]:
    """Workers with the keys of their machines; unusable workers are in `state.refused`."""
    resources: dict[str, Any] = {"num_cpus": 1} if dry_run else {"num_cpus": 1, "num_gpus": 1}
    options = {"max_restarts": -1, "max_task_retries": AGAIN, **resources}
    actors = [ray.remote(SweepWorker).options(**options).remote() for _ in range(count)]
    usable, tree = [], tree_hash(ROOT)
    for actor, asked in [(actor, actor.identify.remote()) for actor in actors]:
        try:
            who: dict[str, Any] = ray.get(asked, timeout=START_S)
            other = who["tree"] != tree
            why = f"{who['machine_key']} has other source files ({who['tree']}, here {tree})" if other else ""
        except ray.exceptions.RayError as error:
            why = f"a worker did not start: {first_line(error)}"
        if why:
            ray.kill(actor)
            state.refused.append(why)
        else:
            state.workers.append(who)
            usable.append((actor, str(who["machine_key"])))
        say(why or f"worker on {who['device']} ({who['machine_key']})")
    return usable


def _hand_out(shards: Sequence[Shard], idle: list[tuple[Any, str]], out: Path, state: Sweep, say: Say) -> None:
    """Gives each idle worker the next shard that its kind of machine has not done, until all workers are finished."""
    actors = [actor for actor, _ in idle]
    waiting = {key: [one for one in shards if not _is_done(state, f"{key}/{one.name}")] for _, key in idle}
    running: dict[Any, tuple[Any, str, Shard]] = {}
    while idle or running:
        for actor, key in idle:
            if waiting[key]:
                shard = waiting[key].pop(0)
                place = f"rooflab-sweep-{state.id}-{key}-{shard.name}"
                running[actor.run.remote(shard, key, _read(out / key / shard.name), place)] = (actor, key, shard)
                _note(state, out, f"{key}/{shard.name}", "RUNNING")
        idle = []
        if running:
            (answer, *_), _ = ray.wait(list(running))
            actor, key, shard = running.pop(answer)
            status, reason, end = _end_of(answer)
            _write(out / key / shard.name, end.pop("files", {}))
            _note(state, out, f"{key}/{shard.name}", status, reason, **end)
            say(f"{key}/{shard.name}: {status}{': ' + reason if reason else ''}")
            idle = [(actor, key)]
    for actor in actors:
        ray.kill(actor)


def _end_of(answer: Any) -> tuple[str, str, dict[str, Any]]:
    """Status and reason of a shard, and what its worker reported."""
    try:
        end: dict[str, Any] = ray.get(answer)
    except ray.exceptions.RayTaskError as error:
        return "FAILED", first_line(error), {}
    except ray.exceptions.RayError as error:
        return "LOST", first_line(error), {}
    return *_verdict(end), end


def _is_done(state: Sweep, name: str) -> bool:
    return bool(state.shards.get(name, {}).get("status") == "DONE")


def _note(state: Sweep, out: Path, name: str, status: str, reason: str = "", **end: Any) -> None:
    state.shards[name] = {"status": status, "reason": reason, **end}
    write_whole(out / FILE, json.dumps(asdict(state), indent=1, allow_nan=False) + "\n")


def _read(folder: Path) -> dict[str, bytes]:
    """The files of a folder by relative path, except files that are still being written."""
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.suffix != ".part"]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def _write(folder: Path, files: Mapping[str, bytes]) -> None:
    for name, content in files.items():
        write_whole(folder / name, content)


def _verdict(end: Mapping[str, Any]) -> tuple[str, str]:
    """Status and reason of a shard, from what its suite reported of its entries."""
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
