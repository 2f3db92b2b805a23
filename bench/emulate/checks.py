"""Checks of compiled kernels with no GPU: emulated in processes that do not interpret Triton's kernels."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache

import torch

from rooflab.bench.check.check import CheckResult
from rooflab.bench.check.spread import TIMEOUT_S, CheckTask, check_outside
from rooflab.bench.processes.child import Pool, command_for, environment_without

WORKER = "rooflab.bench.emulate.worker"


@cache
def emulators() -> Pool:
    """The emulating processes, of one thread each."""
    environment = environment_without("TRITON_INTERPRET") | {"OMP_NUM_THREADS": "1"}
    return Pool(command_for(WORKER), environment, TIMEOUT_S)


def check_emulated(asked: Sequence[CheckTask]) -> Iterable[CheckResult]:
    """Makes the checks on all cores; gives their results in order."""
    pool = emulators()
    return pool.threads.map(lambda item: check_outside(item, pool, torch.device("cpu")), asked)
