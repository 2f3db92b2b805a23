"""What one launch does, from its compiled code and the work that the op hands it: turns of loops, pipes, waiting.

Compiled code does not say how often its loops turn.  They turn at least as often as it takes to do the launch's share
of the matrix FLOPs and to load its share of the traffic; the larger of both is taken, the same for every innermost loop
that loads or multiplies.  That is too few where lanes are masked off (a tile of 16 rows for one row) or load the same
bytes.  Code outside innermost loops is counted once, both sides of a branch included.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from rooflab.bench.predict.chip import Chip, Pipe
from rooflab.bench.predict.sass import WARPGROUP, Code, Instruction, parse
from rooflab.bench.predict.timeline import bytes_in_flight, span_cycles, steady_cycles
from rooflab.bench.static import CompiledInfo
from rooflab.roofline.device import Device
from rooflab.roofline.occupancy import WARP, Occupancy, Waves, occupancy, waves


@dataclass(frozen=True)
class Work:
    """One launch of one compiled kernel."""

    name: str
    launches: int
    ctas: int
    occupancy: Occupancy
    waves: Waves
    turns: float
    """Turns of the loops that do the work; 0 where there is no loop."""
    pipe_cycles: dict[Pipe, float]
    """Clocks that one CTA takes of each pipe of its SM."""
    cta_cycles: float
    """Clocks of one CTA's dependent steps, with the SM to itself."""
    in_flight_bytes: float
    """Bytes of loads that one CTA has on their way at most."""
    async_bytes: float
    """Bytes that one CTA copies from L2 to shared memory by cp.async or TMA."""
    uses_mma_sync: bool


def work_of(info: CompiledInfo, device: Device, chip: Chip, matrix_flops: float, read_bytes: float) -> Work:
    """The work of one of `info.launches` launches that together do `matrix_flops` and read `read_bytes` from HBM.

    Raises `ValueError` on code that is not of the device's architecture, of which no CTA fits, or of an empty grid.
    """
    target = f"sm_{device.compute_capability[0]}{device.compute_capability[1]}"
    if info.target.rstrip("af") != target:
        raise ValueError(f"compiled: expected code for {target}, {device.full_name}'s, got {info.target}")
    fits = occupancy(device, info.threads, info.registers, info.shared_bytes)
    if fits.ctas_per_sm == 0:
        raise ValueError(f"compiled: {info.name} does not fit on an SM, for lack of {fits.limiter}")
    ctas = info.ctas or math.prod(info.grid)
    if ctas < 1:
        raise ValueError(f"compiled: expected a grid of {info.name} that has CTAs, got {tuple(info.grid)}")
    code = parse(info.sass)
    warps = _warps_of_a_loop(info)
    share = 1 / (info.launches * ctas)
    turns = _turns(code, info, warps, matrix_flops * share, read_bytes * share)
    loops = [entry for body in _working(code) for entry in body]
    idle = [entry for body in code.loops if body not in _working(code) for entry in body]
    once = [*code.straight, *idle]
    requested = turns * _loaded(loops, info, warps) + _loaded(once, info, warps)
    from_hbm = min(1.0, read_bytes * share / requested) if requested else 1.0
    load_latency = from_hbm * chip.hbm_latency + (1 - from_hbm) * chip.l2_latency
    copies = any(entry.loads_async for entry in loops)
    steady = [steady_cycles(body, chip, warps, load_latency) for body in _working(code)]
    # Specialised warps run their loops side by side, others one loop after another.
    turn = max(steady, default=0.0) if info.uses_warp_specialization else sum(steady)
    span = span_cycles(once, chip, info.threads // WARP or 1, chip.hbm_latency)
    return Work(
        name=info.name,
        launches=info.launches,
        ctas=ctas,
        occupancy=fits,
        waves=waves(ctas, fits.ctas_per_sm, device.sms),
        turns=turns,
        pipe_cycles=_pipe_cycles(once, loops, turns, warps, info.threads // WARP, chip),
        cta_cycles=span + turns * turn + copies * chip.hbm_latency,
        in_flight_bytes=_in_flight(code, info, chip),
        async_bytes=turns * _loaded([entry for entry in loops if entry.loads_async], info, warps),
        uses_mma_sync=any(entry.mma_flops and not entry.is_wgmma for entry in code.instructions),
    )


def _working(code: Code) -> list[tuple[Instruction, ...]]:
    """Loops that load from global memory or multiply matrices."""
    return [body for body in code.loops if any(e.loads_global or e.loads_async or e.mma_flops for e in body)]


def _warps_of_a_loop(info: CompiledInfo) -> int:
    """Warps that execute a loop: all, or a warpgroup where each group has code of its own."""
    return WARPGROUP if info.uses_warp_specialization else max(1, info.threads // WARP)


def _flops(code: Iterable[Instruction], warps: int) -> float:
    return sum(e.mma_flops * (warps / WARPGROUP if e.is_wgmma else warps) for e in code)


def _fma_flops(code: Iterable[Instruction], warps: int) -> float:
    return sum(2.0 * WARP * warps for entry in code if entry.family == "FFMA")


def _loaded(code: Iterable[Instruction], info: CompiledInfo, warps: int) -> float:
    """Bytes that a CTA's loads in `code` ask for, all lanes; a TMA copy's are its stage of shared memory."""
    entries = [entry for entry in code if entry.loads_global or entry.loads_async]
    loaded = sum(float(entry.bytes_per_thread * WARP * warps) for entry in entries if entry.bytes_per_thread)
    tma = any(entry.family.startswith("UTMALDG") for entry in entries)
    return loaded + tma * info.shared_bytes / max(1, info.num_stages)


def _turns(code: Code, info: CompiledInfo, warps: int, flops: float, read_bytes: float) -> float:
    working = _working(code)
    if not working:
        return 0.0
    loops = [entry for body in working for entry in body]
    per_turn = _flops(loops, warps)
    outside = _flops(code.straight, warps)
    if not per_turn and not outside:
        per_turn, outside = _fma_flops(loops, warps), _fma_flops(code.straight, warps)
    by_flops = max(0.0, flops - outside) / per_turn if per_turn else 0.0
    loaded = _loaded(loops, info, warps)
    by_bytes = read_bytes / loaded if loaded else 0.0
    return max(1.0, by_flops, by_bytes)


def _pipe_cycles(
    once: list[Instruction], loops: list[Instruction], turns: float, loop_warps: int, warps: int, chip: Chip
) -> dict[Pipe, float]:
    total: Counter[Pipe] = Counter()
    for code, times in ((once, float(warps)), (loops, turns * loop_warps)):
        for entry in code:
            for pipe, cycles in chip.cycles(entry).items():
                total[pipe] += cycles * times  # type: ignore[assignment]
    return dict(total)


def _in_flight(code: Code, info: CompiledInfo, chip: Chip) -> float:
    plain = max(bytes_in_flight(body, chip) for body in (code.straight, *code.loops)) * info.threads
    if not any(entry.loads_async for entry in code.instructions):
        return float(plain)
    stages = max(2, info.num_stages)  # CUDA C++ does not say how many it has
    # One stage of the ring is being read while the others fill.
    return max(float(plain), info.shared_bytes * (stages - 1) / stages)
