"""What the text of a kernel says of its accesses: the narrowest, and those that are more than plain ones."""

from __future__ import annotations

from rooflab.bench.ptx.text.kinds import DTYPES
from rooflab.bench.ptx.text.syntax import Kernel

_STRONG = {"acquire": "acquire", "release": "release", "relaxed": "relaxed", "volatile": "relaxed", "mmio": "relaxed"}
_ORDERS = frozenset(("acquire", "release", "acq_rel", "sc"))


def granule(kernel: Kernel, space: str) -> int:
    """Bytes of the narrowest access to a space, at most 4."""
    narrowest = 4
    for instruction in kernel.instructions:
        parts = instruction.parts
        if parts[0] not in ("ld", "ldu", "st", "atom", "red"):
            continue
        named = {part.split("::")[0] for part in parts[1:]} & {"global", "shared", "local", "param", "const"}
        if named and space not in named:
            continue
        kinds = [part for part in parts if part in DTYPES and DTYPES[part] != "?"]
        if kinds:
            narrowest = min(narrowest, int(DTYPES[kinds[-1]][1]))
    if space == "global" and any(
        item.opcode.startswith(("cp.async.bulk.tensor", "cp.reduce")) for item in kernel.instructions
    ):
        # A box is cut where the tensor ends, between any two elements.
        return min(narrowest, 1)
    return narrowest


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
