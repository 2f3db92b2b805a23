"""What a command is about: kernels, cases, scheme and GPU by their texts, and the times that were measured there."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from pathlib import Path

import torch

from rooflab.bench.predict.cases import Target
from rooflab.bench.records.record import Record
from rooflab.kernels import registry
from rooflab.kernels.configs import make_config
from rooflab.kernels.registry import Kernel
from rooflab.reference.spec import Case, OpSpec, Scheme, get_scheme
from rooflab.roofline.device import Device, identify, resolve

DEFAULT_GPU, DEFAULT_SUITE = "h100", "llama3_8b"


def choose_kernels(op: str, names: Sequence[str]) -> list[tuple[Kernel, Path | None]]:
    """The kernels named, a `.py` file standing for what it registers, or all of the op; each with its file.

    Raises `ValueError` on a name that is none.
    """
    if not names:
        return [(kernel, None) for kernel in registry.kernels(op).values()]
    found: list[tuple[Kernel, Path | None]] = []
    for text in names:
        if text.endswith(".py"):
            own = [kernel for kernel in registry.load_file(Path(text)) if kernel.op == op]
            if not own:
                raise ValueError(f"kernel: {text} registers none for {op}")
            found += [(kernel, Path(text).resolve()) for kernel in own]
        else:
            found.append((registry.get_kernel(op, text), None))
    return found


def choose_cases(spec: OpSpec, texts: Sequence[str], scheme: Scheme) -> list[Case]:
    """The cases named, or the largest of the Llama-3.1-8B suite.  Raises `ValueError` on one that is none."""
    if texts:
        return [spec.check_case(Case.parse(text)) for text in texts]

    def size(case: Case) -> tuple[float, float]:
        cost = spec.cost(**spec.make_inputs(case, scheme, torch.device("meta"), 0))
        return cost.flops, cost.bytes

    return [max(spec.cases.get(DEFAULT_SUITE) or spec.get_cases("smoke"), key=size)]


def choose_scheme(spec: OpSpec, name: str | None) -> Scheme:
    """The scheme named, or bf16 where the op has it.  Raises `ValueError` on one that the op has not."""
    if name is None:
        return get_scheme("bf16" if "bf16" in spec.schemes else spec.schemes[0])
    if get_scheme(name).name not in spec.schemes:
        raise ValueError(f"scheme: {spec.name} has {', '.join(spec.schemes)}, got {name!r}")
    return get_scheme(name)


def choose_gpu(name: str | None, records: Sequence[Record] = ()) -> tuple[Device, str | None]:
    """The GPU named, that of the records, the one here, or an H100; and what a short name was taken for.

    Raises `ValueError` where records of several GPUs, or a GPU that is in no table, leave it open.
    """
    if name:
        return resolve(name)
    seen = {str(record.environment["gpu"]["name"]) for record in records if record.environment.get("gpu")}
    if not seen and torch.cuda.is_available():
        seen = {torch.cuda.get_device_name()}
    if not seen:
        return resolve(DEFAULT_GPU)
    known = {reported: identify(reported) for reported in seen}
    device = next(iter(known.values()))
    if len(known) > 1 or device is None:
        raise ValueError(f"gpu: expected one by name, for this could be {', '.join(sorted(seen))}")
    return device, None


def measured_in(
    records: Iterable[Record], targets: Sequence[Target], device: Device
) -> tuple[list[Target], dict[Target, float]]:
    """The targets, each in the config that was measured, and the newest measured times on `device`, in ms.

    Readings of an A/B are left out, for they may be of another revision or slowed on purpose, and so are those of a
    warm L2 or of a config that the kernel has no more.  Raises `ValueError` where no record has any.
    """
    wanted = {(target.op, target.kernel, target.case.id, target.scheme.name): target for target in targets}
    found: dict[Target, tuple[Target, float]] = {}
    for record in sorted(records, key=lambda entry: entry.timestamp):
        target = wanted.get((record.op or "", record.kernel or "", record.case_id or "", record.scheme or ""))
        gpu = record.environment.get("gpu")
        here = record.device == "cuda" and gpu and identify(str(gpu["name"])) == device
        timed = record.status == "OK" and record.basis == "measured" and record.l2_state == "cold"
        if target and here and timed and record.latency_median_ms and record.stands_alone:
            kernel = registry.get_kernel(target.op, target.kernel)
            if record.config is None or kernel.config_type is None:
                found[target] = target, record.latency_median_ms
            elif set(record.config) == {field.name for field in fields(kernel.config_type)}:
                found[target] = replace(target, config=make_config(kernel, record.config)), record.latency_median_ms
    if not found:
        cases = ", ".join(dict.fromkeys(target.case.id for target in targets))
        raise ValueError(f"records: expected a measured time on {device.name} at {cases}, got none")
    return [found[target][0] if target in found else target for target in targets], dict(found.values())


def measure_here(targets: Sequence[Target], budget_s: float, seed: int = 0) -> list[Record]:
    """Checks and times the targets on the CUDA device at hand, a case at a time, interleaved."""
    from rooflab.bench.measure.measure import measure_op

    found: list[Record] = []
    for op, case, scheme in dict.fromkeys((target.op, target.case, target.scheme) for target in targets):
        names = [target.kernel for target in targets if (target.op, target.case, target.scheme) == (op, case, scheme)]
        kernels = [registry.get_kernel(op, name) for name in names]
        found += measure_op(registry.get_op(op), kernels, [case], scheme, "cuda", budget_s=budget_s, seed=seed)
    return found
