"""Checks functions that are not ops.  Makes an op of a function and its reference, so that the usual check applies."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, TypeGuard

import torch
from torch.utils._pytree import tree_leaves

from rooflab.bench.core.check import check_kernel
from rooflab.bench.core.failed import Failed
from rooflab.bench.core.poison import same_bits
from rooflab.bench.core.timers import tampered
from rooflab.bench.core.trial import DEFAULT_LAYOUT, Layout, Runner
from rooflab.kernels.registry import Kernel
from rooflab.reference.compare import ErrorStats, elementwise
from rooflab.reference.spec import Case, Inputs, OpSpec, Outputs, Scheme, as_tuple
from rooflab.roofline.model import Cost

FUNCTION_OP = "function"
"""The name of a function's op."""
FUNCTION_SCHEME = "as made"
"""The name of the only scheme of a function's op.  The caller chooses the dtypes of the tensors."""
Result = torch.Tensor | Outputs
Function = Callable[..., Result]
HALF_EPSILONS = 4
"""Allowed roundings in a dtype of 16 bits or fewer, including those of the reference."""
WIDE_ROUNDINGS = 64
"""Allowed roundings in fp32 and fp64: sqrt(4096) roundings of the sum, because the order of a long sum matters."""


def tolerance(dtype: torch.dtype, oracle: torch.Tensor) -> torch.Tensor:
    """Returns the largest allowed absolute error of each element of `oracle`, for an output of `dtype`."""
    abs_oracle = oracle.detach().to("cpu", torch.float64).abs()
    if not dtype.is_floating_point or not abs_oracle.numel():
        return torch.zeros_like(abs_oracle)
    dtype_eps = torch.finfo(dtype).eps
    finite_mask = torch.isfinite(abs_oracle)
    rms = abs_oracle[finite_mask].square().mean().sqrt() if finite_mask.any() else torch.zeros((), dtype=torch.float64)
    error_limit = (HALF_EPSILONS if dtype_eps > 1e-4 else WIDE_ROUNDINGS) * dtype_eps * torch.maximum(abs_oracle, rms)
    return torch.where(finite_mask, error_limit, 0.0)  # an infinity must be met exactly


def _tensors(name: str, value: object) -> tuple[torch.Tensor, ...]:
    values = (value,) if isinstance(value, torch.Tensor) else value
    if not isinstance(values, tuple | list) or not all(isinstance(output_item, torch.Tensor) for output_item in values):
        raise ValueError(f"{name}: expected a tensor or a tuple of tensors, got {type(value).__name__}")
    return tuple(values)


class FunctionOp(NamedTuple):
    """Presents a function as a kernel, with its own op, input case and dtype scheme."""

    kernel: Kernel
    spec: OpSpec
    case: Case
    scheme: Scheme
    device: torch.device

    @classmethod
    def of(cls, fn: Function, reference: Function, make: Callable[[int], object], seed: int) -> FunctionOp:
        """Makes the op of `fn` and `reference`.  If `make(seed)` returns a mapping, both functions take it by keyword.

        The outputs of the op have the reference's dtypes.  Raises `ValueError` if no input is a tensor."""
        raw_inputs = make(seed)
        tensors = [value for value in named(raw_inputs).values() if isinstance(value, torch.Tensor)]
        if not tensors:
            raise ValueError("make_inputs: expected at least one tensor, got none")
        dtypes = [output.dtype for output in as_tuple(_bound(reference, raw_inputs, copied(named(raw_inputs)))())]
        return op_of(fn, reference, make, dtypes, tensors[0].device)

    @staticmethod
    def judge(actual: object, expected: object) -> list[ErrorStats]:
        """Compares the outputs `actual` of a function with `expected`: one verdict per output.  NaN never passes.

        Integers must be equal.  Floats may differ by a few roundings, relative to the element or to the tensor's root
        mean square (the larger one).  A float output's reference may be fp64; otherwise the dtypes must be equal.
        Raises `ValueError` on a wrong number or dtype of outputs, and on an output that is no tensor."""
        fn_outputs, references = _tensors("fn", actual), _tensors("reference", expected)
        if len(fn_outputs) != len(references):
            raise ValueError(f"fn: expected {len(references)} outputs, as from the reference, got {len(fn_outputs)}")
        output_verdicts = []
        for index, (output, oracle) in enumerate(zip(fn_outputs, references, strict=True)):
            name = f"output {index}"
            if oracle.dtype != output.dtype and not (oracle.dtype == torch.float64 and output.is_floating_point()):
                raise ValueError(f"{name}: expected {oracle.dtype}, as from the reference, got {output.dtype}")
            output_verdicts.append(elementwise(name, output, oracle, tolerance(output.dtype, oracle)))
        return output_verdicts


def named(inputs: object) -> Inputs:
    """Returns inputs by name.  A mapping keeps its names; other values get the names `arg0`, `arg1`..."""
    if isinstance(inputs, Mapping):
        return dict(inputs)
    input_values = inputs if isinstance(inputs, tuple | list) else (inputs,)
    return {f"arg{index}": value for index, value in enumerate(input_values)}


