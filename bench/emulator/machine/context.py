"""Defines a context: lanes that run together, with their next instruction and their registers.

A lane is a thread.  Lanes are numbered across all CTAs that run together, and each CTA is padded to whole warps.
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

MAX_SEEN_STATES = 1024
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
        first_slot = int(slots[0])
        self.slot: int | None = first_slot if first_slot == int(slots[-1]) else None
        """The index in the group of the lanes' CTA; None if the lanes belong to several CTAs."""
        self.slots = slots
        self.shared_base: Any = first_slot * group.shared_size if self.slot is not None else slots * group.shared_size
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
        """Sets `grain`: 128 if the lanes form warpgroups, 32 if they form warps, else 1.  Ignores ended lanes."""
        self.grain = next((grain for grain in (128, 32) if self.group.whole(self.lanes, grain)), 1)

    def vector(self, value: Any) -> npt.NDArray[Any]:
        """Returns a value as a vector with one element per lane."""
        return np.full(self.size, value) if isinstance(value, np.generic) else value

    def lanes_under(self, guard: Any) -> npt.NDArray[np.intp]:
        """Returns the indices of the lanes with a true predicate `guard`, or of all lanes if `guard` is None."""
        return np.arange(self.size) if guard is None else np.flatnonzero(np.broadcast_to(guard, self.size))

    # Methods that generated code calls.

    def branch(self, predicate: Any, target: int, following: int) -> int:
        """Runs a branch.  Lanes with a true predicate continue at `target`, the other lanes at `following`."""
        true_count = int(np.count_nonzero(predicate))
        if true_count == self.size:
            return target
        if not true_count:
            return following
        self.children = [self.part(predicate, target), self.part(~predicate, following)]
        return SPLIT

    def many_ways(self, index: Any, targets: Sequence[int]) -> int:
        """Runs `brx.idx`: each lane continues at its own target."""
        values = np.unique(index)
        if int(values[-1]) >= len(targets):
            fault_text = f"brx.idx wants an index from 0 to {len(targets) - 1}, got {int(values[-1])}"
            raise Fault(fault_text, self.group.program.block(self.place, self.grain).end - 1)
        if len(values) == 1:
            return targets[int(values[0])]
        self.children = [self.part(index == value, targets[int(value)]) for value in values]
        return SPLIT

    def part(self, mask: npt.NDArray[np.bool_], place: int) -> LaneContext:
        """Returns a new context (group of lanes) with the lanes in `mask`.  Its next instruction is number `place`."""
        lane_indices = np.flatnonzero(mask)
        first_index, last_index = int(lane_indices[0]), int(lane_indices[-1])
        # A view where possible: a wgmma in flight then writes its accumulators here too.
        picked_lanes: Any = (
            slice(first_index, last_index + 1) if last_index - first_index + 1 == len(lane_indices) else lane_indices
        )
        live_registers = self.group.live(place)
        registers: list[Any] = [None] * len(self.registers)
        for register_index in live_registers:
            value = self.registers[register_index]
            if picked_lanes is lane_indices:
                _land(self.group, [value])
            registers[register_index] = value[picked_lanes] if isinstance(value, np.ndarray) else value
        return LaneContext(self.group, self.lanes[picked_lanes], registers, place)

    def polls(self, instruction: int, addresses: Any) -> None:
        """Records a load or atomic that may poll memory.  If it repeats the previous one, other lanes run next."""
        access_key = instruction, addresses.tobytes()
        if self._polled == access_key:
            self.steps += 1
        self._polled = access_key

    def repeats(self) -> bool:
        """Returns whether the lanes repeat an earlier state.  If so, they loop until other lanes store to memory."""
        change_count = self.group.run.changes
        if change_count != self._changes or len(self._seen) > MAX_SEEN_STATES:
            self._seen.clear()
            self._changes = change_count
        values = (self.registers[register_index] for register_index in self.group.live(self.place))
        state_hash = hash((self.place, *(None if value is None else value.tobytes() for value in values)))
        self.spins = state_hash in self._seen
        self._seen.add(state_hash)
        return self.spins

    @property
    def knows_all_changes(self) -> bool:
        """Returns whether memory has not changed since these lanes last paused.  Then they have seen all changes."""
        return self._changes == self.group.run.changes

    @property
    def pattern(self) -> bytes:
        """Returns the lane numbers as bytes, relative to the first warp, for use in a cache key.  Returns empty bytes
        if the lanes are consecutive and begin with a warp's first lane."""
        if self._pattern is None:
            first_lane = int(self.lanes[0])
            is_contiguous = not first_lane & 31 and int(self.lanes[-1]) - first_lane + 1 == self.size
            self._pattern = b"" if is_contiguous else (self.lanes - (first_lane & ~31)).tobytes()
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
        """Returns the address of the variable `name` in its state space, as the NumPy type `dtype`."""
        return np.array(self.group.run.addresses[name], dtype)[()]


