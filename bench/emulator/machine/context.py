"""Defines a context: lanes that run together, with their next instruction and their registers.

A lane is a thread.  Lanes are numbered across all CTAs that run at once, and each CTA is padded to whole warps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from rooflab.bench.emulator.machine.run import CtaGroup, Fault, Lanes

PARKED = -1
"""The result of a basic block's function if its lanes wait."""
SPLIT = -2
"""The result of a basic block's function if its lanes took several branches."""

MOST_SEEN = 1024
"""The number of turns that `LaneContext.repeats` remembers before it forgets all of them."""


class LaneContext:
    """Holds lanes at the same instruction.  A register is a vector with a value per lane, or a scalar for all lanes."""

    def __init__(self, group: CtaGroup, lanes: Lanes, registers: list[Any], place: int):
        self.group = group
        self.lanes = lanes
        self.size = len(lanes)
        self.registers = registers
        self.place = place
        """The number of the next instruction."""
        self.steps = 0
        self.children: list[LaneContext] = []
        """After `SPLIT`, the contexts that replace this context."""
        slots = lanes // group.lanes_per_cta
        first = int(slots[0])
        self.slot: int | None = first if first == int(slots[-1]) else None
        """The index in the group of the lanes' CTA; None if the lanes belong to several CTAs."""
        self.slots = slots
        self.shared_base: Any = first * group.shared_size if self.slot is not None else slots * group.shared_size
        """The offset of the CTA's shared memory in the group's shared memory."""
        self.warps = lanes >> 5
        """The warp of each lane; warps are numbered through the group of CTAs."""
        self.regrain()
        self.warp_places: npt.NDArray[np.intp] | None = None
        """For `execute.warps`: each lane's index in its warp, or None if the lanes are whole warps in order."""
        self.warps_known = False
        self._polled: tuple[int, bytes] | None = None
        self.carry: Any = np.bool_(False)
        """The carry flag of `add.cc` and similar instructions."""
        self._specials: dict[str, Any] = {}
        self._seen: set[int] = set()
        """Hashes of the context's state after earlier turns; see `repeats`."""
        self._changes = 0
        self.spins = False
        """Whether the context's state after the last turn equals an earlier state."""
        self._pattern: bytes | None = None

    def regrain(self) -> None:
        """Sets `grain`: 128 for complete warpgroups, 32 for complete warps, else 1.  Ended lanes do not count."""
        self.grain = next((grain for grain in (128, 32) if self.group.whole(self.lanes, grain)), 1)

    def vector(self, value: Any) -> npt.NDArray[Any]:
        """Returns a value as a vector with one element per lane."""
        return np.full(self.size, value) if isinstance(value, np.generic) else value

    def lanes_under(self, guard: Any) -> npt.NDArray[np.intp]:
        """Returns the indices of the lanes with a true predicate, or of all lanes if the predicate is None."""
        return np.arange(self.size) if guard is None else np.flatnonzero(np.broadcast_to(guard, self.size))

    # Methods that generated code calls.

    def branch(self, predicate: Any, target: int, following: int) -> int:
        """Runs a branch.  Lanes with a true predicate continue at `target`, other lanes at `following`."""
        taken_count = int(np.count_nonzero(predicate))
        if taken_count == self.size:
            return target
        if not taken_count:
            return following
        self.children = [self.part(predicate, target), self.part(~predicate, following)]
        return SPLIT

    def many_ways(self, index: Any, targets: Sequence[int]) -> int:
        """Runs `brx.idx`: each lane continues at its own target."""
        values = np.unique(index)
        if int(values[-1]) >= len(targets):
            text = f"brx.idx wants an index from 0 to {len(targets) - 1}, got {int(values[-1])}"
            raise Fault(text, self.group.program.block(self.place, self.grain).end - 1)
        if len(values) == 1:
            return targets[int(values[0])]
        self.children = [self.part(index == value, targets[int(value)]) for value in values]
        return SPLIT

    def part(self, mask: npt.NDArray[np.bool_], place: int) -> LaneContext:
        """Makes a new context with the lanes in `mask`, at the instruction number `place`."""
        lane_indices = np.flatnonzero(mask)
        first, last = int(lane_indices[0]), int(lane_indices[-1])
        # A view where possible: a wgmma in flight then writes its accumulators here too.
        pick: Any = slice(first, last + 1) if last - first + 1 == len(lane_indices) else lane_indices
        live = self.group.live(place)
        registers: list[Any] = [None] * len(self.registers)
        for index in live:
            value = self.registers[index]
            if pick is lane_indices:
                _land(self.group, [value])
            registers[index] = value[pick] if isinstance(value, np.ndarray) else value
        return LaneContext(self.group, self.lanes[pick], registers, place)

    def polls(self, instruction: int, addresses: Any) -> None:
        """Records a load or atomic that may be polling.  If the lanes repeat the access, other contexts run next."""
        access = instruction, addresses.tobytes()
        if self._polled == access:
            self.steps += 1
        self._polled = access

    def repeats(self) -> bool:
        """Returns whether the lanes are in a loop that only a store can end: their state equals an earlier state."""
        changes = self.group.run.changes
        if changes != self._changes or len(self._seen) > MOST_SEEN:
            self._seen.clear()
            self._changes = changes
        values = (self.registers[index] for index in self.group.live(self.place))
        state_hash = hash((self.place, *(None if value is None else value.tobytes() for value in values)))
        self.spins = state_hash in self._seen
        self._seen.add(state_hash)
        return self.spins

    @property
    def knows_all_changes(self) -> bool:
        """Returns whether memory is unchanged since this context last stopped running."""
        return self._changes == self.group.run.changes

    @property
    def pattern(self) -> bytes:
        """Returns the lane numbers, counted from the first warp, as bytes; empty for complete warps in sequence."""
        if self._pattern is None:
            first = int(self.lanes[0])
            is_contiguous = not first & 31 and int(self.lanes[-1]) - first + 1 == self.size
            self._pattern = b"" if is_contiguous else (self.lanes - (first & ~31)).tobytes()
        return self._pattern

    def special(self, name: str) -> Any:
        """Returns the value of a special register, such as `tid.x`."""
        if name not in self._specials:
            if name.startswith(("clock", "globaltimer")):
                self._seen.clear()  # the clock may end a loop that reads it
                return self.group.time(name)
            self._specials[name] = self.group.special(name, self.lanes, self.slots)
        return self._specials[name]

    def address(self, name: str, dtype: str) -> Any:
        """Returns the address of a variable in its state space."""
        return np.array(self.group.run.addresses[name], dtype)[()]


