"""What is worth knowing of one compiled kernel: resources, how it fills the GPU, its hot loop, options that failed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rooflab.bench.compile.flow import Loop, feeding_loop, hot_loop
from rooflab.bench.compile.options import Option, options
from rooflab.bench.compile.sass import TENSOR_CORES, Widths, widths
from rooflab.bench.compile.static import CompiledInfo
from rooflab.roofline.device import Device
from rooflab.roofline.occupancy import occupancy, waves

COPIES = ("tma", "cp_async", "ldmatrix")
LOADS, STORES = ("LDG", "LD", "LDGSTS"), ("STG", "ST")


@dataclass(frozen=True)
class LoopSummary:
    """The loop in which the kernel spends its time, and, where warps are specialised, the one that feeds it."""

    address: int
    depth: int
    """1 for a loop in no other."""
    instructions: int
    counts: Mapping[str, int]
    """Instructions of each of `sass.FAMILIES` of which there are any."""
    fed_by: Mapping[str, int]
    """The same of the feeding loop; empty where there is none."""
    load_bytes_worst: int | None
    """Bytes a thread loads from global memory with the narrowest instruction; None where it loads none itself."""
    load_bytes_usual: int | None


@dataclass(frozen=True)
class Summary:
    """One kernel of one launch."""

    name: str
    backend: str
    target: str
    device: str
    """The GPU whose SMs the grid is laid over."""
    grid: tuple[int, ...]
    launches: int
    ctas: int
    threads: int
    registers: int
    stack_bytes: int
    spill_loads: int
    spill_stores: int
    shared_bytes: int
    ctas_per_sm: int
    occupancy: float
    """Warps on an SM over the most that it holds."""
    occupancy_limiter: str
    waves: float | None
    """None where not one CTA fits, or the grid is empty."""
    full_waves: int | None
    tail_ctas: int | None
    """CTAs of the last, partly filled wave."""
    wave_efficiency: float | None
    tensor_path: str
    """`tcgen05`, `wgmma`, `mma` or `none`: the newest of which there is an instruction."""
    counts: Mapping[str, int]
    """Instructions of each of `sass.FAMILIES` of which there are any, in the whole code."""
    loop: LoopSummary | None
    """None where the code has no loop."""
    load_bytes_worst: int | None
    """Bytes a thread loads from global memory with the narrowest instruction of the whole code."""
    load_bytes_usual: int | None
    """The same of the most frequent one."""
    store_bytes_worst: int | None
    store_bytes_usual: int | None
    options: tuple[Option, ...]
    asked: Mapping[str, Any]
    code_hash: str

    @property
    def findings(self) -> list[str]:
        """What was asked for and took no effect, one sentence each."""
        return [option.sentence for option in self.options if not option.took_effect]

    @property
    def in_loop(self) -> Mapping[str, int]:
        """Instructions by family in the hot loop and the one that feeds it; in the whole code where there is none."""
        if self.loop is None:
            return self.counts
        return {key: self.loop.counts.get(key, 0) + self.loop.fed_by.get(key, 0) for key in self.counts}

    def to_json(self) -> dict[str, Any]:
        """As JSON values; what `compiled` of a record holds."""
        return {**asdict(self), "grid": list(self.grid), "findings": self.findings}


def summarize(info: CompiledInfo, scheme: str, device: Device) -> Summary:
    """The summary of one compiled kernel on a GPU that runs its code."""
    held = occupancy(device, info.threads, info.registers, info.shared_bytes)
    fill = waves(info.ctas, held.ctas_per_sm, device.sms) if info.ctas and held.ctas_per_sm else None
    hot = hot_loop(info.loops)
    loads, stores = widths(info.opcodes.items(), *LOADS), widths(info.opcodes.items(), *STORES)
    return Summary(
        name=info.name,
        backend=info.backend,
        target=info.target,
        device=device.name,
        grid=info.grid,
        launches=info.launches,
        ctas=info.ctas,
        threads=info.threads,
        registers=info.registers,
        stack_bytes=info.stack_bytes,
        spill_loads=info.spill_loads,
        spill_stores=info.spill_stores,
        shared_bytes=info.shared_bytes,
        ctas_per_sm=held.ctas_per_sm,
        occupancy=held.fraction,
        occupancy_limiter=held.limiter,
        waves=fill.waves if fill else None,
        full_waves=fill.full if fill else None,
        tail_ctas=fill.tail_ctas if fill else None,
        wave_efficiency=fill.efficiency if fill else None,
        tensor_path=tensor_path(info),
        counts=_present(info.counts),
        loop=_loop(hot, feeding_loop(info.loops, hot)),
        load_bytes_worst=loads.worst,
        load_bytes_usual=loads.usual,
        store_bytes_worst=stores.worst,
        store_bytes_usual=stores.usual,
        options=tuple(options(info, scheme)),
        asked=dict(info.asked),
        code_hash=info.code_hash,
    )


def tensor_path(info: CompiledInfo) -> str:
    """The newest kind of tensor-core instruction in the code, or `none`."""
    return next((family for family in TENSOR_CORES if info.counts[family]), "none")


def _loop(hot: Loop | None, feeding: Loop | None) -> LoopSummary | None:
    if hot is None:
        return None
    # The loads of both, for in specialised warps one loop brings the data of the other.
    both = [*hot.opcodes.items(), *(feeding.opcodes.items() if feeding else ())]
    loads: Widths = widths(both, *LOADS)
    return LoopSummary(
        address=hot.start,
        depth=hot.depth,
        instructions=len(hot.instructions),
        counts=_present(hot.counts),
        fed_by=_present(feeding.counts) if feeding else {},
        load_bytes_worst=loads.worst,
        load_bytes_usual=loads.usual,
    )


def _present(counts: Mapping[str, int]) -> dict[str, int]:
    return {family: number for family, number in counts.items() if number}
