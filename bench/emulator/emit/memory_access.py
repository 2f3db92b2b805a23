"""Emits Python code for loads, stores, atomics, fences, copies, tensor maps (PTX ISA 8.7, 9.7.9, 9.7.13.4 to 6)."""

from __future__ import annotations

from rooflab.bench.emulator.emit.generator import Generator, address_of, emits, unknown
from rooflab.bench.emulator.text import syntax
from rooflab.bench.emulator.text.kinds import DTYPES, dtype_of

STRONG_ORDERS = frozenset(("volatile", "relaxed", "acquire", "mmio"))
"""The memory orders of loads with which a thread may wait for another thread's store."""
SPACES = ("global", "shared", "local", "param", "const")
_REDUCTIONS = ("add", "min", "max", "inc", "dec", "and", "or", "xor")
_ATOMIC_OPERATIONS = (*_REDUCTIONS, "exch", "cas")


def space_of(instruction: syntax.Instruction) -> str:
    """Returns the state space that an opcode names (such as `shared`), or `generic` if it names no space."""
    for opcode_part in instruction.parts[1:]:
        if opcode_part.split("::")[0] in SPACES:
            return opcode_part.split("::")[0]
    return "generic"


def address(g: Generator, operand: syntax.Address, space: str) -> str:
    """Returns the Python expression of an address in the state space `space`: uint32 if it is `shared`, else uint64."""
    size = "u4" if space == "shared" else "u8"
    base, base_offset = operand.base, operand.offset
    if isinstance(base, syntax.Symbol):
        address_text = f"c.address({base.name!r}, {size})"
    elif isinstance(base, syntax.Immediate):
        address_text = g.constant(base.value, size)
    else:
        dtype = g.dtypes[base.index]
        # Some compilers keep a shared address in 64 bits, or a generic address in 32 bits.
        is_narrow = int(dtype[1]) < int(size[1])
        address_text = f"{g.value(base, 'u' + dtype[1])}.astype({size})" if is_narrow else g.value(base, size)
    return f"{address_text} + {g.constant(base_offset, size)}" if base_offset else address_text


def width(kind: str) -> int:
    """Returns the number of bytes of a value of the PTX type `kind`."""
    return int(dtype_of(kind)[1])


@emits("ld", "ldu")
def load(g: Generator, instruction: syntax.Instruction) -> None:
    """Emits Python code for `ld`."""
    opcode_parts, space = instruction.parts, space_of(instruction)
    kind = opcode_parts[-1]
    target_operand, source_address = instruction.operands[0], address_of(instruction.operands[1], instruction)
    if space == "param" and isinstance(source_address.base, syntax.Symbol) and g.is_local(source_address.base.name):
        space = "local"
    if kind == "b128":
        raise syntax.PtxError(f"PTX: expected a type of at most 64 bits in {instruction.text!r}")
    items = g.items(target_operand)
    ptr_text = address(g, source_address, space)
    mask = g.guard or "None"
    if not STRONG_ORDERS.isdisjoint(opcode_parts):
        address_name = g.temporary()
        g.line(f"{address_name} = {ptr_text}")
        g.line(f"c.polls({instruction.number}, {address_name})")
        ptr_text = address_name
    dtype, size = dtype_of(kind), width(kind)
    call_text = f"access.load(c, {space!r}, {ptr_text}, {mask}, {size}, {len(items)}, {instruction.number})"
    if dtype[0] == "i":
        g.define_many(items, f"(value.view({dtype}) for value in {call_text})", dtype)
    else:
        g.define_many(items, call_text, f"u{size}")


@emits("st")
def store(g: Generator, instruction: syntax.Instruction) -> None:
    """Emits Python code for `st`."""
    opcode_parts, space = instruction.parts, space_of(instruction)
    if "bulk" in opcode_parts or ("async" in opcode_parts and len(instruction.operands) != 3):
        raise unknown(instruction)
    target_address, source_operand = address_of(instruction.operands[0], instruction), instruction.operands[1]
    if space == "param" and isinstance(target_address.base, syntax.Symbol) and g.is_local(target_address.base.name):
        space = "local"
    size = width(opcode_parts[-1])
    values = ", ".join(g.value(operand, f"u{size}") for operand in g.items(source_operand))
    addr = address(g, target_address, space)
    if "async" in opcode_parts:
        mbar = address(g, address_of(instruction.operands[2], instruction), "shared")
        g.line(f"bulk.store_remote(c, {addr}, ({values},), {size}, {mbar}, {g.guard or 'None'}, {instruction.number})")
        return
    g.line(f"access.store(c, {space!r}, {addr}, ({values},), {g.guard or 'None'}, {size}, {instruction.number})")


