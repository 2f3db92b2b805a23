"""Predicts the time of a kernel as a sum of steps, which lead from the least possible time to the expected time.

Every step replaces one ideal assumption by a real one, and adds the time that this costs:

1. least work: the op's cost at the hardware's peak rates. Memory and pipes overlap perfectly (the roofline).
2. launch: each launch takes at least the shortest time of an empty launch, and overlaps with nothing.
3. sustained rate: memory reaches only a share of the data sheet's bandwidth. Matrix products run at the lower clock
   that the GPU sustains under full tensor load.
4. bytes over the minimum: the kernel's own traffic replaces the least bytes.
5. pipe: the compiled instructions and the copies from L2 run at each pipe's rate, spread evenly over the SMs.
6. waves and tail: the SM with the most CTAs, or the CTA with the most tiles, sets the time. A few CTAs reach only their
   SMs' share of the bandwidth.
7. occupancy and latency: by Little's law the bandwidth is at most the bytes in flight divided by the latency. A CTA
   takes at least the time of its dependent steps. The first bytes arrive one latency after the launch.

The predicted time is the launch time, plus the first latency, plus the largest of memory, pipes and dependent steps.
Without compiled code, a kernel with several launches does memory and arithmetic one after the other.

A kernel's compiled kernels share its bytes, and those that multiply share its matrix FLOPs, in proportion to threads.

A pair of compiled kernels may together write more bytes than the op's result has. The model counts the extra bytes as
intermediate results. The first kernel writes them, and the second reads them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from rooflab.bench.compile.sass import parse_code
from rooflab.bench.compile.static import CompiledInfo
from rooflab.bench.predict.chip import HBM_SUSTAINED_SHARE, MMA_SYNC_SHARE, Chip, chip_of
from rooflab.bench.predict.work import LaunchWork, Share, work_of
from rooflab.roofline.device import Device
from rooflab.roofline.model import Bound, Ceilings, Cost, Traffic, bound
from rooflab.roofline.numbers import counted

LEAST_WORK, LAUNCH, SUSTAINED, BYTES = "least work", "launch", "sustained rate", "bytes over the minimum"
PIPE, WAVES, LATENCY = "pipe", "waves and tail", "occupancy and latency"

_ROUNDING_ERROR = 1e-12
"""A step that adds less than this share of the time is a rounding error and counts as 0."""


@dataclass(frozen=True)
class TimeStep:
    """Describes one part of a predicted time: its name, its seconds and its cause."""

    name: str
    seconds: float
    """The seconds that the step adds."""
    why: str

    @property
    def ms(self) -> float:
        return self.seconds * 1e3


@dataclass(frozen=True)
class Prediction:
    """Holds a kernel's predicted time and its parts."""

    bound: Bound
    steps: tuple[TimeStep, ...]
    launches: int
    works: tuple[LaunchWork, ...] = field(repr=False)
    """The work of each compiled kernel.  Empty if no compiled code was read."""

    @property
    def seconds(self) -> float:
        """Returns the predicted time, which is the sum of its parts."""
        return math.fsum(time_step.seconds for time_step in self.steps)


