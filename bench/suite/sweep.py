"""The suite over the GPUs of a Ray cluster: workers run shards, and Ray starts the shard of a lost worker again.

A sweep's folder holds one folder for each machine key, and in it one folder for each shard (an op, a family or an
entry), which is an ordinary suite run.  GPUs of one kind share the shards; each kind runs all shards, because times of
different machines are never merged.  The runs are the whole state: a resumed sweep does the missing runs.
"""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import ray

from rooflab.bench.base.plain import first_line
from rooflab.bench.core import Environment
from rooflab.bench.suite.plan import make_plan
from rooflab.bench.suite.runner import SuiteSettings, run_suite
from rooflab.bench.suite.state import read_summary
from rooflab.kernels._files import write_whole

START_S = 300.0
"""The time limit in seconds for a worker to start and to identify its machine."""
AGAIN = 2
"""The number of times that a shard is started again after its worker was lost: the shard may kill its workers."""
Say = Callable[[str], None]


@dataclass
class Sweep:
    """The state of a sweep."""

    shards: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By `machine key/shard`: status (DONE, PARTIAL, FAILED, LOST), reason, and the kernels that it excluded."""
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
        return {
            f"{name.partition('/')[0]}: {kernel}": str(reason)
            for name, shard in self.shards.items()
            for kernel, reason in shard.get("excluded", {}).items()
        }


class SweepWorker:
    """A Ray actor with one GPU, or in a dry run with one CPU."""

    def identify(self) -> dict[str, Any]:
        found = Environment.now()
        name = found.gpu.name if found.gpu else found.cpu
        return {"machine_key": found.machine_key, "device": name, "tree": Environment.tree(), "pid": os.getpid()}

    def run(
        self, shard: SuiteSettings, key: str, files: Mapping[str, bytes], place: str
    ) -> tuple[str, dict[str, bytes]]:
        """Runs `shard`.  Continues from `files` (relative path to content), or from the files that an earlier, lost
        worker left in the temporary folder `place` of this machine.

        Returns the error that prevented the run, or "", and all files.
        """
        folder, error = Path(tempfile.gettempdir()) / place, ""
        if not folder.exists():
            _write(folder, files)
        try:
            if (here := Environment.now().machine_key) != key:  # Ray may start a lost worker again on another node
                raise ValueError(f"worker: expected a machine {key}, got {here}")
            here_too = replace(shard, out=folder, resume=True)
            run_suite(make_plan(shard.only), here_too, lambda text: None, lambda text: None)
        except (ValueError, OSError, RuntimeError) as fault:
            error = f"{type(fault).__name__}: {fault}"
        made = _read(folder)
        shutil.rmtree(folder, ignore_errors=True)
        return error, made


def sweep(address: str | None, names: Sequence[str], settings: SuiteSettings, workers: int | None, say: Say) -> Sweep:
    """Runs a shard for each name on the cluster at `address`; with None, starts a cluster on this machine.

    Without `workers`, each GPU of the cluster has one worker.  Raises `ValueError` if the folder holds another sweep
    without `resume`, if the cluster cannot be reached, or if no worker can be used.
    """
    out, runs = settings.out, sorted(settings.out.glob("*/*/summary.json"))
    state = Sweep({f"{path.parts[-3]}/{path.parts[-2]}": _row(path.parent) for path in runs})
    if state.shards and not settings.resume:
        raise ValueError(f"out: {out} holds a sweep; add --resume to go on with it, or take another folder")
    with _cluster(address):
        count = workers or int(ray.cluster_resources().get("CPU" if settings.dry_run else "GPU", 0))
        if count < 1:
            raise ValueError("ray: expected a cluster with GPUs, got none (--dry-run runs on CPUs)")
        idle = _start(count, settings.dry_run, state, say)
        if not idle:
            raise ValueError(f"ray: no worker can be used: {'; '.join(state.refused)}")
        _hand_out(names, settings, idle, state, say)
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


def _start(count: int, dry_run: bool, state: Sweep, say: Say) -> list[tuple[Any, str]]:
    """The workers with the keys of their machines; unusable workers are in `state.refused`."""
    options = {"max_restarts": -1, "max_task_retries": AGAIN, "num_cpus": 1, "num_gpus": 0 if dry_run else 1}
    actors = [ray.remote(SweepWorker).options(**options).remote() for _ in range(count)]
    usable, tree = [], Environment.tree()
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
        say(why or f"worker on {who['device']} ({who['machine_key']}, process {who['pid']})")
    return usable


def _hand_out(
    names: Sequence[str], settings: SuiteSettings, idle: list[tuple[Any, str]], state: Sweep, say: Say
) -> None:
    """Gives each idle worker the next shard that its kind of machine has not done, until all workers are finished."""
    out, sweep_id, actors = settings.out, secrets.token_hex(8), [actor for actor, _ in idle]
    done = {name for name, found in state.shards.items() if found["status"] == "DONE"}
    waiting = {key: [name for name in names if f"{key}/{name}" not in done] for _, key in idle}
    running: dict[Any, tuple[Any, str, str]] = {}
    while idle or running:
        for actor, key in idle:
            if waiting[key]:
                name = waiting[key].pop(0)
                place, files = f"rooflab-sweep-{sweep_id}-{key}-{name}", _read(out / key / name)
                answer = actor.run.remote(replace(settings, only=(name,)), key, files, place)
                running[answer] = actor, key, name
        idle = []
        if running:
            (answer, *_), _ = ray.wait(list(running))
            actor, key, name = running.pop(answer)
            found = state.shards[f"{key}/{name}"] = _end_of(answer, out / key / name)
            say(f"{key}/{name}: {found['status']}{': ' + found['reason'] if found['reason'] else ''}")
            idle = [(actor, key)]
    for actor in actors:
        ray.kill(actor)


def _end_of(answer: Any, folder: Path) -> dict[str, Any]:
    """The row of a shard that ended, after writing its files to the shard's folder."""
    try:
        error, files = ray.get(answer)
    except ray.exceptions.RayTaskError as fault:
        return {"status": "FAILED", "reason": first_line(fault)}
    except ray.exceptions.RayError as fault:
        return {"status": "LOST", "reason": first_line(fault)}
    _write(folder, files)
    return {"status": "FAILED", "reason": error} if error else _row(folder)


def _read(folder: Path) -> dict[str, bytes]:
    """The files of a folder by relative path, except files that are still being written."""
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.suffix != ".part"]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def _write(folder: Path, files: Mapping[str, bytes]) -> None:
    for name, content in files.items():
        write_whole(folder / name, content)


def _row(folder: Path) -> dict[str, Any]:
    """The status, the reason and the excluded kernels of a shard, from the summary of its suite."""
    summary = read_summary(folder)
    by_status: dict[str, list[str]] = {}
    for row in summary["entries"]:
        by_status.setdefault(row["status"], []).append(row["entry"])
    listed = [
        f"{status}: {', '.join(by_status[status])}" for status in by_status if status not in ("DONE", "UNSUPPORTED")
    ]
    failed = summary["stopped"] or by_status.keys() & {"FAILED", "BLOCKED"}
    status = "FAILED" if failed else "PARTIAL" if listed else "DONE"
    reason = "; ".join(text for text in (summary["stopped"], *listed) if text)
    return {"status": status, "reason": reason, "excluded": summary["excluded"]}
