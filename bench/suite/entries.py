"""What an entry of the plan is, what a step of our own is told, and what it says when it ends.  Data only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from rooflab.bench.base.system_time import time

EntryStatus = Literal["DONE", "PARTIAL", "FAILED", "UNSUPPORTED", "BLOCKED", "NOT_REACHED", "RUNNING"]
BarStatus = Literal["MET", "MISSED", "UNMEASURED"]
FINAL: tuple[EntryStatus, ...] = ("DONE", "FAILED", "UNSUPPORTED")
"""A resumed run does not repeat entries with these statuses; it continues a PARTIAL entry, which lacked time."""
LIMIT_FACTOR, LIMIT_EXTRA_S = 3.0, 30.0
"""An entry that runs longer than the factor times its cost plus these seconds hangs; its process is ended."""
LAST_S = 90.0
"""Seconds of grace after the deadline, in which an entry may finish its last step."""


@dataclass(frozen=True)
class Entry:
    """One command of the plan, which runs in a process of its own."""

    id: str
    """`check:gemm`, `bar:gemm.bf16_large`."""
    title: str
    """What the entry does, in one line; for a bar, its text."""
    words: tuple[str, ...]
    """The arguments of Python: a script, or `-m` and a module, and theirs.  `{out}` stands for the entry's own folder,
    `{run}` for that of the run, `{seconds}` for the time that it has, `{seed}` for the run's seed."""
    cost_s: float = 30.0
    """Estimated seconds on a GPU, including the start of its process."""
    value: float = 50.0
    """The value of the entry; the plan runs the most valuable entries first."""
    dry: tuple[str, ...] = ()
    """The words on a CPU, with small shapes; empty where none is short enough."""
    needs: tuple[str, ...] = ("first",)
    """Entries that must be done before; one that is not done blocks this entry."""
    after: tuple[str, ...] = ()
    """Entries that run before this one, even if they fail."""
    ops: tuple[str, ...] = ()
    """Ops that the entry is about; empty for an entry about the card, or about a model."""
    checks: tuple[str, ...] = ()
    """Other ops whose kernels it runs, and which must be checked first."""
    launches: tuple[Mapping[str, Any], ...] = ()
    """What `ahead` compiles for it: `op` and `cases` or `suites`, `scheme` and `kernels`, by default all; or
    `microkernels`, those of the ceilings."""
    whole: bool = False
    """Whether it may exceed its cost if the budget allows: later entries cannot run what it leaves out."""
    beside: bool = False
    """Whether it runs beside the entries that follow, on cores that they leave idle."""
    searches: bool = False
    """Whether it tries configs: a record of a wrong one says nothing of its kernel."""
    of_card: bool = False
    """Whether it holds for one card alone, so that another of the kind does it again."""

    @property
    def limit_s(self) -> float:
        """Seconds after which the process of the entry is ended."""
        return LIMIT_FACTOR * self.cost_s + LIMIT_EXTRA_S + (LAST_S if self.whole else 0.0)

    @property
    def most_s(self) -> float:
        """Seconds that the entry gets if the budget has them."""
        return LIMIT_FACTOR * self.cost_s + LIMIT_EXTRA_S if self.whole else self.cost_s

    def to_json(self) -> dict[str, Any]:
        """The entry as JSON values, without what has its default value."""
        values = ((item, getattr(self, item.name)) for item in fields(self))
        return {item.name: value for item, value in values if value != item.default}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Entry:
        """An entry from its JSON.  Raises `TypeError` on a field that it does not have."""
        found: dict[str, Any] = {name: tuple(one) if isinstance(one, list) else one for name, one in values.items()}
        return cls(**found)


@dataclass(frozen=True)
class Context:
    """What a step of our own is told (`step.py`)."""

    out: Path
    """The entry's own folder, for records."""
    device: str = "cuda"
    """In a dry run, `cpu`."""
    dry_run: bool = False
    """Runs on a CPU with small shapes: the run takes every path, and its figures do not count."""
    seconds: float = 60.0
    """Time that the step may take; it stays within this time and reports what it left out."""
    seed: int = 0
    began: float = field(default_factory=time.monotonic, compare=False)

    @property
    def left_s(self) -> float:
        """Seconds left of `seconds`."""
        return self.seconds - (time.monotonic() - self.began)

    @property
    def run(self) -> Path:
        """The folder of the whole run."""
        return self.out.parent


@dataclass(frozen=True)
class EntryOutcome:
    """How an entry ended."""

    status: EntryStatus = "DONE"
    reason: str = ""
    """Why the status is not DONE, or what the entry left out."""
    bar: BarStatus | None = None
    """For a bar: its answer."""
    needed: str = ""
    """For a bar: the condition, such as `geomean >= 1.00`."""
    figures: Mapping[str, Any] = field(default_factory=dict)
    """Numbers and texts by name; the name contains the unit."""
    excluded: Mapping[str, str] = field(default_factory=dict)
    """The kernels that later entries must not use, with the reason."""
    seconds: float = 0.0
    """Seconds that the entry took."""
