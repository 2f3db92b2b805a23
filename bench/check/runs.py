"""The runs of a check, in order, up to the first fault; each method says what its runs look for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch

from rooflab.bench.calls.calls import output_dtypes, output_names
from rooflab.bench.check.cheats import ALLOCATIONS, alike, changes_later, kept_answer, kept_names, never_written
from rooflab.bench.check.emulating import emulating
from rooflab.bench.check.poison import Guarded, bits, poisoned_allocations, wipe
from rooflab.bench.check.trial import (
    PLAIN,
    Data,
    Failed,
    Layout,
    Refused,
    Trial,
    expect,
    failed_by,
    prepare,
    run,
    several,
)
from rooflab.bench.timing.tamper import tampered
from rooflab.kernels.registry import Kernel
from rooflab.reference.compare import ErrorStats
from rooflab.reference.spec import Case, Inputs, OpSpec, Outputs, Scheme

OTHER_SEED = 1000
"""Added to the seed for the other data; it is large, because specs draw their arguments from consecutive seeds."""
GPU_REPEATS = 3
"""How many more runs on a GPU must agree bit for bit; they may reveal races."""
SMALL_ELEMENTS = 2**20
"""Inputs with fewer elements are checked with one CPU thread."""
KEPT_ANSWERS = 4
"""How many first calls' outputs are kept, to recognise a cached answer; planted inputs come later."""
INTERPRETER_BF16 = "Triton's interpreter computes bf16 dot and sort wrongly"
_profiled: set[tuple[str, int]] = set()
"""Kernels, by name and function, whose work on a GPU this process has already compared."""


