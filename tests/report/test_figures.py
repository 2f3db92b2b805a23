"""Points and figures come from records, and a kernel that failed is no point."""

from dataclasses import asdict, replace

import pytest
import torch

from rooflab.bench.core.measure import Measurement
from rooflab.bench.core.record import Record
from rooflab.bench.core.record_files import write
from rooflab.bench.core.settings import Settings
from rooflab.bench.report.figures import bench_row, bounds_on, drawings, points_of
from rooflab.kernels import registry
from rooflab.reference.spec import SCHEMES
from rooflab.roofline.device import get_device
from rooflab.roofline.model import Ceilings
from rooflab.roofline.plot import roofline_files
from rooflab.roofline.points import arrows

CEILINGS = Ceilings("test cpu", "measured", 1e15, {"fp32": 1e18, "bf16": 1e18, "fp16": 1e18}, 1e18)


@pytest.fixture(scope="module")
def records():
    found = []
    for op in ("rmsnorm", "gemm"):
        spec = registry.get_op(op)
        kernels = list(registry.kernels(op).values())
        cases = spec.cases["smoke"][:1]
        run = Measurement(spec, SCHEMES["fp32"], Settings(budget_s=0.02), ceilings=CEILINGS)
        found += run.records(kernels, cases)
    return found


@pytest.mark.more
def test_only_timed_kernels_are_points(records):
    points = {f"{point.op}/{point.label}": point for point in points_of(records)}
    assert points["rmsnorm/library"].seconds and "rmsnorm/fused" not in points
    assert points["gemm/library"].dtype == "fp32" and points["rmsnorm/library"].dtype is None
    assert points["rmsnorm/naive"].intensity < points["rmsnorm/library"].intensity, "fusion moves right"


@pytest.mark.more
def test_a_failed_or_invalid_kernel_is_no_point_and_a_noisy_one_is_named_so(records):
    timed = next(record for record in records if record.latency_median_ms is not None)
    wrong = {**asdict(timed), "status": "INVALID", "reason": "too fast"}
    failed = {**wrong, "status": "INCORRECT", "basis": "bound"} | dict.fromkeys(
        ("latency_median_ms", "latency_p20_ms", "latency_p80_ms", "samples", "sample_count")
    )
    noisy = {**asdict(timed), "status": "NOISY", "reason": "busy"}
    assert points_of([Record(**wrong), Record(**failed)]) == []
    assert [point.noisy for point in points_of([Record(**noisy), timed])] == [True, False]


def timed(cores, run, kernel, ms, **changes):
    """A reading of rmsnorm on a machine with so many cores, all of which are of one CPU name."""
    ceilings = replace(CEILINGS, hbm_bytes_per_s=1e10 * cores, vector_flops_per_s=1e11 * cores, device="EPYC")
    values = {"kind": "bench", "status": "OK", "basis": "measured", "op": "rmsnorm", "kernel": kernel, "run_id": run}
    values |= {"role": registry.get_kernel("rmsnorm", kernel).role, "backend": "torch", "device": "cpu"}
    case = registry.get_op("rmsnorm").cases["smoke"][0]
    values |= {"case": dict(case), "case_id": case.id, "scheme": "fp32", "latency_median_ms": ms}
    values |= {"flops": 1e6, "least_bytes": 1e6, "bound_ms": 0.1 / cores, "limiter": "memory"}
    values |= {"environment": {"machine_key": f"epyc-{cores}c", "cores": cores, "threads": cores}}
    return Record(**values | {"timestamp": f"2026-01-0{run}T00:00:00", "ceilings": asdict(ceilings)} | changes)


def test_a_noisy_point_is_pale_hollow_and_named_and_no_arrow_goes_to_it():
    noisy = {"status": "NOISY", "reason": "busy"}
    (drawing,) = drawings([timed(2, 1, "naive", 1.0), timed(2, 1, "fused", 0.5, **noisy)])
    assert arrows(drawing.points) == []
    drawn = roofline_files(drawing.points, drawing.ceilings, "t")["svg"]
    assert b"pale: NOISY" in drawn and drawn.count(b"NOISY") > drawn.count(b"pale: NOISY"), (
        "in the legend, and in the list in place of a ratio"
    )


