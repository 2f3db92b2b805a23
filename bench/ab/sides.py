"""Describes the two sides of an A/B comparison, and chooses them by the names on the command line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch

from rooflab.bench.base.git import ROOT
from rooflab.bench.core import Record, choose_kernels, git_state
from rooflab.kernels import registry
from rooflab.reference.spec import Case, OpSpec, get_scheme

SideName = Literal["A", "B"]
SIDES: tuple[SideName, ...] = ("A", "B")


@dataclass(frozen=True)
class Target:
    """Describes one kernel on one case, on one side of a comparison."""

    op: str
    kernel: str
    case_id: str
    scheme: str

    @property
    def id(self) -> str:
        """Returns the name of the target, such as `gemm/packed M=64,N=48,K=32 fp32`."""
        return f"{self.op}/{self.kernel} {self.case_id} {self.scheme}"

    def record(self, device: str, seed: int) -> Record:
        """Returns a record for this target, in which the run, the machine and the result are still missing."""
        return Record(
            kind="bench",
            run_id="",
            status="OK",
            environment={},
            op=self.op,
            kernel=self.kernel,
            case_id=self.case_id or None,
            case=dict(Case.parse(self.case_id)) if self.case_id else {},
            scheme=self.scheme,
            seed=seed,
            device="cuda" if device.startswith("cuda") else "cpu",
        )


@dataclass(frozen=True)
class Side:
    """Describes one side of a comparison: the source tree of its processes, and the targets that they measure."""

    label: str
    """The side's name in outputs: the name of a kernel, a revision, or `working tree`."""
    targets: Mapping[str, Target]
    """The target of each comparison.  A comparison without a target on this side is MISSING."""
    tree: Path = ROOT
    """The folder that contains this side's `kernels`, `reference` and `roofline`."""
    commit: str | None = None
    dirty: bool | None = None
    files: tuple[Path, ...] = ()
    """The files that register kernels from outside the tree."""
    slow_down: float = 0.0
    """The injected slowdown of a self-test: time added to every call, as a share of the call's time."""
    functions: Mapping[str, Any] = field(default_factory=dict)
    """For `compare`, the functions that are called instead of a kernel, as packed by `compare.pack`."""
    within: Path | None = None
    """The tree of another repository that has the kernels.  With `files`, only kernels that `files` register count."""
    import_path: str = ""
    """The PYTHONPATH of this side's processes, if the kernels are in another repository."""


@dataclass(frozen=True)
class Comparison:
    """Holds side A (the baseline) and side B (the candidate) of an A/B comparison."""

    a: Side
    b: Side

    @property
    def keys(self) -> tuple[str, ...]:
        """Returns the keys (names) of the comparisons, in the order of side A's targets."""
        return tuple(self.a.targets)

    def side(self, name: SideName) -> Side:
        return self.a if name == "A" else self.b

    def missing(self, key: str) -> str | None:
        """Returns the reason if side B lacks the kernel of the comparison `key`, else None."""
        if key in self.b.targets:
            return None
        return f"{self.a.label} has {self.a.targets[key].id}, {self.b.label} has not: removed or renamed"


def largest(spec: OpSpec, cases: Sequence[Case]) -> list[Case]:
    """Returns the case with the most FLOPs and the case with the most bytes.  Often these are one case.

    In a tie, takes the last case.  Matrix products may need both: compute limits one case, and memory the other."""
    scheme = get_scheme(spec.schemes[0])  # dtypes change the bytes of all cases in the same way
    work = {case: spec.cost_of(spec.make_inputs(case, scheme, torch.device("meta"), 0)) for case in reversed(cases)}
    most_flops = max(work, key=lambda case: (work[case].flops, work[case].bytes), default=None)
    most_bytes = max(work, key=lambda case: (work[case].bytes, work[case].flops), default=None)
    return [case for case in cases if case in (most_flops, most_bytes)]


Listings = tuple[Mapping[str, Any], Mapping[str, Any]]
"""The results of `JobRunner.list` for two trees: kernels, cases and schemes by op."""


@dataclass(frozen=True)
class Subset:
    """Selects the ops, kernels, cases and schemes to compare.  An empty field means the field's default."""

    ops: Sequence[str] = ()
    kernels: Sequence[str] = ()
    cases: Sequence[str] = ()
    suite: str | None = None
    schemes: Sequence[str] = ()
    device: str = "cpu"

    @property
    def suite_name(self) -> str:
        return self.suite or ("smollm2_135m" if self.device == "cpu" else "llama3_8b")

    @property
    def scheme_names(self) -> Sequence[str]:
        """Returns the schemes (dtypes) that the caller named, or the engine's scheme on this device."""
        return self.schemes or ("fp32" if self.device == "cpu" else "bf16",)

    def schemes_of(self, schemes: Sequence[str]) -> list[str]:
        """Returns the wanted schemes among an op's `schemes`.  If the caller named no scheme and the op lacks the
        engine's scheme, returns the op's first scheme."""
        named_schemes = [name for name in self.scheme_names if name in schemes]
        return named_schemes if named_schemes or self.schemes else list(schemes[:1])

    def cases_of(self, cases: Sequence[str], largest: Sequence[str], taken: Sequence[str] = ()) -> list[str]:
        """Returns the cases to compare.  If the caller named cases, returns `taken` (the named cases that the op has).
        If the caller named only a suite, returns all its `cases`.  Otherwise returns `largest`."""
        return list(taken if self.cases else cases if self.suite else largest)


