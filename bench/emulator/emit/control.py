"""Emits Python code for branches, barriers, mbarriers, register counts and shuffles (PTX ISA 8.7, 9.7.12, 13, 20)."""

from __future__ import annotations

from rooflab.bench.emulator.emit.generator import Generator, emits, unknown
from rooflab.bench.emulator.emit.memory_access import located
from rooflab.bench.emulator.text.kinds import dtype_of
from rooflab.bench.emulator.text.syntax import (
    Address,
    Immediate,
    Instruction,
    OperandGroup,
    PtxError,
    Register,
    Sink,
    quoted,
)

_REDUCTIONS = ("popc", "and", "or")


@emits("bra", "ret", "exit")
def branch(g: Generator, instruction: Instruction) -> None:
    """Emits Python code for `bra`, `ret` and `exit`.  The lanes of a warp may take different branches."""
    (target,) = g.flow.targets(instruction.number)
    next_number = instruction.number + 1
    if g.guard is None:
        g.line(f"return {target}")
        return
    name = g.temporary()
    g.line(f"{name} = {g.guard}")
    g.line(
        f"return ({target} if {name} else {next_number}) if {name}.__class__ is bool_ else"
        f" c.branch({name}, {target}, {next_number})"
    )


@emits("brx")
def many_ways(g: Generator, instruction: Instruction) -> None:
    """Emits Python code for `brx.idx`, a branch with several targets."""
    targets = g.flow.targets(instruction.number)
    index_text = g.value(instruction.operands[0], "u4")
    if g.guard is not None:  # lanes whose predicate is false go on after the branch
        index_text = f"choose({g.guard}, {index_text}, {g.constant(len(targets), 'u4')})"
        targets = (*targets, instruction.number + 1)
    g.line(f"return c.many_ways({index_text}, {targets})")


@emits("trap", "brkpt")
def trap(g: Generator, instruction: Instruction) -> None:
    """Emits Python code for `trap`, which stops the kernel with a fault."""
    g.line(f"synchronising.fail({g.guard or 'np.bool_(True)'}, 'the kernel trapped', {instruction.number})")
    g.line(f"return {instruction.number + 1}")


@emits("call")
def call(g: Generator, instruction: Instruction) -> None:
    """Emits Python code for calls to driver functions.  A failed assertion ends the run; `vprintf` prints nothing."""
    if "assertfail" in instruction.opcode:
        failure_text = "a device-side assertion failed"
        g.line(f"synchronising.fail({g.guard or 'np.bool_(True)'}, {failure_text!r}, {instruction.number})")


@emits("nanosleep")
def sleep(g: Generator, instruction: Instruction) -> None:
    """Emits Python code for `nanosleep`, which lets other threads run next."""
    g.line("c.steps += 1")


@emits("bar", "barrier")
def barrier(g: Generator, instruction: Instruction) -> None:
    """Emits Python code for `bar.sync`, `bar.arrive`, `bar.red`, `bar.warp.sync` and `barrier.cluster`."""
    opcode_parts, operands = instruction.parts, list(instruction.operands)
    following = instruction.number + 1
    if opcode_parts[1] == "warp":
        (_,) = operands  # the scheduler reads the mask, and brings these lanes here together
    elif opcode_parts[1] == "cluster":
        name = "cluster_arrive" if "arrive" in opcode_parts else "cluster_wait"
        has_release = "relaxed" not in opcode_parts
        g.unguarded(instruction)
        if name == "cluster_wait":
            g.line(f"return waiting_of(c.group).clusters.wait(c, {following}, {instruction.number})")
            g.ends()
        else:
            g.line(f"waiting_of(c.group).clusters.arrive(c, {has_release}, {instruction.number})")
    elif "red" in opcode_parts:
        _reduction(g, instruction)
    else:
        bar_id = g.value(operands[0], "u4")
        count = g.value(operands[1], "u4") if len(operands) > 1 else "None"
        name = "arrive" if "arrive" in opcode_parts else "sync"
        g.line(
            f"return synchronising.{name}(c, {bar_id}, {count}, {following}, {instruction.number}, {g.guard or 'None'})"
        )
        g.ends()


def _reduction(g: Generator, instruction: Instruction) -> None:
    operands, operation = instruction.operands, next(part for part in instruction.parts if part in _REDUCTIONS)
    g.unguarded(instruction)
    target, barrier_operand, *last_operands = operands
    threads = g.value(last_operands[0], "u4") if len(last_operands) > 1 else "None"
    if not isinstance(target, Register):
        raise PtxError(f"PTX: expected a register for the result of {instruction.text!r}")
    predicate = g.value(last_operands[-1], "?")
    g.line(
        f"return synchronising.reduce(c, {target.index}, {operation!r}, {g.value(barrier_operand, 'u4')}, {threads},"
        f" {predicate}, {instruction.number + 1}, {instruction.number})"
    )
    g.ends()


