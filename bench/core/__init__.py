"""Measures one kernel on one input case: correctness check, time, roofline bound, and result record.

This file exports the names that other packages and users import.  Each name is loaded on first use, so that a program
that only reads records does not import torch.
"""

from __future__ import annotations

import ast
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rooflab.bench.core.call import Rotation
    from rooflab.bench.core.ceilings import MachineLimits, ceilings_for, raise_ceilings
    from rooflab.bench.core.check_data import CheckResult, CheckTask
    from rooflab.bench.core.environment import Environment, git_state
    from rooflab.bench.core.failed import Failed
    from rooflab.bench.core.functions import Checked, FunctionOp
    from rooflab.bench.core.measure import Measurement
    from rooflab.bench.core.noise import why_noisy
    from rooflab.bench.core.outside import Checkers, Serving
    from rooflab.bench.core.poison import poisoned_allocations
    from rooflab.bench.core.process import Child, ChildFailed, Pool
    from rooflab.bench.core.record import NOT_RUN, Record, Status, TimeBasis, Verdict
    from rooflab.bench.core.record_files import RunWriter, read, read_all, result_folder
    from rooflab.bench.core.running import ContextBroken, Running
    from rooflab.bench.core.select import Selection, choose_kernels, default_scheme, first_case, pick_device, source_of
    from rooflab.bench.core.settings import Settings
    from rooflab.bench.core.timers import tampered
    from rooflab.bench.core.timers.timing import time_functions, timer_for
    from rooflab.bench.core.trial import Runner

__all__ = [
    "NOT_RUN", "CheckResult", "CheckTask", "Checked", "Checkers", "Child", "ChildFailed", "ContextBroken",
    "Environment", "Failed", "FunctionOp", "MachineLimits", "Measurement", "Pool", "Record", "Rotation", "RunWriter",
    "Runner", "Running", "Selection", "Serving", "Settings", "Status", "TimeBasis", "Verdict", "ceilings_for",
    "choose_kernels", "default_scheme", "first_case", "git_state", "pick_device", "poisoned_allocations",
    "raise_ceilings", "read", "read_all", "result_folder", "source_of", "tampered", "time_functions", "timer_for",
    "why_noisy",
]  # fmt: skip
_FILE_BY_NAME = {
    alias.name: str(node.module)
    for node in ast.walk(ast.parse(Path(__file__).read_text(encoding="utf-8")))
    if isinstance(node, ast.ImportFrom) and str(node.module).startswith(__name__)
    for alias in node.names
}
"""By name, the module of the imports above, which only a type checker runs."""


def __getattr__(name: str) -> object:
    if name not in _FILE_BY_NAME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_FILE_BY_NAME[name]), name)