@emits("atom", "red")
def atomic(g: Generator, instruction: syntax.Instruction) -> None:
    """Emits Python code for `atom` and `red`."""
    parts, space = instruction.parts, space_of(instruction)
    op_name = next((modifier for modifier in parts if modifier in _ATOMIC_OPERATIONS), None)
    kind = next(modifier for modifier in reversed(parts) if modifier in DTYPES)
    if op_name is None or "async" in parts or ("noftz" in parts and kind not in ("f16", "bf16", "f16x2", "bf16x2")):
        raise unknown(instruction)
    operands = list(instruction.operands)
    target_operand = operands.pop(0) if parts[0] == "atom" else syntax.Sink()
    address_operand = address_of(operands.pop(0), instruction)
    dtype = dtype_of(kind)
    operand_groups = [g.items(operand) for operand in operands]
    result_operands = g.items(target_operand)
    memory_order = next((modifier for modifier in parts if modifier in ("acquire", "release", "acq_rel")), "relaxed")
    if "cta" in parts:
        memory_order = "relaxed"  # for other CTAs
    for item_index in range(len(operand_groups[0])):
        values = ", ".join(g.value(operand_group[item_index], dtype) for operand_group in operand_groups)
        address_text = address(g, address_operand, space)
        if item_index:
            address_text = f"({address_text}) + {g.constant(item_index * width(kind), 'u8')}"
        call_text = (
            f"atomics.atomic(c, {space!r}, {address_text}, {op_name!r}, {kind!r}, ({values},), {g.guard or 'None'},"
            f" {memory_order!r}, {instruction.number})"
        )
        result_operand = result_operands[item_index] if len(result_operands) > item_index else syntax.Sink()
        if isinstance(result_operand, syntax.Register):
            g.define(result_operand, call_text, dtype)
        else:
            g.line(call_text)


@emits("fence", "membar")
def fence(g: Generator, instruction: syntax.Instruction) -> None:
    """Emits Python code for fences.  Proxy fences are also reported to the race detector."""
    op_parts = instruction.parts
    if "proxy" in op_parts or any(modifier.startswith("mbarrier_init") for modifier in op_parts):
        kind, guard_text = ".".join(op_parts[1:]), g.guard or "None"
        if "tensormap::generic" in op_parts and isinstance(pointer := (*instruction.operands, None)[0], syntax.Address):
            g.line(f"tensor_maps.fence(c, {address(g, pointer, 'generic')}, {guard_text})")
        g.line(f"synchronising.proxy_fence(c, {kind!r}, {guard_text})")
    elif "cta" not in op_parts:  # in this model only barriers order accesses within a CTA
        g.unguarded(instruction)
        g.line(f"synchronising.fence(c, {instruction.number})")


@emits("prefetch", "prefetchu", "applypriority", "discard", "createpolicy", "pmevent")
def hints(g: Generator, instruction: syntax.Instruction) -> None:
    """Emits Python code for instructions that do not change results, such as `prefetch`."""
    if instruction.parts[0] == "createpolicy":
        g.define(instruction.operands[0], g.constant(0, "u8"), "u8")


@emits("griddepcontrol")
def depend(g: Generator, instruction: syntax.Instruction) -> None:
    """Emits Python code for `griddepcontrol`."""
    g.line(f"synchronising.depend(c, {instruction.parts[1]!r}, {g.guard or 'None'})")


def located(g: Generator, operand: syntax.Operand, space: str, instruction: syntax.Instruction) -> str:
    """Returns the Python expression of an operand's address in `space`.  If `space` is `shared` but the address is in a
    64-bit register, this address counts as generic."""
    pointer = address_of(operand, instruction)
    if space == "shared" and isinstance(pointer.base, syntax.Register) and g.dtypes[pointer.base.index][1] == "8":
        return f"({address(g, pointer, 'generic')}).astype(u4)"
    return address(g, pointer, space)


@emits("cp")
def copy(g: Generator, instruction: syntax.Instruction) -> None:
    """Emits Python code for `cp.async` and for bulk copies."""
    opcode, operands = instruction.opcode, instruction.operands
    mask, instruction_number = g.guard or "None", instruction.number
    if "prefetch" in instruction.parts:
        return
    if opcode.startswith(("cp.async.bulk", "cp.reduce.async.bulk")):
        _bulk(g, instruction, mask, instruction_number)
    elif opcode.startswith("cp.async.mbarrier.arrive"):
        barrier_text = located(g, operands[0], "shared", instruction)
        g.line(f"copying.arrive_after(c, {barrier_text}, {'noinc' in instruction.parts}, {mask}, {instruction_number})")
    elif opcode in ("cp.async.commit_group", "cp.async.wait_group", "cp.async.wait_all"):
        g.unguarded(instruction)
        newest = _constant(operands[0]) if operands else None
        g.line("copying.commit(c)" if "commit_group" in opcode else f"copying.wait(c, {newest})")
    elif opcode.startswith("cp.async.c"):
        target, source = located(g, operands[0], "shared", instruction), located(g, operands[1], "global", instruction)
        size = _constant(operands[2])
        if "cg" in instruction.parts and size != 16:
            raise syntax.PtxError(f"PTX: expected 16 bytes for cp.async.cg, got {instruction.text!r}")
        # A fourth operand is the source's size or a predicate, or a cache policy if the opcode says `cache_hint`.
        operand = operands[3] if len(operands) > 3 and not (len(operands) == 4 and "cache_hint" in opcode) else None
        source_bytes = "None" if operand is None else _taken(g, operand, size)
        g.line(f"copying.copy(c, {target}, {source}, {size}, {source_bytes}, {mask}, {instruction_number})")
    else:
        raise unknown(instruction)


