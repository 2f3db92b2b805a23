"""The noise floor of a machine: the effects that its A/A comparisons showed, where there were none.

Kept per machine in the cache folder, by comparison.  A floor only ever turns a verdict into UNRESOLVED.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from rooflab.bench.ab.verdict import Outcome
from rooflab.engine.model_files import cache_folder

KEPT = 50
"""A/A comparisons remembered of each kernel, the newest."""
ENOUGH = 5
"""A/A comparisons from which a floor is a percentile of what was seen; of fewer, it is the widest bound."""


def _path(machine_key: str, folder: Path | None) -> Path:
    return (folder or cache_folder()) / "ab" / f"{machine_key}.json"


def floor_of(effects: Sequence[tuple[float, float]]) -> float | None:
    """The floor of A/A comparisons given as (effect, furthest bound), ratios minus one without sign; None of none."""
    if not effects:
        return None
    if len(effects) < ENOUGH:
        return max(bound for _, bound in effects)
    return float(np.percentile([effect for effect, _ in effects], 95))


def effects_of(outcome: Outcome) -> tuple[float, float] | None:
    """(effect, furthest bound) of an A/A outcome without sign, as `floor_of` takes them; None if it has none."""
    effects = [abs(value) for value in (outcome.effect, outcome.effect_low, outcome.effect_high) if value is not None]
    if len(effects) < 3 or not all(math.isfinite(effect) for effect in effects):
        return None
    return effects[0], max(effects)


def load(machine_key: str, folder: Path | None = None) -> dict[str, float]:
    """Floors by comparison; empty where no A/A was run on this machine."""
    floors = {key: floor_of(effects) for key, effects in _read(_path(machine_key, folder)).items()}
    return {key: floor for key, floor in floors.items() if floor is not None}


def remember(machine_key: str, outcomes: Sequence[Outcome], folder: Path | None = None) -> None:
    """Adds the outcomes of an A/A run; what was not measured adds nothing."""
    path = _path(machine_key, folder)
    known = _read(path)
    for outcome in outcomes:
        effects = effects_of(outcome)
        if effects is not None:
            known[outcome.key] = [*known.get(outcome.key, []), effects][-KEPT:]
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(known, indent=1))
    part.replace(path)


def _read(path: Path) -> dict[str, list[tuple[float, float]]]:
    if not path.is_file():
        return {}
    found: Mapping[str, list[list[float]]] = json.loads(path.read_text())
    return {key: [(float(effect), float(bound)) for effect, bound in effects] for key, effects in found.items()}
