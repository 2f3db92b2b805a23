"""Which kernel serves where: `kernels/<op>/choices.json`, written by `rooflab bench --choose` from records.

The file maps a device to a bucket to a kernel and the record that says so:
`{"cpu": {"decode:1": {"kernel": "packed", "record": "<run id>"}}}`.  Nothing is chosen from anything else.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Literal

Phase = Literal["prefill", "decode"]

# Upper ends of the buckets of M, the rows of a step. Decode: a GEMV, tensor-core rows in one MMA tile, one wgmma tile,
# compute bound. Prefill: a short prompt, a chunk, a long one.
BUCKETS: dict[Phase, tuple[float, ...]] = {
    "decode": (1, 16, 64, float("inf")),
    "prefill": (64, 512, float("inf")),
}


def bucket_of(phase: Phase, M: int) -> str:
    """`decode:16` for a decode step of 2 to 16 rows; the last bucket of a phase is `decode:inf`."""
    limit = next(limit for limit in BUCKETS[phase] if M <= limit)
    return f"{phase}:{limit}"


def all_buckets() -> list[tuple[str, Phase, float]]:
    """Every bucket as (name, phase, upper end)."""
    return [(f"{phase}:{limit}", phase, limit) for phase, limits in BUCKETS.items() for limit in limits]


@cache
def _load(path: Path) -> dict[str, dict[str, dict[str, str]]]:
    if not path.is_file():
        return {}
    choices: dict[str, dict[str, dict[str, str]]] = json.loads(path.read_text())
    return choices


def chosen(op: str, device: str, bucket: str) -> str | None:
    """The kernel that a committed record chose for `op` on `device` in `bucket`, or None where there is none."""
    choices = _load(Path(__file__).parent / op / "choices.json")
    entry = choices.get(device, {}).get(bucket)
    return None if entry is None else entry["kernel"]
