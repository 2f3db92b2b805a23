"""Targets of kernels on one token; a chain of dependent loads decides the time."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from targets import chain as dependent
from targets.measures import KERNEL_S, answer, cases_of, measure, unmeasured, usable
from targets.target import AcceptanceTarget, target

from rooflab.bench.core.call import Rotation
from rooflab.bench.core.check import already_broken
from rooflab.bench.core.noise import Samples, why_invalid, with_reading
from rooflab.bench.core.record import Record
from rooflab.bench.core.record_files import RunWriter
from rooflab.bench.core.running import ContextBroken, Running
from rooflab.bench.core.settings import Settings
from rooflab.bench.core.timed import time_together
from rooflab.bench.suite.entries import Context, EntryOutcome
from rooflab.kernels import _cuda, registry
from rooflab.reference.spec import Case, get_scheme

FLOOR = "chain"
DEPTHS = {"rope_and_cache": 2, "rmsnorm": 1, "fused_add_rmsnorm": 1, "silu_and_mul": 1}
"""The number of dependent loads of the rungs: a rotation loads a position, then its angles; a norm loads the row and
the weight together.  A test reads the loads in the compiled code."""


def one_token(context: Context, op: str, case: str, depth: int, most: float) -> EntryOutcome:
    """Compares the best optimized kernel's time with one CTA of `depth` dependent loads and a store, interleaved.

    In a dry run, the naive kernel and a torch indexing replace both, because a CPU can time neither of them.
    """
    (wanted,) = cases_of(context, op, [case])
    needed = f"at most {most:.2f} times one CTA of {depth} dependent loads and a store"
    role = "naive" if context.dry_run else "optimized"
    kernels = [kernel for kernel in usable(context, op) if kernel.role == role]
    records, cut = measure(context, op, kernels, [wanted], "bf16")
    good = [record for record in records if record.status == "OK" and record.latency_median_ms]
    if not good:
        return unmeasured(records, cut, needed)
    floor, wrong = _floor(context, depth)
    if floor is None:
        return EntryOutcome("DONE", wrong, "UNMEASURED", needed)
    timed, faults = _beside(context, op, good, wanted, floor)
    RunWriter(context.out, good[0].run_id).write(*(_record(timed, record) for record in good if record.kernel in timed))
    if FLOOR not in timed or len(timed) == 1:
        return EntryOutcome("DONE", "; ".join(faults), "UNMEASURED", needed)
    best = min((name for name in timed if name != FLOOR), key=lambda name: timed[name].median_s)
    ratio = timed[best].median_s / timed[FLOOR].median_s
    figures = {
        "kernel": best,
        "time_us": timed[best].median_s * 1e6,
        "floor_us": timed[FLOOR].median_s * 1e6,
        "time over floor": ratio,
        "timer": timed[best].method,
        "l2_state": timed[best].l2_state,
    }
    return answer(context, ratio <= most, needed, figures)


def _floor(context: Context, depth: int) -> tuple[Callable[[], object] | None, str]:
    """Returns a launch of the chain of loads; or None and the reason."""
    device = torch.device(context.device)
    if context.dry_run:
        start = torch.arange(dependent.CHAIN_THREADS)
        return partial(_indexing, torch.arange(len(start)), start, depth), ""
    try:
        chain = dependent.chain(_cuda.load, device, depth)
        wrong = chain.wrong(1)
    except (ValueError, RuntimeError) as error:  # no CuPy, a source that does not compile, or a launch that fails
        return None, f"the floor: {error}"
    return (None, f"the floor: {wrong}") if wrong else (partial(chain.launch, 1), "")


def _indexing(following: torch.Tensor, at: torch.Tensor, depth: int) -> torch.Tensor:
    for _ in range(depth):
        at = following[at]
    return at


def _beside(
    context: Context, op: str, good: Sequence[Record], case: Case, floor: Callable[[], object]
) -> tuple[dict[str, Samples], list[str]]:
    """Samples of the chain and of the kernels whose records are `good`, and the faults of the kernels left out."""
    spec, device = registry.get_op(op), torch.device(context.device)
    copies = Rotation.copies(spec, case, get_scheme(str(good[0].scheme)), device, context.seed)
    kernels = {str(record.kernel): registry.get_kernel(op, str(record.kernel)) for record in good}
    ready: dict[str, Callable[[], object]] = {name: Rotation(kernel, spec, copies) for name, kernel in kernels.items()}
    Running.note([kernel.id for kernel in kernels.values()])
    settings = Settings(device=context.device, seed=context.seed, budget_s=KERNEL_S)
    timed, failures, _ = time_together(ready | {FLOOR: floor}, settings)
    if broken := already_broken(device):
        raise ContextBroken(broken)
    Running.note(())
    faults = [f"{name}: {failed.reason}" for name, failed in failures.items()]
    floor_l2 = timed[FLOOR].l2_state if FLOOR in timed else None
    for name, samples in list(timed.items()):
        reason = why_invalid(samples, None, None)
        # Calls that share a sample find L2 warm; a kernel that found L2 cold could not be compared with them.
        if not reason and floor_l2 not in (None, samples.l2_state):
            reason = f"timed with L2 {samples.l2_state}, the floor with L2 {floor_l2}"
        if reason:
            faults.append(f"{name}: {reason}")
            del timed[name]
    return timed, faults


def _record(timed: dict[str, Samples], record: Record) -> Record:
    """A kernel's record with the samples taken beside the chain's; the median of the chain is a metric."""
    made = with_reading(record, timed[str(record.kernel)], record.clocks)
    floor = {f"{FLOOR}_median_ms": timed[FLOOR].median_s * 1e3} if FLOOR in timed else {}
    latency_ms = made.latency_median_ms or math.nan
    return replace(
        made,
        metrics={**made.metrics, **floor},
        flops_per_s=(record.flops or 0.0) / latency_ms * 1e3,
        bytes_per_s=(record.traffic_bytes or record.least_bytes or 0.0) / latency_ms * 1e3,
        bound_fraction=record.bound_ms / latency_ms if record.bound_ms else None,
    )


def _one_token(op: str, value: float, case: str) -> AcceptanceTarget:
    return target(
        f"{op}.one_token",
        f"{op} of one token: at most 1.2x a one-CTA kernel of equal dependent-load depth under the same timer",
        one_token,
        cost_s=15.0,
        value=value,
        depth=DEPTHS[op],
        most=1.2,
        case=case,
    )


TARGETS = (
    _one_token(
        "rope_and_cache",
        75.1,
        "T=1,H=32,H_kv=8,D=128,rotary=128,max_position=131072,num_blocks=512,block_size=16,skipped=0,interleaved=false",
    ),
    _one_token("rmsnorm", 74.3, "T=1,H=4096,eps=1e-05"),
    _one_token("fused_add_rmsnorm", 74.2, "T=1,H=4096,eps=1e-05"),
    _one_token("silu_and_mul", 74.1, "T=1,I=4096"),
)
