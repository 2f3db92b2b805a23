"""One watched run of a kernel: inputs and outputs are guarded, the result is read at once, every fault has a text."""

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
    from rooflab.kernels._contract import Refusal  # the older side of an A/B may not have it

OutLayout = Literal["plain", "padded"]


class Failed(Exception):
    """Ends a check, with its status and reason."""

    def __init__(self, status: Status, reason: str):
        super().__init__(reason)
        self.status: Status = status
        self.reason = reason


def failed_by(refusal: Refusal | str) -> Failed:
    """The `Failed` of a refusal; a kernel that raises it, or that an A/B's older side has, gives it as a text."""
    if isinstance(refusal, str):
        status, _, reason = refusal.partition(": ")
        return Failed("UNAVAILABLE" if status == "UNAVAILABLE" else "UNSUPPORTED", reason)
    return Failed(refusal.status, refusal.reason)


class Refused(Exception):
    """The launcher refused a padded layout with a `ValueError`, as it may; `argument` is the argument that it names."""

    def __init__(self, text: str):
        super().__init__(text)
        self.argument = text.partition(":")[0]


@dataclass(frozen=True)
class Data:
    """One set of inputs, the expected outputs, and the packed weight if the kernel packs one."""

    inputs: Inputs
    oracle: Outputs
    limits: Outputs | None = None
    """The allowed error of each element; None for an op that `compare` judges."""
    packed: Any = None

    def judge(self, spec: OpSpec, outputs: Outputs, scheme: Scheme) -> list[ErrorStats]:
        """One verdict per output, as from `spec.judge`, but with the known limits: attention's take longer than its
        oracle."""
        if self.limits is None:
            return spec.judge(outputs, self.oracle, self.inputs, scheme)
        named = zip(spec.outputs[: len(self.oracle)], outputs, self.oracle, self.limits, strict=True)
        return [elementwise(name, output, oracle, limit) for name, output, oracle, limit in named]


@dataclass(frozen=True)
class Trial:
    """The result of one run."""

    outputs: Outputs
    """The tensors that the kernel wrote."""
    read: Outputs
    """Their values as soon as the current stream was done."""
    work: frozenset[str]
    """Names of what ran: torch's functions on a CPU; on CUDA the device's kernels if the run was profiled."""


@dataclass(frozen=True)
class Layout:
    """The memory layout of a run's inputs and outputs."""

    padded: frozenset[str] = frozenset()
    """Inputs with longer strides."""
    out: OutLayout | None = None
    """The caller passes outputs in this layout; None: the kernel allocates them."""
    stale: Outputs = ()
    """An earlier answer that the caller's outputs hold at first, instead of NaN."""
    memory: dict[str, Guarded] | None = None
    """Memory of an earlier run's inputs, to be used again; this run adds its own."""
    alone: bool = False
    """Waits for the whole device before and after the call; otherwise only for the current stream."""
    profiled: bool = False
    """Records the device's kernels."""


PLAIN = Layout()


def expect(spec: OpSpec, inputs: Inputs, scheme: Scheme, packed: Any = None) -> Data:
    """The inputs, their oracle and its limits."""
    oracle = spec.oracle(inputs)
    limits = None if spec.tolerance is None else spec.tolerance(inputs, oracle, scheme)
    return Data(inputs, oracle, limits, packed)


def prepare(kernel: Kernel, spec: OpSpec, inputs: Inputs, scheme: Scheme) -> Data:
    """The inputs with the expected outputs and the packed weight.  Raises `Failed` if the kernel's `prepare` fails."""
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

    Raises `Refused` if the kernel does not take padding, `Failed` INVALID if it replaced a function of the bench, and
    `Failed` on any other fault.
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
            # Read on the call's own stream, before late writes of another stream or thread can arrive.
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
    """Guarded copies of all tensors, in the memory of `layout.memory` where it has a fitting one."""
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
    """Raises `Failed` if a function of the bench was replaced, or a part of L2 was reserved; undoes both."""
    tampering = tamper.tampered(timers=False)
    if tampering:
        tamper.restore()
        raise Failed("INVALID", tampering)
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
    """Turns an exception of the kernel, also from the device, into `Failed`, or into `Refused` of padding."""
    try:
        yield
    except known_errors() as error:
        if may_refuse and isinstance(error, ValueError):
            raise Refused(str(error)) from error
        raise failure(error, "") from error


