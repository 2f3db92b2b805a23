"""Emits Python code for branches, barriers, mbarriers, register counts and shuffles (PTX ISA 8.7, 9.7.12, 13, 19)."""

from __future__ import annotations

from rooflab.bench.emulator.emit.generator import Generator, emits, unknown
from rooflab.bench.emulator.emit.memory_access import located
from rooflab.bench.emulator.text.kinds import dtype_of
from rooflab.bench.emulator.text.syntax import (
    Address,
    Immediate,
    Instruction,
    PtxError,
    Register,
    Sink,
    quoted,
    registers_of,
)

_REDUCTIONS = ("popc", "and", "or")


@emits("bra", "ret", "exit")
def branch(g: Generator, instruction: Instruction) -> None:
    """Emits Python code for `bra`, `ret` and `exit`.  The lanes of a warp may take different branches."""
    (target_number,) = g.flow.targets[instruction.number]
    next_number = instruction.number + 1
    if g.guard is None:
        g.line(f"return {target_number}")
        return
    guard_name = g.temporary()
    g.line(f"{guard_name} = {g.guard}")
    g.line(
        f"return ({target_number} if {guard_name} else {next_number}) if {guard_name}.__class__ is bool_ else"
        f" c.branch({guard_name}, {target_number}, {next_number})"
    )


@emits("brx")
def many_ways(g: Generator, instruction: Instruction) -> None:
    """Emits Python code for `brx.idx`, a branch with several targets."""
    target_numbers = g.flow.targets[instruction.number]
    index_text = g.value(instruction.operands[0], "u4")
    if g.guard is not None:  # lanes whose predicate is false go on after the branch
        index_text = f"choose({g.guard}, {index_text}, {g.constant(len(target_numbers), 'u4')})"
        target_numbers = (*target_numbers, instruction.number + 1)
    g.line(f"return c.many_ways({index_text}, {target_numbers})")


@emits("trap", "brkpt")
def trap(g: Generator, instruction: Instruction) -> None:
    """Emits Python code for `trap`, which stops the kernel with a fault."""
    g.line(f"printing.fail(c, {g.guard or 'None'}, 'the kernel trapped', {instruction.number})")
    g.line(f"return {instruction.number + 1}")


@emits("call")
def call(g: Generator, instruction: Instruction) -> None:
    """Emits Python code for calls to driver functions.  A failed assertion ends the run; `vprintf` prints a line."""
    addresses = [g.value(operand, "u4") for operand in instruction.operands]
    guard, number = g.guard or "None", instruction.number
    if "assertfail" in instruction.opcode:
        g.line(f"printing.assertion(c, ({', '.join(addresses)}), {guard}, {number})")
    else:
        g.line(f"printing.vprintf(c, {', '.join(addresses)}, {guard}, {number})")


@emits("nanosleep")
def sleep(g: Generator, instruction: Instruction) -> None:
    """Emits Python code for `nanosleep`, which lets other threads run next."""
    g.line("c.steps += 1")


@emits("bar", "barrier")
def barrier(g: Generator, instruction: Instruction) -> None:
    """Emits Python code for `bar.sync`, `bar.arrive`, `bar.red`, `bar.warp.sync` and `barrier.cluster`."""
    opcode_parts, operands = instruction.parts, list(instruction.operands)
    next_pc = instruction.number + 1
    if opcode_parts[1] == "warp":
        (_,) = operands  # the scheduler reads the mask, and brings these lanes here together
        g.line(f"c.group.order_lanes(c.lanes[c.lanes_under({g.guard or 'None'})])")
    elif opcode_parts[1] == "cluster":
        g.unguarded(instruction)
        if "arrive" in opcode_parts:
            has_release = "relaxed" not in opcode_parts
            g.line(f"waiting_of(c.group).clusters.arrive(c, {has_release}, {instruction.number})")
        else:
            g.line(f"return waiting_of(c.group).clusters.wait(c, {next_pc}, {instruction.number})")
    elif "red" in opcode_parts:
        _reduction(g, instruction)
    else:
        bar_id = g.value(operands[0], "u4")
        count = g.value(operands[1], "u4") if len(operands) > 1 else "None"
        name = "arrive" if "arrive" in opcode_parts else "sync"
        g.line(
            f"return synchronising.{name}(c, {bar_id}, {count}, {next_pc}, {instruction.number}, {g.guard or 'None'})"
        )


def _reduction(g: Generator, instruction: Instruction) -> None:
    operands, operation = instruction.operands, next(part for part in instruction.parts if part in _REDUCTIONS)
    g.unguarded(instruction)
    target, barrier_operand, *last_operands = operands
    threads = g.value(last_operands[0], "u4") if len(last_operands) > 1 else "None"
    if not isinstance(target, Register):
        raise PtxError(f"PTX: expected a register for the result of {instruction.text!r}")
    predicate_text = g.value(last_operands[-1], "?")
    g.line(
        f"return synchronising.reduce(c, {target.index}, {operation!r}, {g.value(barrier_operand, 'u4')}, {threads},"
        f" {predicate_text}, {instruction.number + 1}, {instruction.number})"
    )


