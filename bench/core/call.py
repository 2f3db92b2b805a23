"""Turns kernels into functions without arguments, so that they can be timed."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import psutil
import torch

from rooflab.kernels.registry import Kernel, get_op
from rooflab.reference.spec import Case, Inputs, OpSpec, Outputs, Scalar, Scheme, as_tuple, nbytes

INPUT_MEM_FACTOR, OUTPUT_MEM_FACTOR = 12, 24
"""Most memory of a check, in bytes per byte of input and of output: guarded copies, fp64 oracle and fp64 tolerance."""
INPUT_COPIES = 3
"""The number of sets of inputs.  Calls take the sets in turn, so no call uses the memory of the call before."""


Result = torch.Tensor | Outputs | None
"""The return value of a kernel.  A kernel that changes its arguments returns None."""


class Rotation:
    """Runs a kernel on several sets of inputs in turn: each call without arguments takes the next set.

    All sets have the same case and seed.  The constructor packs weights, makes plans and allocates outputs, so this
    work is not timed.  Each set's last result is checked after timing, because some faults need consecutive calls."""

    def __init__(self, kernel: Kernel, spec: OpSpec, copies: Sequence[Inputs]):
        self._spec = spec
        self.own_stream = kernel.nondeterministic is not None
        """Whether the kernel, if it draws random numbers, draws from a random stream of its own."""
        self._copies = copies
        self._calls: list[Callable[[], Result]] = []
        self._last: list[Result] = [None] * len(copies)
        first_outputs: Outputs | None = None
        for inputs in copies:
            arguments = self.arguments(kernel, spec, inputs)
            if "out" in kernel.accepted and not spec.mutates:
                if first_outputs is None:
                    first_outputs = as_tuple(kernel.fn(**arguments))
                out_tensors = tuple(torch.empty_like(first_output) for first_output in first_outputs)
                arguments["out"] = out_tensors[0] if len(out_tensors) == 1 else out_tensors
            bind_fn = getattr(kernel.fn, "bind", None)  # of a function that is no kernel
            self._calls.append(bind_fn(arguments) if bind_fn else partial(kernel.fn, **planned(kernel, arguments)))
        self._turns = itertools.cycle(range(len(copies)))

    @staticmethod
    def arguments(kernel: Kernel, spec: OpSpec, inputs: Inputs, config: Mapping[str, Scalar] | None = None) -> Inputs:
        """Returns the inputs that the kernel takes, and its config.  Packs the weight if the kernel has `prepare`."""
        accepted_inputs = {name: input_value for name, input_value in inputs.items() if name in kernel.accepted}
        if kernel.prepare is not None and spec.prepared is not None and accepted_inputs.get(spec.prepared) is not None:
            accepted_inputs[spec.prepared] = packed(kernel.prepare, spec.prepared, accepted_inputs)
        return accepted_inputs if config is None else accepted_inputs | {"config": kernel.tunable.make_config(config)}

    @staticmethod
    def copies(spec: OpSpec, case: Case, scheme: Scheme, device: torch.device, seed: int) -> list[Inputs]:
        """Makes `INPUT_COPIES` sets of inputs of a case.  Makes fewer sets if the memory is small, but at least one.

        Each set is generated, because a clone does not keep all strides and views of the inputs."""
        meta_inputs = spec.make_inputs(case, scheme, torch.device("meta"), seed)
        max_copies = int(free_bytes(device) / 4 / max(1, input_bytes(meta_inputs)))
        return [spec.make_inputs(case, scheme, device, seed) for _ in range(max(1, min(INPUT_COPIES, max_copies)))]

    @property
    def first(self) -> Callable[[], Result]:
        """Returns a function that calls the kernel on the first set of inputs.  The result is not kept."""
        return self._calls[0]

    def __call__(self) -> Result:
        """Calls the kernel on the next set of inputs, and returns the result."""
        copy_index = next(self._turns)
        self._last[copy_index] = call_result = self._calls[copy_index]()
        return call_result

    def outputs(self) -> Iterator[tuple[Inputs, Outputs]]:
        """Yields each used set of inputs, and its last outputs (for an in-place op, the changed arguments)."""
        for inputs, call_result in zip(self._copies, self._last, strict=True):
            if self._spec.mutates:
                yield inputs, tuple(inputs[name] for name in self._spec.outputs)
            elif call_result is not None:
                yield inputs, as_tuple(call_result)


def input_bytes(inputs: Inputs) -> int:
    """Returns the total bytes of all tensors in `inputs`, including meta tensors."""
    return nbytes(*(input_value for input_value in inputs.values() if isinstance(input_value, torch.Tensor)))


def free_bytes(device: torch.device) -> float:
    """Returns the bytes of free memory on `device`, including memory that torch has reserved but no tensor uses.

    The engine's own `free_bytes` first makes torch return its reserved memory.  That takes too long during a timing."""
    if device.type == "cuda":
        cached_bytes = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return float(torch.cuda.mem_get_info(device)[0] + cached_bytes)
    return float(psutil.virtual_memory().available)


def short_of_memory(spec: OpSpec, priced: Inputs, device: torch.device) -> str:
    """Returns why memory is too small for a kernel, or "".  `priced` holds its inputs as meta tensors (no data)."""
    needed_bytes = INPUT_MEM_FACTOR * input_bytes(priced) + OUTPUT_MEM_FACTOR * spec.cost_of(priced).write_bytes
    memory = free_bytes(device)
    return f"needs about {needed_bytes / 1e9:.1f} GB, {memory / 1e9:.1f} GB are free" if needed_bytes > memory else ""


def packed(prepare: Callable[..., object], weight: str, inputs: Inputs) -> object:
    """Returns the argument `weight`, packed by `prepare`.  `prepare` also gets the inputs that its parameters name."""
    other_names = list(inspect.signature(prepare).parameters)[1:]
    return prepare(inputs[weight], **{name: inputs[name] for name in other_names})


def planned(kernel: Kernel, arguments: Inputs) -> Inputs:
    """Returns `arguments`, plus the result of the kernel's `plan` function if it has one.  `plan` gets each float
    tensor as a meta tensor (a shape without data)."""
    if kernel.plan is None:
        return dict(arguments)
    plan_inputs = {name: _shape_alone(argument_value) for name, argument_value in arguments.items()}
    return {**arguments, "plan": kernel.plan(get_op(kernel.op).arguments(plan_inputs))}


def _shape_alone(value: object) -> object:
    """Returns a float tensor as a meta tensor, which takes no memory; returns any other value unchanged."""
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


def output_names(spec: OpSpec, oracle: Outputs) -> tuple[str, ...]:
    """Returns the names of a call's outputs, without an optional last output that `oracle` (the reference) lacks."""
    return spec.outputs[: len(oracle)]


def output_dtypes(spec: OpSpec, oracle: Outputs, scheme: Scheme) -> list[torch.dtype]:
    """Returns the dtype of each output.  A float output has the dtype that the op declares, or else the scheme's output
    dtype.  An integer output has the dtype of the reference output in `oracle`."""
    op_dtypes = spec.output_dtypes
    outputs = zip(output_names(spec, oracle), oracle, strict=True)
    dtypes = [op_dtypes.get(name, scheme.output) if out.dtype.is_floating_point else out.dtype for name, out in outputs]
    return [scheme.activation if dtype == "activation" else dtype for dtype in dtypes]
