"""Barriers of CTAs and clusters, mbarriers, register moves between warps (PTX ISA 8.7, sections 9.7.13, 9.7.20)."""

from __future__ import annotations

from rooflab.bench.ptx.emit.memory import address
from rooflab.bench.ptx.generate import Generator, emits
from rooflab.bench.ptx.text.syntax import Address, Immediate, Instruction, PtxError, Register, Sink

_REDUCTIONS = ("popc", "and", "or")


@emits("bar", "barrier")
def barrier(g: Generator, instruction: Instruction) -> None:
    """`bar.sync`, `bar.arrive`, `bar.red`, `bar.warp.sync`, and `barrier` by its longer name; `barrier.cluster`."""
    parts, operands = instruction.parts, list(instruction.operands)
    following = instruction.number + 1
    if parts[1] == "warp":
        g.line(f"synchronising.warp_barrier(c, {g.value(operands[0], 'u4')})")
    elif parts[1] == "cluster":
        name = "cluster_arrive" if "arrive" in parts else "cluster_wait"
        release = "relaxed" not in parts
        g.unguarded(instruction)
        if name == "cluster_wait":
            g.line(f"return synchronising.cluster_wait(c, {following}, {instruction.number})")
            g.ends()
        else:
            g.line(f"synchronising.cluster_arrive(c, {release}, {instruction.number})")
    elif "red" in parts:
        _reduction(g, instruction)
    else:
        number = g.value(operands[0], "u4")
        count = g.value(operands[1], "u4") if len(operands) > 1 else "None"
        name = "arrive" if "arrive" in parts else "sync"
        g.line(
            f"return synchronising.{name}(c, {number}, {count}, {following}, {instruction.number}, {g.guard or 'None'})"
        )
        g.ends()


def _reduction(g: Generator, instruction: Instruction) -> None:
    operands, operation = instruction.operands, next(part for part in instruction.parts if part in _REDUCTIONS)
    g.unguarded(instruction)
    target, number, *rest = operands
    count = g.value(rest[0], "u4") if len(rest) > 1 else "None"
    if not isinstance(target, Register):
        raise PtxError(f"PTX: expected a register for the result of {instruction.text!r}")
    predicate = g.value(rest[-1], "?")
    g.line(f"return synchronising.reduce(c, {target.index}, {operation!r}, {g.value(number, 'u4')}, {count},"
           f" {predicate}, {instruction.number + 1}, {instruction.number})")  # fmt: skip
    g.ends()


@emits("mbarrier")
def mbarrier(g: Generator, instruction: Instruction) -> None:
    """`mbarrier` and its operations."""
    parts, operands = instruction.parts, list(instruction.operands)
    name = parts[1]
    if "relaxed" in parts and name not in ("expect_tx", "complete_tx"):
        raise PtxError(f"PTX: expected an mbarrier that orders memory, got {instruction.text!r} at {instruction.place}")
    if name in ("try_wait", "test_wait"):
        _wait(g, instruction)
        return
    target = operands.pop(0) if not isinstance(operands[0], Address) else Sink()
    where = operands.pop(0)
    if not isinstance(where, Address):
        raise PtxError(f"PTX: expected an address in {instruction.text!r}")
    at, mask, number = _shared(g, where), g.guard or "None", instruction.number
    values = [g.value(item, "u4") for item in operands]
    one = g.constant(1, "u4")
    if name == "init":
        g.line(f"synchronising.mbarrier_init(c, {at}, {values[0]}, {mask}, {number})")
    elif name == "inval":
        g.line(f"synchronising.mbarrier_inval(c, {at}, {mask}, {number})")
    elif name in ("arrive", "arrive_drop"):
        expect = values[0] if "expect_tx" in parts else "None"
        count = values[0] if values and "expect_tx" not in parts else one
        how = f"drop={name == 'arrive_drop'}, may_complete={'noComplete' not in parts}"
        call = f"synchronising.mbarrier_arrive(c, {at}, {count}, {expect}, {mask}, {number}, {how})"
        g.define(target, call, "u8")
    elif name == "expect_tx":
        g.line(f"synchronising.mbarrier_expect(c, {at}, {values[0]}, {mask}, {number})")
    elif name == "complete_tx":
        g.line(f"synchronising.mbarrier_complete(c, {at}, {values[0]}, {mask}, {number})")
    else:
        raise PtxError(f"PTX: expected an instruction that is known, got {instruction.text!r}")


def _shared(g: Generator, where: Address) -> str:
    """An mbarrier's address, which may be generic, as one in shared memory."""
    base = where.base
    if isinstance(base, Register) and g.kept[base.index][1] == "8":
        text = f"({address(g, where, 'generic')}).astype(u4)"
        return text
    return address(g, where, "shared")


def _wait(g: Generator, instruction: Instruction) -> None:
    parts, operands = instruction.parts, instruction.operands
    target, where = operands[0], operands[1]
    if not isinstance(where, Address):
        raise PtxError(f"PTX: expected an address in {instruction.text!r}")
    parity = "parity" in parts
    state = g.value(operands[2], "u4" if parity else "u8")
    blocks = parts[1] == "try_wait"
    result = g.temporary()
    g.line(f"{result} = synchronising.mbarrier_wait(c, {_shared(g, where)}, {state}, {parity}, {blocks},"
           f" {g.guard or 'None'}, {instruction.number})")  # fmt: skip
    if blocks:
        g.line(f"if {result} is None: return -1")
    g.define(target, result, "?")


@emits("setmaxnreg")
def set_registers(g: Generator, instruction: Instruction) -> None:
    """`setmaxnreg`."""
    count = instruction.operands[0]
    if not isinstance(count, Immediate):
        raise PtxError(f"PTX: expected a constant number of registers in {instruction.text!r}")
    g.unguarded(instruction)
    increase = instruction.parts[1] == "inc"
    g.line(f"synchronising.set_registers(c, {count.value}, {increase}, {instruction.number})")
