"""Kernels as functions of no arguments, ready to be timed."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial

import psutil
import torch

from rooflab.kernels.registry import Kernel
from rooflab.reference.spec import Inputs, OpSpec, Outputs, as_tuple, nbytes
from rooflab.roofline.model import Traffic


def rotating(kernel: Kernel, spec: OpSpec, copies: Sequence[Inputs]) -> Callable[[], object]:
    """A function of no arguments that calls `kernel` on each of `copies` in turn.

    The copies are of one case and seed. Weights are packed and outputs allocated here, so that a call does neither.
    """
    calls: list[Callable[[], object]] = []
    outputs: Outputs | None = None
    for inputs in copies:
        arguments = {name: value for name, value in inputs.items() if name in kernel.accepted}
        if kernel.prepare is not None and spec.prepared is not None and arguments.get(spec.prepared) is not None:
            arguments[spec.prepared] = kernel.prepare(arguments[spec.prepared])
        if kernel.takes_out and not spec.mutates:
            outputs = outputs or as_tuple(kernel.fn(**arguments))
            outs = tuple(torch.empty_like(output) for output in outputs)
            arguments["out"] = outs[0] if len(outs) == 1 else outs
        calls.append(partial(kernel.fn, **arguments))
    turns = itertools.cycle(calls)
    return lambda: next(turns)()


def kernel_traffic(kernel: Kernel, inputs: Inputs) -> Traffic | None:
    """What the kernel says it moves for these inputs, real or `meta`; None where it says nothing."""
    if kernel.traffic is None:
        return None
    return kernel.traffic(**{name: value for name, value in inputs.items() if name in kernel.accepted})


def input_bytes(inputs: Inputs) -> int:
    """Bytes of all tensors of `inputs`, real or `meta`."""
    return nbytes(*(value for value in inputs.values() if isinstance(value, torch.Tensor)))


def free_bytes(device: torch.device) -> float:
    """Bytes of memory that are free on `device`."""
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0])
    return float(psutil.virtual_memory().available)
