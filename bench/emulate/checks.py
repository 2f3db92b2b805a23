"""Checks of compiled kernels with no GPU: emulated in processes that do not interpret Triton's kernels."""

from __future__ import annotations

from functools import cache

from rooflab.bench.check.spread import TIMEOUT_S
from rooflab.bench.processes.child import Pool, command_for, environment_without

WORKER = "rooflab.bench.emulate.worker"


@cache
def emulators() -> Pool:
    """The emulating processes, of one thread each."""
    environment = environment_without("TRITON_INTERPRET") | {"OMP_NUM_THREADS": "1"}
    return Pool(command_for(WORKER), environment, TIMEOUT_S)
