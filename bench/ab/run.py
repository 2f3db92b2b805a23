"""One A/B from beginning to end: check both sides, pair fresh processes, confirm what was called, judge."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rooflab.bench.ab.floors import load as load_floors
from rooflab.bench.ab.pairs import Batch, Reading, SideName, run_pairs
from rooflab.bench.ab.processes import Runner
from rooflab.bench.ab.sides import Comparison
from rooflab.bench.ab.verdict import Evidence, Outcome, Rules, judge, wants_confirmation
from rooflab.bench.records import Verdict

CONFIRMATION_SHARE = 0.4
"""Share of a budget kept for the confirmation and not given to the first batch."""
SAME_HARDWARE = ("machine_key", "cpu", "cores", "threads")


@dataclass(frozen=True)
class Settings:
    """How much is measured, and how it is judged."""

    rules: Rules = field(default_factory=Rules)
    pairs: int = 12
    budget_s: float | None = None
    """Seconds for the whole run; it ends early with what it has.  None sets no limit."""
    kernel_s: float = 0.3
    """Seconds for one kernel in one process."""
    seed: int = 0
    device: str = "cpu"
    timer: str | None = None

    def __post_init__(self) -> None:
        if self.pairs < 1:
            raise ValueError(f"pairs: expected at least 1, got {self.pairs}")
        if self.budget_s is not None and not self.budget_s > 0:
            raise ValueError(f"budget: expected a positive number of seconds, got {self.budget_s}")
        if not self.kernel_s > 0:
            raise ValueError(f"kernel-seconds: expected a positive number of seconds, got {self.kernel_s}")


@dataclass(frozen=True)
class Result:
    """What came of a run."""

    comparison: Comparison
    settings: Settings
    outcomes: tuple[Outcome, ...]
    environments: Mapping[str, Mapping[str, Any]]
    """By side."""
    first: Batch
    second: Batch
    seconds: float
    stopped: str = ""
    """Why less was measured than asked for."""


def run(
    comparison: Comparison,
    settings: Settings,
    done: Callable[[str], None] = lambda text: None,
    floors: Mapping[str, float] | None = None,
    *,
    checked: bool = False,
) -> Result:
    """Runs and judges `comparison`.  Raises nothing that a kernel did: that becomes a verdict.

    `floors` are noise floors by comparison; without them those remembered of this machine.  `checked` says that an
    earlier run has checked this very code and judged its timed outputs, so that this one only measures.
    """
    names: tuple[SideName, ...] = ("A", "B")
    runner = Runner(comparison, settings.device, settings.seed, settings.kernel_s, settings.timer)
    runner.judged |= set(names) if checked else set()
    began = time.monotonic()
    ends = began + settings.budget_s if settings.budget_s is not None else float("inf")
    broken: dict[str, tuple[Verdict, str]] = {}
    for key in comparison.keys:
        missing = comparison.missing(key)
        if missing:
            broken[key] = ("MISSING", missing)
    for name in () if checked else names:
        left = [key for key in comparison.keys if key not in broken]
        for key, reading in (runner.check(name, left) if left else {}).items():
            if reading.status != "OK":
                broken[key] = _verdict_of(comparison, name, reading)
        done(f"check, side {name}")
    broken |= _other_machine(runner.environments, [key for key in comparison.keys if key not in broken])
    whole = [key for key in comparison.keys if key not in broken]
    until = ends - CONFIRMATION_SHARE * max(0.0, ends - time.monotonic()) if ends < float("inf") else ends
    first = run_pairs(runner.measure, whole, settings.pairs, seed=settings.seed, deadline=until, done=done)
    broken |= {key: _verdict_of(comparison, side, reading) for key, (side, reading) in first.broken.items()}
    evidence = {key: _evidence(key, broken, first, Batch()) for key in comparison.keys}
    called = [key for key, item in evidence.items() if wants_confirmation(item, settings.rules)]
    second = run_pairs(runner.measure, called, settings.pairs, seed=settings.seed + 1, deadline=ends, done=done)
    broken |= {key: _verdict_of(comparison, side, reading) for key, (side, reading) in second.broken.items()}
    known = load_floors(str(runner.environments.get("B", {}).get("machine_key", ""))) if floors is None else floors
    evidence = {key: _evidence(key, broken, first, second, _floor(comparison, key, known)) for key in comparison.keys}
    return Result(
        comparison=comparison,
        settings=settings,
        outcomes=tuple(judge(list(evidence.values()), settings.rules)),
        environments={str(name): found for name, found in runner.environments.items()},
        first=first,
        second=second,
        seconds=time.monotonic() - began,
        stopped=first.stopped or (f"confirmation: {second.stopped}" if second.stopped else ""),
    )


def _verdict_of(comparison: Comparison, name: SideName, reading: Reading) -> tuple[Verdict, str]:
    """What a reading that is not OK makes of its comparison."""
    label = comparison.side(name).label
    reason = reading.reason if reading.reason.startswith(label) else f"{label}: {reading.reason}"
    if reading.status in ("INCORRECT", "INVALID"):
        return ("INCORRECT" if reading.status == "INCORRECT" else "INVALID"), reason
    return "FAILED", f"{label}: {reading.status}: {reason.removeprefix(f'{label}: ')}"


def _other_machine(
    environments: Mapping[SideName, Mapping[str, Any]], keys: Sequence[str]
) -> dict[str, tuple[Verdict, str]]:
    """INVALID for every key where the sides' processes saw different machines."""
    if len(environments) < 2:
        return {}
    reason = difference(environments["A"], environments["B"])
    return dict.fromkeys(keys, ("INVALID", reason)) if reason else {}


def difference(a: Mapping[str, Any], b: Mapping[str, Any]) -> str:
    """How two environments differ in what decides a time and is no part of a change, or nothing."""
    gpus = a.get("gpu") or {}, b.get("gpu") or {}
    for name in ("name", "driver", "max_sm_clock_mhz", "power_limit_w", "mig"):
        if gpus[0].get(name) != gpus[1].get(name):
            return f"the sides ran on different GPUs or drivers: {name} {gpus[0].get(name)} and {gpus[1].get(name)}"
    for name in SAME_HARDWARE:
        if a.get(name) != b.get(name):
            return f"the sides ran on different machines or settings: {name} {a.get(name)} and {b.get(name)}"
    return ""


def _evidence(
    key: str,
    broken: Mapping[str, tuple[Verdict, str]],
    first: Batch,
    second: Batch,
    noise_floor: float | None = None,
) -> Evidence:
    return Evidence(
        key=key,
        first=tuple(first.pairs.get(key, ())),
        second=tuple(second.pairs.get(key, ())),
        broken=broken.get(key),
        identical=_identical(key, first),
        noise_floor=noise_floor,
        unconfirmed=f"seen once and not confirmed: {second.stopped}" if second.stopped else "",
    )


def _floor(comparison: Comparison, key: str, known: Mapping[str, float]) -> float | None:
    """The larger floor of the two kernels compared: an A/A is remembered by its kernel, also where two are compared."""
    names = {side.targets[key].id for side in (comparison.a, comparison.b) if key in side.targets}
    return max((known[name] for name in names if name in known), default=None)


def _identical(key: str, batch: Batch) -> bool:
    """Whether all processes of both sides showed one device activity."""
    hashes = {reading.activity_hash for _, _, name, reading in batch.readings if name == key}
    return len(hashes) == 1 and None not in hashes
