"""Points and figures come from records, and a kernel that failed has no point."""

from dataclasses import asdict, replace

from rooflab.bench.core.record import Record
from rooflab.bench.core.record_files import write
from rooflab.bench.report.figures import bounds_on, drawings, placed
from rooflab.kernels import registry
from rooflab.roofline.device import get_device
from rooflab.roofline.model import Ceilings
from rooflab.roofline.plot import roofline_files
from rooflab.roofline.points import arrows

CEILINGS = Ceilings("EPYC", "measured", 1e10, {"fp32": 1e18}, 1e11)
CASE = registry.get_op("rmsnorm").cases["smoke"][0]


def timed(cores, run, kernel, ms, **changes):
    """A reading of rmsnorm on a machine with so many cores, all of which are of one CPU name."""
    ceilings = replace(CEILINGS, hbm_bytes_per_s=1e10 * cores, vector_flops_per_s=1e11 * cores)
    values = {
        "kind": "bench", "status": "OK", "basis": "measured", "op": "rmsnorm", "kernel": kernel, "run_id": f"{run}",
        "role": registry.get_kernel("rmsnorm", kernel).role, "backend": "torch", "device": "cpu", "case": dict(CASE),
        "case_id": CASE.id, "scheme": "fp32", "latency_median_ms": ms, "flops": 1e6, "least_bytes": 1e6,
        "bound_ms": 0.1 / cores, "limiter": "memory", "timestamp": f"2026-01-0{run}T00:00:00",
        "environment": {"machine_key": f"epyc-{cores}c", "cores": cores, "threads": cores},
        "ceilings": asdict(ceilings),
    }  # fmt: skip
    return Record(**values | changes)


SMALL = [timed(2, 1, "naive", 9.0), timed(2, 1, "library", 3.0), timed(2, 2, "library", 2.0)]
LARGE = [timed(64, 1, "naive", 0.5, flops=1.0), timed(64, 1, "library", 0.25, flops=1.0)]


def test_a_failed_or_invalid_kernel_is_no_point_and_a_noisy_one_is_pale_and_has_no_arrow():
    untimed = {"latency_median_ms": None, "basis": "bound"}
    wrong = [timed(2, 1, "fused", 0.5, status="INVALID", reason="too fast")]
    wrong += [timed(2, 1, "fused", 0.5, status="INCORRECT", reason="wrong", **untimed)]
    assert placed(wrong, ()) == ([], [])
    noisy = timed(2, 1, "fused", 0.5, status="NOISY", reason="busy")
    (drawing,) = drawings([SMALL[0], noisy])
    assert [point.noisy for point in drawing.points] == [False, True] and arrows(drawing.points) == []
    drawn = roofline_files(drawing.points, drawing.ceilings, "t")["svg"]
    assert b"pale: NOISY" in drawn and drawn.count(b"NOISY") > drawn.count(b"pale: NOISY"), "also in the list"


def test_a_figure_is_of_one_machine_and_has_the_newest_reading_of_each_kernel():
    a, b = drawings([*reversed(SMALL), *LARGE])
    seconds = [{point.label: point.seconds * 1e3 for point in one.points} for one in (a, b)]
    assert seconds == [{"naive": 9.0, "library": 2.0}, {"naive": 0.5, "library": 0.25}]
    assert [roof.hbm_bytes_per_s for one in (a, b) for roof in one.ceilings] == [2e10, 64e10]
    assert (a.name, b.name) == ("epyc-2c", "epyc-64c") and drawings(SMALL)[0].name == "EPYC"
    pinned = timed(64, 1, "library", 0.75, environment={**LARGE[0].environment, "threads": 1})
    assert {one.name for one in drawings([*LARGE, pinned])} == {"epyc-64c", "epyc-64c, 1 thread"}
    smaller = timed(2, 3, "library", 1.0, case_id="small", flops=1.0)
    assert [len(drawings([*SMALL, smaller], every)[0].points) for every in (False, True)] == [2, 3]


def test_a_figure_of_runs_or_of_machines_has_the_points_of_each():
    (runs,) = drawings(SMALL, runs=["1", "2"])
    assert [(p.label, p.case.removeprefix(CASE.id), p.seconds * 1e3) for p in runs.points] == [
        ("naive", " fp32, run 1", 9.0),
        ("library", " fp32, run 1", 3.0),
        ("library", " fp32, run 2", 2.0),
    ]
    assert {point.case for point in drawings(SMALL, runs=["1"])[0].points} == {f"{CASE.id} fp32, run 1"}
    (both,) = drawings([*SMALL, *LARGE], across=True)
    assert [point.device for point in both.points] == ["epyc-2c"] * 2 + ["epyc-64c"] * 2
    assert [roof.device for roof in both.ceilings] == ["epyc-2c", "epyc-64c"]


def test_the_command_draws_a_figure_for_each_machine_or_one_across_them(rooflab, tmp_path):
    write(tmp_path / "two" / "r.jsonl", *SMALL, *LARGE)
    status, _, err = rooflab("roofline", "two")
    names = {path.name for path in (tmp_path / "two").glob("roofline-*")}
    assert names == {f"roofline-epyc-{cores}c.{kind}" for cores in (2, 64) for kind in ("svg", "png")}, err
    status, _, err = rooflab("roofline", "two", "--out", "x.svg")
    assert status == 2 and "--out: expected a folder or --across-devices, for 2 figures, got 'x.svg'" in err
    status, out, err = rooflab("roofline", "two", "--across-devices", "--fixed-axes", "--out", "x.svg")
    assert status == 0 and "epyc-64c" in (tmp_path / "x.svg").read_text() and "4 points" in out, err


def test_bounds_on_a_gpu_take_each_ops_largest_case_and_the_kernels_that_it_can_run(monkeypatch):
    points, (ceilings,) = bounds_on(get_device("h200"), "llama3_8b", "bf16", ("gemm",))
    assert ceilings.kind == "datasheet" and len({point.case for point in points}) == 1
    names = {point.label for point in points}
    assert "tensor_core" in names and "packed" not in names, "a CPU kernel has no bound on a GPU"
    (published,) = (point for point in points if point.seconds is not None)
    assert (published.label, published.role, published.published) == ("vllm linear", "peer", True)
    assert published.bound_s < published.seconds < 1.5 * published.bound_s
    flash = {point.label for point in bounds_on(get_device("h100"), "llama3_8b", "bf16", ("flash_attention",))[0]}
    assert "fp8" not in flash and "ping_pong" in flash, "it takes no bf16"
    few = {name: registry.get_op(name) for name in ("gemm_fp8", "flash_attention")}
    monkeypatch.setattr("rooflab.bench.report.figures.ops", lambda: few)
    found, _ = bounds_on(get_device("a100"), "llama3_8b", "bf16")
    assert {point.op for point in found} == {"flash_attention"}, "it has no fp8"
    older = {point.label for point in found}
    assert "online" in older and "ping_pong" not in older, "it needs sm90"
