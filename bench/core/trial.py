"""Runs a kernel once for a check.  Guard regions around inputs and outputs show stray writes."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any
from unittest.mock import patch

import torch

from rooflab.bench.core.call import packed as packed_with
from rooflab.bench.core.call import planned
from rooflab.bench.core.check_data import named_in, options_on
from rooflab.bench.core.failed import Failed, LayoutRefused
from rooflab.bench.core.poison import (
    FAR_LAYOUTS,
    FAR_PAGES,
    NAN_BYTE,
    Arrangement,
    Guarded,
    aliases,
    changes_later,
    far_slots,
    guard,
    guard_output,
    in_one_storage,
    poisoned_allocations,
    same_bits,
    wipe,
)
from rooflab.bench.core.record import CheckedBy
from rooflab.bench.core.timers import tampered
from rooflab.kernels import _device
from rooflab.kernels.precision import pin_matmul_precision
from rooflab.kernels.registry import Kernel, interpreting
from rooflab.reference.contract import __file__ as CONTRACT
from rooflab.reference.spec import Inputs, OpSpec, Outputs, Scheme

MAX_SHARED_ELEMENTS = 2**21
"""If inputs in a changed layout have fewer elements than this, with their guards, they are put into one storage."""
BF16_REFUSAL_TEXT = "Triton's interpreter computes bf16 dot and sort wrongly"


@dataclass(frozen=True)
class Layout:
    """Describes one run of a kernel: the memory layout of its inputs and outputs, and how the kernel is called."""

    arranged: Mapping[str, Arrangement] = field(default_factory=dict)
    """The inputs whose memory layout is changed, and how it is changed."""
    out: Arrangement | None = None
    """The layout of the outputs that the caller passes; None if the kernel allocates its outputs."""
    forms: tuple[tuple[torch.Size, torch.dtype], ...] = ()
    """Shapes and dtypes of the outputs that the caller passes."""
    stale: Outputs = ()
    """An earlier answer, which the caller's outputs hold before the call instead of NaN."""
    same_memory: bool = False
    """Whether the inputs are written into the memory of the last run with `same_memory`."""
    poisoned: bool = False
    """Whether memory that the kernel allocates is filled with NaN."""
    alone: bool = False
    """Whether the run waits for the whole device before and after the call; otherwise only for the current stream."""
    twice: bool = False
    """Whether the kernel is called twice in a row, as by a timer, and the second result is read."""
    in_place: Mapping[str, str] = field(default_factory=dict)
    """By the name of an output, the name of the input whose memory the caller's output uses."""
    elsewhere: bool = False
    """Whether another thread makes the call."""
    sms: int | None = None
    """The number of SMs that `sm_count` tells the launcher; None means the number of the GPU, or 132."""


DEFAULT_LAYOUT = Layout()


