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
    """Holds the chosen kernels, test cases and number formats (schemes)."""

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
        """Selects kernels, cases and schemes (number formats) by name.  Raises `ValueError` on an unknown name."""
        if cases and not (op or kernels):
            raise ValueError("case: expected an op with it, got a case for all ops")
        op_kernels: dict[str, tuple[Kernel, ...]] = {}
        for kernel in choose_kernels(op, kernels or ()):
            op_kernels[kernel.op] = (*op_kernels.get(kernel.op, ()), kernel)
        for scheme in schemes or ():  # a file may have its own
            get_scheme(scheme)
        if cases and len(op_kernels) > 1:
            raise ValueError(f"case: expected an op with it, got a case for {' and '.join(op_kernels)}")
        for suite in suites:
            # An op from outside may have no edge cases, which `check` asks for by itself.
            if not cases and suite != "edge" and not any(registry.get_op(name).cases_in(suite) for name in op_kernels):
                known_suites = dict.fromkeys(suite for name in op_kernels for suite in registry.get_op(name).cases)
                raise ValueError(f"suite: expected one of {', '.join(known_suites)}, got {suite!r}")
        case_list = tuple(registry.get_op(*op_kernels).check_case(Case.parse(case_text)) for case_text in cases or ())
        return cls(op_kernels, tuple(suites), case_list, tuple(schemes or ()), pick_device(device), seed)

    def cases_of(self, spec: OpSpec) -> list[Case]:
        """Returns the selected test cases of one op.  Skips suites (named lists of cases) that the op lacks."""
        if self.cases:
            return list(self.cases)
        return list(dict.fromkeys(case for suite in self.suites for case in spec.cases_in(suite)))

    def schemes_of(self, spec: OpSpec, default: str | None = None) -> list[Scheme]:
        """Returns the schemes (number formats) to use for an op: the user's choice, without schemes that the op lacks.

        If the user chose no scheme, the result is `default`.  If `default` is None, it is all schemes of the op.

        If the op lacks `default`, the result is empty, or the op's first scheme if the user selected this op alone."""
        names = self.schemes or ((default,) if default else spec.schemes)
        if not self.schemes and len(self.kernels) == 1 and not {*names} & {*spec.schemes}:
            names = spec.schemes[:1]
        return [get_scheme(name) for name in names if name in spec.schemes]


def choose_kernels(op: str | None, names: Sequence[str]) -> list[Kernel]:
    """Returns the selected kernels.  `names` holds names of kernels and paths of `.py` files.

    A file selects all kernels that it registers, or only those of `op` if `op` is given.  Without `names`, selects all
    kernels of `op`, or of all ops if `op` is None.  Raises `ValueError` on an unknown name, or on a kernel name without
    an op."""
    if not names:
        ops = [op] if op else list(registry.ops())
        return [kernel for name in ops for kernel in registry.kernels(name).values()]
    selected_kernels: dict[str, Kernel] = {}
    file_kernels = {name_text: registry.load_file(Path(name_text)) for name_text in names if name_text.endswith(".py")}
    if op is None and len(file_ops := {kernel.op for kernels in file_kernels.values() for kernel in kernels}) == 1:
        op = file_ops.pop()
    for name_text in names:
        if name_text in file_kernels:
            matching_kernels = [kernel for kernel in file_kernels[name_text] if op in (None, kernel.op)]
            if not matching_kernels:
                raise ValueError(f"kernel: {name_text} registers none for {op}")
            selected_kernels |= {kernel.id: kernel for kernel in matching_kernels}
        elif op is None:
            raise ValueError(f"kernel: expected an op with the name {name_text!r}, got none")
        else:
            kernel = registry.get_kernel(op, name_text)
            selected_kernels[kernel.id] = kernel
    return list(selected_kernels.values())


def source_of(kernel: Kernel) -> Path:
    """Returns the file that registers a kernel (`kernel.file`), or, if it is None, the file of the kernel's code."""
    code = inspect.unwrap(kernel.fn)
    code = code if inspect.isroutine(code) else type(code)  # an object that is called has the file of its class
    return kernel.file or Path(inspect.getfile(code)).resolve()


def file_of(kernel: Kernel) -> Path | None:
    """Returns the source file of a kernel from outside this package, or None for a kernel of this package."""
    path, package_folder = source_of(kernel), Path(registry.__file__).resolve().parent
    return None if path.is_relative_to(package_folder) else path


def pick_device(name: str | None) -> torch.device:
    """Returns the device `name` (by default cuda if available, else cpu).  Raises `ValueError` if it is missing."""
    if name not in (None, "cpu", "cuda"):
        raise ValueError(f"device: expected cpu or cuda, got {name!r}")
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("device: cuda was asked for, and torch finds no CUDA device")
    return torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))


def first_case(kernel: Kernel, spec: OpSpec, scheme: Scheme, suites: Sequence[str] = ("smoke", "edge")) -> Case | None:
    """Returns the first test case in `suites` that the kernel supports with `scheme`.  Returns None without one."""
    if scheme.name not in spec.schemes:
        return None
    for case in dict.fromkeys(case for suite in suites for case in spec.cases.get(suite, ())):
        meta_inputs = spec.make_inputs(case, scheme, torch.device("meta"), 0)
        if kernel.why_not_args(meta_inputs, spec) is None:
            return case
    return None


def default_scheme(device: torch.device, spec: OpSpec | None = None) -> str:
    """Returns the name of the default number format (scheme) for measurements: fp32 on a CPU, bf16 on a GPU.  If the op
    `spec` lacks it, returns the op's first scheme."""
    name = "fp32" if device.type == "cpu" else "bf16"
    return name if spec is None or name in spec.schemes else spec.schemes[0]