def predict(
    cost: Cost,
    traffic: Traffic | None,
    compiled: Sequence[CompiledInfo],
    device: Device,
    matrix_flops: float | None = None,
) -> Prediction:
    """Predicts the time of a kernel with a cold L2.  The kernel launches `compiled` and moves the bytes in `traffic`.

    `compiled` is empty for kernels of a library.  `matrix_flops` counts matrix FLOPs with padding; the default is the
    FLOPs of `cost`.  Raises `ValueError` on a device that is not Hopper, and on code for another device.
    """
    ceilings, chip = device.ceilings(), chip_of(device)
    compiled = [info for info in compiled if not info.tried]
    roofline_bound = bound(cost, ceilings)
    ideal_s, arithmetic_s = _arithmetic(roofline_bound, cost, ceilings, chip)
    moved_bytes = traffic.bytes if traffic else cost.bytes
    launches = sum(info.launches for info in compiled) or (traffic.launches if traffic else cost.launches)
    rate = ceilings.hbm_bytes_per_s * HBM_SUSTAINED_SHARE
    least_s, min_traffic_s, memory_s = cost.bytes / ceilings.hbm_bytes_per_s, cost.bytes / rate, moved_bytes / rate
    model_stages = [
        (LEAST_WORK, max(least_s, ideal_s), f"{'memory' if least_s >= ideal_s else 'arithmetic'} at the ceilings"),
        (LAUNCH, launches * ceilings.launch_floor_s, f"{launches} of {ceilings.launch_floor_s * 1e6:.2g} us"),
        (SUSTAINED, max(min_traffic_s, arithmetic_s), _sustained_why(min_traffic_s >= arithmetic_s, chip)),
        (BYTES, max(memory_s, arithmetic_s), _bytes_why(cost, traffic)),
    ]
    works: tuple[LaunchWork, ...] = ()
    if compiled:
        work_shares = _shares(compiled, cost, traffic, matrix_flops)
        works = tuple(work_of(info, device, chip, share) for info, share in zip(compiled, work_shares, strict=True))
        model_stages += _compiled_stages(works, work_shares, memory_s, moved_bytes, rate, arithmetic_s, chip)
    else:
        work_s = memory_s + arithmetic_s if launches > 1 else max(memory_s, arithmetic_s)
        latency_s = launches * chip.hbm_latency_s
        model_stages += [
            (PIPE, work_s, "memory and arithmetic in turn" if launches > 1 else "no compiled code was read"),
            (WAVES, work_s, "no compiled code was read"),
            (LATENCY, work_s + latency_s, f"first bytes after {chip.hbm_latency_s * 1e9:.0f} ns in each launch"),
        ]
    return Prediction(roofline_bound, tuple(_differences(model_stages)), launches, works)


def _arithmetic(limit: Bound, cost: Cost, ceilings: Ceilings, chip: Chip) -> tuple[float, float]:
    """Returns the seconds of the arithmetic twice: at the peak rates, and at the sustained rate of matrix products."""
    tensor_s = sum(
        flops / ceilings.matrix_rate(dtype) / (chip.tensor_share if dtype in chip.tensor_flops_per_clock else 1.0)
        for dtype, flops in cost.tensor_flops.items()
    )
    others_s = [seconds for resource, seconds in limit.parts.items() if resource not in ("memory", "launch", "tensor")]
    return max(limit.parts["tensor"], *others_s), max(tensor_s, *others_s)


def _sustained_why(by_memory: bool, chip: Chip) -> str:
    if by_memory or chip.tensor_share == 1:
        return f"{HBM_SUSTAINED_SHARE:.0%} of the bandwidth"
    return f"the matrix rate at {chip.tensor_share * chip.clock_hz / 1e9:.2f} GHz"


def _differences(stages: Sequence[tuple[str, float, str]]) -> Iterator[TimeStep]:
    """Yields the parts of a predicted time, each with the seconds that it adds. `stages` has the total seconds after
    each part, so the previous total is subtracted. Only the part `launch` comes with its own seconds."""
    previous_s = 0.0
    for name, seconds, reason in stages:
        if name == LAUNCH:
            yield TimeStep(name, seconds, reason)
            continue
        delta_s = seconds - previous_s
        yield TimeStep(name, delta_s if abs(delta_s) > _ROUNDING_ERROR * seconds else 0.0, reason)
        previous_s = seconds


def _bytes_why(cost: Cost, traffic: Traffic | None) -> str:
    if traffic is None:
        return "the kernel says nothing of its traffic; the least bytes are taken"
    return f"{traffic.bytes / cost.bytes:.2f} times the least bytes, {traffic.basis}" if cost.bytes else traffic.basis


