"""Selects the kernels, cases and schemes that the texts of a command line name."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from rooflab.kernels import registry
from rooflab.kernels.registry import Kernel
from rooflab.reference.spec import Case, OpSpec, Scheme, get_scheme


@dataclass(frozen=True)
class Selection:
    """The chosen kernels, cases and schemes."""

    kernels: Mapping[str, tuple[Kernel, ...]]
    """The kernels of each op."""
    suites: tuple[str, ...]
    cases: tuple[Case, ...]
    """The cases that replace the suites; empty if the suites are used."""
    schemes: tuple[str, ...]
    """The chosen schemes; empty means all schemes of the op."""
    device: torch.device
    seed: int = 0

    @classmethod
    def of(
        cls,
        op: str | None,
        kernels: Sequence[str] | None,
        suites: Sequence[str],
        cases: Sequence[str] | None,
        schemes: Sequence[str] | None,
        device: str | None,
        seed: int = 0,
    ) -> Selection:
        """Makes the selection from the texts of the command line.  Raises `ValueError` on an unknown name."""
        if cases and not (op or kernels):
            raise ValueError("case: expected an op with it, got a case for all ops")
        chosen: dict[str, tuple[Kernel, ...]] = {}
        for kernel, _ in choose_kernels(op, kernels or ()):
            chosen[kernel.op] = (*chosen.get(kernel.op, ()), kernel)
        for scheme in schemes or ():  # a file may have its own
            get_scheme(scheme)
        if cases and len(chosen) > 1:
            raise ValueError(f"case: expected an op with it, got a case for {' and '.join(chosen)}")
        for suite in suites:
            # An op from outside may have no edge cases, which `check` asks for by itself.
            if not cases and suite != "edge" and not any(registry.get_op(name).cases_in(suite) for name in chosen):
                suites_there = dict.fromkeys(suite for name in chosen for suite in registry.get_op(name).cases)
                raise ValueError(f"suite: expected one of {', '.join(suites_there)}, got {suite!r}")
        parsed = tuple(registry.get_op(*chosen).check_case(Case.parse(text)) for text in cases or ())
        return cls(chosen, tuple(suites), parsed, tuple(schemes or ()), pick_device(device), seed)

    def cases_of(self, spec: OpSpec) -> list[Case]:
        """The cases of one op; a suite that the op does not have adds no case."""
        if self.cases:
            return list(self.cases)
        return list(dict.fromkeys(case for suite in self.suites for case in spec.cases_in(suite)))

    def schemes_of(self, spec: OpSpec, default: str | None = None) -> list[Scheme]:
        """The schemes of one op: the requested schemes that the op has; without requested schemes the default, or all.

        If only one op is selected and lacks the default scheme (as with fp8 operands), the op's first scheme is used.
        """
        names = self.schemes or ((default,) if default else spec.schemes)
        if not self.schemes and len(self.kernels) == 1 and not {*names} & {*spec.schemes}:
            names = spec.schemes[:1]
        return [get_scheme(name) for name in names if name in spec.schemes]


def choose_kernels(op: str | None, names: Sequence[str]) -> list[tuple[Kernel, Path | None]]:
    """The kernels that `names` name.  A `.py` file names the kernels that it registers.  Without names: all kernels of
    `op`, or of every op.  If all files are of one op, `op` may be None.  Each kernel comes with its file, or None if
    the kernel is in the tree.  Raises `ValueError` on an unknown name.
    """
    if not names:
        ops = [op] if op else list(registry.ops())
        return [(kernel, None) for name in ops for kernel in registry.kernels(name).values()]
    selected: dict[str, tuple[Kernel, Path | None]] = {}
    loaded = {text: registry.load_file(Path(text)) for text in names if text.endswith(".py")}
    if op is None and len(own_ops := {kernel.op for kernels in loaded.values() for kernel in kernels}) == 1:
        op = own_ops.pop()
    for text in names:
        if text in loaded:
            of_op = [kernel for kernel in loaded[text] if op in (None, kernel.op)]
            if not of_op:
                raise ValueError(f"kernel: {text} registers none for {op}")
            selected |= {kernel.id: (kernel, kernel.file) for kernel in of_op}
        elif op is None:
            raise ValueError(f"kernel: expected an op with the name {text!r}, got none")
        else:
            kernel = registry.get_kernel(op, text)
            selected[kernel.id] = kernel, kernel.file
    return list(selected.values())


def source_of(kernel: Kernel) -> Path:
    """The file that registers a kernel, or else the file of the kernel's code."""
    code = inspect.unwrap(kernel.fn)
    code = code if inspect.isroutine(code) else type(code)  # an object that is called has the file of its class
    return kernel.file or Path(inspect.getfile(code)).resolve()


def file_of(kernel: Kernel) -> Path | None:
    """The file of a kernel from outside the tree (`source_of`); None for a kernel of the tree."""
    path, tree = source_of(kernel), Path(registry.__file__).resolve().parent
    return None if path.is_relative_to(tree) else path


def pick_device(name: str | None) -> torch.device:
    """The device called `name`; without a name, cuda if available, else cpu.  Raises `ValueError` if it is missing."""
    if name not in (None, "cpu", "cuda"):
        raise ValueError(f"device: expected cpu or cuda, got {name!r}")
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("device: cuda was asked for, and torch finds no CUDA device")
    return torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))


def first_case(kernel: Kernel, spec: OpSpec, scheme: Scheme, suites: Sequence[str] = ("smoke", "edge")) -> Case | None:
    """The first case of `suites` whose shapes the kernel takes in `scheme`; None if there is no such case."""
    if scheme.name not in spec.schemes:
        return None
    for case in dict.fromkeys(case for suite in suites for case in spec.cases.get(suite, ())):
        inputs = spec.make_inputs(case, scheme, torch.device("meta"), 0)
        if kernel.why_not_args(inputs, spec) is None:
            return case
    return None


def default_scheme(device: torch.device) -> str:
    """The name of the scheme in which kernels are measured by default on a device."""
    return "fp32" if device.type == "cpu" else "bf16"