@emits("mbarrier")
def mbarrier(g: Generator, instruction: Instruction) -> None:
    """Emits Python code for the `mbarrier` instructions."""
    opcode_parts, operands = instruction.parts, list(instruction.operands)
    name = opcode_parts[1]
    if "relaxed" in opcode_parts and name not in ("expect_tx", "complete_tx"):
        raise PtxError(
            f"PTX: expected an mbarrier that orders memory, got {quoted(instruction.text, instruction.place)}"
        )
    if name in ("try_wait", "test_wait"):
        _wait(g, instruction)
        return
    target = operands.pop(0) if not isinstance(operands[0], Address) else Sink()
    address = located(g, operands.pop(0), "shared", instruction)
    mask, number = g.guard or "None", instruction.number
    values = [g.value(operand, "u4") for operand in operands]
    default_count = g.constant(1, "u4")
    if name == "init":
        g.line(f"waiting_of(c.group).mbarriers.init(c, {address}, {values[0]}, {mask}, {number})")
    elif name == "inval":
        g.line(f"waiting_of(c.group).mbarriers.inval(c, {address}, {mask}, {number})")
    elif name in ("arrive", "arrive_drop"):
        expect = values[0] if "expect_tx" in opcode_parts else "None"
        count = values[0] if values and "expect_tx" not in opcode_parts else default_count
        options = f"drop={name == 'arrive_drop'}, may_complete={'noComplete' not in opcode_parts}"
        code = f"synchronising.update_mbarrier(c, 'arrive', {address}, {count}, {expect}, {mask}, {number}, {options})"
        g.define(target, code, "u8")
    elif name == "expect_tx":
        g.line(f"synchronising.update_mbarrier(c, 'expect', {address}, {values[0]}, {mask}, {number})")
    elif name == "complete_tx":
        g.line(f"synchronising.update_mbarrier(c, 'complete', {address}, {values[0]}, {mask}, {number})")
    else:
        raise unknown(instruction)


def _wait(g: Generator, instruction: Instruction) -> None:
    opcode_parts, operands = instruction.parts, instruction.operands
    target, address = operands[0], located(g, operands[1], "shared", instruction)
    uses_parity = "parity" in opcode_parts
    phase_state = g.value(operands[2], "u4" if uses_parity else "u8")
    is_try_wait = opcode_parts[1] == "try_wait"
    result = g.temporary()
    g.line(
        f"{result} = synchronising.mbarrier_wait(c, {address}, {phase_state}, {is_try_wait},"
        f" {g.guard or 'None'}, {instruction.number})"
    )
    if is_try_wait:
        g.line(f"if {result} is None: return -1")
    g.define(target, result, "?")


@emits("setmaxnreg")
def set_registers(g: Generator, instruction: Instruction) -> None:
    """Emits Python code for `setmaxnreg`, which changes the number of registers per thread."""
    register_count = instruction.operands[0]
    if not isinstance(register_count, Immediate):
        raise PtxError(f"PTX: expected a constant number of registers in {instruction.text!r}")
    g.unguarded(instruction)
    is_increase = instruction.parts[1] == "inc"
    g.line(f"synchronising.set_registers(c, {register_count.value}, {is_increase}, {instruction.number})")


@emits("shfl")
def shuffle(g: Generator, instruction: Instruction) -> None:
    """Emits Python code for `shfl.sync`."""
    shuffle_mode = instruction.parts[2]
    target, value, source_lane, clamp, _ = instruction.operands  # the scheduler reads the mask
    has_predicate = isinstance(target, OperandGroup)
    result_register = target.items[0] if isinstance(target, OperandGroup) else target
    dtype = g.dtypes[value.index] if isinstance(value, Register) else "u4"
    arguments = f"{g.value(value, dtype)}, {g.value(source_lane, 'u4')}, {g.value(clamp, 'u4')}"
    name, valid_name = g.temporary(), g.temporary()
    g.line(f"{name}, {valid_name} = warps.shuffle(c, {shuffle_mode!r}, {arguments}, {has_predicate})")
    g.define(result_register, name, dtype)
    if isinstance(target, OperandGroup):
        g.define(target.items[1], valid_name, "?")


@emits("vote")
def vote(g: Generator, instruction: Instruction) -> None:
    """Emits Python code for `vote.sync`."""
    vote_mode = instruction.parts[2]
    target, predicate, mask = instruction.operands
    call_text = f"warps.vote(c, {vote_mode!r}, {g.value(predicate, '?')}, {g.value(mask, 'u4')}, {g.guard or 'None'})"
    g.define(target, call_text, "u4" if vote_mode == "ballot" else "?")


@emits("match")
def match(g: Generator, instruction: Instruction) -> None:
    """Emits Python code for `match.any.sync` and `match.all.sync`."""
    match_mode = instruction.parts[1]
    target, value, mask = instruction.operands
    dtype = dtype_of(instruction.parts[-1])
    name, all_equal_name = g.temporary(), g.temporary()
    g.line(f"{name}, {all_equal_name} = warps.match(c, {match_mode!r}, {g.value(value, dtype)}, {g.value(mask, 'u4')})")
    g.define(target.items[0] if isinstance(target, OperandGroup) else target, name, "u4")
    if isinstance(target, OperandGroup):
        g.define(target.items[1], all_equal_name, "?")


@emits("redux")
def reduce(g: Generator, instruction: Instruction) -> None:
    """Emits Python code for `redux.sync`."""
    opcode_parts = instruction.parts
    target, value, mask = instruction.operands
    dtype = dtype_of(opcode_parts[-1])
    code = f"warps.reduce(c, {opcode_parts[2]!r}, {g.value(value, dtype)}, {g.value(mask, 'u4')}, {g.guard or 'None'})"
    g.define(target, code, dtype)


@emits("elect")
def elect(g: Generator, instruction: Instruction) -> None:
    """Emits Python code for `elect.sync`, which selects the lowest lane in a mask."""
    target, mask = instruction.operands
    name, leader_name = g.temporary(), g.temporary()
    g.line(f"{name}, {leader_name} = warps.elect(c, {g.value(mask, 'u4')})")
    result_items = g.items(target)
    if isinstance(result_items[0], Register):
        g.define(result_items[0], name, "u4")
    g.define(result_items[1], leader_name, "?")


@emits("activemask")
def active_mask(g: Generator, instruction: Instruction) -> None:
    """Emits Python code for `activemask`."""
    g.define(instruction.operands[0], "warps.active_mask(c)", "u4")