def value_of(value: Any, lane: int) -> int:
    """Returns the value of one lane.  `value` is a vector, or a scalar for all lanes."""
    return int(value) if isinstance(value, np.generic) else int(value[lane])


def merged(contexts: Sequence[LaneContext]) -> LaneContext:
    """Joins contexts at the same instruction into a single context, with the lanes in order."""
    first = contexts[0]
    lanes = np.concatenate([context.lanes for context in contexts])
    order = np.argsort(lanes, kind="stable")
    sorted_already = bool((order[1:] > order[:-1]).all())
    registers: list[Any] = [None] * len(first.registers)
    for index in first.group.live(first.place):
        values = [context.registers[index] for context in contexts]
        registers[index] = _joined(values, contexts, None if sorted_already else order)
    return LaneContext(first.group, lanes if sorted_already else lanes[order], registers, first.place)


def _in_flight(group: CtaGroup, value: Any) -> Any:
    """Returns the chain of unfinished wgmmas that will write the register `value`, or None."""
    base = value.base if isinstance(value, np.ndarray) else None
    chain = group.accumulators.get(id(base)) if base is not None else None
    return chain if chain is not None and any(chain.in_flight) else None


def _land(group: CtaGroup, values: Sequence[Any]) -> None:
    """Fills accumulators before they are copied, because an unfinished wgmma does not write the copies."""
    for chain in {id(chain): chain for value in values if (chain := _in_flight(group, value)) is not None}.values():
        for index in range(len(chain.matrices)):
            chain.fill(index)


def _whole_row(group: CtaGroup, values: Sequence[Any]) -> Any:
    """Returns the accumulator row that consists of the registers `values`, or None if there is no such row."""
    chain = _in_flight(group, values[0])
    if chain is None or sum(np.size(value) for value in values) != chain.buffer.shape[1]:
        return None
    start, step = chain.buffer.ctypes.data, chain.buffer.strides[0]
    rows = {(value.ctypes.data - start) // step for value in values if getattr(value, "base", None) is chain.buffer}
    same_row = len(rows) == 1 and all(getattr(value, "base", None) is chain.buffer for value in values)
    return chain.rows[rows.pop()] if same_row else None


def _joined(values: list[Any], contexts: Sequence[LaneContext], order: Any) -> Any:
    group = contexts[0].group
    if group.accumulators:
        if (row := _whole_row(group, values)) is not None:
            return row
        _land(group, values)
    first_value = next((value for value in values if value is not None), None)
    if first_value is None:
        return None
    # A register that some path does not write is poison; a compiler may copy poison and discard it by a select.
    values = [np.array(-1).astype(first_value.dtype)[()] if value is None else value for value in values]
    if all(isinstance(value, np.generic) for value in values):
        head = values[0]
        # Compares bits, because NaN is not equal to itself.
        if all(value.tobytes() == head.tobytes() for value in values[1:]):
            return head
    joined = np.concatenate(
        [
            np.full(context.size, value) if isinstance(value, np.generic) else value
            for value, context in zip(values, contexts, strict=True)
        ]
    )
    return joined if order is None else joined[order]
