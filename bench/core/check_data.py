"""The data and the result of a check.  The kernel's process gets the inputs, but never the oracle."""

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

Otherwise = Literal["apart", "turned", "far", "expanded", "in place", "other options"]
OTHERWISE: tuple[Otherwise, ...] = get_args(Otherwise)
"""How a check with adversarial inputs also passes the drawn data: in another memory layout, with rows of stride 0, with
outputs over inputs, or with other options.  Every check also pads strides."""
Planted = bool | Otherwise | Literal["planted alone"]
"""Which additional runs a check has.  True: all runs of `OTHERWISE` and all adversarial (planted) sets.  False: none.
A value of `Otherwise`: that run and one adversarial set.  "planted alone": the first data and all adversarial sets."""


class CheckTask(NamedTuple):
    """A check that is to be made: kernel, case, scheme, seed and additional runs."""

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
    def ways() -> tuple[Otherwise, ...]:
        """The values of `planted` that select one way to pass the data and one adversarial set."""
        return OTHERWISE

    def taken(self, spec: OpSpec, refused: Collection[str] = ()) -> CheckTask | None:
        """The first variant of the check that the kernel takes, or None: in the first of `schemes`, then without
        optional keys of the case, then in the other schemes.  `refused`: options that the kernel has refused before."""
        for scheme in self.schemes:
            for case in (self.case, *_plainer(spec, self.case)):
                inputs = spec.make_inputs(case, scheme, torch.device("meta"), 0)
                if options_on(spec, inputs).isdisjoint(refused) and self.kernel.why_not_args(inputs, spec) is None:
                    return self._replace(case=case, scheme=scheme)
        return None


def _plainer(spec: OpSpec, case: Case) -> Iterator[Case]:
    """Yields the case without one optional key, for each key in turn, and then without all optional keys."""
    keys = [key for key in case if key in spec.optional]
    for left_out in [*([key] for key in keys), *([keys] if len(keys) > 1 else [])]:
        yield Case(**{key: value for key, value in case.items() if key not in left_out})


def options_on(spec: OpSpec, inputs: Inputs) -> set[str]:
    """The names of optional arguments whose value in `inputs` is not the default."""
    defaults = {each.name: each.default for each in spec.parameters if each.default is not each.empty}
    return {name for name, default in defaults.items() if name in inputs and not _is(inputs[name], default)}


def _is(value: object, default: object) -> bool:
    return value is default or (not isinstance(value, torch.Tensor) and value == default)


def named_in(text: str, names: Collection[str]) -> set[str]:
    """The members of `names` that occur as whole words in `text`."""
    return {name for name in names if re.search(rf"\b{name}\b", text)}


