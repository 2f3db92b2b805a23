"""Makes the runs of a check, in order, up to the first fault.  Each method says which faults its runs find."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from rooflab.bench.core.check_data import OTHERWISE, CheckData, KeptData, Otherwise, Planted
from rooflab.bench.core.failed import Failed, LayoutRefused
from rooflab.bench.core.poison import FAR, FAR_PAGES, Arrangement, alike, kept_names, same_bits, strides_of
from rooflab.bench.core.trial import PLAIN, Layout, Runner
from rooflab.bench.core.why import Earlier, Look
from rooflab.kernels.registry import Kernel
from rooflab.reference.compare import ErrorStats
from rooflab.reference.contract import check_layout
from rooflab.reference.spec import Case, Inputs, OpSpec, Outputs, Scheme

OTHER_SEED = 1000
"""The seed of the other data is larger by this number; it is large because specs draw from consecutive seeds."""
GPU_REPEATS = 3
"""The number of additional runs on a GPU, which must agree bit for bit, because these runs may reveal races."""
SMALL_ELEMENTS = 2**20
"""A kernel is checked with one CPU thread if its inputs have fewer elements than this."""
FEW_SMS, ONE_SM = 2, 1
"""The number of SMs that launchers are told in runs on other data.  A check's case has fewer than 132 tiles, so with
132 SMs the loop of a persistent CTA over its tiles would end after the first tile.  With two SMs a CTA must also leave
out the tiles of the other CTA."""
KEPT_ANSWERS = 4
"""The outputs of this many first calls are kept, to recognise a cached answer.  Adversarial inputs come later."""
OPTIONS: Mapping[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("eps", "softmax_scale", "softcap"), lambda value: 0.5 * value),
    "window": lambda value: value + 5,
}
"""Numeric options by name, each with a function that gives the option another value in the run with other options."""
OFFSETS = "32-bit offsets"
"""The labels of runs with far rows begin with this text."""
SAME = "same memory"
"""The name of the data that are written into the memory of the run before."""
KEPT = KeptData()


@dataclass
class Check:
    """The check of one kernel on one case, and its state."""

    kernel: Kernel
    spec: OpSpec
    case: Case
    scheme: Scheme
    device: torch.device
    runner: Runner
    labels: list[str] = field(default_factory=list)
    worst: dict[str, ErrorStats] = field(default_factory=dict)
    weak: list[str] = field(default_factory=list)
    answers: list[Earlier] = field(default_factory=list)
    """The right outputs of the first calls."""
    right: CheckData | None = None
    """The data of the first run; None until the kernel was right on these data."""
    packed: set[str] = field(default_factory=set)
    """Names of the data for which the kernel packed its weight."""
    seed: int = 0
    beyond: bool = False
    """Whether the kernel has passed the runs that every check has."""

    def run(self, seed: int, planted: Planted) -> None:
        """Makes every run, in order.  Raises `Failed` at the first fault."""
        if self.scheme.name not in self.spec.schemes:
            raise Failed("UNSUPPORTED", f"{self.spec.name} has the schemes {', '.join(self.spec.schemes)}")
        self.runner.begin()
        self.seed = seed
        first = self._kept_as("first", partial(self._drawn, seed))
        with _threads_for(first.inputs):
            self._load(first)
            if planted == "planted alone":
                self._judged("first data", first, Layout(poisoned=True))
                self._on_planted_data(first, self._planted())
                return self.runner.settle()
            other = self._on_two_sets_of_data(first)
            self.beyond = True
            if planted is True:
                for kind in OTHERWISE:
                    self._otherwise(kind, first, other)
                self._on_planted_data(first, self._planted())
            elif planted:
                self._otherwise(planted, first, other)
                self._on_planted_data(first, _one_of(self._planted(), seed))
            self.runner.settle()

    def _otherwise(self, kind: Otherwise, first: CheckData, other: CheckData) -> None:
        """Runs the kernel on the drawn data in another memory layout or with other options."""
        match kind:
            case "expanded":
                self._expanded(first.inputs)
            case "other options":
                self._with_other_options(first)
            case "in place":
                self._in_place(other)
            case "far":
                self._far(other)
            case _:
                self._arranged(other, kind)

    def _on_planted_data(self, first: CheckData, sets: Iterable[tuple[str, CheckData]]) -> None:
        for label, data in sets:
            try:
                self._load(data)
                self._judged(label, data, Layout(poisoned=True))
            except Failed as failed:
                if failed.status == "UNSUPPORTED" and data.inputs.keys() - first.inputs.keys():
                    continue  # it has an option that the case does not name, such as a scale
                raise

    def _planted(self) -> Iterator[tuple[str, CheckData]]:
        """Yields the adversarial sets; for a kept set the oracle is not computed again."""
        for name, inputs in self.spec.sets(self.case, self.scheme, self.device, self.seed):
            label = f"planted {name}"
            data = self._kept().get(label) or KEPT.keep(label, CheckData(self.spec, inputs, self.scheme, "planted"))
            yield label, data

    def _on_two_sets_of_data(self, first: CheckData) -> CheckData:
        """Makes the runs on the first data and on other data; returns the other data."""
        self._judged("first data", first, Layout(poisoned=True))
        self.weak.extend(first.weak)
        other = self._kept_as("other", partial(self._drawn, self.seed + OTHER_SEED))
        self._load(other)
        if self._arranged(other, "padded") is None:
            self._judged("other data", other, Layout(poisoned=True, sms=FEW_SMS))
        self._repeated(first)
        self._in_the_same_memory(first, other)
        return other

    def _kept(self) -> dict[str, CheckData]:
        return KEPT.of(self.device, self.spec, self.case, self.scheme, self.seed)

    def _kept_as(self, label: str, make: Callable[[], Inputs]) -> CheckData:
        """The case's data called `label`.  `make` makes them for the first kernel, and later kernels get them too."""
        return self._kept().get(label) or KEPT.keep(label, CheckData(self.spec, make(), self.scheme, label))

    def _drawn(self, seed: int) -> Inputs:
        return self.spec.make_inputs(self.case, self.scheme, self.device, seed)

    def _load(self, data: CheckData, packed_in: str | None = None) -> None:
        """Gives `data` to the runner.  Raises `Failed` if the kernel refuses the data, or cannot pack its weight."""
        if self.runner.load(data.name, data.inputs, packed_in):
            self.packed.add(data.name)

    def _judged(self, label: str, data: CheckData, layout: Layout = PLAIN) -> Outputs:
        """Makes one run, and returns its outputs if they are right.  Raises `Failed` on a fault, or `LayoutRefused`."""
        self.labels.append(label)
        try:
            read = self.runner.run(data.name, layout)
        except LayoutRefused:
            self.labels.pop()
            raise
        misfit = data.misfit(read)
        if misfit:
            raise Failed("INCORRECT", misfit)
        for stats, output, oracle in zip(data.judge(read, self._own_stream), read, data.oracle, strict=True):
            worst = self.worst.get(stats.output, stats)
            if not stats.passed or stats.max_error_over_tolerance >= worst.max_error_over_tolerance:
                self.worst[stats.output] = stats
            if not stats.passed:
                raise Failed("INCORRECT", stats.describe() + self._why(read, data, layout))
            if self.spec.compare is None:
                continue  # by limits, what is near a number is one
            values = output.float() if output.dtype.itemsize == 1 else output  # torch has no isfinite for fp8
            not_finite = int((~torch.isfinite(values) & torch.isfinite(oracle)).sum())
            if not_finite:
                raise Failed("INCORRECT", f"{stats.output}: {not_finite} elements not finite where the oracle is")
        self.right = self.right or data
        if len(self.answers) < KEPT_ANSWERS:
            self.answers.append(Earlier(label, read, data.inputs))
        return read

    @property
    def _own_stream(self) -> bool:
        return self.kernel.nondeterministic is not None

    def _why(self, read: Outputs, data: CheckData, layout: Layout) -> str:
        """A colon and the explanation of a wrong output; empty if a second look confirms no explanation."""
        look = Look(self.spec, self.runner, self.device, self._own_stream)
        explanation = look.fault(read, data, layout, self.answers, data is self.right)
        return f": {explanation}" if explanation else ""

    def _arranged(self, data: CheckData, arranged: Arrangement) -> Outputs | None:
        """Makes a run with every movable argument in this arrangement.  Returns None if the launcher refuses all."""

        def run(names: set[str]) -> Outputs:
            layout = Layout(dict.fromkeys(names, arranged), poisoned=True, sms=FEW_SMS)
            return self._judged(f"other data, {arranged} {', '.join(sorted(names))}", data, layout)

        return _without_refused(self._movable(data, arranged), run)

    def _movable(self, data: CheckData, arranged: Arrangement) -> set[str]:
        """The arguments whose strides change in this arrangement, as far as the op's contract allows it."""
        tensors = {name: value for name, value in data.inputs.items() if isinstance(value, torch.Tensor)}
        kinds = {name: strides_of(value, arranged) for name, value in tensors.items()}
        laid = {name: torch.empty_strided(value.shape, kinds[name], device="meta") for name, value in tensors.items()}
        names = {name for name in tensors if kinds[name] != tensors[name].stride() and self._allows(name, laid[name])}
        return names - {str(self.spec.prepared)} if data.name in self.packed else names

    def _allows(self, name: str, tensor: torch.Tensor) -> bool:
        """Whether the op's contract allows the layout of `tensor` for `name`.  A kernel need not take other layouts."""
        argument = self.spec.contract.arguments.get(name) if self.spec.contract else None
        try:
            check_layout(name, tensor, argument.layout if argument else "any")
        except ValueError:
            return False
        return True

    def _far(self, data: CheckData) -> None:
        """Makes runs in which most rows, pages, experts and heads lie more than 2**31 elements behind the first one, in
        arguments and in the caller's outputs, as far as the contract allows it."""
        results = self.spec.contract.results.values() if self.spec.contract else ()
        fixed = {"out" for of in results if of.layout == "contiguous"}
        forms = data.forms if "out" in self.kernel.accepted and not self.spec.mutates else ()
        models = [torch.empty(shape, dtype=dtype, device=self.device) for shape, dtype in forms]
        for kind in FAR:
            outs = {"out"} if any(strides_of(model, kind) != model.stride() for model in models) else set[str]()
            names = self._movable(data, kind) | outs

            def run(names: set[str], kind: Arrangement = kind) -> Outputs:
                layout = Layout(dict.fromkeys(names - {"out"}, kind), poisoned=True, sms=FEW_SMS)
                if "out" in names:
                    layout = replace(layout, out=kind, forms=forms)
                return self._judged(f"{OFFSETS}: {kind} {', '.join(sorted(names))}", data, layout)

            _without_refused(names - fixed, run)
        # torch's own code has offsets of 64 bits, and may copy a whole cache.
        caches = self.spec.slots[1:] if self.device.type == "cpu" and self.kernel.backend != "torch" else ()
        if caches and data.inputs[caches[0]].numel():
            with suppress(LayoutRefused):
                layout = Layout(dict.fromkeys(caches, FAR_PAGES), poisoned=True, sms=FEW_SMS)
                self._judged(f"{OFFSETS}: {FAR_PAGES} of {', '.join(caches)}", data, layout)

    def _expanded(self, inputs: Inputs) -> None:
        """Makes a run in which float inputs repeat their first row without a copy (stride 0).  If the kernel refuses an
        expanded input by name, the run is made again without the expansion of this input."""
        rows = {
            name: value[:1].expand_as(value)
            for name, value in inputs.items()
            if isinstance(value, torch.Tensor) and value.dtype.is_floating_point and name not in self.spec.mutates
            if value.ndim > 1 and len(value) > 1
            if value[0].float().isfinite().all()  # not a row that nothing may read
            if self._allows(name, value[:1].expand_as(value))
        }
        if self.packed:
            rows.pop(str(self.spec.prepared), None)
        while rows:
            label = f"expanded {', '.join(sorted(rows))}"
            data = self._kept_as(label, partial(dict, inputs, **rows))
            try:
                self._load(data)
                self._judged(label, data, Layout(dict.fromkeys(rows, "plain"), poisoned=True))
                return
            except (LayoutRefused, Failed) as refused:
                if isinstance(refused, Failed) and refused.status != "UNSUPPORTED":
                    raise
                named = [name for name in rows if f"{name}: expected" in str(refused)]
                rows = {name: value for name, value in rows.items() if named and name not in named}

    def _in_place(self, data: CheckData) -> None:
        """Makes a run whose outputs lie in the memory of inputs, if the op allows that and the kernel takes `out`."""
        forms = dict(zip(data.names, data.forms, strict=True))
        shared = {
            output: name
            for output, name in self.spec.in_place.items()
            if isinstance(value := data.inputs.get(name), torch.Tensor)
            if forms.get(output) == (value.shape, value.dtype)
        }
        if shared and "out" in self.kernel.accepted:
            with suppress(LayoutRefused):
                layout = Layout(forms=data.forms, in_place=shared)
                self._judged(f"other data, out is {', '.join(shared.values())}", data, layout)

    def _with_other_options(self, first: CheckData) -> None:
        """Runs the kernel on the first data with other numeric options, because a kernel may have kept the old ones."""
        changed = {name: change(first.inputs[name]) for name, change in OPTIONS.items() if first.inputs.get(name)}
        if changed:
            label = f"other {', '.join(changed)}"
            data = self._kept_as(label, partial(dict, first.inputs, **changed))
            self.runner.load(data.name, data.inputs, first.name)
            self._judged(label, data, Layout(poisoned=True))

    def _repeated(self, data: CheckData) -> None:
        """Runs the kernel on the first data again; all runs must agree bit for bit.

        If the kernel takes `out`, the caller's outputs hold NaN in the first run and an old answer in the second.  The
        first run makes two calls, because a kernel may skip its work in a loop.  The second run is in another thread.
        """
        into_out = "out" in self.kernel.accepted and not self.spec.mutates
        label = "first data again, into out" if into_out else "first data again"
        forms = data.forms if into_out else ()
        plain = Layout(out="plain" if into_out else None, forms=forms)
        runs = [self._judged(label, data, replace(plain, twice=True))]
        stale = self.answers[-2].outputs if into_out else ()
        if [value.shape for value in stale] != [value.shape for value in runs[0]]:
            stale = ()
        again = replace(plain, out="padded" if into_out else None, stale=stale, same_memory=True, elsewhere=True)
        try:
            runs.append(self._judged(f"{label}, in another thread", data, again))
        except LayoutRefused:
            again = replace(again, out="plain")
            runs.append(self._judged(f"{label}, in another thread", data, again))
        if self.device.type == "cuda":
            runs += [self._judged(label, data) for _ in range(GPU_REPEATS)]
        if self._own_stream:
            return
        pairs = [(runs[0], later) for later in runs[1:]]
        if again.out == "padded" and _differing(self.spec, *pairs[0]):
            # Another layout of the output may take another path, as torch's products do; so it is run once more.
            pairs[0] = (runs[1], self._judged(label, data, again))
        for pair in pairs:
            if name := _differing(self.spec, *pair):
                raise Failed("INCORRECT", f"{name}: two runs on the same inputs differ in their bits")

    def _in_the_same_memory(self, first: CheckData, other: CheckData) -> None:
        """Runs the kernel on other values at the last run's addresses, like an engine's next step.  Weights stay."""
        if not alike(first.inputs, other.inputs):
            return
        keep = kept_names(self.spec, first.inputs)
        data = other
        if keep:
            same = {name: first.inputs[name] for name in keep}
            data = self._kept_as(SAME, partial(dict, other.inputs, **same))
            self._load(data, first.name)
        self._judged("other data in the same memory", data, Layout(same_memory=True, sms=ONE_SM))


