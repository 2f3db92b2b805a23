"""Whether a kernel is right: against the fp64 oracle, and against the ways in which a wrong kernel looks right.

A kernel runs on guarded copies of its inputs (`trial.py`, `poison.py`): on some data; on other data in padded layouts
(a cached answer, an assumed contiguity); on the first again, into the caller's outputs, twice (bit for bit); and on
planted inputs. Uninitialised memory is NaN, results are read as soon as the current stream is done, and nothing but
the outputs may change.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from rooflab.bench.calls import short_of_memory
from rooflab.bench.poison import bits, poisoned_allocations
from rooflab.bench.records import CheckedBy, Status
from rooflab.bench.trial import Data, Failed, OutLayout, Refused, Trial, prepare, run
from rooflab.kernels.precision import pin_matmul_precision
from rooflab.kernels.registry import Kernel, get_kernel, get_op, interpreting, kernels
from rooflab.reference.compare import ErrorStats
from rooflab.reference.spec import Case, Inputs, OpSpec, Outputs, Scheme, get_scheme

OTHER_SEED = 1000
"""Added to the seed for the other data; specs draw their arguments from consecutive seeds."""
GPU_REPEATS = 3
"""More runs that must agree bit for bit, where threads race."""
SMALL_ELEMENTS = 2**20
"""Inputs below it are checked with one CPU thread."""
INTERPRETER_BF16 = "Triton's interpreter computes bf16 dot and sort wrongly"


@dataclass(frozen=True)
class CheckResult:
    """What came of checking one kernel on one case."""

    op: str
    kernel: str
    backend: str
    case: Case
    scheme: str
    device: str
    seed: int
    status: Status
    checked_by: CheckedBy
    errors: tuple[ErrorStats, ...] = ()
    """The worst of all runs, one per output."""
    reason: str = ""
    """Why the status is not OK."""
    labels: tuple[str, ...] = ()
    """The runs, in order; the failing one is the last."""
    weak: tuple[str, ...] = ()
    """Wrong answers that this case's tolerance lets pass (`c: zeros`)."""

    @property
    def discriminating(self) -> bool:
        """Whether the case rejects zeros, the mean, and the oracle shifted by one."""
        return not self.weak

    def describe(self) -> str:
        """One line for a person."""
        text = self.reason or "; ".join(error.describe() for error in self.errors)
        if self.weak:
            text += f" (not discriminating: {', '.join(self.weak)} would pass)"
        return f"{self.op}/{self.kernel} {self.case.id} {self.scheme}: {self.status}: {text}"


def check_op(
    op: str,
    *,
    names: Sequence[str] = (),
    cases: Sequence[Case] = (),
    suites: Sequence[str] = ("smoke", "edge"),
    schemes: Sequence[str] = (),
    device: torch.device | str = "cpu",
    seed: int = 0,
    planted: bool = True,
) -> Iterator[CheckResult]:
    """Checks kernels (all by default) on cases (those of `suites` by default) in schemes (all by default).

    Gives one result for each, what could not run included.  Raises `ValueError` on a name that is not there.
    """
    spec = get_op(op)
    chosen = [get_kernel(op, name) for name in names] or list(kernels(op).values())
    listed = [spec.check_case(case) for case in cases] or [case for suite in suites for case in spec.get_cases(suite)]
    wanted = [get_scheme(scheme) for scheme in (schemes or spec.schemes)]
    for kernel in chosen:
        for case in dict.fromkeys(listed):
            for scheme in wanted:
                yield check_kernel(kernel, spec, case, scheme, device, seed, planted)


