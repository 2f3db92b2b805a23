"""The process in which `static.py` compiles: one request a line on standard input, one answer a line on the output.

It is started without `TRITON_INTERPRET`, because an interpreted function cannot be compiled.  `code/_tree_worker.py`
starts it with another revision's kernels, so that it imports nothing that an older tree may lack at its head.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TextIO

import torch
from triton.errors import TritonError

from rooflab.bench.calls.preparing import packed
from rooflab.bench.compile import sass
from rooflab.bench.compile.capture import Launch, recording_triton
from rooflab.bench.compile.cases import select
from rooflab.bench.compile.cubin import code_hash, read_cubin
from rooflab.bench.compile.cuda_capture import recording_cuda
from rooflab.kernels import registry
from rooflab.reference.spec import Case, get_scheme

# What a launcher that is given meta tensors, or a compiler that is given a wrong kernel, is known to raise.
FAILURES = (
    TritonError,
    RuntimeError,
    ValueError,
    TypeError,
    KeyError,
    IndexError,
    AttributeError,
    AssertionError,
    ArithmeticError,
    ImportError,
    OSError,
)
Answer = dict[str, Any]


class Refused(ValueError):
    """There is no such kernel, or it says itself that it does not take the case."""


def launches_of(kernel: registry.Kernel, request: Mapping[str, Any]) -> list[Launch]:
    """Compiles everything that `kernel` launches for the request's case.

    Raises `Refused` where the kernel does not take the case, and what its launcher or the compiler raises.
    """
    spec, case, sm = registry.get_op(kernel.op), Case(**request["case"]), request["sm"]
    inputs = spec.make_inputs(case, get_scheme(request["scheme"]), torch.device("meta"), 0)
    reason = kernel.why_not_args(inputs)
    if kernel.min_sm is not None and kernel.min_sm > sm:
        reason = f"UNSUPPORTED: needs sm{kernel.min_sm}, found sm{sm}"
    for package in kernel.requires:
        if importlib.util.find_spec(package) is None:
            reason = f"UNAVAILABLE: {package} is not installed"
    if reason:
        raise Refused(reason)
    # Lengths and tables too: on a GPU a launcher finds them there, and reading one would wait for the device.
    arguments = {name: _to_meta(value) for name, value in inputs.items() if name in kernel.accepted}
    if kernel.prepare is not None and spec.prepared is not None:
        arguments[spec.prepared] = packed(kernel.prepare, spec.prepared, arguments)
    if request["config"] is not None:
        from rooflab.kernels.configs import make_config

        arguments["config"] = make_config(kernel, request["config"])
    found: list[Launch] = []
    with recording_triton(sm, request["properties"], found), recording_cuda(request["target"], found):
        kernel.fn(**arguments)
    return found


def _to_meta(value: Any) -> Any:
    return value.to("meta") if isinstance(value, torch.Tensor) else value


def describe(launch: Launch, launches: int) -> Answer:
    """The fields of `static.CompiledInfo` of one compiled kernel."""
    code = read_cubin(launch.cubin, launch.name)
    opcodes = _opcodes(code.sass, launch.name)
    wgmma = any(opcode.startswith(("HGMMA", "IGMMA", "QGMMA")) for opcode in opcodes)
    return {
        "name": launch.name,
        "target": launch.target,
        "grid": launch.grid,
        "launches": launches,
        "num_warps": launch.num_warps,
        "num_stages": launch.num_stages,
        "threads": launch.threads or _threads(launch),
        "registers": code.registers,
        "stack_bytes": code.stack_bytes,
        # Triton's figure is all there is; a CUDA launch adds to what its code declares.
        "shared_bytes": launch.shared_bytes + (code.static_shared_bytes if launch.backend == "cuda" else 0),
        "opcodes": opcodes,
        "ptx": launch.ptx,
        "sass": code.sass,
        "backend": launch.backend,
        "ctas": launch.ctas,
        "ir": launch.ir,
        "asked": dict(launch.asked),
        "indirect": [[address, list(targets)] for address, targets in code.indirect.items()],
        "warnings": _warnings(launch.log()) if wgmma else [],
        "code_hash": code_hash(launch.cubin),
    }


def _opcodes(code: str, name: str) -> dict[str, int]:
    return dict(Counter(instruction.opcode for instruction in sass.parse(code)[name].instructions))


def _warnings(log: str) -> list[str]:
    """What the assembler warns of in a code with wgmma: that its products wait for one another, for one."""
    return [line.strip() for line in log.splitlines() if re.search(r"warning|Potential Performance Loss", line)]


def _threads(launch: Launch) -> int:
    """Threads per block, which warp specialisation makes more than 32 * num_warps."""
    found = re.findall(r"^\.(?:reqntid|maxntid) (\d+)", launch.ptx, re.MULTILINE)
    return int(found[0]) if found else 32 * launch.num_warps


def compile_request(request: Mapping[str, Any]) -> Answer:
    """`{"kernels": [...]}`: one entry for each kernel that is launched, on each of its grids."""
    if request["file"] and request["file"] not in _loaded:
        registry.load_file(Path(request["file"]))
        _loaded.add(request["file"])
    if request["op"] not in registry.ops() or request["kernel"] not in registry.kernels(request["op"]):
        raise Refused(f"kernel: there is no {request['op']}/{request['kernel']}")
    kernel = registry.get_kernel(request["op"], request["kernel"])
    found = launches_of(kernel, request)
    if not found:
        raise ValueError(f"kernel: expected one that launches Triton or CUDA, and {kernel.id} launched none")
    counts = Counter(launch.key for launch in found)
    distinct = {launch.key: launch for launch in found}
    return {"kernels": [describe(launch, counts[key]) for key, launch in distinct.items()]}


def select_request(request: Mapping[str, Any]) -> Answer:
    """`{"selected": [...]}`: what `cases.select` picks in this process's tree."""
    if request["op"] is not None and request["op"] not in registry.ops():
        return {"selected": []}
    chosen = select(
        request["op"], (), request["suites"], request["cases"], request["schemes"], every_case=request["every_case"]
    )
    return {"selected": [item.to_json() for item in chosen]}


def answer(request: Mapping[str, Any]) -> Answer:
    """What a request of `static.py` asks for, or `{"error": text, "where": place, "refused": whether by rule}`."""
    try:
        return select_request(request) if request["do"] == "select" else compile_request(request)
    except FAILURES as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        refused = isinstance(error, Refused)
        text = str(error) if refused else f"{type(error).__name__}: {error}".strip()
        place = f"{Path(where.filename).name}:{where.lineno} in {where.name}"
        return {"error": text, "where": "" if refused else place, "refused": refused}


_loaded: set[str] = set()


def serve(requests: TextIO, answers: TextIO, handle: Callable[[Mapping[str, Any]], Answer] = answer) -> None:
    """Answers requests until the input ends."""
    for line in requests:
        answers.write(json.dumps(handle(json.loads(line))) + "\n")
        answers.flush()


def main() -> None:
    """Serves standard input.  Answers get a descriptor of their own: what a kernel module or the compiler prints must
    not mix with them."""
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    serve(sys.stdin, channel)


if __name__ == "__main__":
    main()
