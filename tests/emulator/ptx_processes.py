"""The processes of `ptx_worker.py` (the corpus) and of `mutant_worker.py` (kernels of the registry)."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from packaging.version import Version
from ptx_kernels.cases import Case

from rooflab.bench.core.process import Child, ChildFailed

LIMIT_S = 280.0
OLD_TRITON = Version(version("triton")) < Version("3.7.1")
MENDED_LATER = "no fence.proxy.async (Triton puts one there from 3.7.1 on)"


def races(answer: Mapping[str, Any]) -> list[str]:
    """What is reported and should not be.

    Triton before 3.7.1 lets wgmma read what cp.async brought without a proxy fence between (its pull request 10537).
    """
    return [race for race in answer["races"] if not (OLD_TRITON and MENDED_LATER in race)]


@cache
def _child(worker: str, sms: int | None) -> Child:
    """One for each number of SMs: kernels' modules read it when they are imported.  Ends with this process."""
    given = {"TRITON_INTERPRET": None, "PYTHONPATH": str(Path(__file__).parent), "OMP_NUM_THREADS": "1"}
    return Child(worker, environment=given, own_session=False)


def asked(request: Mapping[str, Any], worker: str = "mutant_worker") -> dict[str, Any]:
    """The worker's answer; a process that gave none is not asked again."""
    try:
        found: dict[str, Any] = _child(worker, request.get("sms")).ask(request, LIMIT_S)
    except ChildFailed:
        _child.cache_clear()
        raise
    return found


def emulated(case: Case, seed: int) -> dict[str, Any]:
    """The answer about a case of `ptx_kernels`; where the process ends, as `failed` with its last words."""
    try:
        return asked({**vars(case), "seed": seed}, "ptx_worker")
    except ChildFailed as died:
        if died.status is None:
            raise
        return {"failed": died.words, "compiler": False}
