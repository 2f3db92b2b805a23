"""Starts `ptx_worker.py`, asks it, and ends it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ptx_kernels.cases import Case

WORKER = Path(__file__).with_name("ptx_worker.py")
OLD_TRITON = tuple(map(int, version("triton").split(".")[:2])) < (3, 7)


def races(answer: Mapping[str, Any]) -> list[str]:
    """What is reported and should not be.

    Triton 3.6 lets wgmma read what cp.async brought without a proxy fence between, which 3.7 mended.
    """
    return [race for race in answer["races"] if not (OLD_TRITON and race.endswith("no fence.proxy.async between"))]


class KernelWorker:
    """A process that runs cases, kept from one to the next."""

    def __init__(self) -> None:
        self._log = tempfile.TemporaryFile()
        self._start()

    def _start(self) -> None:
        environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        self._process = subprocess.Popen(
            [sys.executable, str(WORKER)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log,
            env=environment, text=True,
        )  # fmt: skip

    def ask(self, case: Case, seed: int) -> dict[str, Any]:
        """The answer of `ptx_worker.run`; where the process ends, as `failed` with its last words."""
        request = {**vars(case), "options": dict(case.options), "seed": seed}
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if line:
            found: dict[str, Any] = json.loads(line)
            return found
        status = self._process.wait()
        self._log.seek(0)
        tail = self._log.read().decode(errors="replace")[-2000:]
        self._start()
        return {"failed": f"the worker ended with status {status}: {tail}", "compiler": False}

    def stop(self) -> None:
        """Ends the process."""
        self._process.kill()
        self._process.communicate()
        self._log.close()
