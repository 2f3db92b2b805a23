"""A target: a text, a condition, the command that judges it, and its cost.

Each other file here holds `TARGETS`, a tuple of targets; there is no common list.  A target with a common measure
(`measures.against_library`, `measures.of_bandwidth`) is data alone.  Any other target names a function of its own file,
which takes a `Context` and the target's arguments and returns an `EntryOutcome`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from rooflab.bench.suite.entries import Entry, EntryOutcome
from rooflab.bench.suite.step import step_words


class AcceptanceTarget(NamedTuple):
    """A target, or a measurement that is not part of the lab's own plan."""

    id: str
    text: str
    call: Callable[..., EntryOutcome]
    arguments: Mapping[str, Any]
    cost_s: float
    value: float
    ops: tuple[str, ...] = ()
    checks: tuple[str, ...] = ()
    """Other ops whose kernels the target runs."""
    on_cpu: bool = True
    """Whether a dry run on a CPU runs the target."""
    searches: bool = False
    """Whether the target tries configs."""

    @property
    def cases(self) -> dict[str, list[str]]:
        """The cases that the target's arguments name, by op."""
        about, found = self.arguments, dict[str, list[str]]()
        op = str(about.get("op", ""))
        least = about.get("least")
        own = [*about.get("cases", ()), *(least if isinstance(least, Mapping) else ())]
        own += [about[name] for name in ("case", "even", "ragged") if name in about]
        for text in own:
            found.setdefault(op, []).append(text)
        for paged, dense in about.get("pairs", {}).items():
            found.setdefault(op, []).append(paged)
            found.setdefault("flash_attention", []).append(dense)
        return found

    @property
    def entry(self) -> Entry:
        """The target as an entry of the suite's plan."""
        rungs, scheme = list(self.arguments.get("rungs", ())), self.arguments.get("scheme", "bf16")
        launches = ({"op": op, "cases": cases, "scheme": scheme} for op, cases in self.cases.items())
        words = ("{here}/judge.py", self.id)
        return Entry(
            self.id,
            self.text,
            step_words(words),
            self.cost_s,
            self.value,
            step_words(words, dry=True) if self.on_cpu else (),
            after=("ceilings",),
            ops=self.ops,
            checks=self.checks,
            searches=self.searches,
            launches=tuple(one | ({"kernels": rungs} if rungs else {}) for one in launches),
        )


def target(
    id: str, text: str, call: Callable[..., EntryOutcome], *more_ops: str, cost_s: float, value: float, **arguments: Any
) -> AcceptanceTarget:
    """Makes a target about kernels of `more_ops` and of the op that begins its id; `call` gets op and arguments."""
    op = id.partition(".")[0]
    return AcceptanceTarget(f"bar:{id}", text, call, {"op": op, **arguments}, cost_s, value, (op, *more_ops))
