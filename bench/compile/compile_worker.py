"""Compiles kernels in a child process, and reads the compiled code with Triton's bundled tools.

`static.py` starts this process without `TRITON_INTERPRET`, because an interpreted function cannot be compiled.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import tempfile
import traceback
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import triton
from triton.runtime.errors import PTXASError

from rooflab.bench.base.cubin import code_hash
from rooflab.bench.compile import sass
from rooflab.bench.compile.capture import Launch, recording_cuda, recording_triton
from rooflab.bench.compile.cases import ARCHITECTURE, SM, Query, can_keep, properties
from rooflab.bench.compile.launchers import check_named, function_of, inputs_of
from rooflab.bench.compile.pretended import pretended_card, pretended_gpu
from rooflab.bench.core import Failed, Rotation
from rooflab.bench.revisions.repository import kernels_in
from rooflab.kernels import _card, registry
from rooflab.reference.spec import Case, Scheme, get_scheme

Answer = dict[str, Any]


class CaseRefused(ValueError):
    """The kernel does not exist, or the kernel does not support the input case."""


def launches_of(
    kernel: registry.Kernel, case: Case, scheme: Scheme, config: Mapping[str, Any] | None = None
) -> list[Launch]:
    """Compiles everything that `kernel` launches for an input case.  `config` replaces the kernel's own config.

    Raises `CaseRefused` if the kernel does not support the case.  Also raises every error of launcher and compiler."""
    spec = registry.get_op(kernel.op)
    inputs = spec.make_inputs(case, scheme, torch.device("meta"), 0)
    refusal = kernel.why_not_args(inputs)
    refusal_reason = str(refusal) if refusal else ""
    if kernel.min_sm is not None and kernel.min_sm > SM:
        refusal_reason = f"UNSUPPORTED: needs sm{kernel.min_sm}, found sm{SM}"
    for package_name in kernel.requires:
        if importlib.util.find_spec(package_name) is None:
            refusal_reason = f"UNAVAILABLE: {package_name} is not installed"
    if refusal_reason:
        raise CaseRefused(refusal_reason)
    # Also lengths and tables: in a GPU run they lie on the GPU, where a launcher's read would wait for the device.
    meta_inputs = {k: v.to("meta") if isinstance(v, torch.Tensor) else v for k, v in inputs.items()}
    call_arguments = Rotation.arguments(kernel, spec, meta_inputs, config)
    launches: list[Launch] = []
    with recording_triton(SM, properties(), launches), recording_cuda(ARCHITECTURE, launches):
        kernel.fn(**call_arguments)
    return launches


_card.make_fake_gpu = partial(pretended_card, "meta")
_LAUNCH_FIELDS = ("name", "target", "grid", "num_warps", "num_stages", "ptx", "backend", "ctas", "ir", "tried")


def describe(launches: Sequence[Launch]) -> list[Answer]:
    """Returns the fields of `static.CompiledInfo` for each pair of kernel and grid in `launches`."""
    launch_counts = Counter(launch.key for launch in launches)
    return [_fields(launch, launch_counts[key]) for key, launch in {launch.key: launch for launch in launches}.items()]


def _fields(launch: Launch, launches: int) -> Answer:
    code = read_cubin(launch.cubin, launch.name)
    opcode_counts = dict(Counter(instruction.opcode for instruction in sass.parse(code.sass)[launch.name].instructions))
    has_wgmma = any(opcode.startswith(("HGMMA", "IGMMA", "QGMMA")) for opcode in opcode_counts)
    log_lines = launch.log().splitlines() if has_wgmma else []  # it says whether the assembler serialized them
    return {name: getattr(launch, name) for name in _LAUNCH_FIELDS} | {
        "launches": launches,
        "threads": launch.threads or _threads(launch),
        "registers": code.registers,
        "stack_bytes": code.stack_bytes,
        # Triton's figure is the total; a CUDA launch's figure adds to what its code declares.
        "shared_bytes": launch.shared_bytes + (code.static_shared_bytes if launch.backend == "cuda" else 0),
        "opcodes": opcode_counts,
        "sass": code.sass,
        "asked": dict(launch.asked),
        "warnings": [line.strip() for line in log_lines if re.search("warning|Potential Performance Loss", line)],
        "code_hash": code_hash(launch.cubin),
    }


def _threads(launch: Launch) -> int:
    """Returns the number of threads per CTA of a launch.  With warp specialisation it is more than `32 * num_warps`."""
    thread_limits = re.findall(r"^\.(?:reqntid|maxntid) (\d+)", launch.ptx, re.MULTILINE)
    return int(thread_limits[0]) if thread_limits else 32 * launch.num_warps


def compile_request(request: Mapping[str, Any]) -> Answer:
    """Compiles the kernel of a request.  Returns `{"kernels": [...]}`, with one entry per launched kernel and grid."""
    launches = _launcher(request) if request["op"].endswith(".py") else _registered(request)
    if not launches:
        name = f"{request['op']}/{request['kernel']}"
        raise ValueError(f"kernel: expected one that launches Triton or CUDA, and {name} launched none")
    return {"kernels": describe(launches)}


@cache
def _load(file: str) -> None:
    registry.load_file(Path(file))


def _registered(request: Mapping[str, Any]) -> list[Launch]:
    if request["file"]:
        _load(request["file"])
    _own(request)
    if request["op"] not in registry.ops() or request["kernel"] not in registry.kernels(request["op"]):
        raise CaseRefused(f"kernel: there is no {request['op']}/{request['kernel']}")
    kernel = registry.get_kernel(request["op"], request["kernel"])
    return launches_of(kernel, Case(**request["case"]), get_scheme(request["scheme"]), request["config"])


def _launcher(request: Mapping[str, Any]) -> list[Launch]:
    """Calls the user's launcher without a GPU, and returns the kernel launches with their compiled code.  The input
    tensors have values, because the launcher may read them."""
    launcher_function = function_of(f"{request['file']}::{request['kernel']}")
    inputs, launches = inputs_of(request["case"], 0), list[Launch]()
    check_named(launcher_function, inputs)
    with recording_triton(SM, properties(), launches), recording_cuda(ARCHITECTURE, launches), pretended_gpu():
        launcher_function(**inputs)
    return launches


def select_request(request: Mapping[str, Any]) -> Answer:
    """Selects kernels and cases by the `cases.Query` of a request.  Returns them as `{"selected": [...]}`."""
    file_of = _own(request)
    if request["query"]["op"] not in (None, *registry.ops()):
        return {"selected": []}
    cases = []
    for item in Query(**request["query"]).select(file_of):
        kernel = item.registered
        cases.append(item.to_json() | {"kept": can_keep(kernel), "part": file_of[kernel.id] if file_of else item.op})
    return {"selected": cases}


def _own(request: Mapping[str, Any]) -> dict[str, str] | None:
    """Maps the id of each user kernel to the file that registers it.  Returns None if the request names no files."""
    if "within" not in request:
        return None
    return kernels_in(Path(request["within"]), tuple(map(Path, request["files"])))


def answer(request: Mapping[str, Any]) -> Answer:
    """Answers a request of `static.py`.  A failure gives `{"error": text, "where": code line, "refused": bool}`."""
    try:
        return select_request(request) if request["do"] == "select" else compile_request(request)
    except Failed.errors() as error:
        if isinstance(error, PTXASError):
            return {"error": Failed.of(error).reason, "where": "", "refused": False}
        error_frame = traceback.extract_tb(error.__traceback__)[-1]
        was_refused = isinstance(error, CaseRefused)
        error_text = str(error) if was_refused else f"{type(error).__name__}: {error}".strip()
        error_place = f"{Path(error_frame.filename).name}:{error_frame.lineno} in {error_frame.name}"
        return {"error": error_text, "where": "" if was_refused else error_place, "refused": was_refused}


TOOL_TIMEOUT_S = 120.0
_DRIVER_BYTES = 1024
"""The bytes of a CTA's shared memory that the driver keeps for itself."""
_LABEL_TEXT = re.compile(r"`\(([^)]+)\)|(\.L[\w.$@]+)")
_RESOURCE_PATTERN = re.compile(r"^\s*Function (\S+):\s*\n\s*(.*)$", re.MULTILINE)