@dataclass
class Check:
    """The check of one kernel on one case, and its state."""

    kernel: Kernel
    spec: OpSpec
    case: Case
    scheme: Scheme
    device: torch.device
    labels: list[str] = field(default_factory=list)
    worst: dict[str, ErrorStats] = field(default_factory=dict)
    weak: list[str] = field(default_factory=list)
    answers: list[tuple[str, Outputs]] = field(default_factory=list)
    """The outputs of the first calls, with their labels."""
    right: Data | None = None
    """The data of the first run; None until the kernel was right on it."""
    unsettled: Trial | None = None
    """The last call; its outputs may not change any more."""

    def run(self, seed: int, planted: bool) -> None:
        """Every run, in order.  Raises `Failed` at the first fault."""
        self._refuse()
        tampering = tampered()
        if tampering:
            raise Failed("INVALID", f"{tampering}, before the check began")
        first_inputs = self._inputs(seed)
        refusal = self.kernel.why_not_args(first_inputs, self.spec)
        if refusal:
            raise failed_by(refusal)
        with _threads_for(first_inputs):
            self._runs(first_inputs, seed, planted)

    def _runs(self, first_inputs: Inputs, seed: int, planted: bool) -> None:
        first = prepare(self.kernel, self.spec, first_inputs, self.scheme)
        self.weak.extend(passing_wrong_answers(self.spec, first, self.scheme))
        self._on_two_sets_of_data(first, seed, planted)
        if planted and self.spec.planted is not None:
            for label, inputs in self.spec.planted(self.case, self.scheme, self.device, seed):
                if inputs.keys() - first_inputs.keys() and self.kernel.why_not_args(inputs, self.spec):
                    continue  # it has an option that the case does not name, such as a scale
                with poisoned_allocations():
                    self._judged(f"planted {label}", prepare(self.kernel, self.spec, inputs, self.scheme))
        self._settle()
        tampering = tampered()
        if tampering:
            raise Failed("INVALID", tampering)

    def _on_two_sets_of_data(self, first: Data, seed: int, planted: bool) -> None:
        with poisoned_allocations():
            unseen = [self._judged("first data", first)]
            other = prepare(self.kernel, self.spec, self._inputs(seed + OTHER_SEED), self.scheme)
            unseen.append(self._other_data(other))
        memory: dict[str, Guarded] = {}
        seen = self._repeated(first, memory)
        self._in_the_same_memory(first, other, memory)
        self._remembers(first, unseen, seen, seed, planted)

    def _inputs(self, seed: int) -> Inputs:
        return self.spec.make_inputs(self.case, self.scheme, self.device, seed)

    def _refuse(self) -> None:
        if self.scheme.name not in self.spec.schemes:
            raise Failed("UNSUPPORTED", f"{self.spec.name} has the schemes {', '.join(self.spec.schemes)}")
        refusal = self.kernel.why_not_here(self.device)
        if refusal:
            raise failed_by(refusal)
        in_bf16 = torch.bfloat16 in (self.scheme.activation, self.scheme.weight, self.scheme.output)
        if self.device.type == "cpu" and self.kernel.backend == "triton" and in_bf16 and not emulating():
            raise Failed("UNSUPPORTED", INTERPRETER_BF16)

    def _judged(self, label: str, data: Data, layout: Layout = PLAIN) -> Trial:
        """One run, judged.  Raises `Failed`, or `Refused` if the kernel does not take padding."""
        self.labels.append(label)
        if layout.memory and self.spec.mutates:
            self._settle()  # this run's inputs reuse the memory of the last call's outputs
        try:
            trial = run(self.kernel, self.spec, data, self.scheme, self.device, layout)
        except Refused:
            self.labels.pop()
            raise
        self._settle()
        for stats, output, oracle in zip(self._stats(trial.read, data), trial.read, data.oracle, strict=True):
            worst = self.worst.get(stats.output, stats)
            if not stats.passed or stats.max_error_over_tolerance >= worst.max_error_over_tolerance:
                self.worst[stats.output] = stats
            if not stats.passed:
                raise Failed("INCORRECT", stats.describe() + self._why(trial, data, layout))
            values = output.float() if output.dtype.itemsize == 1 else output  # torch has no isfinite for fp8
            not_finite = int((~torch.isfinite(values) & torch.isfinite(oracle)).sum())
            if not_finite:
                raise Failed("INCORRECT", f"{stats.output}: {not_finite} elements not finite where the oracle is")
        self.unsettled = trial
        self.right = self.right or data
        if len(self.answers) < KEPT_ANSWERS:
            self.answers.append((label, trial.read))
        return trial

    def _stats(self, outputs: Outputs, data: Data) -> list[ErrorStats]:
        return data.judge(self.spec, outputs, self.scheme)

    def _settle(self) -> None:
        """Raises `Failed` if an output of the last call has changed since; then overwrites the outputs."""
        if self.unsettled is None:
            return
        every = output_names(self.spec, self.unsettled.outputs)
        for name, output, was in zip(every, self.unsettled.outputs, self.unsettled.read, strict=True):
            if not torch.equal(bits(output), bits(was)):
                raise Failed("INCORRECT", f"{name}: an earlier call's output has changed since")
        wipe(self.unsettled.outputs)
        self.unsettled = None

    def _why(self, trial: Trial, data: Data, layout: Layout) -> str:
        """The cheat that explains a wrong output, after a colon; empty if there is none."""
        cheat = changes_later(trial.outputs, trial.read, self.kernel.fn)
        if cheat is None and several(self.device) and self._is_right_alone(data, layout):
            cheat = "work on another stream: it is right only if the caller waits for the whole device"
        if cheat is None and (
            never_written(trial.read) or (layout.stale and kept_answer(trial.read, [("", layout.stale)]))
        ):
            cheat = "the previous output: it returns memory that it did not write, which may hold an earlier result"
        cheat = cheat or kept_answer(trial.read, self.answers)
        if cheat is None and data is self.right:
            cheat = "it was right on this data before: its result depends on earlier calls, or on being watched"
        return f": {cheat}" if cheat else ""

    def _is_right_alone(self, data: Data, layout: Layout) -> bool:
        try:
            trial = run(self.kernel, self.spec, data, self.scheme, self.device, replace(layout, alone=True))
        except (Failed, Refused):
            return False
        return all(stats.passed for stats in self._stats(trial.read, data))

    def _other_data(self, data: Data) -> Trial:
        """Other values, in padded layouts; if the launcher refuses the layout of an argument, without that padding."""
        padded = {name for name, value in data.inputs.items() if isinstance(value, torch.Tensor) and value.ndim > 1}
        if data.packed is not None:
            padded.discard(str(self.spec.prepared))
        while padded:
            try:
                return self._judged(f"other data, padded {', '.join(sorted(padded))}", data, Layout(frozenset(padded)))
            except Refused as refused:
                padded = padded - {refused.argument} if refused.argument in padded else set()
        return self._judged("other data", data)

    def _repeated(self, data: Data, memory: dict[str, Guarded]) -> list[Trial]:
        """The first data again, into the caller's outputs if the kernel takes `out`; all runs must agree bit for bit.

        The caller's outputs first hold NaN, and then an answer to the other data. The inputs stay in `memory`.
        """
        into_out = self.kernel.takes_out and not self.spec.mutates
        label = "first data again, into out" if into_out else "first data again"
        trials = [self._judged(label, data, Layout(out="plain" if into_out else None))]
        stale = self.answers[-2][1] if into_out else ()
        if [value.shape for value in stale] != [value.shape for value in trials[0].read]:
            stale = ()
        try:
            again = Layout(out="padded" if into_out else None, stale=stale, memory=memory)
            trials.append(self._judged(label, data, again))
        except Refused:
            trials.append(self._judged(label, data, Layout(out="plain", stale=stale, memory=memory)))
        if self.device.type == "cuda":
            trials += [self._judged(label, data) for _ in range(GPU_REPEATS)]
        if self.kernel.nondeterministic is not None:
            return trials
        for later in trials[1:]:
            for name, one, other in zip(output_names(self.spec, later.read), trials[0].read, later.read, strict=True):
                if not torch.equal(bits(one), bits(other)):
                    raise Failed("INCORRECT", f"{name}: two runs on the same inputs differ in their bits")
        return trials

    def _in_the_same_memory(self, first: Data, other: Data, memory: dict[str, Guarded]) -> None:
        """Other values at the addresses of the last run, as in the next step of an engine; weights stay the same."""
        if not alike(first.inputs, other.inputs):
            return
        keep = kept_names(self.spec, first.inputs)
        data = other
        if keep:
            inputs = {**other.inputs, **{name: first.inputs[name] for name in keep}}
            data = expect(self.spec, inputs, self.scheme, first.packed)
        self._judged("other data in the same memory", data, Layout(memory=memory))

    def _remembers(self, first: Data, unseen: Sequence[Trial], seen: Sequence[Trial], seed: int, planted: bool) -> None:
        """Raises `Failed` if data that the kernel has seen takes less work than new data: it keeps answers by data.

        Less work in later calls than in the first is only a hint, because kernels compile and pack in their first call.
        Two sets of new data, each passed twice in a row, decide. Lengths and tables stay the same, because a kernel may
        keep its plan for them, as for all layers of a step. On CUDA this runs once per kernel, with planted inputs.
        """
        cuda, key = self.device.type == "cuda", (self.kernel.id, id(self.kernel.fn))
        hint = frozenset.intersection(*(trial.work for trial in unseen)).difference(*(trial.work for trial in seen))
        if not (hint - ALLOCATIONS or (cuda and planted and key not in _profiled)):
            return
        _profiled.add(key)
        self.labels.append("new data, twice each")
        left_out: frozenset[str] = frozenset()
        for turn in (2, 3):
            inputs = self._inputs(seed + turn * OTHER_SEED)
            if alike(first.inputs, inputs):
                inputs |= {name: value for name, value in first.inputs.items() if not _is_data(value)}
            data = prepare(self.kernel, self.spec, inputs, self.scheme)
            new, again = (
                run(self.kernel, self.spec, data, self.scheme, self.device, Layout(profiled=cuda)).work
                for _ in range(2)
            )
            left_out = new - again - ALLOCATIONS
            if not left_out:
                return
        names = ", ".join(sorted(left_out))
        raise Failed("INCORRECT", f"a cached answer: on data that it has seen it leaves out {names}")