def _shares(
    compiled: Sequence[CompiledInfo], cost: Cost, traffic: Traffic | None, matrix_flops: float | None
) -> list[Share]:
    """Divides the FLOPs and bytes of an op among its compiled kernels. Returns one `Share` for each compiled kernel."""
    flops = sum(cost.tensor_flops.values()) if matrix_flops is None else matrix_flops
    in_bytes, out_bytes = (traffic.read_bytes, traffic.write_bytes) if traffic else (cost.read_bytes, cost.write_bytes)
    threads = [float(info.launches * info.threads * (info.ctas or math.prod(info.grid))) for info in compiled]
    has_mma = [any(instruction.mma_flops for instruction in parse_code(info.sass)) for info in compiled]
    product_threads = [size * (mma or not any(has_mma)) for size, mma in zip(threads, has_mma, strict=True)]
    product_flops = [flops * size / sum(product_threads) for size in product_threads]
    scratch_bytes = out_bytes - cost.write_bytes
    if len(compiled) == 2 and scratch_bytes > 0:
        io_bytes = [(in_bytes - scratch_bytes, scratch_bytes), (scratch_bytes, cost.write_bytes)]
    else:
        io_bytes = [(in_bytes * size / sum(threads), out_bytes * size / sum(threads)) for size in threads]
    return [
        Share(mm_flops, *read_write_bytes, cuts_tiles=scratch_bytes > 0)
        for mm_flops, read_write_bytes in zip(product_flops, io_bytes, strict=True)
    ]


def _compiled_stages(
    works: Sequence[LaunchWork],
    shares: Sequence[Share],
    memory: float,
    moved: float,
    rate: float,
    arithmetic: float,
    chip: Chip,
) -> list[tuple[str, float, str]]:
    mean_sm_s = busiest_sm_s = total_s = 0.0
    flops = sum(work_share.matrix_flops for work_share in shares)
    for work, work_share in zip(works, shares, strict=True):
        kernel_bytes = work_share.read_bytes + work_share.write_bytes
        byte_share = kernel_bytes / moved if moved else 1.0
        memory_s = memory * byte_share
        copy_time_s = _copies_s(work, chip)
        least_s = arithmetic * (work_share.matrix_flops / flops if flops else byte_share)
        pipes_s = max(_pipe_s(work, chip, balanced=True), least_s, copy_time_s)
        mean_sm_s += max(memory_s, pipes_s)
        memory_s = max(memory_s, _memory_s(work, kernel_bytes, rate, chip, in_flight=False))
        pipes_s = max(pipes_s, _pipe_s(work, chip, balanced=False))
        busiest_sm_s += max(memory_s, pipes_s)
        memory_s = max(memory_s, _memory_s(work, kernel_bytes, rate, chip, in_flight=True))
        latency_s = work.launches * chip.hbm_latency_s
        total_s += latency_s + max(memory_s, pipes_s, _dependent_s(work, chip) - latency_s)
    largest_work = max(works, key=lambda work: max(work.pipe_cycles.values()) * work.ctas * work.launches)
    return [
        (PIPE, mean_sm_s, _pipe_why(largest_work, chip)),
        (WAVES, busiest_sm_s, _waves_why(largest_work)),
        (LATENCY, total_s, _latency_why(largest_work, moved, rate, chip)),
    ]


def _dependent_s(work: LaunchWork, chip: Chip) -> float:
    """Returns the seconds of the steps that must run one after another. This is the product of three numbers: launches,
    waves per launch, and seconds of one CTA."""
    return work.launches * math.ceil(work.waves.waves) * work.cta_cycles / chip.clock_hz


def _pipe_s(work: LaunchWork, chip: Chip, balanced: bool) -> float:
    """Returns the seconds that the busiest pipe works. With `balanced`, takes the average SM, else the busiest SM."""
    ctas_per_sm = work.ctas / chip.sms if balanced else work.waves.busiest_sm_ctas * work.uneven
    return work.launches * max(work.pipe_cycles.values()) * ctas_per_sm / chip.clock_hz


