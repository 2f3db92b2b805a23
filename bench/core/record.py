"""Defines records: one line of JSON for each result, with its environment.  Records are appended and never edited.

The schema is the dataclass `Record`.  A minor version only adds fields and values.  Version 1.2 added the status NOISY,
and 1.3 added the backend cpp and `checked_by` cpu.  A reader ignores unknown fields and refuses a newer major version.
"""

from __future__ import annotations

import base64
import json
import re
import secrets
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, Literal

import numpy as np

from rooflab.bench.base.decode import decoded
from rooflab.bench.base.plain import in_utc, plain
from rooflab.roofline.model import Basis as TrafficBasis
from rooflab.roofline.model import Limiter

SCHEMA_VERSION = "1.3"

# As in `registry` and `spec`, whose import takes a second, because they import torch.
Scalar = bool | int | float | str
Role = Literal["naive", "library", "optimized", "peer"]
Backend = Literal["torch", "triton", "gluon", "cuda", "cpp"]
CPU_BACKENDS = ("torch", "cpp")
Kind = Literal["check", "bench", "ceiling", "engine", "ab", "static"]
Failure = Literal["INCORRECT", "COMPILE_ERROR", "RUNTIME_ERROR", "OUT_OF_MEMORY", "TIMEOUT", "INVALID"]
Status = Literal["OK", "NOISY", Failure, "UNSUPPORTED", "UNAVAILABLE"]
NOT_RUN: tuple[Status, ...] = ("UNSUPPORTED", "UNAVAILABLE")
"""The statuses of a kernel that was not run, without a fault of the kernel."""
CheckedBy = Literal["gpu", "interpreter", "emulator", "torch", "cpu", "none"]
TimeBasis = Literal["measured", "predicted", "published", "bound"]
L2State = Literal["cold", "warm"]
DeviceType = Literal["cpu", "cuda"]
Verdict = Literal["FASTER", "SLOWER", "SAME", "UNRESOLVED", "INCORRECT", "FAILED", "MISSING", "INVALID"]


def new_run_id() -> str:
    """Returns a new run id.  Ids sort by time, and two machines do not make the same id."""
    return f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{secrets.token_hex(4)}"


