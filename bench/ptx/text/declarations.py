"""Reads declarations: registers, variables of every space, parameters of kernels."""

from __future__ import annotations

import math
import re
import struct

from rooflab.bench.ptx.text.operands import number, split
from rooflab.bench.ptx.text.syntax import WIDTHS, Parameter, PtxError, Reference, Variable

_VARIABLE = re.compile(
    r"(?:\.(?:visible|extern|weak|common)\s+)*\.(shared|global|const|local|param)\b(?:::\w+)?\s*(.*)$", re.DOTALL
)
_ATTRIBUTE = re.compile(r"\.attribute\s*\([^)]*\)")
_REGISTERS = re.compile(r"\.reg\s*\.(\w+)\s+(.*)$", re.DOTALL)
_REFERENCE = re.compile(
    r"(?:0[xX]([0-9a-fA-F]+)\()?(?:generic\(([A-Za-z_$%][\w$]*)\)|([A-Za-z_$%][\w$]*))\s*([+-]\s*\d+)?\)?$"
)
_HEX_FLOAT = re.compile(r"0([fFdD])([0-9a-fA-F]+)$")
_MANY = re.compile(r"([\w$%]+)<(\d+)>$")


def registers(text: str) -> tuple[str, list[tuple[str, int | None]]] | None:
    """Of a `.reg` declaration the type, and each name with its count where it stands for many (`%r<10>`)."""
    found = _REGISTERS.match(text)
    if found is None:
        return None
    if found[1] not in WIDTHS:
        raise PtxError(f"PTX: expected a register of a known type, got {text!r}")
    names: list[tuple[str, int | None]] = []
    for item in split(found[2]):
        many = _MANY.match(item)
        names.append((many[1], int(many[2])) if many else (item, None))
    return found[1], names


def variable(text: str) -> Variable | None:
    """The variable that a statement declares, if it declares one.  Raises `PtxError` on a type that is not known."""
    found = _VARIABLE.match(text)
    if found is None:
        return None
    space, rest = found[1], _ATTRIBUTE.sub("", found[2])
    declared, _, initial = rest.partition("=")
    align = re.search(r"\.align\s+(\d+)", declared)
    kind = re.search(r"\.([busf]\d+)\b", declared)
    name = re.search(r"([\w$%]+)\s*((?:\[\s*\d*\s*\]\s*)*)$", declared.strip())
    if kind is None or name is None or kind[1] not in WIDTHS:
        raise PtxError(f"PTX: expected a variable of a known type, got {text!r}")
    width = WIDTHS[kind[1]]
    sizes = [int(length or 0) for length in re.findall(r"\[\s*(\d*)\s*\]", name[2])]
    vector = re.search(r"\.v([248])\b", declared)
    if vector is not None:
        sizes.append(int(vector[1]))
    references: list[Reference] = []
    data = _initial(initial.strip(), kind[1], width, references, sizes) if initial.strip() else b""
    length = max(width * math.prod(sizes), len(data))
    own = width * int(vector[1]) if vector else width
    return Variable(name[1], space, length, int(align[1]) if align else own, data, tuple(references))


def _initial(text: str, kind: str, width: int, references: list[Reference], sizes: list[int], start: int = 0) -> bytes:
    """The bytes of an initialiser that begins at `start`; addresses in it are zero, and added to `references`."""
    values = split(text[1:-1]) if text.startswith("{") else [text]
    data = b""
    for value in values:
        if value.startswith("{"):
            row = _initial(value, kind, width, references, sizes[1:], start + len(data))
            data += row.ljust(width * math.prod(sizes[1:]), b"\0")
        elif found := _REFERENCE.match(value):
            mask, symbol, offset = found[1], found[2] or found[3], found[4] or "0"
            bits = int(mask, 16) if mask else (1 << 64) - 1
            references.append(Reference(start + len(data), width, symbol, int(offset.replace(" ", "")), bits))
            data += bytes(width)
        elif width >= 4 and (kind.startswith("f") or _HEX_FLOAT.match(value)):
            data += struct.pack("<f" if width == 4 else "<d", _float(value))
        else:
            data += (number(value) % (1 << 8 * width)).to_bytes(width, "little")
    return data


def _float(text: str) -> float:
    found = _HEX_FLOAT.match(text)
    if found is None:
        return float(text)
    single = found[1] in "fF"
    value: float = struct.unpack("<f" if single else "<d", int(found[2], 16).to_bytes(4 if single else 8, "little"))[0]
    return value


def parameters(text: str) -> list[Parameter]:
    """The parameters of a kernel, in their order."""
    found = []
    for item in split(text):
        declared = variable(item.replace(".ptr", ""))
        if declared is None:
            raise PtxError(f"PTX: expected a parameter, got {item!r}")
        kind = re.search(r"\.([busf]\d+)\b", item)
        assert kind is not None
        array = "[" in item
        pointer = ".ptr" in item
        # `.ptr .align` is the alignment of what the pointer points to.
        align = max(WIDTHS[kind[1]], declared.align) if array else WIDTHS[kind[1]]
        found.append(Parameter(declared.name, "bytes" if array else kind[1], declared.size, align, pointer))
    return found
