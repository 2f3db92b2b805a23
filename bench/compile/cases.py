"""Chooses what `rooflab static` compiles for Hopper: by default each kernel with the largest input case of a suite."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch

from rooflab.bench.core import Selection
from rooflab.kernels import registry
from rooflab.kernels.registry import Kernel, get_kernel
from rooflab.reference.spec import Case, OpSpec, Scheme
from rooflab.roofline.device import Device, get_device
from rooflab.roofline.occupancy import (
    MAX_REGISTERS_PER_THREAD,
    MAX_THREADS_PER_CTA,
    SHARED_RESERVED,
    WARP_THREADS,
    limits_of,
    occupancy,
)

COMPILED_BACKENDS = ("triton", "gluon", "cuda")
"""The backends whose kernels have compiled code that Rooflab or the user wrote."""
STATIC_SUITES = ("llama3_8b",)


class KernelCase(NamedTuple):
    """One kernel with one input case, to compile, emulate or predict."""

    op: str
    kernel: str
    case: Case
    scheme: Scheme
    file: Path | None = None
    """The file that registers the kernel; None if the kernel is in the tree."""
    config: Any = None
    """The config of a tunable kernel (a `config_type`); None lets the launcher choose."""

    @property
    def label(self) -> str:
        """Returns a name for printed output, such as `gemm/tensor_core M=...,N=... bf16`."""
        return f"{self.op}/{self.kernel} {self.case.id} {self.scheme.name}"

    @property
    def is_launcher(self) -> bool:
        """Whether this is a user's function that launches kernels.  Then `op` is the function's file."""
        return self.op.endswith(".py")

    @property
    def registered(self) -> Kernel:
        """Returns the `Kernel` of this case from the registry.  A launcher (a user's function that launches kernels) is
        not registered.  It gets a `Kernel` that only describes it.  This `Kernel` raises `RuntimeError` if called."""
        if self.is_launcher:
            return Kernel(self.op, self.kernel, "optimized", "triton", _not_here, file=self.file)
        return get_kernel(self.op, self.kernel)

    def to_json(self) -> dict[str, Any]:
        """Returns the fields as JSON values, so that another process can receive them."""
        file, config = str(self.file) if self.file else None, None if self.config is None else asdict(self.config)
        name_fields = {"op": self.op, "kernel": self.kernel, "case": dict(self.case), "scheme": self.scheme.name}
        return {**name_fields, "file": file, "config": config}


def _not_here() -> NoReturn:
    raise RuntimeError("a launcher's file is imported in the processes that compile and emulate it")


@dataclass(frozen=True)
class Query:
    """The user's choice of kernels and input cases for `rooflab static`."""

    op: str | None = None
    kernels: Sequence[str] = ()
    """Names of kernels, or files that register kernels; empty means all kernels."""
    suites: Sequence[str] = STATIC_SUITES
    cases: Sequence[str] = ()
    schemes: Sequence[str] = ()
    every_case: bool = False

    def select(self, only_ids: Collection[str] | None = None) -> list[KernelCase]:
        """Returns the selected kernels, each with its dtype schemes and with input cases that it supports.  The cases
        are `cases`, if given.  Otherwise they come from `suites`: the largest case, or with `every_case` all cases.

        Limits the kernels to `only_ids`, if given.  Raises `ValueError` on an unknown name."""
        selection = Selection.of(self.op, self.kernels, self.suites, self.cases, self.schemes, None)
        selected_cases = []
        for kernel in _compiled([kernel for kernels in selection.kernels.values() for kernel in kernels], self.kernels):
            spec = registry.get_op(kernel.op)
            for scheme in selection.schemes_of(spec) if only_ids is None or kernel.id in only_ids else ():
                supported_cases = _taken(kernel, spec, selection.cases_of(spec), scheme)
                kept_cases = supported_cases if self.every_case or self.cases else supported_cases[-1:]
                selected_cases += [KernelCase(kernel.op, kernel.name, case, scheme, kernel.file) for case in kept_cases]
        return selected_cases


def largest_case(spec: OpSpec, cases: Sequence[Case], scheme: Scheme, most_flops: float = float("inf")) -> Case:
    """Returns the case with the most FLOPs, or the most bytes among equals.  Ignores cases above `most_flops` FLOPs."""

    def work(case: Case) -> tuple[float, float]:
        op_cost = spec.cost_of(spec.make_inputs(case, scheme, torch.device("meta"), 0))
        return op_cost.flops, op_cost.bytes

    return max((case for case in cases if work(case)[0] <= most_flops), key=work)


def can_keep(kernel: Kernel) -> bool:
    """Whether a cache may keep a kernel's compiled code.  The code must depend only on Rooflab and package versions.

    CUDA C++ is not cached.  Its compiler may come from a toolkit outside the packages, which can change unnoticed."""
    return kernel.backend != "cuda" and inspect.unwrap(kernel.fn).__module__.startswith("rooflab.kernels.")


def _taken(kernel: Kernel, spec: OpSpec, cases: Sequence[Case], scheme: Scheme) -> list[Case]:
    """Returns the cases that the kernel supports, sorted by work (FLOPs plus bytes), the smallest first."""
    case_costs = []
    for case in cases:
        meta_inputs = spec.make_inputs(case, scheme, torch.device("meta"), 0)
        if kernel.why_not_args(meta_inputs) is None:
            case_cost = spec.cost_of(meta_inputs)
            case_costs.append((case_cost.flops + case_cost.bytes, case))
    return [case for _, case in sorted(case_costs, key=lambda entry: entry[0])]


def _compiled(kernels: Sequence[Kernel], names: Sequence[str]) -> list[Kernel]:
    """Returns the kernels with compiled code.  Raises `ValueError` if the user named (`names`) one without it."""
    for kernel in kernels if names else ():
        if kernel.file is None:
            check_backend(kernel)
    compiled = [kernel for kernel in kernels if has_code(kernel) or (names and kernel.backend in COMPILED_BACKENDS)]
    if names and not compiled:
        raise ValueError(f"kernel: {', '.join(names)} registers none with compiled code")
    return compiled


def has_code(kernel: Kernel) -> bool:
    """Whether a kernel has compiled code of Rooflab or of a user's file.  Code of installed packages does not count."""
    return kernel.has_code and (kernel.role != "peer" or kernel.file is not None)


def check_backend(kernel: Kernel) -> None:
    """Raises `ValueError` if the kernel's backend has no compiled code."""
    if kernel.backend not in COMPILED_BACKENDS:
        backends_text = " or ".join(COMPILED_BACKENDS)
        raise ValueError(f"kernel: expected one in {backends_text}, got {kernel.id}, whose backend is {kernel.backend}")


ARCHITECTURE, SM = "sm_90a", 90
"""The compilers' names of Hopper.  The `a` enables instructions such as wgmma, which only Hopper has."""


def device_for(gpu: str | None = None) -> Device:
    """Returns the GPU `gpu`, by default an H100.  Raises `ValueError` if the GPU is unknown or not a Hopper GPU."""
    device = get_device(gpu or "h100-sxm")
    major, minor = device.compute_capability
    if 10 * major + minor != SM:
        raise ValueError(f"gpu: expected one that runs {ARCHITECTURE}, got {device.name}, which is sm_{major}{minor}")
    return device


def properties() -> dict[str, int]:
    """Returns the H100 properties that Triton launchers read from the driver."""
    device = device_for()
    gpu_limits = limits_of(device)
    return {
        "multiprocessor_count": device.sms,
        "max_shared_mem": gpu_limits.shared_bytes - SHARED_RESERVED,
        "shared_mem_per_sm": gpu_limits.shared_bytes,
        "max_num_regs": gpu_limits.registers,
        "warpSize": WARP_THREADS,
        "max_threads_per_block": MAX_THREADS_PER_CTA,
        "max_threads_per_sm": gpu_limits.warps * WARP_THREADS,
    }


def resident_ctas(threads: int, registers: int | None, shared_bytes: int) -> int:
    """Counts the CTAs that an H100 runs at once, at least 1 per SM.  `registers` is per thread; None is the maximum."""
    device = device_for()
    cta_occupancy = occupancy(device, threads, registers or MAX_REGISTERS_PER_THREAD, shared_bytes)
    return device.sms * max(1, cta_occupancy.ctas_per_sm)
