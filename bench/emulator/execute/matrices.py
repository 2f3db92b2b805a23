"""Runs `ldmatrix`, `stmatrix`, `mma.sync` and `wgmma` for lanes that execute together.

A wgmma adds to a separate matrix.  Until the kernel waits for the wgmma, its accumulator registers hold invalid values
(poison).  The wait copies the matrix into the registers, once for a whole chain of wgmmas.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from rooflab.bench.emulator.execute.warps import in_warps
from rooflab.bench.emulator.machine.access import WRITTEN_UNITS, check_written, shared_offsets
from rooflab.bench.emulator.machine.context import LaneContext, chain_in_flight
from rooflab.bench.emulator.machine.run import CtaGroup, Fault
from rooflab.bench.emulator.tiles import mma, shared_layout
from rooflab.bench.emulator.tiles.mma import (
    WARPGROUP,
    a_matrix,
    check_shape,
    matrix_to_registers,
    registers_to_matrix,
    truncated_wgmma,
    wgmma,
)
from rooflab.bench.emulator.tiles.shared_layout import OutsideMemory, operand_chunks, read_operand


class WgmmaShape(NamedTuple):
    """Holds the shape, types and modifiers of a wgmma, from its opcode and its constants."""

    n: int
    d_type: str
    a_type: str
    b_type: str
    is_negative: bool
    """Whether one of the scales of A and B is -1, and not both."""
    a_transposed: bool
    b_transposed: bool
    saturates: bool


def load(c: LaneContext, addresses: Any, number: int, transposed: bool, instruction: int) -> list[Any]:
    """Runs `ldmatrix`."""
    cta_group, (row_offsets, active_lanes) = c.group, _rows(c, addresses, number, instruction)
    if cta_group.run.observer is not None:
        cta_group.run.observer.shared_read(c, active_lanes, row_offsets[active_lanes], 16, instruction)
    if cta_group.written is not None:
        check_written(c, row_offsets[active_lanes], 16, instruction)
    return shared_layout.load_matrices(cta_group.shared, row_offsets, number, transposed)


def store(c: LaneContext, addresses: Any, values: tuple[Any, ...], transposed: bool, instruction: int) -> None:
    """Runs `stmatrix`."""
    cta_group, (address_offsets, active_lanes) = c.group, _rows(c, addresses, len(values), instruction)
    row_offsets = address_offsets[active_lanes]
    rows = shared_layout.row_values(values, c.size, transposed)
    if cta_group.run.observer is not None:
        cta_group.run.observer.shared_write(c, active_lanes, row_offsets, 16, instruction, rows)
    if cta_group.written is not None:
        cta_group.written.view("c16")[row_offsets >> 4] = WRITTEN_UNITS[16]
    cta_group.views[16][row_offsets >> 4] = rows


def _check_warps(c: LaneContext, instruction: int) -> None:
    if in_warps(c, c.lanes)[1] is not None:
        raise Fault(f"it wants whole warps of 32 threads, and the {c.size} here are not", instruction)


def _rows(
    c: LaneContext, addresses: Any, number: int, instruction: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.intp]]:
    """Returns the shared memory offset, in bytes, of the matrix row that each lane addresses. Also returns the indices
    of the lanes that give an address."""
    _check_warps(c, instruction)
    addresses, lane_in_warp = c.vector(addresses), c.lanes & 31
    # Only the first 8 lanes for each matrix give a row; the addresses of the other lanes are not used.
    if number < 4:
        addresses = np.where(lane_in_warp < 8 * number, addresses, addresses[lane_in_warp == 0].repeat(32))
    row_offsets = np.asarray(shared_offsets(c, addresses, 16, None, instruction)).astype(np.int64)
    return row_offsets, np.flatnonzero(lane_in_warp < 8 * number)


def multiply(c: LaneContext, instruction: int, saturates: bool, *product: Any) -> list[Any]:
    """Runs `mma.sync`.  `product` are the arguments of `mma.mma`."""
    _check_warps(c, instruction)
    try:
        return mma.mma(*product, saturate=saturates, lanes=c.size)
    except ValueError as error:
        raise Fault(str(error), instruction) from None


@dataclass(eq=False)
class Accumulators:
    """Holds the accumulators of one chain of wgmmas: one matrix for each warpgroup."""

    buffer: npt.NDArray[Any]
    """The registers of all lanes, as an array (registers, lanes)."""
    matrices: list[npt.NDArray[Any]]
    d_type: str
    rows: list[npt.NDArray[Any]] = field(default_factory=list)
    in_flight: list[int] = field(default_factory=list)
    """For each warpgroup, the number of unfinished wgmma groups that write its matrix."""

    def settle(self, place: int) -> None:
        """Records that a wgmma group of warpgroup number `place` is complete.  Fills the registers of this warpgroup if
        all its groups are complete."""
        self.in_flight[place] -= 1
        if not self.in_flight[place]:
            self.fill(place)

    def fill(self, place: int) -> None:
        """Copies the matrix of the warpgroup with index `place` into the accumulator registers."""
        register_values = matrix_to_registers(self.matrices[place], self.d_type)
        self.buffer[:, place * WARPGROUP : (place + 1) * WARPGROUP] = register_values.view(self.buffer.dtype)

    def fill_all(self) -> None:
        """Copies the matrices of all warpgroups."""
        for place in range(len(self.matrices)):
            self.fill(place)


@dataclass
class Warpgroup:
    """Holds the unfinished wgmmas of one warpgroup, in groups.  A group is a list of pairs `(accumulators, index)`, one
    for each result matrix.  The result of this warpgroup is `accumulators.matrices[index]`."""

    open: list[tuple[Accumulators, int]] = field(default_factory=list)
    groups: list[list[tuple[Accumulators, int]]] = field(default_factory=list)
    last: Any = None
    """The race detector's record of the newest open wgmma."""
    marks: list[Any] = field(default_factory=list)
    """The race detector's record of each committed group."""


