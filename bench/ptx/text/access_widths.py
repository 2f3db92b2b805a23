"""What the text of a kernel says of its accesses: the narrowest, and those that are more than plain ones."""

from __future__ import annotations

from rooflab.bench.ptx.text.kinds import DTYPES
from rooflab.bench.ptx.text.syntax import Immediate, Instruction, Kernel

_STRONG = {"acquire": "acquire", "release": "release", "relaxed": "relaxed", "volatile": "relaxed", "mmio": "relaxed"}
_ORDERS = frozenset(("acquire", "release", "acq_rel", "sc"))
_VECTORS = {"v2": 2, "v4": 4, "v8": 8}


_WIDEST = 16
_OTHER_PIECES = 4
"""A copy that says how much of it is read, which only a launch knows, is looked at in these."""
_MBARRIER = 8


def granule(kernel: Kernel, space: str) -> int:
    """Bytes of the narrowest access to a space: 1 to 16, a power of two.

    Bulk copies, ldmatrix and wgmma take 16 and more; of a tensor the box is cut where that ends, between any elements.
    """
    return min((_width(instruction, space) for instruction in kernel.instructions), default=_WIDEST)


def _width(instruction: Instruction, space: str) -> int:
    parts = instruction.parts
    if parts[0] in ("ld", "ldu", "st", "atom", "red"):
        named = {part.split("::")[0] for part in parts[1:]} & {"global", "shared", "local", "param", "const"}
        kinds = [part for part in parts if part in DTYPES and DTYPES[part] != "?"]
        if not kinds or (named and space not in named):
            return _WIDEST
        # A vector's atomics are one for each element.
        vector = 1 if parts[0] in ("atom", "red") else max([1, *(_VECTORS.get(part, 1) for part in parts)])
        return min(_WIDEST, vector * int(DTYPES[kinds[-1]][1]))
    if instruction.opcode.startswith(("cp.async.bulk.tensor", "cp.reduce")):
        return 1 if space == "global" else _WIDEST
    if parts[:2] == ["cp", "async"] and parts[2] in ("ca", "cg"):
        size = instruction.operands[2]
        whole = int(size.value) if isinstance(size, Immediate) and size.value in (4, 8, 16) else _OTHER_PIECES
        return min(whole, _OTHER_PIECES) if space == "global" and len(instruction.operands) > 3 else whole
    return _MBARRIER if space == "shared" and "mbarrier" in instruction.opcode else _WIDEST


def strong(kernel: Kernel) -> dict[int, str]:
    """Loads and stores that do not race with each other, by number: `relaxed`, `acquire` or `release`."""
    found = {}
    for instruction in kernel.instructions:
        if instruction.parts[0] in ("ld", "st"):
            for part in instruction.parts[1:]:
                if part in _STRONG:
                    found[instruction.number] = "relaxed" if "cta" in instruction.parts else _STRONG[part]
    return found


def orders_ctas(kernel: Kernel) -> bool:
    """Whether some fence, atomic, load or store can order what one CTA does before what another does."""
    return any(
        item.parts[0] == "membar" or (item.parts[0] in ("fence", "ld", "st", "atom", "red") and _ORDERS & {*item.parts})
        for item in kernel.instructions
        if "cta" not in item.parts and "proxy" not in item.parts
    )