@dataclass(frozen=True, kw_only=True)
class Record:
    """The record of one result.  The constructor raises `ValueError` on fields that contradict each other, such as a
    failed status beside a latency.  `from_json` also refuses a value that a field does not allow."""

    kind: Kind
    """The kind of result."""
    status: Status
    """The outcome of the run."""
    environment: Mapping[str, Any]
    """The machine and its software, from `Environment.now().to_dict()`."""
    run_id: str = field(default_factory=new_run_id)
    """Names the run and the run's file."""
    schema_version: str = SCHEMA_VERSION
    """`major.minor` of this schema."""
    timestamp: str = ""
    """The time at which the record was made: UTC, ISO 8601.  An empty text becomes the present time."""
    commit: str | None = None
    """Git commit of the Rooflab checkout; None outside a checkout."""
    dirty: bool | None = None
    """Whether the checkout had uncommitted changes; None outside a checkout."""
    reason: str = ""
    """Why the status is not OK, or why nothing was timed, in one sentence."""

    op: str | None = None
    """The name of the op, if the result is of a kernel."""
    kernel: str | None = None
    """The kernel's name within its op."""
    role: Role | None = None
    """`naive`, `library`, `optimized` or `peer`."""
    backend: Backend | None = None
    """The language or library in which the kernel is written."""
    case_id: str | None = None
    """The case as text.  The text of a case does not change between versions."""
    case: Mapping[str, Scalar] = field(default_factory=dict)
    """The case's values."""
    scheme: str | None = None
    """Name of the scheme, which sets the dtypes."""
    config: Mapping[str, Scalar] | None = None
    """The config of a tunable kernel; None if no config was chosen."""
    seed: int | None = None
    """Seed of the inputs and of the order of timing."""
    device: DeviceType | None = None
    """The type of the device on which the kernel ran, or would have run.  The environment has the device's name."""

    checked_by: CheckedBy = "none"
    """What executed the kernel in its check."""
    errors: tuple[Mapping[str, Any], ...] = ()
    """The `ErrorStats` of each output."""

    weak: tuple[str, ...] = ()
    """Wrong answers that the case's tolerance would accept."""

    basis: TimeBasis = "bound"
    """The source of the times: read from a clock, predicted by a model, or only bounded by the roofline."""
    timer: str | None = None
    """Name of the timing method."""
    l2_state: L2State | None = None
    """Whether the last-level cache held the inputs when a sample began."""
    latency_p20_ms: float | None = None
    """20th percentile of the samples, per call."""
    latency_median_ms: float | None = None
    """Median of the samples, per call.  It is a result only if the status is OK; a NOISY time gives no ratio."""
    latency_p80_ms: float | None = None
    """80th percentile of the samples, per call."""
    samples: str | None = None
    """All samples in time order, seconds per call: float64 little-endian, zlib, base64.  `samples_s` decodes this."""
    sample_count: int | None = None
    """Number of samples."""

    flops: float | None = None
    """FLOPs that the op needs for its inputs: the sum of tensor-core and vector FLOPs."""
    least_bytes: float | None = None
    """The least HBM bytes that the op must move."""
    traffic_bytes: float | None = None
    """HBM bytes that this kernel moves; None if unknown."""
    traffic_basis: TrafficBasis | None = None
    """The source of `traffic_bytes`: `modelled` (`Traffic.basis`), or `counted`."""
    intensity: float | None = None
    """`flops` divided by `traffic_bytes`, or by `least_bytes` if the traffic is unknown."""
    flops_per_s: float | None = None
    """`flops` divided by the median latency."""
    bytes_per_s: float | None = None
    """`traffic_bytes`, or `least_bytes` if the traffic is unknown, divided by the median latency."""

    bound_ms: float | None = None
    """The least time that the device needs, according to `ceilings`."""
    limiter: Limiter | None = None
    """The part of the cost that sets the bound."""
    bound_fraction: float | None = None
    """The bound divided by the median latency; 1 means that the kernel reaches the roof."""
    ceilings: Mapping[str, Any] | None = None
    """The `Ceilings` that give the bound, and the kind of these ceilings."""

    peak_memory_bytes: float | None = None
    """Peak device memory of one call, without its inputs and outputs; None if it was not measured."""
    predicted_ms: float | None = None
    """The latency predicted from the compiled code and the roofline alone."""
    prediction_error: float | None = None
    """The predictor's relative error on kernels outside its fit; None if the predictor is uncalibrated."""
    compiled: tuple[Mapping[str, Any], ...] = ()
    """Properties of the compiled code, one mapping per launched kernel: registers, spills, instruction counts."""

    baseline: Mapping[str, Any] | None = None
    """In an A/B, the baseline side (`kernel`, `commit`, `latency_median_ms`).  The record is of the other side."""
    verdict: Verdict | None = None
    """In an A/B, the outcome.  The effect, the bounds of the effect, and the floor are in `metrics`."""

    device_kernels: tuple[str, ...] = ()
    """Names of the device kernels that one call launched, in order; empty if device kernels were not recorded."""
    activity_hash: str | None = None
    """Hash of the device kernels: code, grids and order.  None on a CPU, or if device kernels were not recorded."""
    clocks: Mapping[str, Any] | None = None
    """Clocks, power, temperature and throttle reasons during the run; None on a CPU."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Numbers that have no field, such as `ttft_ms` and `itl_p50_ms`.  The name contains the unit."""

    def __post_init__(self) -> None:
        for name, field_value in (("op", self.op), ("kernel", self.kernel), ("case_id", self.case_id or None)):
            if isinstance(field_value, str) and (not field_value.strip() or _SURROGATE_PATTERN.search(field_value)):
                raise ValueError(f"{name}: expected a name that UTF-8 holds, or None, got {field_value!r}")
        _check_version(self.schema_version)
        object.__setattr__(self, "timestamp", in_utc(self.timestamp or datetime.now(UTC).isoformat(timespec="seconds")))
        latency_ms = self.latency_median_ms
        if self.status not in ("OK", "NOISY", "INVALID") and latency_ms is not None:
            raise ValueError(f"latency_median_ms: a record with status {self.status} publishes no latency")
        if self.status != "OK" and not self.reason:
            raise ValueError(f"reason: expected why the status is {self.status}, got an empty text")
        if latency_ms is None:
            return
        if self.basis == "bound":
            raise ValueError("basis: expected measured or predicted beside a latency, got 'bound'")
        is_cpu_run = self.checked_by == "interpreter" or self.device == "cpu"
        if self.basis == "measured" and self.backend not in (None, *CPU_BACKENDS) and is_cpu_run:
            raise ValueError(
                f"latency_median_ms: {self.op}/{self.kernel} ran in an interpreter, whose time is not a kernel's"
            )

    @property
    def samples_s(self) -> list[float]:
        """The samples in time order, in seconds per call; empty if nothing was timed."""
        return unpack_samples(self.samples) if self.samples else []

    @staticmethod
    def packed(seconds: Sequence[float]) -> str:
        """Encodes samples for the field `samples`: float64 little-endian, zlib, base64, without loss."""
        return base64.b64encode(zlib.compress(np.asarray(seconds, "<f8").tobytes(), 9)).decode()

    @property
    def method(self) -> str:
        """Returns the timing method and the L2 state, such as `cuda events, launch gaps hidden, cold`.

        The number of calls per sample is left out, because it depends on the kernel's speed.  Otherwise a faster kernel
        would seem to have another timing method."""
        timer_name = re.sub(r"\d+ calls per sample", "several calls per sample", self.timer or "unknown")
        return f"{timer_name}, {self.l2_state}" if self.l2_state else timer_name

    @property
    def stands_alone(self) -> bool:
        """Whether this is a bench result by itself, not a reading of an A/B comparison (with `pair` in `metrics`)."""
        return self.kind == "bench" and "pair" not in self.metrics

    def to_json(self) -> str:
        """Returns the record as one line of JSON.  NaN and infinities become the texts `nan`, `inf` and `-inf`."""
        return json.dumps(plain(self), allow_nan=False, separators=(",", ":"))

    @classmethod
    def from_json(cls, line: str) -> Record:
        """Parses the record in `line`.  Raises `ValueError` if it is not a record, or has a newer major version."""
        field_values = json.loads(line, parse_constant=_refused)
        if isinstance(field_values, dict):
            _check_version(str(field_values.get("schema_version")))
            if "run_id" not in field_values:
                raise ValueError("run_id: expected a value, got none")
        record = decoded(cls, field_values)
        error_rows = [{name: float(error[name]) for name in _ERROR_NUMBERS if name in error} for error in record.errors]
        errors = tuple({**error, **float_fields} for error, float_fields in zip(record.errors, error_rows, strict=True))
        return replace(record, errors=errors) if errors else record


