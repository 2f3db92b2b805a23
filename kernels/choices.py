"""Which kernel serves where, and in which config: `kernels/<op>/choices.json`, written by the bench from records.

The file maps a device to a bucket to a kernel and the record that says so:
`{"cpu": {"decode:1": {"kernel": "packed", "record": "<run id>"}}}`.  A choice has no other source.  Where
configs were tuned, `config` is the chosen kernel's, `tuned` maps the bucket's other kernels to theirs, and `scheme`
says for which dtypes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch

Phase = Literal["prefill", "decode"]

# Upper ends of the buckets of M, the rows of a step. Decode: a GEMV, tensor-core rows in one MMA tile, one wgmma tile,
# compute bound. Prefill: a short prompt, a chunk, a long one.
BUCKETS: dict[Phase, tuple[float, ...]] = {
    "decode": (1, 16, 64, float("inf")),
    "prefill": (64, 512, float("inf")),
}
ROW_KEYS = ("M", "T", "B")
"""Case keys that say how many rows a step has, the first that a case has."""
PHASES: Mapping[str, tuple[Phase, ...]] = {"flash_attention": ("prefill",), "paged_attention": ("decode",)}
"""Ops that only one phase has."""


def bucket_of(phase: Phase, M: int) -> str:
    """`decode:16` for a decode step of 2 to 16 rows; the last bucket of a phase is `decode:inf`."""
    limit = next(limit for limit in BUCKETS[phase] if M <= limit)
    return f"{phase}:{limit}"


def all_buckets() -> list[tuple[str, Phase, float]]:
    """Every bucket as (name, phase, upper end)."""
    return [(f"{phase}:{limit}", phase, limit) for phase, limits in BUCKETS.items() for limit in limits]


def phases_of(op: str) -> tuple[Phase, ...]:
    """The phases of a model's work that `op` serves."""
    return PHASES.get(op, ("decode", "prefill"))


def rows_of(case: Mapping[str, Any]) -> int | None:
    """How many rows a step of this case has; None where no key says it, as for an op from outside."""
    return next((int(case[key]) for key in ROW_KEYS if key in case), None)


def launch_bucket(op: str, rows: int) -> str:
    """The bucket whose config a launch of `rows` rows takes: a launcher is not told its phase, so that up to 64 rows
    are decode and more are prefill, for an op that has both."""
    phases = phases_of(op)
    phase: Phase = phases[0] if len(phases) == 1 else "decode" if rows <= 64 else "prefill"
    return bucket_of(phase, rows)


@cache
def _load(path: Path) -> dict[str, dict[str, dict[str, Any]]]:
    if not path.is_file():
        return {}
    choices: dict[str, dict[str, dict[str, Any]]] = json.loads(path.read_text())
    return choices


def chosen(op: str, device: str, bucket: str) -> str | None:
    """The kernel that a committed record chose for `op` on `device` in `bucket`, or None where there is none."""
    entry = _entry(op, device, bucket)
    return None if entry is None else str(entry["kernel"])


def tuned(op: str, kernel: str, device: str, rows: int, scheme: str) -> Mapping[str, Any] | None:
    """The config that a committed record found for `kernel` on `device` at this many rows, or None."""
    entry = _entry(op, device, launch_bucket(op, rows))
    if entry is None or entry.get("scheme") != scheme:
        return None
    config: Mapping[str, Any] | None = entry.get("config") if entry["kernel"] == kernel else None
    return config or entry.get("tuned", {}).get(kernel)


def _entry(op: str, device: str, bucket: str) -> dict[str, Any] | None:
    return _load(Path(__file__).parent / op / "choices.json").get(device, {}).get(bucket)


@cache
def card(device: torch.device) -> str | None:
    """What choices call a device: `cpu`, or the GPU's name; None for `meta`, which is not a device."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return device.type if device.type == "cpu" else None
