"""Emulates one call of a kernel in the worker process.  Checks values and races; counts bytes and instructions.

For a large problem, only a few CTAs may run.  Then only the output elements that these CTAs wrote are checked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from rooflab.bench.base.system_time import time
from rooflab.bench.core import Failed, Rotation, poisoned_allocations
from rooflab.bench.emulate.ours import every_launch, pretended_for
from rooflab.bench.emulator import Checks, EmulationError, Launches, LaunchResult, NotSampled
from rooflab.kernels import registry
from rooflab.reference.compare import ErrorStats
from rooflab.reference.spec import Case, OpSpec, Outputs, Scheme, as_tuple, get_scheme, nbytes

Answer = dict[str, Any]
MAX_ORACLE_FLOPS = 2e11
"""Problems with more FLOPs get no fp64 oracle.  An oracle of this size takes ten seconds on two cores."""


def run(request: Mapping[str, Any]) -> Answer:
    """Answers a request of `rooflab emulate`: returns the launches, the errors of the outputs, and the faults.

    Raises `ValueError` on an unknown name in the request."""
    kernel = registry.get_kernel(request["op"], request["kernel"])
    spec, scheme = registry.get_op(request["op"]), get_scheme(request["scheme"])
    case = spec.check_case(Case(**request["case"]))
    inputs = spec.make_inputs(case, scheme, torch.device("cpu"), request["seed"])
    with every_launch(Launches()):
        kernel_refusal = kernel.why_not_here(torch.device("cpu")) or kernel.why_not_args(inputs)
    if kernel_refusal:
        return {"status": kernel_refusal.status, "reason": kernel_refusal.reason, "launches": []}
    checks, views = Checks(races=request["races"]), request["views"]
    launches = Launches(checks=checks, seed=request["schedule"], ctas=request["sample"], views=views)
    arguments = Rotation.arguments(kernel, spec, inputs, request["config"])
    start_s = time.perf_counter()
    call_status, reason_text = "OK", ""
    outputs: Any = None
    try:
        with every_launch(launches), poisoned_allocations(), pretended_for(kernel), launches.fresh:
            outputs = kernel.fn(**arguments)
            launches.check_outputs(outputs)
    except EmulationError as error:
        call_status, reason_text = "RUNTIME_ERROR", str(error)
    except NotSampled:
        raise
    except Failed.errors() as error:
        run_failure = Failed.of(error, "")
        call_status, reason_text = run_failure.status, run_failure.reason
    call_answer: Answer = {"seconds": time.perf_counter() - start_s, **launches_answer(launches)}
    if call_status == "OK":
        tensors = tuple(arguments[output_name] for output_name in spec.outputs) if spec.mutates else as_tuple(outputs)
        if request["save"]:
            torch.save(tensors, request["save"])
        call_answer |= _judged(spec, case, scheme, tensors, launches, request["seed"])
        call_status, reason_text = call_answer["status"], call_answer["reason"]
    return call_answer | {"status": call_status, "reason": reason_text}


def _judged(spec: OpSpec, case: Case, scheme: Scheme, tensors: Outputs, launches: Launches, seed: int) -> Answer:
    races = launches.races
    fresh_inputs = spec.make_inputs(case, scheme, torch.device("cpu"), seed)
    flops = spec.cost_of(spec.make_inputs(case, scheme, torch.device("meta"), seed)).flops
    output_errors: list[ErrorStats] = []
    checked_elements = None
    if flops <= MAX_ORACLE_FLOPS and (launches.ran == launches.of or not spec.mutates):
        expected_outputs = spec.oracle(fresh_inputs)
        if launches.ran < launches.of:
            # Elements that these CTAs did not write are poison: the oracle's values replace them.
            written_masks = [_written(output, launches.results) for output in tensors]
            checked_elements = sum(int(written_mask.sum()) for written_mask in written_masks)
            tensors = tuple(
                torch.where(written_mask, written_tensor, expected.to(written_tensor.dtype))
                for written_mask, written_tensor, expected in zip(written_masks, tensors, expected_outputs, strict=True)
            )
        output_errors = spec.judge(tensors, expected_outputs, fresh_inputs, scheme)
    failure_texts = [output_error.describe() for output_error in output_errors if not output_error.passed]
    if checked_elements == 0:
        failure_texts.append("the CTAs that ran wrote nothing of the outputs")
    call_status = "INCORRECT" if failure_texts or races else "OK"
    note = "" if output_errors else "values were not compared: the oracle takes too long, or needs all CTAs"
    if output_errors and not launches.launched and sum(output.numel() for output in tensors):
        call_status, note = "INCORRECT" if failure_texts else "INVALID", "torch computed it: no kernel was launched"
    elif output_errors and launches.ran == launches.of and not spec.mutates:
        n_bytes = sum(launch_result.bytes.hbm_write for launch_result in launches.results)
        if n_bytes < nbytes(*tensors):
            note = f"torch wrote a part of the outputs: kernels stored {n_bytes:.0f} of their {nbytes(*tensors)} bytes"
    reason_text = "; ".join(failure_texts) or (str(launches.findings[0]) if races else note)
    return {
        "status": call_status,
        "reason": reason_text,
        "errors": [asdict(output_error) for output_error in output_errors],
        "races": races,
        "checked_elements": checked_elements,
    }


def _written(output: torch.Tensor, results: Sequence[LaunchResult]) -> torch.Tensor:
    """Returns a bool mask of the output elements that the emulated kernel launches wrote. The mask comes from the store
    addresses, not from values."""
    output_storage = output.untyped_storage()
    byte_mask = torch.zeros(output_storage.nbytes(), dtype=torch.bool)
    for addresses, unit_bytes in (stored_entry for launch_result in results for stored_entry in launch_result.stored):
        unit_starts = torch.from_numpy(addresses) - output_storage.data_ptr()
        unit_starts = unit_starts[(unit_starts >= 0) & (unit_starts <= output_storage.nbytes() - unit_bytes)]
        for byte_index in range(unit_bytes):
            byte_mask[unit_starts + byte_index] = True
    element_mask = byte_mask.view(-1, output.element_size()).all(dim=1)
    return torch.as_strided(element_mask, output.shape, output.stride(), output.storage_offset())


def launches_answer(launches: Launches) -> Answer:
    """Returns what came of several launches as JSON values."""
    return {
        "launches": [_launch_answer(launch_result) for launch_result in launches.results],
        "findings": [finding.to_dict() for finding in launches.findings],
        "printed": launches.printed,
        "ran": launches.ran,
        "of": launches.of,
    }


def _launch_answer(result: LaunchResult) -> Answer:
    """Returns the result of one launch as JSON values, with its bytes and its counts of instructions."""
    return {
        "kernel": result.kernel,
        "ctas": result.ctas,
        "bytes": asdict(result.bytes),
        "instructions": dict(result.instructions),
        "lines": [[file, line_number, dict(line_counts)] for (file, line_number), line_counts in result.lines.items()],
        "tensor_flops": dict(result.tensor_flops),
        "shared_wavefronts": result.shared_wavefronts,
        "shared_wavefronts_least": result.shared_wavefronts_least,
        "races": list(result.races),
        "notes": list(result.notes),
        "sources": {
            file: Path(file).read_text().splitlines() if Path(file).is_file() else []
            for file in {file for file, _ in result.lines if file}
        },
    }
