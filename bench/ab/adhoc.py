"""Two functions and their inputs as an op of their own, so that they meet the same checker and the same timer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from rooflab.bench.ab.functions import by_name, make, named, unpack
from rooflab.bench.ab.pairs import Reading
from rooflab.bench.check.gate import tolerance
from rooflab.kernels.registry import Kernel
from rooflab.reference.spec import Case, Inputs, OpSpec, Outputs, Scheme, as_tuple
from rooflab.roofline.model import Cost

NAME = "function"


def prepare(
    functions: Mapping[str, Any], seed: int, cast: bool = False
) -> tuple[Kernel, OpSpec, Case, Scheme, torch.device]:
    """Kernel, op, case, scheme and device of packed functions (`fn`, `reference`, `make_inputs`).

    The reference runs in its own precision and is the oracle; the tolerance is the fixture's, a few roundings of the
    output's dtype.  Inputs keep the layout that `make_inputs` gives them.  With `cast`, floating-point outputs of
    several dtypes are made one, which is for checking and not for timing.
    """
    fn, reference, make_inputs = (unpack(functions[name]) for name in ("fn", "reference", "make_inputs"))
    made = make(make_inputs, seed)
    inputs = named(made)
    strides = {name: value.stride() for name, value in inputs.items() if isinstance(value, torch.Tensor)}
    if not strides:
        raise ValueError("make_inputs: expected at least one tensor, got none")
    device = next(value.device for value in inputs.values() if isinstance(value, torch.Tensor))
    dtypes = [output.dtype for output in as_tuple(by_name(reference, made)(**_copies(inputs)))]
    floats = {dtype for dtype in dtypes if dtype.is_floating_point}
    output = floats.pop() if len(floats) == 1 else torch.float32

    def spec_inputs(case: Case, scheme: Scheme, place: torch.device, seed: int) -> Inputs:
        fresh = named(make(make_inputs, seed))
        return {name: _to_meta(value) for name, value in fresh.items()} if place.type == "meta" else fresh

    def cost(**inputs: Any) -> Cost:
        # Nothing says what the function must read: one that gathers leaves most of its inputs alone.
        return Cost(read_bytes=0.0, write_bytes=0.0)

    def limits(inputs: Inputs, oracle: Outputs, scheme: Scheme) -> Outputs:
        return tuple(tolerance(dtype, right).to(right.device) for dtype, right in zip(dtypes, oracle, strict=True))

    def unsupported(**inputs: Any) -> str | None:
        for name, stride in strides.items():
            value = inputs.get(name)
            if isinstance(value, torch.Tensor) and value.stride() != stride and value.numel():
                return f"{name} is not laid out as make_inputs lays it out"
        return None

    spec = OpSpec(
        name=NAME,
        reference=_in_dtype(by_name(reference, made), output),
        make_inputs=spec_inputs,
        cost=cost,
        outputs=tuple(f"output {index}" for index in range(len(dtypes))),
        cases={"smoke": (Case(),)},
        tolerance=limits,
        schemes=("as made",),
    )
    called = _in_dtype(by_name(fn, made), output) if cast else by_name(fn, made)
    kernel = Kernel(NAME, getattr(fn, "__name__", "fn"), "optimized", "torch", called, unsupported=unsupported)
    return kernel, spec, Case(), Scheme("as made", output, output, output), device


def check(functions: Mapping[str, Any], seed: int) -> Reading:
    """The same check as a kernel's, planted inputs apart: poisoned memory, other data, repeated calls, aliases."""
    from rooflab.bench.check.check import check_kernel

    kernel, spec, case, scheme, device = prepare(functions, seed, cast=True)
    result = check_kernel(kernel, spec, case, scheme, device, seed)
    return Reading(result.status, result.reason, checked_by=result.checked_by)


def _in_dtype(function: Callable[..., Any], dtype: torch.dtype) -> Callable[..., Any]:
    """`function` with all its floating-point outputs in `dtype`: a scheme has one output dtype."""

    def call(**inputs: Any) -> Any:
        returned = function(**inputs)
        if isinstance(returned, torch.Tensor):
            return _cast(returned, dtype)
        return tuple(_cast(output, dtype) for output in returned) if isinstance(returned, tuple | list) else returned

    call.__signature__ = function.__signature__  # type: ignore[attr-defined]
    return call


def _cast(output: Any, dtype: torch.dtype) -> Any:
    return output.to(dtype) if isinstance(output, torch.Tensor) and output.dtype.is_floating_point else output


def _copies(inputs: Inputs) -> Inputs:
    return {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in inputs.items()}


def _to_meta(value: Any) -> Any:
    return value.to("meta") if isinstance(value, torch.Tensor) else value
