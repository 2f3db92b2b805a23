"""Schedules the threads of CTAs that run together: picks the next lanes, joins lanes that meet, and finds deadlocks.

Lanes at one instruction form a context.  The context with the lowest instruction number runs next, so that branches
meet again.  With a seed, the order is random, which can expose other faults.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from rooflab.bench.emulator.faults import Finding, Rule
from rooflab.bench.emulator.machine.context import PARKED, SPLIT, LaneContext, merged
from rooflab.bench.emulator.machine.run import SECONDS, CtaGroup, EmulationError, Fault, most_seconds
from rooflab.bench.emulator.machine.waiting import Waiting
from rooflab.bench.emulator.text.syntax import Immediate, Instruction, Register

MASKED_INSTRUCTIONS = ("shfl.sync", "vote.sync", "match", "redux.sync", "bar.warp.sync", "elect.sync")
BLOCKS_PER_TURN = 2000
"""The number of basic blocks that a context runs before other contexts run: it may wait for them in a loop."""
SPIN_BLOCK_LIMIT = 20
"""The number of basic blocks that a spinning context runs before other contexts run."""
MEET_PROBABILITY = 0.9
"""In a random order, the probability that the part of a warp that is furthest back in the program runs next."""
MAX_MERGED_REGISTERS = 48
"""Whole warps are joined only if at most this many registers are live, because joining accumulators takes 0.1 ms."""


MOST_NAMED = 6
"""The most waiting contexts that one message names."""


def may_run(context: LaneContext, instruction: Instruction) -> bool:
    """Returns whether `context` has all lanes in the instruction's member mask.  Ended lanes are not required."""
    if instruction.opcode.startswith("activemask"):
        return True
    if not instruction.opcode.startswith(MASKED_INSTRUCTIONS):
        return False
    mask = member_mask(context, instruction)
    cta_group = context.group
    for warp in np.unique(context.warps):
        lane_0 = int(warp) * 32
        present_lanes = context.lanes[context.warps == warp]
        mask_bits = mask if isinstance(mask, int) else int(np.bitwise_or.reduce(mask[context.warps == warp]))
        required_lanes = {lane_0 + bit for bit in range(32) if mask_bits >> bit & 1 and cta_group.alive[lane_0 + bit]}
        if not required_lanes <= set(map(int, present_lanes)):
            return False
    return True


def member_mask(context: LaneContext, instruction: Instruction) -> Any:
    """Returns an instruction's last operand, which is its member mask: an integer, or one integer per lane."""
    mask_operand = instruction.operands[-1]
    if isinstance(mask_operand, Immediate):
        return mask_operand.value & 0xFFFFFFFF
    assert isinstance(mask_operand, Register)
    mask_value = context.registers[mask_operand.index]
    if isinstance(mask_value, np.generic):
        return int(mask_value.view(np.uint32)) if mask_value.dtype.itemsize == 4 else int(mask_value)
    return mask_value.view(np.uint32)


