"""flashinfer-bench definitions as checks: kernels of ours against the definition's own reference, on its workloads.

The reference computes in fp32 and rounds, so it errs as a kernel may.  An output may therefore differ from it by twice
what the op's own tolerance allows a kernel against the fp64 oracle.  The oracle itself is judged as well, as the kernel
`(oracle)`: where it differs, the definition means something else than our op, or one of the two is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from rooflab.bench.check.trial import Failed
from rooflab.bench.exchange.flashinfer_draws import repeated
from rooflab.bench.exchange.flashinfer_families import find_family
from rooflab.bench.exchange.flashinfer_files import DataSet, Definition, Workload
from rooflab.bench.exchange.flashinfer_forms import Family, Given, scheme_of
from rooflab.bench.exchange.flashinfer_judge import ORACLE, Judge
from rooflab.bench.exchange.flashinfer_reference import References, make_inputs
from rooflab.bench.records.record import CheckedBy, Status
from rooflab.kernels.precision import pin_matmul_precision
from rooflab.kernels.registry import get_kernel, get_op, kernels
from rooflab.reference.compare import ErrorStats
from rooflab.reference.spec import Outputs, Scheme, get_scheme


@dataclass(frozen=True)
class Options:
    """What to check, and on what."""

    ops: Sequence[str] = ()
    kernels: Sequence[str] = ()
    device: torch.device = torch.device("cpu")
    seed: int = 0
    limit: int = 3
    """Workloads of each definition, smallest first; 0 for all."""
    timeout_s: float = 300.0


@dataclass(frozen=True)
class DefinitionCheck:
    """What came of one kernel on one workload of one definition."""

    definition: str
    workload: str
    axes: Mapping[str, int]
    op: str | None
    kernel: str | None
    scheme: str | None
    status: Status
    reason: str = ""
    checked_by: CheckedBy = "none"
    errors: tuple[ErrorStats, ...] = ()
    weak: tuple[str, ...] = ()
    """Outputs for which zeros would have passed."""
    not_compared: tuple[str, ...] = ()
    """Outputs of the definition that our op does not give."""


def check_definitions(
    dataset: DataSet, options: Options, advance: Callable[[str], None] = lambda text: None
) -> Iterator[DefinitionCheck]:
    """Every kernel of every op that a definition maps to, on its workloads; what cannot be checked has its reason.

    Runs the definitions' reference text.  Raises `ValueError` on a kernel that no op chosen has.
    """
    pin_matmul_precision()
    with References(options.device.type, options.seed, options.timeout_s) as references:
        for definition in dataset.definitions.values():
            family, reason = find_family(definition)
            if options.ops and (family is None or family.op not in options.ops):
                continue
            if family is None:
                yield _unchecked(definition, None, None, reason)
                continue
            listed = sorted(dataset.workloads.get(definition.name, ()), key=lambda each: sum(each.axes.values()))
            if not listed:
                yield _unchecked(definition, None, family, "the data set has no workload of it")
            check = _Check(definition, family, options, dataset.root, references)
            yield from check.run(listed[: options.limit or None], advance)


def _unchecked(
    definition: Definition,
    workload: Workload | None,
    family: Family | None,
    reason: str,
    status: Status = "UNSUPPORTED",
) -> DefinitionCheck:
    uuid, axes = (workload.uuid, workload.axes) if workload else ("", {})
    return DefinitionCheck(definition.name, uuid, axes, family.op if family else None, None, None, status, reason)


@dataclass(frozen=True)
class _Check:
    """The checks of one definition."""

    definition: Definition
    family: Family
    options: Options
    root: Path
    references: References

    def run(self, workloads: Sequence[Workload], advance: Callable[[str], None]) -> Iterator[DefinitionCheck]:
        """Every kernel on each workload."""
        ready: list[tuple[Workload, Given]] = []
        for workload in workloads:
            try:
                seed = self.options.seed
                given = make_inputs(self.definition, workload, self.family, self.root, seed)
                ready.append((workload, repeated(given) if self.family.drawn else given))
            except ValueError as error:
                yield _unchecked(self.definition, workload, self.family, str(error))
        if not ready:
            return
        results = self.references.run(self.definition, [given for _, given in ready])
        for (workload, inputs), expected in zip(ready, results, strict=True):
            if isinstance(expected, str):
                status: Status = "TIMEOUT" if expected.startswith("TIMEOUT: ") else "RUNTIME_ERROR"
                yield _unchecked(self.definition, workload, self.family, expected.removeprefix("TIMEOUT: "), status)
            else:
                yield from self._kernels(workload, inputs, expected)
            advance(f"{self.definition.name} {workload.uuid[:8]}")

    def _kernels(
        self, workload: Workload, given: Given, expected: Mapping[str, torch.Tensor]
    ) -> Iterator[DefinitionCheck]:
        spec = get_op(self.family.op)
        scheme = get_scheme(scheme_of(self.definition)[0])
        device = self.options.device
        on_device = {name: item.to(device) if isinstance(item, torch.Tensor) else item for name, item in given.items()}
        try:
            calls = self.family.calls(self.definition, self.family.given(on_device))
        except ValueError as error:
            yield _unchecked(self.definition, workload, self.family, str(error))
            return
        judge = Judge(self.definition, self.family, spec, scheme, calls, expected)
        wanted = [get_kernel(spec.name, name) for name in self.options.kernels] or list(kernels(spec.name).values())
        yield self._result(workload, scheme, ORACLE, judge, lambda: (judge.oracles, "torch"))
        for kernel in wanted:
            yield self._result(workload, scheme, kernel.name, judge, partial(judge.outputs, kernel, device))

    def _result(
        self,
        workload: Workload,
        scheme: Scheme,
        name: str,
        judge: Judge,
        outputs: Callable[[], tuple[list[Outputs], CheckedBy]],
    ) -> DefinitionCheck:
        status: Status = "OK"
        checked_by: CheckedBy = "none"
        reason = ""
        errors: tuple[ErrorStats, ...] = ()
        try:
            made, checked_by = outputs()
            errors = tuple(judge.errors(made))
            wrong = [error.describe() for error in errors if not error.passed]
            if wrong:
                status, reason = "INCORRECT", f"against the definition's reference: {wrong[0]}"
        except Failed as failed:
            status, reason = failed.status, failed.reason
        return DefinitionCheck(
            definition=self.definition.name,
            workload=workload.uuid,
            axes=dict(workload.axes),
            op=self.family.op,
            kernel=name,
            scheme=scheme.name,
            status=status,
            reason=reason,
            checked_by=checked_by,
            errors=errors,
            weak=judge.weak if status == "OK" else (),
            not_compared=tuple(self.definition.outputs)[self.family.outputs :],
        )
