"""The host's time for a launch, before Triton's own launcher: checks, the output, configs and tensor maps.

    OMP_NUM_THREADS=1 python results/host_cost/make.py [OP ...]

It needs no GPU: the tensors lie on torch's `meta` device, which has no values to check, and the launch itself does
nothing.  On a GPU the output comes from torch's caching allocator, and the current device is looked up; neither is in
these times.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from triton.runtime.jit import JITFunction

from rooflab.bench import show
from rooflab.bench.core.call import packed
from rooflab.bench.suite.passed import first_taken
from rooflab.kernels import registry
from rooflab.kernels.registry import Kernel

CALLS, ROUNDS = 200, 5


def call_of(kernel: Kernel) -> Callable[[], Any] | None:
    """A call on `meta` tensors of the first small bf16 case that the kernel takes; None if it takes none."""
    taken = first_taken(kernel, "bf16")
    if taken is None:
        return None
    spec, meta = registry.get_op(kernel.op), torch.device("meta")
    inputs = spec.make_inputs(*taken, meta, 0)
    given = {name: value for name, value in inputs.items() if name in kernel.accepted}
    if kernel.prepare is not None and spec.prepared in given:
        given[spec.prepared] = packed(kernel.prepare, spec.prepared, inputs)
    # Lengths and page tables hold real values even in `meta` inputs.
    given = {name: value.to(meta) if isinstance(value, torch.Tensor) else value for name, value in given.items()}
    return partial(kernel.fn, **given)


def host_us(calls: Mapping[str, Callable[[], Any]]) -> dict[str, float]:
    """The microseconds of each call: the least of five medians, taken in turn, because other work only adds time."""
    best = dict.fromkeys(calls, math.inf)
    with patch.object(JITFunction, "__getitem__", lambda self, grid: _launch):
        for _ in range(ROUNDS):
            for name, call in calls.items():
                best[name] = min(best[name], 1e6 * statistics.median(_seconds(call) for _ in range(CALLS)))
    return best


def _launch(*arguments: Any, **options: Any) -> None:
    """Replaces Triton's launcher and does nothing."""


def _seconds(call: Callable[[], Any]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def main() -> None:
    """Prints the host's time of each kernel's launch."""
    parser = argparse.ArgumentParser(description="The host's time of a launch, without Triton's own.")
    parser.add_argument("ops", nargs="*", metavar="OP", help="all without one")
    ops = parser.parse_args().ops
    kernels = [
        kernel
        for op in ops or registry.ops()
        for kernel in registry.kernels(op).values()
        if kernel.backend in ("triton", "gluon") and kernel.role != "peer"
    ]
    found = host_us({kernel.id: call for kernel in kernels if (call := call_of(kernel)) is not None})
    rows = [{"kernel": name, "host_us": us} for name, us in sorted(found.items(), key=lambda item: -item[1])]
    show.table(rows, ("kernel", "host_us"))


if __name__ == "__main__":
    main()
