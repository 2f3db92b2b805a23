"""The kernel and config chosen for each device and bucket: `kernels/<op>/choices.json`, which the bench writes.

The file maps device to bucket to kernel and the record that proves the choice:
`{"NVIDIA H200": {"decode:1": {"kernel": "gemv", "record": "<run id>"}}}`.  Where configs were tuned, `config` belongs
to the chosen kernel, `tuned` maps the bucket's other kernels to their configs, and `scheme` names the dtypes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch

Phase = Literal["prefill", "decode"]

# Upper ends of the buckets of M, the rows of a step. Decode: GEMV, one MMA tile of rows, one wgmma tile, compute
# bound. Prefill: a short prompt, a chunk, a long prompt.
BUCKETS: dict[Phase, tuple[float, ...]] = {"decode": (1, 16, 64, float("inf")), "prefill": (64, 512, float("inf"))}
ROW_KEYS = ("M", "T", "B")
"""Case keys that give the rows of a step; the first that a case has counts."""
PHASES: Mapping[str, tuple[Phase, ...]] = {"flash_attention": ("prefill",), "paged_attention": ("decode",)}
"""Ops that serve one phase only."""


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
    """Rows of a step of this case; None without any of `ROW_KEYS` (for example for an op from another package)."""
    return next((int(case[key]) for key in ROW_KEYS if key in case), None)


def launch_bucket(op: str, rows: int) -> str:
    """The bucket whose config a launch with `rows` rows takes.

    A launcher does not know its phase: for an op with both phases, up to 64 rows count as decode, more as prefill.
    """
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
    """The kernel that a committed record chose for `op` on `device` in `bucket`, or None."""
    entry = _entry(op, device, bucket)
    return None if entry is None else str(entry["kernel"])


def tuned(op: str, kernel: str, device: str, rows: int, scheme: str) -> Mapping[str, Any] | None:
    """The best config of `kernel` on `device` at `rows` rows by a committed record, or None."""
    entry = _entry(op, device, launch_bucket(op, rows))
    if entry is None or entry.get("scheme") != scheme:
        return None
    config: Mapping[str, Any] | None = entry.get("config") if entry["kernel"] == kernel else None
    return config or entry.get("tuned", {}).get(kernel)


def _entry(op: str, device: str, bucket: str) -> dict[str, Any] | None:
    return _load(Path(__file__).parent / op / "choices.json").get(device, {}).get(bucket)


@cache
def card(device: torch.device) -> str | None:
    """The name of a device in `choices.json`: `cpu` or the GPU's name; None for `meta`, which is no real device."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return device.type if device.type == "cpu" else None