def test_a_figure_is_of_one_machine_and_has_the_newest_reading_of_each_kernel(rooflab, tmp_path):
    small = [timed(2, "1", "naive", 9.0), timed(2, "1", "library", 3.0), timed(2, "2", "library", 2.0)]
    large = [timed(64, "1", "naive", 0.5, flops=1.0), timed(64, "1", "library", 0.25, flops=1.0)]
    pinned = [timed(64, "1", "library", 0.75, environment={**large[0].environment, "threads": 1})]
    write(tmp_path / "two" / "r.jsonl", *reversed(small), *large)
    a, b = drawings([*reversed(small), *large])
    seconds = [{point.label: point.seconds * 1e3 for point in one.points} for one in (a, b)]
    assert seconds == [{"naive": 9.0, "library": 2.0}, {"naive": 0.5, "library": 0.25}]
    assert [roof.hbm_bytes_per_s for one in (a, b) for roof in one.ceilings] == [2e10, 64e10]
    assert (a.name, b.name) == ("epyc-2c", "epyc-64c") and drawings(small)[0].name == "EPYC"
    assert {one.name for one in drawings([*large, *pinned])} == {"epyc-64c", "epyc-64c, 1 thread"}
    smaller = [timed(2, "3", "library", 1.0, case_id="small", flops=1.0)]
    assert len(drawings([*small, *smaller])[0].points) == 2 and len(drawings([*small, *smaller], True)[0].points) == 3
    (runs,) = drawings(small, runs=["1", "2"])
    case = small[0].case_id
    assert [(p.label, p.case.removeprefix(case), p.seconds * 1e3) for p in runs.points] == [
        ("naive", " fp32, run 1", 9.0), ("library", " fp32, run 1", 3.0), ("library", " fp32, run 2", 2.0)
    ]  # fmt: skip
    assert {point.case for point in drawings(small, runs=["1"])[0].points} == {f"{case} fp32, run 1"}
    (both,) = drawings([*small, *large], across=True)
    assert [point.device for point in both.points] == ["epyc-2c"] * 2 + ["epyc-64c"] * 2
    assert [roof.device for roof in both.ceilings] == ["epyc-2c", "epyc-64c"]
    status, out, err = rooflab("roofline", "two")
    names = {path.name for path in (tmp_path / "two").glob("roofline-*")}
    assert names == {f"roofline-epyc-{cores}c.{kind}" for cores in (2, 64) for kind in ("svg", "png")}, err
    status, out, err = rooflab("roofline", "two", "--out", "x.svg")
    assert status == 2 and "--out: expected a folder or --across-devices, for 2 figures, got 'x.svg'" in err
    status, out, err = rooflab("roofline", "two", "--across-devices", "--fixed-axes", "--out", "x.svg")
    assert status == 0 and "epyc-64c" in (tmp_path / "x.svg").read_text() and "4 points" in out, err


def test_rows_have_the_units_they_name():
    row = bench_row(timed(2, "1", "naive", 9.0, flops_per_s=5e8))
    assert row["latency_ms"] == 9.0 and row["gflops_per_s"] == 0.5


def test_bounds_on_a_gpu_take_each_ops_largest_case(monkeypatch):
    points, (ceilings,) = bounds_on(get_device("h200"), "llama3_8b", "bf16", ("gemm", "kv_cache_write"))
    gemm = [point for point in points if point.op == "gemm"]
    assert ceilings.kind == "datasheet" and {point.case for point in gemm} and len({point.case for point in gemm}) == 1
    assert "packed" not in {point.label for point in gemm}, "a CPU kernel has no bound on a GPU"
    flash = {point.label for point in bounds_on(get_device("h100"), "llama3_8b", "bf16", ("flash_attention",))[0]}
    assert "fp8" not in flash and "ping_pong" in flash, "it takes no bf16"
    few = {name: registry.get_op(name) for name in ("gemm_fp8", "flash_attention")}
    monkeypatch.setattr("rooflab.bench.report.figures.ops", lambda: few)
    found, _ = bounds_on(get_device("a100"), "llama3_8b", "bf16")
    assert {point.op for point in found} == {"flash_attention"}, "it has no fp8"
    older = {point.label for point in found}
    assert "online" in older and "ping_pong" not in older, "it needs sm90"
    (published,) = (point for point in points if point.published)
    assert published.label == "vllm linear" and published.role == "peer"
    assert published.bound_s < published.seconds < 1.5 * published.bound_s
    assert all(point.seconds is None for point in points if not point.published)


def test_traffic_is_that_of_the_device_the_record_is_of():
    """torch expands grouped fp32 heads on CUDA and not on a CPU, and gathers the whole block table only on CUDA."""
    for op in ("flash_attention", "paged_attention"):
        spec, kernel = registry.get_op(op), registry.get_kernel(op, "library")
        case = spec.cases["smollm2_135m"][0]
        inputs = spec.make_inputs(case, SCHEMES["fp32"], torch.device("meta"), 0)
        on_cpu, on_cuda = (kernel.traffic_of(inputs, device) for device in ("cpu", "cuda"))
        assert on_cpu.bytes < on_cuda.bytes
        assert on_cpu.bytes >= spec.cost_of(inputs).bytes * 0.999
    flash = registry.get_op("flash_attention")
    inputs = flash.make_inputs(flash.cases["smollm2_135m"][0], SCHEMES["fp32"], torch.device("meta"), 0)
    library = registry.get_kernel("flash_attention", "library")
    assert library.traffic_of(inputs, "cpu").bytes == flash.cost_of(inputs).bytes