def _pieces(c: LaneContext, instruction: int) -> list[int]:
    """Returns the indices of the warpgroups (128 lanes each) that run a wgmma.  Raises `Fault` if the lanes are not
    whole warpgroups."""
    cta_group, warpgroups = c.group, []
    for lane_index in range(0, c.size, WARPGROUP):
        first_lane, last_lane = int(c.lanes[lane_index]), int(c.lanes[min(lane_index + WARPGROUP, c.size) - 1])
        cta_slot, lane_offset = divmod(first_lane, cta_group.lanes_per_cta)
        if last_lane - first_lane != WARPGROUP - 1 or lane_offset % WARPGROUP:
            raise Fault(f"wgmma wants whole warpgroups of 128 threads, and here are {c.size}", instruction)
        warpgroups.append(cta_slot * cta_group.pieces_per_cta + lane_offset // WARPGROUP)
    return warpgroups


def multiply_async(
    c: LaneContext, d: tuple[Any, ...], a: Any, b: Any, keeps: Any, shape: WgmmaShape, instruction: int
) -> list[Any]:
    """Runs `wgmma.mma_async`.  Returns the registers that will hold the result after a wait."""
    cta_group, warpgroup_ids = c.group, _pieces(c, instruction)
    if isinstance(keeps, np.ndarray):
        if not (keeps == keeps[0]).all():
            raise Fault("wgmma wants one scale-d for all threads", instruction)
        keeps = keeps[0]
    wgmma_chain = _chain_of(cta_group, d)
    for register_value in (*(a if isinstance(a, tuple) else ()), *(d if wgmma_chain is None and keeps else ())):
        check_settled(c, register_value, instruction)
    try:
        check_shape(shape.n, shape.d_type, shape.a_type, shape.b_type, len(d))
        operand_pairs = _operands(c, a, b, shape, len(warpgroup_ids), instruction)
    except OutsideMemory as error:
        raise Fault(str(error), instruction, rule="out-of-bounds") from None
    except ValueError as error:
        raise Fault(str(error), instruction) from None
    old_d = wgmma_chain.matrices if wgmma_chain is not None else None
    if old_d is None and keeps:
        rows = np.stack([c.vector(register_value) for register_value in d])
        old_d = list(registers_to_matrix(rows.view(np.int32) if shape.d_type == "s32" else rows, shape.d_type))
    result_matrices = [
        _product(cta_group, old_d[index] if keeps and old_d is not None else None, *operand_pairs[index], shape)
        for index in range(len(warpgroup_ids))
    ]
    if wgmma_chain is None or not all(wgmma_chain.in_flight):
        wgmma_chain = _fresh(cta_group, result_matrices, shape, c.size)
    wgmma_chain.matrices = result_matrices
    for index, warpgroup_id in enumerate(warpgroup_ids):
        warpgroup = cta_group.warpgroups.setdefault(warpgroup_id, Warpgroup())
        if not any(wgmma_chain is accumulators for accumulators, _ in warpgroup.open):
            warpgroup.open.append((wgmma_chain, index))
            wgmma_chain.in_flight[index] += 1
    return wgmma_chain.rows


def _chain_of(group: CtaGroup, d: tuple[Any, ...]) -> Accumulators | None:
    """Returns the chain of wgmmas that adds into the registers `d`, or None if there is no such chain."""
    base_array = d[0].base if isinstance(d[0], np.ndarray) else None
    chain: Accumulators | None = group.accumulators.get(id(base_array))
    if chain is None or len(chain.rows) != len(d) or any(a is not b for a, b in zip(d, chain.rows, strict=True)):
        return None
    return chain


def _fresh(group: CtaGroup, results: list[Any], shape: WgmmaShape, lanes: int) -> Accumulators:
    rows = results[0].shape[-1] // (4 if shape.d_type == "f16" else 2)
    buffer = np.empty((rows, lanes), np.float32 if shape.d_type == "f32" else np.uint32)
    if group.run.checks.asynchronous:
        buffer.view(np.uint32).fill(0x7FFFFFFF)
    new_chain = Accumulators(buffer, results, shape.d_type, list(buffer), [0] * len(results))
    # The newest chains are enough: an older chain continues from the values of its registers, once they are filled.
    if len(group.accumulators) > 64:
        idle_keys = (key for key, wgmma_chain in group.accumulators.items() if not any(wgmma_chain.in_flight))
        if (oldest_key := next(idle_keys, None)) is not None:
            del group.accumulators[oldest_key]
    group.accumulators[id(buffer)] = new_chain
    return new_chain


def _product(group: CtaGroup, old: Any, a: Any, b: Any, shape: WgmmaShape) -> npt.NDArray[Any]:
    if shape.a_type in ("e4m3", "e5m2") and group.run.short_accumulator:
        return truncated_wgmma(old, -a if shape.is_negative else a, b, shape.a_type, shape.b_type, shape.d_type)
    return wgmma(old, a, b, shape.d_type, is_negative=shape.is_negative, saturate=shape.saturates)


def _operands(
    c: LaneContext, a: Any, b: Any, shape: WgmmaShape, count: int, instruction: int
) -> list[tuple[npt.NDArray[Any], npt.NDArray[Any]]]:
    """Returns the wgmma operands `A[64, K]` and `B[N, K]` of each warpgroup."""
    if isinstance(a, tuple):
        if len(a) != 4:
            raise ValueError(f"wgmma: expected 4 registers of A, got {len(a)}")
        a_matrices = list(a_matrix(a, c.size, shape.a_type).reshape(count, 64, -1))
    else:
        a_matrices = _read(c, a, 64, shape.a_type, shape.a_transposed, count, instruction)
    b_matrices = _read(c, b, shape.n, shape.b_type, shape.b_transposed, count, instruction)
    return list(zip(a_matrices, b_matrices, strict=True))


def _read(
    c: LaneContext, descriptor: Any, rows: int, kind: str, transposed: bool, count: int, instruction: int
) -> list[npt.NDArray[Any]]:
    cta_group = c.group
    cta_start = (c.slot or 0) * cta_group.shared_size
    # This leaves out the padding after the CTA's own memory, because no instruction may read the padding.
    shared_memory = cta_group.shared[cta_start : cta_start + cta_group.run.shared_limit // 16 * 16]
    matrices: dict[int, npt.NDArray[Any]] = {}
    descriptors = (
        [int(descriptor)] * count if isinstance(descriptor, np.generic) else list(map(int, descriptor[::WARPGROUP]))
    )
    for descriptor_index, descriptor_bits in enumerate(descriptors):
        if descriptor_bits not in matrices:
            matrices[descriptor_bits] = read_operand(shared_memory, descriptor_bits, rows, kind, transposed)
        if cta_group.written is None and cta_group.run.observer is None:
            continue
        chunk_offsets = operand_chunks(descriptor_bits, rows, transposed)[0].ravel() * 16 + cta_start
        if cta_group.written is not None:
            check_written(c, chunk_offsets, 16, instruction)
        if cta_group.run.observer is not None:
            lanes = c.lanes[descriptor_index * WARPGROUP : (descriptor_index + 1) * WARPGROUP]
            warpgroup_id = int(cta_group.pieces(lanes[:1], WARPGROUP)[0])
            warpgroup = cta_group.warpgroups.setdefault(warpgroup_id, Warpgroup())
            warps = np.arange(lanes[0] >> 5, (lanes[0] >> 5) + 4)
            warpgroup.last = cta_group.run.observer.wgmma_read(cta_group, warps, chunk_offsets, instruction)
    return [matrices[descriptor_bits] for descriptor_bits in descriptors]


def commit(c: LaneContext, instruction: int) -> None:
    """Runs `wgmma.commit_group`."""
    for warpgroup_id in _pieces(c, instruction):
        warpgroup = c.group.warpgroups.setdefault(warpgroup_id, Warpgroup())
        warpgroup.groups.append(warpgroup.open)
        warpgroup.marks.append(warpgroup.last)
        warpgroup.open, warpgroup.last = [], None


def wait(c: LaneContext, newest: int, instruction: int) -> None:
    """Runs `wgmma.wait_group`: completes all groups except the last `newest` groups."""
    for warpgroup_number in _pieces(c, instruction):
        warpgroup = c.group.warpgroups.setdefault(warpgroup_number, Warpgroup())
        done_count = max(0, len(warpgroup.groups) - newest)
        for wgmma_group in warpgroup.groups[:done_count]:
            for accumulators, index in wgmma_group:
                accumulators.settle(index)
        race_marks = [race_record for race_record in warpgroup.marks[:done_count] if race_record is not None]
        warpgroup.groups, warpgroup.marks = warpgroup.groups[done_count:], warpgroup.marks[done_count:]
        if race_marks and c.group.races is not None:
            warps = np.unique(c.warps[c.group.pieces(c.lanes, 128) == warpgroup_number])
            slot, slot_warps = int(warps[0]) // c.group.race_warps, warps % c.group.race_warps
            for race_record in race_marks:
                c.group.races.acquire_async(slot, slot_warps, race_record)


def check_settled(c: LaneContext, value: Any, instruction: int) -> None:
    """Reports a race if an instruction reads an accumulator while its wgmma may still be running.

    The instruction still gets the right result, because ptxas detects such reads and adds a wait (ptxas note C7517).
    Triton 3.7 relies on this wait if `tl.dot` has `max_num_imprecise_acc`."""
    wgmma_chain = chain_in_flight(c.group, value)
    if wgmma_chain is not None:
        c.group.run.register_races[instruction] = None
        wgmma_chain.fill_all()