def check_kernel(
    kernel: Kernel,
    spec: OpSpec,
    case: Case,
    scheme: Scheme,
    device: torch.device | str = "cpu",
    seed: int = 0,
    planted: bool = True,
) -> CheckResult:
    """Checks one kernel, which need not be registered, on one case, up to the first fault.

    Raises what the spec raises on a case that it does not know.
    """
    device = torch.device(device)
    pin_matmul_precision()
    short = short_of_memory(spec, spec.make_inputs(case, scheme, torch.device("meta"), seed), device)
    check = _Check(kernel, spec, case, scheme, device)
    status: Status = "OK"
    reason = ""
    try:
        if short and kernel.why_not_here(device) is None:
            raise Failed("OUT_OF_MEMORY", short)
        check.run(seed, planted)
    except Failed as failed:
        status = failed.status
        reason = f"{check.labels[-1]}: {failed.reason}" if check.labels else failed.reason
    except (torch.cuda.OutOfMemoryError, MemoryError) as error:
        status, reason = "OUT_OF_MEMORY", f"of the inputs or the reference: {error}"
    return CheckResult(
        op=spec.name,
        kernel=kernel.name,
        backend=kernel.backend,
        case=case,
        scheme=scheme.name,
        device=str(device),
        seed=seed,
        status=status,
        checked_by=_checked_by(kernel, device, status),
        errors=tuple(check.worst.values()),
        reason=reason,
        labels=tuple(check.labels),
        weak=tuple(check.weak),
    )


def _checked_by(kernel: Kernel, device: torch.device, status: Status) -> CheckedBy:
    if status not in ("OK", "INCORRECT"):
        return "none"
    if kernel.backend in ("triton", "gluon") and interpreting():
        return "interpreter"
    return "gpu" if device.type == "cuda" else "torch"


@dataclass
class _Check:
    """The check of one kernel on one case, as it goes."""

    kernel: Kernel
    spec: OpSpec
    case: Case
    scheme: Scheme
    device: torch.device
    labels: list[str] = field(default_factory=list)
    worst: dict[str, ErrorStats] = field(default_factory=dict)
    weak: list[str] = field(default_factory=list)

    def run(self, seed: int, planted: bool) -> None:
        """Every run, in order.  Raises `Failed` at the first fault."""
        self._refuse()
        first_inputs = self._inputs(seed)
        reason = self.kernel.why_not_args(first_inputs, self.spec)
        if reason:
            raise Failed("UNSUPPORTED", reason.removeprefix("UNSUPPORTED: "))
        with _threads_for(first_inputs):
            self._runs(first_inputs, seed, planted)

    def _runs(self, first_inputs: Inputs, seed: int, planted: bool) -> None:
        first = prepare(self.kernel, self.spec, first_inputs)
        self.weak.extend(passing_wrong_answers(self.spec, first, self.scheme))
        with poisoned_allocations():
            trial = self._judged("first data", first)
            self._other_data(prepare(self.kernel, self.spec, self._inputs(seed + OTHER_SEED)))
        for name, output, was in zip(self.spec.outputs, trial.outputs, trial.read, strict=True):
            if not torch.equal(bits(output), bits(was)):
                raise Failed("INCORRECT", f"{name}: an earlier call's output has changed since")
        self._repeated(first)
        if planted and self.spec.planted is not None:
            for label, inputs in self.spec.planted(self.case, self.scheme, self.device, seed):
                with poisoned_allocations():
                    self._judged(f"planted {label}", prepare(self.kernel, self.spec, inputs))

    def _inputs(self, seed: int) -> Inputs:
        return self.spec.make_inputs(self.case, self.scheme, self.device, seed)

    def _refuse(self) -> None:
        """Raises `Failed` where the kernel cannot be checked here at all."""
        if self.scheme.name not in self.spec.schemes:
            raise Failed("UNSUPPORTED", f"{self.spec.name} has the schemes {', '.join(self.spec.schemes)}")
        reason = self.kernel.why_not_here(self.device)
        if reason:
            status, _, text = reason.partition(": ")
            raise Failed("UNAVAILABLE" if status == "UNAVAILABLE" else "UNSUPPORTED", text)
        in_bf16 = torch.bfloat16 in (self.scheme.activation, self.scheme.weight, self.scheme.output)
        if self.device.type == "cpu" and self.kernel.backend == "triton" and in_bf16:
            raise Failed("UNSUPPORTED", INTERPRETER_BF16)

    def _judged(
        self, label: str, data: Data, padded: frozenset[str] = frozenset(), out: OutLayout | None = None
    ) -> Trial:
        """One run, judged.  Raises `Failed`, or `Refused` where the kernel will not take padding."""
        self.labels.append(label)
        try:
            trial = run(self.kernel, self.spec, data, self.scheme, self.device, padded=padded, out=out)
        except Refused:
            self.labels.pop()
            raise
        for stats, output, oracle in zip(
            self.spec.judge(trial.read, data.oracle, data.inputs, self.scheme), trial.read, data.oracle, strict=True
        ):
            worst = self.worst.get(stats.output, stats)
            if not stats.passed or stats.max_error_over_tolerance >= worst.max_error_over_tolerance:
                self.worst[stats.output] = stats
            if not stats.passed:
                raise Failed("INCORRECT", stats.describe())
            wild = int((~torch.isfinite(output) & torch.isfinite(oracle)).sum())
            if wild:
                raise Failed("INCORRECT", f"{stats.output}: {wild} elements not finite where the oracle is")
        return trial

    def _other_data(self, data: Data) -> None:
        """Other values, in padded layouts as far as the launcher takes them: it may refuse one, and then names it."""
        padded = {name for name, value in data.inputs.items() if isinstance(value, torch.Tensor) and value.ndim > 1}
        if data.packed is not None:
            padded.discard(str(self.spec.prepared))
        while padded:
            try:
                self._judged(f"other data, padded {', '.join(sorted(padded))}", data, padded=frozenset(padded))
                return
            except Refused as refused:
                padded = padded - {refused.argument} if refused.argument in padded else set()
        self._judged("other data", data)

    def _repeated(self, data: Data) -> None:
        """The first data again, into the caller's outputs where the kernel takes them; all runs agree bit for bit."""
        into_out = self.kernel.takes_out and not self.spec.mutates
        label = "first data again, into out" if into_out else "first data again"
        trials = [self._judged(label, data, out="plain" if into_out else None)]
        try:
            trials.append(self._judged(label, data, out="padded" if into_out else None))
        except Refused:
            trials.append(self._judged(label, data, out="plain"))
        if self.device.type == "cuda":
            trials += [self._judged(label, data) for _ in range(GPU_REPEATS)]
        if self.kernel.nondeterministic is not None:
            return
        for later in trials[1:]:
            for name, one, other in zip(self.spec.outputs, trials[0].read, later.read, strict=True):
                if not torch.equal(bits(one), bits(other)):
                    raise Failed("INCORRECT", f"{name}: two runs on the same inputs differ in their bits")


