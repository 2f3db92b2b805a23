"""The two sides of a comparison: which tree, which interpreter, and what is measured there."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from rooflab.bench.ab.pairs import SideName

ROOT = Path(__file__).resolve().parents[2]
"""The checkout (or installation) of the running program: five folders, of which one is `bench`."""


@dataclass(frozen=True)
class Target:
    """One kernel on one case, on one side."""

    op: str
    kernel: str
    case_id: str
    scheme: str

    @property
    def id(self) -> str:
        """`gemm/packed M=64,N=48,K=32 fp32`."""
        return f"{self.op}/{self.kernel} {self.case_id} {self.scheme}"


@dataclass(frozen=True)
class Side:
    """Where one side's processes run, and what they measure."""

    label: str
    """What a person calls it: a kernel's name, a revision, `working tree`."""
    targets: Mapping[str, Target]
    """By comparison.  A comparison without a target on this side is MISSING."""
    tree: Path = ROOT
    """Folder that holds this side's `kernels`, `reference` and `roofline`."""
    python: str = sys.executable
    commit: str | None = None
    dirty: bool | None = None
    files: tuple[Path, ...] = ()
    """Files that register kernels from outside the tree."""
    slow_down: float = 0.0
    """Time added to every call, as a share of its own: the injected regression of a self-test."""
    functions: Mapping[str, Any] = field(default_factory=dict)
    """For `compare`: what to call, in the form of `functions.pack`; then there are no targets."""
    own_bench: bool = False
    """Whether the tree's own `bench` and `engine` measure it too, and not those of the running program."""


@dataclass(frozen=True)
class Comparison:
    """Sides A (the baseline) and B (the candidate), and the comparisons between them in order."""

    a: Side
    b: Side
    keys: tuple[str, ...]

    def side(self, name: SideName) -> Side:
        """The side called A or B."""
        return self.a if name == "A" else self.b

    def missing(self, key: str) -> str | None:
        """Why `key` cannot be compared: one side has no such kernel."""
        if self.a.functions:
            return None
        have_a, have_b = key in self.a.targets, key in self.b.targets
        if have_a and have_b:
            return None
        if not have_b:
            return f"{self.a.label} has {self.a.targets[key].id}, {self.b.label} has not: removed or renamed"
        return f"{self.b.label} has {self.b.targets[key].id}, {self.a.label} has not: there is no baseline"


Mode = Literal["check", "measure", "list"]


@dataclass(frozen=True)
class Job:
    """What one fresh process is to do; travels as JSON."""

    mode: Mode
    device: str
    seed: int
    budget_s: float
    targets: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    files: Sequence[str] = ()
    slow_down: float = 0.0
    functions: Mapping[str, Any] = field(default_factory=dict)
    timer: str | None = None
    ops: Sequence[str] = ()
    suite: str | None = None
    judge: bool = True
    """Whether what the timed calls left is judged: once a side, because an fp64 oracle can take 8 s."""