def _collect(
    returned: Any, spec: OpSpec, data: Data, scheme: Scheme, guarded: Mapping[str, Guarded], outs: list[Guarded]
) -> Outputs:
    if spec.mutates:
        if returned is not None:
            raise Failed("INCORRECT", f"expected None from an op that changes its arguments, got {type(returned)}")
        return tuple(guarded[name].view for name in spec.outputs)
    if not isinstance(returned, torch.Tensor | tuple | list):
        raise Failed("INCORRECT", f"returned {type(returned).__name__}, expected {', '.join(spec.outputs)}")
    outputs = (returned,) if isinstance(returned, torch.Tensor) else tuple(returned)
    names = output_names(spec, data.oracle)
    if len(outputs) != len(names) or not all(isinstance(output, torch.Tensor) for output in outputs):
        raise Failed("INCORRECT", f"returned {len(outputs)} values, expected tensors {', '.join(names)}")
    memory = {name: tensor.buffer for name, tensor in guarded.items()}
    if isinstance(data.packed, torch.Tensor) and data.packed.layout == torch.strided and spec.prepared is not None:
        memory[spec.prepared] = data.packed
    every = zip(names, outputs, data.oracle, output_dtypes(spec, data.oracle, scheme), strict=True)
    for index, (name, output, oracle, dtype) in enumerate(every):
        _raise(name, lazy(output))
        expected = (tuple(oracle.shape), dtype, oracle.device.type)
        actual = (tuple(output.shape), output.dtype, output.device.type)
        for what, right, value in zip(("shape", "dtype", "device"), expected, actual, strict=True):
            if right != value:
                raise Failed("INCORRECT", f"{name}: expected {what} {right}, got {value}")
        if outs and (output.data_ptr(), output.stride()) != (outs[index].view.data_ptr(), outs[index].view.stride()):
            raise Failed("INCORRECT", f"{name}: expected the tensor given as out, got another")
        aliased = [key for key, buffer in memory.items() if aliases(output, buffer)]
        if aliased:
            raise Failed("INCORRECT", f"{name}: shares memory with the input {aliased[0]}: in place on the input")
    return outputs


def known_errors() -> tuple[type[Exception], ...]:
    """Exceptions that a kernel may raise; any other is a fault of the checker."""
    from triton.errors import TritonError  # not at the top: the first import of Triton fixes its interpreter mode

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
    """The `Failed` with status and text for an exception of a kernel."""
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
"""About 1 ms: longer than the host needs to queue one call and the copy of its output."""

_cuda: Any = torch.cuda
"""Untyped, because torch leaves `_sleep` without annotations."""


@contextmanager
def queued(device: torch.device, inputs: Iterable[Guarded], alone: bool) -> Iterator[None]:
    """Encloses a call: `alone` on an idle device, otherwise on a stream that first pauses and writes the inputs."""
    if device.type != "cuda":
        yield
        return
    with _cuda.device(device):
        _cuda.synchronize(device)
        if not alone:
            # Not the integers: with an index of -1 a kernel would read outside its table and break the context.
            floats = [tensor for tensor in inputs if tensor.buffer.dtype.is_floating_point]
            for tensor in floats:
                tensor.buffer.view(torch.uint8).fill_(NAN_BYTE)
            _cuda._sleep(PAUSE_CYCLES)
            for tensor in floats:
                tensor.buffer.view(torch.uint8).copy_(tensor.pristine.view(torch.uint8))
        yield


def wait_for_own(device: torch.device) -> None:
    """Waits only for the current stream."""
    if device.type == "cuda":
        _cuda.current_stream(device).synchronize()


def wait_for_all(device: torch.device) -> None:
    """Waits for every stream."""
    if device.type == "cuda":
        _cuda.synchronize(device)


def several(device: torch.device) -> bool:
    """Whether `device` has several streams."""
    return device.type == "cuda"
