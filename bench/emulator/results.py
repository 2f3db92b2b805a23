"""Describes the result of an emulated launch: bytes moved at each memory level, instruction counts and races."""

from __future__ import annotations

import re
from collections import Counter as Tally
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from rooflab.bench.emulator.faults import Finding, Rule
from rooflab.bench.emulator.machine.counting import SECTOR
from rooflab.bench.emulator.machine.run import Run
from rooflab.bench.emulator.mended import FENCE, WAIT, notes_of, release, touches
from rooflab.bench.emulator.races.reports import PHASES, VERBS, Race, describe
from rooflab.bench.emulator.text.syntax import PtxKernel, SizeTriple


@dataclass(frozen=True)
class Bytes:
    """Counts the bytes that a launch moved.  `hbm_*` and `*_sectors` count each accessed L2 sector as 32 bytes."""

    hbm_read: int = 0
    """Bytes of the sectors that were read at least once: the least that HBM must deliver, if L2 keeps everything."""
    hbm_write: int = 0
    """Bytes of the sectors that were written at least once."""
    global_read: int = 0
    """Bytes that the lanes' loads request."""
    global_read_sectors: int = 0
    """Bytes of the sectors of these loads, counted for each warp's request: the L2-to-L1 traffic without L1 hits."""
    global_write: int = 0
    global_write_sectors: int = 0
    copy_read: int = 0
    """Bytes read from global memory by `cp.async` and TMA."""
    copy_write: int = 0
    tma_load: int = 0
    """Bytes that TMA writes into shared memory, including filled elements."""
    tma_store: int = 0
    shared_read: int = 0
    shared_write: int = 0
    shared_matrix: int = 0
    """Bytes that wgmma reads from shared memory."""
    atomic: int = 0


@dataclass(frozen=True)
class LaunchResult:
    """Holds the result of a launch: bytes, instruction counts and races."""

    kernel: str
    bytes: Bytes
    instructions: Mapping[str, int]
    """By opcode: the number of threads that executed it, including threads whose predicate was false."""
    lines: Mapping[tuple[str, int], Mapping[str, int]]
    """By file and line: the `threads` that executed the line's instructions, and other counts of the instructions."""
    tensor_flops: Mapping[str, int]
    """By type of the operands: the multiplications and additions of the tensor cores."""
    shared_wavefronts: int
    """The wavefronts (turns of shared memory) of loads and stores, without those of wgmma and TMA."""
    shared_wavefronts_least: int
    """The wavefronts that these loads and stores would take without bank conflicts."""
    findings: tuple[Finding, ...]
    """The faults that did not end the launch.  Notes are what ptxas repairs, as its notes on this PTX say, sums whose
    last bits are undefined, and elements that are read and that nobody wrote."""
    ctas: int
    """The number of CTAs in the grid."""
    grid: SizeTriple
    stored: tuple[tuple[npt.NDArray[np.int64], int], ...] = ()
    """If only some of the CTAs ran: addresses and width of their stores to global memory."""

    @property
    def races(self) -> tuple[str, ...]:
        """Returns the texts of the findings that are errors: races, missing fences and others."""
        return tuple(finding.text for finding in self.findings if finding.severity == "error")

    @property
    def notes(self) -> tuple[str, ...]:
        """Returns the texts of the findings that are notes."""
        return tuple(finding.text for finding in self.findings if finding.severity == "note")

    @property
    def flops(self) -> int:
        """Returns the multiplications and additions of the tensor cores, summed over all operand types."""
        return sum(self.tensor_flops.values())


_COUNTER_BY_FIELD = {
    field.name: field.name.replace("sectors", "sector") + "_bytes" for field in fields(Bytes) if field.name[:3] != "hbm"
}
"""The counter's name for each field of `Bytes` except the first two."""


def result_of(run: Run, ptx: str) -> LaunchResult:
    """Returns the result of an emulated run of a kernel.  `ptx` is the PTX text that contains the kernel."""
    kernel, counter_totals = run.program.kernel, run.counter.totals
    executed_threads = _executed(run)
    moved_bytes = {name: counter_totals.get(counter_key, 0) for name, counter_key in _COUNTER_BY_FIELD.items()}
    allocations = run.memory.allocations
    read_sectors = sum(int(item.sectors_read.sum()) for item in allocations if item.sectors_read is not None)
    written_sectors = sum(int(item.sectors_written.sum()) for item in allocations if item.sectors_written is not None)
    grid = run.grid
    return LaunchResult(
        kernel=kernel.name,
        bytes=Bytes(hbm_read=SECTOR * read_sectors, hbm_write=SECTOR * written_sectors, **moved_bytes),
        instructions=_by_opcode(kernel, executed_threads),
        lines=_by_line(run, executed_threads),
        tensor_flops=_tensor_flops(kernel, executed_threads),
        shared_wavefronts=counter_totals.get("shared_wavefronts", 0),
        shared_wavefronts_least=counter_totals.get("shared_wavefronts_least", 0),
        findings=_findings(run, ptx) if run.checks.races else (),
        ctas=grid[0] * grid[1] * grid[2],
        grid=grid,
        stored=tuple(run.stored or ()),
    )