def two_kernels(subset: Subset) -> Comparison:
    """Returns the comparison of the first named kernel (side A) with the second.  A named file means the kernels in it.

    Raises `ValueError` unless the names give two kernels of one op, and on an unknown name, case or scheme (dtypes)."""
    has_files = any(name.endswith(".py") for name in subset.kernels)
    is_usable = len(subset.ops) < 2 if has_files else (len(subset.ops), len(subset.kernels)) == (1, 2)
    chosen_kernels = choose_kernels(next(iter(subset.ops), None), subset.kernels) if is_usable else []
    if len(chosen_kernels) != 2 or chosen_kernels[0].op != chosen_kernels[1].op:
        num_kernels = len(chosen_kernels) or len(subset.kernels)
        raise ValueError(f"kernel: expected one op and two different kernels (--kernel twice), got {num_kernels}")
    op = chosen_kernels[0].op
    spec = registry.get_op(op)
    suite_cases = spec.cases_in(subset.suite_name)
    if subset.suite and not suite_cases:
        raise ValueError(f"suite: {op} has {', '.join(spec.cases)}, got {subset.suite!r}")
    case_ids, largest_ids = [case.id for case in suite_cases], [case.id for case in largest(spec, suite_cases)]
    user_case_ids = [spec.check_case(Case.parse(case_text)).id for case_text in subset.cases]
    cases = subset.cases_of(case_ids, largest_ids, user_case_ids)
    schemes = subset.schemes_of(spec.schemes)
    if not schemes:
        raise ValueError(f"scheme: {op} has {', '.join(spec.schemes)}, got {', '.join(subset.schemes)}")
    sides = []
    for kernel in chosen_kernels:
        name, (commit, is_dirty) = kernel.name, git_state(kernel.file or ROOT)
        targets = {f"{op} {case} {scheme}": Target(op, name, case, scheme) for case in cases for scheme in schemes}
        sides.append(Side(name, targets, commit=commit, dirty=is_dirty, files=(kernel.file,) if kernel.file else ()))
    return Comparison(sides[0], sides[1])


def check_names(listed: Listings, subset: Subset) -> None:
    """Raises `ValueError` if the caller named an op, kernel, scheme, case or suite that neither revision has."""
    ops = [side[op] for side in listed for op in side]
    for kind, chosen_names, known_names in (
        ("op", subset.ops, {op for side in listed for op in side}),
        ("kernel", subset.kernels, {name for op in ops for name in op["kernels"]}),
        ("scheme", subset.schemes, {name for op in ops for name in op["schemes"]}),
    ):
        unknown = [name for name in chosen_names if name not in known_names]
        if unknown:
            raise ValueError(f"{kind}: expected one of {', '.join(sorted(known_names)) or 'none'}, got {unknown[0]!r}")
    if subset.cases and not any(op["taken"] for op in listed[0].values()):
        raise ValueError(f"case: expected one that {' or '.join(subset.ops) or 'an op'} has, got {subset.cases[0]!r}")
    if subset.suite and not any(op["cases"] for op in ops):
        raise ValueError(f"suite: expected one that {' or '.join(subset.ops) or 'an op'} has, got {subset.suite!r}")


def two_trees(a: Side, b: Side, listed: Listings, subset: Subset) -> tuple[Comparison, list[str]]:
    """Chooses the kernels and cases to compare between two revisions.  Returns the comparison, and notes on omissions.

    `listed` holds the result of `JobRunner.list` for each revision.  A kernel, case or op of side A is MISSING if side
    B lacks it.  A kernel that only side B has, or that can run on neither side, is not compared."""
    targets: tuple[dict[str, Target], dict[str, Target]] = ({}, {})
    notes = []
    for op in subset.ops or sorted({*listed[0], *listed[1]}):
        op_listings = [
            tree.get(op, {"kernels": {}, "cases": [], "largest": [], "taken": [], "schemes": []}) for tree in listed
        ]
        kernels = {**op_listings[0]["kernels"], **op_listings[1]["kernels"]}
        kernel_names = [name for name in kernels if name in subset.kernels or not subset.kernels]
        cases = subset.cases_of(op_listings[0]["cases"], op_listings[0]["largest"], op_listings[0]["taken"])
        schemes = subset.schemes_of(op_listings[0]["schemes"])
        missing_text = "" if op not in listed[0] else _lack(subset, kernel_names, cases, schemes)
        if missing_text:
            notes.append(f"{op} has nothing to compare: {a.label} has {missing_text} of it")
        for name in kernel_names:
            side_reasons = [side["kernels"].get(name, "absent") for side in op_listings]
            if name not in op_listings[0]["kernels"]:
                notes.append(f"{op}/{name} is new in {b.label}: nothing to compare it with")
                continue
            is_refused = all(side_reasons) and name in op_listings[1]["kernels"]
            if is_refused and not a.within:
                notes.append(f"not timed: {op}/{name}: {side_reasons[1]}")
                continue
            for case in cases[:1] if is_refused else cases:  # of another repository it is checked, in the emulator
                for scheme in schemes[:1] if is_refused else schemes:
                    target = Target(op, name, case, scheme)
                    targets[0][target.id] = target
                    has_case = case in (*op_listings[1]["cases"], *op_listings[1]["taken"])
                    if name in op_listings[1]["kernels"] and scheme in op_listings[1]["schemes"] and has_case:
                        targets[1][target.id] = target
    return Comparison(replace(a, targets=targets[0]), replace(b, targets=targets[1])), notes


def _lack(subset: Subset, names: Sequence[str], cases: Sequence[str], schemes: Sequence[str]) -> str:
    """Returns which kernel, case or scheme an op lacks for a comparison, or an empty text if it lacks nothing."""
    if not names:
        return f"no kernel {' or '.join(subset.kernels)}"
    if not cases:
        return f"no such case as {subset.cases[0]}" if subset.cases else f"no case in {subset.suite_name}"
    return "" if schemes else f"no {' or '.join(subset.scheme_names)} form"
