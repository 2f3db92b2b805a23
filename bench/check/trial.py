"""One run of a kernel under watch: guarded inputs and outputs, its return value read at once, every fault in words."""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from rooflab.bench.calls.calls import output_dtypes, output_names, planned
from rooflab.bench.calls.calls import packed as packed_with
from rooflab.bench.check.cheats import (
    aliases,
    changes_later,
    give_back_l2,
    lazy,
    persisting_l2_bytes,
    still_running,
    work_noted,
)
from rooflab.bench.check.poison import NAN_BYTE, Guarded, guard, guard_output, poisoned_allocations
from rooflab.bench.records.record import Status
from rooflab.bench.timing import tamper
from rooflab.kernels.registry import Kernel
from rooflab.reference.compare import ErrorStats, elementwise
from rooflab.reference.spec import Inputs, OpSpec, Outputs, Scheme

if TYPE_CHECKING:
    from rooflab.kernels._contract import Refusal  # which an A/B's older side may not have

OutLayout = Literal["plain", "padded"]


class Failed(Exception):
    """Ends a check, with its status and reason."""

    def __init__(self, status: Status, reason: str):
        super().__init__(reason)
        self.status: Status = status
        self.reason = reason


def failed_by(refusal: Refusal | str) -> Failed:
    """What a kernel's refusal ends a check with.  A kernel of an A/B's older side refuses by a text,
    `UNSUPPORTED: ...`, and so does one that raises it."""
    if isinstance(refusal, str):
        status, _, reason = refusal.partition(": ")
        return Failed("UNAVAILABLE" if status == "UNAVAILABLE" else "UNSUPPORTED", reason)
    return Failed(refusal.status, refusal.reason)


class Refused(Exception):
    """The launcher refused a padded layout with a `ValueError`, which it may; `argument` is what it named."""

    def __init__(self, text: str):
        super().__init__(text)
        self.argument = text.partition(":")[0]


@dataclass(frozen=True)
class Data:
    """One set of inputs, what must come of it, and the weight as the kernel packed it, where it does."""

    inputs: Inputs
    oracle: Outputs
    limits: Outputs | None = None
    """How far from the oracle each element may be; None where the spec compares otherwise."""
    packed: Any = None

    def judge(self, spec: OpSpec, outputs: Outputs, scheme: Scheme) -> list[ErrorStats]:
        """One verdict per output, as `spec.judge` gives it: of attention the limits take longer than the oracle."""
        if self.limits is None:
            return spec.judge(outputs, self.oracle, self.inputs, scheme)
        named = zip(spec.outputs[: len(self.oracle)], outputs, self.oracle, self.limits, strict=True)
        return [elementwise(name, output, oracle, limit) for name, output, oracle, limit in named]


@dataclass(frozen=True)
class Trial:
    """What one run gave."""

    outputs: Outputs
    """The very tensors that the kernel wrote."""
    read: Outputs
    """Their values as soon as the current stream was done."""
    work: frozenset[str]
    """Names of what ran: torch's functions on a CPU, and on CUDA the device's kernels where the run was profiled."""


@dataclass(frozen=True)
class Layout:
    """Where a run's inputs and outputs lie."""

    padded: frozenset[str] = frozenset()
    """Inputs with longer strides."""
    out: OutLayout | None = None
    """Outputs are the caller's, in this layout."""
    stale: Outputs = ()
    """What the caller's outputs hold at first: an earlier answer, in place of NaN."""
    memory: dict[str, Guarded] | None = None
    """Inputs lie where those of an earlier run lay, as far as it is in here; this run's are put here."""
    alone: bool = False
    """The whole device waits before the call and after it; without it a run waits for its own stream alone."""
    profiled: bool = False
    """Notes the device's kernels."""


PLAIN = Layout()


def expect(spec: OpSpec, inputs: Inputs, scheme: Scheme, packed: Any = None) -> Data:
    """The inputs, their oracle and its limits."""
    oracle = spec.oracle(inputs)
    limits = None if spec.tolerance is None else spec.tolerance(inputs, oracle, scheme)
    return Data(inputs, oracle, limits, packed)


def prepare(kernel: Kernel, spec: OpSpec, inputs: Inputs, scheme: Scheme) -> Data:
    """What is expected of the inputs, with their packed weight.  Raises `Failed` where the kernel's `prepare` does
    wrong."""
    name = spec.prepared
    if kernel.prepare is None or name is None or inputs[name] is None:
        return expect(spec, inputs, scheme)
    weight = guard(inputs[name])
    try:
        with poisoned_allocations():
            packed = packed_with(kernel.prepare, name, {**inputs, name: weight.view})
    except known_errors() as error:
        raise failure(error, "prepare") from error
    damage = weight.damage(may_change=False)
    if damage:
        raise Failed("INCORRECT", f"prepare: {name} {damage}")
    return expect(spec, inputs, scheme, packed)