class Runner:
    """Runs one kernel for a check.  A runner knows the inputs, but neither the random seed nor the expected outputs.

    Methods raise `Failed` on the kernel's faults.  `Outside` has the same methods for a `Runner` in another process."""

    def __init__(self, kernel: Kernel, spec: OpSpec, scheme: Scheme, device: torch.device):
        self.kernel, self.spec, self.scheme, self.device = kernel, spec, scheme, device
        self.free: tuple[str, ...] = ()
        """Names of arguments that a call may change or return, in addition to the arguments that the op mutates."""
        self._sets: dict[str, tuple[Inputs, Any]] = {}
        self._memory: dict[str, Guarded] = {}
        self._last: tuple[Outputs, Outputs] | None = None
        """The outputs of the last call, and copies of their values when the outputs were read."""

    def begin(self) -> None:
        """Raises `Failed` if the kernel cannot run here.  Sets the precision of torch's matrix multiplications."""
        pin_matmul_precision()
        refusal = self.kernel.why_not_here(self.device)
        if refusal:
            raise Failed.by(refusal)
        uses_bf16 = torch.bfloat16 in (self.scheme.activation, self.scheme.weight, self.scheme.output)
        if self.device.type == "cpu" and self.kernel.backend == "triton" and uses_bf16 and not _device.is_emulated:
            raise Failed("UNSUPPORTED", BF16_REFUSAL_TEXT)

    def load(self, name: str, inputs: Inputs, packed_in: str | None = None) -> bool:
        """Stores `inputs` under `name`, and their packed weight if the kernel has its own layout for the weight.

        Returns whether there is a packed weight.  `packed_in` is the name of stored inputs with the same weight.  If it
        is given, their packed weight is used again."""
        if packed_in is not None:
            self._sets[name] = inputs, self._sets[packed_in][1]
            return self._sets[name][1] is not None
        refusal = self.kernel.why_not_args(inputs, self.spec)
        if refusal:
            raise Failed.by(refusal)
        weight_name, packed_weight = self.spec.prepared, None
        if self.kernel.prepare is not None and weight_name is not None and inputs[weight_name] is not None:
            weight = guard(inputs[weight_name])
            try:
                with poisoned_allocations():
                    packed_weight = packed_with(self.kernel.prepare, weight_name, {**inputs, weight_name: weight.view})
            except Failed.errors() as error:
                raise Failed.of(error, "prepare") from error
            weight_damage = weight.damage(may_change=False)
            if weight_damage:
                raise Failed("INCORRECT", f"prepare: {weight_name} {weight_damage}")
        self._sets[name] = inputs, packed_weight
        return packed_weight is not None

    def run(self, name: str, layout: Layout = DEFAULT_LAYOUT) -> Outputs:
        """Runs the kernel once on guarded copies of the inputs that are stored under `name`.  Returns the outputs.

        Raises `LayoutRefused` if the kernel refuses the memory layout, and `Failed` on any other fault, such as a
        changed output of an earlier call.  The status is INVALID if the kernel replaced a function of the benchmark."""
        if layout.same_memory and (self.spec.mutates or self.free):
            self.settle()  # this run's inputs use the memory of the last call's outputs again
        with (
            poisoned_allocations() if layout.poisoned else nullcontext(),
            patch.object(_device, "sm_count_override", layout.sms),
        ):
            run_arguments = *self._sets[name], layout
            if layout.elsewhere:
                # OpenMP keeps the number of threads for each of its callers, so the new one is told.
                with ThreadPoolExecutor(1, "", torch.set_num_threads, (torch.get_num_threads(),)) as thread_pool:
                    outputs, output_values = thread_pool.submit(self._run, *run_arguments).result()
            else:
                outputs, output_values = self._run(*run_arguments)
        if not layout.alone:
            self.settle()
            self._last = outputs, output_values
        return output_values

    def _run(self, inputs: Inputs, packed: object, layout: Layout) -> tuple[Outputs, Outputs]:
        """Runs the kernel. Returns its outputs, and copies that the kernel's own stream makes right after the call."""
        kernel, spec, device = self.kernel, self.spec, self.device
        if FAR_PAGES in layout.arranged.values():
            slots_name, cache_name = spec.slots[:2]
            inputs = {**inputs, slots_name: far_slots(inputs[slots_name], inputs[cache_name])}
        guarded_inputs = _guarded(inputs, layout.arranged, self._memory if layout.same_memory else {})
        stale_values = layout.stale or repeat(None)
        outs = [
            guarded_inputs[layout.in_place[output]]
            if output in layout.in_place
            else guard_output(tuple(out_shape), dtype, device, arranged=layout.out or "plain", stale=stale)
            for output, (out_shape, dtype), stale in zip(spec.outputs, layout.forms, stale_values, strict=False)
        ]
        writable_names = {*self.free, *layout.in_place.values()}
        arguments: dict[str, Any] = {**inputs, **{name: tensor.view for name, tensor in guarded_inputs.items()}}
        if packed is not None and spec.prepared is not None:
            arguments[spec.prepared] = packed
        if outs:
            arguments["out"] = outs[0].view if len(outs) == 1 else tuple(guarded_output.view for guarded_output in outs)
        torch_threads, threads = torch.get_num_threads(), threading.active_count()
        can_refuse_layout = bool(layout.arranged or layout.in_place) or layout.out not in (None, "plain")
        refusal = kernel.why_not_args({name: argument for name, argument in arguments.items() if name != "out"}, spec)
        if refusal:
            kernel_failure = Failed.by(refusal)
            raise LayoutRefused(kernel_failure.reason) if can_refuse_layout else kernel_failure
        with self._errors_of_the_kernel(inputs, can_refuse_layout):
            arguments = planned(kernel, arguments)
        with queued(device, guarded_inputs.values(), layout.alone):
            with self._errors_of_the_kernel(inputs, can_refuse_layout):
                kernel_result = self._called(arguments, layout.twice)
            if tampering_text := tampered(torch_threads):
                raise Failed("INVALID", tampering_text)
            read_only_inputs = {name: tensor for name, tensor in guarded_inputs.items() if name not in writable_names}
            with self._errors_of_the_kernel(inputs, can_refuse_layout):
                outputs = _collect(kernel_result, spec, device, packed, read_only_inputs, outs)
                if layout.alone:
                    wait_for_all(device)
                # Read on the call's own stream, before late writes of another stream or thread can arrive.
                output_values = tuple(output.clone() for output in outputs)
                if device.type == "cuda":
                    _cuda.current_stream(device).synchronize()
        if threading.active_count() > threads:
            _raise(f"{', '.join(spec.outputs)}", changes_later(outputs, output_values))
        for name, tensor in guarded_inputs.items():
            input_damage = tensor.damage(may_change=name in writable_names or name in spec.mutates)
            _raise(name, f"{input_damage}: in place on the input" if input_damage == "was changed" else input_damage)
        for name, tensor in zip(spec.outputs, outs, strict=False):
            _raise(f"out ({name})", tensor.damage(may_change=True))
        return outputs, output_values

    def _called(self, arguments: Inputs, twice: bool) -> object:
        """Calls a kernel and returns its result. With `twice`, calls it twice unless it is interpreted or emulated."""
        accepted_arguments = {name: value for name, value in arguments.items() if name in self.kernel.accepted}
        if twice and self.by in ("gpu", "torch", "cpu"):
            self.kernel.fn(**accepted_arguments)
        return self.kernel.fn(**accepted_arguments)

    @contextmanager
    def _errors_of_the_kernel(self, inputs: Inputs, may_refuse: bool) -> Iterator[None]:
        """Turns errors of a kernel or a device into `Failed`.  With `may_refuse`, `ValueError` becomes `LayoutRefused`.

        If a `ValueError` names an optional argument, the kernel does not support it, and the status is UNSUPPORTED.  A
        `ValueError` from `reference/contract.py` never has this status, because it concerns computed values."""
        try:
            yield
        except Failed.errors() as error:
            if may_refuse and isinstance(error, ValueError):
                raise LayoutRefused(str(error)) from error
            if (
                isinstance(error, ValueError)
                and traceback.extract_tb(error.__traceback__)[-1].filename != CONTRACT
                and named_in(str(error), options_on(self.spec, inputs))
            ):
                raise Failed("UNSUPPORTED", f"{self.kernel.id}: {error}") from error
            raise Failed.of(error, "") from error

    def settle(self) -> None:
        """Raises `Failed` if an output of the last call has changed after the call.  Then overwrites the outputs with
        poison, so that a kernel that returns an old output again fails."""
        outputs, output_values = self._last or ((), ())
        for name, output, old_value in zip(self.spec.outputs, outputs, output_values, strict=False):
            if not same_bits(output, old_value):
                raise Failed("INCORRECT", f"{name}: an earlier call's output has changed since")
        wipe(outputs)
        self._last = None

    @property
    def by(self) -> CheckedBy:
        """Returns what executes the kernel (GPU, CPU, interpreter or torch), for the field `checked_by` of a result."""
        if self.kernel.backend in ("triton", "gluon") and interpreting():
            return "interpreter"
        return "gpu" if self.device.type == "cuda" else "cpu" if self.kernel.backend == "cpp" else "torch"

    def seen(self) -> dict[str, Any]:
        """Returns facts about the kernel's runs, as fields of `CheckResult`.  `checked_by` says whether a GPU, CPU,
        torch or an interpreter ran it.  An emulated kernel also has the data races found and the bytes moved."""
        return {"checked_by": self.by}

    def around(self) -> AbstractContextManager[object]:
        """Returns a context manager.  A worker process enters it for each request that it answers about the kernel.
        Here the context manager does nothing.  The emulator's subclass uses it to emulate the kernel's launches."""
        return nullcontext()


