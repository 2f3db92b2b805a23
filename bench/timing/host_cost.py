"""The host's time for a launch, before Triton's own launcher: checks, the output, configs and tensor maps.

    OMP_NUM_THREADS=1 python -m rooflab.bench.timing.host_cost [OP ...]

It needs no GPU: the tensors lie on the CPU, and the launch itself does nothing.  On a GPU the output comes from torch's
caching allocator, and the current device is looked up; neither is in these times.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
from triton.runtime.jit import JITFunction

from rooflab.bench import show
from rooflab.bench.calls.calls import packed
from rooflab.bench.calls.selection import first_taken
from rooflab.kernels import registry
from rooflab.kernels.registry import Kernel

WARM, ROUNDS = 20, 1000


def host_us(kernel: Kernel) -> float | None:
    """Median microseconds of a call on the first small bf16 case that the kernel takes; None if it takes none."""
    taken = first_taken(kernel, "bf16")
    if taken is None:
        return None
    spec = registry.get_op(kernel.op)
    inputs = spec.make_inputs(*taken, torch.device("cpu"), 0)
    arguments = {name: value for name, value in inputs.items() if name in kernel.accepted}
    if kernel.prepare is not None and spec.prepared in arguments:
        arguments[spec.prepared] = packed(kernel.prepare, spec.prepared, inputs)
    with patch.object(JITFunction, "__getitem__", lambda self, grid: _launch):
        for _ in range(WARM):
            kernel.fn(**arguments)
        return 1e6 * statistics.median(_seconds(lambda: kernel.fn(**arguments)) for _ in range(ROUNDS))


def _launch(*arguments: Any, **options: Any) -> None:
    """Stands for Triton's launcher."""


def _seconds(call: Callable[[], Any]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def main() -> None:
    """The script."""
    kernels = [
        kernel
        for op in sys.argv[1:] or registry.ops()
        for kernel in registry.kernels(op).values()
        if kernel.backend in ("triton", "gluon") and kernel.role != "peer"
    ]
    rows = [{"kernel": kernel.id, "host_us": us} for kernel in kernels if (us := host_us(kernel)) is not None]
    show.table(sorted(rows, key=lambda row: -float(str(row["host_us"]))), ("kernel", "host_us"))


if __name__ == "__main__":
    main()
