"""Holds the data and the result of a check.  The kernel's process gets the inputs, never the reference outputs."""

from __future__ import annotations

import re
import threading
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Literal, NamedTuple, cast, get_args

import torch

from rooflab.bench.core.call import free_bytes, output_dtypes, output_names
from rooflab.bench.core.environment import Environment
from rooflab.bench.core.process import cores
from rooflab.bench.core.record import CheckedBy, DeviceType, Record, Status
from rooflab.kernels.registry import Kernel
from rooflab.reference.compare import ErrorStats, all_within, elementwise
from rooflab.reference.spec import Case, Inputs, OpSpec, Outputs, Scheme

ExtraRun = Literal["apart", "turned", "far", "expanded", "in place", "other options"]
EXTRA_RUNS: tuple[ExtraRun, ...] = get_args(ExtraRun)
"""How a check with adversarial inputs also passes the drawn data: in another memory layout, with rows of stride 0, with
outputs over inputs, or with other options.  Every check also pads strides."""
Planted = bool | ExtraRun | Literal["planted alone"]
"""Which additional runs a check has.  True: all runs of `EXTRA_RUNS` and all adversarial (planted) sets.  False: none.
A value of `ExtraRun`: that run and one adversarial set.  "planted alone": the first data and all adversarial sets."""


class CheckTask(NamedTuple):
    """Describes a check to run: kernel, input case, dtype scheme, seed and additional runs."""

    kernel: Kernel
    case: Case
    scheme: Scheme
    seed: int = 0
    planted: Planted = True
    principle: str = ""
    """The name of the principle for which the check was drawn (`checks/drawn.py`); empty if the case was not drawn."""
    schemes: tuple[Scheme, ...] = ()
    """First the scheme of a drawn check, then the schemes to try if the kernel refuses an option of the case."""

    @staticmethod
    def ways() -> tuple[ExtraRun, ...]:
        """Returns the names of all additional runs of a check, such as "far" for tensors with huge strides."""
        return EXTRA_RUNS

    def taken(self, spec: OpSpec, refused: Collection[str] = ()) -> CheckTask | None:
        """Returns this check with dtypes and an input case that the kernel supports.  Returns None if there are none.

        Tries the dtype schemes in order.  For each scheme, it tries the full input case first, and then the case
        without optional values.  `refused` holds names of arguments that the kernel must not get."""
        for scheme in self.schemes:
            for case in (self.case, *_plainer(spec, self.case)):
                inputs = spec.make_inputs(case, scheme, torch.device("meta"), 0)
                if options_on(spec, inputs).isdisjoint(refused) and self.kernel.why_not_args(inputs, spec) is None:
                    return self._replace(case=case, scheme=scheme)
        return None


def _plainer(spec: OpSpec, case: Case) -> Iterator[Case]:
    """Yields simpler cases.  Each lacks one optional key of `case`, and the last lacks all optional keys."""
    optional_keys = [key for key in case if key in spec.optional]
    for dropped_keys in [*([key] for key in optional_keys), *([optional_keys] if len(optional_keys) > 1 else [])]:
        yield Case(**{key: case_value for key, case_value in case.items() if key not in dropped_keys})


def options_on(spec: OpSpec, inputs: Inputs) -> set[str]:
    """Returns the names of the optional arguments that do not have their default value in `inputs`."""
    defaults = {param.name: param.default for param in spec.parameters if param.default is not param.empty}
    values = {name: inputs[name] for name in defaults if name in inputs}
    return {name for name, value in values.items() if isinstance(value, torch.Tensor) or value != defaults[name]}


def named_in(text: str, names: Collection[str]) -> set[str]:
    """Returns the members of `names` that occur as whole words in `text`."""
    return {name for name in names if re.search(rf"\b{name}\b", text)}