@dataclass(frozen=True)
class CheckData:
    """Inputs, and the judge of outputs for them.  The oracle and its limits are computed at their first use."""

    spec: OpSpec
    inputs: Inputs
    scheme: Scheme
    name: str = ""
    """The name under which a `Runner` keeps these inputs."""

    @cached_property
    def oracle(self) -> Outputs:
        """The right outputs in fp64."""
        return self.spec.oracle(self.inputs)

    @cached_property
    def limits(self) -> Outputs | None:
        """The allowed error of each element; None if the spec has no tolerance, because its `compare` judges."""
        return None if self.spec.tolerance is None else self.spec.tolerance(self.inputs, self.oracle, self.scheme)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the outputs."""
        return output_names(self.spec, self.oracle)

    @property
    def forms(self) -> tuple[tuple[torch.Size, torch.dtype], ...]:
        """The shape and the dtype of each output."""
        if self.spec.mutates:
            return tuple((self.inputs[name].shape, self.inputs[name].dtype) for name in self.names)
        dtypes = output_dtypes(self.spec, self.oracle, self.scheme)
        return tuple((oracle.shape, dtype) for oracle, dtype in zip(self.oracle, dtypes, strict=True))

    def misfit(self, outputs: Outputs) -> str:
        """How `outputs` differ from the right outputs in number, shape or dtype; empty if they do not differ."""
        if len(outputs) != len(self.names):
            return f"returned {len(outputs)} values, expected tensors {', '.join(self.names)}"
        for name, output, form in zip(self.names, outputs, self.forms, strict=True):
            if output.shape != form[0]:
                return f"{name}: expected shape {tuple(form[0])}, got {tuple(output.shape)}"
            if output.dtype != form[1]:
                return f"{name}: expected dtype {form[1]}, got {output.dtype}"
        return ""

    def faults(self, outputs: Outputs, own_stream: bool = False) -> str:
        """The faults of `outputs` as one text; empty if `outputs` are right."""
        judged = () if (misfit := self.misfit(outputs)) else self.judge(outputs, own_stream)
        return misfit or "; ".join(stats.describe() for stats in judged if not stats.passed)

    def judge(self, outputs: Outputs, own_stream: bool = False) -> list[ErrorStats]:
        """One verdict per output, as from `spec.judge`.  The limits are cached: they take longer than the oracle.

        `own_stream`: the kernel is declared non-deterministic.  If the op draws, the kernel has its own random stream.
        """
        if own_stream and self.spec.compare_own_stream is not None:
            return self.spec.compare_own_stream(outputs, self.oracle, self.inputs, self.scheme)
        if self.limits is None:
            return self.spec.judge(outputs, self.oracle, self.inputs, self.scheme)
        named = zip(self.names, outputs, self.oracle, self.limits, strict=True)
        return [elementwise(name, *self._of_numbers(output, right), limit) for name, output, right, limit in named]

    def _of_numbers(self, output: torch.Tensor, oracle: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """`output` and `oracle` with numbers where the oracle has NaN.  `oracle` gets 0.  `output` gets 0 if it is NaN,
        else infinity.  If an output has 8 bits, any value passes there: the dtype has no NaN, or clamping loses it."""
        unknown = oracle.isnan()
        if not unknown.any():
            return output, oracle
        loose = any(dtype.itemsize == 1 for _, dtype in self.forms)
        same = torch.where(output.to(oracle).isnan() | loose, 0.0, torch.inf)
        return torch.where(unknown, same, output.to(oracle)), oracle.masked_fill(unknown, 0.0)

    @cached_property
    def weak(self) -> tuple[str, ...]:
        """Wrong answers that would pass, such as `c: zeros`: for each output zeros, mean, shifted by one, unchanged.

        The mean and the shift need an output of at least two elements.  An empty output has no wrong answer.
        """
        return tuple(self._passing_wrong_answers())

    @property
    def bytes(self) -> int:
        """The total size in bytes of the tensors that this object holds now."""
        values = (*self.inputs.values(), *vars(self).get("oracle", ()), *(vars(self).get("limits") or ()))
        return sum(value.untyped_storage().nbytes() for value in values if isinstance(value, torch.Tensor))

    def _passing_wrong_answers(self) -> Iterator[str]:
        mutates = self.spec.mutates
        right = tuple(
            oracle if mutates else rounded(oracle, dtype)
            for oracle, (_, dtype) in zip(self.oracle, self.forms, strict=True)
        )
        for index, (name, oracle) in enumerate(zip(self.names, self.oracle, strict=True)):
            for label, wrong in _wrong_answers(oracle, self.inputs[name] if mutates else None):
                answer = rounded(wrong, right[index].dtype)
                if self.limits is not None:
                    passes = all_within(answer, oracle, self.limits[index])
                else:
                    whole: Outputs = (*right[:index], answer, *right[index + 1 :])
                    passes = all(stats.passed for stats in self.judge(whole))
                if passes:
                    yield f"{name}: {label}"


@dataclass(frozen=True)
class CheckResult:
    """The result of checking one kernel on one case."""

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
        """Whether the case rejects zeros, the mean, and the oracle shifted by one."""
        return not self.weak

    @property
    def not_offered(self) -> bool:
        """Whether the kernel does not take this case.  False if the kernel cannot run on this machine."""
        return self.status == "UNSUPPORTED" and f"{self.op}/{self.kernel}" in self.reason  # by `why_not_args`

    @property
    def line(self) -> str:
        """The line of the result; empty if the kernel does not take the case, because one line names all such cases."""
        return "" if self.not_offered else self.describe()

    def describe(self) -> str:
        """Describes the result in one line of text."""
        text = self.reason or "; ".join(error.describe() for error in self.errors)
        if self.weak:
            text += f" (not discriminating: {', '.join(self.weak)} would pass)"
        return f"{self.op}/{self.kernel} {self.case.id} {self.scheme}: {self.status}: {text}"

    def record(self, kernel: Kernel, run_id: str, environment: Environment) -> Record:
        """The record of the check.  If the emulator ran the kernel, the record has the bytes that it counted."""
        moved = self.bytes or {}
        traffic = float(moved["hbm_read"] + moved["hbm_write"]) if moved else None
        return replace(
            environment.record("check", kernel, self.case, self.scheme, run_id, self.status, self.reason),
            seed=self.seed,
            device=cast(DeviceType, torch.device(self.device).type),
            checked_by=self.checked_by,
            errors=tuple(asdict(error) for error in self.errors),
            weak=self.weak,
            traffic_bytes=traffic,
            traffic_basis=None if traffic is None else "counted",
            metrics={f"{name}_bytes": float(value) for name, value in moved.items()},
        )


class KeptData(threading.local):
    """The data of the case that a thread checked last, so that oracle and limits are computed once for all kernels.

    The data are kept while they fit into a share of the free memory, and until `forget`.
    """

    SHARE = 0.4
    """The share of the device's free memory for kept data.  On a CPU the processes of all cores share this memory."""

    def __init__(self) -> None:
        self._case: tuple[object, ...] = ()
        self._data: dict[str, CheckData] = {}
        self._room = 0.0

    def of(self, device: torch.device, *case: object) -> dict[str, CheckData]:
        """The kept data of `case`, by name; empty if `case` differs from the last case."""
        if (device, *case) != self._case:
            self._data = {}  # before its memory is counted
            self._case = device, *case
            self._room = self.SHARE * free_bytes(device) / (1 if device.type == "cuda" else cores())
        return self._data

    def forget(self) -> None:
        """Frees the memory of the kept data, before a timing begins."""
        self._case, self._data = (), {}

    def keep(self, name: str, data: CheckData) -> CheckData:
        """Keeps `data` under `name`, if there is enough memory; returns `data`."""
        if sum(item.bytes for item in self._data.values()) + data.bytes <= self._room:
            self._data[name] = data
        return data


def rounded(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`values` rounded to the nearest value of `dtype`; a cast by torch to an integer would cut off the fraction."""
    return values.to(dtype) if dtype.is_floating_point else values.round().to(dtype)


def _wrong_answers(oracle: torch.Tensor, unchanged: torch.Tensor | None) -> Iterator[tuple[str, torch.Tensor]]:
    if oracle.numel():
        yield "zeros", torch.zeros_like(oracle)
    if oracle.numel() > 1:
        finite = oracle.double()[torch.isfinite(oracle)]
        yield "the mean", torch.full_like(oracle, float(finite.mean()) if finite.numel() else 0.0)
        yield "shifted by one", oracle.flatten().roll(1).reshape(oracle.shape)
    if unchanged is not None and unchanged.numel():
        yield "unchanged", unchanged
