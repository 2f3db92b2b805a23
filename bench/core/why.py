"""What explains wrong outputs: of one run, if a second look confirms it, and of all wrong checks of a kernel."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any, NamedTuple

import torch

from rooflab.bench.core.check_data import CheckData, CheckResult
from rooflab.bench.core.failed import Failed, LayoutRefused
from rooflab.bench.core.poison import FAR, FAR_PAGES, kept_names, never_written, same_bits
from rooflab.bench.core.record import NOT_RUN
from rooflab.bench.core.trial import Layout, Runner, several
from rooflab.reference.spec import Case, Inputs, OpSpec, Outputs


class Earlier(NamedTuple):
    """The right outputs of a call."""

    label: str
    outputs: Outputs
    inputs: Inputs


@dataclass(frozen=True)
class Look:
    """A second look at a kernel whose output was wrong."""

    spec: OpSpec
    runner: Runner
    device: torch.device
    own_stream: bool

    def fault(self, read: Outputs, data: CheckData, layout: Layout, answers: Sequence[Earlier], before: bool) -> str:
        """The explanation, or nothing.  `answers` are those of earlier calls; `before`: this data was one of theirs."""
        if layout.sms and self._is_right(data, replace(layout, sms=None)) and not self._is_right(data, layout):
            grid = f"a grid for {layout.sms} SMs, where a CTA takes several tiles"
            return f"with {grid}; with a grid for all SMs it is right"
        if layout.elsewhere and self._is_right(data, replace(layout, elsewhere=False)):
            return "a call from another thread: it is right only in the thread of its first call"
        if several(self.device) and self._is_right(data, replace(layout, alone=True)):
            return "work on another stream: it is right only if the caller waits for the whole device"
        if self._unwritten(read, data, layout, before):
            return "the previous output: it returns memory that it did not write, which may hold an earlier result"
        if cheat := self._kept(read, data, layout, answers):
            return cheat
        if layout.out in FAR or not {*FAR, FAR_PAGES}.isdisjoint(layout.arranged.values()):
            return self._far(data, layout)
        if layout.arranged and self._is_right(data, replace(layout, arranged={})):
            names = " or ".join(sorted(layout.arranged))
            return f"it takes strides of {names} for granted: with the usual ones it is right"
        if before:
            return "it was right on this data before: its result depends on earlier calls, or on being watched"
        return self._rounded(data, layout)

    def _run(self, data: CheckData, layout: Layout) -> Outputs:
        """The outputs of another run; nothing where the kernel fails or refuses."""
        try:
            return self.runner.run(data.name, layout)
        except (Failed, LayoutRefused):
            return ()

    def _is_right(self, data: CheckData, layout: Layout) -> bool:
        read = self._run(data, layout)
        return bool(read) and not data.faults(read, self.own_stream)

    def _is_right_on(self, data: CheckData, layout: Layout, changed: Inputs) -> tuple[bool, Outputs]:
        """Whether a run on the data with other inputs is right, and its outputs; the data is loaded again after it."""
        other = CheckData(self.spec, {**data.inputs, **changed}, data.scheme, "second look")
        try:
            self.runner.load(other.name, other.inputs)
            read = self._run(other, layout)
            return bool(read) and not other.faults(read, self.own_stream), read
        except Failed:
            return False, ()

    def _unwritten(self, read: Outputs, data: CheckData, layout: Layout, before: bool) -> bool:
        """Whether outputs hold what was in their memory before, and other values where that was something else."""
        stale = bool(layout.stale) and _same(read, layout.stale)
        if not stale and (not never_written(read) or layout.arranged):
            return False
        if before and not stale:
            return True  # it has computed other values than poison
        if layout.out is not None:
            other = tuple(torch.full_like(output, 3) for output in read)
            return _same(self._run(data, replace(layout, stale=other)), other)
        freed = [torch.full_like(output, 3) for output in read for _ in range(8)]
        del freed  # `torch.empty` takes memory that was freed last
        again = self._run(data, replace(layout, poisoned=False))
        return bool(again) and not _same(again, read)

    def _kept(self, read: Outputs, data: CheckData, layout: Layout, answers: Sequence[Earlier]) -> str:
        """A fault if `read` are the outputs of an earlier call on other inputs: whether of all calls on such inputs."""
        for age, (label, outputs, inputs) in enumerate(reversed(answers)):
            if not _same(read, outputs):
                continue
            moved = {
                name: value.roll(1, -1)
                for name, value in data.inputs.items()
                if isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype.itemsize > 1
                if value.ndim and name not in kept_names(self.spec, data.inputs)
            }
            _, other = self._is_right_on(data, layout, moved)
            late = bool(other) and not data.faults(other, self.own_stream)
            if late or (other and (_same(other, read) or _same(self._run(data, layout), other))):
                return f"a cached answer: the output of {'an earlier call' if age else 'the call before'}, on {label}"
            differing = [name for name, value in data.inputs.items() if not _equal(value, inputs.get(name))]
            return f"the output is that on {label}, as if {', '.join(differing)} had not changed" if other else ""
        return ""

    def _far(self, data: CheckData, layout: Layout) -> str:
        """Which of the tensors with far rows alone makes the result wrong; nothing unless near rows are right."""
        near = replace(layout, arranged={}, out=None, forms=())
        alone = {name: replace(near, arranged={name: kind}) for name, kind in layout.arranged.items()}
        if FAR_PAGES in layout.arranged.values():  # one slot reaches all of them
            alone = {" and ".join(layout.arranged): layout}
        alone |= {"out": replace(layout, arranged={})} if layout.out in FAR else {}
        names = [name for name, one in sorted(alone.items()) if not self._is_right(data, one)]
        if not names or not self._is_right(data, near):
            return ""
        return f"it reaches rows of {' and '.join(names)} by offsets of 32 bits: near rows come out right"

    def _rounded(self, data: CheckData, layout: Layout) -> str:
        """A product in fewer bits than fp32: one of inputs that lose no bits in it is right."""
        floats = [v for v in data.inputs.values() if isinstance(v, torch.Tensor) and v.dtype == torch.float32]
        if data.scheme.name != "fp32" or not floats:
            return ""
        for bits, what in ((10, "TF32 or fp16"), (7, "bf16")):
            changed = {
                name: ((value.view(torch.int32) + (1 << 22 - bits)) & (-1 << 23 - bits)).view(torch.float32)
                for name, value in data.inputs.items()
                if isinstance(value, torch.Tensor) and value.dtype == torch.float32
            }
            if self._is_right_on(data, layout, changed)[0]:
                return f"products in {what}: of inputs with {bits} bits behind the leading one they are right"
        return ""


def _same(one: Outputs, other: Outputs) -> bool:
    return bool(one) and len(one) == len(other) and all(map(_equal, one, other))


def _equal(one: object, other: object) -> bool:
    """Whether two values are the same, tensors bit for bit."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.shape == other.shape and one.dtype == other.dtype and same_bits(one, other)
    return type(one) is type(other) and one == other