@dataclass(frozen=True)
class CheckData:
    """Holds inputs, and judges outputs for them.  Reference outputs and allowed errors are computed on first use."""

    spec: OpSpec
    inputs: Inputs
    scheme: Scheme
    name: str = ""
    """The name under which a `Runner` keeps these inputs."""

    @cached_property
    def oracle(self) -> Outputs:
        """Returns the right outputs, computed in fp64."""
        return self.spec.oracle(self.inputs)

    @cached_property
    def limits(self) -> Outputs | None:
        """Returns the allowed error of each element; None if the op has its own function that compares outputs."""
        return None if self.spec.tolerance is None else self.spec.tolerance(self.inputs, self.oracle, self.scheme)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the outputs."""
        return output_names(self.spec, self.oracle)

    @property
    def forms(self) -> tuple[tuple[torch.Size, torch.dtype], ...]:
        """Returns the shape and the dtype of each output."""
        if self.spec.mutates:
            return tuple((self.inputs[name].shape, self.inputs[name].dtype) for name in self.names)
        dtypes = output_dtypes(self.spec, self.oracle, self.scheme)
        return tuple((oracle.shape, dtype) for oracle, dtype in zip(self.oracle, dtypes, strict=True))

    def misfit(self, outputs: Outputs) -> str:
        """Returns how `outputs` differ from the right outputs in number, shape or dtype; empty if they agree."""
        if len(outputs) != len(self.names):
            return f"returned {len(outputs)} values, expected tensors {', '.join(self.names)}"
        for name, output, shape_dtype in zip(self.names, outputs, self.forms, strict=True):
            if output.shape != shape_dtype[0]:
                return f"{name}: expected shape {tuple(shape_dtype[0])}, got {tuple(output.shape)}"
            if output.dtype != shape_dtype[1]:
                return f"{name}: expected dtype {shape_dtype[1]}, got {output.dtype}"
        return ""

    def faults(self, outputs: Outputs, own_stream: bool = False) -> str:
        """Returns the faults of `outputs` as one text; empty if `outputs` are right."""
        error_stats = () if (mismatch := self.misfit(outputs)) else self.judge(outputs, own_stream)
        return mismatch or "; ".join(stats.describe() for stats in error_stats if not stats.passed)

    def judge(self, outputs: Outputs, own_stream: bool = False) -> list[ErrorStats]:
        """Returns one verdict per output, like `spec.judge`.  Caches the allowed errors, which take long to compute.

        `own_stream` says that the kernel draws its own random numbers.  The op may then have another way to compare.
        """
        if own_stream and self.spec.compare_own_stream is not None:
            return self.spec.compare_own_stream(outputs, self.oracle, self.inputs, self.scheme)
        if self.limits is None:
            return self.spec.judge(outputs, self.oracle, self.inputs, self.scheme)
        checks = zip(self.names, outputs, self.oracle, self.limits, strict=True)
        return [elementwise(name, *self._of_numbers(output, oracle), limit) for name, output, oracle, limit in checks]

    def _of_numbers(self, output: torch.Tensor, oracle: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Removes NaN from the reference result `oracle`, so that the kernel's `output` can be compared with it.
        Returns `output` and `oracle`.  Only the elements where `oracle` is NaN change:

        - `oracle` becomes 0.
        - `output` becomes 0 if it is NaN, so it counts as right.
        - `output` becomes infinity if it is not NaN, so it counts as wrong.
        - `output` always becomes 0 if the op has an 8-bit output, because the dtype or clamping removes NaN."""
        nan_mask = oracle.isnan()
        if not nan_mask.any():
            return output, oracle
        has_8_bits = any(dtype.itemsize == 1 for _, dtype in self.forms)
        nan_values = torch.where(output.to(oracle).isnan() | has_8_bits, 0.0, torch.inf)
        return torch.where(nan_mask, nan_values, output.to(oracle)), oracle.masked_fill(nan_mask, 0.0)

    @cached_property
    def weak(self) -> tuple[str, ...]:
        """Returns the wrong answers that would pass this check, such as `c: zeros` for the output `c`.

        Tries three wrong answers: zeros, the mean of the right output, and the right output moved by one element.  For
        an op that works in place, also tries the unchanged input."""
        return tuple(self._passing_wrong_answers())

    @property
    def bytes(self) -> int:
        """Returns the total bytes of the tensors that this object holds now."""
        held_values = (*self.inputs.values(), *vars(self).get("oracle", ()), *(vars(self).get("limits") or ()))
        return sum(value.untyped_storage().nbytes() for value in held_values if isinstance(value, torch.Tensor))

    def _passing_wrong_answers(self) -> Iterator[str]:
        mutated_names = self.spec.mutates
        right_outputs = tuple(
            oracle if mutated_names else rounded(oracle, dtype)
            for oracle, (_, dtype) in zip(self.oracle, self.forms, strict=True)
        )
        for out_index, (name, oracle) in enumerate(zip(self.names, self.oracle, strict=True)):
            for answer_label, wrong_values in _wrong_answers(oracle, self.inputs[name] if mutated_names else None):
                wrong_answer = rounded(wrong_values, right_outputs[out_index].dtype)
                if self.limits is not None:
                    is_accepted = all_within(wrong_answer, oracle, self.limits[out_index])
                else:
                    all_outputs: Outputs = (*right_outputs[:out_index], wrong_answer, *right_outputs[out_index + 1 :])
                    is_accepted = all(output_stats.passed for output_stats in self.judge(all_outputs))
                if is_accepted:
                    yield f"{name}: {answer_label}"


