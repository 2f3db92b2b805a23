"""Makes the output of `rooflab static`: table rows and records of compiled kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from rooflab.bench.compile.cases import ARCHITECTURE, KernelCase, can_keep
from rooflab.bench.compile.static import CompileFailure, ProgressCallback, compile_kernels
from rooflab.bench.compile.store import Store
from rooflab.bench.compile.summary import COPY_FAMILIES, Summary, summarize
from rooflab.bench.core import Environment, Record, RunWriter, Status
from rooflab.roofline.device import Device

COLUMNS = (
    *("kernel", "scheme", "case", "launch", "regs", "spill", "smem", "threads", "cta/sm", "by", "waves"),
    *("tail", "tensor", *COPY_FAMILIES, "load", "options"),
)
"""The columns of the table.  `spill`: stack bytes per thread.  `smem`: bytes per CTA.  `by`: the resource that limits
CTAs per SM.  `tensor` to `ldmatrix`: instructions in the hot loop.  `load`: bytes per thread of the narrowest and of
the usual load in the hot loop.  `options`: the number of requested options without effect."""
TARGETS_PER_BATCH = 64
"""The number of compilations whose text is in memory at the same time.  Each text has half a megabyte."""


@dataclass(frozen=True)
class CompileResult:
    """The result of one compilation."""

    target: KernelCase
    launches: tuple[Summary, ...] = ()
    failure: CompileFailure | None = None

    @property
    def status(self) -> Status:
        """Returns `OK`, `COMPILE_ERROR`, or `UNSUPPORTED` if the kernel does not support the input case."""
        if self.failure is None:
            return "OK"
        return "UNSUPPORTED" if self.failure.refused else "COMPILE_ERROR"

    @property
    def config_values(self) -> dict[str, Any] | None:
        """Returns the fields of the config that the launcher chooses, or None if the kernel has no configs."""
        target, kernel = self.target, self.target.registered
        if kernel.tuning is None:
            return None
        return asdict(kernel.config_for(target.case, target.scheme, torch.device("meta")))

    def to_json(self) -> dict[str, Any]:
        """Returns the fields of this object as JSON values."""
        target, kernel = self.target, self.target.registered
        return {
            "op": target.op,
            "kernel": target.kernel,
            "backend": kernel.backend,
            "case": dict(target.case),
            "scheme": target.scheme.name,
            "kept": can_keep(kernel),
            "case_id": target.case.id,
            "config": self.config_values,
            "status": self.status,
            "reason": str(self.failure or ""),
            "launches": [launch.to_json() for launch in self.launches],
        }


def compile_targets(
    targets: Sequence[KernelCase], device: Device, store: Store | None, done: ProgressCallback = lambda text: None
) -> list[CompileResult]:
    """Compiles every target for `device`, and computes occupancy and waves.  Calls `done` after each compilation."""
    results = []
    for batch_start in range(0, len(targets), TARGETS_PER_BATCH):
        target_batch = targets[batch_start : batch_start + TARGETS_PER_BATCH]
        for target, result in zip(target_batch, compile_kernels(target_batch, store, done), strict=True):
            if isinstance(result, CompileFailure):
                results.append(CompileResult(target, failure=result))
            else:
                results.append(
                    CompileResult(target, tuple(summarize(info, target.scheme.name, device) for info in result))
                )
    return results


def rows(results: Sequence[CompileResult]) -> list[dict[str, Any]]:
    """Returns one table row per launched kernel, with the keys of `COLUMNS`."""
    return [_row(result, launch) for result in results for launch in result.launches]


def _row(result: CompileResult, launch: Summary) -> dict[str, Any]:
    kernel_case, loop_counts = result.target, launch.in_loop
    hot_loop = launch.loop or vars(launch)
    row = {
        "kernel": kernel_case.registered.id,
        "scheme": kernel_case.scheme.name,
        "case": kernel_case.case.id,
        "launch": launch.name + (f" x{launch.launches}" if launch.launches > 1 else ""),
        "regs": launch.registers,
        "spill": launch.stack_bytes,
        "smem": launch.shared_bytes,
        "threads": launch.threads,
        "cta/sm": launch.ctas_per_sm,
        "by": launch.occupancy_limiter,
        "waves": launch.waves,
        "tail": launch.tail_ctas,
        "tensor": f"{launch.tensor_path} {loop_counts.get(launch.tensor_path, '')}".strip(),
        "load": _range(hot_loop["load_bytes_worst"], hot_loop["load_bytes_usual"]),
        "options": len(launch.findings) or None,
    }
    return row | {family: loop_counts.get(family) or None for family in COPY_FAMILIES}


def _range(worst: int | None, usual: int | None) -> str:
    return "" if worst is None else str(usual) if worst == usual else f"{worst} ({usual})"


def summary_line(results: Sequence[CompileResult], store: Store | None) -> str:
    """Returns a summary of all results in one line."""
    kernels = {result.target.registered.id for result in results}
    num_failed = sum(result.status == "COMPILE_ERROR" for result in results)
    spilling_count = sum(any(launch.stack_bytes for launch in result.launches) for result in results)
    finding_count = sum(len(launch.findings) for result in results for launch in result.launches)
    cached_text = f", {store.hits} of them from before" if store and store.hits else ""
    return (
        f"kernels: {len(kernels)}; compilations for {ARCHITECTURE}: {len(results)}{cached_text}; failed: {num_failed}; "
        f"with spilled registers: {spilling_count}; options without effect: {finding_count}"
    )


def write_records(results: Sequence[CompileResult], folder: Path) -> Path:
    """Writes one record of kind `static` for each result to a new file in `folder`.  Returns the path of this file."""
    writer, environment = RunWriter(folder), Environment.now()
    writer.write(*(_record(result, writer.run_id, environment) for result in results))
    return writer.path


def _record(result: CompileResult, run_id: str, environment: Environment) -> Record:
    target = result.target
    result_status, reason = result.status, str(result.failure or "")
    return replace(
        environment.record("static", target.registered, target.case, target.scheme.name, run_id, result_status, reason),
        config=result.config_values,
        compiled=tuple(launch.to_json() for launch in result.launches),
    )
