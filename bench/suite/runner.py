"""The loop over the plan: runs each entry in its own process while the budget lasts, and keeps its outcome at once."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rooflab.bench.processes.child import Child, ChildFailed, Died, Stuck, TimedOut, command_for, environment_without
from rooflab.bench.records.environment import tree_hash
from rooflab.bench.suite import state
from rooflab.bench.suite.entries import Context, Entry, Outcome, plan_hash
from rooflab.bench.suite.running import Running, clear_running, read_running
from rooflab.bench.suite.state import Identity, Progress, outcome_of
from rooflab.roofline.device import identify

LEAST_SHARE = 0.4
"""An entry starts only if this share of its cost is left: entries that measure can use less time."""
ATTEMPTS = 4
"""How often an entry is started; each new attempt excludes the kernel that broke the previous process."""
IMPORTS = ("rooflab.bench.suite.tasks",)
"""What every process imports before the first request: torch and Triton take seconds."""
PROBE = "rooflab.bench.suite.tasks:probe"
IDENTIFY = "rooflab.bench.suite.tasks:identify"
WORKER = "rooflab.bench.suite.worker"
AHEAD = "rooflab.bench.suite.ahead"
HOPPER = (9, 0)
"""The compute capability for which kernels can be compiled ahead."""
PROBE_S = 60.0
DRY_ENTRY_S, DRY_LIMIT_S = 20.0, 180.0
"""An entry of a dry run takes a few seconds; on a busy machine many times that; beyond the limit, it hangs."""
HUNG_S = 60.0
"""A kernel that runs alone for longer hangs, and its entry is ended; one that ran for less when its entry was ended for
time is innocent: the entry was long."""
Say = Callable[[str], None]


@dataclass(frozen=True)
class Settings:
    """The options of a run."""

    out: Path
    budget_s: float
    dry_run: bool = False
    resume: bool = False
    seed: int = 0
    only: tuple[str, ...] = ()
    trust: str = ""
    """Folder of records of first checks that are not made again."""

    @property
    def device(self) -> str:
        return "cpu" if self.dry_run else "cuda"


def run_suite(
    plan: Sequence[Entry], settings: Settings, note: Say, advance: Say, clock: Callable[[], float] = time.monotonic
) -> Progress:
    """Runs `plan` within the budget and returns the final state.

    Raises `ValueError` if the folder holds another run without `resume`, or if the budget is not positive.
    """
    if not settings.budget_s > 0:
        raise ValueError(f"budget: expected seconds above 0, got {settings.budget_s}")
    if state.load(settings.out) is not None and not settings.resume:
        raise ValueError(
            f"out: {settings.out} holds a suite run; add --resume to go on with it, or take another folder"
        )
    run = _Run(plan, settings, clock, note, advance)
    try:
        run.all()
    finally:
        run.end()
    return run.progress


class _Run:
    def __init__(self, plan: Sequence[Entry], settings: Settings, clock: Callable[[], float], note: Say, advance: Say):
        self.plan, self.settings, self.clock = plan, settings, clock
        self.note, self.advance = note, advance
        self.ends = clock() + settings.budget_s
        self.log = settings.out / "suite.log"
        self.current: Child | None = None
        self.spare: Child | None = None
        self.progress = self._begin()
        self.ahead = self._compile_ahead()

    def _begin(self) -> Progress:
        answer = self._ask_first()
        environment, ceilings = dict(answer["environment"]), answer["ceilings"]
        settings = self.settings
        identity = Identity(
            plan_hash(self.plan, dry_run=settings.dry_run, seed=settings.seed),
            environment.get("commit"),
            tree_hash(),
            str(environment["machine_key"]),
        )
        known = state.load(settings.out)
        if known is not None:
            difference = known.identity.difference(identity)
            if difference is None:
                self.note(f"going on: {sum(known.done(entry.id) for entry in self.plan)} of {len(self.plan)} done")
                known.stopped = ""
                if not ceilings and not settings.dry_run and "ceilings" in known.outcomes:
                    del known.outcomes["ceilings"]
                    self.note("no ceilings are kept of this card: they are measured")
                known.environment = environment
                return known
            aside = state.set_aside(settings.out)
            self.note(f"starting anew: {difference}; the earlier state is in {aside.name if aside else 'no file'}")
        options = {"only": list(settings.only), "dry_run": settings.dry_run, "seed": settings.seed}
        titles = {entry.id: entry.title for entry in self.plan}
        return Progress(identity, options, titles=titles, environment=environment)

    def _ask_first(self) -> Mapping[str, Any]:
        """The machine; the process of the first entry answers, because the runner itself uses no device."""
        self.settings.out.mkdir(parents=True, exist_ok=True)
        self.current = self._process()
        try:
            outcome = _ask(self.current, IDENTIFY, {}, self._context("identify", PROBE_S), PROBE_S)
        except ChildFailed as failed:
            self.current = None
            raise ValueError(f"suite: the first process failed: {_why(failed)}; see {self.log}") from failed
        if outcome.status != "DONE":
            raise ValueError(f"suite: {outcome.reason}")
        return outcome.figures

    def _process(self) -> Child:
        environment = dict(os.environ)
        if self.settings.dry_run:
            # A separate cache: ceilings measured for half a second must not be stored as this machine's ceilings.
            environment |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
            environment |= {"ROOFLAB_CACHE": str(self.settings.out.resolve() / "cache")}
        else:
            environment.pop("TRITON_INTERPRET", None)
        return Child(command_for(*IMPORTS, WORKER), environment, log=self.log)

    def _compile_ahead(self) -> Child | None:
        """A process that compiles what is left of the plan, on cores that would be idle."""
        gpu = identify((self.progress.environment.get("gpu") or {}).get("name", ""))
        if self.settings.dry_run or gpu is None or gpu.compute_capability != HOPPER:
            return None
        process = Child(command_for(AHEAD), environment_without("TRITON_INTERPRET"), log=self.log)
        process.post({"entries": [entry.id for entry in self.plan if not self.progress.done(entry.id)]})
        return process

    def _context(
        self, entry_id: str, seconds: float, progress: Progress | None = None, earlier: tuple[str, ...] = ()
    ) -> Context:
        settings = self.settings
        return Context(
            entry=entry_id,
            out=settings.out,
            device=settings.device,
            dry_run=settings.dry_run,
            seconds=seconds,
            seed=settings.seed,
            excluded=progress.excluded() if progress else {},
            verified=progress.verified() if progress else None,
            trust=settings.trust,
            earlier=earlier,
        )

    def all(self) -> None:
        self.progress.save(self.settings.out)
        for entry in self.plan:
            if self.progress.done(entry.id):
                self.advance(entry.id)
                continue
            outcome = self._blocked(entry) or self._unaffordable(entry) or self._one(entry)
            self._keep(entry, outcome)
            self.advance(f"{entry.id}: {outcome.status}")
            if self.progress.stopped:
                break
        for entry in self.plan:
            if entry.id not in self.progress.outcomes:
                self.progress.outcomes[entry.id] = Outcome("NOT_REACHED", self.progress.stopped or "the run ended")
        self.progress.save(self.settings.out)
        state.write_summary(self.settings.out, self.progress)

    def _keep(self, entry: Entry, outcome: Outcome) -> None:
        self.progress.outcomes[entry.id] = outcome
        self.progress.save(self.settings.out)
        if outcome.status == "FAILED":
            self.note(f"{entry.id}: {outcome.reason}")

    def _blocked(self, entry: Entry) -> Outcome | None:
        here = {other.id for other in self.plan}
        for name in entry.needs:
            known = self.progress.outcomes.get(name)
            if name in here and (known is None or known.status not in ("DONE", "PARTIAL")):
                return Outcome("BLOCKED", f"needs {name}, which is {known.status if known else 'not done'}")
        return None

    def _unaffordable(self, entry: Entry) -> Outcome | None:
        left = self.ends - self.clock()
        cost_s = 1.0 if self.settings.dry_run else entry.cost_s
        known = self.progress.outcomes.get(entry.id)
        if left < LEAST_SHARE * cost_s:
            if known is not None and known.status == "PARTIAL":
                return known
            return Outcome("NOT_REACHED", f"{max(left, 0.0):.0f} s of the budget were left, and it takes {cost_s:.0f}")
        return None

    def _one(self, entry: Entry) -> Outcome:
        """Runs one entry.  If a kernel breaks the process, the kernel is excluded and a fresh process does the rest."""
        began = self.clock()
        known = self.progress.outcomes.get(entry.id, Outcome())
        files, lost = known.files, dict(known.excluded)
        for _ in range(ATTEMPTS):
            self.progress.outcomes[entry.id] = Outcome("RUNNING", "begun", files=files, excluded=lost)
            self.progress.save(self.settings.out)
            outcome, at = self._attempt(entry, files)
            if not outcome.again or len(at.kernels) != 1:
                break
            files, lost = at.files, lost | {at.kernels[0]: f"{entry.id}: {outcome.reason}"}
            self.note(f"{entry.id}: goes on without {at.kernels[0]}: {outcome.reason}")
            if self.progress.stopped:
                break
            if self.clock() >= self.ends:
                outcome = Outcome("NOT_REACHED", f"no time was left without {at.kernels[0]}", files=files)
                break
        seconds = round(self.clock() - began, 2)
        return replace(outcome, again=False, excluded=lost | dict(outcome.excluded), seconds=seconds)

    def _attempt(self, entry: Entry, earlier: tuple[str, ...]) -> tuple[Outcome, Running]:
        """The outcome that one process gives for an entry, and what it ran when it broke off; then asks whether the
        device still answers."""
        left = self.ends - self.clock()
        own_limit = DRY_LIMIT_S if self.settings.dry_run else entry.limit_s
        seconds = DRY_ENTRY_S if self.settings.dry_run else min(entry.most_s, left)
        clear_running(self.settings.out)
        process = self._next()
        context = self._context(entry.id, seconds, self.progress, earlier)
        try:
            limit_s = min(own_limit, left)
            outcome = _ask(process, entry.call, entry.arguments, context, limit_s, lambda: self._hangs(entry))
        except ChildFailed as failed:
            self.current = None
            at = read_running(self.settings.out, entry.id)
            blamed = not isinstance(failed, TimedOut) or self._hangs(entry)
            if left < own_limit and self.clock() >= self.ends and not blamed:
                why = "the budget ended under it; what it had recorded is kept"
                return Outcome("NOT_REACHED", why, files=at.files), at
            self._probe()
            return Outcome("FAILED", _during(at, _why(failed)), files=at.files, again=blamed), at
        at = read_running(self.settings.out, entry.id)
        try:
            self._release(process)
        except Stuck as stuck:  # the answer counts, but the process holds the device
            self.note(f"{entry.id}: {_why(stuck)}")
            self._probe()
        if outcome.again:
            outcome = replace(outcome, reason=_during(at, outcome.reason), files=at.files)
        return outcome, at

    def _hangs(self, entry: Entry) -> bool:
        """Whether one kernel, alone, has run for longer than any may; on a busy CPU, all may be slow."""
        at = read_running(self.settings.out, entry.id)
        most_s = DRY_LIMIT_S if self.settings.dry_run else HUNG_S
        return len(at.kernels) == 1 and time.time() - at.began > most_s

    def _next(self) -> Child:
        """A process for the next entry; on a GPU a fresh one, and the process after it starts in the meantime."""
        if self.current is None:
            self.current, self.spare = self.spare or self._process(), None
        if not self.settings.dry_run and self.spare is None:
            self.spare = self._process()
        return self.current

    def _release(self, process: Child) -> None:
        """On a GPU an entry's process ends with the entry; on a CPU, without CUDA context, it serves the next one."""
        if not self.settings.dry_run:
            self.current = None
            process.stop()

    def _probe(self) -> None:
        """Stops the run if the device no longer answers: each later entry would wait until its limit."""
        if self.settings.dry_run:
            return
        probe = self._process()
        try:
            outcome = _ask(probe, PROBE, {}, self._context("probe", PROBE_S), PROBE_S)
            why = outcome.reason if outcome.status != "DONE" else ""
            probe.stop()
        except ChildFailed as failed:
            why = _why(failed)
        if why:
            self.progress.stopped = f"the device no longer answers: {why}"
            self.note(self.progress.stopped)

    def end(self) -> None:
        for process in (self.current, self.spare, self.ahead):
            if process is not None:
                try:
                    process.stop()
                except Stuck as stuck:
                    self.note(_why(stuck))
        self.current = self.spare = self.ahead = None


def _during(at: Running, why: str) -> str:
    """Why a process broke off, with the kernels that ran in it."""
    return f"{why}, while {' and '.join(at.kernels)} ran" if at.kernels else why


def _ask(
    child: Child,
    call: str,
    arguments: Mapping[str, Any],
    context: Context,
    limit_s: float,
    hangs: Callable[[], bool] = lambda: False,
) -> Outcome:
    """The outcome of `call`.  Raises `ChildFailed` if the process dies, or is ended after `limit_s`."""
    told = {name: value for name, value in asdict(context).items() if name != "began"} | {"out": str(context.out)}
    return outcome_of(child.ask({"call": call, "arguments": dict(arguments), "context": told}, limit_s, hangs))


def _why(failed: ChildFailed) -> str:
    if isinstance(failed, Died):
        return f"its process ended with {failed.how} before it answered"
    if isinstance(failed, TimedOut):
        return f"TIMEOUT: it had not answered after {failed.limit_s:.0f} s and was ended"
    return f"TIMEOUT: {failed}"
