"""Stores which kernels passed their first check on this kind of machine.  Later runs do not repeat these checks."""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Iterable
from pathlib import Path

import torch

from rooflab.bench.core import Environment, default_scheme, first_case, read
from rooflab.kernels import registry
from rooflab.kernels._files import write_whole
from rooflab.kernels._folders import cache_folder
from rooflab.kernels.registry import Kernel
from rooflab.reference.spec import Case, Scheme, get_scheme

CODE_FIELD = "kernel_code"
"""The field in a first check's record that holds the result of `Passed.code`."""
SHARED_FOLDER = Path(inspect.getfile(Kernel)).parent
"""The folder of the code that all kernels may import: the registry, `_cuda`, and configs."""


class Passed:
    """Stores which kernel code passed its first check on this kind of machine, in a file in the cache folder.

    A kernel's code is its folder, the files that all kernels share, and the versions of torch and Triton."""

    def __init__(self, environment: Environment, folder: Path | None = None):
        self._environment = environment
        self._path = (folder or cache_folder()) / "checked" / f"{environment.machine_key}.json"

    def code(self, kernel: Kernel) -> str:
        """Returns a text that identifies the kernel's code: a file hash, and the versions of torch and Triton."""
        return f"{_code_of(kernel)} torch {self._environment.torch} triton {self._environment.triton}"

    def holds(self, kernel: Kernel) -> bool:
        """Returns whether the kernel's present code has passed its first check."""
        return self._remembered().get(kernel.id) == self.code(kernel)

    def trust(self, folder: Path) -> None:
        """Adds kernels that passed their first check in an earlier run. `folder` has the records of that run.

        Ignores records of other GPU models or older kernel code. Adds a kernel only if all its other records are OK."""
        gpu = self._environment.gpu
        code_by_kernel = {kernel.id: self.code(kernel) for kernel in registry.every_kernel()}
        statuses_of: dict[str, set[str]] = {}
        for record in read(folder, deep=True):
            name, environment = f"{record.op}/{record.kernel}", record.environment
            gpu_name = (environment.get("gpu") or {}).get("name")
            if gpu and gpu_name == gpu.name and environment.get(CODE_FIELD) == code_by_kernel.get(name, ""):
                statuses_of.setdefault(name, set()).add(record.status if record.checked_by == "gpu" else "not by a GPU")
        self.keep({name: code_by_kernel[name] for name, statuses in statuses_of.items() if statuses == {"OK"}})

    def keep(self, codes: dict[str, str]) -> None:
        """Stores that this code has passed.  `codes` maps each kernel id to the text that identifies its code."""
        write_whole(self._path, json.dumps(self._remembered() | codes, indent=1) + "\n")

    def _remembered(self) -> dict[str, str]:
        try:
            passed_code_by_kernel = json.loads(self._path.read_text())
        except (FileNotFoundError, ValueError):
            return {}  # no file yet, or a damaged file: the kernels run in their own process again
        return passed_code_by_kernel if isinstance(passed_code_by_kernel, dict) else {}


def passed_on_card(kernels: Iterable[Kernel], scheme: str, device: torch.device) -> frozenset[str]:
    """Returns the names of kernels that passed their first check on this kind of GPU with the dtypes `scheme`."""
    if device.type != "cuda":
        return frozenset()
    passed_checks, scheme_name = Passed(Environment.now(device.index or 0)), default_scheme(device)
    first_cases = ((kernel, first_taken(kernel, scheme_name)) for kernel in kernels if passed_checks.holds(kernel))
    return frozenset(
        kernel.name
        for kernel, case_and_scheme in first_cases
        if case_and_scheme is not None and case_and_scheme[1].name == scheme
    )


def first_taken(kernel: Kernel, default: str) -> tuple[Case, Scheme] | None:
    """Returns the first case (input shape) that a kernel supports, and its scheme (dtypes).  The scheme `default` is
    tried first, and small test cases before the cases of models.  Returns None if the kernel supports no case."""
    spec = registry.get_op(kernel.op)
    for scheme in map(get_scheme, dict.fromkeys((default, *spec.schemes))):
        case = first_case(kernel, spec, scheme, ("smoke", "edge", *spec.cases))
        if case is not None:
            return case, scheme
    return None


def _code_of(kernel: Kernel) -> str:
    """Returns the SHA-256 of all files that the kernel may import or read, including config files."""
    folder = Path(inspect.getfile(inspect.unwrap(kernel.fn))).parent
    # The folder of a kernel from outside may hold unrelated files.
    kernel_files = folder.glob("*" if folder.parent == SHARED_FOLDER else "*.py")
    code_digest = hashlib.sha256()
    for file in (*sorted(kernel_files), *sorted(SHARED_FOLDER.glob("*.py"))):
        if file.is_file():
            code_digest.update(file.read_bytes())
    return code_digest.hexdigest()
