"""A launcher of anyone's, with no op registered: its arguments by their shapes, run in the emulator and judged."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from rooflab.bench.calls.clock import time
from rooflab.bench.check.failed import failure
from rooflab.bench.check.gate import judge
from rooflab.bench.compile.pretended import pretended_card
from rooflab.bench.emulate.ours import emulating
from rooflab.bench.emulate.run import Answer, launch_answer
from rooflab.bench.emulator import Choice, EmulationError
from rooflab.kernels._user_files import import_file
from rooflab.reference.spec import Scalar, scalar
from rooflab.roofline.names import values_by_name

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def function_of(text: str) -> Callable[..., Any]:
    """The function that `path.py::name` names.  Raises `ValueError` where there is none."""
    file, _, name = text.partition("::")
    path = Path(file)
    if not name or path.suffix != ".py" or not path.is_file():
        raise ValueError(f"function: expected path.py::name with a Python file that is there, got {text!r}")
    found = getattr(_module(path.resolve()), name, None)
    if not callable(found):
        raise ValueError(f"function: expected a function {name!r} in {file}, got none")
    return found  # type: ignore[no-any-return]


@cache
def _module(path: Path) -> ModuleType:
    with pretended_card():
        return import_file(path)


def tensors(shapes: str, dtype: str, seed: int) -> dict[str, torch.Tensor]:
    """Normal numbers in the shapes of a text such as `x=64x96,weight=96:bf16`; a dtype behind a shape is its own."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(name: str, value: str) -> torch.Tensor:
        sizes, _, own = value.partition(":")
        if (own or dtype) not in DTYPES or not all(size.isdecimal() for size in sizes.split("x")):
            raise ValueError
        return torch.randn([int(size) for size in sizes.split("x")], generator=generator).to(DTYPES[own or dtype])

    expected = f"shape: expected name=64x96 or name=64x96:{'|'.join(DTYPES)}, each name once"
    return values_by_name(filter(None, shapes.split(",")), expected, drawn)


def scalars(text: str) -> dict[str, Scalar]:
    """Numbers, booleans and words of a text such as `eps=1e-6,causal=true`."""
    expected = "argument: expected name=value, each name once"
    return values_by_name(filter(None, text.split(",")), expected, lambda name, value: scalar(value))


def run(
    function: Callable[..., Any],
    reference: Callable[..., Any] | None,
    inputs: Mapping[str, Any],
    *,
    races: bool = True,
    configs: Choice = None,
    seed: int = 0,
) -> Answer:
    """One emulated call: its launches, and what `reference` says of its result, given the same inputs in fp64.

    Raises `ValueError` where the inputs are not the function's parameters, or it launches nothing.
    """
    for asked in (function, reference):
        if asked is not None:
            _check_named(asked, inputs)
    given = {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in inputs.items()}
    from triton.errors import TritonError  # not at the top: the first import of Triton fixes its interpreter mode

    began, status, why, result = time.perf_counter(), "OK", "", None
    with emulating(races=races, configs=configs, seed=seed) as found:
        try:
            result = function(**given)
        except EmulationError as error:
            status, why = "RUNTIME_ERROR", str(error)
        except TritonError as error:
            failed = failure(error, "")
            status, why = failed.status, failed.reason
    if status == "OK" and not found.launched:
        raise ValueError(f"function: expected {function.__name__} to launch a kernel of Triton, got no launch")
    if status == "OK" and found.races:
        status, why = "INCORRECT", found.races[0]
    if status == "OK" and reference is not None:
        exact = {name: value.double() if _is_float(value) else value for name, value in inputs.items()}
        with pretended_card():
            wanted = reference(**exact)
        verdicts = judge(result, wanted)
        status = "OK" if all(stats.passed for stats in verdicts) else "INCORRECT"
        why = "; ".join(stats.describe() for stats in verdicts if status == "OK" or not stats.passed)
    if status == "OK" and reference is None:
        why = "no fault and no race; no value was compared, for there is no --reference"
    ctas = sum(launch.ctas for launch in found.launches)
    answer = {"status": status, "reason": why, "seconds": time.perf_counter() - began, "ran": ctas, "of": ctas}
    return answer | {"launches": [launch_answer(launch) for launch in found.launches]}


def answer(request: Mapping[str, Any]) -> Answer:
    """The answer to the command, in the emulating process.  Raises `ValueError` on what it names wrongly."""
    inputs = {**tensors(request["shape"], request["dtype"], request["seed"]), **scalars(request["argument"])}
    reference = function_of(request["reference"]) if request["reference"] else None
    configs = scalars(request["config"]) if request["config"] else None
    function = function_of(request["function"])
    return run(function, reference, inputs, races=request["races"], configs=configs, seed=request["schedule"])


def _is_float(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _check_named(function: Callable[..., Any], inputs: Mapping[str, Any]) -> None:
    try:
        inspect.signature(function).bind(**inputs)
    except TypeError as error:
        name = getattr(function, "__name__", str(function))
        raise ValueError(f"shape: expected the arguments of {name}{inspect.signature(function)}: {error}") from None
