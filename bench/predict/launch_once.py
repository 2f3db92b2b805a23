"""Calls one kernel on one case, for a tool that watches the process, as Nsight Compute does.

Compiling, packing and warming up come first.  The one call that counts runs between `cudaProfilerStart` and
`cudaProfilerStop`, so that `ncu --profile-from-start off` sees its launches and nothing else.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from rooflab.bench.base.statuses import ExitStatus
from rooflab.bench.compile.cases import KernelCase
from rooflab.bench.core import Rotation
from rooflab.kernels import registry
from rooflab.reference.spec import Case, get_scheme

MODULE = "rooflab.bench.predict.launch_once"
MARK = "rooflab: the call that counts"
"""Printed after the call has returned.  A missing mark means that the call failed, not that the tool found nothing."""


def arguments(target: KernelCase, seed: int, warm_up: int) -> list[str]:
    """The command line of this module, after the interpreter."""
    return ["-m", MODULE, json.dumps({**target.to_json(), "seed": seed, "warm_up": warm_up})]


def main(text: str, device: str = "cuda") -> None:
    """Runs the call that `text` (from `arguments`) describes.  Raises `ValueError` where it cannot run here."""
    asked = json.loads(text)
    if asked["file"]:
        registry.load_file(Path(asked["file"]))
    call = prepare(asked["op"], asked["kernel"], Case(**asked["case"]), asked["scheme"], asked["seed"], device)
    for _ in range(asked["warm_up"]):
        call()
    watched(call, device)
    print(MARK, flush=True)


def prepare(op: str, name: str, case: Case, scheme: str, seed: int, device: str) -> Rotation:
    """A call of the kernel with packed weights and allocated outputs.  Raises `ValueError` where it cannot run here."""
    spec, kernel = registry.get_op(op), registry.get_kernel(op, name)
    place = torch.device(device)
    reason = kernel.why_not_here(place)
    if reason:
        raise ValueError(f"{kernel.id}: {reason}")
    inputs = spec.make_inputs(spec.check_case(case), get_scheme(scheme), place, seed)
    reason = kernel.why_not_args(inputs)
    if reason:
        raise ValueError(str(reason))
    return Rotation(kernel, spec, [inputs])


def watched(call: Rotation, device: str) -> None:
    """Runs one call with the profiler on."""
    if device != "cuda":
        call()
        return
    runtime: Any = torch.cuda
    runtime.synchronize()
    runtime.profiler.start()
    call()
    runtime.synchronize()
    runtime.profiler.stop()


if __name__ == "__main__":
    try:
        main(sys.argv[1])
    except ValueError as error:
        print(f"rooflab: {error}", file=sys.stderr)
        raise SystemExit(ExitStatus.USAGE) from error
