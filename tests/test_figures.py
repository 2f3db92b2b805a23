"""Points and figures come from records, and a kernel that failed is no point."""

from dataclasses import asdict

import pytest
import torch

from rooflab.bench.measure.measure import measure_op
from rooflab.bench.records.files import write
from rooflab.bench.records.record import Record
from rooflab.bench.report.figures import bench_row, bounds_on, draw_records, largest_cases, points_of
from rooflab.kernels import registry
from rooflab.reference.spec import SCHEMES
from rooflab.roofline.device import get_device
from rooflab.roofline.model import Ceilings

CEILINGS = Ceilings("test cpu", "measured", 1e15, {"fp32": 1e18, "bf16": 1e18, "fp16": 1e18}, 1e18)


@pytest.fixture(scope="module")
def records():
    found = []
    for op in ("rmsnorm", "gemm"):
        spec = registry.get_op(op)
        kernels = list(registry.kernels(op).values())
        cases = spec.cases["smoke"][:1]
        found += measure_op(
            spec, kernels, cases, SCHEMES["fp32"], torch.device("cpu"), budget_s=0.02, ceilings=CEILINGS
        )
    return found


@pytest.mark.more
def test_only_timed_kernels_are_points(records):
    points = {f"{point.op}/{point.label}": point for point in points_of(records)}
    assert points["rmsnorm/library"].seconds and "rmsnorm/fused" not in points
    assert points["gemm/library"].dtype == "fp32" and points["rmsnorm/library"].dtype is None
    assert points["rmsnorm/naive"].intensity < points["rmsnorm/library"].intensity, "fusion moves right"


@pytest.mark.more
def test_a_failed_invalid_or_noisy_kernel_is_no_point(records):
    timed = next(record for record in records if record.latency_median_ms is not None)
    wrong = {**asdict(timed), "status": "INVALID", "reason": "too fast"}
    failed = {**wrong, "status": "INCORRECT", "basis": "bound"} | dict.fromkeys(
        ("latency_median_ms", "latency_p20_ms", "latency_p80_ms", "samples", "sample_count")
    )
    noisy = {**asdict(timed), "status": "NOISY", "reason": "busy"}
    assert points_of([Record(**wrong), Record(**failed), Record(**noisy)]) == []


def test_one_figure_a_device_of_each_ops_largest_case(records, tmp_path):
    small = [Record(**{**asdict(record), "case_id": "small", "flops": 1.0, "least_bytes": 1.0}) for record in records]
    kept = largest_cases([*small, *records, Record(kind="check", run_id="c", status="OK", environment={}, op="gemm")])
    assert kept == list(records)
    with_ceilings = [record for record in records if record.ceilings]
    other = [Record(**{**asdict(one), "ceilings": {**one.ceilings, "device": "other"}}) for one in with_ceilings]
    fewer = [Record(**{**asdict(one), "environment": {**one.environment, "threads": 99}}) for one in other]
    write(tmp_path / "r.jsonl", *records)
    names = {path.name for path in draw_records([*records, *other], tmp_path)}
    assert names == {f"roofline-{name}.{kind}" for name in ("test-cpu", "other") for kind in ("svg", "png")}
    drawn = {path.stem for path in draw_records([*other, *fewer], tmp_path)}
    count = with_ceilings[0].environment["threads"]
    assert drawn == {f"roofline-other-with-{count}-thread{'s' if count > 1 else ''}", "roofline-other-with-99-threads"}
    assert all((tmp_path / name).stat().st_size > 10_000 for name in names)


def test_rows_have_the_units_they_name(records):
    record = next(record for record in records if record.latency_median_ms is not None)
    row = bench_row(record)
    assert row["latency_ms"] == record.latency_median_ms
    assert row["gflops_per_s"] == pytest.approx(record.flops / record.latency_median_ms / 1e6)


def test_bounds_on_a_gpu_take_each_ops_largest_case():
    points, (ceilings,) = bounds_on(get_device("h200"), "llama3_8b", "bf16", ("gemm", "kv_cache_write"))
    gemm = [point for point in points if point.op == "gemm"]
    assert ceilings.kind == "datasheet" and {point.case for point in gemm} and len({point.case for point in gemm}) == 1
    assert "packed" not in {point.label for point in gemm}, "a CPU kernel has no bound on a GPU"
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
        assert on_cpu.bytes >= spec.cost(**inputs).bytes * 0.999
    flash = registry.get_op("flash_attention")
    inputs = flash.make_inputs(flash.cases["smollm2_135m"][0], SCHEMES["fp32"], torch.device("meta"), 0)
    library = registry.get_kernel("flash_attention", "library")
    assert library.traffic_of(inputs, "cpu").bytes == flash.cost(**inputs).bytes
