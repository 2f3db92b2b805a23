"""A role's walk through its code, all its warps in step and alone on their SM.

Instructions issue in order, each waiting for the registers that it reads and for its pipe, as an SM's scoreboards make
them wait, and `WARPGROUP.DEPBAR` for the groups of wgmma that it names.  A wgmma does not wait for another that adds to
the same accumulator.  Barriers cost nothing: other warps and copies are taken to have arrived.  The walk gives the
least time of dependent steps that no other CTA and no other role can hide, and the most bytes that a thread has on
their way at once.  Two warpgroups that run the same code are in step here; on the GPU the second fills what the first
leaves idle where they wait for their products.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from rooflab.bench.predict.chip import Chip, Pipe
from rooflab.bench.predict.sass import Instruction


@dataclass
class Walk:
    """The state of a role's warps on their way; `run` carries it on."""

    chip: Chip
    warps: int
    """Warps that run the code together."""
    load_latency: float
    """Clocks of a load from global memory."""
    now: float = 0.0
    """Clock from which the next instruction can issue."""
    most_bytes: int = 0
    """Most bytes of loads on their way at once, per thread."""
    _ready: dict[str, float] = field(default_factory=dict)
    _free: dict[Pipe, float] = field(default_factory=dict)
    _flying: list[tuple[int, frozenset[str]]] = field(default_factory=list)
    _groups: list[float] = field(default_factory=list)
    """When each group of wgmma is done, in order."""

    def run(self, code: Sequence[Instruction]) -> float:
        """Walks through `code` once; the clocks until the next instruction could issue."""
        began = self.now
        for entry in code:
            # wgmma adds to its accumulator in the order of issue; nothing waits for the sum before.
            awaited = entry.reads - entry.writes if entry.is_wgmma else entry.reads
            taken = {pipe: self.warps * cycles for pipe, cycles in self.chip.cycles(entry).items()}
            start = max(
                [self.now, *(self._ready.get(name, 0.0) for name in awaited), *(self._free.get(p, 0.0) for p in taken)]
            )
            if entry.groups_left is not None and len(self._groups) > entry.groups_left:
                start = max(start, self._groups[-1 - entry.groups_left])
            self._land(entry.reads | entry.writes)
            for pipe, cycles in taken.items():
                self._free[pipe] = start + cycles
            done = start + max(taken.values()) + self.chip.latency(entry, self.load_latency)
            for name in entry.writes:
                self._ready[name] = done
            if entry.commits:
                self._groups.append(done)
            if entry.loads_global:
                self._flying.append((entry.bytes_per_thread, entry.writes))
                self.most_bytes = max(self.most_bytes, sum(size for size, _ in self._flying))
            self.now = start + max(1.0, taken["issue"])
        return self.now - began

    def finish(self) -> float:
        """Waits for every result; the clock then."""
        self.now = max([self.now, *self._ready.values()])
        self._flying.clear()
        return self.now

    def _land(self, names: frozenset[str]) -> None:
        """Loads come back in order: touching one's register means that it and all before it are there."""
        last = max((at for at, (_, written) in enumerate(self._flying) if written & names), default=-1)
        del self._flying[: last + 1]


def steady_cycles(body: Sequence[Instruction], chip: Chip, warps: int, load_latency: float) -> float:
    """Clocks of one turn of a loop, once earlier turns are under way."""
    walk = Walk(chip, warps, load_latency)
    walk.run(body)
    walk.run(body)
    return walk.run(body)


def span_cycles(code: Sequence[Instruction], chip: Chip, warps: int, load_latency: float) -> float:
    """Clocks from the first instruction to the last result."""
    walk = Walk(chip, warps, load_latency)
    walk.run(code)
    return walk.finish()


def bytes_in_flight(code: Sequence[Instruction], chip: Chip) -> int:
    """Most bytes that a thread's plain loads have on their way at once, in this code run twice over."""
    walk = Walk(chip, 1, chip.hbm_latency)
    walk.run(code)
    walk.run(code)
    return walk.most_bytes
