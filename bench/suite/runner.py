"""Runs the suite's commands until the time budget ends, each in its own process.  Saves each result immediately."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from rooflab.bench.base.statuses import ExitStatus
from rooflab.bench.base.system_time import time
from rooflab.bench.core import Child, ChildFailed, Running
from rooflab.bench.suite import state
from rooflab.bench.suite.entries import Entry, EntryOutcome
from rooflab.bench.suite.state import Progress, folder_of
from rooflab.bench.suite.step import OUTCOME_FILE, read_outcome, step_words, write_json
from rooflab.roofline.device import identify

MIN_COST_SHARE = 0.4
"""An entry starts only if at least this share of its cost is left: entries that measure can use less time."""
MAX_ATTEMPTS = 4
"""The most times that an entry is started.  Each new attempt excludes the kernel that broke the process before."""
WORKER_IMPORTS = ("rooflab.bench.checks.checking", "rooflab.bench.commands")
"""The modules that each process imports before it gets its command; importing torch and Triton takes seconds."""
WORKER_MODULE = "rooflab.bench.suite.suite_worker"
PROBE_COMMAND = ("-m", "rooflab.bench.suite.card_answers", "--probe")
HOPPER = (9, 0)
"""The only compute capability for which kernels can be compiled ahead."""
PROBE_S = 60.0
DRY_ENTRY_S, DRY_ENTRY_LIMIT_S = 20.0, 180.0
"""The cost and the limit of an entry in a dry run.  It takes a few seconds, and far longer on a busy machine."""
MAX_KERNEL_S = 60.0
"""The seconds after which a kernel that runs alone counts as hung, and its entry is ended.  If an entry was ended for
time while its kernel had run for less than this, the kernel is innocent: the entry was too long."""
STATUS_BY_EXIT: dict[int, str] = {ExitStatus.UNDECIDED: "PARTIAL"}
STATUS_BY_EXIT |= dict.fromkeys((ExitStatus.DONE, ExitStatus.INCORRECT, ExitStatus.INVALID), "DONE")
"""By the command's exit status, the status of the entry, by default FAILED.  A wrong kernel and an impossible reading
are results, so their status is DONE."""
TextCallback = Callable[[str], None]


@dataclass(frozen=True)
class SuiteSettings:
    """Holds the user's options for a suite run, such as the folder, the budget and the seed."""

    out: Path
    budget_s: float
    dry_run: bool = False
    resume: bool = False
    seed: int = 0
    only: tuple[str, ...] = ()


def run_suite(
    plan: Sequence[Entry],
    settings: SuiteSettings,
    note: TextCallback,
    advance: TextCallback,
    clock: Callable[[], float] = time.monotonic,
) -> Progress:
    """Runs the entries in `plan` within the time budget.  Returns the results of all entries.

    Raises `ValueError` if the folder holds another run and `resume` is not set.  Also raises `ValueError` if the folder
    holds a run of another kind of machine, or if the budget is not positive."""
    if not settings.budget_s > 0:
        raise ValueError(f"budget: expected seconds above 0, got {settings.budget_s}")
    if (settings.out / state.PLAN).is_file() and not settings.resume:
        raise ValueError(
            f"out: {settings.out} holds a suite run; add --resume to go on with it, or take another folder"
        )
    suite_run = _SuiteRun(plan, settings, clock, note, advance)
    try:
        suite_run.all()
    finally:
        suite_run.end()
    return suite_run.progress


