"""Device time for the fixture `kernel_benchmark`: samples, device activity, and the fraction of each roof."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from rooflab.bench.core.call import COPIES, free_bytes
from rooflab.bench.core.ceilings.ceilings import ceilings_for, limits_for
from rooflab.bench.core.environment import snapshot
from rooflab.bench.core.gate import Checked, copied, device_of, wrong
from rooflab.bench.core.noise import Samples, shared, why_invalid
from rooflab.bench.core.poison import bits
from rooflab.bench.core.record import pack_samples
from rooflab.bench.core.timed import watched
from rooflab.bench.core.timers import Observed
from rooflab.bench.core.timers.timing import observed, time_functions
from rooflab.kernels._waiting import others_since, processor_time
from rooflab.reference.spec import nbytes
from rooflab.roofline.model import Ceilings, Cost, bound


@dataclass(frozen=True)
class Timed:
    """The result of timing a function."""

    samples: Samples
    device: torch.device
    clocks: dict[str, Any] | None
    seen: Observed
    wrong: str | None
    """What is wrong with the results of the timed calls; None if they are right."""
    others: float | None = None
    """The share of all processors' time that other processes took meanwhile; None if the system does not tell."""
    probe_s: float | None = None
    """Median seconds of `probe` in the same rounds, which tells how fast a CPU was meanwhile; None on a GPU."""


def time_kernel(
    fn: Callable[..., Any],
    args: Sequence[Any],
    checked: Checked,
    *,
    budget_s: float,
    min_samples: int,
    first_call_s: float = 0.0,
) -> Timed:
    """Times `fn(*args)` with `timing.time_functions` on the device of its tensors, on several copies of `args`.

    Then it judges what the timed calls left, unless `fn` changes its inputs, and one more call.  `first_call_s` are the
    seconds of the first call, which the check made.  On a CPU each round times `probe` too.
    """
    tensors = [value for value in (*args, checked.result) if isinstance(value, torch.Tensor)]
    device = device_of(*args, checked.result)
    fit = int(free_bytes(device) / 4 / max(1, nbytes(*tensors)))
    copies = [copied(args) for _ in range(max(1, min(COPIES, fit)))]
    turns = itertools.cycle(range(len(copies)))
    last: list[Any] = [None] * len(copies)

    def call() -> None:
        turn = next(turns)
        last[turn] = fn(*copies[turn])

    functions = {"fn": call} | ({"probe": probe()} if device.type == "cpu" else {})
    gpu = snapshot(device.index or 0).gpu if device.type == "cuda" else None
    with watched(device, gpu.uuid if gpu else None) as watch:
        began, look = processor_time(), watch.read if watch else None
        timed = time_functions(
            functions, device, budget_s=budget_s, more_s=budget_s, min_samples=min_samples, observe=look
        )
        others, clocks = others_since(began), watch.summary() if watch else None
    seen = observed(call, device) if device.type == "cuda" else Observed()
    found = _wrong_afterwards(last, copies, args, checked.expected)
    if found is None and checked.expected is not None:
        found = _wrong_afterwards([fn(*copied(args))], [], args, checked.expected)
    samples = replace(timed["fn"], first_call_s=max(first_call_s, timed["fn"].first_call_s or 0.0))
    probed_s = timed["probe"].median_s if "probe" in timed else None
    return Timed(samples, device, clocks, seen, found, others, probed_s)


def probe() -> Callable[[], None]:
    """The same work on every machine and day: the softmax of 256 rows of 1,024 fp32 numbers.

    It reads and computes, on torch's threads, as most kernels do; on one core of a Xeon it takes 0.4 ms.  A CPU that
    shares its cores or its caches with what no counter here shows takes longer for it.
    """
    x = torch.randn(256, 1024, generator=torch.Generator().manual_seed(0))
    out = torch.empty_like(x)
    softmax = torch.softmax

    def work() -> None:
        softmax(x, -1, out=out)

    return work


def _wrong_afterwards(
    results: Sequence[Any], copies: Sequence[Sequence[Any]], args: Sequence[Any], expected: Any
) -> str | None:
    """The fault of the last result on each copy of `args`; None if right, or if the function changed its inputs."""
    if expected is None or not all(_same(copy, args) for copy in copies):
        return None
    for result in results:
        if result is not None and (bad := wrong(result, expected)):
            return "; ".join(bad)
    return None


def _same(copy: Sequence[Any], args: Sequence[Any]) -> bool:
    return all(
        not isinstance(was, torch.Tensor) or was.is_meta or torch.equal(bits(value), bits(was))
        for value, was in zip(copy, args, strict=True)
    )


def extra_info(timed: Timed, cost: Cost | None) -> dict[str, Any]:
    """The JSON values stored next to pytest-benchmark's statistics; `record.unpack_samples` reads `samples`.

    They hold what an A/B needs from a reading: every sample in time order, the method, the machine, and the clocks.
    """
    samples, device = timed.samples, timed.device
    environment = snapshot(device.index or 0)
    info: dict[str, Any] = {
        "device": environment.gpu.name if device.type == "cuda" and environment.gpu else environment.cpu,
        "device_type": device.type,
        "machine_key": environment.machine_key,
        "timer": samples.method,
        "l2_state": samples.l2_state,
        "calls_per_sample": samples.calls_per_sample,
        "samples": pack_samples(samples.seconds),
        "first_call_s": samples.first_call_s,
        "clocks": timed.clocks,
        "others": timed.others,
        "probe_s": timed.probe_s,
        "device_kernels": list(timed.seen.device_kernels),
        "activity_hash": timed.seen.activity_hash,
        **({"cost": asdict(cost)} if cost else {}),
    }
    ceilings = ceilings_for(device) if cost is not None else None
    limits = limits_for(device, ceilings) if ceilings else None
    fault = why_invalid(samples, cost, limits, timed.clocks)
    noise = samples.noise or shared(timed.clocks)
    info["status"] = f"INVALID: {fault}" if fault else f"NOISY: {noise}" if noise else "OK"
    seconds = samples.median_s
    if cost is None or not seconds > 0 or noise:
        return info
    info |= {
        "flops": cost.flops,
        "bytes": cost.bytes,
        "flops_per_s": cost.flops / seconds,
        "bytes_per_s": cost.bytes / seconds,
    }
    if cost.bytes:
        info["intensity_flop_per_byte"] = cost.intensity
    return info | _roofs(cost, seconds, ceilings)


def _roofs(cost: Cost, seconds: float, ceilings: Ceilings | None) -> dict[str, Any]:
    """The fraction of each roof that a reading reaches."""
    if ceilings is None:
        return {"roof": "unknown: no data sheet of this device is in the table"}
    if any(dtype not in ceilings.tensor_flops_per_s for dtype in cost.tensor_flops):
        return {"roof": f"unknown: {ceilings.device} has no rate for {', '.join(cost.tensor_flops)}"}
    limit = bound(cost, ceilings)
    found = {"limiter": limit.limiter, "bound_s": limit.seconds, "ceilings": asdict(ceilings)}
    if ceilings.noise:
        return found | {"roof": f"NOISY: {ceilings.noise}"}
    parts = {part: part_s for part, part_s in limit.parts.items() if part_s}
    found[f"fraction_of_{ceilings.kind}_roof"] = limit.fraction(seconds)
    return found | {f"fraction_of_{ceilings.kind}_{part}_roof": part_s / seconds for part, part_s in parts.items()}
