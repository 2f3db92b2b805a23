"""One run of a kernel under watch: guarded inputs and outputs, its return value read at once, every fault in words."""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from rooflab.bench.poison import Guarded, guard, guard_output, poisoned_allocations
from rooflab.bench.records import Status
from rooflab.kernels.registry import Kernel
from rooflab.reference.spec import Inputs, OpSpec, Outputs, Scheme

OutLayout = Literal["plain", "padded"]


class Failed(Exception):
    """Ends a check, with its status and reason."""

    def __init__(self, status: Status, reason: str):
        super().__init__(reason)
        self.status: Status = status
        self.reason = reason


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
    packed: Any = None


@dataclass(frozen=True)
class Trial:
    """What one run gave."""

    outputs: Outputs
    """The very tensors that the kernel wrote."""
    read: Outputs
    """Their values as soon as the current stream was done."""


def prepare(kernel: Kernel, spec: OpSpec, inputs: Inputs) -> Data:
    """The inputs, their oracle and their packed weight.  Raises `Failed` where the kernel's `prepare` does wrong."""
    oracle = spec.oracle(inputs)
    name = spec.prepared
    if kernel.prepare is None or name is None or inputs[name] is None:
        return Data(inputs, oracle)
    weight = guard(inputs[name])
    try:
        with poisoned_allocations():
            packed = kernel.prepare(weight.view)
    except known_errors() as error:
        raise failure(error, "prepare") from error
    damage = weight.damage(may_change=False)
    if damage:
        raise Failed("INCORRECT", f"prepare: {name} {damage}")
    return Data(inputs, oracle, packed)


def run(
    kernel: Kernel,
    spec: OpSpec,
    data: Data,
    scheme: Scheme,
    device: torch.device,
    *,
    padded: frozenset[str] = frozenset(),
    out: OutLayout | None = None,
) -> Trial:
    """Runs `kernel` once on guarded copies of its inputs, those named in `padded` with longer strides.

    With `out` it writes to the caller's tensors.  Raises `Refused` where it will not take padding, else `Failed`.
    """
    guarded = {
        name: guard(value, padded=name in padded)
        for name, value in data.inputs.items()
        if isinstance(value, torch.Tensor)
    }
    outs = [
        guard_output(tuple(oracle.shape), _dtype(oracle, scheme), device, padded=out == "padded")
        for oracle in (data.oracle if out else ())
    ]
    arguments: dict[str, Any] = {**data.inputs, **{name: tensor.view for name, tensor in guarded.items()}}
    if data.packed is not None and spec.prepared is not None:
        arguments[spec.prepared] = data.packed
    if outs:
        arguments["out"] = outs[0].view if len(outs) == 1 else tuple(guarded_out.view for guarded_out in outs)
    returned = _call(kernel, spec, arguments, device, may_refuse=bool(padded) or out == "padded")
    outputs = _collect(returned, spec, data, scheme, guarded, outs)
    # Read now, before anything that another stream or another thread still writes can arrive.
    read = tuple(output.clone() for output in outputs)
    for name, tensor in guarded.items():
        _raise_damage(name, tensor.damage(may_change=name in spec.mutates))
    for name, tensor in zip(spec.outputs, outs, strict=False):
        _raise_damage(f"out ({name})", tensor.damage(may_change=True))
    return Trial(outputs, read)


def _raise_damage(name: str, damage: str | None) -> None:
    if damage:
        raise Failed("INCORRECT", f"{name}: {damage}")


def _dtype(oracle: torch.Tensor, scheme: Scheme) -> torch.dtype:
    """An oracle of floats stands for the scheme's output; one of integers is what it is."""
    return scheme.output if oracle.dtype.is_floating_point else oracle.dtype


def _call(kernel: Kernel, spec: OpSpec, arguments: dict[str, Any], device: torch.device, *, may_refuse: bool) -> Any:
    checked = {name: value for name, value in arguments.items() if name != "out"}
    reason = (kernel.why_not_args(checked, spec) or "").removeprefix("UNSUPPORTED: ")
    if reason:
        raise Refused(reason) if may_refuse else Failed("UNSUPPORTED", reason)
    try:
        returned = kernel.fn(**{name: value for name, value in arguments.items() if name in kernel.accepted})
        if device.type == "cuda":
            # This stream alone: a kernel that works on another and does not wait for it is wrong.
            torch.cuda.current_stream(device).synchronize()
        return returned
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
    if len(outputs) != len(spec.outputs) or not all(isinstance(output, torch.Tensor) for output in outputs):
        raise Failed("INCORRECT", f"returned {len(outputs)} values, expected tensors {', '.join(spec.outputs)}")
    inputs = {name: tensor.buffer.untyped_storage().data_ptr() for name, tensor in guarded.items()}
    if isinstance(data.packed, torch.Tensor) and data.packed.layout == torch.strided and spec.prepared is not None:
        inputs[spec.prepared] = data.packed.untyped_storage().data_ptr()
    for index, (name, output, oracle) in enumerate(zip(spec.outputs, outputs, data.oracle, strict=True)):
        wanted = (tuple(oracle.shape), _dtype(oracle, scheme), oracle.device.type)
        found = (tuple(output.shape), output.dtype, output.device.type)
        for what, want, got in zip(("shape", "dtype", "device"), wanted, found, strict=True):
            if want != got:
                raise Failed("INCORRECT", f"{name}: expected {what} {want}, got {got}")
        if outs and (output.data_ptr(), output.stride()) != (outs[index].view.data_ptr(), outs[index].view.stride()):
            raise Failed("INCORRECT", f"{name}: expected the tensor given as out, got another")
        aliased = [key for key, pointer in inputs.items() if pointer == output.untyped_storage().data_ptr()]
        if output.numel() and aliased:
            raise Failed("INCORRECT", f"{name}: shares memory with the input {aliased[0]}")
    return outputs


def known_errors() -> tuple[type[Exception], ...]:
    """What a kernel is known to raise; anything else is a fault of the checker."""
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

    text = str(error).strip()
    if isinstance(error, torch.cuda.OutOfMemoryError | MemoryError) or "can't allocate memory" in text:
        return Failed("OUT_OF_MEMORY", text)
    if isinstance(error, ValueError):
        status, separator, reason = text.partition(": ")
        if separator and status in ("UNSUPPORTED", "UNAVAILABLE"):
            return Failed("UNSUPPORTED" if status == "UNSUPPORTED" else "UNAVAILABLE", reason)
    frame = traceback.extract_tb(error.__traceback__)[-1]
    place = f"{Path(frame.filename).name}:{frame.lineno}"
    reason = f"{where + ': ' if where else ''}{type(error).__name__}: {text} ({place})"
    compile_time = isinstance(error, CompilationError | OutOfResources | PTXASError)
    return Failed("COMPILE_ERROR" if compile_time else "RUNTIME_ERROR", reason)
