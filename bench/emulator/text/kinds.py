"""Chooses a NumPy type for each register: the type that most of its uses need.  Other uses reinterpret the bits.

The declared type of a PTX register gives only its width: Triton keeps floats in `.b32` registers.
"""

from __future__ import annotations

from rooflab.bench.emulator.text.syntax import Instruction, OperandGroup, PtxError, PtxKernel, Register, definitions

DTYPES = {
    "pred": "?",
    "b8": "u1", "u8": "u1", "s8": "i1",
    "b16": "u2", "u16": "u2", "s16": "i2", "f16": "u2", "bf16": "u2", "e4m3x2": "u2", "e5m2x2": "u2",
    "b32": "u4", "u32": "u4", "s32": "i4", "f32": "f4", "f16x2": "u4", "bf16x2": "u4", "tf32": "u4",
    "u16x2": "u4", "s16x2": "u4",
    "b64": "u8", "u64": "u8", "s64": "i8", "f64": "f8",
}  # fmt: skip
"""By PTX type, the NumPy type."""
FLOAT_CODES = {"f32": "f4", "f64": "f8"}
COPY_OPS = ("mov", "selp", "shfl", "slct")
"""The families of instructions that copy operands of any type to their result."""


def dtype_of(kind: str) -> str:
    """Returns the NumPy type code, such as `f4`, of the PTX type `kind`.  Raises `PtxError` on an unknown type."""
    if kind not in DTYPES:
        raise PtxError(f"PTX: expected a type that is known, got .{kind}")
    return DTYPES[kind]


def storage(kernel: PtxKernel) -> list[str]:
    """Returns the NumPy type code of each register of `kernel`, in the order of the registers."""
    type_votes = [0] * len(kernel.registers)
    register_links: list[tuple[int, int]] = []
    for instruction in kernel.instructions:
        _vote(instruction, type_votes)
        if instruction.parts[0] in COPY_OPS:
            register_links += _links(instruction)
    # The source and the destination of a copy have one type; two rounds carry the type through a loop's copies.
    for _ in range(2):
        for target_index, source_index in register_links + register_links[::-1]:
            if not type_votes[target_index]:
                type_votes[target_index] = _sign(type_votes[source_index])
            if not type_votes[source_index]:
                type_votes[source_index] = _sign(type_votes[target_index])
    return [_dtype(register, type_votes[register.index]) for register in kernel.registers]


def _sign(value: int) -> int:
    return (value > 0) - (value < 0)


def _dtype(register: Register, votes: int) -> str:
    dtype_code = DTYPES.get(register.type)
    if dtype_code is None:
        raise PtxError(f"PTX: expected a register of at most 64 bits, got {register.name} of .{register.type}")
    if dtype_code == "?":
        return "?"
    size_digit = dtype_code[1]
    return f"f{size_digit}" if votes > 0 and size_digit in "48" else f"u{size_digit}"


def _vote(instruction: Instruction, votes: list[int]) -> None:
    parts = instruction.parts
    type_names = [opcode_part for opcode_part in parts if opcode_part in DTYPES]
    if not type_names or parts[0] in ("wgmma", "mma"):
        if parts[0] in ("wgmma", "mma") and "f32" in parts:
            for register in definitions(instruction):
                votes[register.index] += 2
        return
    result, source = (type_names[0], type_names[-1]) if parts[0] in ("cvt", "set") else (type_names[-1], type_names[-1])
    result_indices = {register.index for register in definitions(instruction)}
    for operand in instruction.operands:
        items = operand.items if isinstance(operand, OperandGroup) else (operand,)
        for register in (item for item in items if isinstance(item, Register)):
            type_name = result if register.index in result_indices else source
            if type_name in FLOAT_CODES:
                votes[register.index] += 1
            elif type_name[0] in "us":
                votes[register.index] -= 1


def _links(instruction: Instruction) -> list[tuple[int, int]]:
    target_register = instruction.operands[0]
    if not isinstance(target_register, Register):
        return []
    source_registers = [item for item in instruction.operands[1:] if isinstance(item, Register)]
    return [(target_register.index, item.index) for item in source_registers if item.type == target_register.type]