def value_of(value: Any, lane: int) -> int:
    """Returns the value of one lane.  `value` is a vector, or a scalar for all lanes."""
    return int(value) if isinstance(value, np.generic) else int(value[lane])


def merged(contexts: Sequence[LaneContext]) -> LaneContext:
    """Joins contexts (groups of lanes) at the same instruction into a single context, with the lanes in order."""
    first_context = contexts[0]
    lanes = np.concatenate([context.lanes for context in contexts])
    lane_order = np.argsort(lanes, kind="stable")
    is_sorted = bool((lane_order[1:] > lane_order[:-1]).all())
    registers: list[Any] = [None] * len(first_context.registers)
    for register_index in first_context.group.live(first_context.place):
        values = [context.registers[register_index] for context in contexts]
        registers[register_index] = _joined(values, contexts, None if is_sorted else lane_order)
    return LaneContext(first_context.group, lanes if is_sorted else lanes[lane_order], registers, first_context.place)


def chain_in_flight(group: CtaGroup, value: Any) -> Any:
    """Returns the chain of unfinished wgmmas that will write the register `value`, or None if there is none."""
    base_array = value.base if isinstance(value, np.ndarray) else None
    wgmma_chain = group.accumulators.get(id(base_array)) if base_array is not None else None
    return wgmma_chain if wgmma_chain is not None and any(wgmma_chain.in_flight) else None


def _land(group: CtaGroup, values: Sequence[Any]) -> None:
    """Writes the results of unfinished wgmmas into their registers. Registers need this before they are copied, because
    a later wait does not fill the copy."""
    for chain in dict.fromkeys(chain_in_flight(group, value) for value in values):
        if chain is not None:
            chain.fill_all()


def _whole_row(group: CtaGroup, values: Sequence[Any]) -> Any:
    """Joins pieces of an accumulator register, if an unfinished wgmma will still write this register.  Each piece in
    `values` holds the values of some lanes.  Returns the whole register.  Returns None if lanes are missing, or if the
    pieces do not belong to one such register."""
    chain = chain_in_flight(group, values[0])
    if chain is None or sum(np.size(value) for value in values) != chain.buffer.shape[1]:
        return None
    buffer_start, stride = chain.buffer.ctypes.data, chain.buffer.strides[0]
    row_numbers = {
        (value.ctypes.data - buffer_start) // stride for value in values if getattr(value, "base", None) is chain.buffer
    }
    is_same_row = len(row_numbers) == 1 and all(getattr(value, "base", None) is chain.buffer for value in values)
    return chain.rows[row_numbers.pop()] if is_same_row else None


def _joined(values: list[Any], contexts: Sequence[LaneContext], order: Any) -> Any:
    cta_group = contexts[0].group
    if cta_group.accumulators:
        if (accumulator_row := _whole_row(cta_group, values)) is not None:
            return accumulator_row
        _land(cta_group, values)
    first_value = next((value for value in values if value is not None), None)
    if first_value is None:
        return None
    # A register that some path does not write is poison; a compiler may copy poison and discard it by a select.
    values = [np.array(-1).astype(first_value.dtype)[()] if value is None else value for value in values]
    if all(isinstance(value, np.generic) for value in values):
        first_scalar = values[0]
        # Compares bits, because NaN is not equal to itself.
        if all(value.tobytes() == first_scalar.tobytes() for value in values[1:]):
            return first_scalar
    joined_values = np.concatenate(
        [
            np.full(context.size, value) if isinstance(value, np.generic) else value
            for value, context in zip(values, contexts, strict=True)
        ]
    )
    return joined_values if order is None else joined_values[order]
