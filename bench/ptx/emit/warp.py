"""Instructions of a warp: shuffles, votes, matches, reductions, elections (PTX ISA 8.7, sections 9.7.9.6, 9.7.13)."""

from __future__ import annotations

from rooflab.bench.ptx.generate import Generator, emits
from rooflab.bench.ptx.text.kinds import dtype_of
from rooflab.bench.ptx.text.syntax import Group, Instruction, Register


@emits("shfl")
def shuffle(g: Generator, instruction: Instruction) -> None:
    """`shfl.sync`."""
    mode = instruction.parts[2]
    target, value, lane, clamp, mask = instruction.operands
    both = isinstance(target, Group)
    first = target.items[0] if isinstance(target, Group) else target
    dtype = g.kept[value.index] if isinstance(value, Register) else "u4"
    given = f"{g.value(value, dtype)}, {g.value(lane, 'u4')}, {g.value(clamp, 'u4')}"
    name, valid = g.temporary(), g.temporary()
    g.line(f"{name}, {valid} = warps.shuffle(c, {mode!r}, {given}, {g.value(mask, 'u4')}, {g.guard or 'None'},"
           f" {both}, {instruction.number})")  # fmt: skip
    g.define(first, name, dtype)
    if isinstance(target, Group):
        g.define(target.items[1], valid, "?")


@emits("vote")
def vote(g: Generator, instruction: Instruction) -> None:
    """`vote.sync`."""
    mode = instruction.parts[2]
    target, predicate, mask = instruction.operands
    call = f"warps.vote(c, {mode!r}, {g.value(predicate, '?')}, {g.value(mask, 'u4')}, {g.guard or 'None'})"
    g.define(target, call, "u4" if mode == "ballot" else "?")


@emits("match")
def match(g: Generator, instruction: Instruction) -> None:
    """`match.any.sync`, `match.all.sync`."""
    mode = instruction.parts[1]
    target, value, mask = instruction.operands
    dtype = dtype_of(instruction.parts[-1])
    name, same = g.temporary(), g.temporary()
    g.line(f"{name}, {same} = warps.match(c, {mode!r}, {g.value(value, dtype)}, {g.value(mask, 'u4')})")
    g.define(target.items[0] if isinstance(target, Group) else target, name, "u4")
    if isinstance(target, Group):
        g.define(target.items[1], same, "?")


@emits("redux")
def reduce(g: Generator, instruction: Instruction) -> None:
    """`redux.sync`."""
    parts = instruction.parts
    target, value, mask = instruction.operands
    dtype = dtype_of(parts[-1])
    call = f"warps.reduce(c, {parts[2]!r}, {g.value(value, dtype)}, {g.value(mask, 'u4')}, {g.guard or 'None'})"
    g.define(target, call, dtype)


@emits("elect")
def elect(g: Generator, instruction: Instruction) -> None:
    """`elect.sync`: the lowest lane of the mask."""
    target, mask = instruction.operands
    name, chosen = g.temporary(), g.temporary()
    g.line(f"{name}, {chosen} = warps.elect(c, {g.value(mask, 'u4')})")
    items = g.items(target)
    if isinstance(items[0], Register):
        g.define(items[0], name, "u4")
    g.define(items[1], chosen, "?")


@emits("activemask")
def active_mask(g: Generator, instruction: Instruction) -> None:
    """`activemask`."""
    g.define(instruction.operands[0], "warps.active_mask(c)", "u4")