class AsKernel:
    """Lets a function take keyword arguments, like a kernel.  `bind(inputs)` returns the call that a timer repeats."""

    def __init__(self, bind: Callable[[Inputs], Callable[[], Result]], names: Iterable[str]):
        self.bind = bind
        parameter_kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        self.__signature__ = inspect.Signature([inspect.Parameter(name, parameter_kind) for name in names])

    def __call__(self, **inputs: object) -> Result:
        return self.bind(inputs)()


def _bound(function: Function, made: object, inputs: Inputs) -> Callable[[], Result]:
    """Binds `inputs` to `function`, and returns a function without arguments.  `made` is the result of the user's
    `make_inputs`.  If it is a mapping, the inputs are passed by keyword, else by position."""
    return partial(function, **inputs) if isinstance(made, Mapping) else partial(function, *inputs.values())


def op_of(
    fn: Function,
    reference: Function,
    make: Callable[[int], object],
    dtypes: Sequence[torch.dtype],
    device: torch.device,
) -> FunctionOp:
    """Makes an op and a kernel from the function `fn`, with the inputs that `make(seed)` returns.

    The expected outputs are the results of `reference` on copies of the inputs.  `dtypes` are the outputs' dtypes;
    floats may differ by a few roundings.  Inputs keep the memory layout of `make`.  Some tensors, such as subclasses,
    cannot be copied; every run uses those of `make(0)`."""
    raw_inputs = make(0)
    values = named(raw_inputs)
    names = [name for name, value in values.items() if not isinstance(value, torch.Tensor) or _can_be_guarded(value)]
    strides = {name: values[name].stride() for name in names if isinstance(values[name], torch.Tensor)}
    kernel_fn = AsKernel(lambda inputs: _bound(fn, raw_inputs, {**values, **inputs}), names)
    reference_fn = AsKernel(lambda inputs: _bound(reference, raw_inputs, copied({**values, **inputs})), names)

    def spec_inputs(case: Case, scheme: Scheme, place: torch.device, seed: int) -> Inputs:
        fresh_inputs = named(make(seed))
        return {name: _to_meta(fresh_inputs[name]) if place.type == "meta" else fresh_inputs[name] for name in names}

    def limits(inputs: Inputs, oracle: Outputs, scheme: Scheme) -> Outputs:
        return tuple(tolerance(dtype, value).to(value.device) for dtype, value in zip(dtypes, oracle, strict=True))

    def unsupported(arguments: object) -> str | None:
        for name, stride in strides.items():
            value = getattr(arguments, name, None)
            if isinstance(value, torch.Tensor) and value.stride() != stride and value.numel():
                return f"{name} is not laid out as make_inputs lays it out"
        return None

    outputs = tuple(f"output {index}" for index in range(len(dtypes)))
    spec = OpSpec(
        name=FUNCTION_OP,
        reference=reference_fn,
        make_inputs=spec_inputs,
        # Nothing says what the function must read: a gather does not read most of its inputs.
        cost=lambda args: Cost(read_bytes=0.0, write_bytes=0.0),
        outputs=outputs,
        cases={"smoke": (Case(),)},
        tolerance=limits,
        output_dtypes=dict(zip(outputs, dtypes, strict=True)),
        schemes=(FUNCTION_SCHEME,),
    )
    kernel = Kernel(FUNCTION_OP, "fn", "optimized", "torch", kernel_fn, unsupported=unsupported)
    return FunctionOp(
        kernel, spec, Case(), Scheme(FUNCTION_SCHEME, torch.float32, torch.float32, torch.float32), device
    )


def _to_meta(value: object) -> object:
    return value.to("meta") if isinstance(value, torch.Tensor) else value


