"""Makes the runs of a kernel's check in order, up to the first fault.  Each method says which faults its runs find."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from rooflab.bench.core.check_data import EXTRA_RUNS, CheckData, ExtraRun, KeptData, Planted
from rooflab.bench.core.failed import Failed, LayoutRefused
from rooflab.bench.core.poison import FAR_LAYOUTS, FAR_PAGES, Arrangement, alike, kept_names, same_bits, strides_of
from rooflab.bench.core.trial import DEFAULT_LAYOUT, Layout, Runner
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
TWO_SMS, ONE_SM = 2, 1
"""The number of SMs that launchers are told in runs on other data.  A check's case has fewer than 132 tiles, so with
132 SMs the loop of a persistent CTA over its tiles would end after the first tile.  With two SMs a CTA must also leave
out the tiles of the other CTA."""
KEPT_ANSWER_COUNT = 4
"""The outputs of this many first calls are kept, to recognise a cached answer.  Adversarial inputs come later."""
OPTIONS: Mapping[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("eps", "softmax_scale", "softcap"), lambda value: 0.5 * value),
    "window": lambda value: value + 5,
}
"""Numeric options by name, each with a function that gives the option another value in the run with other options."""
OFFSET_LABEL = "32-bit offsets"
"""The labels of runs with far rows begin with this text."""
SAME_MEMORY_LABEL = "same memory"
"""The name of the data that are written into the memory of the run before."""
KEPT_DATA = KeptData()


@dataclass
class Check:
    """Checks one kernel on one input case, and holds the state of this check."""

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
        first_data = self._kept_as("first", partial(self._drawn, seed))
        with _threads_for(first_data.inputs):
            self._load(first_data)
            if planted == "planted alone":
                self._judged("first data", first_data, Layout(poisoned=True))
                self._on_planted_data(first_data, self._planted())
                return self.runner.settle()
            other_data = self._on_two_sets_of_data(first_data)
            self.beyond = True
            if planted is True:
                for run_kind in EXTRA_RUNS:
                    self._otherwise(run_kind, first_data, other_data)
                self._on_planted_data(first_data, self._planted())
            elif planted:
                self._otherwise(planted, first_data, other_data)
                self._on_planted_data(first_data, _one_of(self._planted(), seed))
            self.runner.settle()

    def _otherwise(self, kind: ExtraRun, first: CheckData, other: CheckData) -> None:
        """Runs the kernel once more on random data, in another memory layout or with other options, by `kind`."""
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
        """Yields the sets of adversarial inputs, each with its label, from the cache if it has them."""
        for name, inputs in self.spec.sets(self.case, self.scheme, self.device, self.seed, self._own_stream):
            data_label = f"planted {name}"
            check_data = self._kept().get(data_label) or KEPT_DATA.keep(
                data_label, CheckData(self.spec, inputs, self.scheme, "planted")
            )
            yield data_label, check_data

    def _on_two_sets_of_data(self, first: CheckData) -> CheckData:
        """Checks a kernel on two sets of random inputs, and returns the second set.  `first` is the first set.

        The second set has padded strides.  More runs repeat the first set, and put new inputs into the same memory."""
        self._judged("first data", first, Layout(poisoned=True))
        self.weak.extend(first.weak)
        other_data = self._kept_as("other", partial(self._drawn, self.seed + OTHER_SEED))
        self._load(other_data)
        if self._arranged(other_data, "padded") is None:
            self._judged("other data", other_data, Layout(poisoned=True, sms=TWO_SMS))
        self._repeated(first)
        self._in_the_same_memory(first, other_data)
        return other_data

    def _kept(self) -> dict[str, CheckData]:
        return KEPT_DATA.of(self.device, self.spec, self.case, self.scheme, self.seed)

    def _kept_as(self, label: str, make: Callable[[], Inputs]) -> CheckData:
        """Returns the data that are cached as `label` for this case.  Makes and caches them if there are none."""
        return self._kept().get(label) or KEPT_DATA.keep(label, CheckData(self.spec, make(), self.scheme, label))

    def _drawn(self, seed: int) -> Inputs:
        return self.spec.make_inputs(self.case, self.scheme, self.device, seed)

    def _load(self, data: CheckData, packed_in: str | None = None) -> None:
        """Gives `data` to the runner.  Raises `Failed` if the kernel refuses the data, or cannot pack its weight."""
        if self.runner.load(data.name, data.inputs, packed_in):
            self.packed.add(data.name)

    def _judged(self, label: str, data: CheckData, layout: Layout = DEFAULT_LAYOUT) -> Outputs:
        """Returns a kernel run's checked outputs.  Raises `Failed` on faults and `LayoutRefused` on refused layouts."""
        self.labels.append(label)
        try:
            outputs = self.runner.run(data.name, layout)
        except LayoutRefused:
            self.labels.pop()
            raise
        mismatch = data.misfit(outputs)
        if mismatch:
            raise Failed("INCORRECT", mismatch)
        for out_stats, output, oracle in zip(data.judge(outputs, self._own_stream), outputs, data.oracle, strict=True):
            worst_stats = self.worst.get(out_stats.output, out_stats)
            if not out_stats.passed or out_stats.max_error_over_tolerance >= worst_stats.max_error_over_tolerance:
                self.worst[out_stats.output] = out_stats
            if not out_stats.passed:
                raise Failed("INCORRECT", out_stats.describe() + self._why(outputs, data, layout))
            if self.spec.compare is None:
                continue  # by limits, what is near a number is one
            output_values = output.float() if output.dtype.itemsize == 1 else output  # torch has no isfinite for fp8
            bad_count = int((~torch.isfinite(output_values) & torch.isfinite(oracle)).sum())
            if bad_count:
                raise Failed("INCORRECT", f"{out_stats.output}: {bad_count} elements not finite where the oracle is")
        self.right = self.right or data
        if len(self.answers) < KEPT_ANSWER_COUNT:
            self.answers.append((label, outputs, data.inputs))
        return outputs

    @property
    def _own_stream(self) -> bool:
        return self.kernel.nondeterministic is not None

    def _why(self, read: Outputs, data: CheckData, layout: Layout) -> str:
        """Explains a wrong output in a text that begins with ": ". Returns "" if no known fault explains the output."""
        fault_search = Look(self.spec, self.runner, self.device, self._own_stream)
        explanation = fault_search.fault(read, data, layout, self.answers, data is self.right)
        return f": {explanation}" if explanation else ""

    def _arranged(self, data: CheckData, arranged: Arrangement) -> Outputs | None:
        """Runs the kernel with the accepted inputs in the layout `arranged`. Returns None if the kernel refuses all."""

        def run(names: set[str]) -> Outputs:
            layout = Layout(dict.fromkeys(names, arranged), poisoned=True, sms=TWO_SMS)
            return self._judged(f"other data, {arranged} {', '.join(sorted(names))}", data, layout)

        return _without_refused(self._movable(data, arranged), run)

    def _movable(self, data: CheckData, arranged: Arrangement) -> set[str]:
        """Returns the names of the tensors that get other strides in the layout `arranged`, as the contract allows."""
        tensors = {name: tensor for name, tensor in data.inputs.items() if isinstance(tensor, torch.Tensor)}
        strides = {name: strides_of(tensor, arranged) for name, tensor in tensors.items()}
        meta_tensors = {
            name: torch.empty_strided(tensor.shape, strides[name], device="meta") for name, tensor in tensors.items()
        }
        names = {
            name
            for name in tensors
            if strides[name] != tensors[name].stride() and self._allows(name, meta_tensors[name])
        }
        return names - {str(self.spec.prepared)} if data.name in self.packed else names

    def _allows(self, name: str, tensor: torch.Tensor) -> bool:
        """Tells whether the op's contract allows the strides of `tensor` for the argument `name`."""
        argument_contract = self.spec.contract.arguments.get(name) if self.spec.contract else None
        try:
            check_layout(name, tensor, argument_contract.layout if argument_contract else "any")
        except ValueError:
            return False
        return True

    def _far(self, data: CheckData) -> None:
        """Runs the kernel on tensors that need 64-bit offsets, if the op's contract allows such strides. Most rows,
        heads or pages then lie over 2**31 elements after the first."""
        contract_results = self.spec.contract.results.values() if self.spec.contract else ()
        fixed_outputs = {"out" for contract_result in contract_results if contract_result.layout == "contiguous"}
        output_forms = data.forms if "out" in self.kernel.accepted and not self.spec.mutates else ()
        out_tensors = [torch.empty(shape, dtype=dtype, device=self.device) for shape, dtype in output_forms]
        for kind in FAR_LAYOUTS:
            out_names = (
                {"out"}
                if any(strides_of(out_tensor, kind) != out_tensor.stride() for out_tensor in out_tensors)
                else set[str]()
            )
            names = self._movable(data, kind) | out_names

            def run(names: set[str], kind: Arrangement = kind) -> Outputs:
                layout = Layout(dict.fromkeys(names - {"out"}, kind), poisoned=True, sms=TWO_SMS)
                if "out" in names:
                    layout = replace(layout, out=kind, forms=output_forms)
                return self._judged(f"{OFFSET_LABEL}: {kind} {', '.join(sorted(names))}", data, layout)

            _without_refused(names - fixed_outputs, run)
        # torch's own code has offsets of 64 bits, and may copy a whole cache.
        cache_names = self.spec.slots[1:] if self.device.type == "cpu" and self.kernel.backend != "torch" else ()
        if cache_names and data.inputs[cache_names[0]].numel():
            with suppress(LayoutRefused):
                cache_layout = Layout(dict.fromkeys(cache_names, FAR_PAGES), poisoned=True, sms=TWO_SMS)
                self._judged(f"{OFFSET_LABEL}: {FAR_PAGES} of {', '.join(cache_names)}", data, cache_layout)

    def _expanded(self, inputs: Inputs) -> None:
        """Runs the kernel on float inputs whose rows are all the first row, with stride 0.  The kernel may refuse some
        inputs in this layout.  Then it runs again, with the original rows of these inputs."""
        row_views = {
            name: tensor[:1].expand_as(tensor)
            for name, tensor in inputs.items()
            if isinstance(tensor, torch.Tensor) and tensor.dtype.is_floating_point and name not in self.spec.mutates
            if tensor.ndim > 1 and len(tensor) > 1
            if tensor[0].float().isfinite().all()  # not a row that nothing may read
            if self._allows(name, tensor[:1].expand_as(tensor))
        }
        if self.packed:
            row_views.pop(str(self.spec.prepared), None)

        def run(names: set[str]) -> Outputs:
            run_label = f"expanded {', '.join(sorted(names))}"
            check_data = self._kept_as(run_label, partial(dict, inputs, **{name: row_views[name] for name in names}))
            try:
                self._load(check_data)
                return self._judged(run_label, check_data, Layout(dict.fromkeys(names, "plain"), poisoned=True))
            except Failed as failed:
                raise LayoutRefused(failed.reason) if failed.status == "UNSUPPORTED" else failed from None

        _without_refused({*row_views}, run)

    def _in_place(self, data: CheckData) -> None:
        """Runs the kernel with outputs in the memory of inputs, if the op allows it and the kernel takes `out`."""
        output_forms = dict(zip(data.names, data.forms, strict=True))
        shared_inputs = {
            output: name
            for output, name in self.spec.in_place.items()
            if isinstance(tensor_value := data.inputs.get(name), torch.Tensor)
            if output_forms.get(output) == (tensor_value.shape, tensor_value.dtype)
        }
        if shared_inputs and "out" in self.kernel.accepted:
            with suppress(LayoutRefused):
                layout = Layout(forms=data.forms, in_place=shared_inputs)
                self._judged(f"other data, out is {', '.join(shared_inputs.values())}", data, layout)

    def _with_other_options(self, first: CheckData) -> None:
        """Runs the kernel on the first inputs with other numeric options. A wrong kernel may reuse the old options."""
        new_options = {name: change(first.inputs[name]) for name, change in OPTIONS.items() if first.inputs.get(name)}
        if new_options:
            run_label = f"other {', '.join(new_options)}"
            check_data = self._kept_as(run_label, partial(dict, first.inputs, **new_options))
            self.runner.load(check_data.name, check_data.inputs, first.name)
            self._judged(run_label, check_data, Layout(poisoned=True))

    def _repeated(self, data: CheckData) -> None:
        """Reruns the kernel on the first inputs.  Result bits must be equal, unless it is declared nondeterministic.

        The first run calls the kernel twice, and the second run calls it in another thread.  A kernel may write into a
        caller's tensor `out`.  This tensor holds NaN before the first run, and an old answer before the second."""
        takes_out = "out" in self.kernel.accepted and not self.spec.mutates
        run_label = "first data again, into out" if takes_out else "first data again"
        output_forms = data.forms if takes_out else ()
        layout = Layout(out="plain" if takes_out else None, forms=output_forms)
        run_outputs = [self._judged(run_label, data, replace(layout, twice=True))]
        old_out = self.answers[-2][1] if takes_out else ()
        if [tensor_value.shape for tensor_value in old_out] != [tensor_value.shape for tensor_value in run_outputs[0]]:
            old_out = ()
        rerun = replace(layout, out="padded" if takes_out else None, stale=old_out, same_memory=True, elsewhere=True)
        try:
            run_outputs.append(self._judged(f"{run_label}, in another thread", data, rerun))
        except LayoutRefused:
            rerun = replace(rerun, out="plain")
            run_outputs.append(self._judged(f"{run_label}, in another thread", data, rerun))
        if self.device.type == "cuda":
            run_outputs += [self._judged(run_label, data) for _ in range(GPU_REPEATS)]
        if self._own_stream:
            return
        run_pairs = [(run_outputs[0], outputs) for outputs in run_outputs[1:]]
        if rerun.out == "padded" and _differing(self.spec, *run_pairs[0]):
            # Another layout of the output may take another path, as torch's products do; so it is run once more.
            run_pairs[0] = (run_outputs[1], self._judged(run_label, data, rerun))
        for output_pair in run_pairs:
            if name := _differing(self.spec, *output_pair):
                raise Failed("INCORRECT", f"{name}: two runs on the same inputs differ in their bits")

    def _in_the_same_memory(self, first: CheckData, other: CheckData) -> None:
        """Runs the kernel on new values at the same addresses, as an engine does.  The weights keep their values."""
        if not alike(first.inputs, other.inputs):
            return
        weight_names = kept_names(self.spec, first.inputs)
        check_data = other
        if weight_names:
            weights = {name: first.inputs[name] for name in weight_names}
            check_data = self._kept_as(SAME_MEMORY_LABEL, partial(dict, other.inputs, **weights))
            self._load(check_data, first.name)
        self._judged("other data in the same memory", check_data, Layout(same_memory=True, sms=ONE_SM))


