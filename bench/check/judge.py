"""A process that judges: it makes checks, each of a kernel that runs in a process of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from functools import cache
from importlib import import_module
from typing import Any

import torch

from rooflab.bench.check import outside
from rooflab.bench.check.failed import known_errors
from rooflab.bench.check.spread import ONE_THREAD, CheckTask, check_outside, processes
from rooflab.bench.processes.child import Pool
from rooflab.bench.processes.forked import Forked
from rooflab.kernels import registry
from rooflab.reference.spec import Case, get_scheme


@cache
def _kernels() -> Pool:
    """The process in which kernels run: at first a fork of this one, from before it makes an input."""
    known_errors()  # imports Triton, once for both
    registry.load_all()
    pool = processes(ONE_THREAD)
    pool.idle.put(Forked(outside.answer))
    import_module("torch._dynamo")  # torch would at the first input on the meta device, in 1.5 s
    return pool


start = _kernels


def answer(request: Mapping[str, Any]) -> dict[str, Any]:
    """A `CheckResult` as JSON values, or an `error`."""
    try:
        kernel = outside.kernel_of(request["op"], request["kernel"], request["file"])
    except (ValueError, ImportError, OSError) as error:
        return {"error": str(error)}
    pool = _kernels()
    item = CheckTask(
        kernel, Case(**request["case"]), get_scheme(request["scheme"]), request["seed"], request["planted"]
    )
    return asdict(check_outside(item, pool, torch.device("cpu"))) | {"case": request["case"]}
