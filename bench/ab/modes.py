"""Runs the modes of `rooflab ab`: two kernels, two revisions, record files, and the self-test."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rooflab.bench.ab import evidence, output
from rooflab.bench.ab.ab_run import run, save
from rooflab.bench.ab.pairs import AbSettings, JobRunner
from rooflab.bench.ab.self_test import KERNELS, self_test
from rooflab.bench.ab.sides import Comparison, Listings, Side, Subset, check_names, two_kernels, two_trees
from rooflab.bench.ab.verdict import Outcome, Rules, exit_status
from rooflab.bench.base.git import ROOT
from rooflab.bench.base.statuses import ExitStatus
from rooflab.bench.core import choose_kernels
from rooflab.bench.revisions.changes import touched_files, touched_ops, users
from rooflab.bench.revisions.repository import files_in, import_path, repository_of
from rooflab.bench.revisions.trees import changed_files, check_contract, checked_out, pins, working_tree
from rooflab.roofline.numbers import change

Printer = Callable[[str], None]


@dataclass
class AbReport:
    """Holds the results that the command `rooflab ab` shows."""

    title: str
    tables: Sequence[tuple[str, Sequence[Outcome]]]
    notes: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    """The wrong verdicts of a self-test.  If there are any, the verdicts decide nothing."""
    saw_nothing: bool = False
    """Whether a self-test did not detect its own injected slowdown."""
    judged: bool = True
    """Whether the outcomes decide the exit status.  False in a self-test, and if the difference affects no kernel."""

    @property
    def outcomes(self) -> list[Outcome]:
        return [outcome for _, outcomes in self.tables for outcome in outcomes]

    def exit_status(self, strict: bool) -> ExitStatus:
        """Returns the exit status, as in `verdict.EXIT_STATUS`.  A self-test with a wrong verdict is INCORRECT.  With
        `strict`, a self-test that did not detect the injected slowdown is UNDECIDED.
        """
        if self.faults:
            return ExitStatus.INCORRECT
        if self.judged:
            return exit_status(self.outcomes, strict)
        return ExitStatus.UNDECIDED if strict and self.saw_nothing else ExitStatus.DONE

    def write(self, junit: Path | None, markdown: Path | None, strict: bool) -> None:
        if junit is not None:
            output.write_junit(junit, self.outcomes, strict)
        if markdown is not None:
            output.write_markdown(markdown, self.title, self.outcomes, [*self.faults, *self.notes])

    def as_mapping(self) -> dict[str, Any]:
        tables = {title: [output.as_mapping(outcome) for outcome in outcomes] for title, outcomes in self.tables}
        return {"title": self.title, "tables": tables, "notes": self.notes, "faults": self.faults}


def of_kernels(subset: Subset, settings: AbSettings, out: Path | None, say: Printer) -> AbReport:
    """Compares two kernels of one op in this source tree."""
    return _ran(two_kernels(subset), settings, out, say, [])


def of_revisions(
    base: str, head: str | None, changed: bool, subset: Subset, settings: AbSettings, out: Path | None, say: Printer
) -> AbReport:
    """Compares the kernels of the git revision `base` with the kernels of `head`, or of the working tree.

    With `changed`, compares only the ops that the changed files affect.  `subset` may name kernel files of another
    repository.  Raises `ValueError` if a revision is unknown or cannot be imported."""
    kernel_files = [name for name in subset.kernels if name.endswith(".py")]
    subset = replace(subset, kernels=[name for name in subset.kernels if name not in kernel_files])
    repository = repository_of(kernel_files, ROOT)
    root = repository or ROOT
    with ExitStack() as exit_stack:
        a = exit_stack.enter_context(checked_out(root, base))
        b = exit_stack.enter_context(checked_out(root, head)) if head else working_tree(root)
        for option_name, side in (("base", a), ("head", b)) if repository is None else ():
            check_contract(side.path, side.label, option_name)
        first_side, second_side = (Side(t.label, {}, t.path, commit=t.commit, dirty=t.dirty) for t in (a, b))
        if repository:
            side_files = files_in((a.path, b.path), repository, kernel_files)
            first_side, second_side = (
                replace(side, tree=ROOT, files=paths, within=side.tree, import_path=import_path(repository, side.tree))
                for side, paths in zip((first_side, second_side), side_files, strict=True)
            )
        runner = JobRunner(Comparison(first_side, second_side), settings)
        side_listings = runner.list("A", subset, "base"), runner.list("B", subset, "head")
        if repository and not any(side_listings):
            raise ValueError(f"kernel: expected a file, or an installed package, of {root.name} with kernels, got none")
        check_names(side_listings, subset)
        title = f"{a.label} against {b.label}"
        if changed:
            changed_paths = changed_files(root, str(a.commit), b.commit if head else None)
            ops = _touched(changed_paths, side_listings, (a.path, b.path), repository)
            ops = [op for op in ops if not subset.ops or op in subset.ops]
            if not ops:
                return AbReport(title, [], ["the difference touches no kernel"], judged=False)
            subset = replace(subset, ops=ops)
        comparison, notes = two_trees(first_side, second_side, side_listings, subset)
        if pins(a.path) != pins(b.path):
            notes.append("the two pin other packages: both ran in this environment")
        return _ran(comparison, settings, out, say, notes)


def _touched(changed: Sequence[str], listed: Listings, trees: tuple[Path, Path], repository: Path | None) -> list[str]:
    """Returns the ops, on either side of the comparison, that the changed files affect."""
    ops = sorted({*listed[0], *listed[1]})
    if repository is None:
        return touched_ops(changed, ops, users(trees, ops))
    files_by_op = {op: {file for side in listed if op in side for file in side[op]["files"]} for op in ops}
    touched_paths = touched_files(changed, set().union(*files_by_op.values()), trees, repository)
    return [op for op in ops if files_by_op[op] & touched_paths]


def of_records(files: Sequence[Path], rules: Rules, subset: Subset) -> AbReport:
    """Compares two files or folders of records.  Raises `ValueError` if `subset` names anything except kernels."""
    choice_by_option = {"op": subset.ops, "--case": subset.cases, "--scheme": subset.schemes, "--suite": subset.suite}
    used_options = [name for name, option_value in choice_by_option.items() if option_value]
    if used_options:
        raise ValueError(f"records: expected no {' and no '.join(used_options)} beside them, which are compared whole")
    if len(files) != 2:
        raise ValueError(f"records: expected two files or folders (--records twice), got {len(files)}")
    outcomes = evidence.compare_files(files[0], files[1], rules, subset.kernels)
    new_keys = [] if subset.kernels else evidence.only_in(files[0], files[1])
    notes = [f"{key} is only in {files[1]}: nothing to compare it with" for key in new_keys]
    title = f"{files[0]} against {files[1]}"
    return AbReport(title, [(title, outcomes)], notes)


def of_self_test(
    subset: Subset, settings: AbSettings, repeats: int, inject: float | None, out: Path | None, say: Printer
) -> AbReport:
    """Tests the A/B method itself: compares identical code, and then identical code that is slowed on purpose."""
    if repeats < 1:
        raise ValueError(f"repeats: expected at least 1, got {repeats}")
    if inject is not None and not 0 < inject <= 10:
        raise ValueError(f"inject: expected a share of the time above 0 and up to 10, got {inject:g}")
    ops: Sequence[str | None] = subset.ops or ((None,) if subset.kernels else ())
    chosen_kernels = [kernel for op in ops for kernel in choose_kernels(op, subset.kernels or ("library",))]
    kernel_names = [(kernel.op, kernel.name) for kernel in chosen_kernels] or KERNELS
    files = tuple(dict.fromkeys(kernel.file for kernel in chosen_kernels if kernel.file))
    scheme_name = subset.schemes[0] if subset.schemes else ("fp32" if settings.device == "cpu" else "bf16")
    test_result = self_test(
        kernel_names, settings, subset.suite_name, scheme_name, repeats=repeats, slow_down=inject, done=say, files=files
    )
    if out is not None:
        for result in test_result.repeats:  # A reading of a kernel that was slowed on purpose is not kept.
            save(result, out)
    slowdown_text = f"slowed by {test_result.slow_down:.0%}"
    tables = [(f"A against A, run {run_no}", result.outcomes) for run_no, result in enumerate(test_result.repeats, 1)]
    tables.append((f"A against A {slowdown_text}", test_result.injected.outcomes))
    floor_texts = {key: "not measured" if floor is None else change(floor) for key, floor in test_result.floors.items()}
    notes = [f"noise floor of {key}: {floor}" for key, floor in floor_texts.items()]
    if test_result.saw_nothing:
        notes.append(f"none {slowdown_text} was called SLOWER: these pairs could see nothing")
    notes += [result.stopped for result in (*test_result.repeats, test_result.injected) if result.stopped]
    return AbReport("self-test of the A/B", tables, notes, test_result.faults, test_result.saw_nothing, judged=False)


def _ran(comparison: Comparison, settings: AbSettings, out: Path | None, say: Printer, notes: list[str]) -> AbReport:
    ab_result = run(comparison, settings, say)
    notes += [f"not timed: {key}: {reason}" for key, reason in ab_result.left_out.items()]
    notes += [f"records: {path}" for path in save(ab_result, out)] if out is not None else []
    notes += [ab_result.stopped] if ab_result.stopped else []
    if ab_result.outcomes and all(outcome.noise_floor is None for outcome in ab_result.outcomes):
        notes.append("noise floor of this machine: not measured (rooflab ab --self-test measures it)")
    a, b = comparison.a.label, comparison.b.label
    return AbReport(f"{a} against {b}", [(f"A = {a}, B = {b}", ab_result.outcomes)], notes)
