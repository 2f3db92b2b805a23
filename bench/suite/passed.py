"""Remembers which kernels' code has passed its first check on this kind of machine: later runs need not check it."""

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

CODE = "kernel_code"
"""The field in a first check's record that holds the result of `Passed.code`."""
SHARED = Path(inspect.getfile(Kernel)).parent
"""The folder of the code that all kernels may import: the registry, `_cuda`, and configs."""


class Passed:
    """The kernels' code that has passed its first check on this kind of machine; a file in the cache remembers it.

    The code is the kernel's folder, the files that all kernels share, and the versions of torch and Triton.
    """

    def __init__(self, environment: Environment, folder: Path | None = None):
        self._environment = environment
        self._path = (folder or cache_folder()) / "checked" / f"{environment.machine_key}.json"

    def code(self, kernel: Kernel) -> str:
        """A hash of the kernel's present code and its compilers."""
        return f"{_code_of(kernel)} torch {self._environment.torch} triton {self._environment.triton}"

    def holds(self, kernel: Kernel) -> bool:
        """Whether the present code of the kernel has passed."""
        return self._remembered().get(kernel.id) == self.code(kernel)

    def trust(self, folder: Path) -> None:
        """Takes results of first checks on a card of this name from the records in `folder`.

        Code that a record in the folder calls wrong is not taken.
        """
        gpu = self._environment.gpu
        now = {kernel.id: self.code(kernel) for kernel in registry.every_kernel()}
        statuses_of: dict[str, set[str]] = {}
        for record in read(folder, deep=True):
            name, environment = f"{record.op}/{record.kernel}", record.environment
            card = (environment.get("gpu") or {}).get("name")
            if gpu and card == gpu.name and environment.get(CODE) == now.get(name, ""):
                statuses_of.setdefault(name, set()).add(record.status if record.checked_by == "gpu" else "not by a GPU")
        self.keep({name: now[name] for name, statuses in statuses_of.items() if statuses == {"OK"}})

    def keep(self, codes: dict[str, str]) -> None:
        """Stores code that has passed; `codes` has a kernel's id and the hash of its code."""
        write_whole(self._path, json.dumps(self._remembered() | codes, indent=1) + "\n")

    def _remembered(self) -> dict[str, str]:
        try:
            codes = json.loads(self._path.read_text())
        except (FileNotFoundError, ValueError):
            return {}  # no file yet, or a damaged file: the kernels run in their own process again
        return codes if isinstance(codes, dict) else {}


def passed_on_card(kernels: Iterable[Kernel], scheme: str, device: torch.device) -> frozenset[str]:
    """The names of kernels whose first check on this kind of GPU, also on adversarial inputs, was right in `scheme`."""
    if device.type != "cuda":
        return frozenset()
    passed, default = Passed(Environment.now(device.index or 0)), default_scheme(device)
    chosen = ((kernel, first_taken(kernel, default)) for kernel in kernels if passed.holds(kernel))
    return frozenset(kernel.name for kernel, first in chosen if first is not None and first[1].name == scheme)


def first_taken(kernel: Kernel, default: str) -> tuple[Case, Scheme] | None:
    """The first case that a kernel takes, and the scheme.  Smoke and edge cases come before model cases.  The scheme is
    `default` if the kernel takes it.  Returns None if the kernel takes no case."""
    spec = registry.get_op(kernel.op)
    for scheme in map(get_scheme, dict.fromkeys((default, *spec.schemes))):
        case = first_case(kernel, spec, scheme, ("smoke", "edge", *spec.cases))
        if case is not None:
            return case, scheme
    return None


def _code_of(kernel: Kernel) -> str:
    """The SHA-256 of the files that the kernel may import or read.  One of these files holds its configs."""
    folder = Path(inspect.getfile(inspect.unwrap(kernel.fn))).parent
    # The folder of a kernel from outside may hold unrelated files.
    beside = folder.glob("*" if folder.parent == SHARED else "*.py")
    digest = hashlib.sha256()
    for file in (*sorted(beside), *sorted(SHARED.glob("*.py"))):
        if file.is_file():
            digest.update(file.read_bytes())
    return digest.hexdigest()
