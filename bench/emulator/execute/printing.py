"""Runs the calls of the driver that print: `vprintf`, and `__assertfail`, with which a device-side assertion ends."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import Any

import numpy as np

from rooflab.bench.emulator.machine import access
from rooflab.bench.emulator.machine.context import LaneContext
from rooflab.bench.emulator.machine.run import Fault

MAX_LINES = 10_000
"""The most printed lines that are kept; a kernel may print one for each element."""
_CONVERSION = re.compile(r"%([-+ #0]*(?:\d+|\*)?(?:\.(?:\d+|\*))?)(hh|h|ll|l|j|z|t|q|L)?([diouxXcsfFeEgGaAp%])")


def fail(c: LaneContext, guard: Any, text: str, instruction: int) -> None:
    """Raises `Fault` if the predicate `guard` is true for any lane, with the first such lane."""
    lanes = c.lanes_under(guard)
    if len(lanes):
        raise Fault(text, instruction, int(c.lanes[lanes[0]]), rule="trap")


def assertion(c: LaneContext, parameters: Sequence[Any], guard: Any, instruction: int) -> None:
    """Runs `__assertfail`.  `parameters` are the addresses of its message, file, line and function in local memory."""
    lanes = c.lanes_under(guard)
    if len(lanes):
        message, file, line, function = (
            int(c.vector(access.load(c, "local", address, guard, size, 1, instruction)[0])[lanes[0]])
            for address, size in zip(parameters, (8, 8, 4, 8), strict=False)
        )
        name = _text(c, function, instruction)
        place = f"{PurePosixPath(_text(c, file, instruction)).name}:{line}"
        place += f" in {name}" if name not in ("", "unknown") else ""
        fail(c, guard, f"the assertion {_text(c, message, instruction)!r} failed ({place})", instruction)


def vprintf(c: LaneContext, format_place: Any, values_place: Any, guard: Any, instruction: int) -> None:
    """Runs `vprintf`.  The places are the addresses in local memory of two pointers: to the format, to the values."""
    lanes, printed = c.lanes_under(guard), c.group.run.printed
    if not len(lanes) or len(printed) > MAX_LINES:
        return
    formats, values = (
        c.vector(access.load(c, "local", address, guard, 8, 1, instruction)[0])
        for address in (format_place, values_place)
    )
    texts: dict[int, str] = {}
    for format_address in np.unique(formats[lanes]):
        mask = np.zeros(c.size, np.bool_)
        mask[lanes] = formats[lanes] == format_address
        format_text = _text(c, int(format_address), instruction)
        texts |= zip(np.flatnonzero(mask).tolist(), _formatted(c, format_text, values, mask, instruction), strict=True)
    name = c.group.program.kernel.name
    for lane, text in sorted(texts.items()):
        slot, thread = divmod(int(c.lanes[lane]), c.group.lanes_per_cta)
        lines = text.removesuffix("\n").split("\n")
        printed += [f"{name}, CTA {c.group.ctas[slot]}, thread {thread}: {line}" for line in lines]
    if len(printed) > MAX_LINES:
        printed[MAX_LINES:] = [f"{name}: lines beyond the first {MAX_LINES} are not kept"]


def _formatted(c: LaneContext, text: str, pointers: Any, mask: Any, instruction: int) -> list[str]:
    """Returns the printed text of each lane in `mask`. The values of a lane lie at its pointer, each at a multiple of
    its own size."""
    format_text, columns, offset, end = "", list[list[Any]](), 0, 0
    lanes = np.flatnonzero(mask)

    def column(size: int) -> Any:
        nonlocal offset
        offset = -(-offset // size) * size
        addresses = pointers + np.uint64(offset)
        offset += size
        (loaded,) = access.load(c, "generic", addresses, mask, size, 1, instruction)
        return c.vector(loaded)[lanes]

    for match in _CONVERSION.finditer(text):
        flags, length, kind = match[1], match[2] or "", match[3]
        format_text += text[end : match.start()].replace("%", "%%")
        end = match.end()
        if kind == "%":
            format_text += "%%"
            continue
        columns += [column(4).view(np.int32).tolist() for _ in range(flags.count("*"))]
        if kind in "fFeEgGaA":
            numbers = column(8).view(np.float64).tolist()
            columns.append([number.hex() for number in numbers] if kind in "aA" else numbers)
        elif kind in "sp":
            addresses = column(8).tolist()
            columns.append([_text(c, each, instruction) for each in addresses] if kind == "s" else addresses)
        else:
            units = column(8 if length in ("ll", "l", "j", "z", "t", "q") else 4)
            units = units.astype({"hh": np.uint8, "h": np.uint16}.get(length, units.dtype))
            columns.append((units.view(f"i{units.itemsize}") if kind in "di" else units).tolist())
        format_text += "%" + {"p": "#" + flags + "x", "a": flags + "s", "A": flags + "s"}.get(kind, flags + kind)
    format_text += text[end:].replace("%", "%%")
    return (
        [format_text % tuple(row) for row in zip(*columns, strict=True)] if columns else [format_text % ()] * len(lanes)
    )


def _text(c: LaneContext, address: int, instruction: int) -> str:
    """Returns the text at an address of global memory, which ends before a zero byte."""
    allocation = c.group.memory.find(address)
    if allocation is None:
        raise Fault(f"a text to print at 0x{address:x}, where no text is", instruction)
    return (
        bytes(allocation.view(1)[address - allocation.base : allocation.size]).split(b"\0")[0].decode(errors="replace")
    )
