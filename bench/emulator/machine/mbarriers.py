"""Implements mbarriers: the arrivals and bytes that a phase waits for (PTX ISA 8.7, section 9.7.13.15).

The offset in shared memory identifies an mbarrier.  The emulator does not use the mbarrier's eight bytes there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from rooflab.bench.emulator.machine.access import shared_offsets
from rooflab.bench.emulator.machine.context import LaneContext
from rooflab.bench.emulator.machine.run import CtaGroup, Fault, Lanes

MAX_PENDING_BYTES = (1 << 20) - 1
"""The largest tx-count (pending bytes) of an mbarrier."""
BarrierLanes = tuple[int, Lanes]
"""An mbarrier's offset in shared memory, and the indices in the context of the lanes that address the mbarrier."""
Wait = tuple[int, int]
"""An mbarrier's offset in shared memory, and the parity of the phase that a lane waits for."""


@dataclass
class _State:
    count: int
    """The number of arrivals that complete a phase."""
    pending: int
    bytes: int = 0
    phase: int = 0
    """The number of completed phases."""


class MBarriers:
    """Holds the mbarriers of the CTAs that run together."""

    def __init__(self, group: CtaGroup):
        self._group = group
        self._states: dict[int, _State] = {}

    def lots(self, context: LaneContext, addresses: Any, mask: Any, instruction: int) -> list[BarrierLanes]:
        """Groups the lanes in `mask` by the mbarrier at their address.  Returns pairs `(mbarrier_offset, lanes)`."""
        lanes = context.lanes_under(mask)
        if not len(lanes):
            return []
        active_lanes = None if len(lanes) == context.size else lanes
        lane_addresses = addresses if active_lanes is None or isinstance(addresses, np.generic) else addresses[lanes]
        lane_offsets = shared_offsets(context, lane_addresses, 8, active_lanes, instruction)
        if isinstance(lane_offsets, np.generic | int):
            return [(int(lane_offsets), lanes)]
        barriers, barrier_index = np.unique(lane_offsets, return_inverse=True)
        return [(int(mbar_offset), lanes[barrier_index == bar_id]) for bar_id, mbar_offset in enumerate(barriers)]

    def init(self, context: LaneContext, addresses: Any, counts: Any, mask: Any, instruction: int) -> None:
        """Runs `mbarrier.init`."""
        for mbar_offset, lanes in self.lots(context, addresses, mask, instruction):
            count = _total(counts, lanes[:1])
            if not 0 < count < 1 << 20:
                raise Fault(f"mbarrier.init wants a count from 1 to 1048575, got {count}", instruction)
            self._states[mbar_offset] = _State(count, count)
            self._made(context, mbar_offset, lanes, instruction, "mbarrier_init")
            if self._group.written is not None:
                self._group.written[mbar_offset : mbar_offset + 8] = True

    def inval(self, context: LaneContext, addresses: Any, mask: Any, instruction: int) -> None:
        """Runs `mbarrier.inval`."""
        for mbar_offset, lanes in self.lots(context, addresses, mask, instruction):
            self._state(mbar_offset, instruction)
            del self._states[mbar_offset]
            self._made(context, mbar_offset, lanes, instruction, "mbarrier_inval")

    def arrive(
        self,
        context: LaneContext,
        addresses: Any,
        count: Any,
        expect: Any,
        mask: Any,
        instruction: int,
        *,
        drop: bool,
        may_complete: bool,
    ) -> Any:
        """Runs `mbarrier.arrive`.  Adds `expect` pending bytes first.  With `drop`, later phases need fewer arrivals.

        Returns each lane's phase number as its token.  Raises `Fault` if an arrival with `.noComplete` ends a phase."""
        barrier_lanes = self.lots(context, addresses, mask, instruction)
        phase_tokens = np.zeros(context.size, np.uint64)
        for mbar_offset, lanes in barrier_lanes:
            state, n_arrivals = self._state(mbar_offset, instruction), _total(count, lanes)
            phase_tokens[lanes] = state.phase
            self._signal(context, mbar_offset, lanes, instruction)
            if expect is not None:
                self._expect(mbar_offset, _total(expect, lanes), instruction)
            if drop:
                if n_arrivals > state.count:
                    text = f"{n_arrivals} arrivals are dropped of the {state.count} of an mbarrier"
                    raise Fault(text, instruction, rule="mbarrier-phase")
                state.count -= n_arrivals
            self.arrived(mbar_offset, n_arrivals, instruction)
            if not may_complete and state.phase != phase_tokens[lanes[0]]:
                text = "an arrival with .noComplete ends the phase of its mbarrier"
                raise Fault(text, instruction, rule="mbarrier-phase")
        return phase_tokens if len(barrier_lanes) > 1 else phase_tokens[barrier_lanes[0][1][0] if barrier_lanes else 0]

    def expect(self, context: LaneContext, addresses: Any, size: Any, mask: Any, instruction: int) -> None:
        """Runs `mbarrier.expect_tx`."""
        for mbar_offset, lanes in self.lots(context, addresses, mask, instruction):
            self._use(context, mbar_offset, lanes, instruction)
            self._arrive(context, mbar_offset, lanes, instruction, "expect")
            self._expect(mbar_offset, _total(size, lanes), instruction)
            self._settle(mbar_offset, self._state(mbar_offset, instruction))

    def complete(self, context: LaneContext, addresses: Any, size: Any, mask: Any, instruction: int) -> None:
        """Runs `mbarrier.complete_tx`."""
        for mbar_offset, lanes in self.lots(context, addresses, mask, instruction):
            self._arrive(context, mbar_offset, lanes, instruction)
            signal = lambda races, slot, warps, key=mbar_offset: races.signal_inits(slot, warps, key)
            self._watch(context, signal, lanes)
            self.complete_bytes(mbar_offset, _total(size, lanes), instruction)

    def complete_bytes(self, place: int, size: int, instruction: int) -> None:
        """Subtracts the `size` bytes of a finished transfer from the pending bytes of the mbarrier."""
        barrier_state = self._state(place, instruction)
        barrier_state.bytes -= size
        if barrier_state.bytes < -MAX_PENDING_BYTES:
            text = "an mbarrier was told of more bytes than its count holds"
            raise Fault(text, instruction, rule="mbarrier-phase")
        self._settle(place, barrier_state)

    def _expect(self, place: int, size: int, instruction: int) -> None:
        state = self._state(place, instruction)
        state.bytes += size
        if state.bytes > MAX_PENDING_BYTES:
            text = f"an mbarrier expects {state.bytes} bytes, more than its {MAX_PENDING_BYTES}"
            raise Fault(text, instruction, rule="mbarrier-phase")

    def arrived(self, place: int, count: int, instruction: int) -> None:
        """Counts `count` arrivals at an mbarrier, by threads or by finished copies."""
        state = self._state(place, instruction)
        if count > state.pending:
            text = f"{count} arrivals at an mbarrier that expects {state.pending} more in its phase"
            raise Fault(text, instruction, rule="mbarrier-phase")
        state.pending -= count
        self._settle(place, state)

    def more_pending(self, place: int, count: int, instruction: int) -> None:
        """Makes the current phase wait for `count` more arrivals."""
        self._state(place, instruction).pending += count

    def _settle(self, place: int, state: _State) -> None:
        if not state.pending and not state.bytes:
            state.phase += 1
            state.pending = state.count
            if self._group.races is not None:
                self._group.races.complete(place // self._group.race_bytes, place)

    # Reports to the race detector.

    def _watch(self, context: LaneContext, tell: Any, lanes: Lanes) -> None:
        self._group.each_slot(context.warps[lanes], tell)

    def _made(self, context: LaneContext, place: int, lanes: Lanes, instruction: int, what: str) -> None:
        race_reporter = lambda races, slot, warps: getattr(races, what)(slot, int(warps[0]), place, instruction)
        self._watch(context, race_reporter, lanes)

    def _use(self, context: LaneContext, place: int, lanes: Lanes, instruction: int) -> None:
        self._watch(context, lambda races, slot, warps: races.mbarrier_use(slot, warps, place, instruction), lanes)

    def _signal(self, context: LaneContext, place: int, lanes: Lanes, instruction: int) -> None:
        self._use(context, place, lanes, instruction)
        self._arrive(context, place, lanes, instruction)
        self._watch(context, lambda races, slot, warps: races.signal(slot, warps, place), lanes)
        if self._group.lane_stores is not None:
            self._group.lane_stores.release(context.lanes[lanes], instruction)

    def _arrive(self, context: LaneContext, place: int, lanes: Lanes, instruction: int, kind: str = "arrival") -> None:
        self._watch(context, lambda races, slot, warps: races.arrive(slot, warps, place, instruction, kind), lanes)

    def acquired(self, context: LaneContext, place: int, lanes: Lanes, instruction: int) -> None:
        """Reports to the race detector that lanes have observed the end of a phase."""
        self._use(context, place, lanes, instruction)
        self._watch(context, lambda races, slot, warps: races.wait(slot, warps, place), lanes)
        self._watch(context, lambda races, slot, warps: races.passed(slot, warps, place, instruction), lanes)

    def _state(self, place: int, instruction: int) -> _State:
        if place not in self._states:
            address = place % max(1, self._group.shared_size)
            text = f"shared memory at 0x{address:x} holds no mbarrier that was initialised"
            raise Fault(text, instruction, rule="mbarrier-phase")
        return self._states[place]

    def is_complete(self, place: int, parity: int, instruction: int) -> bool:
        """Returns whether the phase with this parity is over."""
        return self._state(place, instruction).phase & 1 != parity & 1

    def any_complete(self, waits: list[Wait]) -> bool:
        """Returns whether one of the awaited phases is over, or one of the mbarriers no longer exists."""
        return any(offset not in self._states or self._states[offset].phase & 1 != parity for offset, parity in waits)

    def describe(self, waits: list[Wait]) -> str:
        """Describes the awaited phases in words."""
        phase_texts = []
        for mbar_offset, parity in waits:
            state = self._states.get(mbar_offset)
            address = mbar_offset % max(1, self._group.shared_size)
            if state is None:
                phase_texts.append(f"the mbarrier at 0x{address:x}, which is gone")
            else:
                phase_texts.append(
                    f"phase {parity} of the mbarrier at 0x{address:x} (in phase {state.phase & 1}, {state.pending} of"
                    f" {state.count} arrivals and {state.bytes} bytes missing)"
                )
        return " and ".join(phase_texts)


def _total(value: Any, lanes: Lanes) -> int:
    if isinstance(value, int | np.generic):
        return int(value) * len(lanes)
    return int(value[lanes].sum(dtype=np.int64))