@dataclass
class _SuiteRun:
    plan: Sequence[Entry]
    settings: SuiteSettings
    clock: Callable[[], float]
    note: TextCallback
    advance: TextCallback
    current: Child | None = None
    spare: Child | None = None
    beside: list[Child] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.ends, out = self.clock() + self.settings.budget_s, self.settings.out
        out.mkdir(parents=True, exist_ok=True)
        self.log, self.before = out / "suite.log", state.environment_in(out)
        self.progress = state.load(out, [entry.id for entry in self.plan])
        if self.before:
            self.note(f"going on: {sum(self.progress.done(entry.id) for entry in self.plan)} of {len(self.plan)} done")
        write_json(out / state.PLAN, [entry.to_json() for entry in self.plan])
        self._exclude()

    def all(self) -> None:
        for entry in self.plan:
            if self.progress.done(entry.id) and entry.id != "environment":
                self.advance(entry.id)
                continue
            outcome = self._refused(entry) or self._one(entry)
            self._keep(entry, outcome)
            self.advance(f"{entry.id}: {outcome.status}")
            if entry.id == "environment":
                self._same_machine()
            if self.progress.stopped:
                break
        for entry in self.plan:
            if entry.id not in self.progress.outcomes:
                self.progress.outcomes[entry.id] = EntryOutcome("NOT_REACHED", self.progress.stopped or "the run ended")
        self._summarize()

    def _summarize(self) -> None:
        """Writes the summary of the run. This happens after each entry, because the run may be killed at any time."""
        settings, title_by_entry = self.settings, {entry.id: entry.title for entry in self.plan}
        options = {"only": list(settings.only), "dry_run": settings.dry_run, "seed": settings.seed}
        state.write_summary(settings.out, self.progress, title_by_entry, options)

    def _same_machine(self) -> None:
        """Raises `ValueError` if the run began on another kind of machine. If only the GPU is different, the entries
        that depend on it run again."""
        environment = state.environment_in(self.settings.out)
        if not self.before or not environment:
            return
        for name, field_label in (("machine_key", "machine"), ("tree", "source")):
            if self.before.get(name) != environment.get(name):
                difference_text = f"the {field_label} was {self.before.get(name)} and is {environment.get(name)}"
                if name == "machine_key":
                    write_json(self.settings.out / state.ENVIRONMENT, self.before)
                    raise ValueError(f"out: expected a run of this machine, but {difference_text}; take another folder")
                self.note(f"{difference_text}: what is done stays, and its records name their commit")
        if (self.before.get("gpu") or {}).get("uuid") != (environment.get("gpu") or {}).get("uuid"):
            for entry in self.plan:
                if entry.of_card and entry.id in self.progress.outcomes:
                    del self.progress.outcomes[entry.id]
                    self.note(f"{entry.id}: another card of the kind, so it is done again")

    def _keep(self, entry: Entry, outcome: EntryOutcome) -> None:
        self.progress.outcomes[entry.id] = outcome
        if outcome.status not in ("BLOCKED", "NOT_REACHED"):
            state.save(self.settings.out, entry.id, outcome)
        if outcome.excluded:
            self._exclude()
        self._summarize()
        if outcome.status == "FAILED":
            self.note(f"{entry.id}: {outcome.reason}")

    def _exclude(self) -> None:
        """Writes the excluded kernels to a file. All later processes read it and skip these kernels."""
        write_json(self.settings.out / "excluded.json", self.progress.excluded())

    def _refused(self, entry: Entry) -> EntryOutcome | None:
        """Returns None if an entry can run, else its outcome: a prerequisite is not done or too little time is left."""
        entry_outcomes = self.progress.outcomes
        plan_ids = {planned_entry.id for planned_entry in self.plan}
        for name in entry.needs:
            status = entry_outcomes[name].status if name in entry_outcomes else "not done"
            if name in plan_ids and status not in ("DONE", "PARTIAL"):
                return EntryOutcome("BLOCKED", f"needs {name}, which is {status}")
        budget_left_s, cost_s = self.ends - self.clock(), 1.0 if self.settings.dry_run else entry.cost_s
        if budget_left_s >= MIN_COST_SHARE * cost_s:
            return None
        if entry.id in entry_outcomes and entry_outcomes[entry.id].status == "PARTIAL":
            return entry_outcomes[entry.id]
        return EntryOutcome(
            "NOT_REACHED", f"{max(budget_left_s, 0.0):.0f} s of the budget were left, and it takes {cost_s:.0f}"
        )

    def _one(self, entry: Entry) -> EntryOutcome:
        """Runs one entry of the suite. If a kernel breaks the process, a new process continues without this kernel."""
        if self.settings.dry_run and not entry.dry:
            return EntryOutcome("UNSUPPORTED", "it has no form that is short enough on a CPU")
        if entry.beside:
            return self._start_beside(entry)
        start_s, excluded_kernels = self.clock(), dict[str, str]()
        self._keep(entry, EntryOutcome("RUNNING", "begun", excluded=excluded_kernels))
        for _ in range(MAX_ATTEMPTS):
            outcome, blamed_kernel = self._attempt(entry)
            if not blamed_kernel:
                break
            excluded_kernels[blamed_kernel] = f"{entry.id}: {outcome.reason}"
            self.note(f"{entry.id}: goes on without {blamed_kernel}: {outcome.reason}")
            self._keep(entry, EntryOutcome("RUNNING", "begun", excluded=excluded_kernels))
            if self.progress.stopped:
                break
            if self.clock() >= self.ends:
                outcome = EntryOutcome("NOT_REACHED", f"no time was left without {blamed_kernel}")
                break
        seconds = round(self.clock() - start_s, 2)
        return replace(outcome, excluded=excluded_kernels | dict(outcome.excluded), seconds=seconds)

    def _start_beside(self, entry: Entry) -> EntryOutcome:
        """Starts an entry in the background and does not wait. It ends by itself or with the suite run."""
        gpu = identify((state.environment_in(self.settings.out).get("gpu") or {}).get("name", ""))
        if gpu is None or gpu.compute_capability != HOPPER:
            return EntryOutcome("UNSUPPORTED", "code is compiled ahead for Hopper alone")
        process = self._process()
        process.post(self._request(entry.words, entry.id, entry.cost_s))
        self.beside.append(process)
        return EntryOutcome("DONE", "it runs beside the entries that follow")

    def _attempt(self, entry: Entry) -> tuple[EntryOutcome, str]:
        """Runs an entry in one process. Returns its outcome, and the kernel that broke the process, or "".

        If the process broke or did not end, tests whether the device still works."""
        settings, remaining_s = self.settings, self.ends - self.clock()
        entry_limit_s = DRY_ENTRY_LIMIT_S if settings.dry_run else entry.limit_s
        seconds = DRY_ENTRY_S if settings.dry_run else min(entry.most_s, remaining_s)
        folder = folder_of(settings.out, entry.id)
        (folder / OUTCOME_FILE).unlink(missing_ok=True)
        self._note_path().unlink(missing_ok=True)
        command_words = entry.dry if settings.dry_run else entry.words
        process = self._next()
        try:
            step_request = self._request(command_words, entry.id, seconds)
            status = process.ask(step_request, min(entry_limit_s, remaining_s), self._hangs)["status"]
        except ChildFailed as failed:
            self.current = None
            run_state = Running.read(self._note_path())
            is_blamed = len(run_state.kernels) == 1 and (failed.limit_s is None or self._hangs())
            if remaining_s < entry_limit_s and self.clock() >= self.ends and not is_blamed:
                return EntryOutcome("NOT_REACHED", "the budget ended under it; what it had recorded is kept"), ""
            self._probe()
            return EntryOutcome("FAILED", _during(run_state, _why(failed))), run_state.kernels[0] if is_blamed else ""
        run_state = Running.read(self._note_path())
        try:
            if not settings.dry_run:  # which keeps the process: it has no CUDA context to break
                self.current = None
                process.stop()
        except ChildFailed as stuck:  # the answer counts, but the process holds the device
            self.note(f"{entry.id}: {_why(stuck)}")
            self._probe()
        if status == ExitStatus.BROKEN:
            self._probe()
            fail_reason = _during(run_state, "it broke the CUDA context")
            return EntryOutcome("FAILED", fail_reason), run_state.kernels[0] if len(run_state.kernels) == 1 else ""
        return self._judged(entry, folder, status), ""

    def _judged(self, entry: Entry, folder: Path, status: int) -> EntryOutcome:
        """Returns the outcome that the entry's process wrote, or derives one from the exit status and the records."""
        outcome = read_outcome(folder / OUTCOME_FILE)
        kernel_failures, statuses = state.wrong_in(folder)
        if outcome is None:
            entry_status = STATUS_BY_EXIT.get(status, "FAILED")
            run_figures: dict[str, object] = {"exit status": status} | ({"records": dict(statuses)} if statuses else {})
            log_line = self.log.read_text(errors="replace").strip().splitlines()[-1:] if entry_status != "DONE" else []
            fail_reason = "; ".join([*kernel_failures.values()][:5] or log_line)[-500:]
            outcome = EntryOutcome(entry_status, fail_reason, figures=run_figures)  # type: ignore[arg-type]
        outcome_figures = dict(outcome.figures) | ({"invalid": statuses["INVALID"]} if statuses["INVALID"] else {})
        excluded_kernels = {} if entry.searches else kernel_failures
        return replace(outcome, figures=outcome_figures, excluded=excluded_kernels | dict(outcome.excluded))

    def _request(self, words: Sequence[str], entry_id: str, seconds: float) -> dict[str, object]:
        settings = self.settings
        folder = folder_of(settings.out, entry_id)
        folder.mkdir(parents=True, exist_ok=True)
        value_by_field = {"{out}": str(folder), "{run}": str(settings.out), "{seconds}": f"{max(seconds, 0.1):g}"}
        value_by_field["{seed}"] = str(settings.seed)
        arguments = list(words)
        for field_placeholder, field_value in value_by_field.items():
            arguments = [command_word.replace(field_placeholder, field_value) for command_word in arguments]
        environment = Running.variable(self._note_path()) | {"ROOFLAB_EXCLUDE": str(settings.out / "excluded.json")}
        return {"words": arguments, "environment": environment}

    def _note_path(self) -> Path:
        return self.settings.out / "running.json"

    def _process(self) -> Child:
        environment: dict[str, str | None] = {"TRITON_INTERPRET": None}
        if self.settings.dry_run:
            # A separate cache: ceilings measured for half a second must not be stored as this machine's ceilings.
            environment = {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
            environment |= {"ROOFLAB_CACHE": str(self.settings.out.resolve() / "cache")}
        return Child(*WORKER_IMPORTS, WORKER_MODULE, environment=environment, log=self.log)

    def _hangs(self) -> bool:
        """Tells whether one kernel runs alone and longer than its time limit. Returns False while several kernels run
        at once, because they may only slow each other down."""
        run_state = Running.read(self._note_path())
        time_limit_s = DRY_ENTRY_LIMIT_S if self.settings.dry_run else MAX_KERNEL_S
        return len(run_state.kernels) == 1 and time.time() - run_state.began > time_limit_s

    def _next(self) -> Child:
        """Returns the process for the next entry. On a GPU, also starts a spare process for the entry after that."""
        if self.current is None:
            self.current, self.spare = self.spare or self._process(), None
        if not self.settings.dry_run and self.spare is None:
            self.spare = self._process()
        return self.current

    def _probe(self) -> None:
        """Tests whether the device works, and stops the run if not. Later entries would only hit their time limits."""
        if self.settings.dry_run:
            return
        probe_process, fail_reason = self._process(), ""
        try:
            step_request = self._request(step_words(PROBE_COMMAND), "environment", PROBE_S)
            status = probe_process.ask(step_request, PROBE_S)["status"]
            outcome = read_outcome(folder_of(self.settings.out, "environment") / OUTCOME_FILE)
            fail_reason = (outcome.reason if outcome else "") or f"exit status {status}" if status else ""
            probe_process.stop()
        except ChildFailed as failed:
            fail_reason = _why(failed)
        if fail_reason:
            self.progress.stopped = f"the device no longer answers: {fail_reason}"
            self.note(self.progress.stopped)

    def end(self) -> None:
        for process in (self.current, self.spare, *self.beside):
            if process is not None:
                try:
                    process.stop()
                except ChildFailed as stuck:
                    self.note(_why(stuck))
        self.current = self.spare = None


def _during(at: Running, why: str) -> str:
    """Adds the names of the running kernels to the reason why a process ended early."""
    return f"{why}, while {' and '.join(at.kernels)} ran" if at.kernels else why


def _why(failed: ChildFailed) -> str:
    if failed.limit_s is not None:
        return f"TIMEOUT: it had not answered after {failed.limit_s:.0f} s and was ended"
    return f"TIMEOUT: {failed}" if failed.status is None else str(failed)
