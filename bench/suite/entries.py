"""What an entry of the plan is, what it is told when it runs, and what it says afterwards.  Data only."""

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
"""What a resumed run does not do again; PARTIAL, cut for time, it goes on with."""
LIMIT_FACTOR, LIMIT_EXTRA_S = 3.0, 30.0
"""An entry's process is ended after this many times its cost, and these seconds: it hangs."""
LAST_S = 90.0
"""What an entry that is given all that time may still have in hand when it is over."""


@dataclass(frozen=True)
class Entry:
    """One step of the plan, which runs in a process of its own."""

    id: str
    """`check:gemm`, `bar:gemm.bf16_large`."""
    title: str
    """What it does, in a line; of a bar, its text."""
    call: str
    """`module:function`, called with a `Context` and the arguments; returns an `Outcome`."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """JSON values."""
    cost_s: float = 30.0
    """Estimated seconds on a GPU, the start of its process included."""
    value: float = 50.0
    """What it is worth; the plan takes the most valuable first."""
    needs: tuple[str, ...] = ()
    """Entries that must have been done; one that was not blocks this one."""
    after: tuple[str, ...] = ()
    """Entries that come before this one, also where they fail."""
    ops: tuple[str, ...] = ()
    """Ops that it is about; none for what is about the card."""
    whole: bool = False
    """Whether it may take more than its cost where the budget allows: later entries cannot run what it leaves out."""

    @property
    def limit_s(self) -> float:
        """When its process is ended."""
        return LIMIT_FACTOR * self.cost_s + LIMIT_EXTRA_S + (LAST_S if self.whole else 0.0)

    @property
    def most_s(self) -> float:
        """Seconds that it is given where the budget has them."""
        return LIMIT_FACTOR * self.cost_s + LIMIT_EXTRA_S if self.whole else self.cost_s


@dataclass(frozen=True)
class Context:
    """What a running entry is told."""

    entry: str
    out: Path
    """Folder for records."""
    device: str
    """`cuda`, or in a dry run `cpu`."""
    dry_run: bool
    """On a CPU, with small shapes: every path is taken, and no figure of it counts."""
    seconds: float
    """Time that the entry may take; it must do with that, and says what it left out."""
    seed: int = 0
    excluded: Mapping[str, str] = field(default_factory=dict)
    """Kernels that must not run, with the reason: their first check on this card failed."""
    verified: tuple[str, ...] | None = None
    """Kernels that a check in a process of its own found right; None where nothing was verified in this run."""
    earlier: tuple[str, ...] = ()
    """Files in `out` that this entry wrote before a fault or the end of its time; it goes on with them."""
    began: float = field(default_factory=time.monotonic, compare=False)

    @property
    def left_s(self) -> float:
        """Seconds left of `seconds`."""
        return self.seconds - (time.monotonic() - self.began)

    @property
    def run_id(self) -> str | None:
        """The run of records to go on with; None where this is the first."""
        return next((Path(name).stem for name in self.earlier if name.endswith(".jsonl")), None)


@dataclass(frozen=True)
class Outcome:
    """What an entry says when it ends."""

    status: EntryStatus = "DONE"
    reason: str = ""
    """Why the status is not DONE, or what was left out."""
    bar: BarStatus | None = None
    """For a bar: its answer."""
    needed: str = ""
    """For a bar: the condition, as `geomean >= 1.00`."""
    figures: Mapping[str, Any] = field(default_factory=dict)
    """Numbers and texts by name, units in names."""
    files: tuple[str, ...] = ()
    """Files that it wrote, relative to the run's folder."""
    excluded: Mapping[str, str] = field(default_factory=dict)
    """Kernels that no later entry may run, with the reason."""
    verified: tuple[str, ...] | None = None
    """Kernels that later entries may run."""
    seconds: float = 0.0
    """Wall time, set by the runner."""
    again: bool = False
    """Whether the process broke on the kernel that it has noted (`running.py`), and another can do the rest."""


def plan_hash(entries: Sequence[Entry], **options: Any) -> str:
    """A hash of what the plan does and in which order; costs and titles are not part of it."""
    parts = [
        {key: value for key, value in asdict(entry).items() if key not in ("title", "cost_s", "value")}
        for entry in entries
    ]
    return hashlib.sha256(json.dumps([parts, options], sort_keys=True, default=str).encode()).hexdigest()[:16]
