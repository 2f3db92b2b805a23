"""Sends the requests of `rooflab emulate` to a worker process.  Predicts times, and writes the results to a file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch

from rooflab.bench.base.plain import Row
from rooflab.bench.compile.cases import KernelCase
from rooflab.bench.core import ChildFailed, Environment, Pool, RunWriter, Status
from rooflab.bench.emulate import emulators
from rooflab.bench.predict.chip import chip_of
from rooflab.bench.predict.predictions import DEFAULT_GPU, Predicted, choose_targets, predict_all, predict_launcher
from rooflab.kernels import registry
from rooflab.kernels.registry import Kernel
from rooflab.reference.spec import Case, OpSpec, Scheme
from rooflab.roofline.device import get_device
from rooflab.roofline.model import Traffic

MATRIX_FORMATS = {"f16": "fp16", "e4m3": "fp8_e4m3", "e5m2": "fp8_e4m3", "s8": "int8", "u8": "int8"}
"""Maps PTX's type of a matrix product to our name of the type.  A device has a rate for each of our names."""
TILE_SIZE = 16
"""A number that divides the tile sizes of all our kernels."""


@dataclass(frozen=True)
class EmulatedCall:
    """Describes an emulated call, with its result and its predicted time."""

    target: KernelCase
    answer: Mapping[str, Any]
    """The answer of `one_call.run`, or of `unregistered.run` for a user's launcher."""
    gpu: str
    predicted: Predicted | None = None
    """The time predicted from the counted bytes; None for a call that failed or did not run all CTAs."""

    @property
    def prediction(self) -> str:
        """Returns a sentence that gives the predicted time, or an empty text if there is no prediction."""
        if self.predicted is None:
            return ""
        prediction = self.predicted.prediction
        if prediction is None or not prediction.works:
            return f"no time is predicted: {self.predicted.reason or 'its code, of a package, was not read'}"
        time_us, bound_us = prediction.seconds * 1e6, prediction.bound.seconds * 1e6
        return f"with these bytes {time_us:.3g} us are predicted on {self.gpu}; the bound is {bound_us:.3g} us"

    def to_dict(self) -> dict[str, Any]:
        """Returns the call as JSON values, without the source code of the kernels."""
        launches = [{key: value for key, value in item.items() if key != "sources"} for item in self.answer["launches"]]
        target_fields = {field_name: self.target.to_json()[field_name] for field_name in ("op", "kernel", "scheme")}
        return {
            **target_fields,
            "case": self.target.case.id,
            **self.answer,
            "launches": launches,
            "prediction": self.prediction,
        }


def choose(
    op: str | None, names: Sequence[str], cases: Sequence[str], schemes: Sequence[str], config: str | None
) -> list[KernelCase]:
    """Returns the selected kernels with compiled code, each with a case and a scheme (dtypes).

    A `.py` file selects the kernels that it registers.  The default case is small, and its sizes are not multiples of a
    tile, to show a missing mask.  Raises `ValueError` on an unknown name, or if no kernel has compiled code."""
    return choose_targets(op, names, cases, schemes, config, with_code=True, default=_ragged_case)


def _ragged_case(kernel: Kernel, spec: OpSpec, scheme: Scheme) -> Case:
    """Returns the supported case with the most sizes that are not multiples of `TILE_SIZE`. With equal counts, the case
    with the fewest FLOPs wins."""
    best_score, best_case = (-1, 0.0), spec.cases["smoke"][0]
    for case in dict.fromkeys((*spec.cases["smoke"], *spec.cases_in("edge"))):
        inputs = spec.make_inputs(case, scheme, torch.device("meta"), 0)
        if kernel.why_not_args(inputs, spec) is None:
            case_sizes = [case_value for case_value in case.values() if isinstance(case_value, int) and case_value > 1]
            case_score = (sum(case_size % TILE_SIZE != 0 for case_size in case_sizes), -spec.cost_of(inputs).flops)
            best_score, best_case = max((best_score, best_case), (case_score, case), key=lambda pair: pair[0])
    return best_case


def call(
    target: KernelCase,
    seed: int = 0,
    schedule: int = 0,
    sample: int | None = None,
    races: bool = True,
    gpu: str = DEFAULT_GPU,
    save: Path | None = None,
    reference: str | None = None,
    configs: str | None = None,
    views: bool = False,
) -> EmulatedCall:
    """Emulates a call of a kernel.  `save` is a file for the outputs.

    `reference` and `configs` are only for a user's function.  `reference` names a function that computes the expected
    result.  `configs` selects the configs of an autotuned kernel.  `views` is an option of `emulating`.  Raises
    `ValueError` if the worker process fails."""
    device = get_device(gpu)
    chip_of(device)
    options = {"seed": seed, "schedule": schedule, "sample": sample, "races": races, "views": views}
    answer = ask(request_of(target, save, reference=reference, configs=configs, **options))
    if not answer["launches"] or answer["status"] != "OK" or answer["ran"] < answer["of"] or configs:
        return EmulatedCall(target, answer, device.name)  # the compiled code belongs to an autotuner's first config
    counted = traffic_of(answer)
    if not target.is_launcher:
        return EmulatedCall(target, answer, device.name, predict_all([target], device, counted={target: counted})[0])
    flops: Counter[str] = Counter()
    for launch in answer["launches"]:
        flops.update({MATRIX_FORMATS.get(kind, kind): n_flops for kind, n_flops in launch["tensor_flops"].items()})
    return EmulatedCall(target, answer, device.name, predict_launcher(target, counted, flops, device))


