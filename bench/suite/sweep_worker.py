"""What runs on a GPU of the cluster: a suite of one shard in a folder of its own, whose files are sent as they change.

A worker needs Rooflab installed from the same source as the driver's; `identify` says what it has.
"""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
        from rooflab.bench.records.environment import snapshot
        from rooflab.bench.records.source_tree import ROOT, tree_hash

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
            suite = threading.Thread(target=_run, args=(shard, folder, ended), daemon=True)
            suite.start()
            sent = dict(files)
            while suite.is_alive():
                suite.join(HEARTBEAT_S)
                yield {"files": _changed(folder, sent)}
            yield {"files": _changed(folder, sent), "end": ended or {"error": "the suite ended without a word"}}


def _run(shard: Shard, folder: Path, ended: dict[str, Any]) -> None:
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
