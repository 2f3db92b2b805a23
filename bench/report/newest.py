"""Which records speak for now: the newest of each kernel, case, scheme and machine; and what their times mean."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from math import isfinite

from rooflab.bench.records.record import Record
from rooflab.bench.report.sources import Located, Source

FINE = ("OK", "UNSUPPORTED", "UNAVAILABLE")
NOT_RUN = ("UNSUPPORTED", "UNAVAILABLE")


@dataclass(frozen=True)
class Chosen:
    """The record that speaks for its key, and how many configurations of the same run it was the fastest of."""

    located: Located
    configs: int = 1
    counted: Source | None = None
    """The profile that its traffic is from, where that is another record."""

    @property
    def record(self) -> Record:
        """The record itself."""
        return self.located.record

    @property
    def source(self) -> Source:
        """Its file and line."""
        return self.located.source


def machine_of(record: Record) -> str:
    """The machine's key, and the device where it is not the one that the key is named for."""
    key = str(record.environment.get("machine_key") or "unnamed machine")
    usual = "cuda" if record.environment.get("gpu") else "cpu"
    return key if record.device in (None, usual) else f"{key} ({record.device})"


def kernel_key(record: Record) -> tuple[str, str, str, str, str]:
    """Machine, op, kernel, case and scheme."""
    return (
        machine_of(record),
        record.op or "no op",
        record.kernel or "no kernel",
        record.case_id or "no case",
        record.scheme or "no scheme",
    )


def latency_ms(record: Record) -> float | None:
    """The median that may be published: of a record that is OK, and a time that a clock can show."""
    latency = record.latency_median_ms
    if record.status != "OK" or latency is None or not isfinite(latency) or latency <= 0:
        return None
    return latency


def fault(record: Record) -> tuple[str, str] | None:
    """Status and reason of what must not be overlooked: a failed status, or a time that is no time; else None."""
    if record.status not in FINE:
        return record.status, record.reason
    if record.status == "OK" and record.latency_median_ms is not None and latency_ms(record) is None:
        return "INVALID", f"its time is {record.latency_median_ms} ms"
    return None


def newest(items: Iterable[Located], key: Callable[[Record], Hashable]) -> list[Located]:
    """The last of each key, in the order in which the keys first come; `items` are oldest first."""
    found: dict[Hashable, Located] = {}
    for item in items:
        found[key(item.record)] = item
    return list(found.values())


def benches_of(located: Iterable[Located]) -> list[Located]:
    """The bench records that may stand in a ladder: of an A/B's readings half are of another revision, or slowed."""
    return [item for item in located if item.record.stands_alone]


def _is_profile(record: Record) -> bool:
    """Whether it says what a kernel moves and nothing of its time: Nsight Compute counts under a clock of its own."""
    return record.status == "OK" and record.latency_median_ms is None


def choose(benches: Sequence[Located]) -> list[Chosen]:
    """The newest bench record of each machine, op, kernel, case and scheme; a profile only where there is no other.

    Where its run timed several configurations, as a search does, the fastest of them that is right.
    """
    groups: dict[Hashable, list[Located]] = {}
    for item in benches:
        groups.setdefault(kernel_key(item.record), []).append(item)
    chosen = []
    for whole in groups.values():
        group = [item for item in whole if not _is_profile(item.record)] or whole
        last = group[-1]
        run = [item for item in group if item.record.run_id == last.record.run_id]
        configs = {str(item.record.config) for item in run}
        timed = [(time, item) for item in run if (time := latency_ms(item.record)) is not None]
        if len(configs) > 1 and timed:
            last = min(timed, key=lambda pair: pair[0])[1]
        chosen.append(_with_counted(Chosen(last, len(configs)), whole))
    return chosen


def _code_of(record: Record) -> tuple[object, ...]:
    """What names the code that ran: the commit, or the tree's hash where there is none, and a file from outside."""
    return record.commit, *(record.environment.get(name) for name in ("tree", "kernel_file_sha256"))


def _with_counted(chosen: Chosen, group: Sequence[Located]) -> Chosen:
    """The same with its traffic as the hardware counted it for this very code and config, where a profile did."""
    own = chosen.record
    profiles = [
        item
        for item in group
        if _is_profile(item.record)
        and item.record.traffic_basis == "counted"
        and (item.record.traffic_bytes or 0) > 0
        and not item.record.dirty
        and (_code_of(item.record), item.record.config) == (_code_of(own), own.config)
    ]
    latency = latency_ms(own)
    if not profiles or own.dirty or not any(_code_of(own)) or latency is None or own.traffic_basis == "counted":
        return chosen
    moved = profiles[-1].record.traffic_bytes
    assert moved, "asked above"
    counted = replace(
        own,
        traffic_bytes=moved,
        traffic_basis="counted",
        intensity=(own.flops or 0.0) / moved,
        bytes_per_s=moved / latency * 1e3,
    )
    return replace(chosen, located=replace(chosen.located, record=counted), counted=profiles[-1].source)


def shared_run(candidates: Sequence[Chosen], history: Sequence[Located], run_id: str) -> tuple[Located, bool] | None:
    """What a time of run `run_id` is compared with: that run's own record, else the newest, and whether it is another
    run's.  `candidates` are what speaks for now, `history` every record of the same key."""
    same = [(time, item) for item in history if item.record.run_id == run_id and (time := latency_ms(item.record))]
    if same:
        return min(same, key=lambda pair: pair[0])[1], False
    timed = [(time, item.located) for item in candidates if (time := latency_ms(item.record)) is not None]
    return (min(timed, key=lambda pair: pair[0])[1], True) if timed else None