def _copies_s(work: LaunchWork, chip: Chip) -> float:
    """Returns the seconds of all asynchronous copies to shared memory, at the L2 bandwidth."""
    return work.launches * work.ctas * work.async_bytes / (chip.l2_bytes_per_clock * chip.clock_hz)


def _memory_s(work: LaunchWork, moved: float, rate: float, chip: Chip, in_flight: bool) -> float:
    """Returns the seconds to move `moved` bytes. A wave of few CTAs does not reach the bandwidth `rate` (bytes/s)."""
    bytes_per_cta = moved / (work.launches * work.ctas)
    resident_ctas = work.occupancy.ctas_per_sm * chip.sms
    cta_waves = ((resident_ctas, work.waves.full), (work.waves.tail_ctas, int(work.waves.tail_ctas > 0)))
    seconds = 0.0
    for ctas, num_waves in cta_waves:
        if num_waves:
            reached_rate = min(rate, min(ctas, chip.sms) * chip.sm_bytes_per_clock * chip.clock_hz)
            if in_flight and work.in_flight_bytes:
                reached_rate = min(reached_rate, ctas * work.in_flight_bytes / chip.hbm_latency_s)
            seconds += num_waves * ctas * bytes_per_cta / reached_rate
    return work.launches * seconds


def _pipe_why(work: LaunchWork, chip: Chip) -> str:
    loop_text = f", {work.turns:.0f} turns of its loops" if work.turns else ""
    loop_text += f" in {work.roles} roles" if work.roles > 1 else ""
    if _copies_s(work, chip) > _pipe_s(work, chip, balanced=True):
        return f"copies from L2 to shared memory, {work.async_bytes / 1e6:.3g} MB a CTA{loop_text}"
    pipe = max(work.pipe_cycles, key=lambda name: work.pipe_cycles[name])
    rate_note = f", by mma.sync at {MMA_SYNC_SHARE:.0%} of its rate" if pipe == "tensor" and work.uses_mma_sync else ""
    return f"the busiest pipe is {pipe}{rate_note}{loop_text}"


def _waves_why(work: LaunchWork) -> str:
    cta_waves = work.waves
    if work.rounds > 1:
        return f"{counted(work.ctas, 'CTA')} of {work.rounds:.2f} tiles; the busiest does {work.most_rounds:.4g}"
    return (
        f"{counted(work.ctas, 'CTA')}, {cta_waves.waves:.2f} waves; the busiest SM runs {cta_waves.busiest_sm_ctas}, "
        f"the mean {cta_waves.balance:.0%} of that"
    )


def _latency_why(work: LaunchWork, moved: float, rate: float, chip: Chip) -> str:
    ctas_per_sm = work.occupancy.ctas_per_sm
    fit = f"{counted(ctas_per_sm, 'CTA')} per SM ({work.occupancy.limiter})"
    pipes_s = _pipe_s(work, chip, balanced=False)
    memory_s = _memory_s(work, moved, rate, chip, in_flight=True)
    steps = _dependent_s(work, chip)
    hbm_text = f"first bytes after {chip.hbm_latency_s * 1e9:.0f} ns"
    if steps > max(pipes_s, memory_s) + work.launches * chip.hbm_latency_s:
        num_waves = math.ceil(work.waves.waves)
        cta_us = work.cta_cycles / chip.clock_hz * 1e6
        return f"a CTA's dependent steps take {cta_us:.3g} us, {num_waves} CTA{'s' * (num_waves > 1)} in turn, {fit}"
    ctas = min(work.ctas, ctas_per_sm * chip.sms)
    limit = ctas * work.in_flight_bytes / chip.hbm_latency_s
    if limit < rate and memory_s > pipes_s:
        flying = f"{work.in_flight_bytes / 1024:.1f} KiB in flight"
        return f"{fit}, {ctas} at once with {flying} each draw {limit / 1e12:.2g} of {rate / 1e12:.3g} TB/s; {hbm_text}"
    return hbm_text
