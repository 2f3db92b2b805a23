"""Implements barriers of CTAs (`bar`, `barrier`) and clusters, and `setmaxnreg` (PTX ISA 8.7, sections 9.7.13, 19)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from rooflab.bench.emulator.machine.context import PARKED, LaneContext
from rooflab.bench.emulator.machine.run import CtaGroup, Fault, Lanes
from rooflab.bench.emulator.races.shared_races import SharedRaces

BARRIERS = 16
"""The number of barriers of a CTA."""
_CLUSTER_KEY = "cluster"


def _order_all(group: CtaGroup, warps: Lanes) -> None:
    """Tells the race detector that all running threads met at a barrier. `warps` lists the warp of each thread,
    sorted."""
    if group.races is None:
        return
    distinct_warps = warps[np.flatnonzero(np.diff(warps, prepend=-1))]
    warps_per_cta = group.lanes_per_cta // 32
    ctas = distinct_warps // warps_per_cta
    if not group.run.has_clusters and len(distinct_warps) == (ctas[-1] - ctas[0] + 1) * warps_per_cta:
        group.races.barrier(np.arange(ctas[0], ctas[-1] + 1), distinct_warps[:warps_per_cta] % warps_per_cta)
        return
    for cta in np.unique(ctas):
        group.races.barrier(group.race_slot(int(cta)), distinct_warps[ctas == cta] % group.race_warps)


def _meet(group: CtaGroup, warps: Lanes, instruction: int, together: int, gone: npt.NDArray[np.bool_]) -> None:
    """Records that `warps` pass a barrier that is meant for all threads of a CTA or a cluster.  Records a fault if
    another warp passed this barrier earlier and has ended since.  That warp cannot arrive again, and CUDA C++ requires
    all threads at the barrier.

    `together` is the number of lanes of the CTA or cluster.  `gone` marks the lanes that have ended."""
    has_passed = group.met.setdefault(instruction, np.zeros(len(group.alive) // 32, np.bool_))
    has_passed[warps] = True
    ended_warps = np.flatnonzero(has_passed & gone.reshape(-1, 32).all(axis=1))
    if np.isin(ended_warps // (together // 32), warps // (together // 32)).any():
        group.run.uneven_barriers[instruction] = None


def _compare(group: CtaGroup, arrivals: list[tuple[Lanes, int]]) -> None:
    """Records a fault if some warps wait at one instruction and others at another, which passed the first one earlier.
    Then the warps run a loop with a barrier a different number of times."""
    for instruction in {instruction for _, instruction in arrivals}:
        has_passed = group.met.get(instruction)
        elsewhere = [other_warps for other_warps, other in arrivals if other != instruction]
        if has_passed is not None and elsewhere and has_passed[np.concatenate(elsewhere)].any():
            group.run.uneven_barriers[instruction] = None


@dataclass
class _BarrierState:
    """Holds the state of one barrier of one CTA.  A new state begins when the barrier completes."""

    arrived: int = 0
    threads: int | None = None
    """Number of threads that the instruction gives; None for all threads of the CTA that have not ended."""
    whole: bool = False
    """Whether a thread waits without a thread count, which means for all threads of the CTA."""
    parked: list[LaneContext] = field(default_factory=list)
    votes: int = 0
    voters: int = 0
    settlers: list[Callable[[int, int], None]] = field(default_factory=list)
    """Functions that give the threads of a `bar.red` their result; each takes the votes and the voters."""
    waiters: list[np.ndarray[Any, Any]] = field(default_factory=list)
    """The warps that wait, without the warps of a `bar.arrive`."""
    met: list[tuple[Lanes, int]] = field(default_factory=list)
    """The warps that arrived, each with the instruction at which it arrived."""


class Barriers:
    """Holds the barriers of the CTAs that run together, by CTA and barrier number."""

    def __init__(self, group: CtaGroup, resume: Callable[[list[LaneContext]], None]):
        self._group = group
        self._resume = resume
        self._states: dict[tuple[int, int], _BarrierState] = {}
        self._missing: dict[int, int] = {}
        """By the id of a context: the number of CTAs at whose barriers the context still waits."""
        self._threads = int(np.count_nonzero(group.alive))

    def any(self) -> bool:
        """Returns whether any lanes wait at a barrier."""
        return any(barrier_state.parked for barrier_state in self._states.values())

    def sync(
        self,
        context: LaneContext,
        number: int,
        count: int | None,
        following: int,
        instruction: int,
        vote: tuple[np.ndarray[Any, Any], Callable[[int, int], None]] | None = None,
    ) -> int:
        """Arrives at a barrier and waits.  Returns the number of the next instruction, or `PARKED` if the lanes must
        wait.

        `vote` is given for `bar.red`, as `(predicates, set_result)`.  `predicates` has one predicate per lane.  When
        the barrier is complete, `set_result(true_count, lane_count)` is called."""
        cta_group = self._group
        cta_group.order_lanes(context.lanes)
        if vote is not None:
            if context.slot is None:
                raise Fault("bar.red runs one CTA at a time", instruction)
            barrier_state = self._states.setdefault((context.slot, number), _BarrierState())
            barrier_state.votes += int(np.count_nonzero(vote[0]))
            barrier_state.voters += context.size
            barrier_state.settlers.append(vote[1])
        cta_slots = np.unique(context.slots) if context.slot is None else [context.slot]
        has_all_lanes = context.slot is None and context.size == np.count_nonzero(cta_group.alive)
        if has_all_lanes and count is None and vote is None and not self._states:
            if instruction not in cta_group.met or context.size < self._threads:
                _meet(cta_group, context.warps, instruction, cta_group.lanes_per_cta, ~cta_group.alive)
            _order_all(cta_group, context.warps)
            return following
        context.place, missing_count = following, 0
        for slot in map(int, cta_slots):
            lanes = context.lanes[context.slots == slot]
            missing_count += not self._arrive(context, slot, lanes, number, count, waits=True, instruction=instruction)
        if not missing_count:
            return following
        self._missing[id(context)] = missing_count
        return PARKED

    def too_many(
        self, context: LaneContext, number: int, count: int | None, instruction: int
    ) -> npt.NDArray[np.bool_] | None:
        """Returns a mask of the lanes that are too many for the barrier's current phase, or None if there are none.

        These lanes begin the next phase.  Raises `Fault` on an invalid barrier number or thread count."""
        if not 0 <= number < BARRIERS:
            raise Fault(f"a barrier's number is 0 to {BARRIERS - 1}, got {number}", instruction)
        if count is None:
            return None
        if count <= 0 or count % 32:
            raise Fault(f"a barrier wants a multiple of 32 threads, got {count}", instruction)
        if context.warps[0] == context.warps[-1]:
            return None
        extra_lanes = np.zeros(context.size, np.bool_)
        for cta_slot in map(int, np.unique(context.slots)):
            barrier_state = self._states.get((cta_slot, number))
            warps = np.unique(context.warps[context.slots == cta_slot])
            free_warps = (count - barrier_state.arrived if barrier_state is not None else count) // 32
            if len(warps) > free_warps > 0:
                extra_lanes |= (context.slots == cta_slot) & (context.warps >= warps[free_warps])
        return extra_lanes if extra_lanes.any() else None

    def arrive(self, context: LaneContext, number: int, count: int | None, instruction: int) -> None:
        """Runs `bar.arrive`: arrives at a barrier without waiting."""
        self._group.order_lanes(context.lanes)
        for cta_slot in map(int, np.unique(context.slots)):
            lanes = context.lanes[context.slots == cta_slot]
            self._arrive(context, cta_slot, lanes, number, count, waits=False, instruction=instruction)

    def _arrive(
        self,
        context: LaneContext,
        slot: int,
        lanes: np.ndarray[Any, Any],
        number: int,
        count: int | None,
        *,
        waits: bool,
        instruction: int,
    ) -> bool:
        """Records that lanes arrive at a barrier. Returns whether the barrier is now complete. Raises `Fault` if the
        threads expect different thread counts."""
        cta_group, state = self._group, self._states.setdefault((slot, number), _BarrierState())
        warps = np.unique(lanes >> 5)
        state.whole |= count is None
        if state.threads is None:
            state.threads = count
        cta_threads = cta_group.lanes_per_cta
        thread_counts = {n for n in (state.threads, count, cta_threads if state.whole else None) if n is not None}
        if state.threads is not None and len(thread_counts) > 1:
            counts_text = " and by ".join(str(n) for n in sorted(thread_counts))
            raise Fault(f"barrier {number} is awaited by {counts_text} threads", instruction, rule="barrier")
        # Every warp counts as 32 threads, even where some of its threads have ended.
        state.arrived += 32 * len(warps)
        state.met.append((warps, instruction))
        key = "barrier", slot, number
        if (count or 0) > 32 and cta_group.races is not None:  # a round of one warp keeps no other from its own
            race_slot, race_warps = cta_group.race_slot(slot), warps % cta_group.race_warps
            cta_group.races.arrive(race_slot, race_warps, key, instruction, "numbered")
        if waits:
            state.parked.append(context)
            state.waiters.append(warps)
        elif cta_group.races is not None:  # the barrier does not order later accesses of these warps
            cta_group.races.signal(cta_group.race_slot(slot), warps % cta_group.race_warps, key)
        if not self._complete(slot, state):
            return False
        if waits:
            state.parked.remove(context)
        self._release(slot, number, state)
        return True

    def _complete(self, slot: int, state: _BarrierState) -> bool:
        threads = state.threads
        if threads is None:
            lane_0 = slot * self._group.lanes_per_cta
            live_warps = self._group.alive[lane_0 : lane_0 + self._group.lanes_per_cta].reshape(-1, 32).any(axis=1)
            threads = 32 * int(np.count_nonzero(live_warps))
        return state.arrived >= threads > 0

    def _release(self, slot: int, number: int, state: _BarrierState) -> None:
        cta_group = self._group
        if state.threads is None:
            if any(instruction != state.met[0][1] for _, instruction in state.met):
                _compare(cta_group, state.met)
            for warps, instruction in state.met:
                _meet(cta_group, warps, instruction, cta_group.lanes_per_cta, ~cta_group.alive)
        del self._states[(slot, number)]
        for result_setter in state.settlers:
            result_setter(state.votes, state.voters)
        warp_ids = np.concatenate(state.waiters) if state.waiters else np.empty(0, np.int64)
        if cta_group.races is not None:
            warps = np.unique(warp_ids % cta_group.race_warps)
            cta_group.races.barrier(cta_group.race_slot(slot), warps, ("barrier", slot, number))
        resumed_contexts = []
        for context in state.parked:
            missing_count = self._missing.pop(id(context), 1) - 1
            if missing_count:
                self._missing[id(context)] = missing_count
            else:
                resumed_contexts.append(context)
        self._resume(resumed_contexts)

    def recheck(self) -> bool:
        """Checks the barriers again after threads have ended.  Returns whether any lanes can continue."""
        has_resumed = False
        for (cta_slot, barrier_id), barrier_state in list(self._states.items()):
            if barrier_state.parked and self._complete(cta_slot, barrier_state):
                self._release(cta_slot, barrier_id, barrier_state)
                has_resumed = True
        return has_resumed

    def describe(self) -> list[tuple[LaneContext, str]]:
        """Lists all waiting groups of lanes, each with a text that says what they wait for."""
        waiting_contexts = []
        for (_, barrier_id), barrier_state in self._states.items():
            threads = "all" if barrier_state.threads is None else str(barrier_state.threads)
            wait_text = f"for barrier {barrier_id}, where {barrier_state.arrived} of {threads} threads are,"
            waiting_contexts += [(context, wait_text) for context in barrier_state.parked]
        return waiting_contexts


class ClusterBarrier:
    """Implements `barrier.cluster` (PTX ISA 8.7, section 9.7.13.3): all threads of a cluster arrive, then wait."""

    def __init__(self, group: CtaGroup, resume: Callable[[list[LaneContext]], None]):
        self._group = group
        self._resume = resume
        self._arrived = np.zeros(len(group.alive), np.int64)
        self._waited = np.zeros(len(group.alive), np.int64)
        self._parked: list[LaneContext] = []
        self._phase = 0
        """The number of completed phases: how often all threads have arrived."""

    def any(self) -> bool:
        """Returns whether any lanes wait at the cluster's barrier."""
        return bool(self._parked)

    def arrive(self, context: LaneContext, release: bool, instruction: int) -> None:
        """Records that threads arrive.  Raises `Fault` if a thread arrives twice without a wait between."""
        if (self._arrived > self._waited)[context.lanes].any():
            text = "a thread arrives at the cluster's barrier again before it has waited there"
            raise Fault(text, instruction, rule="barrier")
        self._arrived[context.lanes] += 1
        if release:
            self._group.order_lanes(context.lanes)
        signal = SharedRaces.signal if release else SharedRaces.signal_inits
        self._group.each_slot(context.warps, lambda races, slot, warps: signal(races, slot, warps, _CLUSTER_KEY))
        self.recheck()

    def wait(self, context: LaneContext, following: int, instruction: int) -> int:
        """Waits until all threads of the cluster have arrived.  Raises `Fault` if a thread waits before it arrives."""
        if (self._arrived == self._waited)[context.lanes].any():
            text = "a thread waits at the cluster's barrier and has not arrived there"
            raise Fault(text, instruction, rule="barrier")
        self._waited[context.lanes] += 1
        context.place = following
        if self._complete(context):
            self._learn(context)
            return following
        self._parked.append(context)
        return PARKED

    def _complete(self, context: LaneContext) -> bool:
        arrival_count = int(self._arrived[context.lanes].max())
        return bool((self._arrived[self._group.alive] >= arrival_count).all())

    def _learn(self, context: LaneContext) -> None:
        missing_lanes = self._arrived < self._arrived[context.lanes].max()
        _meet(self._group, context.warps, context.place - 1, len(missing_lanes), missing_lanes & ~self._group.alive)
        self._group.each_slot(context.warps, lambda races, slot, warps: races.wait(slot, warps, _CLUSTER_KEY))

    def recheck(self) -> bool:
        """Resumes lanes if all threads have arrived.  Returns whether it resumed any lanes."""
        alive_lanes = self._group.alive
        min_arrivals = int(self._arrived[alive_lanes].min()) if alive_lanes.any() else self._phase
        if min_arrivals > self._phase:
            self._phase = min_arrivals
            if self._group.races is not None:  # waiting contexts learn what was released up to now
                for race_slot in range(self._group.races.slots):
                    self._group.races.complete(race_slot, _CLUSTER_KEY)
        resumed_contexts = [context for context in self._parked if self._complete(context)]
        for context in resumed_contexts:
            self._learn(context)
        self._parked = [context for context in self._parked if context not in resumed_contexts]
        self._resume(resumed_contexts)
        return bool(resumed_contexts)

    def describe(self) -> list[tuple[LaneContext, str]]:
        """Lists all waiting groups of lanes, each with a text that says what they wait for."""
        return [(context, "for the cluster's barrier") for context in self._parked]


