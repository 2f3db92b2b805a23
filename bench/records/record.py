"""Records: one line of JSON for each result, with its circumstances.  Appended, never edited.

The schema is the dataclass `Record`.  Within one major version fields are only added; a reader ignores those that it
does not know and refuses a newer major version.
"""

from __future__ import annotations

import base64
import json
import re
import secrets
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from typing import Any, Literal, get_args

import numpy as np

from rooflab.bench.records.plain import plain
from rooflab.kernels.registry import Backend, Role
from rooflab.reference.spec import Scalar
from rooflab.roofline.model import Basis as TrafficBasis
from rooflab.roofline.model import Limiter

SCHEMA_VERSION = "1.1"

Kind = Literal["check", "bench", "ceiling", "engine", "ab", "static"]
Failure = Literal["INCORRECT", "COMPILE_ERROR", "RUNTIME_ERROR", "OUT_OF_MEMORY", "TIMEOUT", "INVALID"]
Status = Literal["OK", Failure, "UNSUPPORTED", "UNAVAILABLE"]
NOT_RUN: tuple[Status, ...] = ("UNSUPPORTED", "UNAVAILABLE")
"""Reasons that a kernel was not run, independent of the kernel itself."""
CheckedBy = Literal["gpu", "interpreter", "emulator", "torch", "none"]
Basis = Literal["measured", "predicted", "bound"]
L2State = Literal["cold", "warm"]
DeviceType = Literal["cpu", "cuda"]
Verdict = Literal["FASTER", "SLOWER", "SAME", "UNRESOLVED", "INCORRECT", "FAILED", "MISSING", "INVALID"]