@dataclass(frozen=True)
class CheckResult:
    """The result of checking one kernel on one input case."""

    op: str
    kernel: str
    backend: str
    case: Case
    scheme: str
    device: str
    seed: int
    status: Status
    checked_by: CheckedBy
    errors: tuple[ErrorStats, ...] = ()
    """The worst error of all runs, one per output."""
    reason: str = ""
    """Why the status is not OK."""
    labels: tuple[str, ...] = ()
    """The labels of the runs, in order; a failing run is the last."""
    beyond: bool = False
    """Whether the kernel passed the runs that every check has, which come before the adversarial inputs."""
    weak: tuple[str, ...] = ()
    """Wrong answers that pass this case's tolerance (`c: zeros`)."""
    races: tuple[str, ...] = ()
    """Races between threads; only the emulator finds races."""
    bytes: Mapping[str, int] | None = None
    """Bytes that one call moves, by the names of `emulator.results.Bytes`; None if the emulator did not run."""

    @property
    def discriminating(self) -> bool:
        """Whether this case rejects wrong answers: zeros, the mean, and the right output shifted by one."""
        return not self.weak

    @property
    def not_offered(self) -> bool:
        """True if the kernel itself refuses this input case.  A kernel that cannot run on this machine has False."""
        return self.status == "UNSUPPORTED" and f"{self.op}/{self.kernel}" in self.reason  # by `why_not_args`

    @property
    def line(self) -> str:
        """Returns the line to print; "" for an unsupported case, because one other line lists all such cases."""
        return "" if self.not_offered else self.describe()

    def describe(self) -> str:
        """Describes the result in one line of text."""
        result_text = self.reason or "; ".join(output_error.describe() for output_error in self.errors)
        if self.weak:
            result_text += f" (not discriminating: {', '.join(self.weak)} would pass)"
        return f"{self.op}/{self.kernel} {self.case.id} {self.scheme}: {self.status}: {result_text}"

    def record(self, kernel: Kernel, run_id: str, environment: Environment) -> Record:
        """Makes the record of the check, with the bytes that the emulator counted, if the emulator was used."""
        moved_bytes = self.bytes or {}
        hbm_bytes = float(moved_bytes["hbm_read"] + moved_bytes["hbm_write"]) if moved_bytes else None
        return replace(
            environment.record("check", kernel, self.case, self.scheme, run_id, self.status, self.reason),
            seed=self.seed,
            device=cast(DeviceType, torch.device(self.device).type),
            checked_by=self.checked_by,
            errors=tuple(asdict(output_error) for output_error in self.errors),
            weak=self.weak,
            traffic_bytes=hbm_bytes,
            traffic_basis=None if hbm_bytes is None else "counted",
            metrics={f"{name}_bytes": float(byte_count) for name, byte_count in moved_bytes.items()},
        )


class KeptData(threading.local):
    """Caches the data of each thread's last input case, so that reference outputs are computed once for all kernels.

    The data are cached until `forget`, if they fit into a share of the free memory."""

    SHARE = 0.4
    """The share of the device's free memory for kept data.  On a CPU the processes of all cores share this memory."""

    def __init__(self) -> None:
        self._case: tuple[object, ...] = ()
        self._data: dict[str, CheckData] = {}
        self._room = 0.0

    def of(self, device: torch.device, *case: object) -> dict[str, CheckData]:
        """Returns the cached data of `case`, by name; empty if `case` differs from the last case."""
        if (device, *case) != self._case:
            self._data = {}  # before its memory is counted
            self._case = device, *case
            self._room = self.SHARE * free_bytes(device) / (1 if device.type == "cuda" else cores())
        return self._data

    def forget(self) -> None:
        """Frees the memory of the cached data, before a timing begins."""
        self._case, self._data = (), {}

    def keep(self, name: str, data: CheckData) -> CheckData:
        """Caches `data` under `name` if there is enough memory; returns `data`."""
        if sum(cached_data.bytes for cached_data in self._data.values()) + data.bytes <= self._room:
            self._data[name] = data
        return data


def rounded(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Rounds `values` to the nearest value of `dtype`.  A torch cast to an integer would cut off the fraction."""
    return values.to(dtype) if dtype.is_floating_point else values.round().to(dtype)


def _wrong_answers(oracle: torch.Tensor, unchanged: torch.Tensor | None) -> Iterator[tuple[str, torch.Tensor]]:
    if oracle.numel():
        yield "zeros", torch.zeros_like(oracle)
    if oracle.numel() > 1:
        finite_values = oracle.double()[torch.isfinite(oracle)]
        yield "the mean", torch.full_like(oracle, float(finite_values.mean()) if finite_values.numel() else 0.0)
        yield "shifted by one", oracle.flatten().roll(1).reshape(oracle.shape)
    if unchanged is not None and unchanged.numel():
        yield "unchanged", unchanged
