"""Describes the result of an emulated launch: bytes moved at each memory level, instruction counts and races."""

from __future__ import annotations

import re
from collections import Counter as Tally
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from rooflab.bench.emulator.machine.counting import SECTOR
from rooflab.bench.emulator.machine.run import Run
from rooflab.bench.emulator.mended import FENCE, WAIT, notes_of
from rooflab.bench.emulator.races.reports import Race, describe
from rooflab.bench.emulator.text.syntax import Instruction, PtxKernel, SizeTriple


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
    races: tuple[str, ...]
    """One sentence for each race: a pair of instructions that a GPU may run in another order."""
    notes: tuple[str, ...]
    """Violations of PTX's rules that ptxas repairs, as the notes of ptxas on this PTX say.  Also sums whose last bits
    are undefined, and elements that are read and that nobody wrote."""
    ctas: int
    """The number of CTAs in the grid."""
    grid: SizeTriple
    stored: tuple[tuple[npt.NDArray[np.int64], int], ...] = ()
    """If only some of the CTAs ran: addresses and width of their stores to global memory."""

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
    kernel, run_counter = run.program.kernel, run.counter
    counter_totals: Mapping[str, int] = run_counter.totals if run_counter is not None else {}
    executed_threads = _executed(run)
    moved_bytes = {name: counter_totals.get(counter_key, 0) for name, counter_key in _COUNTER_BY_FIELD.items()}
    allocations = run.memory.allocations
    read_sectors = sum(int(item.sectors_read.sum()) for item in allocations if item.sectors_read is not None)
    written_sectors = sum(int(item.sectors_written.sum()) for item in allocations if item.sectors_written is not None)
    grid = run.grid
    races, notes = _races(run, ptx) if run.checks.races else ((), ())
    return LaunchResult(
        kernel=kernel.name,
        bytes=Bytes(hbm_read=SECTOR * read_sectors, hbm_write=SECTOR * written_sectors, **moved_bytes),
        instructions=_by_opcode(kernel, executed_threads),
        lines=_by_line(run, executed_threads),
        tensor_flops=_tensor_flops(kernel, executed_threads),
        shared_wavefronts=counter_totals.get("shared_wavefronts", 0),
        shared_wavefronts_least=counter_totals.get("shared_wavefronts_least", 0),
        races=races,
        notes=notes,
        ctas=grid[0] * grid[1] * grid[2],
        grid=grid,
        stored=tuple(run.stored or ()),
    )


def _executed(run: Run) -> dict[int, int]:
    """Counts the threads that executed each instruction of a run."""
    thread_counts: Tally[int] = Tally()
    if run.counter is not None:
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
    kernel = run.program.kernel
    lines: dict[tuple[str, int], dict[str, int]] = {}

    def at(number: int) -> dict[str, int]:
        source_line = kernel.instructions[number].place
        # A line of an inlined function counts at its call in the kernel's own source.
        line_key = ("", 0) if source_line is None else source_line.caller or (source_line.file, source_line.line)
        return lines.setdefault(line_key, {})

    for number, thread_count in executed.items():
        line_counts = at(number)
        line_counts["threads"] = line_counts.get("threads", 0) + thread_count
    if run.counter is not None:
        for (number, count_name), counter_value in run.counter.by_instruction.items():
            line_counts = at(number)
            line_counts[count_name] = line_counts.get(count_name, 0) + counter_value
    return dict(sorted(lines.items()))


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


def _races(run: Run, ptx: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Describes a run's races, and its notes. A note describes a fault that ptxas repairs, or a race that only changes
    the rounding."""

    def name(number: int) -> str:
        return run.program.kernel.instructions[number].describe()

    shared_races = _unlike((race for race in run.shared_races if not race.harmless), name)
    rounding_notes = [describe(race, name) for race in shared_races if race.kind == "rounding"]
    race_texts = [describe(race, name) for race in shared_races if race.kind != "rounding"]
    if run.global_races is not None:
        global_races = _unlike((race for race in run.global_races.found if not race.harmless), name)
        race_texts += [_in_an_allocation(run, race, name) for race in global_races]
    race_texts += [
        f"{name(map_user)} uses a tensor map that {name(map_writer)} made, with no fence.proxy.tensormap between"
        for map_user, map_writer in run.map_races
    ]
    race_texts += [
        f"{name(number)} is met more often by some warps than by others, which have left the loop and ended: a barrier"
        " is undefined unless all threads come to it"
        for number in run.uneven_barriers
    ]
    race_texts += [
        f"{reg_access.describe()} writes a register of A of {wgmma_op.describe()}, which may still have to read it: no"
        " wgmma.wait_group between"
        for reg_access, wgmma_op in run.program.rewritten
    ]
    faults_by_note = {
        WAIT: [
            f"{name(number)} reads an accumulator of a wgmma that may still be running: no wgmma.wait_group between"
            for number in run.register_races
        ],
        FENCE: [_unfenced(wgmma_op, reg_access) for wgmma_op, reg_access in run.program.unfenced],
    }
    fix_notes = notes_of(ptx) if any(faults_by_note.values()) else frozenset()
    race_texts += [
        text for note_code, fault_texts in faults_by_note.items() if note_code not in fix_notes for text in fault_texts
    ]
    notes = [
        f"{text} (ptxas puts one there, note {note_code}, and the products no longer overlap)"
        for note_code, fault_texts in faults_by_note.items()
        if note_code in fix_notes
        for text in fault_texts
    ]
    notes += [_unordered_sum(name(number)) for number in run.unordered_sums]
    return tuple(dict.fromkeys(race_texts)), tuple(dict.fromkeys([*rounding_notes, *notes]))


def _unordered_sum(name: str) -> str:
    return (
        f"{name} adds floats of several warps or CTAs to one address, and an addition was rounded: the sum's last bits"
        " depend on the order, which differs from run to run"
    )


def _unlike(races: Iterable[Race], name: Callable[[int], str]) -> list[Race]:
    """Returns the races without repeats of the same kind at the same source lines. An unrolled loop causes such
    repeats."""
    race_by_key: dict[tuple[object, ...], Race] = {}
    for race in races:
        race_by_key.setdefault((race.kind, name(race.first), name(race.second), race.proxy, race.same_value), race)
    return list(race_by_key.values())


def _in_an_allocation(run: Run, race: Race, name: Callable[[int], str]) -> str:
    """Describes a race on global memory. The text names the allocation and the byte in it, if the address lies in an
    allocation."""
    allocation = run.memory.find(race.address)
    if allocation is None:
        return describe(race, name)
    byte_position = f"byte {race.address - allocation.base} of {allocation.name}"
    return describe(race, name).replace(f"global memory at {race.address:#x}", f"global memory, {byte_position}", 1)


def _unfenced(wgmma: Instruction, other: Instruction | None) -> str:
    if other is None:
        return f"{wgmma.describe()} comes first, with no wgmma.fence before it"
    return f"{wgmma.describe()} takes a register that {other.describe()} touches, with no wgmma.fence between"