class Registers:
    """Implements `setmaxnreg` (PTX ISA 8.7, section 9.7.19.5), which moves a CTA's registers between its warps.

    The order in which warps release registers depends on timing.  So only the total at the end is checked."""

    def __init__(self, group: CtaGroup):
        self._group = group
        warps = len(group.alive) // 32
        self._at_launch = group.program.kernel.max_registers
        self._of_warp = np.full(warps, self._at_launch or 0)
        self._last = -1

    def set(self, context: LaneContext, count: int, increase: bool, instruction: int) -> None:
        """Sets the registers per thread to `count` for the running warps.  Raises `Fault` on a forbidden change."""
        if self._at_launch is None:
            raise Fault("setmaxnreg needs a kernel with .maxnreg, which says what the warps begin with", instruction)
        warps = np.unique(context.warps)
        reg_count = int(self._of_warp[warps].max()) if increase else int(self._of_warp[warps].min())
        if (increase and count < reg_count) or (not increase and count > reg_count):
            raise Fault(f"setmaxnreg.{'inc' if increase else 'dec'} from {reg_count} to {count} registers", instruction)
        self._of_warp[warps] = count
        self._last = instruction
        warps_per_cta = self._group.lanes_per_cta // 32
        first_warp = int(warps[0]) // warps_per_cta * warps_per_cta
        register_counts = self._of_warp[first_warp : first_warp + warps_per_cta]
        register_budget = self._at_launch * warps_per_cta * 32
        if 32 * int(register_counts[warps - first_warp].sum()) > register_budget:
            raise Fault(f"setmaxnreg asks for more registers than the CTA's {register_budget}", instruction)

    def check(self) -> None:
        """Raises `Fault` if the warps of a CTA have more registers than the CTA got at launch."""
        if self._last < 0 or self._at_launch is None:
            return
        cta_warps = self._group.lanes_per_cta // 32
        for first_warp in range(0, len(self._of_warp), cta_warps):
            count = 32 * int(self._of_warp[first_warp : first_warp + cta_warps].sum())
            if count > self._at_launch * cta_warps * 32:
                text = f"the CTA's warps hold {count} registers in the end, of {self._at_launch * cta_warps * 32} there"
                raise Fault(text, self._last)
