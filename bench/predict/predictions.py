"""Predicts times of registered kernels, chooses kernels and cases, and reads measured times from records."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from rooflab.bench.compile.cases import KernelCase, has_code, largest_case
from rooflab.bench.compile.static import CompileFailure, compile_kernels
from rooflab.bench.compile.store import Store
from rooflab.bench.core import Record, choose_kernels
from rooflab.bench.predict.chip import chip_of
from rooflab.bench.predict.model import Prediction, predict
from rooflab.kernels import registry
from rooflab.kernels.registry import Kernel, get_op
from rooflab.reference.spec import Case, OpSpec, Scheme, get_scheme
from rooflab.roofline.device import Device, identify, resolve
from rooflab.roofline.model import Cost, Traffic


@dataclass(frozen=True)
class Predicted:
    """Holds the prediction for one target (kernel, case and dtypes), or the reason why there is no prediction."""

    target: KernelCase
    cost: Cost
    traffic: Traffic | None
    prediction: Prediction | None
    reason: str = ""


def predict_all(
    targets: Sequence[KernelCase], device: Device, counted: Mapping[KernelCase, Traffic] | None = None
) -> list[Predicted]:
    """Predicts the time of every target (kernel, case and dtypes) on `device`, in the given order.

    `counted` maps targets to measured traffic, which replaces the declared traffic.  Raises `ValueError` on a name that
    is not registered, and on a device that is not Hopper."""
    target_costs = [_price(target) for target in targets]
    runnable_targets = [target for target, (*_, reason) in zip(targets, target_costs, strict=True) if not reason]
    to_compile = [target for target in runnable_targets if has_code(target.registered)]
    code_by_target = dict(zip(to_compile, compile_kernels(to_compile, Store()), strict=True)) if to_compile else {}
    predictions = []
    for target, (cost, traffic, flops, reason) in zip(targets, target_costs, strict=True):
        traffic, prediction = (counted or {}).get(target, traffic), None
        compiled_code = code_by_target.get(target, [])
        if isinstance(compiled_code, CompileFailure):
            reason = f"COMPILE_ERROR: {compiled_code}"
        elif not reason:
            prediction = predict(cost, traffic, compiled_code, device, matrix_flops=flops)
        predictions.append(Predicted(target, cost, traffic, prediction, reason))
    return predictions


def predict_launcher(target: KernelCase, traffic: Traffic, flops: Mapping[str, float], device: Device) -> Predicted:
    """Predicts the time of an unregistered launcher, from its compiled code, counted bytes and matrix FLOPs.

    No op defines the least work of such a launcher.  So the counted bytes and FLOPs are also its least work."""
    cost = Cost(traffic.read_bytes, traffic.write_bytes, flops, launches=traffic.launches)
    (compiled_code,) = compile_kernels([target])
    if isinstance(compiled_code, CompileFailure):
        return Predicted(target, cost, traffic, None, f"COMPILE_ERROR: {compiled_code}")
    if dtypes := flops.keys() - device.ceilings().tensor_flops_per_s.keys():
        return Predicted(target, cost, traffic, None, f"UNSUPPORTED: no matrix rate is known for {', '.join(dtypes)}")
    return Predicted(target, cost, traffic, predict(cost, traffic, compiled_code, device))


def _price(target: KernelCase) -> tuple[Cost, Traffic | None, float | None, str]:
    """Returns the op's cost, the kernel's traffic, its matrix FLOPs with padding, and why it cannot run on Hopper.

    Traffic and FLOPs are None if unknown. The reason is "" if the kernel can run."""
    spec, kernel, number_scheme = get_op(target.op), target.registered, target.scheme
    if target.config is not None:
        kernel = kernel.with_config(target.config)
    inputs = spec.make_inputs(target.case, number_scheme, torch.device("meta"), 0)
    cost, refusal_reason, reason = spec.cost_of(inputs), kernel.why_not_args(inputs), ""
    if number_scheme.name not in spec.schemes:
        reason = f"UNSUPPORTED: {target.op} has no scheme {number_scheme.name}"
    elif "cuda" not in kernel.devices:
        reason = f"UNSUPPORTED: {kernel.id} runs on {' and '.join(kernel.devices)}"
    if refusal_reason is not None:
        return cost, None, None, reason or str(refusal_reason)
    traffic, tuning = kernel.traffic_of(inputs, "cuda"), kernel.tuning
    if tuning is None or tuning.footprint is None:
        return cost, traffic, None, reason
    config = target.config if target.config is not None else tuning.heuristic(target.case, number_scheme)
    cta_resources = tuning.footprint(config, target.case, number_scheme)
    padded_flops = cta_resources.tensor_flops * cta_resources.ctas
    return cost, traffic, max(padded_flops, sum(cost.tensor_flops.values())) if padded_flops else None, reason


DEFAULT_GPU, DEFAULT_SUITE = "h100", "llama3_8b"


def choose_cases(spec: OpSpec, texts: Sequence[str], scheme: Scheme) -> list[Case]:
    """Returns the cases in `texts`, or else the largest Llama-3.1-8B case.  Raises `ValueError` on an unknown case."""
    if texts:
        return [spec.check_case(Case.parse(case_text)) for case_text in texts]
    return [largest_case(spec, spec.get_cases(DEFAULT_SUITE), scheme)]


def choose_scheme(spec: OpSpec, name: str | None) -> Scheme:
    """Returns the scheme (dtypes) `name`, by default bf16 if the op has it.  Raises `ValueError` on other names."""
    if name is None:
        return get_scheme("bf16" if "bf16" in spec.schemes else spec.schemes[0])
    if get_scheme(name).name not in spec.schemes:
        raise ValueError(f"scheme: {spec.name} has {', '.join(spec.schemes)}, got {name!r}")
    return get_scheme(name)


def choose_targets(
    op: str | None,
    names: Sequence[str],
    cases: Sequence[str],
    schemes: Sequence[str],
    config: str | None = None,
    with_code: bool = False,
    default: Callable[[Kernel, OpSpec, Scheme], Case] | None = None,
) -> list[KernelCase]:
    """Returns every combination of a kernel of one op, a scheme (dtypes) and a case (input shape).  Without `cases`,
    the only case is that of `default`, or else the largest Llama-3.1-8B case.

    Tunable kernels use `config` (`block_m=64,...`) if it is given.  `with_code` leaves out kernels without compiled
    code.  Raises `ValueError` on an unknown name, on kernels of several ops, and if no kernel is left."""
    kernels = choose_kernels(op, names)
    ops = {kernel.op for kernel in kernels}
    if op is None and (len(ops) != 1 or not names):
        raise ValueError("op: expected an op, or a file that registers kernels of one with --kernel")
    if with_code and not (kernels := [kernel for kernel in kernels if kernel.has_code]):
        raise ValueError(f"kernel: expected one with compiled code (triton, gluon, cuda), got {', '.join(names) or op}")
    spec, targets = get_op(op or ops.pop()), []
    for kernel in kernels:
        kernel_config = kernel.tunable.make_config(Case.parse(config)) if config else None
        for scheme in [choose_scheme(spec, name) for name in schemes or (None,)]:
            if default is not None and not cases:
                kernel_cases = [default(kernel, spec, scheme)]
            else:
                kernel_cases = choose_cases(spec, cases, scheme)
            targets += [
                KernelCase(spec.name, kernel.name, case, scheme, kernel.file, kernel_config) for case in kernel_cases
            ]
    return targets


def choose_gpu(name: str | None, records: Sequence[Record] = ()) -> tuple[Device, str | None]:
    """Returns the GPU to predict for, and a note if `name` is ambiguous.

    Without `name`, it is the GPU of the records, or this machine's GPU, or an H100.  Raises `ValueError` if the records
    have several GPUs, if the GPU is unknown, or if `name` is not a Hopper GPU."""
    if name:
        resolved_gpu = resolve(name)
        chip_of(resolved_gpu[0])
        return resolved_gpu
    gpu_names = {str(record.environment["gpu"]["name"]) for record in records if record.environment.get("gpu")}
    if not gpu_names and torch.cuda.is_available():
        gpu_names = {torch.cuda.get_device_name()}
    if not gpu_names:
        return resolve(DEFAULT_GPU)
    device_by_name = {reported_name: identify(reported_name) for reported_name in gpu_names}
    device = next(iter(device_by_name.values()))
    if len(device_by_name) > 1 or device is None:
        raise ValueError(f"gpu: expected one by name, for this could be {', '.join(sorted(gpu_names))}")
    return device, None


def timed_on(record: Record) -> Device | None:
    """Returns the GPU on which a record's kernel was timed with a cold L2.  Returns None without such a time."""
    gpu = record.environment.get("gpu")
    has_valid_time = record.status == "OK" and record.basis == "measured" and record.l2_state == "cold"
    return identify(str(gpu["name"])) if has_valid_time and gpu and record.device == "cuda" else None