def _executed(run: Run) -> dict[int, int]:
    """Counts the threads that executed each instruction of a run."""
    thread_counts: Tally[int] = Tally()
    for (first_index, group_size), thread_count in run.counter.blocks.items():
        code_block = run.program.block(first_index, group_size)
        for instruction_index in range(code_block.start, code_block.end):
            thread_counts[instruction_index] += thread_count
    return thread_counts


def _by_opcode(kernel: PtxKernel, executed: Mapping[int, int]) -> dict[str, int]:
    opcode_counts: Tally[str] = Tally()
    for instruction_index, thread_count in executed.items():
        opcode_counts[kernel.instructions[instruction_index].opcode] += thread_count
    return dict(opcode_counts.most_common())


def _by_line(run: Run, executed: Mapping[int, int]) -> dict[tuple[str, int], dict[str, int]]:
    instructions = run.program.kernel.instructions
    lines: dict[tuple[str, int], Tally[str]] = defaultdict(Tally)
    for number, thread_count in executed.items():
        lines[instructions[number].source_line]["threads"] += thread_count
    for (number, count_name), counter_value in run.counter.by_instruction.items():
        lines[instructions[number].source_line][count_name] += counter_value
    return {line: dict(lines[line]) for line in sorted(lines)}


def _tensor_flops(kernel: PtxKernel, executed: Mapping[int, int]) -> dict[str, int]:
    flops: Tally[str] = Tally()
    for instruction_index, thread_count in executed.items():
        opcode = kernel.instructions[instruction_index].opcode
        shape_match = re.search(r"\.m(\d+)n(\d+)k(\d+)\.", opcode)
        if shape_match is None or not opcode.startswith(("wgmma.mma", "mma.sync")):
            continue
        m, n, k = map(int, shape_match.groups())
        opcode_parts = opcode.split(".")
        operand_type = opcode_parts[-2] if opcode.startswith("wgmma") else opcode_parts[-3]
        flops[operand_type] += 2 * m * n * k * (thread_count // (128 if opcode.startswith("wgmma") else 32))
    return dict(flops)


def _findings(run: Run, ptx: str) -> tuple[Finding, ...]:
    """Describes a run's races, and its other faults that did not end it.  A finding is a note if ptxas repairs the
    fault, or if a race only changes the rounding."""
    name = _Named(run)
    detectors = (run.global_races, run.warp_races)
    found = [
        _race(run, race, name)
        for races in (run.shared_races, *(detector.found for detector in detectors if detector is not None))
        for race in _unlike((race for race in races if not race.harmless), name)
    ]
    for map_user, map_writer in run.map_races:
        text = f"{name(map_user)} uses a tensor map that {name(map_writer)} made, with no fence.proxy.tensormap between"
        fence = {"missing": "fence.proxy.tensormap", "belongs": f"after {name(map_writer)}"}
        found.append(name.finding("missing-fence", text, map_user, map_writer, **fence))
    for number in run.uneven_barriers:
        text = f"{name(number)} is met more often by some warps than by others, which have left the loop: a barrier is"
        found.append(name.finding("barrier", f"{text} undefined unless all threads come to it", number))
    for rule, number, text in run.turn.faults(run.memory) if run.turn is not None else ():
        found.append(name.finding(rule, f"{name(number)} {text}", number))
    for number, text in run.unwritten_reads.items():
        text = f"{name(number)}: {text}; another part was written before, so the kernel may not use what it read"
        found.append(name.finding("unwritten-read", text, number, severity="note"))
    for number in run.unordered_sums:
        text = f"{name(number)} adds floats of several warps or CTAs to one address, and an addition was rounded: the"
        text += " sum's last bits depend on the order, which differs from run to run"
        found.append(name.finding("nondeterministic-sum", text, number, severity="note"))
    return tuple({finding.text: finding for finding in (*found, *_repairable(run, ptx, name))}.values())


class _Named:
    """Names the instructions of a run's kernel by their source lines, and makes findings about them."""

    def __init__(self, run: Run):
        self._run, self._kernel = run, run.program.kernel

    def __call__(self, number: int) -> str:
        return self._kernel.instructions[number].describe()

    def finding(self, rule: Rule, text: str, number: int, other: int | None = None, **more: Any) -> Finding:
        """Makes a finding about an instruction, and about an earlier instruction `other`.  `more` are other fields."""
        earlier = None if other is None else self._kernel.instructions[other]
        at = self._kernel.instructions[number]
        return Finding.at(rule, self._kernel.name, text, at, earlier, grid=self._run.grid, **more)


def _repairable(run: Run, ptx: str, name: _Named) -> Iterator[Finding]:
    """Yields the faults that ptxas can repair.  A fault is a note if ptxas says that it repairs it in this PTX."""
    unfenced = run.program.unfenced
    repairs = notes_of(ptx) if unfenced or run.register_races else frozenset()

    def finding(
        rule: Rule, codes: frozenset[str], text: str, number: int, other: int | None = None, **fence: Any
    ) -> Finding:
        if not (said := codes & repairs):
            return name.finding(rule, text, number, other, **fence)
        text += f" (ptxas {release()} puts one there, note {min(said)}, and the products no longer overlap)"
        return name.finding(rule, text, number, other, severity="note", **fence)

    for writer, wgmma in run.program.rewritten:
        text = f"{writer.describe()} writes a register of A of {wgmma.describe()}, which may still have to read it: no"
        text += f" wgmma.wait_group between (ptxas {release()} "
        if touches(ptx, run.program.kernel.name, "A"):
            text += "does not repair it: its code writes a register of A before the wait)"
            yield name.finding("wgmma-registers", text, writer.number, wgmma.number)
        else:
            text += "repairs it: its code writes another register, or waits before)"
            yield name.finding("wgmma-registers", text, writer.number, wgmma.number, severity="note")
    for number in run.register_races:
        text = f"{name(number)} reads an accumulator of a wgmma that may still be running: no wgmma.wait_group between"
        if not WAIT & repairs and not touches(ptx, run.program.kernel.name, "accumulator"):
            text += f" (the machine code of ptxas {release()} touches no accumulator before its wait)"
            yield name.finding("wgmma-registers", text, number, severity="note")
        else:
            yield finding("wgmma-registers", WAIT, text, number)
    for wgmma, access in unfenced:
        if access is None:
            text, place, other = f"{wgmma.describe()} comes first, with no wgmma.fence before it", "before", None
        else:
            text = f"{wgmma.describe()} takes a register that {access.describe()} touches, with no wgmma.fence between"
            place, other = "after", access.number
        fence = {"missing": "wgmma.fence", "belongs": f"{place} {(access or wgmma).describe()}"}
        yield finding("missing-fence", FENCE, text, wgmma.number, other, **fence)


def _unlike(races: Iterable[Race], name: Callable[[int], str]) -> list[Race]:
    """Returns the races without repeats of the same kind at the same source lines. An unrolled loop causes such
    repeats."""
    race_by_key: dict[tuple[object, ...], Race] = {}
    for race in races:
        race_by_key.setdefault((race.kind, name(race.first), name(race.second), race.proxy, race.same_value), race)
    return list(race_by_key.values())


def _race(run: Run, race: Race, name: _Named) -> Finding:
    """Describes a race.  For global memory, the text names the allocation and the byte in it, if the address lies in an
    allocation."""
    text, other = describe(race, name), race.first if race.kind in (*VERBS, *PHASES) else None
    allocation = run.memory.find(race.address) if race.space == "global" else None
    if allocation is not None:
        byte_position = f"byte {race.address - allocation.base} of {allocation.name}"
        text = text.replace(f"global memory at {race.address:#x}", f"global memory, {byte_position}", 1)
    if not race.proxy:
        severity = "note" if race.kind == "rounding" else "error"
        sync: dict[str, str] = {}
        if race.kind.startswith("write") and (release := run.lane_releases.get(race.first)) is not None:
            text += f"; lanes of one warp: {name(release)} comes after the stores of its own lane alone, with"
            text += " no bar.warp.sync between"
            sync = {"missing": "bar.warp.sync", "belongs": f"before {name(release)}"}
        return name.finding(race.rule, text, race.second, other, severity=severity, **sync)
    # A fence before the wait for a cp.async would come before the copy's writes.
    is_copy = run.program.kernel.instructions[race.first].opcode.startswith("cp.async")
    belongs = f"after {'the wait for ' if is_copy else ''}{name(race.first)}"
    return name.finding(race.rule, text, race.second, other, missing="fence.proxy.async", belongs=belongs)
