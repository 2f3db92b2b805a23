"""Kernels as functions of no arguments, ready to be timed."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import psutil
import torch

from rooflab.kernels.registry import Kernel, get_op
from rooflab.reference.spec import Case, Inputs, OpSpec, Outputs, Scalar, Scheme, as_tuple, nbytes

PER_INPUT_BYTE, PER_OUTPUT_BYTE = 12, 24
"""Most bytes in memory per byte of input and of output: guarded copies, and the oracle and its tolerance in fp64."""
COPIES = 3
"""Sets of inputs that a kernel's calls take in turn, so that no call uses the memory of the call before."""


Result = torch.Tensor | Outputs | None
"""The return value of a kernel; None from a kernel that changes its arguments."""


class Rotation:
    """A function of no arguments that calls a kernel on each of several sets of inputs in turn.

    All sets have the same case and seed.  The constructor packs weights, plans steps, and allocates outputs where the
    kernel takes them, so that no call does this work.  The result of the last call on each set is kept and checked
    after timing: a kernel may be right when it is called once and wrong when calls follow one another.
    """

    def __init__(self, kernel: Kernel, spec: OpSpec, copies: Sequence[Inputs]):
        self._spec = spec
        self.own_stream = kernel.nondeterministic is not None
        """Whether a kernel that draws does so from a random stream of its own."""
        self._copies = copies
        self._calls: list[Callable[[], Result]] = []
        self._last: list[Result] = [None] * len(copies)
        outputs: Outputs | None = None
        for inputs in copies:
            arguments = self.arguments(kernel, spec, inputs)
            if "out" in kernel.accepted and not spec.mutates:
                if outputs is None:
                    outputs = as_tuple(kernel.fn(**arguments))
                outs = tuple(torch.empty_like(output) for output in outputs)
                arguments["out"] = outs[0] if len(outs) == 1 else outs
            bind = getattr(kernel.fn, "bind", None)  # of a function that is no kernel
            self._calls.append(bind(arguments) if bind else partial(kernel.fn, **planned(kernel, arguments)))
        self._turns = itertools.cycle(range(len(copies)))

    @staticmethod
    def arguments(kernel: Kernel, spec: OpSpec, inputs: Inputs, config: Mapping[str, Scalar] | None = None) -> Inputs:
        """The inputs that the kernel takes, its weight packed where it packs one, and the config with these fields."""
        accepted = {name: value for name, value in inputs.items() if name in kernel.accepted}
        if kernel.prepare is not None and spec.prepared is not None and accepted.get(spec.prepared) is not None:
            accepted[spec.prepared] = packed(kernel.prepare, spec.prepared, accepted)
        return accepted if config is None else accepted | {"config": kernel.tunable.make_config(config)}

    @staticmethod
    def copies(spec: OpSpec, case: Case, scheme: Scheme, device: torch.device, seed: int) -> list[Inputs]:
        """Makes sets of a case's inputs: `COPIES` of them, or as many as memory holds, and at least one.

        Each set is generated, not cloned, so that strides, views and lengths are those of the case.
        """
        priced = spec.make_inputs(case, scheme, torch.device("meta"), seed)
        fit = int(free_bytes(device) / 4 / max(1, input_bytes(priced)))
        return [spec.make_inputs(case, scheme, device, seed) for _ in range(max(1, min(COPIES, fit)))]

    @property
    def first(self) -> Callable[[], Result]:
        """The call on the first set; its result is not kept."""
        return self._calls[0]

    def __call__(self) -> Result:
        """The next call's result."""
        turn = next(self._turns)
        self._last[turn] = result = self._calls[turn]()
        return result

    def outputs(self) -> Iterator[tuple[Inputs, Outputs]]:
        """Every used set with the outputs of its last call: for a mutating op, the arguments that it changes."""
        for inputs, result in zip(self._copies, self._last, strict=True):
            if self._spec.mutates:
                yield inputs, tuple(inputs[name] for name in self._spec.outputs)
            elif result is not None:
                yield inputs, as_tuple(result)


def input_bytes(inputs: Inputs) -> int:
    """Bytes of all tensors of `inputs`, real or `meta`."""
    return nbytes(*(value for value in inputs.values() if isinstance(value, torch.Tensor)))


def free_bytes(device: torch.device) -> float:
    """Bytes of free memory on `device`, including memory that torch reserves and that no tensor uses.

    The engine's `free_bytes` makes torch give that memory back first, which beside a timing would cost time; that of
    `check_data.py` is a process's part, where every core has one.
    """
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return float(torch.cuda.mem_get_info(device)[0] + cached)
    return float(psutil.virtual_memory().available)


def short_of_memory(spec: OpSpec, priced: Inputs, device: torch.device) -> str:
    """Why there is too little memory to check `priced` (meta inputs); empty where there is enough."""
    needed = PER_INPUT_BYTE * input_bytes(priced) + PER_OUTPUT_BYTE * spec.cost_of(priced).write_bytes
    free = free_bytes(device)
    return f"needs about {needed / 1e9:.1f} GB, {free / 1e9:.1f} GB are free" if needed > free else ""


def packed(prepare: Callable[..., object], weight: str, inputs: Inputs) -> object:
    """The packed argument `weight`: the result of `prepare` on `weight` and on other inputs that `prepare` names."""
    beside = list(inspect.signature(prepare).parameters)[1:]
    return prepare(inputs[weight], **{name: inputs[name] for name in beside})


def planned(kernel: Kernel, arguments: Inputs) -> Inputs:
    """`arguments`, with a new plan where the kernel plans; of float tensors the planner sees only the shape."""
    if kernel.plan is None:
        return dict(arguments)
    seen = {name: _shape_alone(value) for name, value in arguments.items()}
    return {**arguments, "plan": kernel.plan(get_op(kernel.op).arguments(seen))}


def _shape_alone(value: object) -> object:
    """A float tensor without its memory; any other value unchanged."""
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


def output_names(spec: OpSpec, oracle: Outputs) -> tuple[str, ...]:
    """The names of one call's outputs, as many as the oracle has: the last output may be optional."""
    return spec.outputs[: len(oracle)]


def output_dtypes(spec: OpSpec, oracle: Outputs, scheme: Scheme) -> list[torch.dtype]:
    """The dtype of each output: for a float oracle the scheme's output dtype unless the op says otherwise, for an
    integer oracle the oracle's own dtype."""
    declared = spec.output_dtypes
    named = zip(output_names(spec, oracle), oracle, strict=True)
    dtypes = [declared.get(name, scheme.output) if out.dtype.is_floating_point else out.dtype for name, out in named]
    return [scheme.activation if dtype == "activation" else dtype for dtype in dtypes]