@dataclass(frozen=True)
class Cubin:
    """Facts about one kernel in a cubin, the binary of compiled GPU code."""

    registers: int
    """Registers per thread."""
    stack_bytes: int
    """Stack bytes per thread: spilled registers and local arrays."""
    static_shared_bytes: int
    """Shared memory per CTA, in bytes, that the code itself declares."""
    sass: str
    """The machine code as `cuobjdump -sass` prints it."""


def read_cubin(cubin: bytes, name: str) -> Cubin:
    """Reads the kernel `name` of code for sm_90 or newer.  Raises `RuntimeError` if a tool fails, and `ValueError` if
    the kernel is missing."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        usage = _run_tool("cuobjdump", "-res-usage", str(path))
        sass_functions = sass.parse(_run_tool("nvdisasm", "-c", str(path)))
    resource_lines = dict(_RESOURCE_PATTERN.findall(usage))
    if name not in resource_lines or name not in sass_functions:
        raise ValueError(f"kernel: expected one of {', '.join(resource_lines) or 'none'} in the code, got {name!r}")
    amounts = {field: int(value) for field, value in re.findall(r"\b(REG|STACK|SHARED):(\d+)", resource_lines[name])}
    if set(amounts) != {"REG", "STACK", "SHARED"}:
        raise RuntimeError(f"cuobjdump: expected the resources of {name}, got {usage!r}")
    shared_bytes = amounts["SHARED"]
    if shared_bytes >= _DRIVER_BYTES:
        # From sm_90 on this figure includes the driver's own bytes, which ptxas -v leaves out (12.8, 13.5).
        shared_bytes -= _DRIVER_BYTES
    function = sass_functions[name]
    return Cubin(amounts["REG"], amounts["STACK"], shared_bytes, _text(function))


def _text(code: sass.SassFunction) -> str:
    """Returns the SASS code of a function in the format of `cuobjdump`, with addresses instead of labels."""

    def address(label: re.Match[str]) -> str:
        label_name = label[1] or label[2]
        return hex(code.labels[label_name]) if label_name in code.labels else label[0]

    code_lines = [
        f"        /*{op.address:04x}*/ {op.guard:>8} {op.opcode} {_LABEL_TEXT.sub(address, op.operands)} ;"
        for op in code.instructions
    ]
    return "\n".join([f"\t\tFunction : {code.name}", *code_lines])


def _run_tool(tool: str, *options: str) -> str:
    tool_path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / tool
    tool_process = subprocess.run([str(tool_path), *options], capture_output=True, text=True, timeout=TOOL_TIMEOUT_S)
    if tool_process.returncode:
        raise RuntimeError(f"{tool}: {(tool_process.stderr or tool_process.stdout).strip()}")
    return tool_process.stdout