@contextmanager
def _threads_for(inputs: Inputs) -> Iterator[None]:
    """One CPU thread for small inputs: handing them to a team costs more than the work, 10 times on a busy machine."""
    threads = torch.get_num_threads()
    elements = sum(value.numel() for value in inputs.values() if isinstance(value, torch.Tensor))
    if elements < SMALL_ELEMENTS:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def passing_wrong_answers(spec: OpSpec, data: Data, scheme: Scheme) -> Iterator[str]:
    """Wrong answers that would pass for right, one output at a time: `c: zeros`, the mean, shifted, unchanged.

    An output of one element has no mean or shift of its own, an empty one nothing to judge.
    """
    right = tuple(
        oracle.to(scheme.output) if oracle.dtype.is_floating_point and not spec.mutates else oracle
        for oracle in data.oracle
    )
    for index, (name, oracle) in enumerate(zip(spec.outputs, data.oracle, strict=True)):
        for label, wrong in _wrong_answers(oracle, data.inputs[name] if spec.mutates else None):
            answer: Outputs = (*right[:index], wrong.to(right[index].dtype), *right[index + 1 :])
            if all(stats.passed for stats in spec.judge(answer, data.oracle, data.inputs, scheme)):
                yield f"{name}: {label}"


def _wrong_answers(oracle: torch.Tensor, unchanged: torch.Tensor | None) -> Iterator[tuple[str, torch.Tensor]]:
    if oracle.numel():
        yield "zeros", torch.zeros_like(oracle)
    if oracle.numel() > 1:
        finite = oracle.double()[torch.isfinite(oracle)]
        yield "the mean", torch.full_like(oracle, float(finite.mean()) if finite.numel() else 0.0)
        yield "shifted by one", oracle.flatten().roll(1).reshape(oracle.shape)
    if unchanged is not None and unchanged.numel():
        yield "unchanged", unchanged
