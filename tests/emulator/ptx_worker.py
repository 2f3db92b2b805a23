"""The process in which the corpus is emulated; it has no TRITON_INTERPRET, with which Triton compiles no function."""

from __future__ import annotations

import importlib
import os
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from triton.backends.nvidia.compiler import CUDABackend
from triton.errors import TritonError

from rooflab.bench.emulator import Checks, Launches, emulating_launches

FAILURES = (TritonError, RuntimeError, ValueError, TypeError, LookupError, AttributeError, AssertionError)


# The emulator takes PTX: to assemble it would be a third of the compiler's time.  What has no code for the GPU must not
# lie where others look for it.
CUDABackend.make_cubin = lambda *args: b""
os.environ["TRITON_CACHE_DIR"] = os.environ.get("TRITON_CACHE_DIR", str(Path.home() / ".triton" / "cache")) + "_of_ptx"


def answer(request: Mapping[str, Any]) -> dict[str, Any]:
    """Runs a case of `ptx_kernels` in the order of a `seed`: `{"error", "allowed", "races", "notes", "opcodes"}`, or
    `{"failed": text, "compiler": whether it raised}` where the compiler or the emulator raises."""
    launches = Launches(checks=Checks(uninitialised=request["uninitialised"]), seed=request["seed"])
    try:
        module = importlib.import_module(f"ptx_kernels.{request['module']}")
        trial = getattr(module, request["maker"])(request["seed"], **request["options"])
        with emulating_launches(launches):
            trial.launch()
    except FAILURES as error:
        # The test that asked wants to see it, and the next one wants a process.
        frames = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
        compiler = any("/triton/compiler/" in name.replace(os.sep, "/") for name in frames)
        return {"failed": f"{type(error).__name__}: {error}\n{traceback.format_exc(limit=-3)}", "compiler": compiler}
    return {
        "error": trial.error(),
        "allowed": trial.relative,
        "races": launches.races,
        "notes": launches.notes,
        "opcodes": sorted({opcode for result in launches.results for opcode in result.instructions}),
    }