def run(
    kernel: Kernel, spec: OpSpec, data: Data, scheme: Scheme, device: torch.device, layout: Layout = PLAIN
) -> Trial:
    """Runs `kernel` once on guarded copies of its inputs.

    Raises `Refused` where it will not take padding, `Failed` INVALID where it replaced a tool of the bench, and else
    `Failed`.
    """
    guarded = _guarded(data.inputs, layout)
    outs = [
        guard_output(tuple(oracle.shape), dtype, device, padded=layout.out == "padded", stale=stale)
        for (oracle, dtype), stale in zip_longest(
            zip(data.oracle, output_dtypes(spec, data.oracle, scheme), strict=True) if layout.out else (),
            layout.stale if layout.out else (),
        )
    ]
    arguments: dict[str, Any] = {**data.inputs, **{name: tensor.view for name, tensor in guarded.items()}}
    if data.packed is not None and spec.prepared is not None:
        arguments[spec.prepared] = data.packed
    if outs:
        arguments["out"] = outs[0].view if len(outs) == 1 else tuple(guarded_out.view for guarded_out in outs)
    work: set[str] = set()
    refuses = bool(layout.padded) or layout.out == "padded"
    _may_take(kernel, spec, arguments, refuses)
    with _errors_of_the_kernel(refuses):
        arguments = planned(kernel, arguments)
    with queued(device, guarded.values(), layout.alone):
        with _errors_of_the_kernel(refuses), work_noted(work, device, layout.profiled):
            returned = kernel.fn(**{name: value for name, value in arguments.items() if name in kernel.accepted})
        threads = still_running(kernel.fn)
        _raise_tampered(device)
        outputs = _collect(returned, spec, data, scheme, guarded, outs)
        with _errors_of_the_kernel(refuses):
            if layout.alone:
                wait_for_all(device)
            # Read behind the call on its own stream, before what another one or a thread still writes can arrive.
            read = tuple(output.clone() for output in outputs)
            wait_for_own(device)
    if threads:
        late = changes_later(outputs, read, kernel.fn, threads)
        _raise(f"{', '.join(spec.outputs)}", late)
    for name, tensor in guarded.items():
        damage = tensor.damage(may_change=name in spec.mutates)
        _raise(name, f"{damage}: in place on the input" if damage == "was changed" else damage)
    for name, tensor in zip(spec.outputs, outs, strict=False):
        _raise(f"out ({name})", tensor.damage(may_change=True))
    return Trial(outputs, read, frozenset(work))


def _guarded(inputs: Inputs, layout: Layout) -> dict[str, Guarded]:
    """Guarded copies of all tensors, at the places that `layout.memory` knows already."""
    known = layout.memory if layout.memory is not None else {}
    for name, value in inputs.items():
        if not isinstance(value, torch.Tensor):
            continue
        if name in known and known[name].view.shape == value.shape:
            known[name].rewrite(value)
        else:
            known[name] = guard(value, padded=name in layout.padded)
    return known


def _raise(name: str, fault: str | None) -> None:
    if fault:
        raise Failed("INCORRECT", f"{name}: {fault}")


def _raise_tampered(device: torch.device) -> None:
    """Raises `Failed` where a tool of the bench is no longer the original, or L2 was set aside; undoes either."""
    found = tamper.tampered(timers=False)
    if found:
        tamper.restore()
        raise Failed("INVALID", found)
    set_aside = persisting_l2_bytes() if device.type == "cuda" else 0
    if set_aside:
        give_back_l2()
        raise Failed("INVALID", f"L2 persistence: {set_aside} bytes of L2 are set aside and outlive a flush")


def _may_take(kernel: Kernel, spec: OpSpec, arguments: dict[str, Any], may_refuse: bool) -> None:
    checked = {name: value for name, value in arguments.items() if name != "out"}
    refusal = kernel.why_not_args(checked, spec)
    if refusal:
        failed = failed_by(refusal)
        raise Refused(failed.reason) if may_refuse else failed


@contextmanager
def _errors_of_the_kernel(may_refuse: bool) -> Iterator[None]:
    """What a kernel raises, at once or on the device, as `Failed`, or as `Refused` of padding."""
    try:
        yield
    except known_errors() as error:
        if may_refuse and isinstance(error, ValueError):
            raise Refused(str(error)) from error
        raise failure(error, "") from error


