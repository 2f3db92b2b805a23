"""Stores golden outputs (outputs of kernels on a GPU) in small files.  The emulator must reproduce them.

Integer outputs and copies must be equal bit for bit.  Other outputs must agree within the op's tolerance.  The number
of bitwise equal elements is always reported.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import torch

from rooflab.bench.compile.cases import KernelCase, has_code
from rooflab.bench.core import Environment, Rotation, first_case
from rooflab.bench.emulate.calls import call
from rooflab.kernels import registry
from rooflab.kernels._files import write_whole
from rooflab.reference.spec import Case, Inputs, Outputs, as_tuple, get_scheme

SEED = 0
_INTEGER_DTYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Difference:
    """Holds the comparison of one kernel's emulated outputs with its golden outputs, which come from a GPU."""

    target: str
    """The kernel, case and dtype: `gemm/tensor_core M=...,N=... bf16`."""
    elements: int
    equal: int
    """The number of elements whose bits are the same."""
    passed: bool
    """Whether all elements agree within the op's tolerance."""
    reason: str = ""


def targets() -> list[KernelCase]:
    """Lists, for each kernel with compiled code and each dtype, the first small test case that the kernel supports."""
    cases = []
    for kernel in filter(has_code, registry.every_kernel()):
        op_spec = registry.get_op(kernel.op)
        for scheme in map(get_scheme, op_spec.schemes):
            case = first_case(kernel, op_spec, scheme, ["smoke"])
            if case is not None:
                cases.append(KernelCase(kernel.op, kernel.name, case, scheme))
    return cases


def outputs_of(target: KernelCase, device: torch.device) -> Outputs:
    """Runs a kernel on `device`, with inputs generated on the CPU.  Returns its outputs as CPU tensors."""
    op_spec, kernel = registry.get_op(target.op), registry.get_kernel(target.op, target.kernel)
    inputs = {
        name: input_value.to(device) if isinstance(input_value, torch.Tensor) else input_value
        for name, input_value in op_spec.make_inputs(target.case, target.scheme, torch.device("cpu"), SEED).items()
    }
    arguments = Rotation.arguments(kernel, op_spec, inputs)
    kernel_result = kernel.fn(**arguments)
    outputs = tuple(arguments[name] for name in op_spec.outputs) if op_spec.mutates else as_tuple(kernel_result)
    return tuple(output.detach().cpu() for output in outputs)


def write(folder: Path, device: torch.device, chosen: Sequence[KernelCase] | None = None) -> list[str]:
    """Runs kernels on `device`.  Writes each kernel's outputs to a `.pt` file, and the environment to `golden.json`.

    A kernel with stored outputs does not run again; its entry in `golden.json` stays.  Returns all kernels' names."""
    index_file = folder / "golden.json"
    kernel_entries: dict[str, Any] = json.loads(index_file.read_text())["kernels"] if index_file.is_file() else {}
    environment = Environment.now(device.index or 0)
    source_record = {"commit": environment.commit, "dirty": environment.dirty, "environment": environment.to_dict()}
    selected_targets = targets() if chosen is None else list(chosen)
    for target in selected_targets:
        name = _name(target)
        if name not in kernel_entries or not (folder / f"{name}.pt").is_file():
            file_content = BytesIO()
            torch.save(outputs_of(target, device), file_content)
            write_whole(folder / f"{name}.pt", file_content.getvalue())
            kernel_entries[name] = target.to_json() | source_record
            # Written after each kernel, because a later kernel may end the process.
            write_whole(
                index_file,
                json.dumps({"seed": SEED, "kernels": kernel_entries}, indent=1, sort_keys=True, allow_nan=False) + "\n",
            )
    return list(map(_name, selected_targets))


def compare(folder: Path) -> list[Difference]:
    """Emulates every kernel that has a golden file.  Raises `ValueError` if `folder` has no `golden.json`."""
    index_file = folder / "golden.json"
    if not index_file.is_file():
        raise ValueError(f"golden: expected a folder with golden.json, got {folder}")
    output_differences = []
    for name, entry in sorted(json.loads(index_file.read_text())["kernels"].items()):
        target = KernelCase(entry["op"], entry["kernel"], Case(**entry["case"]), get_scheme(entry["scheme"]))
        output_differences.append(_difference(target, torch.load(folder / f"{name}.pt")))
    return output_differences


def _difference(target: KernelCase, golden: Outputs) -> Difference:
    op_spec = registry.get_op(target.op)
    with tempfile.TemporaryDirectory() as folder:
        emulator_answer = call(target, save=Path(folder) / "outputs.pt").answer
        if emulator_answer["status"] != "OK":
            return Difference(target.label, 0, 0, False, emulator_answer["reason"])
        outputs: Outputs = torch.load(Path(folder) / "outputs.pt")
    equal_count = sum(int((_bits(a) == _bits(b)).sum()) for a, b in zip(outputs, golden, strict=True))
    element_count = sum(output.numel() for output in outputs)
    inputs: Inputs = op_spec.make_inputs(target.case, target.scheme, torch.device("cpu"), SEED)
    golden_values = tuple(value.double() if value.is_floating_point() else value for value in golden)
    errors = op_spec.judge(outputs, golden_values, inputs, target.scheme)
    error_texts = [error.describe() for error in errors if not error.passed]
    return Difference(target.label, element_count, equal_count, not error_texts, "; ".join(error_texts))


def _bits(value: torch.Tensor) -> torch.Tensor:
    return value.contiguous().view(_INTEGER_DTYPES[value.element_size()])


def _name(target: KernelCase) -> str:
    return f"{target.op}-{target.kernel}-{target.scheme.name}"
