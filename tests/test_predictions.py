"""Committed predictions: all products' kernels on the bars' shapes, named what they are, taken for no measurement."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from test_explain import CASE, H100, target

from rooflab.bench.ab import from_records
from rooflab.bench.predict import calibration, model, predictions, targets
from rooflab.bench.predict.explain import Explanation, Part
from rooflab.bench.records import files as record_files
from rooflab.bench.records.environment import snapshot
from rooflab.bench.report.content import gather
from rooflab.bench.report.figures import ceilings_of, counted_in, points_of
from rooflab.bench.report.newest import benches_of
from rooflab.bench.report.sources import load
from rooflab.bench.report.trends.points import why_not
from rooflab.bench.suite.bars.gemm import BARS as GEMM
from rooflab.bench.suite.bars.gemm_family import BARS as FAMILY
from rooflab.bench.suite.measures import latencies
from rooflab.bench.tune.choose import write_choices
from rooflab.kernels import registry
from rooflab.reference.spec import Case

PARTS = ((model.LEAST, 0.010), (model.LAUNCH, 0.001), (model.SUSTAINED, 0.004), (model.WAVES, 0.005))


def explained(gpu: str = "h100-sxm", **changes: object) -> Explanation:
    own = {
        "target": target("fused"),
        "role": "optimized",
        "gpu": gpu,
        "bytes": 4e6,
        "least_bytes": 3e6,
        "flops": 1e6,
        "launches": 1,
        "traffic_basis": "modelled",
        "bound_ms": 0.010,
        "limiter": "memory",
        "parts": tuple(Part(name, ms, f"why {name}") for name, ms in PARTS),
        "predicted_ms": 0.020,
        "compiled": ({"name": "_fused", "launches": 1, "ctas": 132},),
    }
    return Explanation(**{**own, **changes})


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """What the command writes, the compiling left out."""
    asked = []

    def fake(wanted, device):
        asked.append((len(wanted), device.name))
        failed = {"target": target(), "predicted_ms": None, "parts": (), "compiled": (), "reason": "COMPILE_ERROR: x"}
        return [explained(device.name), explained(device.name, **failed)]

    monkeypatch.setattr(predictions, "explain", fake)
    predictions.main(["--out", str(tmp_path), "--op", "gemm_w8a16"])
    assert [name for _, name in asked] == list(predictions.GPUS) and asked[0][0] >= 4
    return tmp_path


def barred(op: str) -> set[Case]:
    """The cases of the bars of an op."""
    spec, found = registry.get_op(op), set()
    for entry in (*GEMM, *FAMILY):
        if entry.ops == (op,):
            one = [entry.arguments["case"]] if "case" in entry.arguments else []
            texts = [*entry.arguments.get("cases", ()), *entry.arguments.get("least", ()), *one]
            found |= {spec.check_case(Case.parse(text)) for text in texts}
    return found


def test_the_cases_are_the_bars_or_the_suites_and_every_kernel_of_ours_is_there():
    for op, texts in predictions.CASES.items():
        spec = registry.get_op(op)
        cases = {spec.check_case(Case.parse(text)) for text in texts}
        assert cases <= barred(op) | {case for suite in spec.cases.values() for case in suite}, op
        assert not barred(op) or cases & barred(op), op
    found = {(entry.op, entry.kernel) for entry in predictions.targets()}
    for op in predictions.CASES:
        wanted = {k.name for k in registry.kernels(op).values() if k.role == "optimized" and k.backend != "torch"}
        assert {kernel for name, kernel in found if name == op} == wanted


def test_a_prediction_says_so_in_its_file_its_title_and_its_record(folder):
    (records,) = folder.glob("*.jsonl")
    assert records.name.startswith("predictions-")
    text = (folder / "predictions.md").read_text()
    headings = [line for line in text.splitlines() if line.startswith("#")]
    assert all("Predictions" in line for line in headings) and len(headings) == 1 + len(predictions.GPUS)
    assert "uncalibrated" in text and "no kernel was timed" in text and records.name in text
    commit = snapshot().commit
    assert commit is None or commit[:12] in text
    first, failed, *_ = record_files.read(records)
    assert (first.kind, first.basis, first.status, first.commit) == ("static", "predicted", "OK", commit)
    assert first.predicted_ms == 0.020 and first.bound_ms == 0.010 and first.prediction_error is None
    assert first.reason.startswith(predictions.CAUTION) and first.compiled[0]["target"] == "sm_90a on h100-sxm"
    parts = [value for name, value in first.metrics.items() if name.endswith("_ms")]
    assert math.fsum(parts) == pytest.approx(first.predicted_ms)
    assert first.metrics["predicted_bound_fraction"] == 0.5
    assert (failed.status, failed.basis, failed.predicted_ms) == ("COMPILE_ERROR", "bound", None)


def test_the_table_names_the_bound_and_the_part_that_a_kernel_can_change(folder):
    rows = [line for line in (folder / "predictions.md").read_text().splitlines() if line.startswith("| T=")]
    assert rows[0] == f"| {CASE.id} | fused | 20.0 | 10.0 | 50% | memory | waves and tail, 5.0 us: why waves and tail |"
    assert rows[1].endswith("COMPILE_ERROR: x |") and len(rows) == 4


def test_nothing_takes_a_prediction_for_a_measurement(folder, tmp_path):
    records = record_files.read(folder)
    timed = [record for record in records if record.latency_median_ms is not None or record.bound_fraction is not None]
    assert not timed and not any(record.ceilings or record.device or record.stands_alone for record in records)
    located, files = load([folder])
    page = gather(located, files, "report")
    assert not benches_of(located) and not page.ops and not page.standings and not page.rooflines
    assert not page.comparisons and not page.trends and not page.ceilings
    assert any("times of kernels" in gap.names for gap in page.unmeasured)
    (compiled,) = page.compiled
    assert sorted({row.predicted for row in compiled.rows}) == ["", "20.00 µs, uncalibrated"]
    assert all(why_not(record) for record in records)
    assert not points_of(records) and not ceilings_of(records) and not counted_in(records) and not latencies(records)
    assert calibration.observations(records) == [] and calibration.load(folder) == {}
    assert write_choices([replace(record, dirty=False) for record in records], tmp_path / "kernels") == []
    with pytest.raises(ValueError, match="records: expected a measured time"):
        targets.measured_in(records, [target("fused")], H100)
    verdict, reason = from_records._fault(records[0], "a prediction")
    assert verdict == "INVALID" and reason == "a prediction: no time was measured"