def in_config(target: KernelCase, record: Record) -> KernelCase | None:
    """Returns `target` (a kernel and its input shape) with the tuning config of `record`, a stored measurement.
    Returns None if the kernel no longer has this config.  `target` stays the same if there is no config."""
    kernel = registry.get_kernel(target.op, target.kernel)
    if record.config is None or kernel.tuning is None:
        return target
    try:
        return target._replace(config=kernel.tunable.make_config(record.config))
    except ValueError:
        return None


def measured_in(
    records: Iterable[Record], targets: Sequence[KernelCase], device: Device
) -> tuple[list[KernelCase], dict[KernelCase, float]]:
    """Returns all targets (kernel, case and dtypes), and the newest measured time of each on `device` in ms.

    A measured target gets the measured tuning config. Ignores times with a warm L2 or a config that no longer exists,
    and times of A/B comparisons, which may slow a kernel on purpose. Raises `ValueError` if no target has a time."""
    target_by_name = {(target.op, target.kernel, target.case.id, target.scheme.name): target for target in targets}
    by_target: dict[KernelCase, tuple[KernelCase, float]] = {}
    for record in sorted(records, key=lambda entry: entry.timestamp):
        target = target_by_name.get((record.op or "", record.kernel or "", record.case_id or "", record.scheme or ""))
        if not (target and record.stands_alone and record.latency_median_ms and timed_on(record) == device):
            continue
        if tuned_target := in_config(target, record):
            by_target[target] = tuned_target, record.latency_median_ms
    if not by_target:
        cases = ", ".join(dict.fromkeys(target.case.id for target in targets))
        raise ValueError(f"records: expected a measured time on {device.name} at {cases}, got none")
    return [by_target[target][0] if target in by_target else target for target in targets], dict(by_target.values())
