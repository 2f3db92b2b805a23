"""Branches, ends and calls of the driver's functions (PTX ISA 8.7, section 9.7.12)."""

from __future__ import annotations

from rooflab.bench.ptx.generate import Generator, emits
from rooflab.bench.ptx.text.syntax import Instruction


@emits("bra")
def branch(g: Generator, instruction: Instruction) -> None:
    """`bra`: by one predicate for all lanes, or by each lane's."""
    (target,) = g.flow.targets(instruction.number)
    following = instruction.number + 1
    if g.guard is None:
        g.line(f"return {target}")
        return
    name = g.temporary()
    g.line(f"{name} = {g.guard}")
    g.line(f"return ({target} if {name} else {following}) if {name}.__class__ is bool_ else"
           f" c.branch({name}, {target}, {following})")  # fmt: skip


@emits("brx")
def many_ways(g: Generator, instruction: Instruction) -> None:
    """`brx.idx`."""
    targets = g.flow.targets(instruction.number)
    index = g.value(instruction.operands[0], "u4")
    if g.guard is not None:  # lanes without the predicate go on behind it
        index = f"choose({g.guard}, {index}, {g.constant(len(targets), 'u4')})"
        targets = (*targets, instruction.number + 1)
    g.line(f"return c.many_ways({index}, {targets})")


@emits("ret", "exit")
def end(g: Generator, instruction: Instruction) -> None:
    """The end of a thread."""
    following = instruction.number + 1
    if g.guard is None:
        g.line(f"return {g.flow.size}")
        return
    name = g.temporary()
    g.line(f"{name} = {g.guard}")
    g.line(f"return ({g.flow.size} if {name} else {following}) if {name}.__class__ is bool_ else"
           f" c.branch({name}, {g.flow.size}, {following})")  # fmt: skip


@emits("trap", "brkpt")
def trap(g: Generator, instruction: Instruction) -> None:
    """`trap`: the kernel itself gives up."""
    if g.guard is not None:
        g.line(f"synchronising.trap(c, {g.guard}, {instruction.number})")
    else:
        g.line(f"synchronising.trap(c, np.bool_(True), {instruction.number})")
    g.line(f"return {instruction.number + 1}")


@emits("call")
def call(g: Generator, instruction: Instruction) -> None:
    """Calls of functions that the driver has: a failed assertion ends the run, what is printed is left out."""
    if "assertfail" in instruction.opcode:
        g.line(f"synchronising.assertion_failed(c, {g.guard or 'np.bool_(True)'}, {instruction.number})")


@emits("nanosleep")
def sleep(g: Generator, instruction: Instruction) -> None:
    """`nanosleep`: somebody else's turn."""
    g.line("c.steps += 1")
