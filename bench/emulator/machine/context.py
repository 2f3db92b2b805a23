"""Lanes that run together: their next instruction and their registers.

A lane is a thread.  Lanes are numbered through all CTAs that run at once, each CTA padded to whole warps.
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
    """Lanes at the same instruction.  A register is a vector of `size` values, or a scalar that holds for all lanes."""

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
        """Sets `grain`: 128 if the lanes are whole warpgroups, 32 if whole warps, else 1.  Ended lanes do not count."""
        self.grain = next((grain for grain in (128, 32) if self.group.whole(self.lanes, grain)), 1)

    def vector(self, value: Any) -> npt.NDArray[Any]:
        """A value as a vector with one element per lane."""
        return np.full(self.size, value) if isinstance(value, np.generic) else value

    def lanes_under(self, guard: Any) -> npt.NDArray[np.intp]:
        """The indices in the context of the lanes whose predicate holds; all lanes if the predicate is None."""
        return np.arange(self.size) if guard is None else np.flatnonzero(np.broadcast_to(guard, self.size))

    # Methods that generated code calls.

    def branch(self, predicate: Any, target: int, following: int) -> int:
        """Lanes whose predicate holds go on at `target`, other lanes at `following`."""
        taken = int(np.count_nonzero(predicate))
        if taken == self.size:
            return target
        if not taken:
            return following
        self.children = [self.part(predicate, target), self.part(~predicate, following)]
        return SPLIT

    def many_ways(self, index: Any, targets: Sequence[int]) -> int:
        """Runs `brx.idx`: each lane goes on at its own target."""
        values = np.unique(index)
        if int(values[-1]) >= len(targets):
            text = f"brx.idx wants an index from 0 to {len(targets) - 1}, got {int(values[-1])}"
            raise Fault(text, self.group.program.block(self.place, self.grain).end - 1)
        if len(values) == 1:
            return targets[int(values[0])]
        self.children = [self.part(index == value, targets[int(value)]) for value in values]
        return SPLIT

    def part(self, mask: npt.NDArray[np.bool_], place: int) -> LaneContext:
        """Makes a new context of the lanes in `mask`, at the instruction `place`."""
        chosen = np.flatnonzero(mask)
        first, last = int(chosen[0]), int(chosen[-1])
        # A view where possible: a wgmma in flight then writes its accumulators here too.
        pick: Any = slice(first, last + 1) if last - first + 1 == len(chosen) else chosen
        live = self.group.live(place)
        registers: list[Any] = [None] * len(self.registers)
        for index in live:
            value = self.registers[index]
            if pick is chosen:
                _land(self.group, [value])
            registers[index] = value[pick] if isinstance(value, np.ndarray) else value
        return LaneContext(self.group, self.lanes[pick], registers, place)

    def polls(self, instruction: int, addresses: Any) -> None:
        """Notes a load or atomic that may be polling: if lanes repeat the access, other contexts run next."""
        access = instruction, addresses.tobytes()
        if self._polled == access:
            self.steps += 1
        self._polled = access

    def repeats(self) -> bool:
        """Whether the state after a turn equals an earlier state, so that only a store can end the context's loop."""
        changes = self.group.run.changes
        if changes != self._changes or len(self._seen) > MOST_SEEN:
            self._seen.clear()
            self._changes = changes
        values = (self.registers[index] for index in self.group.live(self.place))
        now = hash((self.place, *(None if value is None else value.tobytes() for value in values)))
        self.spins = now in self._seen
        self._seen.add(now)
        return self.spins

    @property
    def knows_all_changes(self) -> bool:
        """Whether memory is unchanged since the end of the context's last turn."""
        return self._changes == self.group.run.changes

    @property
    def pattern(self) -> bytes:
        """The numbers of the context's lanes, counted from its first warp; empty for adjacent whole warps."""
        if self._pattern is None:
            first = int(self.lanes[0])
            whole = not first & 31 and int(self.lanes[-1]) - first + 1 == self.size
            self._pattern = b"" if whole else (self.lanes - (first & ~31)).tobytes()
        return self._pattern

    def special(self, name: str) -> Any:
        """The value of a special register."""
        if name not in self._specials:
            if name.startswith(("clock", "globaltimer")):
                self._seen.clear()  # the clock may end a loop that reads it
                return self.group.time(name)
            self._specials[name] = self.group.special(name, self.lanes, self.slots)
        return self._specials[name]

    def address(self, name: str, dtype: str) -> Any:
        """The address of a variable in the variable's space."""
        return np.array(self.group.run.addresses[name], dtype)[()]


def value_of(value: Any, lane: int) -> int:
    """The value of one lane, where `value` is a vector or a scalar for all lanes."""
    return int(value) if isinstance(value, np.generic) else int(value[lane])


def merged(contexts: Sequence[LaneContext]) -> LaneContext:
    """Joins contexts that are at the same instruction into a single context, with the lanes in order."""
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
    """The chain of wgmmas in flight that writes the register `value`, or None."""
    base = value.base if isinstance(value, np.ndarray) else None
    chain = group.accumulators.get(id(base)) if base is not None else None
    return chain if chain is not None and any(chain.in_flight) else None


def _land(group: CtaGroup, values: Sequence[Any]) -> None:
    """Fills accumulators before they are copied, because a wgmma in flight does not write the copies."""
    for chain in {id(chain): chain for value in values if (chain := _in_flight(group, value)) is not None}.values():
        for place in range(len(chain.matrices)):
            chain.fill(place)


def _whole_row(group: CtaGroup, values: Sequence[Any]) -> Any:
    """The accumulator whose registers are `values`, in all its lanes; None if there is no such accumulator."""
    chain = _in_flight(group, values[0])
    if chain is None or sum(np.size(value) for value in values) != chain.buffer.shape[1]:
        return None
    start, step = chain.buffer.ctypes.data, chain.buffer.strides[0]
    rows = {(value.ctypes.data - start) // step for value in values if getattr(value, "base", None) is chain.buffer}
    whole = len(rows) == 1 and all(getattr(value, "base", None) is chain.buffer for value in values)
    return chain.rows[rows.pop()] if whole else None


def _joined(values: list[Any], contexts: Sequence[LaneContext], order: Any) -> Any:
    group = contexts[0].group
    if group.accumulators:
        if (row := _whole_row(group, values)) is not None:
            return row
        _land(group, values)
    written = next((value for value in values if value is not None), None)
    if written is None:
        return None
    # A register that some path does not write is poison; a compiler may copy poison and discard it by a select.
    values = [np.array(-1).astype(written.dtype)[()] if value is None else value for value in values]
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