class Schedule:
    """Schedules the lanes of the CTAs that run together."""

    def __init__(self, group: CtaGroup, seed: int | None):
        self.group = group
        self.program = group.program
        self.waiting = Waiting(group, lambda contexts: self.ready.extend(contexts))
        group.waiting = self.waiting
        self._random = random.Random(seed) if seed else None
        self.ready: list[LaneContext] = self._first()
        self.meeting: list[LaneContext] = []
        """The parts of warps or warpgroups that wait before an instruction that needs all parts."""

    def _first(self) -> list[LaneContext]:
        lanes = self.group.all_lanes()
        register_count = len(self.program.kernel.registers)
        if not self.program.sequential and self._random is None:
            return [LaneContext(self.group, lanes, [None] * register_count, 0)]
        lane_sets = [lanes[lanes // self.group.lanes_per_cta == cta_slot] for cta_slot in range(len(self.group.ctas))]
        if self._random is not None:
            lane_sets = [warp_subset for lane_set in lane_sets for warp_subset in self._cut(lane_set)]
        return [LaneContext(self.group, lane_set, [None] * register_count, 0) for lane_set in lane_sets]

    def _cut(self, lanes: np.ndarray) -> list[np.ndarray]:
        """Splits the lanes of a CTA into random groups of complete warps."""
        assert self._random is not None
        warps = np.unique(lanes >> 5)
        first_warps = [warp for warp in warps[1:] if self._random.random() < 0.5]
        return [lane_set for lane_set in np.split(lanes, np.searchsorted(lanes >> 5, first_warps)) if len(lane_set)]

    def run(self) -> Iterator[bool]:
        """Runs all lanes of some CTAs to their end.  Pauses from time to time, so that other CTAs can run.

        Each pause yields a bool: True if the lanes only poll memory, and so wait for other CTAs."""
        while True:
            if not self.ready:
                if not self.meeting and not self.waiting.any():
                    return
                if not self._wake():
                    wait_texts = "; ".join(["nothing can go on (deadlock)", *self.describe()])
                    raise EmulationError(self.stopped("deadlock", wait_texts))
            if time.thread_time() > self.group.run.deadline:
                raise EmulationError(self._endless())
            context = self._next()
            for _ in range(SPIN_BLOCK_LIMIT if context.spins else BLOCKS_PER_TURN):
                step_count = context.steps
                if not self._step(context):
                    break
                if context.steps > step_count:
                    self.ready.append(context)
                    context.repeats()
                    self._wake()
                    yield True
                    break
                if self.ready and self._switch(context):
                    if context.size:  # 0 where it was joined into another context
                        self.ready.append(context)
                    break
            else:
                self.ready.append(context)
                context.steps += 1
                if context.repeats():
                    self._wake()
                yield context.spins

    def stuck(self) -> bool:
        """Returns whether all lanes wait for a change of memory."""
        return all(context.spins and context.knows_all_changes for context in self.ready)

    def _endless(self) -> Finding:
        state_texts = "; ".join(self.describe()[:MOST_NAMED])
        fault_text = f"no CTA has ended for {most_seconds():g} s of the processor or more; {state_texts}"
        fault_text += f"; {SECONDS}={10 * most_seconds():g} in the environment allows more"
        return self.stopped("endless", fault_text)

    def stopped(self, rule: Rule, text: str) -> Finding:
        """Describes that the lanes do not end.  Names the instructions of the first two that are at different ones."""
        numbers = dict.fromkeys(number for _, _, number in self._states())
        first, *others = (self.program.kernel.instructions[number] for number in numbers)
        return Finding.at(rule, self.program.kernel.name, text, first, next(iter(others), None), grid=self.group.grid)

    def _wake(self) -> bool:
        """Resumes lanes that have met each other, or whose copy has finished. Returns whether it resumed any lane."""
        try:
            return self._meet() or self.waiting.advance()
        except Fault as fault:
            raise EmulationError(self.finding(fault, self.group.ctas)) from None

    def _next(self) -> LaneContext:
        if self._random is not None:
            return self._drawn(self._random)
        best_index = min(range(len(self.ready)), key=lambda index: (self.ready[index].steps, self.ready[index].place))
        return self.ready.pop(best_index)

    def _drawn(self, draws: random.Random) -> LaneContext:
        """Picks a random group of lanes to run next. In a split warp, it prefers the group with the fewest steps, so
        that the groups meet again."""
        context = self.ready[draws.randrange(len(self.ready))]
        if context.grain == 1 and draws.random() < MEET_PROBABILITY:
            warp_peers = [other for other in self.ready if other.grain == 1 and _overlap(context, other)]
            context = min(warp_peers, key=lambda other: (other.steps, other.place))
            tied_peers = [other for other in warp_peers if (other.steps, other.place) == (context.steps, context.place)]
            if len(tied_peers) > 1 and self._joinable(tied_peers[0], tied_peers[1]):
                self.ready = [other for other in self.ready if other not in tied_peers]
                joined_context = merged(tied_peers)
                joined_context.steps = context.steps
                return joined_context
        self.ready.remove(context)
        return context

    def _switch(self, context: LaneContext) -> bool:
        """Tells whether another group of lanes should run next. May first join two groups that are at the same
        instruction."""
        if self._random is not None:
            return self._random.random() < (0.1 if context.grain > 1 else 0.5)
        block_start = context.place
        for other_context in self.ready:
            if other_context.place == block_start and self._joinable(context, other_context):
                self.ready.remove(other_context)
                joined_context = merged([context, other_context])
                joined_context.steps = max(context.steps, other_context.steps)
                self.ready.append(joined_context)
                context.size = 0
                return True
        return any(
            other_context.place < block_start and other_context.steps <= context.steps for other_context in self.ready
        )

    def _joinable(self, a: LaneContext, b: LaneContext) -> bool:
        if any(any(wgmma_chain.in_flight) for wgmma_chain in self.group.accumulators.values()):
            return False  # a copy of an accumulator would miss what a wgmma in flight writes later
        if self.program.sequential and a.slot != b.slot:
            return False
        return min(a.grain, b.grain) == 1 or len(self.group.live(a.place)) <= MAX_MERGED_REGISTERS

    def _step(self, context: LaneContext) -> bool:
        """Runs one basic block with a group of lanes. Returns whether the same group can run its next block."""
        if not context.size:
            return False
        entry_pc, program = context.place, self.program
        if entry_pc >= program.size:  # the context waited at the last instruction
            self._end(context)
            return False
        if program.together[entry_pc] > context.grain and not may_run(context, program.kernel.instructions[entry_pc]):
            self.meeting.append(context)
            self._meet(entry_pc)
            return False
        launch = self.group.run
        launch.count(entry_pc, context.grain, context.size)
        try:
            next_pc = program.function(entry_pc, context.grain)(context, context.registers)
        except Fault as fault:
            ctas = sorted({self.group.ctas[cta_slot] for cta_slot in np.unique(context.slots)})
            raise EmulationError(self.finding(fault, ctas)) from None
        if next_pc >= program.size:
            self._end(context)
            return False
        if next_pc >= 0:
            context.place = next_pc
            return True
        if next_pc == SPLIT:
            for child_context in context.children:
                child_context.steps = context.steps
            self.ready += [child_context for child_context in context.children if child_context.place < program.size]
            for child_context in context.children:
                if child_context.place >= program.size:
                    self._end(child_context)
        elif next_pc != PARKED:
            raise AssertionError(f"a block returned {next_pc}")
        return False

    def _end(self, context: LaneContext) -> None:
        self.group.end(context.lanes)
        if self.group.run.has_clusters and self.group.races is not None:
            for slot in np.unique(context.slots):
                if not self.group.alive.reshape(-1, self.group.lanes_per_cta)[slot].any():
                    self.group.races.leave(int(slot))
        for other_context in (*self.ready, *self.meeting):
            other_context.regrain()
        self.waiting.ended()

    def _meet(self, place: int | None = None) -> bool:
        """Joins groups of lanes that wait for each other at instruction `place`. None means at any instruction. Returns
        whether a group can continue."""
        has_resumed = False
        meeting_places = {context.place for context in self.meeting} if place is None else {place}
        for instruction_index in meeting_places:
            waiting_contexts = [context for context in self.meeting if context.place == instruction_index]
            needed_lanes = self.program.together[instruction_index]
            instruction = self.program.kernel.instructions[instruction_index]
            for peer_contexts in self._pieces(waiting_contexts, needed_lanes):
                joined_context = peer_contexts[0] if len(peer_contexts) == 1 else merged(peer_contexts)
                joined_context.regrain()
                if joined_context.grain >= needed_lanes or may_run(joined_context, instruction):
                    self.meeting = [context for context in self.meeting if context not in peer_contexts]
                    self.ready.append(joined_context)
                    has_resumed = True
        return has_resumed

    def _pieces(self, contexts: list[LaneContext], need: int) -> list[list[LaneContext]]:
        """Sorts groups of lanes into lists: groups that share a warp are in one list. If `need` is 128, groups that
        share a warpgroup are in one list."""
        context_groups: list[tuple[set[int], list[LaneContext]]] = []
        for context in contexts:
            piece_numbers = set(map(int, np.unique(self.group.pieces(context.lanes, need))))
            overlapping_groups = [context_group for context_group in context_groups if context_group[0] & piece_numbers]
            peer_contexts = [context]
            for context_group in overlapping_groups:
                piece_numbers |= context_group[0]
                peer_contexts = context_group[1] + peer_contexts
                context_groups.remove(context_group)
            context_groups.append((piece_numbers, peer_contexts))
        return [peer_contexts for _, peer_contexts in context_groups]

    def finding(self, fault: Fault, ctas: list[int]) -> Finding:
        """Describes a fault of one of the CTAs `ctas`.  The text names the source line, the CTAs, and the thread if it
        is known."""
        instruction, thread_name = self.program.kernel.instructions[fault.instruction], ""
        if fault.lane is not None:
            cta_slot, thread = divmod(fault.lane, self.group.lanes_per_cta)
            ctas, thread_name = [self.group.ctas[cta_slot]], f", thread {thread}"
        cta_names = ", ".join(map(str, ctas[:3])) + (", ..." if len(ctas) > 3 else "")
        text = f"{instruction.describe()}, CTA {cta_names}{thread_name}: {fault}"
        return Finding.at(fault.rule, self.program.kernel.name, text, instruction, grid=self.group.grid)

    def _states(self) -> list[tuple[LaneContext, str, int]]:
        """Lists the groups of lanes, each with what it does and the number of its instruction."""
        ready_pairs = [(context, min(context.place, self.program.size - 1)) for context in self.ready]
        states = [(context, "polling" if context.spins else "running", position) for context, position in ready_pairs]
        wait_text = "waiting for the rest of its warp or warpgroup"
        states += [(context, wait_text, context.place) for context in self.meeting]
        return states + [(context, f"waiting {text}", number) for context, text, number in self.waiting.describe()]

    def describe(self) -> list[str]:
        """Returns a text for each group of lanes, which says what the group runs or what it waits for."""
        instructions = self.program.kernel.instructions
        return [
            f"{describe(lanes)}: {text} at {instructions[number].describe()}" for lanes, text, number in self._states()
        ]


def _overlap(a: LaneContext, b: LaneContext) -> bool:
    """Tells whether two groups of lanes may have lanes of the same warp. Compares only their first and last warps."""
    return bool(a.warps[0] <= b.warps[-1] and b.warps[0] <= a.warps[-1])


def describe(context: LaneContext) -> str:
    """Returns a text with the CTA and the warps of a group of lanes: `CTA 3, warps 0 to 3`."""
    warps_per_cta = context.group.lanes_per_cta // 32
    warps = sorted({int(warp) % warps_per_cta for warp in np.unique(context.warps)})
    cta_numbers = sorted({context.group.ctas[cta_slot] for cta_slot in np.unique(context.slots)})
    warp_names = f"warp {warps[0]}" if len(warps) == 1 else f"warps {warps[0]} to {warps[-1]}"
    return f"CTA {', '.join(map(str, cta_numbers[:3]))}, {warp_names}"
