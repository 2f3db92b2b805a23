"""mbarriers: arrivals and bytes that a phase waits for (PTX ISA 8.7, section 9.7.13.15).

An mbarrier is known by its place in the group's shared memory; the eight bytes there hold nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from rooflab.bench.ptx.machine.context import Context
from rooflab.bench.ptx.machine.errors import Fault
from rooflab.bench.ptx.machine.group import Group
from rooflab.bench.ptx.machine.shared_access import shared_offsets

MOST_BYTES = (1 << 20) - 1
"""Largest tx-count."""


@dataclass
class _State:
    count: int
    """Arrivals of a phase."""
    pending: int
    bytes: int = 0
    phase: int = 0
    """Phases that are complete."""


class MBarriers:
    """The mbarriers of a group."""

    def __init__(self, group: Group):
        self._group = group
        self._states: dict[int, _State] = {}

    def places(self, context: Context, addresses: Any, mask: Any, instruction: int) -> list[tuple[int, int]]:
        """Each mbarrier that the lanes of `mask` address, and how many of them do."""
        active = None
        if mask is not None:
            if isinstance(mask, np.bool_):
                if not mask:
                    return []
            else:
                active = np.flatnonzero(mask)
                if not len(active):
                    return []
                addresses = addresses if isinstance(addresses, np.generic) else addresses[active]
        lanes = context.size if active is None else len(active)
        offsets = shared_offsets(context, addresses, 8, active, instruction)
        if isinstance(offsets, np.generic | int):
            return [(int(offsets), lanes)]
        places, counts = np.unique(offsets, return_counts=True)
        return [(int(place), int(count)) for place, count in zip(places, counts, strict=True)]

    def init(self, context: Context, addresses: Any, counts: Any, mask: Any, instruction: int) -> None:
        """`mbarrier.init`."""
        for place, _ in self.places(context, addresses, mask, instruction):
            count = int(counts) if isinstance(counts, np.generic) else int(counts[0])
            if not 0 < count < 1 << 20:
                raise Fault(f"mbarrier.init wants a count from 1 to 1048575, got {count}", instruction)
            self._states[place] = _State(count, count)
            self._watch(
                context,
                lambda races, slot, warps, at=place: races.mbarrier_init(slot, int(warps[0]), at, instruction),
                mask,
            )
            if self._group.written is not None:
                self._group.written[place : place + 8] = True

    def inval(self, context: Context, addresses: Any, mask: Any, instruction: int) -> None:
        """`mbarrier.inval`."""
        for place, _ in self.places(context, addresses, mask, instruction):
            self._state(place, instruction)
            del self._states[place]
            self._watch(
                context,
                lambda races, slot, warps, at=place: races.mbarrier_inval(slot, int(warps[0]), at, instruction),
                mask,
            )

    def arrive(self, context: Context, addresses: Any, count: Any, expect: Any, mask: Any, instruction: int) -> Any:
        """`mbarrier.arrive`, with `expect` bytes announced before; the phase's token."""
        token = np.uint64(0)
        for place, lanes in self.places(context, addresses, mask, instruction):
            state = self._state(place, instruction)
            token = np.uint64(state.phase)
            self._signal(context, place, mask, instruction)
            if expect is not None:
                self._expect(place, lanes * _first(expect), instruction)
            self._arrived(place, lanes * _first(count), instruction)
        return token

    def expect(self, context: Context, addresses: Any, size: Any, mask: Any, instruction: int) -> None:
        """`mbarrier.expect_tx`."""
        for place, lanes in self.places(context, addresses, mask, instruction):
            self._use(context, place, mask, instruction)
            self._expect(place, lanes * _first(size), instruction)

    def drop(self, context: Context, addresses: Any, count: Any, mask: Any, instruction: int) -> Any:
        """`mbarrier.arrive_drop`."""
        token = np.uint64(0)
        for place, lanes in self.places(context, addresses, mask, instruction):
            state = self._state(place, instruction)
            token = np.uint64(state.phase)
            self._signal(context, place, mask, instruction)
            state.count -= lanes * _first(count)
            self._arrived(place, lanes * _first(count), instruction)
        return token

    def complete_bytes(self, place: int, size: int, instruction: int) -> None:
        """A transfer has brought `size` bytes."""
        state = self._state(place, instruction)
        state.bytes -= size
        if state.bytes < -MOST_BYTES:
            raise Fault("an mbarrier was told of more bytes than its count holds", instruction)
        self._settle(place, state)

    def _expect(self, place: int, size: int, instruction: int) -> None:
        state = self._state(place, instruction)
        state.bytes += size
        if state.bytes > MOST_BYTES:
            raise Fault(f"an mbarrier expects {state.bytes} bytes, more than its {MOST_BYTES}", instruction)

    def _arrived(self, place: int, count: int, instruction: int) -> None:
        state = self._state(place, instruction)
        if count > state.pending:
            raise Fault(f"{count} arrivals at an mbarrier that expects {state.pending} more in its phase", instruction)
        state.pending -= count
        self._settle(place, state)

    def async_arrive(self, place: int, count: int, instruction: int) -> None:
        """Arrivals that come with the end of copies."""
        self._arrived(place, count, instruction)

    def more_pending(self, place: int, count: int, instruction: int) -> None:
        """The phase waits for more arrivals than the mbarrier was made for."""
        self._state(place, instruction).pending += count

    def _settle(self, place: int, state: _State) -> None:
        if not state.pending and not state.bytes:
            state.phase += 1
            state.pending = state.count
            if self._group.races is not None:
                self._group.races.complete(place // self._group.shared_size, place)

    # What the race detector is told.

    def _watch(self, context: Context, tell: Any, mask: Any = None) -> None:
        races, per_cta = self._group.races, self._group.lanes_per_cta // 32
        if races is None:
            return
        warps = context.warps if mask is None else context.warps[np.broadcast_to(mask, context.size)]
        for slot in np.unique(warps // per_cta):
            tell(races, int(slot), np.unique(warps[warps // per_cta == slot]) - int(slot) * per_cta)

    def _use(self, context: Context, place: int, mask: Any, instruction: int) -> None:
        self._watch(context, lambda races, slot, warps: races.mbarrier_use(slot, warps, place, instruction), mask)

    def _signal(self, context: Context, place: int, mask: Any, instruction: int) -> None:
        def tell(races: Any, slot: int, warps: Any) -> None:
            races.mbarrier_use(slot, warps, place, instruction)
            races.signal(slot, warps, place)

        self._watch(context, tell, mask)

    def acquired(self, context: Context, places: list[int], mask: Any, instruction: int) -> None:
        """Lanes have seen a phase end."""
        for place in places:

            def tell(races: Any, slot: int, warps: Any, at: int = place) -> None:
                races.mbarrier_use(slot, warps, at, instruction)
                races.wait(slot, warps, at)

            self._watch(context, tell, mask)

    def _state(self, place: int, instruction: int) -> _State:
        if place not in self._states:
            inside = place % max(1, self._group.shared_size)
            raise Fault(f"shared memory at 0x{inside:x} holds no mbarrier that was initialised", instruction)
        return self._states[place]

    def is_complete(self, place: int, parity: int, instruction: int) -> bool:
        """Whether the phase of this parity is over."""
        return self._state(place, instruction).phase & 1 != parity & 1

    def all_complete(self, places: list[int], parity: int) -> bool:
        """Whether the phases that somebody waits for are over, or one of the mbarriers is gone."""
        return all(place not in self._states or self._states[place].phase & 1 != parity for place in places)

    def describe(self, places: list[int], parity: int) -> str:
        """What they wait for, in words."""
        texts = []
        for place in places:
            state = self._states.get(place)
            inside = place % max(1, self._group.shared_size)
            if state is None:
                texts.append(f"the mbarrier at 0x{inside:x}, which is gone")
            else:
                texts.append(
                    f"phase {parity} of the mbarrier at 0x{inside:x} (in phase {state.phase & 1}, {state.pending} of"
                    f" {state.count} arrivals and {state.bytes} bytes missing)"
                )
        return " and ".join(texts)


def _first(value: Any) -> int:
    if isinstance(value, int | np.generic):
        return int(value)
    return int(value[0])