@emits("mbarrier")
def mbarrier(g: Generator, instruction: Instruction) -> None:
    """Emits Python code for the `mbarrier` instructions."""
    opcode_parts, operands = instruction.parts, list(instruction.operands)
    operation_name = opcode_parts[1]
    if "relaxed" in opcode_parts and operation_name not in ("expect_tx", "complete_tx"):
        raise PtxError(
            f"PTX: expected an mbarrier that orders memory, got {quoted(instruction.text, instruction.place)}"
        )
    if operation_name in ("try_wait", "test_wait"):
        _wait(g, instruction)
        return
    target_operand = operands.pop(0) if not isinstance(operands[0], Address) else Sink()
    address = located(g, operands.pop(0), "shared", instruction)
    mask, number = g.guard or "None", instruction.number
    value_texts = [g.value(operand, "u4") for operand in operands]
    default_count = g.constant(1, "u4")
    if operation_name in ("init", "inval"):
        arguments = ", ".join([address, *value_texts])
        g.line(f"waiting_of(c.group).mbarriers.{operation_name}(c, {arguments}, {mask}, {number})")
    elif operation_name in ("arrive", "arrive_drop"):
        n_bytes = value_texts[0] if "expect_tx" in opcode_parts else "None"
        count = value_texts[0] if value_texts and "expect_tx" not in opcode_parts else default_count
        options = f"drop={operation_name == 'arrive_drop'}, may_complete={'noComplete' not in opcode_parts}"
        code = f"synchronising.update_mbarrier(c, 'arrive', {address}, {count}, {n_bytes}, {mask}, {number}, {options})"
        g.define(target_operand, code, "u8")
    elif operation_name in ("expect_tx", "complete_tx"):
        method = operation_name.removesuffix("_tx")
        g.line(f"synchronising.update_mbarrier(c, {method!r}, {address}, {value_texts[0]}, {mask}, {number})")
    else:
        raise unknown(instruction)


def _wait(g: Generator, instruction: Instruction) -> None:
    opcode_parts, operands = instruction.parts, instruction.operands
    target_operand, address_text = operands[0], located(g, operands[1], "shared", instruction)
    uses_parity = "parity" in opcode_parts
    phase_text = g.value(operands[2], "u4" if uses_parity else "u8")
    is_try_wait = opcode_parts[1] == "try_wait"
    read = g.flow.live.get(instruction.number + 1, ())
    if is_try_wait and not any(register.index in read for register in registers_of(target_operand)):
        g.define(target_operand, "np.bool_(False)", "?")  # it may end before the phase, and nothing asks whether it did
        return
    result_name = g.temporary()
    g.line(
        f"{result_name} = synchronising.mbarrier_wait(c, {address_text}, {phase_text}, {is_try_wait},"
        f" {g.guard or 'None'}, {instruction.number})"
    )
    if is_try_wait:
        g.line(f"if {result_name} is None: return -1")
    g.define(target_operand, result_name, "?")


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
    target_operand, value_operand, source_lane, clamp_operand, _ = instruction.operands  # the scheduler reads the mask
    targets = g.items(target_operand)
    dtype = g.dtypes[value_operand.index] if isinstance(value_operand, Register) else "u4"
    arguments = f"{g.value(value_operand, dtype)}, {g.value(source_lane, 'u4')}, {g.value(clamp_operand, 'u4')}"
    g.define_many(targets, f"warps.shuffle(c, {shuffle_mode!r}, {arguments}, {len(targets) > 1})", (dtype, "?"))


@emits("vote")
def vote(g: Generator, instruction: Instruction) -> None:
    """Emits Python code for `vote.sync`."""
    vote_mode = instruction.parts[2]
    target_operand, predicate, mask = instruction.operands
    call_text = f"warps.vote(c, {vote_mode!r}, {g.value(predicate, '?')}, {g.value(mask, 'u4')}, {g.guard or 'None'})"
    g.define(target_operand, call_text, "u4" if vote_mode == "ballot" else "?")


@emits("match")
def match(g: Generator, instruction: Instruction) -> None:
    """Emits Python code for `match.any.sync` and `match.all.sync`."""
    match_mode = instruction.parts[1]
    target_operand, value, mask = instruction.operands
    dtype = dtype_of(instruction.parts[-1])
    call_text = f"warps.match(c, {match_mode!r}, {g.value(value, dtype)}, {g.value(mask, 'u4')})"
    g.define_many(g.items(target_operand), call_text, ("u4", "?"))


@emits("redux")
def reduce(g: Generator, instruction: Instruction) -> None:
    """Emits Python code for `redux.sync`."""
    opcode_parts = instruction.parts
    target_operand, value, mask = instruction.operands
    dtype = dtype_of(opcode_parts[-1])
    code = f"warps.reduce(c, {opcode_parts[2]!r}, {g.value(value, dtype)}, {g.value(mask, 'u4')}, {g.guard or 'None'})"
    g.define(target_operand, code, dtype)


@emits("elect")
def elect(g: Generator, instruction: Instruction) -> None:
    """Emits Python code for `elect.sync`, which selects the lowest lane in a mask."""
    target_operand, mask_operand = instruction.operands
    g.define_many(g.items(target_operand), f"warps.elect(c, {g.value(mask_operand, 'u4')})", ("u4", "?"))


@emits("activemask")
def active_mask(g: Generator, instruction: Instruction) -> None:
    """Emits Python code for `activemask`."""
    g.define(instruction.operands[0], "warps.active_mask(c)", "u4")