def now() -> str:
    """The time in UTC, ISO 8601, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def new_run_id() -> str:
    """An id that sorts by time and that two machines do not share."""
    return f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{secrets.token_hex(4)}"


@dataclass(frozen=True, kw_only=True)
class Record:
    """One result.  Raises `ValueError` at construction on a value that its field does not allow, and on a reading that
    must not be published: a latency beside a failed status, or of a kernel that ran in Triton's interpreter."""

    kind: Kind
    """What was done."""
    run_id: str
    """Names the run, and its file."""
    status: Status
    """The outcome."""
    environment: Mapping[str, Any]
    """The machine and its software, as `environment.snapshot()` gives them."""
    schema_version: str = SCHEMA_VERSION
    """`major.minor` of this schema."""
    timestamp: str = field(default_factory=now)
    """When the record was made, UTC, ISO 8601."""
    commit: str | None = None
    """Git commit of the Rooflab checkout; None outside one."""
    dirty: bool | None = None
    """Whether the checkout had uncommitted changes; None outside one."""
    reason: str = ""
    """Why the status is not OK, or why nothing was timed, in one sentence."""

    op: str | None = None
    """The op, for kernels."""
    kernel: str | None = None
    """The kernel's name within its op."""
    role: Role | None = None
    """`naive`, `library`, `optimized` or `peer`."""
    backend: Backend | None = None
    """What the kernel is written in."""
    case_id: str | None = None
    """The case in its stable text form."""
    case: Mapping[str, Scalar] = field(default_factory=dict)
    """The case's values."""
    scheme: str | None = None
    """The dtypes by name."""
    config: Mapping[str, Scalar] | None = None
    """The tunable kernel's configuration, where one was chosen."""
    seed: int | None = None
    """Seed of the inputs and of the order of timing."""
    device: DeviceType | None = None
    """Type of the device that the kernel ran on, or was to run on; its name is in the environment."""

    checked_by: CheckedBy = "none"
    """What ran the kernel for its check."""
    errors: tuple[Mapping[str, Any], ...] = ()
    """`ErrorStats` of each output."""

    weak: tuple[str, ...] = ()
    """Wrong answers that the case's tolerance would let pass."""

    basis: Basis = "bound"
    """Where the times come from: read from a clock, predicted by a model, or only bounded by the roofline."""
    timer: str | None = None
    """Name of the timing method."""
    l2_state: L2State | None = None
    """Whether the last-level cache held the inputs when a sample began."""
    latency_p20_ms: float | None = None
    """20th percentile of the samples, per call."""
    latency_median_ms: float | None = None
    """Median of the samples, per call."""
    latency_p80_ms: float | None = None
    """80th percentile of the samples, per call."""
    samples: str | None = None
    """All samples in time order, seconds per call: float64 little-endian, zlib, base64.  Read by `samples_s`."""
    sample_count: int | None = None
    """How many samples there are."""

    flops: float | None = None
    """FLOPs that the op needs for these inputs: tensor-core and vector."""
    least_bytes: float | None = None
    """HBM bytes that the op needs at least."""
    traffic_bytes: float | None = None
    """HBM bytes that this kernel moves; None where unknown."""
    traffic_basis: TrafficBasis | None = None
    """`modelled` by the kernel's author or `counted`."""
    intensity: float | None = None
    """FLOP per byte of traffic, or of the least bytes where the traffic is not known."""
    flops_per_s: float | None = None
    """`flops` over the median latency."""
    bytes_per_s: float | None = None
    """Traffic over the median latency, or the least bytes over it where the traffic is not known."""

    bound_ms: float | None = None
    """The least time that the device needs, under `ceilings`."""
    limiter: Limiter | None = None
    """The part of the cost that sets the bound."""
    bound_fraction: float | None = None
    """Bound over median latency: 1 is at the roof."""
    ceilings: Mapping[str, Any] | None = None
    """The `Ceilings` behind the bound, their kind included."""

    peak_memory_bytes: float | None = None
    """Most device memory that one call held beyond its inputs and outputs; None where nothing measured it."""
    predicted_ms: float | None = None
    """What compiled code and roofline alone predict for the latency."""
    prediction_error: float | None = None
    """The predictor's relative error on kernels that it was not fitted to; None where it is uncalibrated."""
    compiled: tuple[Mapping[str, Any], ...] = ()
    """What the compiled code holds, one mapping per launched kernel: registers, spills, instruction counts."""

    baseline: Mapping[str, Any] | None = None
    """For an A/B: the side compared with (`kernel`, `commit`, `latency_median_ms`); this record's own is the other."""
    verdict: Verdict | None = None
    """For an A/B: its outcome; the effect, its bounds and the floor are in `metrics`."""

    device_kernels: tuple[str, ...] = ()
    """Names of the device's kernels in the order of one call; empty where they were not recorded."""
    activity_hash: str | None = None
    """Hash over the device's kernels, code, grids and order; None on a CPU and where it was not recorded."""
    clocks: Mapping[str, Any] | None = None
    """Clocks, power, temperature and throttle reasons seen during the run; None on a CPU."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Numbers of kinds that have no field of their own (`ttft_ms`, `itl_p50_ms`), the unit in the name."""

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            if value not in choices:
                wanted = ", ".join(str(choice) for choice in choices if choice is not None)
                raise ValueError(f"{name}: expected one of {wanted}, got {value!r}")
        _check_version(self.schema_version)
        latency = self.latency_median_ms
        if self.status not in ("OK", "INVALID") and latency is not None:
            raise ValueError(f"latency_median_ms: a record with status {self.status} publishes no latency")
        if self.status != "OK" and not self.reason:
            raise ValueError(f"reason: expected why the status is {self.status}, got an empty text")
        if latency is None:
            return
        if self.basis == "bound":
            raise ValueError("basis: expected measured or predicted beside a latency, got 'bound'")
        elsewhere = self.checked_by == "interpreter" or self.device == "cpu"
        if self.basis == "measured" and self.backend not in (None, "torch") and elsewhere:
            raise ValueError(
                f"latency_median_ms: {self.op}/{self.kernel} ran in an interpreter, whose time is not a kernel's"
            )

    @property
    def samples_s(self) -> list[float]:
        """The samples in time order, seconds per call; empty where nothing was timed."""
        return unpack_samples(self.samples) if self.samples else []

    @property
    def stands_alone(self) -> bool:
        """Whether it is a bench record that speaks for its kernel: not a reading of an A/B, which has `pair`."""
        return self.kind == "bench" and "pair" not in self.metrics

    def to_json(self) -> str:
        """One line of JSON.  Numbers that JSON lacks become the texts `nan`, `inf` and `-inf`."""
        return json.dumps(plain(self), allow_nan=False, separators=(",", ":"))

    @classmethod
    def from_json(cls, line: str) -> Record:
        """The record in `line`.  Raises `ValueError` on anything else, or on a newer major version."""
        values = json.loads(line)
        if not isinstance(values, dict):
            raise ValueError(f"record: expected a JSON object, got {type(values).__name__}")
        _check_version(str(values.get("schema_version")))
        known = {name: value for name, value in values.items() if name in _FIELDS}
        missing = [name for name in ("kind", "run_id", "status", "environment") if name not in known]
        if missing:
            raise ValueError(f"record: expected the field {missing[0]!r}, got none")
        try:
            known["errors"] = tuple(
                {**stats, **{name: float(stats[name]) for name in _ERROR_NUMBERS if name in stats}}
                for stats in known.get("errors", ())
            )
            known |= {name: tuple(known.get(name, ())) for name in ("weak", "compiled", "device_kernels")}
            return cls(**known)
        except TypeError as error:
            raise ValueError(f"record: a field has another type than the schema's: {error}") from error


