"""Asynchronous copies and tensor maps (PTX ISA 8.7, sections 9.7.9.25 to 29)."""

from __future__ import annotations

from rooflab.bench.ptx.emit.memory import address
from rooflab.bench.ptx.generate import Generator, emits
from rooflab.bench.ptx.text.syntax import Address, Immediate, Instruction, Negated, Operand, PtxError, Register

_REDUCTIONS = ("add", "min", "max", "inc", "dec", "and", "or", "xor")


def _at(g: Generator, operand: Operand, space: str, instruction: Instruction) -> str:
    if not isinstance(operand, Address):
        raise PtxError(f"PTX: expected an address in {instruction.text!r}")
    if space == "shared":
        text = address(g, operand, "generic" if _is_wide(g, operand) else "shared")
        return f"({text}).astype(u4)" if _is_wide(g, operand) else text
    return address(g, operand, space)


def _is_wide(g: Generator, operand: Address) -> bool:
    return isinstance(operand.base, Register) and g.kept[operand.base.index][1] == "8"


@emits("cp")
def copy(g: Generator, instruction: Instruction) -> None:
    """`cp.async` and the bulk copies."""
    opcode, operands = instruction.opcode, instruction.operands
    mask, number = g.guard or "None", instruction.number
    if "prefetch" in instruction.parts:
        return
    if opcode.startswith(("cp.async.bulk", "cp.reduce.async.bulk")):
        _bulk(g, instruction, mask, number)
    elif opcode.startswith("cp.async.mbarrier.arrive"):
        at = _at(g, operands[0], "shared", instruction)
        g.line(f"copying.arrive_after(c, {at}, {'noinc' in instruction.parts}, {mask}, {number})")
    elif opcode == "cp.async.commit_group":
        g.unguarded(instruction)
        g.line(f"copying.commit(c, {number})")
    elif opcode == "cp.async.wait_group":
        g.unguarded(instruction)
        g.line(f"copying.wait(c, {_constant(operands[0])}, {number})")
    elif opcode == "cp.async.wait_all":
        g.unguarded(instruction)
        g.line(f"copying.wait(c, None, {number})")
    elif opcode.startswith("cp.async.c"):
        target, source = _at(g, operands[0], "shared", instruction), _at(g, operands[1], "global", instruction)
        size = _constant(operands[2])
        if "cg" in instruction.parts and size != 16:
            raise PtxError(f"PTX: expected 16 bytes for cp.async.cg, got {instruction.text!r}")
        # A fourth operand is the source's size or a predicate, or a cache policy where the opcode says so.
        given = operands[3] if len(operands) > 3 and not (len(operands) == 4 and "cache_hint" in opcode) else None
        taken = "None" if given is None else _taken(g, given, size)
        g.line(f"copying.copy(c, {target}, {source}, {size}, {taken}, {mask}, {number})")
    else:
        raise PtxError(f"PTX: expected an instruction that is known, got {instruction.text!r}")


def _taken(g: Generator, given: Operand, size: int) -> str:
    """Bytes that come from the source: as many as are given, or none where a predicate says to ignore it."""
    if isinstance(given, Negated) or isinstance(given, Register) and given.type == "pred":
        return f"choose({g.value(given, '?')}, {g.constant(0, 'u4')}, {g.constant(size, 'u4')})"
    return g.value(given, "u4")


def _constant(operand: Operand) -> int:
    if not isinstance(operand, Immediate):
        raise PtxError(f"PTX: expected a constant, got {operand}")
    return operand.value