def _differing(spec: OpSpec, one: Outputs, other: Outputs) -> str:
    """The name of the first output whose bits differ between two runs; empty if all outputs are equal."""
    named = zip(spec.outputs, one, other, strict=False)
    return next((name for name, first, second in named if not same_bits(first, second)), "")


def _without_refused(names: set[str], run: Callable[[set[str]], Outputs]) -> Outputs | None:
    """Calls `run` with `names`, and again without the names that the launcher refuses; None if no name is left."""
    while names:
        try:
            return run(names)
        except LayoutRefused as refused:
            named = {name for name in names if re.search(rf"\b{name}: ", str(refused))}
            names = names - named if named else set()
    return None


def _one_of(sets: Iterable[tuple[str, CheckData]], seed: int) -> list[tuple[str, CheckData]]:
    """A list of one random member of `sets`, all equally likely; empty if `sets` is empty."""
    state, chosen = random.Random(seed), list[tuple[str, CheckData]]()
    for count, item in enumerate(sets, 1):
        chosen = [item] if not state.randrange(count) else chosen
    return chosen


@contextmanager
def _threads_for(inputs: Inputs) -> Iterator[None]:
    """Sets one CPU thread for small inputs.  To start several costs more than the work, 10 times more on a busy CPU."""
    threads = torch.get_num_threads()
    elements = sum(value.numel() for value in inputs.values() if isinstance(value, torch.Tensor))
    if elements < SMALL_ELEMENTS:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
