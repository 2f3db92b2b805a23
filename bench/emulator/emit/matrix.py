"""Emits Python code for matrix instructions: `ldmatrix`, `stmatrix`, `mma`, `wgmma` (PTX ISA 8.7, 9.7.14, 9.7.15)."""

from __future__ import annotations

import re

from rooflab.bench.emulator.emit.generator import Generator, emits, unknown
from rooflab.bench.emulator.emit.memory_access import address
from rooflab.bench.emulator.execute.matrices import WgmmaShape
from rooflab.bench.emulator.text.syntax import Address, Immediate, Instruction, OperandGroup, PtxError
from rooflab.bench.emulator.tiles.mma import ELEMENT_BYTES
from rooflab.bench.emulator.tiles.shared_layout import K_BYTES


@emits("ldmatrix", "stmatrix")
def move_matrices(g: Generator, instruction: Instruction) -> None:
    """Emits Python code for `ldmatrix` and `stmatrix`."""
    g.unguarded(instruction)
    opcode_parts, operands = instruction.parts, instruction.operands
    is_load = opcode_parts[0] == "ldmatrix"
    registers, address_operand = operands if is_load else operands[::-1]
    if "m8n8" not in opcode_parts or "b16" not in opcode_parts or not isinstance(address_operand, Address):
        raise unknown(instruction)
    matrix_count = int(next(modifier for modifier in opcode_parts if re.fullmatch(r"x[124]", modifier))[1])
    register_items = g.items(registers)
    if len(register_items) != matrix_count:
        raise PtxError(f"PTX: expected {matrix_count} registers for .x{matrix_count}, got {instruction.text!r}")
    values = str(matrix_count) if is_load else f"({', '.join(g.value(register, 'u4') for register in register_items)},)"
    arguments = f"{address(g, address_operand, 'shared')}, {values}, {'trans' in opcode_parts}, {instruction.number}"
    if is_load:
        g.define_many(register_items, f"matrices.load(c, {arguments})", "u4")
    else:
        g.line(f"matrices.store(c, {arguments})")


@emits("mma")
def multiply(g: Generator, instruction: Instruction) -> None:
    """Emits Python code for `mma.sync`."""
    opcode_parts = instruction.parts
    shape_text = next(modifier for modifier in opcode_parts if re.fullmatch(r"m\d+n\d+k\d+", modifier))
    matrix_types = opcode_parts[opcode_parts.index("col") + 1 :] if "col" in opcode_parts else []
    matrix_types = [mma_type for mma_type in matrix_types if mma_type not in ("satfinite", "and", "xor", "popc")]
    if len(matrix_types) != 4 or "sp" in opcode_parts or "row" not in opcode_parts:
        raise unknown(instruction)
    d_type, a_type, b_type, c_type = matrix_types
    dtype_by_ptx_type = {"f32": "f4", "f64": "f8"}
    result_dtype, input_dtype = dtype_by_ptx_type.get(d_type, "u4"), "f8" if a_type == "f64" else "u4"
    a, b = (", ".join(g.value(item, input_dtype) for item in g.items(operand)) for operand in instruction.operands[1:3])
    c = ", ".join(g.value(item, dtype_by_ptx_type.get(c_type, "u4")) for item in g.items(instruction.operands[3]))
    call_text = (
        f"matrices.multiply(c, {instruction.number}, {'satfinite' in opcode_parts},"
        f" {shape_text!r}, {a_type!r}, {b_type!r}, {d_type!r}, ({a},), ({b},), ({c},))"
    )
    g.define_many(g.items(instruction.operands[0]), call_text, result_dtype)


@emits("wgmma")
def warpgroup(g: Generator, instruction: Instruction) -> None:
    """Emits Python code for the `wgmma` instructions, including their fences, commits and waits."""
    opcode_parts = instruction.parts
    operation_name = opcode_parts[1]
    g.unguarded(instruction)
    if operation_name == "fence":
        return  # `wgmma_registers.unfenced` checks the fences in the kernel's text
    if operation_name == "commit_group":
        g.line(f"matrices.commit(c, {instruction.number})")
    elif operation_name == "wait_group":
        pending_limit = instruction.operands[0]
        assert isinstance(pending_limit, Immediate)
        g.line(f"matrices.wait(c, {pending_limit.value}, {instruction.number})")
    elif operation_name == "mma_async" and "sp" not in opcode_parts:
        _multiply_async(g, instruction)
    else:
        raise unknown(instruction)


def _multiply_async(g: Generator, instruction: Instruction) -> None:
    op_parts, operands = instruction.parts, instruction.operands
    shape_index = next(part_no for part_no, modifier in enumerate(op_parts) if re.fullmatch(r"m64n\d+k\d+", modifier))
    n, k = map(int, re.findall(r"\d+", op_parts[shape_index])[1:])
    d_type, a_type, b_type = [modifier for modifier in op_parts[shape_index + 1 :] if modifier != "satfinite"]
    if a_type in ELEMENT_BYTES and k * ELEMENT_BYTES[a_type] != K_BYTES:
        raise PtxError(
            f"PTX: expected a K of {K_BYTES // ELEMENT_BYTES[a_type]} for {a_type}, got {instruction.text!r}"
        )
    constant_values = [operand.value if isinstance(operand, Immediate) else None for operand in operands[4:]]
    scales = [1, 1] if d_type == "s32" else constant_values[:2]
    if any(scale not in (1, -1) for scale in scales):
        raise PtxError(f"PTX: expected scales of 1 or -1 in wgmma, got {scales}")
    a_in_registers = isinstance(operands[1], OperandGroup)
    transposes = [bool(constant_value) for constant_value in constant_values[2:]] if d_type != "s32" else []
    # A in registers has no flag of its own.
    a_transposed, b_transposed = [*([False] if a_in_registers else []), *transposes, False, False][:2]
    shape = WgmmaShape(
        n, d_type, a_type, b_type, scales[0] != scales[1], a_transposed, b_transposed, "satfinite" in op_parts
    )
    result_dtype = {"f32": "f4"}.get(d_type, "u4")
    d = ", ".join(g.value(operand, result_dtype) for operand in g.items(operands[0]))
    if isinstance(operands[1], OperandGroup):
        a = "(" + ", ".join(g.value(operand, "u4") for operand in operands[1].items) + ",)"
    else:
        a = g.value(operands[1], "u8")
    scale_d = operands[3]
    keep_d = g.constant(scale_d.value, "?") if isinstance(scale_d, Immediate) else g.value(scale_d, "?")
    name = g.bind(shape, ("shape", shape))
    call_text = (
        f"matrices.multiply_async(c, ({d},), {a}, {g.value(operands[2], 'u8')}, {keep_d}, {name}, {instruction.number})"
    )
    g.define_many(g.items(operands[0]), call_text, result_dtype)
