"""Defines the commands `explain` and `profile`, which explain a kernel's time by a model and by hardware counters."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, get_args

import typer

from rooflab.bench import show
from rooflab.bench.base.plain import Row
from rooflab.bench.cli import option
from rooflab.bench.cli.app import app, exit_for

if TYPE_CHECKING:
    from rooflab.bench.compile.cases import KernelCase
    from rooflab.bench.predict.explain import Explanation
    from rooflab.roofline.device import Device

Gpu = Annotated[str | None, typer.Option("--gpu", help="A Hopper GPU by name; without it, the one here, or h100.")]


@app.command()
def explain(
    op: Annotated[
        str | None, typer.Argument(help="An op, or path.py::function; not needed with a --kernel file.")
    ] = None,
    kernel: Annotated[str | None, typer.Argument(help="A kernel; without one, all of the op side by side.")] = None,
    kernels: option.Kernel = None,
    case: option.Case = None,
    scheme: option.Scheme = None,
    argument: option.Argument = "",
    dtype: option.ArgumentDtype = "",
    inputs: option.Inputs = None,
    gpu: Gpu = None,
    records: Annotated[Path | None, typer.Option(help="Take measured times from this file or folder of records.")] = (
        None
    ),
    json: option.Json = False,
) -> None:
    """Split a kernel's time into parts: launch, bytes beyond the minimum, pipe, waves and tail, occupancy and latency.

    The time is predicted from compiled code and the roofline, without a GPU.  With --records, the parts add up to the
    measured time, and one part is unexplained.  Without a kernel name, all kernels are shown side by side.

    OP is an op, or path.py::function, a Python function that launches kernels.  For such a function, --shape gives the
    tensors, as x=64x96,weight=96:bf16, and --argument gives the other values."""
    from rooflab.bench.compile.launchers import selected
    from rooflab.bench.core import NOT_RUN, Status, read
    from rooflab.bench.predict import predictions
    from rooflab.bench.predict.explain import explain as explain_all

    all_records = read(records) if records else []
    device, gpu_note = predictions.choose_gpu(gpu, [entry for entry in all_records if entry.device == "cuda"])
    show.note(gpu_note)
    launcher_options = {"argument": argument, "dtype": dtype, "inputs": inputs}
    op_args = {"kernel": kernel or kernels, "scheme": scheme, "records": records}
    kernel_names = [*([kernel] if kernel else []), *(kernels or [])]
    if launcher := option.launcher(op, op_args, launcher_options):
        kernel_names, kernel_target = [launcher], selected(launcher, case, argument, dtype, inputs)
        time_explanations = [_of_launcher(kernel_target, device)]
    else:
        kernel_targets = predictions.choose_targets(op, kernel_names, case or [], scheme or [])
        measured_times: dict[KernelCase, float] = {}
        if records:
            kernel_targets, measured_times = predictions.measured_in(all_records, kernel_targets, device)
        time_explanations = explain_all(kernel_targets, device, measured_times)
    statuses = {entry.reason.partition(":")[0] for entry in time_explanations if entry.reason}
    ran = statuses & {*get_args(Status)} - {*NOT_RUN}
    if kernel_names and all(entry.reason for entry in time_explanations) and not ran:
        raise ValueError(time_explanations[0].reason)
    show.result([entry.to_dict() for entry in time_explanations])
    if kernel_names:
        for entry in time_explanations:
            _show(entry)
    else:
        _show_side_by_side(time_explanations)
    exit_for({"OK", *statuses})


def _of_launcher(target: KernelCase, device: Device) -> Explanation:
    from rooflab.bench.emulate.calls import call
    from rooflab.bench.predict.explain import explained
    from rooflab.bench.predict.predictions import Predicted
    from rooflab.roofline.model import Cost

    show.note(f"the least work of {target.label} is what the emulator counts, for no op says what it must do")
    with show.waiting(target.label):
        emulation = call(target, gpu=device.name)
    failed_prediction = Predicted(
        target, Cost(0, 0), None, None, f"{emulation.answer['status']}: {emulation.answer['reason']}"
    )
    return explained(emulation.predicted or failed_prediction, device, None)


def _show(entry: Explanation) -> None:
    kernel_case = entry.target
    if entry.reason:
        show.line(entry.sentence(), "red")
        return
    case_title = f"{kernel_case.op}/{kernel_case.kernel}  {kernel_case.case.id}  {kernel_case.scheme.name}  {entry.gpu}"
    show.table(entry.rows(), ("part", "us", "share", "why"), case_title)
    predicted_text = "no time" if entry.predicted_ms is None else f"{entry.predicted_ms * 1e3:.3g} us"
    bound_text = f"bound {(entry.bound_ms or 0.0) * 1e3:.3g} us ({entry.limiter})"
    show.line(f"{bound_text}, predicted {predicted_text}, {entry.calibration}")
    show.line(entry.sentence())
    show.line()


def _show_side_by_side(explanations: list[Explanation]) -> None:
    from rooflab.bench.predict.explain import WHY_COLUMNS, why_rows

    for case in dict.fromkeys((entry.target.case, entry.target.scheme) for entry in explanations):
        case_entries = [entry for entry in explanations if (entry.target.case, entry.target.scheme) == case]
        case_title = f"{case_entries[0].target.op}  {case[0].id}  {case[1].name}  {case_entries[0].gpu}, parts in us"
        show.table(why_rows(case_entries), WHY_COLUMNS, case_title, filled=True)
        calibration_text = next((entry.calibration for entry in case_entries if entry.predicted_ms is not None), "none")
        show.line(f"Predictions: {calibration_text}.")
        show.line()


@app.command()
def profile(
    op: option.OpName,
    kernel: Annotated[str, typer.Argument(help="A kernel's name, or a file that registers one.")],
    case: Annotated[str | None, typer.Option("--case", help="One case, as M=64,N=48,...; else the largest.")] = None,
    scheme: Annotated[str | None, typer.Option("--scheme", help="fp32, fp16 or bf16.")] = None,
    gpu: Gpu = None,
    seed: int = 0,
    timeout_s: Annotated[float, typer.Option("--timeout", min=1.0, help="Seconds for the tool.")] = 600.0,
    out: option.Out = None,
    json: option.Json = False,
) -> None:
    """Count the bytes, pipe use and stalls of one kernel call with Nsight Compute.

    --out writes a record with the counted bytes.
    """
    from rooflab.bench.core import RunWriter
    from rooflab.bench.predict import ncu, predictions
    from rooflab.bench.predict.explain import explain as explain_all

    kernel_targets = predictions.choose_targets(op, [kernel], [case] if case else [], [scheme] if scheme else [])
    if len(kernel_targets) != 1:
        kernels_text = ", ".join(kernel_entry.kernel for kernel_entry in kernel_targets)
        raise ValueError(f"kernel: expected a file that registers one kernel of {op}, got {kernels_text}")
    kernel_target = kernel_targets[0]
    device, profile_note = predictions.choose_gpu(gpu)
    show.note(profile_note)
    with show.waiting("ncu"):
        ncu_profile = ncu.profile(kernel_target, seed, timeout_s)
    model_explanation = explain_all([kernel_target], device)[0]
    if model_explanation.reason:
        raise ValueError(model_explanation.reason)
    traffic, profile_note = ncu.settled(kernel_target, ncu_profile)
    ncu_explanation = explain_all([kernel_target], device, counted={kernel_target: traffic} if traffic else None)[0]
    record = ncu.counted_record(ncu_explanation, ncu_profile, seed)
    if out:
        writer = RunWriter(out, record.run_id)
        writer.write(record)
    rows: list[Row] = ncu.compared(model_explanation, ncu_profile)
    launch_rows = ncu.launch_rows(ncu_profile)
    extra_fields = {"compared": rows, "counted": launch_rows, "metrics": record.metrics, "note": profile_note}
    show.result(ncu_explanation.to_dict() | extra_fields)
    _show(ncu_explanation)
    show.table(rows, ("what", "modelled", "counted", "ratio"), "modelled and counted")
    if profile_note:
        show.line(profile_note, "yellow")
    show.table(launch_rows, tuple(launch_rows[0]), "counted in each launch")
    if out:
        show.line(f"record: {writer.path}")
