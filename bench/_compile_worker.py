"""The process in which `static.py` compiles: one request a line on standard input, one answer a line on the output.

It is started without `TRITON_INTERPRET`, because an interpreted function cannot be compiled. A fake driver stands for
the GPU, and the kernel's own launcher is called with the spec's meta inputs, so that Triton sees the very
specialisation that a GPU run would: a meta tensor's address is 0, as aligned as an allocation on a device.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.errors import TritonError
from triton.runtime.jit import JITFunction

from rooflab.kernels import registry
from rooflab.reference.spec import Case, get_scheme

# A launcher may ask the driver for these; the figures of an H100 SXM and an H200, from NVIDIA's Hopper tuning guide.
HOPPER_PROPERTIES = {
    "multiprocessor_count": 132,
    "max_shared_mem": 232448,
    "max_num_regs": 65536,
    "warpSize": 32,
    "max_threads_per_sm": 2048,
}
INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Za-z0-9_.]*)")
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


class FakeUtils:
    """What Triton's driver offers beside launching."""

    @staticmethod
    def get_device_properties(device: int) -> dict[str, int]:
        """The properties of the GPU that the fake stands for."""
        return HOPPER_PROPERTIES


class FakeDriver:
    """A driver that has one Hopper GPU to compile for and nothing to run on."""

    utils = FakeUtils()

    def __init__(self, sm: int):
        self.target = GPUTarget("cuda", sm, 32)

    def get_current_target(self) -> GPUTarget:
        """The GPU to compile for."""
        return self.target

    def get_current_device(self) -> int:
        """The only device there is."""
        return 0

    def get_current_stream(self, device: int) -> int:
        """The default stream."""
        return 0

    def get_active_torch_device(self) -> torch.device:
        """Where the launcher's tensors are."""
        return torch.device("meta")


def _installed_internals() -> None:
    """Raises `RuntimeError` where Triton has moved what this file replaces."""
    config = triton.runtime.driver
    code = getattr(JITFunction.run, "__code__", None)
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount] if code else ()
    if not hasattr(config, "set_active") or not {"grid", "warmup"} <= set(names):
        raise RuntimeError(
            f"triton: expected runtime.driver.set_active and JITFunction.run(..., grid, warmup) as in 3.6 and 3.7, "
            f"and {triton.__version__} has not got them"
        )


@contextmanager
def recording(sm: int) -> Iterator[list[tuple[Any, tuple[int, ...]]]]:
    """Makes every launch a compilation, and yields the list that gathers (compiled kernel, grid) of each."""
    _installed_internals()
    compiled: list[tuple[Any, tuple[int, ...]]] = []
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        if callable(grid):
            grid = grid({**dict(zip(self.arg_names, args, strict=False)), **kwargs})
        compiled.append((kernel, tuple(int(size) for size in grid)))
        return kernel

    triton.runtime.driver.set_active(FakeDriver(sm))
    JITFunction.run = compile_only
    try:
        yield compiled
    finally:
        JITFunction.run = run


def launch(kernel: registry.Kernel, case: Case, scheme_name: str, sm: int) -> list[tuple[Any, tuple[int, ...]]]:
    """Compiles every Triton launch that `kernel` makes for `case`.

    Raises `ValueError` where the kernel does not take the case, and what its launcher or the compiler raises.
    """
    spec = registry.get_op(kernel.op)
    inputs = spec.make_inputs(case, get_scheme(scheme_name), torch.device("meta"), 0)
    reason = kernel.why_not_args(inputs)
    if kernel.min_sm is not None and kernel.min_sm > sm:
        reason = f"UNSUPPORTED: needs sm{kernel.min_sm}, found sm{sm}"
    if reason:
        raise ValueError(reason)
    # Lengths and tables too: on a GPU a launcher finds them there, and reading one would wait for the device.
    arguments = {name: _to_meta(value) for name, value in inputs.items() if name in kernel.accepted}
    if kernel.prepare is not None and spec.prepared is not None:
        arguments[spec.prepared] = kernel.prepare(arguments[spec.prepared])
    with recording(sm) as compiled:
        kernel.fn(**arguments)
    return compiled


def _to_meta(value: Any) -> Any:
    return value.to("meta") if isinstance(value, torch.Tensor) else value


def describe(kernel: Any, grid: tuple[int, ...], launches: int) -> dict[str, Any]:
    """The fields of `static.CompiledInfo` of one compiled kernel."""
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(kernel.asm["cubin"])
        usage = _cuobjdump("-res-usage", cubin)
        sass = _cuobjdump("-sass", cubin)
    opcodes = Counter(match[1].rstrip(".") for line in sass.splitlines() if (match := INSTRUCTION.match(line)))
    return {
        "name": kernel.metadata.name,
        "target": re.findall(r"^\.target (\w+)", kernel.asm["ptx"], re.MULTILINE)[0],
        "grid": grid,
        "launches": launches,
        "num_warps": kernel.metadata.num_warps,
        "num_stages": kernel.metadata.num_stages,
        "threads": _threads(kernel),
        "registers": _figure("REG", usage),
        "stack_bytes": _figure("STACK", usage),
        "shared_bytes": kernel.metadata.shared,
        "opcodes": dict(opcodes),
        "ptx": kernel.asm["ptx"],
        "sass": sass,
    }


def _threads(kernel: Any) -> int:
    """Threads per block, which warp specialisation makes more than 32 * num_warps."""
    found = re.findall(r"^\.(?:reqntid|maxntid) (\d+)", kernel.asm["ptx"], re.MULTILINE)
    return int(found[0]) if found else 32 * int(kernel.metadata.num_warps)


def _figure(name: str, usage: str) -> int:
    found = re.findall(rf"\b{name}:(\d+)", usage)
    if len(found) != 1:
        raise RuntimeError(f"cuobjdump: expected one {name} figure, got {usage.strip()!r}")
    return int(found[0])


def _cuobjdump(option: str, cubin: Path) -> str:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    done = subprocess.run([str(tool), option, str(cubin)], capture_output=True, text=True, timeout=120)
    if done.returncode:
        raise RuntimeError(f"cuobjdump: {done.stderr.strip()}")
    return done.stdout


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """`{"kernels": [...]}` for a request of `static.py`, or `{"error": text}`."""
    try:
        if request["file"] and request["file"] not in _loaded:
            registry.load_file(Path(request["file"]))
            _loaded.add(request["file"])
        kernel = registry.get_kernel(request["op"], request["kernel"])
        found = launch(kernel, Case(**request["case"]), request["scheme"], request["sm"])
        if not found:
            raise ValueError(f"kernel: expected one that launches Triton, and {kernel.id} launched none")
        counts = Counter((compiled.hash, grid) for compiled, grid in found)
        distinct = {(compiled.hash, grid): compiled for compiled, grid in found}
        return {"kernels": [describe(distinct[key], key[1], counts[key]) for key in distinct]}
    except FAILURES as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        text = f"{type(error).__name__}: {error}".strip()
        return {"error": text, "where": f"{Path(where.filename).name}:{where.lineno} in {where.name}"}


_loaded: set[str] = set()


def serve(requests: TextIO, answers: TextIO, handle: Callable[[dict[str, Any]], dict[str, Any]] = answer) -> None:
    """Answers requests until the input ends."""
    for line in requests:
        answers.write(json.dumps(handle(json.loads(line))) + "\n")
        answers.flush()


if __name__ == "__main__":
    # Answers get a descriptor of their own: what a kernel module or the compiler prints must not mix with them.
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    serve(sys.stdin, channel)
