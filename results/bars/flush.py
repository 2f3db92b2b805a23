"""Both ways of emptying the last-level cache, compared on the card."""

from __future__ import annotations

import json

from bars.bar import Bar

from rooflab.bench.suite.entries import Context, Outcome
from rooflab.bench.timing.flush_comparison import compare_flushes
from rooflab.kernels._files import write_whole


def flush(context: Context) -> Outcome:
    """How clean each way leaves the cache, and what it costs."""
    found = compare_flushes(context.device, budget_s=0.3 if context.dry_run else 6.0)
    write_whole(context.out / "flush.json", json.dumps(found, indent=1) + "\n")
    return Outcome("DONE", figures={name: found[name] for name in ("cleaner", "read_error", "write_error")})


BARS = (Bar("flush", "both ways of emptying L2, compared", flush, {}, 20.0, 68.0),)