def _guarded(inputs: Inputs, arranged: Mapping[str, Arrangement], guards: dict[str, Guarded]) -> dict[str, Guarded]:
    """Returns copies of the input tensors inside larger buffers of NaN.  `arranged` gives the layout of some inputs.

    `guards` stores the copies.  An input with the same name and shape reuses its stored copy.  With `arranged`, the
    copies of small inputs of one dtype share one storage."""
    for input_index, (name, input_value) in enumerate(inputs.items()):
        if not isinstance(input_value, torch.Tensor):
            continue
        if name in guards and guards[name].view.shape == input_value.shape:
            guards[name].rewrite(input_value)
        else:
            guards[name] = guard(input_value, arranged.get(name, "plain"), input_index)
    if (
        arranged
        and not {*FAR_LAYOUTS, FAR_PAGES}.intersection(arranged.values())
        and sum(tensor.buffer.numel() for tensor in guards.values()) < MAX_SHARED_ELEMENTS
    ):
        return in_one_storage(guards)
    return guards


def _raise(name: str, fault: str | None) -> None:
    if fault:
        raise Failed("INCORRECT", f"{name}: {fault}")


def _collect(
    returned: object,
    spec: OpSpec,
    device: torch.device,
    packed: object,
    guarded: Mapping[str, Guarded],
    outs: list[Guarded],
) -> Outputs:
    if spec.mutates:
        if returned is not None:
            raise Failed("INCORRECT", f"expected None from an op that changes its arguments, got {type(returned)}")
        return tuple(guarded[name].own for name in spec.outputs)
    if not isinstance(returned, torch.Tensor | tuple | list):
        raise Failed("INCORRECT", f"returned {type(returned).__name__}, expected {', '.join(spec.outputs)}")
    outputs = (returned,) if isinstance(returned, torch.Tensor) else tuple(returned)
    if len(outputs) > len(spec.outputs) or not all(isinstance(output, torch.Tensor) for output in outputs):
        raise Failed("INCORRECT", f"returned {len(outputs)} values, expected tensors {', '.join(spec.outputs)}")
    buffer_by_name = {name: tensor.buffer for name, tensor in guarded.items()}
    if isinstance(packed, torch.Tensor) and packed.layout == torch.strided and spec.prepared is not None:
        buffer_by_name[spec.prepared] = packed
    for index, (name, output) in enumerate(zip(spec.outputs, outputs, strict=False)):
        if output.device.type != device.type:
            raise Failed("INCORRECT", f"{name}: expected device {device.type}, got {output.device.type}")
        if outs and (output.data_ptr(), output.stride()) != (outs[index].view.data_ptr(), outs[index].view.stride()):
            raise Failed("INCORRECT", f"{name}: expected the tensor given as out, got another")
        aliased_names = [input_name for input_name, buffer in buffer_by_name.items() if aliases(output, buffer)]
        if aliased_names:
            raise Failed("INCORRECT", f"{name}: shares memory with the input {aliased_names[0]}: in place on the input")
    return outputs