def _collect(
    returned: Any, spec: OpSpec, data: Data, scheme: Scheme, guarded: Mapping[str, Guarded], outs: list[Guarded]
) -> Outputs:
    """The output tensors, or `Failed` where they are not what the op returns."""
    if spec.mutates:
        if returned is not None:
            raise Failed("INCORRECT", f"expected None, as of every op that changes its arguments, got {type(returned)}")
        return tuple(guarded[name].view for name in spec.outputs)
    if not isinstance(returned, torch.Tensor | tuple | list):
        raise Failed("INCORRECT", f"returned {type(returned).__name__}, expected {', '.join(spec.outputs)}")
    outputs = (returned,) if isinstance(returned, torch.Tensor) else tuple(returned)
    wanted_names = output_names(spec, data.oracle)
    if len(outputs) != len(wanted_names) or not all(isinstance(output, torch.Tensor) for output in outputs):
        raise Failed("INCORRECT", f"returned {len(outputs)} values, expected tensors {', '.join(wanted_names)}")
    memory = {name: tensor.buffer for name, tensor in guarded.items()}
    if isinstance(data.packed, torch.Tensor) and data.packed.layout == torch.strided and spec.prepared is not None:
        memory[spec.prepared] = data.packed
    every = zip(wanted_names, outputs, data.oracle, output_dtypes(spec, data.oracle, scheme), strict=True)
    for index, (name, output, oracle, dtype) in enumerate(every):
        _raise(name, lazy(output))
        wanted = (tuple(oracle.shape), dtype, oracle.device.type)
        found = (tuple(output.shape), output.dtype, output.device.type)
        for what, want, got in zip(("shape", "dtype", "device"), wanted, found, strict=True):
            if want != got:
                raise Failed("INCORRECT", f"{name}: expected {what} {want}, got {got}")
        if outs and (output.data_ptr(), output.stride()) != (outs[index].view.data_ptr(), outs[index].view.stride()):
            raise Failed("INCORRECT", f"{name}: expected the tensor given as out, got another")
        aliased = [key for key, buffer in memory.items() if aliases(output, buffer)]
        if aliased:
            raise Failed("INCORRECT", f"{name}: shares memory with the input {aliased[0]}: in place on the input")
    return outputs


def known_errors() -> tuple[type[Exception], ...]:
    """What a kernel may raise; any other exception is a fault of the checker."""
    from triton.errors import TritonError  # only here: whoever imports Triton first decides on its interpreter

    return (
        TritonError,
        RuntimeError,
        ValueError,
        TypeError,
        LookupError,
        AttributeError,
        AssertionError,
        ArithmeticError,
        MemoryError,
        ImportError,
        OSError,
    )


def failure(error: Exception, where: str) -> Failed:
    """The status and the text that stand for what a kernel raised."""
    from triton.compiler.errors import CompilationError
    from triton.runtime.errors import OutOfResources, PTXASError

    from rooflab.kernels._cuda import CudaCompileError

    text = str(error).strip()
    if isinstance(error, torch.cuda.OutOfMemoryError | MemoryError) or "can't allocate memory" in text:
        return Failed("OUT_OF_MEMORY", text)
    if isinstance(error, ValueError) and text.startswith(("UNSUPPORTED: ", "UNAVAILABLE: ")):
        return failed_by(text)
    frame = traceback.extract_tb(error.__traceback__)[-1]
    place = f"{Path(frame.filename).name}:{frame.lineno}"
    reason = f"{where + ': ' if where else ''}{type(error).__name__}: {text} ({place})"
    compile_time = isinstance(error, CompilationError | OutOfResources | PTXASError | CudaCompileError)
    return Failed("COMPILE_ERROR" if compile_time else "RUNTIME_ERROR", reason)


PAUSE_CYCLES = 2_000_000
"""About 1 ms: longer than the host needs to queue one call and the reading of its output."""

_cuda: Any = torch.cuda
"""Untyped, because torch leaves `_sleep` without annotations."""


@contextmanager
def queued(device: torch.device, inputs: Iterable[Guarded], alone: bool) -> Iterator[None]:
    """Inside it a kernel is called; `alone`, on an idle device, and else behind a pause and then its inputs' values."""
    if device.type != "cuda":
        yield
        return
    with _cuda.device(device):
        _cuda.synchronize(device)
        if not alone:
            # Not the integers: an index of -1 would read outside its table, and end the process with the kernel.
            floats = [tensor for tensor in inputs if tensor.buffer.dtype.is_floating_point]
            for tensor in floats:
                tensor.buffer.view(torch.uint8).fill_(NAN_BYTE)
            _cuda._sleep(PAUSE_CYCLES)
            for tensor in floats:
                tensor.buffer.view(torch.uint8).copy_(tensor.pristine.view(torch.uint8))
        yield


def wait_for_own(device: torch.device) -> None:
    """Waits for the current stream, and for no other."""
    if device.type == "cuda":
        _cuda.current_stream(device).synchronize()


def wait_for_all(device: torch.device) -> None:
    """Waits for every stream."""
    if device.type == "cuda":
        _cuda.synchronize(device)


def several(device: torch.device) -> bool:
    """Whether `device` has streams, that one may be waited for and another not."""
    return device.type == "cuda"
