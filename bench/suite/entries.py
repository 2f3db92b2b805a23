"""Defines an entry of the suite's plan (one command), its settings, and its outcome.  It has only data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from rooflab.bench.base.system_time import time

EntryStatus = Literal["DONE", "PARTIAL", "FAILED", "UNSUPPORTED", "BLOCKED", "NOT_REACHED", "RUNNING"]
BarStatus = Literal["MET", "MISSED", "UNMEASURED"]
FINAL_STATUSES: tuple[EntryStatus, ...] = ("DONE", "FAILED", "UNSUPPORTED")
"""The statuses of entries that a resumed run does not repeat.  It continues a PARTIAL entry, which lacked time."""
LIMIT_FACTOR, LIMIT_EXTRA_S = 3.0, 30.0
"""If an entry runs longer than its cost multiplied by the factor, plus the extra seconds, its process is ended."""
LAST_STEP_S = 90.0
"""The seconds after the deadline in which an entry may finish its last step."""


@dataclass(frozen=True)
class Entry:
    """Describes one entry of the suite's plan: a command that runs in its own process."""

    id: str
    """The name of the entry: `check:gemm`, `bar:gemm.bf16_large`."""
    title: str
    """The purpose of the entry in one line.  A bar is a target; its title is the target's text."""
    words: tuple[str, ...]
    """The arguments of Python: a script, or `-m` and a module, and their arguments.  `{out}` stands for the entry's
    folder, `{run}` for the folder of the run, `{seconds}` for the entry's time, `{seed}` for the run's seed."""
    cost_s: float = 30.0
    """The estimated seconds on a GPU, with the start of the process."""
    value: float = 50.0
    """The value of the entry; the plan runs the most valuable entries first."""
    dry: tuple[str, ...] = ()
    """The arguments on a CPU, with small shapes.  Empty if the entry has no variant that is short enough."""
    needs: tuple[str, ...] = ("first",)
    """The entries that must be done before.  If one of them is not done, this entry does not run."""
    after: tuple[str, ...] = ()
    """The entries that run before this entry, even if they fail."""
    ops: tuple[str, ...] = ()
    """The ops that the entry is about.  Empty for an entry about the card or about a model."""
    checks: tuple[str, ...] = ()
    """Other ops whose kernels the entry runs.  They must be checked first."""
    launches: tuple[Mapping[str, Any], ...] = ()
    """The kernels that `ahead` compiles for the entry: `op` and `cases` or `suites`, `scheme` and `kernels`, by default
    all.  Or `microkernels`, the microkernels of the ceilings."""
    whole: bool = False
    """Whether the entry may exceed its cost if the budget allows: later entries cannot run what it leaves out."""
    beside: bool = False
    """Whether the entry runs beside the entries after it, on cores that those entries leave idle."""
    searches: bool = False
    """Whether the entry tries configs.  A record of a wrong config then says nothing about its kernel."""
    of_card: bool = False
    """Whether the result holds for one card only.  Another card of the same kind then needs a new run."""

    @property
    def limit_s(self) -> float:
        """Returns the time limit of the entry in seconds.  At this limit its process is killed."""
        return LIMIT_FACTOR * self.cost_s + LIMIT_EXTRA_S + (LAST_STEP_S if self.whole else 0.0)

    @property
    def most_s(self) -> float:
        """Returns the seconds that the entry may use if enough of the budget is left."""
        return LIMIT_FACTOR * self.cost_s + LIMIT_EXTRA_S if self.whole else self.cost_s

    def to_json(self) -> dict[str, Any]:
        """Returns the entry as JSON values.  Fields with their default value are left out."""
        field_values = ((entry_field, getattr(self, entry_field.name)) for entry_field in fields(self))
        return {entry_field.name: value for entry_field, value in field_values if value != entry_field.default}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Entry:
        """Makes an entry from JSON values.  Raises `TypeError` on a field that an entry does not have."""
        entry_arguments: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in values.items()}
        return cls(**entry_arguments)


@dataclass(frozen=True)
class Context:
    """Holds the settings for one step (command) of the suite, such as its folder, device and seconds."""

    out: Path
    """The entry's folder, to which records are written."""
    device: str = "cuda"
    """The device of the step: `cuda`, or `cpu` in a dry run."""
    dry_run: bool = False
    """Whether to run on a CPU with small shapes.  Such a run takes every code path, but its figures do not count."""
    seconds: float = 60.0
    """The seconds that the step may take.  It stays within this time and reports what it left out."""
    seed: int = 0
    began: float = field(default_factory=time.monotonic, compare=False)

    @property
    def left_s(self) -> float:
        """Returns how many seconds of the step's time remain."""
        return self.seconds - (time.monotonic() - self.began)

    @property
    def run(self) -> Path:
        """Returns the folder of the whole suite run.  It contains the folder of this entry."""
        return self.out.parent


@dataclass(frozen=True)
class EntryOutcome:
    """Holds the status and the results of one entry of the suite."""

    status: EntryStatus = "DONE"
    reason: str = ""
    """Why the status is not DONE, or what the entry left out."""
    bar: BarStatus | None = None
    """Whether a bar, which is a target, was reached.  None for other entries."""
    needed: str = ""
    """The condition of a bar, such as `geomean >= 1.00`."""
    figures: Mapping[str, Any] = field(default_factory=dict)
    """By name, numbers and texts.  The name contains the unit."""
    excluded: Mapping[str, str] = field(default_factory=dict)
    """The kernels that later entries must not use; each with the reason."""
    seconds: float = 0.0
    """The seconds that the entry took."""