PAUSE_CYCLES = 2_000_000
"""About 1 ms, which is longer than the host needs to queue a call and the copy of its output."""

_cuda: Any = torch.cuda
"""`torch.cuda` without types, because torch does not annotate `_sleep`."""


@contextmanager
def queued(device: torch.device, inputs: Iterable[Guarded], alone: bool) -> Iterator[None]:
    """Prepares a kernel call, to detect a kernel that does not wait for its inputs.  First waits until the GPU is idle.

    Then fills the float inputs with NaN on the current stream, pauses, and restores them.  A kernel that does not wait
    reads NaN.  With `alone`, does not change the inputs."""
    if device.type != "cuda":
        yield
        return
    with _cuda.device(device):
        _cuda.synchronize(device)
        if not alone:
            # Not the integers: with an index of -1 a kernel would read outside its table and break the context.
            float_inputs = [tensor for tensor in inputs if tensor.buffer.dtype.is_floating_point]
            for tensor in float_inputs:
                tensor.buffer.view(torch.uint8).fill_(NAN_BYTE)
            _cuda._sleep(PAUSE_CYCLES)
            for tensor in float_inputs:
                tensor.buffer.view(torch.uint8).copy_(tensor.pristine.view(torch.uint8))
        yield


def wait_for_all(device: torch.device) -> None:
    """Waits for every stream of `device`."""
    if device.type == "cuda":
        _cuda.synchronize(device)


def several(device: torch.device) -> bool:
    """Returns whether `device` has several streams: true for a GPU."""
    return device.type == "cuda"