def request_of(target: KernelCase, save: Path | None, **options: Any) -> dict[str, Any]:
    """Returns the request for one call.  `options`: seed, schedule, sample, races, views, reference and configs."""
    defaults = {"sample": None, "configs": None, "views": False, "save": str(save) if save else None}
    return {"do": "outside" if target.is_launcher else "run", **target.to_json(), **defaults, **options}


def ask(request: Mapping[str, Any], workers: Pool | None = None) -> dict[str, Any]:
    """Sends `request` to a worker process and returns the answer.  Raises `ValueError` on a refusal or a crash."""
    try:
        answer: dict[str, Any] = (workers or emulators()).ask(request)
    except ChildFailed as failure:
        raise ValueError(f"the emulating process: {failure}") from failure
    if "error" in answer:
        raise ValueError(answer["error"])
    return answer


def traffic_of(answer: Mapping[str, Any]) -> Traffic:
    """Returns the counted HBM bytes of a call.  A 32-byte sector of memory counts once in each launch."""
    launch_bytes = [item["bytes"] for item in answer["launches"]]
    read_bytes, written_bytes = (float(sum(item[name] for item in launch_bytes)) for name in ("hbm_read", "hbm_write"))
    return Traffic(read_bytes, written_bytes, len(launch_bytes), basis="counted")


def level_rows(moved_bytes: Mapping[str, float]) -> list[Row]:
    """Returns one row for each level of memory at which bytes were moved: its name, and the bytes read and written."""
    rows = [
        ("HBM, each sector once", moved_bytes["hbm_read"], moved_bytes["hbm_write"]),
        ("lanes' requests", moved_bytes["global_read"], moved_bytes["global_write"]),
        ("their sectors, by warp", moved_bytes["global_read_sectors"], moved_bytes["global_write_sectors"]),
        ("cp.async and TMA", moved_bytes["copy_read"], moved_bytes["copy_write"]),
        ("TMA in shared memory", moved_bytes["tma_load"], moved_bytes["tma_store"]),
        ("shared memory", moved_bytes["shared_read"] + moved_bytes["shared_matrix"], moved_bytes["shared_write"]),
        ("atomics", moved_bytes["atomic"], moved_bytes["atomic"]),
    ]
    return [{"level": name, "read": read, "written": written} for name, read, written in rows if read or written]


def line_rows(source: Sequence[str], counted: Mapping[int, Mapping[str, int]]) -> Iterator[Row]:
    """Yields one table row per source line, with the emulator's counts for the line: threads, bytes and bank
    conflicts.  Covers the first to the last line with counts."""
    for line_number in range(min(counted), max(counted) + 1):
        counts = counted.get(line_number, {})
        moved = {name: value for name, value in counts.items() if name.endswith("_bytes") and "sector" not in name}
        shared_bytes = sum(value for name, value in moved.items() if name.startswith("shared_"))
        min_wavefronts = counts.get("shared_wavefronts_least", 0)
        yield {
            "line": line_number,
            "threads": counts.get("threads"),
            "global_bytes": sum(moved.values()) - shared_bytes or None,
            "shared_bytes": shared_bytes or None,
            "conflicts": counts["shared_wavefronts"] / min_wavefronts if min_wavefronts else None,
            "source": source[line_number - 1] if 0 < line_number <= len(source) else "",
        }


def write(calls: Sequence[EmulatedCall], folder: Path, seed: int) -> Path:
    """Writes one record for each emulated kernel call to a file, and returns its path.  If the emulator ran all CTAs of
    the call, the record has the bytes of memory traffic."""
    record_writer, environment = RunWriter(folder), Environment.now()
    for one_call in calls:
        target, answer = one_call.target, one_call.answer
        kernel, traffic = registry.get_kernel(target.op, target.kernel), traffic_of(answer)
        has_run = answer["status"] in ("OK", "INCORRECT") and bool(answer["launches"])
        is_compared = has_run and bool(answer["errors"])
        is_counted = has_run and answer["ran"] == answer["of"]
        status, scheme_name, run_id = cast(Status, answer["status"]), target.scheme.name, record_writer.run_id
        record = environment.record("check", kernel, target.case, scheme_name, run_id, status, answer["reason"])
        record_writer.write(
            replace(
                record,
                config=None if target.config is None else asdict(target.config),
                seed=seed,
                device="cpu",
                checked_by="emulator" if is_compared else "none",
                errors=tuple(answer.get("errors", ())),
                traffic_bytes=traffic.bytes if is_counted else None,
                traffic_basis="counted" if is_counted else None,
            )
        )
    return record_writer.path