class Checked(NamedTuple):
    """The result of checking a function before its timing."""

    result: Any
    """The function's return value."""
    fault: str
    """The fault that the check found; empty if there is no fault."""
    interpreted: bool
    """Whether Triton's interpreter ran the function."""
    op: FunctionOp
    judged: bool
    """Whether timed calls can be judged: there is a reference, and the function does not change its arguments."""
    again: Callable[[], str]
    """Calls the function once more, and returns the fault of its result."""

    @classmethod
    def of(cls, fn: Function, args: Sequence[object], reference: Function | None) -> Checked:
        """Compares `fn` with `reference`, each on copies of `args`.  Then checks `fn` like a kernel.

        The kernel check also uses other inputs: the tensors of `args`, shifted by one position.  Without a reference,
        the check finds only two faults: a write outside the arguments, and a result that changes after the call."""
        expected_outputs = reference(*map(_copy, args)) if reference is not None else None
        arg_copies = [*map(_copy, args)]
        result, is_interpreted = _watched(partial(fn, *arg_copies))
        outputs = _plain(result)
        tensors = {n: value for n, value in enumerate(args) if _can_be_guarded(value)}

        def make(seed: int) -> list[object]:
            fresh_tensors = {n: _copy(value) for n, value in tensors.items()}
            input_values = {n: _shifted(value) for n, value in fresh_tensors.items()} if seed else fresh_tensors
            return [input_values.get(n, value) for n, value in enumerate(args)]

        dtypes = [output.dtype for output in outputs]
        op = op_of(fn, reference or fn, make, dtypes, device_of(*args, result))
        op = op._replace(kernel=replace(op.kernel, nondeterministic="its two runs may differ in their bits"))

        def wrong(actual: object) -> str:
            try:
                output_verdicts = FunctionOp.judge(actual, expected_outputs) if reference is not None else []
            except ValueError as error:
                return str(error)
            return "; ".join(error_stats.describe() for error_stats in output_verdicts if not error_stats.passed)

        fault = f"INVALID: {tampering_fault}" if (tampering_fault := tampered()) else wrong(result)
        if not fault and not is_interpreted and outputs and tensors:
            fault = _fault(op, reference is not None)
        is_judged = reference is not None and all(same_bits(value, arg_copies[n]) for n, value in tensors.items())
        recheck_fn = lambda: "" if reference is None else wrong(fn(*map(_copy, args)))
        return cls(result, fault, is_interpreted, op, is_judged, recheck_fn)


def _can_be_guarded(value: object) -> TypeGuard[torch.Tensor]:
    """Tells whether `value` is a plain strided tensor or a `Parameter`, with memory (which a meta tensor lacks)."""
    if not isinstance(value, torch.Tensor) or type(value) not in (torch.Tensor, torch.nn.Parameter):
        return False
    return value.layout == torch.strided and not value.is_meta


def _fault(op: FunctionOp, judged: bool) -> str:
    """Checks a function, and returns the fault or "". If `judged` is false, runs it without comparing outputs."""
    runner = _AsItIs(op.kernel, op.spec, op.scheme, op.device)
    if judged:
        result = check_kernel(op.kernel, op.spec, op.case, op.scheme, op.device, planted=False, runner=runner)
        return "" if result.status == "OK" else result.reason
    try:
        runner.begin()
        runner.load("first", op.spec.make_inputs(op.case, op.scheme, op.device, 0))
        runner.run("first")
        runner.settle()
    except Failed as failed:
        return failed.reason
    return ""


class _AsItIs(Runner):
    """Runs a function in the caller's thread, with the caller's torch modes.  The function may change its arguments."""

    def __init__(self, kernel: Kernel, spec: OpSpec, scheme: Scheme, device: torch.device):
        super().__init__(kernel, spec, scheme, device)
        self.free = tuple(op_parameter.name for op_parameter in spec.parameters)

    def begin(self) -> None:
        """Does nothing, so that the caller's setting for the precision of matrix products remains."""

    def run(self, name: str, layout: Layout = DEFAULT_LAYOUT) -> Outputs:
        return super().run(name, replace(layout, elsewhere=False, twice=False))


def _shifted(value: torch.Tensor) -> torch.Tensor:
    """Rolls a float tensor in place by one position along the last dimension. Returns the tensor."""
    if value.is_floating_point() and value.ndim:
        raw_values = value.view(torch.uint8) if value.dtype.itemsize == 1 else value
        raw_values.copy_(raw_values.roll(1, -1))
    return value


def _plain(result: object) -> tuple[torch.Tensor, ...]:
    """Returns a function's result as a tuple of tensors, or an empty tuple if any value is not a tensor."""
    with suppress(ValueError):
        return _tensors("fn", result)
    return ()


def copied(inputs: Inputs) -> Inputs:
    """Copies `inputs`.  The copy of a tensor has the same strides."""
    return {name: _copy(value) for name, value in inputs.items()}


def _copy(value: Any) -> Any:
    """Copies a tensor with its strides, because `clone` changes some strides. Returns any other value unchanged."""
    if not isinstance(value, torch.Tensor):
        return value
    if value.is_meta or torch._debug_has_internal_overlap(value):
        return value.clone()
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device).copy_(value)


def device_of(*values: object) -> torch.device:
    """Returns the device of the first CUDA tensor, also inside containers; without tensors, the current CUDA device."""
    tensors = [value for value in tree_leaves(values) if isinstance(value, torch.Tensor)]
    if cuda_devices := [tensor.device for tensor in tensors if tensor.is_cuda]:
        return cuda_devices[0]
    # A closure hides its tensors; a CPU clock would time only the launch of CUDA work.
    if torch.cuda.is_available() and not tensors:
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _watched(call: Callable[[], Result]) -> tuple[Result, bool]:
    """Runs `call`. Returns its result, and whether Triton's interpreter ran a kernel in it."""

    def builder() -> object:
        return getattr(sys.modules.get("triton.runtime.interpreter"), "interpreter_builder", None)

    if interpreter := builder():
        vars(interpreter)["grid_idx"] = None
    result = call()
    return result, getattr(builder(), "grid_idx", None) is not None
