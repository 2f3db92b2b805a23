"""Finds a launch that uses memory of an earlier launch that may still run.  It may not read what that one writes, nor
write what that one uses.  Such launches are on two streams, or the later one is a dependent launch (programmatic
dependent launch) and has not run griddepcontrol.wait (PTX ISA 8.7, section "griddepcontrol").

Each stream has a clock.  A tick ends when other streams or the host can learn of the stream's work: at an event, at a
wait for the stream, at a synchronisation.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from rooflab.bench.emulator.faults import Rule
from rooflab.bench.emulator.machine.counting import SECTOR
from rooflab.bench.emulator.machine.memory import UNIT_DTYPES, Allocation, GlobalMemory
from rooflab.bench.emulator.machine.view_bounds import Flags, mark

Ints = npt.NDArray[np.int64]
Clock = Mapping[int, int]
"""By stream: the last tick of its work that is known to be over."""
MOST_FOOTPRINTS = 256
"""The most footprints that are kept for later launches of other streams; the oldest are dropped."""
LONGEST_CHAIN = 16
"""The most footprints of launches that a dependent launch may overtake, because none of them has waited."""
BEFORE = {"read": ("write", "atomic"), "write": ("write", "read", "atomic"), "atomic": ("write", "read")}
"""By kind of access: the kinds of earlier accesses that must be over before it."""
WORDS = {"read": ("reads", "read"), "write": ("writes", "wrote"), "atomic": ("updates", "updated")}
NO_ORDER = "another stream, and no event and no wait orders the two streams"


@dataclass(eq=False)
class LaunchFootprint:
    """Holds what one launch reads and writes of the memory of one tensor."""

    launch: tuple[str, int]
    """The kernel, and the launch's number among the results."""
    stream: int
    tick: int
    span: tuple[int, int]
    """The address of the memory's first sector, and the bytes of all its sectors."""
    flags: dict[str, Flags]
    """By kind of access: for each sector or byte, whether the launch has one to it."""
    unit: int
    """The bytes of one flag: 1, or 32 for launches before the program used a second stream."""
    memory: StorageWeakRef

    def _flags(self, starts: Ints, size: int, verb: str) -> tuple[npt.NDArray[Any], Ints, Flags]:
        """Returns the flags in units of an access, the accesses as indices, and which accesses lie in this memory."""
        unit_bytes = max(size, self.unit)
        units = self.flags[verb].view(UNIT_DTYPES[unit_bytes // self.unit])
        places = (starts - self.span[0]) // unit_bytes
        return units, places, (places >= 0) & (places < len(units))

    def note(self, starts: Ints, size: int, verb: str) -> None:
        """Notes accesses of `size` bytes at the addresses `starts`."""
        units, places, is_inside = self._flags(starts, size, verb)
        units[places[is_inside]] = np.ones(size, np.bool_).view(UNIT_DTYPES[size])[0]

    def met_by(self, starts: Ints, size: int, verb: str) -> Iterator[tuple[str, Flags]]:
        """Yields the kinds of this launch's accesses that met later accesses of the kind `verb`, and which they met."""
        for mine in BEFORE[verb]:
            units, places, is_inside = self._flags(starts, size, mine)
            is_met: Flags = is_inside & (units.take(places, mode="clip") != 0)
            if is_met.any():
                yield WORDS[mine][1], is_met

    def meets(self, used: Flags, verb: str) -> str:
        """Returns what this launch did to memory that later work is to `verb`; empty if nothing.  `used` has a flag for
        each byte.  A sector of which the launch may have used a part counts only if later work uses all of it."""
        whole: Flags = np.logical_and.reduce(used.reshape(-1, self.unit), axis=1)
        return next((WORDS[kind][1] for kind in BEFORE[verb] if (whole & self.flags[kind]).any()), "")


@dataclass
class Turn:
    """The turn of one launch: which earlier launches may still run, and the accesses that must wait for them."""

    launch: int
    """The launch's number among the results."""
    stream: int
    tick: int
    overtaken: Sequence[Sequence[LaunchFootprint]]
    """The launches that may run until a CTA runs griddepcontrol.wait, and those that may run even then."""
    others: Sequence[LaunchFootprint]
    """The launches of other streams that may run."""
    watches: bool
    """Whether each access is noted."""
    triggered = waited_first = False
    """Whether a CTA has run griddepcontrol.launch_dependents, and whether it had run griddepcontrol.wait before."""
    waited: Flags = field(default_factory=lambda: np.zeros(0, np.bool_))
    """By CTA: whether one of its threads has run griddepcontrol.wait."""
    mine: dict[tuple[int, int], LaunchFootprint] = field(default_factory=dict)
    """By the memory's span: what this launch has used."""
    met: dict[tuple[int, str, str, Rule], tuple[LaunchFootprint, int]] = field(default_factory=dict)
    """By instruction, what it and the earlier launch do, and rule: the earlier launch, and the first place."""

    def begin(self, ctas: int, is_dependent: bool, lets_next_begin: bool) -> None:
        """Begins a launch.  `is_dependent`: the one before may still run; `lets_next_begin`: the next may begin."""
        self.waited = np.zeros(ctas, np.bool_)
        self.overtaken = self.overtaken if is_dependent else ((), ())
        self.watches |= bool(lets_next_begin or self.overtaken[0])

    def add_sectors(self, kernel: str, memory: GlobalMemory) -> None:
        """Takes the sectors that the launch has used for its accesses, which were not noted."""
        for allocation in memory.allocations:
            sectors = {"read": allocation.sectors_read, "write": allocation.sectors_written}
            used = {verb: flags for verb, flags in sectors.items() if flags is not None}
            if used and isinstance(allocation.owner, torch.Tensor):
                self._footprint(kernel, allocation).flags |= used

    def _footprint(self, kernel: str, allocation: Allocation) -> LaunchFootprint:
        """Returns what the launch has used of a tensor so far."""
        span, unit = _span(allocation.base, allocation.end), 1 if self.watches else SECTOR
        if span not in self.mine:
            flags = {verb: np.zeros(span[1] // unit, np.bool_) for verb in BEFORE}
            ref = StorageWeakRef(allocation.owner.untyped_storage())  # type: ignore[no-untyped-call]
            launch = kernel, self.launch
            self.mine[span] = LaunchFootprint(launch, self.stream, self.tick, span, flags, unit, ref)
        return self.mine[span]

    def control(self, action: str, ctas: Ints) -> None:
        """Records that CTAs run griddepcontrol with this action."""
        if action == "wait":
            self.waited[ctas] = True
        else:
            self.triggered = True
            self.waited_first |= bool(self.waited[ctas].any())

    def access(self, c: Any, active: Any, addresses: Any, size: int, instruction: int, verb: str) -> None:
        """Notes and checks an access of lanes, of the kind `verb`, to `size` bytes at each of `addresses`."""
        slots = c.slots if active is None else c.slots[active]
        starts = np.broadcast_to(np.asarray(addresses).astype(np.int64), slots.shape)
        for allocation, inside in c.group.memory.parts(starts):
            if isinstance(allocation.owner, torch.Tensor):
                self._footprint(c.group.program.kernel.name, allocation).note(starts[inside], size, verb)
        has_waited = self.waited[np.asarray(c.group.ctas)[slots]]
        checks: tuple[tuple[Rule, Sequence[LaunchFootprint]], ...]
        checks = ("dependent-launch", self.overtaken[0]), ("stream-order", self.others)
        for rule, footprint in ((rule, footprint) for rule, footprints in checks for footprint in footprints):
            is_over = has_waited & (rule == "dependent-launch" and footprint not in self.overtaken[1])
            for past, is_met in footprint.met_by(starts, size, verb):
                if (is_met & ~is_over).any():
                    place = int(starts[is_met & ~is_over][0])
                    self.met.setdefault((instruction, verb, past, rule), (footprint, place))

    def faults(self, memory: GlobalMemory) -> Iterator[tuple[Rule, int, str]]:
        """Yields the rule, the instruction and the end of a sentence for each access that had to wait."""
        for (instruction, verb, past, rule), (footprint, place) in self.met.items():
            allocation = memory.find(place)
            used = self.mine.get(footprint.span)
            is_sure = footprint.unit == 1 or (used is not None and footprint.meets(used.flags[verb], verb))
            if allocation is not None and is_sure:
                text = f"{WORDS[verb][0]} byte {place - allocation.base} of {allocation.name}, which an earlier launch"
                text += f" of {footprint.launch[0]} {past}" + (f" on {NO_ORDER}" if rule == "stream-order" else "")
                if rule == "dependent-launch":
                    text += " and may still run: no griddepcontrol.wait of this dependent launch comes first"
                yield rule, instruction, text


def _span(base: int, end: int) -> tuple[int, int]:
    start = base // SECTOR * SECTOR
    return start, -(-(end - start) // SECTOR) * SECTOR


class LaunchOrder:
    """Holds the clocks of the streams, and the footprints of launches that later work may have to wait for."""

    def __init__(self) -> None:
        self.stream = 0
        """The number of the current stream; 0 is the default stream."""
        self.streams: list[Any] = []
        """The objects of the streams, by number."""
        self.watches = False
        """Whether several streams are in use."""
        self.report: Callable[[int, str], None] = lambda launch, text: None
        """A function that gets a launch's number and a sentence: torch uses memory that this launch may still use."""
        self._ticks: dict[int, int] = defaultdict(lambda: 1)
        self._known: dict[int | None, dict[int, int]] = defaultdict(dict)
        """By stream: what is over before its later work.  None is the host, which all later work comes after."""
        self._footprints: dict[tuple[object, ...], LaunchFootprint] = {}
        self._overtaken: dict[int, Sequence[Sequence[LaunchFootprint]]] = {}
        """By stream: what a dependent launch may overtake now; see `Turn`."""

    def clear(self) -> None:
        """Forgets all launches."""
        self._footprints.clear()
        self._overtaken.clear()

    @property
    def is_open(self) -> bool:
        """Whether work that begins now may run at the same time as a launch before it."""
        return self.watches or bool(self._overtaken)

    def enter(self, stream: int) -> int:
        """Makes `stream` the current stream, and returns the one before it."""
        before, self.stream = self.stream, stream
        self.watches |= stream != 0
        return before

    def event(self, stream: int) -> Clock:
        """Returns the clock of an event that `stream` records now."""
        tick = self._ticks[stream]
        self._ticks[stream] += 1
        return {**self._known[stream], stream: tick}

    def wait(self, stream: int | None, clock: Clock) -> None:
        """Lets the later work of `stream`, or of all streams if it is None, begin after the work of `clock`."""
        known = self._known[stream]
        known |= {other: max(tick, known.get(other, 0)) for other, tick in clock.items()}

    def synchronize(self, streams: Iterable[int]) -> None:
        """Lets the host wait for `streams`."""
        for stream in streams:
            self.wait(None, self.event(stream))
        over = self._known[None]
        self._footprints = {key: it for key, it in self._footprints.items() if it.tick > over.get(it.stream, 0)}

    def _others(self) -> list[LaunchFootprint]:
        """Returns the footprints of other streams that the current stream does not know to be over.

        Backward runs each operator on the stream of its forward and orders the streams, so there it returns none."""
        if not self.watches or torch._C._current_graph_task_id() != -1:
            return []
        known = [self._known[stream] for stream in (self.stream, None)]
        return [
            item
            for item in self._footprints.values()
            if item.stream != self.stream and item.tick > max(each.get(item.stream, 0) for each in known)
            if not item.memory.expired()  # type: ignore[no-untyped-call]
        ]

    def turn(self, launch: int) -> Turn:
        """Returns the turn of the launch of number `launch`, which the current stream begins now."""
        overtaken = self._overtaken.get(self.stream, ((), ()))
        return Turn(launch, self.stream, self._ticks[self.stream], overtaken, self._others(), self.watches)

    def end(self, turn: Turn) -> None:
        """Keeps what the launch of `turn` did, for later launches."""
        before, after = turn.overtaken
        has_waited = bool(turn.waited.any())
        left = after if turn.waited_first or (has_waited and not turn.triggered) else before
        left = [*left, *(turn.mine.values() if turn.triggered else ())][-LONGEST_CHAIN:]
        self._overtaken.pop(turn.stream, None)
        if left:
            self._overtaken[turn.stream] = left, after if has_waited else before
        for new in turn.mine.values():
            key = new.memory.cdata, new.span, new.unit, new.launch[0], new.stream, new.tick
            if (old := self._footprints.pop(key, None)) is not None:
                new = replace(new, flags={verb: flags | old.flags[verb] for verb, flags in new.flags.items()})
            self._footprints[key] = new
            if len(self._footprints) > MOST_FOOTPRINTS:
                del self._footprints[next(iter(self._footprints))]

    def torch_operator(self, name: str, used: Iterable[tuple[torch.Tensor, str]]) -> None:
        """Checks an operator of torch, which the current stream runs.  `used` are its tensors, each with what it does:
        `read` or `write`."""
        self._overtaken.pop(self.stream, None)  # it waits for the launch before it
        others = self._others()
        for tensor, verb, footprint in ((*each, footprint) for footprint in others for each in used):
            storage = tensor.untyped_storage() if tensor.layout == torch.strided and tensor.numel() else None
            if storage and footprint.span == _span(storage.data_ptr(), storage.data_ptr() + storage.nbytes()):
                flags = mark(np.zeros(footprint.span[1], np.bool_), footprint.span[0], tensor)
                if past := footprint.meets(flags, verb):
                    text = f"it {past} elements of a tensor of shape {list(tensor.shape)} that {name} {WORDS[verb][0]}"
                    self.report(footprint.launch[1], f"{text} on {NO_ORDER}")
