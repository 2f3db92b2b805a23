"""From what the command line names to the two sides and their comparisons."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rooflab.bench.ab.revisions import Tree
from rooflab.bench.ab.sides import Comparison, Side, Target
from rooflab.kernels import registry
from rooflab.reference.spec import Case


@dataclass(frozen=True)
class Wanted:
    """What is to be compared: ops, kernels, cases and schemes; empty means the default of each."""

    ops: Sequence[str] = ()
    kernels: Sequence[str] = ()
    cases: Sequence[str] = ()
    suite: str | None = None
    schemes: Sequence[str] = ()
    device: str = "cpu"
    files: tuple[Path, ...] = ()

    @property
    def suite_name(self) -> str:
        """The suite whose cases are compared."""
        return self.suite or ("smollm2_135m" if self.device == "cpu" else "llama3_8b")

    def schemes_of(self, schemes: Sequence[str]) -> list[str]:
        """Of the schemes that an op has, those wanted, or the one that the engine uses on this device."""
        wanted = self.schemes or ("fp32" if self.device == "cpu" else "bf16",)
        return [name for name in wanted if name in schemes]

    def cases_of(self, cases: Sequence[str]) -> list[str]:
        """The cases named, those of the suite named, or the suite's last, which is its largest."""
        if self.cases:
            return list(self.cases)
        return list(cases) if self.suite else list(cases)[-1:]


def two_kernels(wanted: Wanted) -> Comparison:
    """Side A with the first kernel named, side B with the second.

    Raises `ValueError` on other than one op and two kernels, or on a name, case or scheme that is not there.
    """
    if len(wanted.ops) != 1 or len(wanted.kernels) != 2:
        raise ValueError(f"kernel: expected one op and two kernels (--kernel twice), got {len(wanted.kernels)}")
    op = wanted.ops[0]
    spec = registry.get_op(op)
    known = [case.id for case in spec.cases.get(wanted.suite_name, ())]
    if wanted.suite and not known:
        raise ValueError(f"suite: {op} has {', '.join(spec.cases)}, got {wanted.suite!r}")
    cases = [spec.check_case(Case.parse(text)).id for text in wanted.cases_of(known)]
    schemes = wanted.schemes_of(spec.schemes)
    if not schemes:
        raise ValueError(f"scheme: {op} has {', '.join(spec.schemes)}, got {', '.join(wanted.schemes)}")
    sides = []
    for name in wanted.kernels:
        registry.get_kernel(op, name)
        targets = {f"{op} {case} {scheme}": Target(op, name, case, scheme) for case in cases for scheme in schemes}
        sides.append(Side(name, targets, files=wanted.files))
    return Comparison(sides[0], sides[1], tuple(sides[0].targets))


def two_trees(
    a: Tree, b: Tree, listed: tuple[Mapping[str, Any], Mapping[str, Any]], wanted: Wanted, own_bench: bool = False
) -> tuple[Comparison, list[str]]:
    """The kernels of two revisions, and why some are left out.

    `listed` is what `Runner.list` says of each.  What A has decides: a kernel, case or op that B has no more is
    MISSING.  A kernel that only B has is new and has nothing to be compared with; one that can run on neither side is
    left out by name.
    """
    targets: tuple[dict[str, Target], dict[str, Target]] = ({}, {})
    notes = []
    for op in wanted.ops or sorted({*listed[0], *listed[1]}):
        sides = [found.get(op, {"kernels": {}, "cases": [], "schemes": []}) for found in listed]
        names = [name for name in {**sides[0]["kernels"], **sides[1]["kernels"]} if _is_wanted(name, wanted)]
        for name in names:
            reasons = [side["kernels"].get(name, "absent") for side in sides]
            if name not in sides[0]["kernels"]:
                notes.append(f"{op}/{name} is new in {b.label}: nothing to compare it with")
                continue
            if all(reasons) and name in sides[1]["kernels"]:
                notes.append(f"{op}/{name} cannot run here: {reasons[1]}")
                continue
            for case in wanted.cases_of(sides[0]["cases"]):
                for scheme in wanted.schemes_of(sides[0]["schemes"]):
                    target = Target(op, name, case, scheme)
                    targets[0][target.id] = target
                    known = case in sides[1]["cases"] or bool(wanted.cases)
                    if name in sides[1]["kernels"] and scheme in sides[1]["schemes"] and known:
                        targets[1][target.id] = target
    first, second = (
        Side(tree.label, found, tree.path, tree.python, tree.commit, tree.dirty, own_bench=own_bench)
        for tree, found in zip((a, b), targets, strict=True)
    )
    return Comparison(first, second, tuple(targets[0])), notes


def _is_wanted(name: str, wanted: Wanted) -> bool:
    return not wanted.kernels or name in wanted.kernels
