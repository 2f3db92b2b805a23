"""flashinfer-bench definitions as checks: kernels of ours against the definition's own reference, on its workloads.

The reference computes in fp32 and rounds, so it errs as a kernel may.  An output may therefore differ from it by twice
what the op's own tolerance allows a kernel against the fp64 oracle.  The oracle itself is judged as well, as the kernel
`(oracle)`: where it differs, the definition means something else than our op, or one of the two is wrong.  Samplers
need not agree on a token: they must agree on how often they give it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

import torch
from scipy import stats

from rooflab.bench.check.poison import poisoned_allocations
from rooflab.bench.check.trial import Data, Failed, prepare, run
from rooflab.bench.exchange.flashinfer_families import Family, Given, find_family, scheme_of
from rooflab.bench.exchange.flashinfer_files import DataSet, Definition, Workload
from rooflab.bench.exchange.flashinfer_reference import References, make_inputs
from rooflab.bench.records.record import CheckedBy, Status
from rooflab.kernels.precision import pin_matmul_precision
from rooflab.kernels.registry import Kernel, get_kernel, get_op, interpreting, kernels
from rooflab.reference.compare import ErrorStats, elementwise
from rooflab.reference.distribution import FALSE_ALARM, smallest_effect
from rooflab.reference.spec import Inputs, OpSpec, Outputs, Scheme, get_scheme

ROWS = 2
"""Distributions of a workload that are compared."""
DRAWS, LEAST_DRAWS = 2048, 64
"""Draws of each, fewer where the vocabulary is large."""
ELEMENTS = 2**22
POOLED = 10
"""Draws of both together that a cell has at least, so that 5 of each are expected."""
CELLS = 32


def repeated(given: Mapping[str, torch.Tensor | float]) -> dict[str, torch.Tensor | float]:
    """A sampling workload's first rows, each as often as it is to be drawn from, one after the other."""
    probs = given["probs"]
    assert isinstance(probs, torch.Tensor), "a sampling definition has a tensor of probabilities"
    rows = min(ROWS, len(probs))
    draws = max(LEAST_DRAWS, min(DRAWS, ELEMENTS // max(1, rows * probs.shape[1])))
    return {
        name: value[:rows].repeat_interleave(draws, dim=0) if isinstance(value, torch.Tensor) and value.ndim else value
        for name, value in given.items()
    }


def same_law(name: str, ours: torch.Tensor, theirs: torch.Tensor, probs: torch.Tensor) -> ErrorStats:
    """Whether two sets of draws (N,) look drawn from one law per distinct row of `probs` (N, V), all together.

    Tokens of neighbouring rank by probability are pooled to cells; the statistic of a row is Pearson's for two equal
    samples, sum (a - b)^2 / (a + b), and those of the rows are added.  A right pair fails once in 1 / `FALSE_ALARM`.
    `note` says the least departure, as Cohen's w, that would have been found with probability 0.99.
    """
    if ours.shape != theirs.shape:
        note = f"expected shape {tuple(theirs.shape)}, got {tuple(ours.shape)}"
        return ErrorStats(name, False, float("nan"), float("inf"), ours.numel(), theirs.numel(), note=note)
    ours, theirs, probs = (value.cpu() for value in (ours, theirs, probs))
    if ours.numel() and not 0 <= int(ours.min()) <= int(ours.max()) < probs.shape[1]:
        return ErrorStats(name, False, float("nan"), float("inf"), 1, ours.numel(), note="a token out of range")
    statistic, freedom, moved = 0.0, 0, 0.0
    starts = [0, *(1 + torch.nonzero((probs[1:] != probs[:-1]).any(dim=1)).flatten()).tolist(), len(probs)]
    for begin, end in zip(starts[:-1], starts[1:], strict=True):
        first, second = (_counts(tokens[begin:end], probs[begin]) for tokens in (ours, theirs))
        cells = _pooled(first, second, max(POOLED, 2 * (end - begin) // CELLS))
        statistic += sum((a - b) ** 2 / (a + b) for a, b in cells)
        freedom += len(cells) - 1
        moved = max(moved, sum(abs(a - b) for a, b in cells) / (2 * (end - begin)))
    if freedom < 1:  # one token alone is possible: then it is the same one
        wrong = int((ours != theirs).sum())
        return ErrorStats(name, wrong == 0, float(wrong), float(wrong), wrong, ours.numel())
    critical = float(stats.chi2.isf(FALSE_ALARM, freedom))
    draws = len(probs) // max(1, len(starts) - 1)
    # Two samples of n draws tell as much as one of n / 2 against a law that is known.
    effect = smallest_effect(draws // 2, freedom)
    note = f"total variation {moved:.2g} over {freedom} degrees of freedom; a departure of w >= {effect:.2g} is seen"
    return ErrorStats(name, statistic <= critical, moved, statistic / critical, 0, ours.numel(), note=note)


def _counts(tokens: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
    """How often each token was drawn, the most probable first, (V,)."""
    counts = torch.bincount(tokens.long(), minlength=len(probs))
    return counts[torch.argsort(probs, descending=True, stable=True)]


def _pooled(ours: torch.Tensor, theirs: torch.Tensor, least: int) -> list[tuple[int, int]]:
    """Neighbours joined to cells of at least `least` draws of both; the last takes what is left."""
    cells: list[tuple[int, int]] = []
    a = b = 0
    drawn = torch.nonzero(ours + theirs).flatten()
    for more_a, more_b in zip(ours[drawn].tolist(), theirs[drawn].tolist(), strict=True):
        a, b = a + more_a, b + more_b
        if a + b >= least:
            cells.append((a, b))
            a = b = 0
    if a + b and cells:
        last = cells.pop()
        a, b = a + last[0], b + last[1]
    return [*cells, (a, b)] if a + b else cells


ORACLE = "(oracle)"
"""Stands for our op itself in the place of a kernel's name."""
TWICE = 2.0
"""A kernel and the reference may each be off by the op's tolerance."""
INTERPRETED_FLOPS, INTERPRETED_BYTES, INTERPRETED_ROWS = 1e9, 2e7, 512
"""Work beyond which Triton's interpreter takes minutes."""
INTERPRETER_BF16 = "Triton's interpreter computes bf16 dot and sort wrongly"
TOO_MUCH = "Triton's interpreter would take minutes for it; a GPU can check it"


@dataclass(frozen=True)
class Judge:
    """What a workload asks for, and what must come of it."""

    definition: Definition
    family: Family
    spec: OpSpec
    scheme: Scheme
    calls: Sequence[Inputs]
    expected: Mapping[str, torch.Tensor]
    """The reference's outputs by name, on the CPU."""

    @cached_property
    def oracles(self) -> list[Outputs]:
        """The fp64 oracle's outputs of each call."""
        return [self.spec.oracle(inputs) for inputs in self.calls]

    @cached_property
    def limits(self) -> Outputs:
        """Twice the op's tolerance, for each output of the definition that is compared."""
        assert self.spec.tolerance is not None, "ops whose outputs are not drawn have one"
        pairs = zip(self.calls, self.oracles, strict=True)
        joined = self.family.join([self.spec.tolerance(inputs, oracle, self.scheme) for inputs, oracle in pairs])
        return tuple(TWICE * limit.detach().cpu().double() for limit in joined)

    @property
    def names(self) -> tuple[str, ...]:
        """The definition's outputs that are compared."""
        return tuple(self.definition.outputs)[: self.family.outputs]

    def errors(self, made: Sequence[Outputs]) -> list[ErrorStats]:
        """One verdict per output that is compared."""
        outputs = self.family.join(list(made))
        if self.family.drawn:
            probs = self.calls[0]["logits"].exp()
            pairs = zip(self.names, outputs, strict=True)
            return [same_law(name, output, self.expected[name].reshape(-1), probs) for name, output in pairs]
        found = []
        for name, output, limit in zip(self.names, outputs, self.limits, strict=False):  # ours may give more
            wanted = self.expected[name].double()
            slack = self.family.slack * self.scheme.unit_roundoff * wanted.abs()
            found.append(elementwise(name, output, wanted, limit + slack))
        return found

    @cached_property
    def weak(self) -> tuple[str, ...]:
        """Outputs for which zeros would have passed."""
        if self.family.drawn:
            return ()
        zeros = [tuple(torch.zeros_like(output) for output in oracle) for oracle in self.oracles]
        return tuple(f"{error.output}: zeros" for error in self.errors(zeros) if error.passed and error.total)

    def outputs(self, kernel: Kernel, device: torch.device) -> tuple[list[Outputs], CheckedBy]:
        """What a kernel gives for each call, and what ran it.  Raises `Failed` where it cannot run or does wrong."""
        refusal = kernel.why_not_here(device)
        if refusal:
            raise Failed(refusal.status, refusal.reason)
        if self.scheme.name not in self.spec.schemes:
            raise Failed("UNSUPPORTED", f"{self.spec.name} has the schemes {', '.join(self.spec.schemes)}")
        interpreted = kernel.backend in ("triton", "gluon") and interpreting()
        if interpreted:
            self._refuse_interpreter()
        found = []
        for inputs, oracle in zip(self.calls, self.oracles, strict=True):
            unfit = kernel.why_not_args(inputs, self.spec)
            if unfit:
                raise Failed(unfit.status, unfit.reason)
            data = Data(inputs, oracle) if kernel.prepare is None else prepare(kernel, self.spec, inputs, self.scheme)
            with poisoned_allocations():
                found.append(run(kernel, self.spec, data, self.scheme, device).read)
        return found, "interpreter" if interpreted else "gpu" if device.type == "cuda" else "torch"

    def _refuse_interpreter(self) -> None:
        if self.scheme.name == "bf16":
            raise Failed("UNSUPPORTED", INTERPRETER_BF16)
        costs = [self.spec.cost(**inputs) for inputs in self.calls]
        rows = max((value.shape[:-1].numel() for call in self.calls for value in _activations(call)), default=0)
        work = sum(cost.flops for cost in costs), sum(cost.bytes for cost in costs)
        if work[0] > INTERPRETED_FLOPS or work[1] > INTERPRETED_BYTES or rows > INTERPRETED_ROWS:
            raise Failed("UNSUPPORTED", TOO_MUCH)


def _activations(inputs: Inputs) -> list[torch.Tensor]:
    """The first tensor: the one whose rows a kernel works through."""
    return [value for value in inputs.values() if isinstance(value, torch.Tensor)][:1]


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
