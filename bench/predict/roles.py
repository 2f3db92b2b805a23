"""Which warps run which part of a kernel's code, and how often: once, once a round, once a turn.

A *turn* is one pass through an innermost loop that does the work: multiplies matrices, or loads.  A *round* is what a
CTA does once for each of its tiles: the loops around those loops, and what the loops themselves mostly step over (the
epilogue under a branch in a flattened loop).  All else runs once.

Specialised warps run side by side, each group a *role*.  A role's code begins where it sets its register budget
(setmaxnreg), and it has the warps that its named barriers count; without one, a warpgroup where it multiplies and a
warp where it only loads.  In code without register budgets, a loop that multiplies and copies nothing is fed by a loop
of other warps, which are taken for one warpgroup.  The loop in which waiting warps are told their role, and loops
that only poll, are no loops here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from rooflab.bench.compile import sass
from rooflab.bench.compile.flow import Loop, find_loops
from rooflab.bench.predict.sass import WARPGROUP, Instruction
from rooflab.roofline.occupancy import WARP

Body = tuple[Instruction, ...]


@dataclass(frozen=True)
class Role:
    """What one group of warps does."""

    warps: int
    once: Body
    rounds: Body
    """What it does once for each tile; empty where a CTA has one tile."""
    loops: tuple[Body, ...]
    """A turn of each loop that does the work."""

    @property
    def turn(self) -> Body:
        """A turn of all of its loops."""
        return tuple(entry for body in self.loops for entry in body)

    @property
    def multiplies(self) -> bool:
        """Whether its loops multiply matrices."""
        return any(entry.mma_flops for entry in self.turn)


def roles_of(code: Sequence[Instruction], threads: int, indirect: Mapping[int, tuple[int, ...]]) -> list[Role]:
    """The roles of a kernel of `threads` a CTA, whose indirect branches go where `indirect` says.

    What all warps run comes last, as a role without loops, where some are specialised.
    """
    warps = max(1, threads // WARP)
    cuts = [entry.address for entry in code if entry.family == "USETMAXREG"]
    loops = [loop for loop in _loops(code, indirect) if not (_own(loop) & set(cuts))]
    polls = {address for loop in loops if loop.waits for address in _own(loop)}
    code = [entry for entry in code if entry.address not in polls and entry.family != "NOP"]
    loops = [loop for loop in loops if not loop.waits]
    turns = {loop.start: _turn(code, loop) for loop in _working(code, loops)}
    often = {entry.address for body in turns.values() for entry in body}
    around = {address for loop in loops if _own(loop) & turns.keys() for address in _own(loop)}
    whole = Role(
        warps,
        tuple(entry for entry in code if entry.address not in around),
        tuple(entry for entry in code if entry.address in around - often),
        tuple(turns.values()),
    )
    return _specialised(whole, turns, cuts) if cuts else _fed(whole)


def _loops(code: Sequence[Instruction], indirect: Mapping[int, tuple[int, ...]]) -> list[Loop]:
    instructions = [
        sass.Instruction(entry.address, entry.guard, entry.opcode, ", ".join(entry.operands)) for entry in code
    ]
    return find_loops(sass.Function("kernel", tuple(instructions), indirect=indirect))


def _own(loop: Loop) -> set[int]:
    return {entry.address for entry in loop.instructions}


def _inside(code: Sequence[Instruction], loop: Loop) -> Body:
    own = _own(loop)
    return tuple(entry for entry in code if entry.address in own)


def _working(code: Sequence[Instruction], loops: Sequence[Loop]) -> list[Loop]:
    """Innermost loops that do the work: where any multiplies, those that do, and loops that copy for them alone."""
    inner = [(loop, _inside(code, loop)) for loop in loops if loop.innermost]
    multiplying = [body for _, body in inner if any(entry.mma_flops for entry in body)]
    if not multiplying:
        return [loop for loop, body in inner if any(entry.loads_global or entry.loads_async for entry in body)]
    fed = not any(entry.loads_async for body in multiplying for entry in body)
    return [
        loop
        for loop, body in inner
        if any(entry.mma_flops for entry in body) or (fed and any(entry.loads_async for entry in body))
    ]


def _turn(code: Sequence[Instruction], loop: Loop) -> Body:
    """What every turn passes: not what a branch steps over, unless matrices are multiplied or copies begin there."""
    body = _inside(code, loop)
    last = max((entry.address for entry in body if entry.target == loop.start), default=body[-1].address)
    copies = any(entry.loads_async for entry in body)
    skipped: set[int] = {entry.address for entry in body if entry.address > last}
    for branch in body:
        if branch.target is None or not branch.address < branch.target <= last:
            continue
        over = [entry for entry in body if branch.address < entry.address < branch.target]
        if not any(e.mma_flops or e.loads_async or (e.loads_global and not copies) for e in over):
            skipped |= {entry.address for entry in over}
    return tuple(entry for entry in body if entry.address not in skipped)


def _specialised(whole: Role, turns: Mapping[int, Body], cuts: Sequence[int]) -> list[Role]:
    """A role for each stretch of code between register budgets that has a working loop; the rest is all warps'."""
    roles, rest = [], list(whole.once)
    last = max(entry.address for entry in (*whole.once, *whole.rounds, *whole.turn)) + 1
    for start, end in pairwise((*cuts, last)):
        loops = tuple(body for head, body in turns.items() if start <= head < end)
        if not loops:
            continue
        once, rounds = (
            tuple(entry for entry in part if start <= entry.address < end) for part in (whole.once, whole.rounds)
        )
        multiplies = any(entry.mma_flops for body in loops for entry in body)
        own = (*once, *rounds, *(entry for body in loops for entry in body))
        counted = max(_counted(own), default=WARPGROUP if multiplies else 1)
        roles.append(Role(counted, once, rounds, loops))
        rest = [entry for entry in rest if not start <= entry.address < end]
    return [*roles, Role(whole.warps, tuple(rest), (), ())]


def _counted(code: Sequence[Instruction]) -> Iterator[int]:
    """Warps that a barrier waits for, where it says how many: `BAR.SYNC 0x2, 0x80`."""
    for entry in code:
        if entry.family == "BAR" and len(entry.operands) == 2 and entry.operands[1].startswith("0x"):
            yield int(entry.operands[1], 16) // WARP


def _fed(whole: Role) -> list[Role]:
    feeding = tuple(body for body in whole.loops if not any(entry.mma_flops for entry in body))
    if not whole.multiplies or not feeding or whole.warps <= WARPGROUP:
        return [whole]
    multiplying = tuple(body for body in whole.loops if body not in feeding)
    return [
        Role(whole.warps - WARPGROUP, (), (), multiplying),
        Role(WARPGROUP, (), (), feeding),
        Role(whole.warps, whole.once, whole.rounds, ()),
    ]
