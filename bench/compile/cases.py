"""What `rooflab static` compiles, and for what: for each dtype the most work of a suite, and the targets."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rooflab.kernels import registry
from rooflab.kernels.registry import Kernel
from rooflab.reference.spec import Case, OpSpec, Scheme, get_scheme
from rooflab.roofline.device import Device, get_device
from rooflab.roofline.occupancy import MAX_THREADS_PER_CTA, SHARED_RESERVED, WARP, limits_of

COMPILED = ("triton", "gluon", "cuda")
"""Backends whose kernels have code of ours to look at."""
SUITES = ("llama3_8b",)


@dataclass(frozen=True)
class Selected:
    """One thing to compile."""

    kernel: Kernel
    case: Case
    scheme: Scheme
    file: Path | None = None
    """The file that registers the kernel, where it is not in the tree."""

    @property
    def key(self) -> tuple[str, str, str]:
        """What two revisions are compared by: op, kernel and scheme."""
        return self.kernel.op, self.kernel.name, self.scheme.name

    def to_json(self) -> dict[str, Any]:
        """As JSON values, for another process."""
        return {
            "op": self.kernel.op,
            "kernel": self.kernel.name,
            "backend": self.kernel.backend,
            "case": dict(self.case),
            "scheme": self.scheme.name,
            "module": module_of(self.kernel),
        }


@dataclass(frozen=True)
class Query:
    """What to compare: the arguments of `cases.select`, files left out."""

    op: str | None = None
    kernels: tuple[str, ...] = ()
    suites: tuple[str, ...] = ("llama3_8b",)
    cases: tuple[str, ...] = ()
    schemes: tuple[str, ...] = ()
    every_case: bool = False


def module_of(kernel: Kernel) -> str:
    """Name of the module that holds the kernel's launcher."""
    return str(inspect.unwrap(kernel.fn).__module__)


def select(
    op: str | None,
    kernels: Sequence[str],
    suites: Sequence[str],
    cases: Sequence[str],
    schemes: Sequence[str],
    *,
    every_case: bool = False,
) -> list[Selected]:
    """For each kernel and dtype, the case of `suites` with the most work that it takes; all of them with
    `every_case`, or the `cases` given.

    `kernels` are names, or files that register some; without them, all.  Raises `ValueError` on what names nothing.
    """
    chosen = _kernels(op, kernels)
    if cases and op is None:
        raise ValueError("case: expected an op with it, got a case for all ops")
    known = {suite for kernel, _ in chosen for suite in registry.get_op(kernel.op).cases}
    for suite in suites:
        if not cases and suite not in known:
            raise ValueError(f"suite: expected one of {', '.join(sorted(known))}, got {suite!r}")
    wanted = [get_scheme(name) for name in schemes]
    found = []
    for kernel, file in chosen:
        spec = registry.get_op(kernel.op)
        own = [spec.check_case(Case.parse(text)) for text in cases] or _cases_of(spec, suites)
        for scheme in wanted or [get_scheme(name) for name in spec.schemes]:
            if scheme.name in spec.schemes:
                taken = _taken(kernel, spec, own, scheme)
                keep = taken if every_case or cases else taken[-1:]
                found += [Selected(kernel, case, scheme, file) for case in keep]
    return found


def _cases_of(spec: OpSpec, suites: Sequence[str]) -> list[Case]:
    """The suites' cases; where an op has no such suite, as one from outside, its smoke cases."""
    found = [case for suite in suites for case in spec.cases.get(suite, ())]
    return list(dict.fromkeys(found or spec.cases["smoke"]))


def _taken(kernel: Kernel, spec: OpSpec, cases: Sequence[Case], scheme: Scheme) -> list[Case]:
    """Those that the kernel takes, the least work first."""
    found = []
    for case in cases:
        inputs = spec.make_inputs(case, scheme, torch.device("meta"), 0)
        if kernel.why_not_args(inputs) is None:
            cost = spec.cost(**inputs)
            found.append((cost.flops + cost.bytes, case))
    return [case for _, case in sorted(found, key=lambda entry: entry[0])]


def _kernels(op: str | None, wanted: Sequence[str]) -> list[tuple[Kernel, Path | None]]:
    """Kernels with compiled code, each with its file where it came from one."""
    chosen: list[tuple[Kernel, Path | None]] = []
    if not wanted:
        ops = [op] if op else list(registry.ops())
        chosen = [(kernel, None) for name in ops for kernel in registry.kernels(name).values()]
        return [(kernel, file) for kernel, file in chosen if kernel.backend in COMPILED and kernel.role != "peer"]
    for text in wanted:
        if text.endswith(".py"):
            file = Path(text).resolve()
            found = [k for k in registry.load_file(file) if op in (None, k.op) and k.backend in COMPILED]
            if not found:
                raise ValueError(f"kernel: {text} registers none with compiled code{f' for {op}' if op else ''}")
            chosen += [(kernel, file) for kernel in found]
        elif op is None:
            raise ValueError(f"kernel: expected an op with the name {text!r}, got none")
        else:
            kernel = registry.get_kernel(op, text)
            check_backend(kernel)
            chosen.append((kernel, None))
    return chosen


def check_backend(kernel: Kernel) -> None:
    """Raises `ValueError` unless the kernel has code of its own."""
    if kernel.backend not in COMPILED:
        wanted = " or ".join(COMPILED)
        raise ValueError(f"kernel: expected one in {wanted}, got {kernel.id}, whose backend is {kernel.backend}")


@dataclass(frozen=True)
class Target:
    """One architecture, as the compilers name it."""

    name: str
    """`sm_90a`; the `a` is the architecture's own instructions, wgmma for one, which no later GPU runs."""
    sm: int
    gpu: str
    """The GPU that stands for it: its SMs, registers and shared memory."""

    @property
    def device(self) -> Device:
        """The GPU's data."""
        return get_device(self.gpu)

    def properties(self) -> dict[str, int]:
        """What a launcher may ask Triton's driver for, of the GPU that stands for the target."""
        limits = limits_of(self.device)
        return {
            "multiprocessor_count": self.device.sms,
            "max_shared_mem": limits.shared_bytes - SHARED_RESERVED,
            "max_num_regs": limits.registers,
            "warpSize": WARP,
            "max_threads_per_block": MAX_THREADS_PER_CTA,
            "max_threads_per_sm": limits.warps * WARP,
        }


# From the GPUs of roofline/device.py, one an architecture. Triton takes the `a` by itself from sm_90 on.
TARGETS: Mapping[str, Target] = {
    target.name: target
    for target in (
        Target("sm_80", 80, "a100-80gb"),
        Target("sm_89", 89, "l40s"),
        Target("sm_90a", 90, "h100-sxm"),
        Target("sm_100a", 100, "b200"),
    )
}
"""Every target by name."""
DEFAULT = TARGETS["sm_90a"]


def get_target(name: str) -> Target:
    """The target called `name`.  Raises `ValueError` naming those there are."""
    if name not in TARGETS:
        raise ValueError(f"target: expected one of {', '.join(TARGETS)}, got {name!r}")
    return TARGETS[name]


def device_for(target: Target, gpu: str | None) -> Device:
    """The GPU called `gpu`, or the one that stands for the target.

    Raises `ValueError` on an unknown one, and on one of another compute capability, which does not run the code.
    """
    device = get_device(gpu) if gpu else target.device
    major, minor = device.compute_capability
    if 10 * major + minor != target.sm:
        raise ValueError(
            f"gpu: expected one that runs {target.name}, got {device.name}, which is sm_{10 * major + minor}"
        )
    return device
