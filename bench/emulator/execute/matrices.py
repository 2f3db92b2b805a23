"""Runs `ldmatrix`, `stmatrix`, `mma.sync` and `wgmma` for the lanes of a context.

A wgmma's accumulators are poison until a wait for the wgmma's group.  The registers are rows of one buffer.  The wait
fills the buffer in place, so that the compiler's copies of a register get the values too.  Before the wait the result
stays a matrix, so a chain of wgmmas converts its result only once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from rooflab.bench.emulator.execute.warps import in_warps
from rooflab.bench.emulator.machine.access import WRITTEN, check_written, shared_offsets
from rooflab.bench.emulator.machine.context import LaneContext
from rooflab.bench.emulator.machine.run import CtaGroup, Fault
from rooflab.bench.emulator.tiles import mma, shared_layout
from rooflab.bench.emulator.tiles.mma import (
    WARPGROUP,
    a_from_registers,
    check_shape,
    matrix_to_registers,
    registers_to_matrix,
    truncated_wgmma,
    wgmma,
)
from rooflab.bench.emulator.tiles.shared_layout import operand_chunks, read_operand


class WgmmaShape(NamedTuple):
    """The shape, types and modifiers of a wgmma, from its opcode and its constants."""

    n: int
    d_type: str
    a_type: str
    b_type: str
    scale_a: int
    scale_b: int
    a_transposed: bool
    b_transposed: bool
    saturates: bool


def load(c: LaneContext, addresses: Any, number: int, transposed: bool, instruction: int) -> list[Any]:
    """Runs `ldmatrix`."""
    group, (offsets, used) = c.group, _rows(c, addresses, number, instruction)
    if group.run.observer is not None:
        group.run.observer.shared_read(c, used, offsets[used], 16, instruction)
    if group.written is not None:
        check_written(c, offsets[used], 16, instruction)
    return shared_layout.load_matrices(group.shared, offsets, number, transposed)


def store(c: LaneContext, addresses: Any, values: tuple[Any, ...], transposed: bool, instruction: int) -> None:
    """Runs `stmatrix`."""
    group, (offsets, used) = c.group, _rows(c, addresses, len(values), instruction)
    where = offsets[used]
    rows = shared_layout.row_values(values, c.size, transposed)
    if group.run.observer is not None:
        group.run.observer.shared_write(c, used, where, 16, instruction, rows)
    if group.written is not None:
        group.written.view("c16")[where >> 4] = WRITTEN[16]
    group.views[16][where >> 4] = rows


def _check_warps(c: LaneContext, instruction: int) -> None:
    if in_warps(c, c.lanes)[1] is not None:
        raise Fault(f"it wants whole warps of 32 threads, and the {c.size} here are not", instruction)


def _rows(
    c: LaneContext, addresses: Any, number: int, instruction: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.intp]]:
    """For each lane: the offset of its row in the group's shared memory, and whether the lane gives a row."""
    _check_warps(c, instruction)
    addresses, lane = c.vector(addresses), c.lanes & 31
    # Only the first 8 lanes for each matrix give a row; the addresses of the other lanes are not used.
    if number < 4:
        addresses = np.where(lane < 8 * number, addresses, addresses[lane == 0].repeat(32))
    offsets = np.asarray(shared_offsets(c, addresses, 16, None, instruction)).astype(np.int64)
    return offsets, np.flatnonzero(lane < 8 * number)


def multiply(
    c: LaneContext,
    shape: str,
    a_type: str,
    b_type: str,
    d_type: str,
    a: tuple[Any, ...],
    b: tuple[Any, ...],
    old: tuple[Any, ...],
    saturates: bool,
    instruction: int,
) -> list[Any]:
    """Runs `mma.sync`."""
    _check_warps(c, instruction)
    try:
        return mma.mma(shape, a_type, b_type, d_type, a, b, old, saturate=saturates, lanes=c.size)
    except ValueError as error:
        raise Fault(str(error), instruction) from None


@dataclass(eq=False)
class Accumulators:
    """The accumulators of one chain of wgmmas: one matrix for each warpgroup of a context."""

    buffer: npt.NDArray[Any]
    """The registers of all lanes, as an array (registers, lanes)."""
    matrices: list[npt.NDArray[Any]]
    d_type: str
    rows: list[npt.NDArray[Any]] = field(default_factory=list)
    in_flight: list[int] = field(default_factory=list)
    """For each warpgroup, the number of unfinished wgmma groups that write its matrix."""

    def settle(self, place: int) -> None:
        """Notes that a wgmma group has completed that writes the matrix of the warpgroup at the index `place`."""
        self.in_flight[place] -= 1
        if not self.in_flight[place]:
            self.fill(place)

    def fill(self, place: int) -> None:
        """Puts the matrix of the warpgroup at the index `place` into its registers."""
        registers = matrix_to_registers(self.matrices[place], self.d_type)
        self.buffer[:, place * WARPGROUP : (place + 1) * WARPGROUP] = registers.view(self.buffer.dtype)


