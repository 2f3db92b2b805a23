"""Runs the CUDA C++ of the microkernels on a CPU, compiled by g++ behind `microkernels_on_host.h`."""

import ctypes
import hashlib
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import numpy as np
import torch

from rooflab.bench.ceilings.microkernels.microkernel import HERE, Card

COMPILER = shutil.which("g++")
CARD = Card(torch.device("cpu"), sm=90, sms=2, l2_bytes=2**16, free_bytes=1e9)
KERNEL = re.compile(r'extern "C" __global__ void\s+(?:__launch_bounds__\(.*\)\s+)?(\w+)\(')
_folder = tempfile.TemporaryDirectory()
_built = {}


def host_load(dtype="bf16", change=lambda text: text):
    """A `load` whose kernels run here; `change` edits the text of the kernels first, to break them."""

    def load(source, name, *, options=()):
        common = (HERE / "common.cu").read_text()
        # What Python names is left out as well: the header has instructions of its own.
        text = re.sub(r"^#define (WGMMA|MMA).*$", "", source.removeprefix(common), flags=re.MULTILINE)
        return HostKernel(change(text), (*options, f"-DDTYPE_{dtype}"), name)

    return load


def _build(text, options):
    launchers = "".join(
        f'\nextern "C" void launch_{name}(u32 grid, u32 block, void** args) {{ run(grid, block, {name}, args); }}'
        for name in KERNEL.findall(text)
    )
    key = hashlib.sha256(repr((text, options)).encode()).hexdigest()
    if key not in _built:
        file = Path(_folder.name) / f"{key}.cpp"
        file.write_text(f"#include <microkernels_on_host.h>\n{text}\n{launchers}\n")
        command = [COMPILER, "-std=c++20", "-O1", "-w", "-pthread", "-shared", "-fPIC", *options]
        command += ["-I", str(Path(__file__).parent), str(file), "-o", str(file.with_suffix(".so"))]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[:3000]
        _built[key] = ctypes.CDLL(str(file.with_suffix(".so")))
    return _built[key]


class HostKernel:
    """One kernel, called as a loaded one is; built at its first call."""

    def __init__(self, text, options, name):
        self._parts = text, options, name

    def __call__(self, grid, block, *arguments, shared_bytes=0):
        text, options, name = self._parts
        launch = getattr(_build(text, options), f"launch_{name}")
        # Each argument as its address, which is how a launch hands them over.
        kept = [np.uint64(a.data_ptr()) if isinstance(a, torch.Tensor) else a for a in arguments]
        boxes = [np.array([value]) for value in kept]
        addresses = (ctypes.c_void_p * len(boxes))(*(box.ctypes.data for box in boxes))
        launch(ctypes.c_uint32(grid[0]), ctypes.c_uint32(block[0]), addresses)