def _bulk(g: Generator, instruction: Instruction, mask: str, number: int) -> None:
    opcode, operands, parts = instruction.opcode, instruction.operands, instruction.parts
    if "commit_group" in parts:
        g.line(f"bulk.commit_bulk(c, {mask}, {number})")
        return
    if "wait_group" in parts:
        g.line(f"bulk.wait_bulk(c, {_constant(operands[0])}, {'read' in parts}, {mask}, {number})")
        return
    operation = next((part for part in parts if part in _REDUCTIONS), None) if opcode.startswith("cp.reduce") else None
    if ".global" not in opcode:
        _between(g, instruction, mask)
        return
    into_shared = opcode.index(".shared") < opcode.index(".global")
    if "tensor" in parts:
        if any(part.startswith(("im2col", "tile::")) for part in parts):
            raise PtxError(f"PTX: expected an instruction that is known, got {instruction.text!r}")
        _tensor(g, instruction, into_shared, operation, mask)
        return
    size = g.value(operands[2], "u4")
    if into_shared:
        target, source = _at(g, operands[0], "shared", instruction), _at(g, operands[1], "global", instruction)
        barrier = _at(g, operands[3], "shared", instruction)
        multicast = g.value(operands[4], "u2") if "multicast::cluster" in opcode else "None"
        g.line(f"bulk.bulk_load(c, {target}, {source}, {size}, {barrier}, {multicast}, {mask}, {number})")
    else:
        target, source = _at(g, operands[0], "global", instruction), _at(g, operands[1], "shared", instruction)
        kind = parts[-1] if operation else ""
        g.line(f"bulk.bulk_store(c, {target}, {source}, {size}, {operation!r}, {kind!r}, {mask}, {number})")


def _between(g: Generator, instruction: Instruction, mask: str) -> None:
    operands = instruction.operands
    if instruction.opcode.startswith("cp.reduce") or len(operands) != 4:
        raise PtxError(f"PTX: expected an instruction that is known, got {instruction.text!r}")
    target, source, barrier = (_at(g, operands[place], "shared", instruction) for place in (0, 1, 3))
    size = g.value(operands[2], "u4")
    g.line(f"remote.copy(c, {target}, {source}, {size}, {barrier}, {mask}, {instruction.number})")


def _tensor(g: Generator, instruction: Instruction, into_shared: bool, operation: str | None, mask: str) -> None:
    operands, number = instruction.operands, instruction.number
    place = 1 if into_shared else 0
    tensor = operands[place]
    if not isinstance(tensor, Address):
        raise PtxError(f"PTX: expected a tensor map in {instruction.text!r}")
    where = address(g, Address(tensor.base, tensor.offset), "generic")
    coordinates = ", ".join(g.value(item, "i4") for item in tensor.coordinates)
    shared = _at(g, operands[1 - place], "shared", instruction)
    if into_shared:
        barrier = _at(g, operands[2], "shared", instruction)
        multicast = g.value(operands[3], "u2") if "multicast::cluster" in instruction.opcode else "None"
        g.line(f"bulk.tensor_load(c, {shared}, {where}, ({coordinates},), {barrier}, {multicast}, {mask}, {number})")
    else:
        g.line(f"bulk.tensor_store(c, {where}, ({coordinates},), {shared}, {operation!r}, {mask}, {number})")


@emits("tensormap")
def tensor_maps(g: Generator, instruction: Instruction) -> None:
    """`tensormap.replace`, `tensormap.cp_fenceproxy`."""
    parts, operands = instruction.parts, instruction.operands
    mask, number = g.guard or "None", instruction.number
    if parts[1] == "cp_fenceproxy":
        target, source = _at(g, operands[0], "global", instruction), _at(g, operands[1], "shared", instruction)
        g.line(f"maps.copy(c, {target}, {source}, {mask}, {number})")
        return
    space = "shared" if any(part.startswith("shared") for part in parts) else "generic"
    at = _at(g, operands[0], space, instruction)
    field = parts[3]
    ordinal = _constant(operands[1]) if len(operands) == 3 else 0
    size = "u8" if parts[-1] == "b64" else "u4"
    value = g.value(operands[-1], size)
    g.line(f"maps.replace(c, {space!r}, {at}, {field!r}, {ordinal}, {value}, {mask}, {number})")