def _taken(g: Generator, operand: syntax.Operand, size: int) -> str:
    """Returns a Python expression for the number of bytes that a `cp.async` reads. A predicate operand (`ignore-src`)
    gives 0 if it is true, else `size`. Any other operand is the number itself."""
    if isinstance(operand, syntax.Negated) or (isinstance(operand, syntax.Register) and operand.type == "pred"):
        return f"choose({g.value(operand, '?')}, {g.constant(0, 'u4')}, {g.constant(size, 'u4')})"
    return g.value(operand, "u4")


def _constant(operand: syntax.Operand) -> int:
    if not isinstance(operand, syntax.Immediate):
        raise syntax.PtxError(f"PTX: expected a constant, got {operand}")
    return operand.value


def _bulk(g: Generator, instruction: syntax.Instruction, mask: str, number: int) -> None:
    opcode, operands, op_parts = instruction.opcode, instruction.operands, instruction.parts
    if "commit_group" in op_parts:
        g.line(f"bulk.commit_bulk(c, {mask})")
        return
    if "wait_group" in op_parts:
        g.line(f"bulk.wait_bulk(c, {_constant(operands[0])}, {'read' in op_parts}, {mask})")
        return
    op_name = next((part for part in op_parts if part in _REDUCTIONS), None) if opcode.startswith("cp.reduce") else None
    is_load = ".global" not in opcode or opcode.index(".shared") < opcode.index(".global")
    if "tensor" in op_parts:
        if any(part.startswith(("im2col", "tile::")) for part in op_parts):
            raise unknown(instruction)
        _tensor(g, instruction, is_load, op_name, mask)
        return
    size = g.value(operands[2], "u4")
    if is_load:
        from_shared = ".global" not in opcode
        if from_shared and (op_name or len(operands) != 4):
            raise unknown(instruction)
        spaces = ("shared", "shared" if from_shared else "global", "shared")
        pointers = zip((*operands[:2], operands[3]), spaces, strict=True)
        target, source, barrier = (located(g, operand, space, instruction) for operand, space in pointers)
        cta_mask = g.value(operands[4], "u2") if "multicast::cluster" in opcode else "None"
        arguments = f"{target}, {source}, {size}, {barrier}, {cta_mask}, {mask}, {number}, {from_shared}"
        g.line(f"bulk.bulk_load(c, {arguments})")
    else:
        target, source = located(g, operands[0], "global", instruction), located(g, operands[1], "shared", instruction)
        kind = op_parts[-1] if op_name else ""
        g.line(f"bulk.bulk_store(c, {target}, {source}, {size}, {op_name!r}, {kind!r}, {mask}, {number})")


def _tensor(g: Generator, instruction: syntax.Instruction, into_shared: bool, operation: str | None, mask: str) -> None:
    operands, number = instruction.operands, instruction.number
    tensor_index = 1 if into_shared else 0
    map_operand = address_of(operands[tensor_index], instruction)
    map_text = address(g, syntax.Address(map_operand.base, map_operand.offset), "generic")
    coordinates = ", ".join(g.value(operand, "i4") for operand in map_operand.coordinates)
    shared = located(g, operands[1 - tensor_index], "shared", instruction)
    if into_shared:
        barrier = located(g, operands[2], "shared", instruction)
        cta_mask = g.value(operands[3], "u2") if "multicast::cluster" in instruction.opcode else "None"
        g.line(f"bulk.tensor_load(c, {shared}, {map_text}, ({coordinates},), {barrier}, {cta_mask}, {mask}, {number})")
    else:
        g.line(f"bulk.tensor_store(c, {map_text}, ({coordinates},), {shared}, {operation!r}, {mask}, {number})")


@emits("tensormap")
def tensor_maps(g: Generator, instruction: syntax.Instruction) -> None:
    """Emits Python code for `tensormap.replace` and `tensormap.cp_fenceproxy`."""
    opcode_parts, operands = instruction.parts, instruction.operands
    mask, number = g.guard or "None", instruction.number
    if opcode_parts[1] == "cp_fenceproxy":
        target, source = located(g, operands[0], "global", instruction), located(g, operands[1], "shared", instruction)
        g.line(f"tensor_maps.copy(c, {target}, {source}, {mask}, {number})")
        return
    space = "shared" if any(modifier.startswith("shared") for modifier in opcode_parts) else "generic"
    map_address = located(g, operands[0], space, instruction)
    map_field = opcode_parts[3]
    field_index = _constant(operands[1]) if len(operands) == 3 else 0
    size = "u8" if opcode_parts[-1] == "b64" else "u4"
    value = g.value(operands[-1], size)
    g.line(f"tensor_maps.replace(c, {space!r}, {map_address}, {map_field!r}, {field_index}, {value}, {mask}, {number})")
