"""Measured ceilings of GPUs, kept in the cache folder with the circumstances under which they were measured.

One file for each card, because cards of one kind differ.  What was measured under another driver, another power limit
or other highest clocks, or by other microkernels is not used, and the reason says so.  NVML cannot be asked for a clock
that was locked (`nvidia-smi -lgc`): one that held the clocks while they were measured shows in the readings' throttle
reasons (`clocks_were_set`), and one that was locked since is not noticed here, but shows in the clocks of each record.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rooflab.bench.ceilings.microkernels.microkernel import HERE
from rooflab.bench.ceilings.readings import Reading
from rooflab.bench.records.environment import Environment
from rooflab.bench.records.record import now
from rooflab.bench.timing.clocks import SET_BY_USER
from rooflab.engine.model_files import cache_folder
from rooflab.roofline.model import Ceilings

SAME = (
    "name",
    "uuid",
    "driver",
    "memory_bytes",
    "sms",
    "l2_bytes",
    "max_sm_clock_mhz",
    "max_memory_clock_mhz",
    "power_limit_w",
    "ecc",
    "mig",
)
"""What of a GPU must be as it was."""


@dataclass(frozen=True)
class Kept:
    """One card's measured ceilings."""

    ceilings: Ceilings | None
    """None where too few limits could be measured; `reason` says which are missing."""
    reason: str
    readings: tuple[Reading, ...]
    environment: Mapping[str, Any]
    """`Environment.to_dict()` when it was measured."""
    made: str
    """When, UTC, ISO 8601."""
    microkernels: str
    """`microkernels_hash()` then."""

    @property
    def clocks_were_set(self) -> bool:
        """Whether NVML said of any reading that somebody had set the clocks."""
        seen = ((reading.clocks or {}).get("throttle_reasons") for reading in self.readings)
        return any((bits or 0) & SET_BY_USER for bits in seen)


def microkernels_hash() -> str:
    """A hash over the microkernels' files: what others measured is measured anew."""
    digest = hashlib.sha256()
    for file in sorted(path for path in HERE.iterdir() if path.suffix in (".cu", ".py")):
        digest.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def file_of(environment: Environment, folder: Path | None = None) -> Path:
    """Where a card's ceilings are kept.  Raises `ValueError` on an environment without a GPU."""
    if environment.gpu is None:
        raise ValueError("environment: expected one with a GPU, got none")
    card = hashlib.sha256(environment.gpu.uuid.encode()).hexdigest()[:8]
    return (folder or cache_folder()) / "ceilings" / f"{environment.machine_key}.cuda-{card}.json"


def find(environment: Environment, folder: Path | None = None) -> tuple[Kept | None, str]:
    """What is kept for this card under these circumstances; else None and why."""
    if environment.gpu is None:
        return None, "there is no GPU"
    path = file_of(environment, folder)
    if not path.is_file():
        return None, "none were measured on this card"
    try:
        kept = _kept(json.loads(path.read_text()))
        then: Mapping[str, Any] = kept.environment["gpu"]
        for name in SAME:
            if then[name] != getattr(environment.gpu, name):
                return None, f"they were measured with {name} {then[name]}, and it is {getattr(environment.gpu, name)}"
    except (ValueError, KeyError, TypeError):
        return None, "what is kept is damaged or of another version"
    if kept.microkernels != microkernels_hash():
        return None, "they were measured by other microkernels"
    return kept, ""


def _kept(values: Mapping[str, Any]) -> Kept:
    found = values["ceilings"]
    return Kept(
        ceilings=None if found is None else Ceilings(**found),
        reason=values["reason"],
        readings=tuple(Reading.from_dict(reading) for reading in values["readings"]),
        environment=values["environment"],
        made=values["made"],
        microkernels=values["microkernels"],
    )


def made_now(environment: Environment, readings: Sequence[Reading], ceilings: Ceilings | None, reason: str) -> Kept:
    """What was measured now, kept nowhere."""
    return Kept(ceilings, reason, tuple(readings), environment.to_dict(), now(), microkernels_hash())


def keep(
    environment: Environment,
    readings: Sequence[Reading],
    ceilings: Ceilings | None,
    reason: str,
    folder: Path | None = None,
) -> Kept:
    """Keeps what was measured now.  Raises `ValueError` where the cache folder cannot be written to."""
    kept = made_now(environment, readings, ceilings, reason)
    values = {
        "ceilings": None if ceilings is None else asdict(ceilings),
        "reason": reason,
        "readings": [reading.to_dict() for reading in readings],
        "environment": kept.environment,
        "made": kept.made,
        "microkernels": kept.microkernels,
    }
    write_json(file_of(environment, folder), values)
    return kept


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """Writes `values` whole or not at all.  Raises `ValueError` where the folder cannot be written to."""
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(values, indent=1))
        temporary.replace(path)
    except OSError as error:
        raise ValueError(f"ROOFLAB_CACHE: expected a folder that can be written to, got {error}") from error
