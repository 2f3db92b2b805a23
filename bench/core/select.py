"""Selects kernels, test cases and number formats (schemes) by their names on a command line."""

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
    """Holds the chosen kernels, cases and schemes."""

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
        """Selects kernels, cases and schemes by name, as on a command line.  Raises `ValueError` on an unknown name."""
        if cases and not (op or kernels):
            raise ValueError("case: expected an op with it, got a case for all ops")
        op_kernels: dict[str, tuple[Kernel, ...]] = {}
        for kernel, _ in choose_kernels(op, kernels or ()):
            op_kernels[kernel.op] = (*op_kernels.get(kernel.op, ()), kernel)
        for scheme in schemes or ():  # a file may have its own
            get_scheme(scheme)
        if cases and len(op_kernels) > 1:
            raise ValueError(f"case: expected an op with it, got a case for {' and '.join(op_kernels)}")
        for suite in suites:
            # An op from outside may have no edge cases, which `check` asks for by itself.
            if not cases and suite != "edge" and not any(registry.get_op(name).cases_in(suite) for name in op_kernels):
                suites_there = dict.fromkeys(suite for name in op_kernels for suite in registry.get_op(name).cases)
                raise ValueError(f"suite: expected one of {', '.join(suites_there)}, got {suite!r}")
        parsed = tuple(registry.get_op(*op_kernels).check_case(Case.parse(text)) for text in cases or ())
        return cls(op_kernels, tuple(suites), parsed, tuple(schemes or ()), pick_device(device), seed)

    def cases_of(self, spec: OpSpec) -> list[Case]:
        """Returns the cases of one op.  A suite that the op does not have adds no case."""
        if self.cases:
            return list(self.cases)
        return list(dict.fromkeys(case for suite in self.suites for case in spec.cases_in(suite)))

    def schemes_of(self, spec: OpSpec, default: str | None = None) -> list[Scheme]:
        """Returns the requested schemes that the op has.  Without a request, returns the `default` scheme, or all.

        If only one op is selected and lacks the default scheme (as with fp8 operands), the op's first scheme is used.
        """
        names = self.schemes or ((default,) if default else spec.schemes)
        if not self.schemes and len(self.kernels) == 1 and not {*names} & {*spec.schemes}:
            names = spec.schemes[:1]
        return [get_scheme(name) for name in names if name in spec.schemes]


def choose_kernels(op: str | None, names: Sequence[str]) -> list[tuple[Kernel, Path | None]]:
    """Returns the kernels `names`.  The name of a `.py` file stands for the kernels that the file registers.  Without
    names, returns all kernels of `op`, or of every op if it is None.  `op` may also be None if all files are for one
    op.  Each kernel comes with its file, or None if it belongs to this package.  Raises `ValueError` on an unknown
    name."""
    if not names:
        ops = [op] if op else list(registry.ops())
        return [(kernel, None) for name in ops for kernel in registry.kernels(name).values()]
    selected: dict[str, tuple[Kernel, Path | None]] = {}
    loaded = {text: registry.load_file(Path(text)) for text in names if text.endswith(".py")}
    if op is None and len(file_ops := {kernel.op for kernels in loaded.values() for kernel in kernels}) == 1:
        op = file_ops.pop()
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
    """Returns the file that registers a kernel.  If no file is recorded, returns the file of the kernel's code."""
    code = inspect.unwrap(kernel.fn)
    code = code if inspect.isroutine(code) else type(code)  # an object that is called has the file of its class
    return kernel.file or Path(inspect.getfile(code)).resolve()


def file_of(kernel: Kernel) -> Path | None:
    """Returns the source file of a kernel from outside this package, or None for a kernel of this package."""
    path, tree = source_of(kernel), Path(registry.__file__).resolve().parent
    return None if path.is_relative_to(tree) else path


def pick_device(name: str | None) -> torch.device:
    """Returns the device `name`; without a name, cuda if available, else cpu.  Raises `ValueError` if missing."""
    if name not in (None, "cpu", "cuda"):
        raise ValueError(f"device: expected cpu or cuda, got {name!r}")
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("device: cuda was asked for, and torch finds no CUDA device")
    return torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))


def first_case(kernel: Kernel, spec: OpSpec, scheme: Scheme, suites: Sequence[str] = ("smoke", "edge")) -> Case | None:
    """Returns the first case of `suites` that the kernel supports in `scheme`, or None if there is no such case."""
    if scheme.name not in spec.schemes:
        return None
    for case in dict.fromkeys(case for suite in suites for case in spec.cases.get(suite, ())):
        inputs = spec.make_inputs(case, scheme, torch.device("meta"), 0)
        if kernel.why_not_args(inputs, spec) is None:
            return case
    return None


def default_scheme(device: torch.device) -> str:
    """Returns the name of the scheme in which kernels are measured by default on a device."""
    return "fp32" if device.type == "cpu" else "bf16"
