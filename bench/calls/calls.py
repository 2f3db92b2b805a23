"""Kernels as functions of no arguments, ready to be timed."""

from __future__ import annotations

import hashlib
import inspect
import itertools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch

from rooflab.kernels.registry import Kernel
from rooflab.reference.spec import Case, Inputs, OpSpec, Outputs, Scheme, as_tuple, nbytes

PER_INPUT_BYTE, PER_OUTPUT_BYTE = 12, 24
"""Bytes held at most per byte of input and output: guarded copies, and the oracle and its tolerance in fp64."""
COPIES = 3
"""Sets of inputs that a kernel cycles through, so that no call finds the last one's memory."""


class Rotation:
    """A function of no arguments that calls a kernel on each of several sets of inputs in turn.

    The sets are of one case and seed. Weights are packed, steps planned, and outputs allocated where the kernel takes
    them, at the start, so that no call does any of it.  What the last call on each set returned is kept, to be judged
    after timing: a kernel may be right when it is called once and wrong when calls follow one another.
    """

    def __init__(self, kernel: Kernel, spec: OpSpec, copies: Sequence[Inputs]):
        self._spec = spec
        self._copies = copies
        self._kernel = kernel
        self._calls: list[partial[Any]] = []
        self._last: list[Any] = [None] * len(copies)
        outputs: Outputs | None = None
        for inputs in copies:
            arguments = {name: value for name, value in inputs.items() if name in kernel.accepted}
            if kernel.prepare is not None and spec.prepared is not None and arguments.get(spec.prepared) is not None:
                arguments[spec.prepared] = packed(kernel.prepare, spec.prepared, arguments)
            if kernel.takes_out and not spec.mutates:
                outputs = outputs or as_tuple(kernel.fn(**arguments))
                outs = tuple(torch.empty_like(output) for output in outputs)
                arguments["out"] = outs[0] if len(outs) == 1 else outs
            self._calls.append(partial(kernel.fn, **planned(kernel, arguments)))
        self._turns = itertools.cycle(range(len(copies)))

    @property
    def sets(self) -> int:
        """How many sets of inputs the calls take in turn."""
        return len(self._calls)

    @property
    def first(self) -> Callable[[], Any]:
        """The call on the first set, of which nothing is kept."""
        return self._calls[0]

    def plan(self) -> None:
        """Plans anew for what the inputs hold now, as an engine does in each step."""
        self._calls = [partial(call.func, **planned(self._kernel, call.keywords)) for call in self._calls]

    def __call__(self) -> Any:
        """The next call's result."""
        turn = next(self._turns)
        self._last[turn] = result = self._calls[turn]()
        return result

    def outputs(self) -> Iterator[tuple[Inputs, Outputs]]:
        """Every set that was used, and what its last call left: for a mutating op, the arguments that it changes."""
        for inputs, result in zip(self._copies, self._last, strict=True):
            if self._spec.mutates:
                yield inputs, tuple(inputs[name] for name in self._spec.outputs)
            elif result is not None:
                yield inputs, as_tuple(result)


def kernel_file_sha256(kernel: Kernel) -> str | None:
    """SHA-256 of the file that registered `kernel`; None for one of the tree's, whose commit is known."""
    module = sys.modules.get(kernel.fn.__module__)
    file = getattr(module, "__file__", None)
    if file is None or kernel.fn.__module__.startswith("rooflab."):
        return None
    return hashlib.sha256(Path(file).read_bytes()).hexdigest()


def input_bytes(inputs: Inputs) -> int:
    """Bytes of all tensors of `inputs`, real or `meta`."""
    return nbytes(*(value for value in inputs.values() if isinstance(value, torch.Tensor)))


def free_bytes(device: torch.device) -> float:
    """Bytes of memory that are free on `device`, among them what torch holds and has not given to a tensor."""
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return float(torch.cuda.mem_get_info(device)[0] + cached)
    return float(psutil.virtual_memory().available)


def short_of_memory(spec: OpSpec, priced: Inputs, device: torch.device) -> str:
    """Why there is too little memory to check `priced` (meta inputs), or nothing."""
    needed = PER_INPUT_BYTE * input_bytes(priced) + PER_OUTPUT_BYTE * spec.cost(**priced).write_bytes
    free = free_bytes(device)
    return f"needs about {needed / 1e9:.1f} GB, {free / 1e9:.1f} GB are free" if needed > free else ""


def copies_of(spec: OpSpec, case: Case, scheme: Scheme, device: torch.device, seed: int) -> list[Inputs]:
    """As many sets of a case's inputs as a `Rotation` takes and as fit in memory, at least one.

    Made anew and not cloned, so that strides, views and lengths are those of the case.
    """
    priced = spec.make_inputs(case, scheme, torch.device("meta"), seed)
    fit = int(free_bytes(device) / 4 / max(1, input_bytes(priced)))
    return [spec.make_inputs(case, scheme, device, seed) for _ in range(max(1, min(COPIES, fit)))]


def packed(prepare: Callable[..., Any], weight: str, inputs: Mapping[str, Any]) -> Any:
    """The argument `weight` of `inputs` as `prepare` packs it from it and the others that it names."""
    beside = list(inspect.signature(prepare).parameters)[1:]
    return prepare(inputs[weight], **{name: inputs[name] for name in beside})


def planned(kernel: Kernel, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """`arguments`, and a new plan for them where the kernel plans; of tensors of floats it sees the shape alone."""
    plan_of = getattr(kernel, "plan_of", None)  # an A/B's older side may have none: its kernels plan in their calls
    if plan_of is None or kernel.plan is None:
        return dict(arguments)
    return {**arguments, "plan": plan_of({name: _shape_alone(value) for name, value in arguments.items()})}


def _shape_alone(value: Any) -> Any:
    """A tensor of floats with its memory left out; any other value as it is."""
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


def output_names(spec: OpSpec, oracle: Outputs) -> tuple[str, ...]:
    """The names of the outputs of one call, of which the oracle has as many: the last may have to be asked for."""
    return spec.outputs[: len(oracle)]


def output_dtypes(spec: OpSpec, oracle: Outputs, scheme: Scheme) -> list[torch.dtype]:
    """An oracle of floats stands for the scheme's output, unless the op says otherwise; one of integers is what it
    is."""
    own = getattr(spec, "output_dtypes", {})
    named = zip(output_names(spec, oracle), oracle, strict=True)
    return [own.get(name, scheme.output) if out.dtype.is_floating_point else out.dtype for name, out in named]
