"""Finds out why a kernel's outputs are wrong.  A second run confirms each explanation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from rooflab.bench.core.check_data import CheckData
from rooflab.bench.core.failed import Failed, LayoutRefused
from rooflab.bench.core.poison import FAR_LAYOUTS, FAR_PAGES, kept_names, never_written, same_bits
from rooflab.bench.core.trial import Layout, Runner, several
from rooflab.reference.spec import Inputs, OpSpec, Outputs

Earlier = tuple[str, Outputs, Inputs]
"""The name, the expected outputs and the inputs of an earlier call."""


@dataclass(frozen=True)
class Look:
    """Runs a kernel again after a wrong output, to find the cause."""

    spec: OpSpec
    runner: Runner
    device: torch.device
    own_stream: bool

    def fault(self, read: Outputs, data: CheckData, layout: Layout, answers: Sequence[Earlier], before: bool) -> str:
        """Explains a wrong output of a kernel.  Returns "" if no cause is found.

        `read` holds the wrong values.  `answers` holds the outputs of earlier calls, because the kernel may return an
        old output again.  `before` is true if an earlier call on the same inputs was right."""
        if layout.sms and self._is_right(data, replace(layout, sms=None)) and not self._is_right(data, layout):
            grid_text = f"a grid for {layout.sms} SMs, where a CTA takes several tiles"
            return f"with {grid_text}; with a grid for all SMs it is right"
        if layout.elsewhere and self._is_right(data, replace(layout, elsewhere=False)):
            return "a call from another thread: it is right only in the thread of its first call"
        if several(self.device) and self._is_right(data, replace(layout, alone=True)):
            return "work on another stream: it is right only if the caller waits for the whole device"
        if self._unwritten(read, data, layout, before):
            return "the previous output: it returns memory that it did not write, which may hold an earlier result"
        if explanation := self._kept(read, data, layout, answers):
            return explanation
        if layout.out in FAR_LAYOUTS or not {*FAR_LAYOUTS, FAR_PAGES}.isdisjoint(layout.arranged.values()):
            return self._far(data, layout)
        if layout.arranged and self._is_right(data, replace(layout, arranged={})):
            strided_names = " or ".join(sorted(layout.arranged))
            return f"it takes strides of {strided_names} for granted: with the usual ones it is right"
        if before:
            return "it was right on this data before: its result depends on earlier calls, or on being watched"
        return self._rounded(read, data, layout)

    def _run(self, data: CheckData, layout: Layout) -> Outputs:
        """Runs the kernel again and returns its outputs, or an empty tuple if it fails or refuses the layout."""
        try:
            return self.runner.run(data.name, layout)
        except (Failed, LayoutRefused):
            return ()

    def _is_right(self, data: CheckData, layout: Layout) -> bool:
        outputs = self._run(data, layout)
        return bool(outputs) and not data.faults(outputs, self.own_stream)

    def _is_right_on(self, data: CheckData, layout: Layout, changed: Inputs) -> tuple[bool, Outputs]:
        """Runs the kernel on the inputs of `data`, with some tensors replaced by the tensors in `changed`.  Returns a
        pair: whether the outputs are right for these inputs, and the outputs."""
        second_check = CheckData(self.spec, {**data.inputs, **changed}, data.scheme, "second look")
        try:
            self.runner.load(second_check.name, second_check.inputs)
            outputs = self._run(second_check, layout)
            return bool(outputs) and not second_check.faults(outputs, self.own_stream), outputs
        except Failed:
            return False, ()

    def _unwritten(self, read: Outputs, data: CheckData, layout: Layout, before: bool) -> bool:
        """Tells whether the kernel returned memory that it did not write. Such outputs hold older contents."""
        is_stale = bool(layout.stale) and _same(read, layout.stale)
        if not is_stale and (not never_written(read) or layout.arranged):
            return False
        if before and not is_stale:
            return True  # it has computed other values than poison
        if layout.out is not None:
            constant_tensors = tuple(torch.full_like(output, 3) for output in read)
            return _same(self._run(data, replace(layout, stale=constant_tensors)), constant_tensors)
        freed_tensors = [torch.full_like(output, 3) for output in read for _ in range(8)]
        del freed_tensors  # `torch.empty` takes memory that was freed last
        second_outputs = self._run(data, replace(layout, poisoned=False))
        return bool(second_outputs) and not _same(second_outputs, read)

    def _kept(self, read: Outputs, data: CheckData, layout: Layout, answers: Sequence[Earlier]) -> str:
        """Explains the wrong output `read` that the kernel kept from an earlier call in `answers`, or returns ""."""
        for age, (label, outputs, inputs) in enumerate(reversed(answers)):
            if not _same(read, outputs):
                continue
            rotated_inputs = {
                name: value.roll(1, -1)
                for name, value in data.inputs.items()
                if isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype.itemsize > 1
                if value.ndim and name not in kept_names(self.spec, data.inputs)
            }
            _, new_outputs = self._is_right_on(data, layout, rotated_inputs)
            is_cached = bool(new_outputs) and not data.faults(new_outputs, self.own_stream)
            if is_cached or (new_outputs and (_same(new_outputs, read) or _same(self._run(data, layout), new_outputs))):
                return f"a cached answer: the output of {'an earlier call' if age else 'the call before'}, on {label}"
            differing = [name for name, value in data.inputs.items() if not _equal(value, inputs.get(name))]
            return f"the output is that on {label}, as if {', '.join(differing)} had not changed" if new_outputs else ""
        return ""

    def _far(self, data: CheckData, layout: Layout) -> str:
        """Names tensors whose rows beyond 32-bit offsets the kernel misses, or returns "" if near rows are wrong."""
        plain_layout = replace(layout, arranged={}, out=None, forms=())
        far_layouts = {name: replace(plain_layout, arranged={name: kind}) for name, kind in layout.arranged.items()}
        if FAR_PAGES in layout.arranged.values():  # one slot reaches all of them
            far_layouts = {" and ".join(layout.arranged): layout}
        far_layouts |= {"out": replace(layout, arranged={})} if layout.out in FAR_LAYOUTS else {}
        wrong_names = [name for name, far_layout in sorted(far_layouts.items()) if not self._is_right(data, far_layout)]
        if not wrong_names or not self._is_right(data, plain_layout):
            return ""
        return f"it reaches rows of {' and '.join(wrong_names)} by offsets of 32 bits: near rows come out right"

    def _rounded(self, read: Outputs, data: CheckData, layout: Layout) -> str:
        """Tests whether an fp32 kernel computes products in a shorter format, such as bf16.  Rounds the inputs to this
        format, and runs the kernel.  If the result is then right, returns a text that names the format, otherwise "".

        Most elements must be off: a race in a few elements may not repeat, and would look like a short format."""
        float_inputs = [v for v in data.inputs.values() if isinstance(v, torch.Tensor) and v.dtype == torch.float32]
        if data.scheme.name != "fp32" or not float_inputs or not self.spec.cost_of(data.inputs).tensor_flops:
            return ""
        if not any(2 * stats.mismatched > stats.total for stats in data.judge(read, self.own_stream)):
            return ""
        for bits, format_name in ((10, "TF32 or fp16"), (7, "bf16")):
            rounded_inputs = {
                name: ((input_value.view(torch.int32) + (1 << 22 - bits)) & (-1 << 23 - bits)).view(torch.float32)
                for name, input_value in data.inputs.items()
                if isinstance(input_value, torch.Tensor) and input_value.dtype == torch.float32
            }
            if self._is_right_on(data, layout, rounded_inputs)[0]:
                return f"products in {format_name}: of inputs with {bits} bits behind the leading one they are right"
        return ""


def _same(first: Outputs, second: Outputs) -> bool:
    return bool(first) and len(first) == len(second) and all(map(_equal, first, second))


def _equal(first: object, second: object) -> bool:
    """Tells whether two values are equal. Compares tensors bit by bit."""
    if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor):
        return first.shape == second.shape and first.dtype == second.dtype and same_bits(first, second)
    return first is second or (type(first) is type(second) and first == second)
