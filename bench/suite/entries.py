"""What an entry of the plan is, what it gets when it runs, and what it returns afterwards.  Data only."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

EntryStatus = Literal["DONE", "PARTIAL", "FAILED", "UNSUPPORTED", "BLOCKED", "NOT_REACHED", "RUNNING"]
BarStatus = Literal["MET", "MISSED", "UNMEASURED"]
FINAL: tuple[EntryStatus, ...] = ("DONE", "FAILED", "UNSUPPORTED")
"""A resumed run does not repeat entries with these statuses; it continues a PARTIAL entry, which lacked time."""
LIMIT_FACTOR, LIMIT_EXTRA_S = 3.0, 30.0
"""An entry that runs longer than the factor times its cost plus these seconds hangs; its process is ended."""
LAST_S = 90.0
"""Seconds that an entry that gets all of that time may still need for its last step when the time is over."""


@dataclass(frozen=True)
class Entry:
    """One step of the plan, which runs in a process of its own."""

    id: str
    """`check:gemm`, `bar:gemm.bf16_large`."""
    title: str
    """What the entry does, in one line; for a bar, its text."""
    call: str
    """`module:function`, called with a `Context` and the arguments; returns an `Outcome`."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Arguments as JSON values."""
    cost_s: float = 30.0
    """Estimated seconds on a GPU, including the start of its process."""
    value: float = 50.0
    """The value of the entry; the plan runs the most valuable entries first."""
    needs: tuple[str, ...] = ()
    """Entries that must be done before; one that is not done blocks this entry."""
    after: tuple[str, ...] = ()
    """Entries that run before this one, even if they fail."""
    ops: tuple[str, ...] = ()
    """Ops that the entry is about; empty for an entry about the card."""
    whole: bool = False
    """Whether it may exceed its cost if the budget allows: later entries cannot run what it leaves out."""

    @property
    def limit_s(self) -> float:
        """Seconds after which the process of the entry is ended."""
        return LIMIT_FACTOR * self.cost_s + LIMIT_EXTRA_S + (LAST_S if self.whole else 0.0)

    @property
    def most_s(self) -> float:
        """Seconds that the entry gets if the budget has them."""
        return LIMIT_FACTOR * self.cost_s + LIMIT_EXTRA_S if self.whole else self.cost_s


@dataclass(frozen=True)
class Context:
    """What a running entry is told."""

    entry: str
    out: Path
    """Folder for records."""
    device: str
    """`cuda`; in a dry run, `cpu`."""
    dry_run: bool
    """Runs on a CPU with small shapes: the run takes every path, and its figures do not count."""
    seconds: float
    """Time that the entry may take; it stays within this time and reports what it left out."""
    seed: int = 0
    excluded: Mapping[str, str] = field(default_factory=dict)
    """Kernels that must not run, with the reason: they failed their first check on this card."""
    verified: tuple[str, ...] | None = None
    """Kernels that a check in a separate process found correct; None if this run verified nothing."""
    trust: str = ""
    """Folder of records, or empty: a kernel whose first check there was right, with this code, needs no other."""
    earlier: tuple[str, ...] = ()
    """Files in `out` that this entry wrote before a fault or the end of its time; the entry continues them."""
    began: float = field(default_factory=time.monotonic, compare=False)

    @property
    def left_s(self) -> float:
        """Seconds left of `seconds`."""
        return self.seconds - (time.monotonic() - self.began)

    @property
    def run_id(self) -> str | None:
        """The run id of the records to continue; None for the first process of the entry."""
        return next((Path(name).stem for name in self.earlier if name.endswith(".jsonl")), None)


@dataclass(frozen=True)
class Outcome:
    """What an entry returns when it ends."""

    status: EntryStatus = "DONE"
    reason: str = ""
    """Why the status is not DONE, or what the entry left out."""
    bar: BarStatus | None = None
    """For a bar: its answer."""
    needed: str = ""
    """For a bar: the condition, such as `geomean >= 1.00`."""
    figures: Mapping[str, Any] = field(default_factory=dict)
    """Numbers and texts by name; the name contains the unit."""
    files: tuple[str, ...] = ()
    """Files that the entry wrote, relative to the run's folder."""
    excluded: Mapping[str, str] = field(default_factory=dict)
    """Kernels that no later entry may run, with the reason."""
    verified: tuple[str, ...] | None = None
    """Kernels that later entries may run."""
    seconds: float = 0.0
    """Wall time, set by the runner."""
    again: bool = False
    """Whether the process broke on the kernel noted in its file (`running.py`), and a new process can do the rest."""


def plan_hash(entries: Sequence[Entry], **options: Any) -> str:
    """A hash of the plan's entries and their order; costs and titles are not part of it."""
    parts = [
        {key: value for key, value in asdict(entry).items() if key not in ("title", "cost_s", "value")}
        for entry in entries
    ]
    return hashlib.sha256(json.dumps([parts, options], sort_keys=True, default=str).encode()).hexdigest()[:16]