LOOKS = 3
"""Most pairs of a wrong and a right case that are tried, until one can be checked with values of the other."""
Facts = Mapping[str, Any]

Again = Callable[[CheckResult, Case, str], str]
"""The status of a result's kernel on another case, in a scheme; empty if that cannot be checked."""


def in_common(results: Sequence[CheckResult], again: Again) -> str:
    """A sentence with what is true of all wrong checks of one kernel, and of none of its right ones, and with the run
    in which all wrong ones failed; empty if nothing is.  With one wrong or one right check almost everything would
    be, and by chance much is: it is said if a wrong case with a right one's value is right, and the other way round.  A
    case of nothing, which any kernel does right, says nothing."""
    passed = [
        result for result in results if result.status == "OK" and all(v for k, v in result.case.items() if k.isupper())
    ]
    right = [{**result.case, "scheme": result.scheme} for result in passed]
    failed = [result for result in results if result.status not in ("OK", *NOT_RUN)]
    wrong = [{**result.case, "scheme": result.scheme} for result in failed]
    names = list(wrong[0]) if min(len(right), len(wrong)) > 1 else []
    found: list[tuple[tuple[str, ...], str]] = [
        ((name,), _apart(name, *({facts.get(name) for facts in side} for side in (wrong, right)))) for name in names
    ]
    found += [(pair, _equal_or_not(pair, wrong, right)) for pair in combinations(filter(str.isupper, names), 2)]
    said = ", ".join(text for own, text in found if text and _holds(own, failed, passed, again))
    runs = {re.sub(r"\d+\b(?!-bit)", "N", result.labels[-1]) for result in failed if result.labels}
    run = runs.pop() if names and len(runs) == 1 else "first data"
    same = "" if run == "first data" else f"all {len(wrong)} wrong checks fail on {run}"
    told = f"all {len(wrong)} wrong checks have {said}; none of the {len(right)} right ones has" if said else ""
    return "; ".join(filter(None, (told, same)))


def _holds(names: Sequence[str], wrong: Sequence[CheckResult], right: Sequence[CheckResult], again: Again) -> bool:
    """Whether the values of these names, moved from a right case to a wrong one and back, move the fault."""
    for bad, good in zip(wrong[:LOOKS], right[:LOOKS], strict=False):
        statuses = []
        for one, other in ((bad, good), (good, bad)):
            case = one.case.but(**{name: other.case[name] for name in names if name in other.case})
            statuses.append(again(one, case, other.scheme if "scheme" in names else one.scheme))
        if "" not in statuses:
            return statuses[0] == "OK" and statuses[1] not in ("OK", *NOT_RUN)
    return False


def _equal_or_not(pair: Sequence[str], wrong: Sequence[Facts], right: Sequence[Facts]) -> str:
    """Whether two sizes are equal in each wrong case and in no right one, or the other way round."""
    equal = [{facts.get(pair[0]) == facts.get(pair[1]) for facts in side} for side in (wrong, right)]
    sign = "=" if equal == [{True}, {False}] else "!=" if equal == [{False}, {True}] else ""
    return f"{pair[0]} {sign} {pair[1]}" if sign else ""


def _apart(name: str, wrong: set[Any], right: set[Any]) -> str:
    """A text that is true of each value in `wrong` and of none in `right`; empty without one."""
    if wrong & right or None in wrong:
        return ""
    if all(isinstance(value, int | float) and not isinstance(value, bool) for value in wrong | right):
        if min(wrong) > max(right):
            return f"{name} > {max(right)}"
        if max(wrong) < min(right):
            return f"{name} < {min(right)}"
        if len(wrong) > 1:
            steps = (2**power for power in range(1, 9))
            apart = (step for step in steps if not any(v % step for v in right) and all(v % step for v in wrong))
            power = [{bool(int(v) & int(v) - 1) for v in side} for side in (wrong, right)]
            other = f"{name} that is no power of 2" if power == [{True}, {False}] else ""
            return other or next((f"{name} % {step} != 0" for step in apart), "")
    return " or ".join(sorted(Case(**{name: value}).id for value in wrong))
