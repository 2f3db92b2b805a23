"""The process in which the corpus runs: one request a line on standard input, one answer a line on the output.

Without `TRITON_INTERPRET`: an interpreted function cannot be compiled.  By hand: `python tests/ptx_worker.py
NAME[:SEED] [FILE.ptx]...`, or `all`.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ptx_kernels.cases import CASES
from triton.backends.nvidia.compiler import CUDABackend

from rooflab.bench.compile.cases import DEFAULT
from rooflab.bench.compile.worker import FAILURES
from rooflab.bench.ptx.launch import emulate
from rooflab.bench.ptx.machine.run import Checks
from rooflab.bench.ptx.results import Result
from rooflab.bench.ptx.triton_kernels import emulating_triton


class Emulated:
    """Launches that are emulated as they come."""

    def __init__(self) -> None:
        self.seed, self.checks = 0, Checks()
        self.results: list[Result] = []
        self.ptx, self.seconds = "", 0.0

    def handle(self, kernel: Any, grid: tuple[int, ...], args: list[Any]) -> None:
        self.ptx = kernel.asm["ptx"]
        start = time.perf_counter()
        self.results.append(emulate(kernel, grid, args, checks=self.checks, seed=self.seed))
        self.seconds += time.perf_counter() - start


def run(emulated: Emulated, request: Mapping[str, Any]) -> dict[str, Any]:
    """Runs one case: `{"error", "allowed", "races", "launches", "compiled_s", "emulated_s", "opcodes"}`, or
    `{"failed": text, "compiler": whether it raised}` where the compiler or the emulator raises."""
    emulated.results, emulated.seconds, emulated.ptx = [], 0.0, ""
    emulated.seed, emulated.checks = request["seed"], Checks(uninitialised=request["uninitialised"])
    start = time.perf_counter()
    try:
        module = importlib.import_module(f"ptx_kernels.{request['module']}")
        trial = getattr(module, request["maker"])(request["seed"], **request["options"])
        trial.launch()
    except FAILURES as error:
        # The test that asked wants to see it, and the next one wants a process.
        frames = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
        compiler = any("/triton/compiler/" in name.replace(os.sep, "/") for name in frames)
        text = f"{type(error).__name__}: {error}\n{traceback.format_exc(limit=-3)}"
        return {"failed": text, "compiler": compiler}
    spent = time.perf_counter() - start
    assert len(emulated.results) == trial.launches, f"{len(emulated.results)} launches"
    return {
        "error": trial.error(),
        "allowed": trial.relative,
        "races": [race for result in emulated.results for race in result.races],
        "compiled_s": spent - emulated.seconds,
        "emulated_s": emulated.seconds,
        "opcodes": sorted({opcode for result in emulated.results for opcode in result.instructions}),
    }


def serve(emulated: Emulated) -> None:
    """Answers standard input, on a descriptor of its own: a compiler's prints must not mix with the answers."""
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        channel.write(json.dumps(run(emulated, json.loads(line))) + "\n")
        channel.flush()


def by_hand(emulated: Emulated, names: list[str]) -> None:
    """Prints the answers of the cases named, `NAME` or `NAME:SEED`; `FILE.ptx` keeps the PTX of the one before."""
    for text in names:
        if text.endswith(".ptx"):
            Path(text).write_text(emulated.ptx)
            continue
        name, _, seed = text.partition(":")
        case = CASES[name]
        found = run(emulated, {**vars(case), "seed": int(seed or 0)})
        found.pop("opcodes", None)
        print(name, found if "failed" not in found else "FAILED " + found["failed"], flush=True)


def main() -> None:
    emulated = Emulated()
    # The emulator takes PTX: to assemble it would be a third of the compiler's time.  What has no code for the GPU must
    # not lie where others look for it.
    CUDABackend.make_cubin = lambda *args: b""
    cache = os.environ.get("TRITON_CACHE_DIR", str(Path.home() / ".triton" / "cache"))
    os.environ["TRITON_CACHE_DIR"] = f"{cache}_of_ptx"
    with emulating_triton(DEFAULT.sm, DEFAULT.properties(), emulated.handle):
        if sys.argv[1:]:
            by_hand(emulated, sys.argv[1:] if sys.argv[1:] != ["all"] else list(CASES))
        else:
            serve(emulated)


if __name__ == "__main__":
    main()