def _is_data(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype.is_floating_point


@contextmanager
def _threads_for(inputs: Inputs) -> Iterator[None]:
    """One CPU thread for small inputs: starting several costs more than the work, 10 times more on a busy machine."""
    threads = torch.get_num_threads()
    elements = sum(value.numel() for value in inputs.values() if isinstance(value, torch.Tensor))
    if elements < SMALL_ELEMENTS:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def passing_wrong_answers(spec: OpSpec, data: Data, scheme: Scheme) -> Iterator[str]:
    """Wrong answers that would pass, one output at a time: `c: zeros`, the mean, shifted by one, unchanged.

    The mean and the shift of an output need two elements; an empty output has no wrong answer.
    """
    right = tuple(
        oracle if spec.mutates else oracle.to(dtype)
        for oracle, dtype in zip(data.oracle, output_dtypes(spec, data.oracle, scheme), strict=True)
    )
    for index, (name, oracle) in enumerate(zip(output_names(spec, data.oracle), data.oracle, strict=True)):
        for label, wrong in _wrong_answers(oracle, data.inputs[name] if spec.mutates else None):
            answer: Outputs = (*right[:index], wrong.to(right[index].dtype), *right[index + 1 :])
            if all(stats.passed for stats in data.judge(spec, answer, scheme)):
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