_FIELDS = frozenset(item.name for item in fields(Record))
_ERROR_NUMBERS = ("max_abs_error", "max_error_over_tolerance")
_CHOICES: Mapping[str, tuple[object, ...]] = {
    "kind": get_args(Kind),
    "status": get_args(Status),
    "checked_by": get_args(CheckedBy),
    "basis": get_args(Basis),
    "role": (*get_args(Role), None),
    "backend": (*get_args(Backend), None),
    "device": (*get_args(DeviceType), None),
    "l2_state": (*get_args(L2State), None),
    "limiter": (*get_args(Limiter), None),
    "verdict": (*get_args(Verdict), None),
    "traffic_basis": (*get_args(TrafficBasis), None),
}


def _check_version(version: str) -> None:
    major, _, minor = version.partition(".")
    if not (major.isdigit() and minor.isdigit()):
        raise ValueError(f"schema_version: expected MAJOR.MINOR, got {version!r}")
    ours = SCHEMA_VERSION.partition(".")[0]
    if int(major) > int(ours):
        raise ValueError(f"schema_version: expected {ours}.x, got {version}, which a newer Rooflab wrote")


def pack_samples(seconds: Sequence[float]) -> str:
    """Samples as float64 little-endian, zlib, base64; every bit is kept."""
    return base64.b64encode(zlib.compress(np.asarray(seconds, "<f8").tobytes(), 9)).decode()


def unpack_samples(text: str) -> list[float]:
    """The inverse of `pack_samples`.  Raises `ValueError` on a text that is not one."""
    try:
        values: list[float] = np.frombuffer(zlib.decompress(base64.b64decode(text, validate=True)), "<f8").tolist()
    except (ValueError, zlib.error) as error:
        raise ValueError(f"samples: expected base64 of zlib of float64 values, got {text[:20]!r}") from error
    return values


def method_of(timer: str | None, l2_state: str | None) -> str:
    """`cuda events, launch gaps hidden, cold`: the timing method and the state of L2, without the number of calls.

    The number of calls per sample depends on the kernel's speed, so it would differ for a faster kernel.  The state of
    L2 shows that several calls share a sample.
    """
    name = re.sub(r"\d+ calls per sample", "several calls per sample", timer or "unknown")
    return f"{name}, {l2_state}" if l2_state else name


def paired_method_of(timer: str | None, l2_state: str | None) -> str:
    """`method_of` without what was done about a CPU's threads.

    Processes of one kernel may differ in it: with other work on the machine 2 of 12 did not find their threads to pin.
    It adds equal noise to both sides.
    """
    return re.sub(r", threads (not )?pinned[^,]*", "", method_of(timer, l2_state))
