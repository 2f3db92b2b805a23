"""The machines that records were made on: parts, versions, and the clocks that were seen while they ran."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rooflab.bench.report.newest import machine_of
from rooflab.bench.report.sources import Located
from rooflab.bench.report.words import moment, plain_value, slug, throttling, whole
from rooflab.roofline.points import si

_VERSIONS = ("torch", "triton", "numpy", "python", "os")
_GPU: tuple[tuple[str, str], ...] = (
    ("driver", "driver"),
    ("sms", "SMs"),
    ("memory_bytes", "memory"),
    ("l2_bytes", "L2"),
    ("max_sm_clock_mhz", "highest SM clock, MHz"),
    ("max_memory_clock_mhz", "highest memory clock, MHz"),
    ("power_limit_w", "power limit, W"),
    ("ecc", "ECC"),
    ("mig", "MIG"),
)
_CPU: tuple[tuple[str, str], ...] = (
    ("cpu", "CPU"),
    ("cores", "logical processors"),
    ("memory_gib", "memory, GiB"),
    ("cache_bytes", "last-level cache"),
    ("threads", "torch threads"),
    ("matmul_precision", "matrix products"),
)
_READINGS = {
    "sm_clock_range_hz": "SM clock read on the device, MHz",
    "sm_clock_mhz": "SM clock by NVML, MHz",
    "memory_clock_mhz": "memory clock seen, MHz",
    "power_w": "power seen, W",
    "temperature_c": "temperature seen, C",
}


@dataclass(frozen=True)
class Fact:
    """One property; more than one value where runs differ, which is what a comparison between them must know."""

    label: str
    values: tuple[str, ...]


@dataclass(frozen=True)
class Machine:
    """One kind of machine, and what was run on it."""

    key: str
    name: str
    anchor: str
    facts: tuple[Fact, ...]
    records: int
    runs: int
    first: str
    last: str


def machines_of(located: Sequence[Located]) -> tuple[Machine, ...]:
    """One entry for each machine, GPUs before CPUs, then by key."""
    groups: dict[str, list[Located]] = {}
    for item in located:
        groups.setdefault(machine_of(item.record), []).append(item)
    ordered = sorted(groups.items(), key=lambda pair: (not _has_gpu(pair[1]), pair[0]))
    return tuple(_machine(key, items, number) for number, (key, items) in enumerate(ordered, 1))


def _has_gpu(items: Sequence[Located]) -> bool:
    return bool(items[0].record.environment.get("gpu"))


def _machine(key: str, items: Sequence[Located], number: int) -> Machine:
    environments = [item.record.environment for item in items]
    gpus = [environment.get("gpu") or {} for environment in environments]
    name = str(gpus[-1].get("name") or environments[-1].get("cpu") or key)
    facts = [_fact(label, [gpu.get(field) for gpu in gpus], field) for field, label in _GPU]
    facts += [_fact(label, [environment.get(field) for environment in environments], field) for field, label in _CPU]
    facts += [_fact(field, [environment.get(field) for environment in environments], field) for field in _VERSIONS]
    facts += _clock_facts(items)
    return Machine(
        key=key,
        name=name,
        anchor=f"machine-{number}-{slug(name)}",
        facts=tuple(fact for fact in facts if fact.values),
        records=len(items),
        runs=len({item.record.run_id for item in items}),
        first=moment(items[0].record.timestamp),
        last=moment(items[-1].record.timestamp),
    )


def _fact(label: str, values: Sequence[Any], field: str) -> Fact:
    texts = [_text(field, value) for value in values if value is not None]
    return Fact(label, tuple(dict.fromkeys(texts)))


def _text(field: str, value: Any) -> str:
    if field.endswith("_bytes") and isinstance(value, int | float) and value > 0:
        return f"{si(value)}B"
    return plain_value(value)


def _clock_facts(items: Sequence[Located]) -> list[Fact]:
    """Least and largest of each reading over all records, and every throttle reason that was seen."""
    seen: dict[str, list[float]] = {}
    bits, asked = 0, False
    for item in items:
        clocks: Mapping[str, Any] = item.record.clocks or {}
        for name in _READINGS:
            scale = 1e-6 if name.endswith("_hz") else 1.0
            seen.setdefault(name, []).extend(round(scale * value, 1) for value in _numbers(clocks.get(name)))
        reasons = clocks.get("throttle_reasons")
        if isinstance(reasons, int):
            bits, asked = bits | reasons, True
    facts = [
        Fact(label, (f"{whole(min(seen[name]))} to {whole(max(seen[name]))}",))
        for name, label in _READINGS.items()
        if seen.get(name)
    ]
    return [*facts, *([Fact("clock held back by", (throttling(bits),))] if asked else [])]


def _numbers(value: Any) -> list[float]:
    values = value if isinstance(value, list | tuple) else [value]
    return [float(number) for number in values if isinstance(number, int | float) and not isinstance(number, bool)]
