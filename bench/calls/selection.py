"""Which kernels, cases and schemes a command is about, from the command line's texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from rooflab.kernels import registry
from rooflab.kernels.registry import Kernel
from rooflab.reference.spec import Case, OpSpec, Scheme, get_scheme


@dataclass(frozen=True)
class Selection:
    """Which kernels, on which cases, in which schemes."""

    kernels: Mapping[str, tuple[Kernel, ...]]
    """By op."""
    suites: tuple[str, ...]
    cases: tuple[Case, ...]
    """In place of the suites, where there are any."""
    schemes: tuple[str, ...]
    """All of the op's, where this is empty."""
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
        """From the command line's texts.  Raises `ValueError` on one that names nothing."""
        if cases and not op:
            raise ValueError("case: expected an op with it, got a case for all ops")
        for scheme in schemes or ():
            get_scheme(scheme)
        chosen: dict[str, tuple[Kernel, ...]] = {}
        for kernel, _ in choose_kernels(op, kernels or ()):
            chosen[kernel.op] = (*chosen.get(kernel.op, ()), kernel)
        for suite in suites:
            if not cases and not any(suite in registry.get_op(name).cases for name in chosen):
                known = dict.fromkeys(suite for name in chosen for suite in registry.get_op(name).cases)
                raise ValueError(f"suite: expected one of {', '.join(known)}, got {suite!r}")
        parsed = tuple(registry.get_op(str(op)).check_case(Case.parse(text)) for text in cases or ())
        return cls(chosen, tuple(suites), parsed, tuple(schemes or ()), pick_device(device), seed)

    def cases_of(self, spec: OpSpec) -> list[Case]:
        """The cases of one op; a suite that the op does not have adds no case."""
        if self.cases:
            return list(self.cases)
        return list(dict.fromkeys(case for suite in self.suites for case in spec.cases.get(suite, ())))

    def schemes_of(self, spec: OpSpec, default: str | None = None) -> list[Scheme]:
        """The schemes of one op: those asked for that it has, or the default, or all.

        An op that is alone and does not have the default, such as one of fp8 operands, gets its own first scheme.
        """
        names = self.schemes or ((default,) if default else spec.schemes)
        if not self.schemes and len(self.kernels) == 1 and not {*names} & {*spec.schemes}:
            names = spec.schemes[:1]
        return [get_scheme(name) for name in names if name in spec.schemes]


def choose_kernels(op: str | None, names: Sequence[str]) -> list[tuple[Kernel, Path | None]]:
    """The kernels named, a `.py` file standing for what it registers; without names all of the op, or of every op.

    Each with its file, None for one of the tree.  Raises `ValueError` on a text that names nothing.
    """
    if not names:
        ops = [op] if op else list(registry.ops())
        return [(kernel, None) for name in ops for kernel in registry.kernels(name).values()]
    found: list[tuple[Kernel, Path | None]] = []
    for text in names:
        if text.endswith(".py"):
            own = [kernel for kernel in registry.load_file(Path(text)) if op in (None, kernel.op)]
            if not own:
                raise ValueError(f"kernel: {text} registers none for {op}")
            found += [(kernel, Path(text).resolve()) for kernel in own]
        elif op is None:
            raise ValueError(f"kernel: expected an op with the name {text!r}, got none")
        else:
            found.append((registry.get_kernel(op, text), None))
    return found


def pick_device(name: str | None) -> torch.device:
    """cuda where there is one, or what was asked for.  Raises `ValueError` where that is not there."""
    if name not in (None, "cpu", "cuda"):
        raise ValueError(f"device: expected cpu or cuda, got {name!r}")
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("device: cuda was asked for, and torch finds no CUDA device")
    return torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))


def first_case(kernel: Kernel, spec: OpSpec, scheme: Scheme, suites: Sequence[str] = ("smoke", "edge")) -> Case | None:
    """The first case of `suites` that a kernel takes in `scheme`, by its shapes, or None."""
    if scheme.name not in spec.schemes:
        return None
    for case in dict.fromkeys(case for suite in suites for case in spec.cases.get(suite, ())):
        inputs = spec.make_inputs(case, scheme, torch.device("meta"), 0)
        if kernel.why_not_args(inputs, spec) is None:
            return case
    return None


def first_taken(kernel: Kernel, default: str) -> tuple[Case, Scheme] | None:
    """The first case that a kernel takes, smoke and edge cases before models', and the scheme: `default` where that can
    be.  None where it takes no case."""
    spec = registry.get_op(kernel.op)
    for scheme in map(get_scheme, dict.fromkeys((default, *spec.schemes))):
        case = first_case(kernel, spec, scheme, ("smoke", "edge", *spec.cases))
        if case is not None:
            return case, scheme
    return None


def default_scheme(device: torch.device) -> str:
    """The dtype that a device is measured in unless another is asked for."""
    return "fp32" if device.type == "cpu" else "bf16"
