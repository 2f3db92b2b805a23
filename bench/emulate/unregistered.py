"""Emulates a user's function that launches kernels, without a registered op.  Creates its inputs, checks its result."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from rooflab.bench.base.system_time import time
from rooflab.bench.compile.launchers import check_named, function_of, inputs_of, texts_of
from rooflab.bench.compile.pretended import pretended_card
from rooflab.bench.core import Failed, FunctionOp, poisoned_allocations
from rooflab.bench.emulate.one_call import Answer, launches_answer
from rooflab.bench.emulate.ours import emulating
from rooflab.bench.emulator import EmulationError


def run(
    function: Callable[..., Any],
    reference: Callable[..., Any] | None,
    inputs: Mapping[str, Any],
    save: str | None = None,
    **options: Any,
) -> Answer:
    """Emulates one call of `function`, and returns its launches.

    Compares the result with the result of `reference` on fp64 inputs.  Writes the tensors of the result and of the
    arguments to the file `save`.  With either of them, unwritten memory holds NaN.  `options` are those of `emulating`.

    Raises `ValueError` if the inputs are not the function's parameters, or if the function launches no kernel."""
    for checked_function in (function, reference):
        if checked_function is not None:
            check_named(checked_function, inputs)
    arguments = deepcopy(dict(inputs))  # with the strides of each tensor, and tensors that share memory still share it
    from triton.errors import TritonError  # not at the top: the first import of Triton fixes its interpreter mode

    start_s, call_status, reason_text, function_result = time.perf_counter(), "OK", "", None
    # An unwritten element must not equal the reference by chance.
    with emulating(**options) as emulation, poisoned_allocations() if reference or save else nullcontext():
        try:
            function_result = function(**arguments)
            emulation.check_outputs(function_result)
        except EmulationError as error:
            call_status, reason_text = "RUNTIME_ERROR", str(error)
        except AssertionError as error:
            failed_line = traceback.extract_tb(error.__traceback__)[-1]
            place = f"{Path(failed_line.filename).name}:{failed_line.lineno}"
            reason_text = f"assert in {place}: {error or failed_line.line}"
            call_status = "RUNTIME_ERROR"
        except TritonError as error:
            run_failure = Failed.of(error, "")
            call_status, reason_text = run_failure.status, run_failure.reason
    if call_status == "OK" and not emulation.launched:
        raise ValueError(f"function: expected {function.__name__} to launch a kernel of Triton, got no launch")
    if call_status == "OK" and save:
        leaves = tree_leaves((function_result, arguments))
        torch.save([leaf.detach() for leaf in leaves if isinstance(leaf, torch.Tensor)], save)
    if call_status == "OK" and emulation.races:
        call_status, reason_text = "INCORRECT", str(emulation.findings[0])
    if call_status == "OK" and reference is not None:
        fp64_inputs = {
            name: value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value
            for name, value in inputs.items()
        }
        with pretended_card():
            expected_result = reference(**fp64_inputs)
        verdicts = FunctionOp.judge(function_result, expected_result)
        call_status = "OK" if all(verdict.passed for verdict in verdicts) else "INCORRECT"
        reason_text = "; ".join(verdict.describe() for verdict in verdicts if call_status == "OK" or not verdict.passed)
    if call_status == "OK" and reference is None:
        reason_text = "no fault and no race; no value was compared, for there is no --reference"
    seconds = time.perf_counter() - start_s
    return {"status": call_status, "reason": reason_text, "seconds": seconds, **launches_answer(emulation)}


def answer(request: Mapping[str, Any]) -> Answer:
    """Answers a request of `rooflab emulate` in the worker process.  Raises `ValueError` on an unknown name."""
    function = function_of(f"{request['file']}::{request['kernel']}")
    run_options: dict[str, Any] = {"races": request["races"], "seed": request["schedule"], "ctas": request["sample"]}
    run_options |= {"save": request["save"], "views": request["views"]}
    run_options["configs"] = inputs_of(texts_of(request["configs"]), 0) if request["configs"] else None
    reference = function_of(request["reference"]) if request["reference"] else None
    return run(function, reference, inputs_of(request["case"], request["seed"]), **run_options)
