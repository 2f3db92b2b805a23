"""Calibration: factors are recovered, errors are held out, few kernels stay uncalibrated, records become fits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import test_explain as explained

from rooflab.bench.compile.cases import KernelCase
from rooflab.bench.core import record_files
from rooflab.bench.core.record import Record
from rooflab.bench.predict import calibration
from rooflab.bench.predict.calibration import Observation, calibrated, fit, kind_of, load, observations
from rooflab.bench.predict.model import CALIBRATION, predict
from rooflab.bench.predict.predictions import predict_all
from rooflab.kernels.registry import get_kernel, get_op
from rooflab.reference.spec import Case, get_scheme
from rooflab.roofline.device import get_device
from rooflab.roofline.model import Cost, Traffic

H100 = get_device("h100")
LIBRARY = ("rmsnorm", "silu_and_mul", "embedding", "fused_add_rmsnorm")
"""Ops whose library kernel is torch's: predicted without compiling."""


def observed(kernel: str, factor: float, rest_s: float = 10e-6, kind: str = "memory") -> Observation:
    return Observation(kernel, kind, 1.3e-6, rest_s, 1.3e-6 + factor * rest_s)


def test_a_common_factor_is_found_and_leaves_no_error():
    """Fifty records of one kernel do not outvote the others."""
    found = fit([observed(f"op/{name}", 1.25, rest) for name in "abcd" for rest in (5e-6, 50e-6)])["memory"]
    assert found.factor == pytest.approx(1.25) and found.error == pytest.approx(0, abs=1e-12)
    assert (found.kernels, found.records) == (4, 8)
    many = [observed("op/a", 3.0) for _ in range(50)]
    assert fit([*many, observed("op/b", 1.0), observed("op/c", 1.0)])["memory"].factor == pytest.approx(1.0)


def test_the_error_is_of_the_kernel_that_was_left_out():
    """With factors 1, 1 and 2, each kernel is predicted by the other two: 1 by sqrt(1 * 2), and 2 by 1."""
    kernels = [
        Observation(f"op/{name}", "product", 0.0, 1.0, factor) for name, factor in zip("abc", (1, 1, 2), strict=True)
    ]
    found = fit(kernels)["product"]
    assert found.factor == pytest.approx(1.0)
    assert found.worst_error == pytest.approx(0.5)  # 1 said of 2
    assert found.error == pytest.approx(2**0.5 - 1)  # an in-sample error would be 0, the median of 0, 0 and 0.5


def test_too_few_kernels_stay_uncalibrated():
    for kernels in (0, 2):
        assert fit([observed(f"op/{number}", 2.0) for number in range(kernels)]) == {}
    prediction = predict(Cost(1e8, 0), Traffic(1e8, 0), [], H100)
    same, error, words = calibrated(prediction, "memory", {})
    assert (same, error) == (prediction, None)
    assert words.startswith("uncalibrated; public kernels of its kind (memory) err by ")


def test_kinds_are_fitted_apart_and_a_prediction_takes_its_own():
    of_matrix = [observed(f"gemm/{name}", 2.0, kind="product") for name in "abc"]
    found = fit([*of_matrix, *(observed(f"rope/{name}", 1.1) for name in "abc")])
    cost = Cost(1e8, 0, {"bf16": 1e9})
    prediction = predict(cost, Traffic(1e8, 0), [], H100)
    scaled, error, words = calibrated(prediction, kind_of("gemm", cost), found)
    assert kind_of("paged_attention", cost) == "attention"
    assert kind_of("merge_attention_states", Cost(1e8, 0)) == "memory"
    assert scaled.seconds - scaled.launch_s == pytest.approx(2 * (prediction.seconds - prediction.launch_s))
    assert scaled.launch_s == prediction.launch_s and scaled.steps[-1].name == CALIBRATION
    assert error == pytest.approx(0, abs=1e-9) and words.startswith("held-out error 0%")
    assert "3 kernels, 3 records" in words


def record(op: str, kernel: str, case: Case, latency_ms: float, **changes) -> Record:
    what = {"op": op, "kernel": kernel, "backend": get_kernel(op, kernel).backend, "case_id": case.id}
    return explained.record(**{**what, "case": dict(case), "latency_median_ms": latency_ms, **changes})


def measured(factor: float) -> list[Record]:
    """The library kernels, each taking `factor` times what is predicted beside its launch."""
    found = []
    for op in LIBRARY:
        for case in get_op(op).cases["llama3_8b"]:
            prediction = predict_all([KernelCase(op, "library", case, get_scheme("bf16"))], H100)[0].prediction
            seconds = prediction.launch_s + factor * (prediction.seconds - prediction.launch_s)
            found.append(record(op, "library", case, seconds * 1e3))
    return found


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("ROOFLAB_CACHE", str(tmp_path / "cache"))
    return tmp_path / "results"


def test_committed_records_become_a_calibration_that_is_kept(folder, monkeypatch):
    records = measured(1.4)
    record_files.write(folder / "h100" / "run.jsonl", *records, replace(records[0], environment={"gpu": None}))
    found = load(folder)
    assert found["memory"].factor == pytest.approx(1.4) and found["memory"].kernels == len(LIBRARY)
    assert found["memory"].records == len(records) and found["memory"].worst_error < 1e-9
    monkeypatch.setattr(calibration, "observations", lambda records: pytest.fail("fitted again"))
    assert load(folder) == found


def test_records_that_say_nothing_of_the_prediction_are_left_out():
    case = get_op("rmsnorm").cases["llama3_8b"][-1]
    good = record("rmsnorm", "library", case, 0.02)
    others = [
        {"status": "INVALID", "reason": "throttled"},
        {"l2_state": "warm"},
        {"basis": "predicted"},
        {"environment": {"gpu": {"name": "NVIDIA A100-SXM4-80GB"}}},
        {"environment": {"gpu": None}},
        {"kind": "ab"},
        {"kernel": "gone"},
        {"scheme": "fp12"},
        {"case": {"T": 3}},
    ]
    found = observations([good, *(replace(good, **changes) for changes in others)])
    assert [entry.kernel for entry in found] == ["rmsnorm/library"] and found[0].measured_s == pytest.approx(2e-5)