_SURROGATE_PATTERN = re.compile("[\ud800-\udfff]")
"""Matches a UTF-16 surrogate.  JSON can contain a lone surrogate, but a UTF-8 file cannot."""
_ERROR_NUMBERS = ("max_abs_error", "max_error_over_tolerance")


def _refused(number: str) -> None:
    raise ValueError(f"record: expected the numbers that JSON has, got {number}")


def _check_version(version: str) -> None:
    major, _, minor = version.partition(".")
    if not (major.isdigit() and minor.isdigit()):
        raise ValueError(f"schema_version: expected MAJOR.MINOR, got {version!r}")
    current_major = SCHEMA_VERSION.partition(".")[0]
    if int(major) > int(current_major):
        raise ValueError(f"schema_version: expected {current_major}.x, got {version}, which a newer Rooflab wrote")


def unpack_samples(text: str) -> list[float]:
    """Decodes a text that `Record.packed` made.  Raises `ValueError` if `Record.packed` cannot have made `text`."""
    try:
        seconds: list[float] = np.frombuffer(zlib.decompress(base64.b64decode(text, validate=True)), "<f8").tolist()
    except (ValueError, zlib.error) as error:
        raise ValueError(f"samples: expected base64 of zlib of float64 values, got {text[:20]!r}") from error
    return seconds
