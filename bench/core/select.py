"""Turns the command line's texts into the kernels, cases and schemes of a command."""

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
    """Cases that replace the suites; empty where the suites are used."""
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
        """The selection that the command line's texts name.  Raises `ValueError` on an unknown name."""
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
        """The schemes of one op: the requested ones that the op has, or the default, or all.

        A lone op without the default scheme, such as an op with fp8 operands, gets its own first scheme.
        """
        names = self.schemes or ((default,) if default else spec.schemes)
        if not self.schemes and len(self.kernels) == 1 and not {*names} & {*spec.schemes}:
            names = spec.schemes[:1]
        return [get_scheme(name) for name in names if name in spec.schemes]


def choose_kernels(op: str | None, names: Sequence[str]) -> list[tuple[Kernel, Path | None]]:
    """Named kernels; a `.py` file names the kernels that it registers.  Without names, all of `op` or of every op.

    Files of one op also tell the op.  Each kernel comes with its file, None for a kernel of the tree.  Raises
    `ValueError` on an unknown name.
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
    """The file that registers a kernel, or that of its code."""
    code = inspect.unwrap(kernel.fn)
    code = code if inspect.isroutine(code) else type(code)  # an object that is called has the file of its class
    return kernel.file or Path(inspect.getfile(code)).resolve()


def file_of(kernel: Kernel) -> Path | None:
    """`source_of` a kernel; None for a kernel of the tree."""
    path, tree = source_of(kernel), Path(registry.__file__).resolve().parent
    return None if path.is_relative_to(tree) else path


def pick_device(name: str | None) -> torch.device:
    """The device called `name`; without a name, cuda where there is one.  Raises `ValueError` on a missing device."""
    if name not in (None, "cpu", "cuda"):
        raise ValueError(f"device: expected cpu or cuda, got {name!r}")
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("device: cuda was asked for, and torch finds no CUDA device")
    return torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))


def first_case(kernel: Kernel, spec: OpSpec, scheme: Scheme, suites: Sequence[str] = ("smoke", "edge")) -> Case | None:
    """The first case of `suites` whose shapes a kernel takes in `scheme`; None where there is no such case."""
    if scheme.name not in spec.schemes:
        return None
    for case in dict.fromkeys(case for suite in suites for case in spec.cases.get(suite, ())):
        inputs = spec.make_inputs(case, scheme, torch.device("meta"), 0)
        if kernel.why_not_args(inputs, spec) is None:
            return case
    return None


def default_scheme(device: torch.device) -> str:
    """The default dtype of measurements on a device."""
    return "fp32" if device.type == "cpu" else "bf16"
