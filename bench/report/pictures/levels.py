"""What kernels move at each level of memory on one case: compiled ones counted in the emulator, naive ones from torch's
calls.  A record each, from which `levels_figure.py` draws."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch

from rooflab.bench.emulate import calls as emulated_calls
from rooflab.bench.emulate.checks import can_be_emulated
from rooflab.bench.predict.cases import Target
from rooflab.bench.predict.targets import choose_cases, choose_kernels, choose_scheme
from rooflab.bench.records.environment import Environment, snapshot
from rooflab.bench.records.record import Record, new_run_id
from rooflab.bench.report.pictures.torch_calls import calls_of
from rooflab.kernels import registry
from rooflab.kernels.registry import Kernel
from rooflab.reference.spec import Case, Scheme

PREFIX = "moved_"
"""Of the metrics: `moved_hbm_read_bytes` and so on."""
META = torch.device("meta")


def move(op: str, kernels: Sequence[str], case: str, scheme: str | None = None, seed: int = 0) -> list[Record]:
    """A record of what each kernel moves on one case, in the order of `kernels`.

    Raises `ValueError` on a name that names nothing, a kernel that does not take the case or is wrong on it, and on one
    that neither is naive nor has compiled code.
    """
    spec = registry.get_op(op)
    dtypes = choose_scheme(spec, scheme)
    (wanted,) = choose_cases(spec, [case], dtypes)
    environment, run_id = snapshot(), f"bytes-{new_run_id()}"
    found = []
    for kernel, _ in choose_kernels(op, kernels):
        inputs = spec.make_inputs(wanted, dtypes, META, seed)
        refusal = kernel.why_not_args(inputs)
        if refusal:
            raise ValueError(f"kernel: {kernel.id}: {refusal}")
        fields = _emulated(kernel, wanted, dtypes, seed) if can_be_emulated(kernel) else _torch(kernel, inputs)
        fields |= {"least_bytes": spec.cost(**inputs).bytes, "seed": seed}
        found.append(_record(kernel, wanted, dtypes, run_id, environment, fields))
    return found


def _emulated(kernel: Kernel, case: Case, scheme: Scheme, seed: int) -> dict[str, Any]:
    answer = emulated_calls.call(Target(kernel.op, kernel.name, case, scheme), seed, races=False).answer
    if answer["status"] != "OK" or not answer["launches"]:
        raise ValueError(f"kernel: {kernel.id} at {case.id}: {answer['status']}: {answer['reason']}")
    metrics = levels([launch["bytes"] for launch in answer["launches"]])
    for name in ("shared_wavefronts", "shared_wavefronts_least"):
        metrics[f"{PREFIX}{name}"] = float(sum(launch[name] for launch in answer["launches"]))
    return {
        "reason": answer["reason"],
        "checked_by": "emulator" if answer["errors"] else "none",
        "errors": tuple(answer["errors"]),
        "metrics": {**metrics, "launches": float(len(answer["launches"]))},
        "traffic_basis": "counted",
    }


def levels(moved: Sequence[dict[str, int]]) -> dict[str, float]:
    """Bytes by level of launches, each as `ptx.results.Bytes` names them, added up.

    What passes between L2 and the SMs is asked for by lanes, by copies and by atomics, which read what they change;
    into shared memory go stores, `cp.async` and TMA, out of it loads, TMA and the operands of wgmma.
    """

    def total(*names: str) -> float:
        return float(sum(launch[name] for launch in moved for name in names))

    parts = {
        "hbm_read_bytes": total("hbm_read"),
        "hbm_write_bytes": total("hbm_write"),
        "l2_read_bytes": total("global_read", "copy_read", "atomic"),
        "l2_write_bytes": total("global_write", "copy_write", "atomic"),
        "l2_read_sector_bytes": total("global_read_sectors", "copy_read", "atomic"),
        "l2_write_sector_bytes": total("global_write_sectors", "copy_write", "atomic"),
        "shared_read_bytes": total("shared_read", "shared_matrix", "tma_store"),
        "shared_write_bytes": total("shared_write", "tma_load"),
    }
    return {f"{PREFIX}{name}": value for name, value in parts.items()}


def _torch(kernel: Kernel, inputs: Any) -> dict[str, Any]:
    if kernel.role != "naive" or kernel.backend != "torch":
        raise ValueError(
            f"kernel: expected a naive one, whose calls of torch are kernels each, or compiled code, got {kernel.id}"
        )
    calls = calls_of(lambda: kernel.fn(**{name: value for name, value in inputs.items() if name in kernel.accepted}))
    metrics = {
        "hbm_read_bytes": sum(call.hbm_read for call in calls),
        "hbm_write_bytes": sum(call.hbm_write for call in calls),
        "l2_read_bytes": sum(call.asked_read for call in calls),
        "l2_write_bytes": sum(call.asked_write for call in calls),
        "l2_modelled_bytes": sum(call.asked_read for call in calls if call.modelled),
    }
    return {
        "reason": "the operands of torch's calls, on meta tensors; nothing was computed",
        "metrics": {f"{PREFIX}{name}": float(value) for name, value in metrics.items()} | {"launches": len(calls)},
        "traffic_basis": "modelled",
    }


def _record(
    kernel: Kernel, case: Case, scheme: Scheme, run_id: str, environment: Environment, fields: dict[str, Any]
) -> Record:
    metrics = fields["metrics"]
    config = kernel.heuristic(case, scheme) if kernel.heuristic is not None else None
    return Record(
        kind="check",
        run_id=run_id,
        status="OK",
        environment=environment.to_dict(),
        commit=environment.commit,
        dirty=environment.dirty,
        op=kernel.op,
        kernel=kernel.name,
        role=kernel.role,
        backend=kernel.backend,
        case_id=case.id,
        case=dict(case),
        scheme=scheme.name,
        config=None if config is None else asdict(config),
        device="cpu",
        traffic_bytes=metrics[f"{PREFIX}hbm_read_bytes"] + metrics[f"{PREFIX}hbm_write_bytes"],
        **fields,
    )
