"""Loads, stores and atomics (PTX ISA 8.7, sections 9.7.9.8 to 12, 9.7.13.5, 6)."""

from __future__ import annotations

from rooflab.bench.ptx.generate import Generator, emits
from rooflab.bench.ptx.text.kinds import DTYPES, dtype_of
from rooflab.bench.ptx.text.syntax import Address, Immediate, Instruction, PtxError, Register, Sink, Symbol

STRONG = frozenset(("volatile", "relaxed", "acquire", "mmio"))
"""Loads by which a thread may wait for another's store."""
SPACES = ("global", "shared", "local", "param", "const")
_OPERATIONS = ("add", "min", "max", "inc", "dec", "and", "or", "xor", "exch", "cas")


def space_of(instruction: Instruction) -> str:
    """The state space that an opcode names; generic without one."""
    for part in instruction.parts[1:]:
        if part.split("::")[0] in SPACES:
            return part.split("::")[0]
    return "generic"


def address(g: Generator, operand: Address, space: str) -> str:
    """The expression of an address in its space: uint32 in shared memory, uint64 elsewhere."""
    size = "u4" if space == "shared" else "u8"
    base, offset = operand.base, operand.offset
    if isinstance(base, Symbol):
        text = f"c.address({base.name!r}, {size})"
    elif isinstance(base, Immediate):
        text = g.constant(base.value, size)
    else:
        kept = g.kept[base.index]
        # Some texts keep a shared address in 64 bits, and some a generic one in 32.
        text = g.value(base, size) if int(kept[1]) >= int(size[1]) else f"{g.value(base, 'u' + kept[1])}.astype({size})"
    return f"{text} + {g.constant(offset, size)}" if offset else text


def width(kind: str) -> int:
    """Bytes of a value of a type."""
    return int(dtype_of(kind)[1])


@emits("ld", "ldu")
def load(g: Generator, instruction: Instruction) -> None:
    """`ld`."""
    parts, space = instruction.parts, space_of(instruction)
    kind = parts[-1]
    target, source = instruction.operands[:2]
    if not isinstance(source, Address):
        raise PtxError(f"PTX: expected an address in {instruction.text!r}")
    if space == "param" and isinstance(source.base, Symbol) and g.is_local(source.base.name):
        space = "local"
    if kind == "b128":
        raise PtxError(f"PTX: expected a type of at most 64 bits in {instruction.text!r}")
    items = g.items(target)
    names = [g.temporary() for _ in items]
    left = ", ".join(names) + ("," if len(names) == 1 else "")
    where = address(g, source, space)
    mask = g.guard or "None"
    if not STRONG.isdisjoint(parts):
        at = g.temporary()
        g.line(f"{at} = {where}")
        g.line(f"c.polls({instruction.number}, {at})")
        where = at
    g.line(f"{left} = access.load(c, {space!r}, {where}, {mask}, {width(kind)}, {len(items)}, {instruction.number})")
    dtype = dtype_of(kind)
    for item, name in zip(items, names, strict=True):
        if not isinstance(item, Sink):
            g.define(item, name if dtype[0] == "u" else f"{name}.view({dtype})", dtype)


@emits("st")
def store(g: Generator, instruction: Instruction) -> None:
    """`st`."""
    parts, space = instruction.parts, space_of(instruction)
    if "bulk" in parts or "async" in parts and len(instruction.operands) != 3:
        raise PtxError(f"PTX: expected an instruction that is known, got {instruction.text!r}")
    target, source = instruction.operands[:2]
    if not isinstance(target, Address):
        raise PtxError(f"PTX: expected an address in {instruction.text!r}")
    if space == "param" and isinstance(target.base, Symbol) and g.is_local(target.base.name):
        space = "local"
    size = width(parts[-1])
    values = ", ".join(_stored(g, item, size) for item in g.items(source))
    where = address(g, target, space)
    if "async" in parts:
        barrier = instruction.operands[2]
        if not isinstance(barrier, Address):
            raise PtxError(f"PTX: expected an mbarrier in {instruction.text!r}")
        at = address(g, barrier, "shared")
        g.line(f"remote.store(c, {where}, ({values},), {size}, {at}, {g.guard or 'None'}, {instruction.number})")
        return
    g.line(f"access.store(c, {space!r}, {where}, ({values},), {g.guard or 'None'}, {size}, {instruction.number})")


def _stored(g: Generator, item: object, size: int) -> str:
    return g.value(item, f"u{size}")  # type: ignore[arg-type]


@emits("atom", "red")
def atomic(g: Generator, instruction: Instruction) -> None:
    """`atom` and `red`."""
    parts, space = instruction.parts, space_of(instruction)
    operation = next((part for part in parts if part in _OPERATIONS), None)
    kind = next(part for part in reversed(parts) if part in DTYPES)
    if operation is None or "async" in parts or "noftz" in parts and kind not in ("f16", "bf16", "f16x2", "bf16x2"):
        raise PtxError(f"PTX: expected an instruction that is known, got {instruction.text!r}")
    operands = list(instruction.operands)
    target = operands.pop(0) if parts[0] == "atom" else Sink()
    where = operands.pop(0)
    if not isinstance(where, Address):
        raise PtxError(f"PTX: expected an address in {instruction.text!r}")
    dtype = dtype_of(kind)
    groups = [g.items(item) for item in operands]
    results = g.items(target)
    order = next((part for part in parts if part in ("acquire", "release", "acq_rel")), "relaxed")
    if "cta" in parts:
        order = "relaxed"  # to other CTAs
    for place in range(len(groups[0])):
        values = ", ".join(g.value(group[place], dtype) for group in groups)
        at = address(g, where, space)
        if place:
            at = f"({at}) + {g.constant(place * width(kind), 'u8')}"
        call = (
            f"atomics.atomic(c, {space!r}, {at}, {operation!r}, {kind!r}, ({values},), {g.guard or 'None'},"
            f" {order!r}, {instruction.number})"
        )
        result = results[place] if len(results) > place else Sink()
        if isinstance(result, Register):
            g.define(result, call, dtype)
        else:
            g.line(call)


@emits("fence", "membar")
def fence(g: Generator, instruction: Instruction) -> None:
    """Fences; those of the proxies are told to the race detector."""
    parts = instruction.parts
    if "proxy" in parts or any(part.startswith("mbarrier_init") for part in parts):
        kind, mask = ".".join(parts[1:]), g.guard or "None"
        if "tensormap::generic" in parts and isinstance(where := (*instruction.operands, None)[0], Address):
            g.line(f"maps.fence(c, {address(g, where, 'generic')}, {mask}, {instruction.number})")
        g.line(f"synchronising.proxy_fence(c, {kind!r}, {mask}, {instruction.number})")
    elif "cta" not in parts:  # among the threads of a CTA barriers are what orders
        g.unguarded(instruction)
        g.line(f"synchronising.fence(c, {instruction.number})")


@emits("prefetch", "prefetchu", "applypriority", "discard", "createpolicy", "griddepcontrol", "pmevent")
def hints(g: Generator, instruction: Instruction) -> None:
    """What changes no value."""
    if instruction.parts[0] == "createpolicy":
        g.define(instruction.operands[0], g.constant(0, "u8"), "u8")