def _differing(spec: OpSpec, one: Outputs, other: Outputs) -> str:
    """Returns the name of the first output that has different bits in two runs, or "" if all outputs are equal."""
    named_outputs = zip(spec.outputs, one, other, strict=False)
    return next(
        (name for name, first_output, second_output in named_outputs if not same_bits(first_output, second_output)), ""
    )


def _without_refused(names: set[str], run: Callable[[set[str]], Outputs]) -> Outputs | None:
    """Runs a kernel with a changed memory layout of its tensors, and returns the outputs.  `names` are the tensors to
    change, and `run(names)` calls the kernel.

    Tensors whose new layout the kernel refuses keep their own in the next run.  Returns None if it refuses all."""
    while names:
        try:
            return run(names)
        except LayoutRefused as refused:
            refused_names = {name for name in names if re.search(rf"\b{name}: ", str(refused))}
            names = names - refused_names if refused_names else set()
    return None


def _one_of(sets: Iterable[tuple[str, CheckData]], seed: int) -> list[tuple[str, CheckData]]:
    """Returns a list with one random input set, or an empty list without input sets. All sets are equally likely."""
    random_state, chosen_sets = random.Random(seed), list[tuple[str, CheckData]]()
    for seen_count, input_set in enumerate(sets, 1):
        chosen_sets = [input_set] if not random_state.randrange(seen_count) else chosen_sets
    return chosen_sets


@contextmanager
def _threads_for(inputs: Inputs) -> Iterator[None]:
    """Limits torch to one thread for small inputs. Starting threads takes longer than the work: 10x on a busy CPU."""
    old_threads = torch.get_num_threads()
    element_count = sum(tensor.numel() for tensor in inputs.values() if isinstance(tensor, torch.Tensor))
    if element_count < SMALL_ELEMENTS:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(old_threads)
