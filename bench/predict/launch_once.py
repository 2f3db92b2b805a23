"""Calls one kernel once on one case, for a tool that watches the process, such as Nsight Compute.

Compiling, packing and warming up come first.  The counted call runs between `cudaProfilerStart` and `cudaProfilerStop`.
So `ncu --profile-from-start off` records only the launches of this call.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, cast

import torch

from rooflab.bench.base.statuses import ExitStatus
from rooflab.bench.compile.cases import KernelCase
from rooflab.bench.core import Rotation
from rooflab.kernels import registry
from rooflab.reference.spec import Case, get_scheme

MODULE = "rooflab.bench.predict.launch_once"
CALL_MARK = "rooflab: the call that counts"
"""This line is printed after the call has returned.  If the line is missing, the call failed, not the tool."""


def arguments(target: KernelCase, seed: int, warm_up: int) -> list[str]:
    """Returns the arguments of Python that run this module for `target` (a kernel with a case and dtypes)."""
    return ["-m", MODULE, json.dumps({**target.to_json(), "seed": seed, "warm_up": warm_up})]


def main(text: str) -> None:
    """Calls the kernel that `text` (from `arguments`) describes.  Raises `ValueError` if it cannot run here."""
    call_fields, device, torch_cuda = json.loads(text), torch.device("cuda"), cast(Any, torch.cuda)
    if call_fields["file"]:
        registry.load_file(Path(call_fields["file"]))
    spec, kernel = (registry.get_op(call_fields["op"]), registry.get_kernel(call_fields["op"], call_fields["kernel"]))
    if refusal_text := kernel.why_not_here(device):
        raise ValueError(f"{kernel.id}: {refusal_text}")
    case, number_scheme = spec.check_case(Case(**call_fields["case"])), get_scheme(call_fields["scheme"])
    inputs = spec.make_inputs(case, number_scheme, device, call_fields["seed"])
    if refusal_text := kernel.why_not_args(inputs):
        raise ValueError(str(refusal_text))
    kernel_call = Rotation(kernel, spec, [inputs])
    for _ in range(call_fields["warm_up"]):
        kernel_call()
    torch_cuda.synchronize()
    torch_cuda.profiler.start()
    kernel_call()
    torch_cuda.synchronize()
    torch_cuda.profiler.stop()
    print(CALL_MARK, flush=True)


if __name__ == "__main__":
    try:
        main(sys.argv[1])
    except ValueError as error:
        print(f"rooflab: {error}", file=sys.stderr)
        raise SystemExit(ExitStatus.USAGE) from error
