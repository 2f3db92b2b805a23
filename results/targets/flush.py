"""Compares two ways to empty a card's last-level cache, by reading and by writing.

The baseline reads many buffers in turn, so that each has left the cache before it is read again: there is no flush, and
no line is dirty.  A flush is clean if the same read takes the same time after it.  The read is faster after a flush
that leaves data in the cache, and slower after a flush that leaves dirty lines.
"""

from __future__ import annotations

import itertools
import json
import statistics
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from targets.target import AcceptanceTarget

from rooflab.bench.core.environment import last_level_cache_bytes
from rooflab.bench.core.noise import Samples
from rooflab.bench.core.timers.timing import time_functions
from rooflab.bench.suite.entries import Context, EntryOutcome
from rooflab.kernels._files import write_whole

SHARES = (0.125, 0.5, 2.0)
"""The bytes that each probe reads, divided by the bytes of the cache."""
TURN = 4.0
"""The bytes of all buffers that are read in turn, divided by the bytes of the cache; at least two buffers are used."""
ORDER: tuple[str | None, ...] = ("read", "write", None, None, "write", "read")
"""The order of the flushes; None reads buffers in turn.  Each comes once early and once late, so drift affects all."""


def compare_flushes(
    device: torch.device | str, *, budget_s: float = 3.0, cache_bytes: int | None = None
) -> dict[str, Any]:
    """Times reads of several sizes after each flush and without a flush, and says which flush is cleaner.

    Returns JSON values: `cleaner` (`read` or `write`), `sizes_bytes`, the median seconds of each size after each flush
    (`read_s`, `write_s`) and without (`rotation_s`), and the largest relative deviation from the time without
    (`read_error`, `write_error`).  A size counts only if each of its samples is a single call, so that every call finds
    the cache as the flush left it, and is long enough for the clock; `left_out` has the other sizes with the reason.
    `budget_s` is the time for all readings.  Raises `ValueError` if no size counts.
    """
    device = torch.device(device)
    cache = cache_bytes or (last_level_cache_bytes() if device.type == "cpu" else _l2_bytes(device))
    sizes = [int(share * cache) // 4 * 4 for share in SHARES]
    found: dict[str | None, list[dict[str, Samples]]] = {"read": [], "write": [], None: []}
    for way in ORDER:
        probes = {str(size): _Reads(device, size, cache if way is None else 0) for size in sizes}
        found[way].append(
            time_functions(probes, device, budget_s=budget_s / len(ORDER), cold=way is not None, flush=way or "read")
        )
    problems = {size: [_problem(run[str(size)]) for runs in found.values() for run in runs] for size in sizes}
    left_out = {str(size): next(filter(None, seen)) for size, seen in problems.items() if any(seen)}
    sizes = [size for size in sizes if str(size) not in left_out]
    if not sizes:
        raise ValueError(
            f"flush: expected a size of which every reading counts, got none ({'; '.join(left_out.values())})"
        )
    medians = {
        way: [statistics.median([s for run in runs for s in run[str(size)].seconds]) for size in sizes]
        for way, runs in found.items()
    }
    errors = {way: _error(medians[way], medians[None]) for way in ("read", "write")}
    return {
        "cleaner": min(errors, key=lambda way: errors[way]),
        "device": device.type,
        "timer": found["read"][0][str(sizes[0])].method,
        "sizes_bytes": sizes,
        "left_out": left_out,
        "read_s": medians["read"],
        "write_s": medians["write"],
        "rotation_s": medians[None],
        "read_error": errors["read"],
        "write_error": errors["write"],
    }


def _l2_bytes(device: torch.device) -> int:
    properties: Any = torch.cuda.get_device_properties(device)
    return int(properties.L2_cache_size)


def _problem(samples: Samples) -> str:
    """The reason why a reading cannot be used for the comparison, or an empty text."""
    if samples.fault:
        return samples.fault
    if samples.calls_per_sample != 1:
        return f"{samples.calls_per_sample} calls per sample, of which the flush stands before the first"
    return "" if samples.resolved else f"the {samples.method} timer is too coarse for it"


class _Reads:
    """Reads a buffer of `size` bytes; with `cache`, reads several in turn that together exceed the cache."""

    def __init__(self, device: torch.device, size: int, cache: int):
        self.sets = max(2, int(TURN * cache / size) + 1) if cache else 1
        buffers = [torch.ones(size // 4, device=device) for _ in range(self.sets)]
        sink = torch.empty((), device=device)
        self._turns = itertools.cycle([partial(torch.sum, buffer, dim=0, out=sink) for buffer in buffers])

    def __call__(self) -> object:
        return next(self._turns)()


def _error(seconds: Sequence[float], truth: Sequence[float]) -> float:
    return max(abs(read / right - 1) for read, right in zip(seconds, truth, strict=True))


def flush(context: Context) -> EntryOutcome:
    """Measures how clean each way leaves the cache, and what each way costs."""
    found = compare_flushes(context.device, budget_s=0.3 if context.dry_run else 6.0)
    write_whole(context.out / "flush.json", json.dumps(found, indent=1) + "\n")
    return EntryOutcome("DONE", figures={name: found[name] for name in ("cleaner", "read_error", "write_error")})


TARGETS = (AcceptanceTarget("flush", "both ways of emptying L2, compared", flush, {}, 20.0, 68.0),)