@dataclass
class Warpgroup:
    """The wgmma groups of one warpgroup.  A group is a list of (accumulators, index of the warpgroup in them)."""

    open: list[tuple[Accumulators, int]] = field(default_factory=list)
    groups: list[list[tuple[Accumulators, int]]] = field(default_factory=list)
    last: Any = None
    """The race detector's record of the newest open wgmma."""
    marks: list[Any] = field(default_factory=list)
    """The race detector's record of each committed group."""


def _pieces(c: LaneContext, instruction: int) -> list[int]:
    """The warpgroups of a context.  Raises `Fault` if a warpgroup is not whole."""
    group, warpgroups = c.group, []
    for place in range(0, c.size, WARPGROUP):
        first, last = int(c.lanes[place]), int(c.lanes[min(place + WARPGROUP, c.size) - 1])
        slot, inside = divmod(first, group.lanes_per_cta)
        if last - first != WARPGROUP - 1 or inside % WARPGROUP:
            raise Fault(f"wgmma wants whole warpgroups of 128 threads, and here are {c.size}", instruction)
        warpgroups.append(slot * group.pieces_per_cta + inside // WARPGROUP)
    return warpgroups


def multiply_async(
    c: LaneContext, d: tuple[Any, ...], a: Any, b: Any, keeps: Any, shape: WgmmaShape, instruction: int
) -> list[Any]:
    """Runs `wgmma.mma_async`; returns the registers that will hold the result."""
    group, pieces = c.group, _pieces(c, instruction)
    if isinstance(keeps, np.ndarray):
        if not (keeps == keeps[0]).all():
            raise Fault("wgmma wants one scale-d for all threads", instruction)
        keeps = keeps[0]
    chain = _chain_of(group, d)
    for value in (*(a if isinstance(a, tuple) else ()), *(d if chain is None and keeps else ())):
        check_settled(c, value, instruction)
    try:
        check_shape(shape.n, shape.d_type, shape.a_type, shape.b_type, len(d))
        operands = _operands(c, a, b, shape, len(pieces), instruction)
    except ValueError as error:
        raise Fault(str(error), instruction) from None
    old = chain.matrices if chain is not None else None
    if old is None and keeps:
        stacked = np.stack([c.vector(value) for value in d])
        old = list(registers_to_matrix(stacked.view(np.int32) if shape.d_type == "s32" else stacked, shape.d_type))
    results = [
        _product(group, old[place] if keeps and old is not None else None, *operands[place], shape)
        for place in range(len(pieces))
    ]
    if chain is None or not all(chain.in_flight):
        chain = _fresh(group, results, shape, c.size)
    chain.matrices = results
    for place, piece in enumerate(pieces):
        warpgroup = group.warpgroups.setdefault(piece, Warpgroup())
        if not any(chain is item for item, _ in warpgroup.open):
            warpgroup.open.append((chain, place))
            chain.in_flight[place] += 1
    return chain.rows


def _chain_of(group: CtaGroup, d: tuple[Any, ...]) -> Accumulators | None:
    """The accumulators whose rows are the registers `d`; None if there are no such accumulators."""
    base = d[0].base if isinstance(d[0], np.ndarray) else None
    chain: Accumulators | None = group.accumulators.get(id(base))
    if chain is None or len(chain.rows) != len(d) or any(a is not b for a, b in zip(d, chain.rows, strict=True)):
        return None
    return chain


def _fresh(group: CtaGroup, results: list[Any], shape: WgmmaShape, lanes: int) -> Accumulators:
    rows = results[0].shape[-1] // (4 if shape.d_type == "f16" else 2)
    buffer = np.empty((rows, lanes), np.float32 if shape.d_type == "f32" else np.uint32)
    if group.run.checks.asynchronous:
        buffer.view(np.uint32).fill(0x7FFFFFFF)
    made = Accumulators(buffer, results, shape.d_type, list(buffer), [0] * len(results))
    # The newest chains are enough: an older chain continues from the values of its registers, once they are filled.
    if len(group.accumulators) > 64:
        settled = (place for place, chain in group.accumulators.items() if not any(chain.in_flight))
        if (oldest := next(settled, None)) is not None:
            del group.accumulators[oldest]
    group.accumulators[id(buffer)] = made
    return made


def _product(group: CtaGroup, old: Any, a: Any, b: Any, shape: WgmmaShape) -> npt.NDArray[Any]:
    if shape.a_type in ("e4m3", "e5m2") and group.run.short_accumulator:
        sign = np.float32(shape.scale_a * shape.scale_b)
        return truncated_wgmma(old, a * sign, b, shape.a_type, shape.b_type, shape.d_type)
    return wgmma(old, a, b, shape.d_type, scale_a=shape.scale_a, scale_b=shape.scale_b, saturate=shape.saturates)


def _operands(
    c: LaneContext, a: Any, b: Any, shape: WgmmaShape, count: int, instruction: int
) -> list[tuple[npt.NDArray[Any], npt.NDArray[Any]]]:
    """The matrices A (64, K) and B (N, K) of each warpgroup."""
    if isinstance(a, tuple):
        left = list(a_from_registers(a, shape.a_type, c.size))
    else:
        left = _read(c, a, 64, shape.a_type, shape.a_transposed, count, instruction)
    right = _read(c, b, shape.n, shape.b_type, shape.b_transposed, count, instruction)
    return list(zip(left, right, strict=True))


def _read(
    c: LaneContext, descriptor: Any, rows: int, kind: str, transposed: bool, count: int, instruction: int
) -> list[npt.NDArray[Any]]:
    group = c.group
    start = (c.slot or 0) * group.shared_size
    # This leaves out the padding after the CTA's own memory, because no instruction may read the padding.
    memory = group.shared[start : start + group.run.shared_limit // 16 * 16]
    matrices: dict[int, npt.NDArray[Any]] = {}
    each = [int(descriptor)] * count if isinstance(descriptor, np.generic) else list(map(int, descriptor[::WARPGROUP]))
    for place, bits in enumerate(each):
        if bits not in matrices:
            matrices[bits] = read_operand(memory, bits, rows, kind, transposed)
        if group.written is None and group.run.observer is None:
            continue
        chunks = operand_chunks(bits, rows, transposed)[0].ravel() * 16 + start
        if group.written is not None:
            check_written(c, chunks, 16, instruction)
        if group.run.observer is not None:
            lanes = c.lanes[place * WARPGROUP : (place + 1) * WARPGROUP]
            piece = int(group.pieces(lanes[:1], WARPGROUP)[0])
            warpgroup = group.warpgroups.setdefault(piece, Warpgroup())
            warps = np.arange(lanes[0] >> 5, (lanes[0] >> 5) + 4)
            warpgroup.last = group.run.observer.wgmma_read(group, warps, chunks, instruction)
    return [matrices[bits] for bits in each]


def commit(c: LaneContext, instruction: int) -> None:
    """Runs `wgmma.commit_group`."""
    for piece in _pieces(c, instruction):
        warpgroup = c.group.warpgroups.setdefault(piece, Warpgroup())
        warpgroup.groups.append(warpgroup.open)
        warpgroup.marks.append(warpgroup.last)
        warpgroup.open, warpgroup.last = [], None


def wait(c: LaneContext, newest: int, instruction: int) -> None:
    """Runs `wgmma.wait_group`: completes all groups except the last `newest` groups."""
    for piece in _pieces(c, instruction):
        warpgroup = c.group.warpgroups.setdefault(piece, Warpgroup())
        keep = max(0, len(warpgroup.groups) - newest)
        for items in warpgroup.groups[:keep]:
            for accumulators, place in items:
                accumulators.settle(place)
        marks = [mark for mark in warpgroup.marks[:keep] if mark is not None]
        warpgroup.groups, warpgroup.marks = warpgroup.groups[keep:], warpgroup.marks[keep:]
        if marks and c.group.run.observer is not None:
            c.group.run.observer.wgmma_done(c.group, np.unique(c.warps[c.group.pieces(c.lanes, 128) == piece]), marks)


def check_settled(c: LaneContext, value: Any, instruction: int) -> None:
    """Notes a race if an instruction reads an accumulator whose wgmma may still be running.

    The instruction still gets the right result, because ptxas sees such reads and waits before them (its note C7517).
    Triton 3.7 relies on this wait if `tl.dot` has `max_num_imprecise_acc`.
    """
    base = value.base if isinstance(value, np.ndarray) else None
    chain = c.group.accumulators.get(id(base)) if base is not None else None
    if chain is not None and any(chain.in_flight):
        c.group.run.register_races[instruction] = None
        for place in range(len(chain.matrices)):
            chain.fill(place)
