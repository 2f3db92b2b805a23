"""`rooflab explain`: parts whose sum is the time, the name of the largest part, measurements beside predictions."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, replace

import pytest
from op_kernels import own_registry  # noqa: F401
from test_predict import WGMMA, compiled

from rooflab.bench.compile.cases import KernelCase
from rooflab.bench.core import record_files
from rooflab.bench.core.record import Record
from rooflab.bench.predict import model, predictions
from rooflab.bench.predict.explain import UNEXPLAINED_PART, explain, why_rows
from rooflab.bench.predict.predictions import measured_in
from rooflab.kernels import registry
from rooflab.kernels.registry import kernels
from rooflab.reference.spec import Case, get_scheme
from rooflab.roofline.device import get_device

H100, H200 = get_device("h100"), get_device("h200")
CASE = Case(T=2048, H=4096, eps=1e-5)
BF16 = get_scheme("bf16")
GPU = {"gpu": {"name": "NVIDIA H100 80GB HBM3"}}


def target(kernel: str = "library", op: str = "rmsnorm", case: Case = CASE) -> KernelCase:
    return KernelCase(op, kernel, case, BF16)


def record(**changes) -> Record:
    what = {"op": "rmsnorm", "kernel": "library", "backend": "torch", "case_id": CASE.id, "case": dict(CASE)}
    read = {"checked_by": "gpu", "basis": "measured", "l2_state": "cold", "latency_median_ms": 0.025}
    run = {"kind": "bench", "run_id": "run", "status": "OK", "environment": GPU, "scheme": "bf16", "device": "cuda"}
    return Record(**{**run, **what, **read, **changes})


def test_naive_and_optimized_side_by_side():
    found = explain([target(name) for name in kernels("rmsnorm")], H200)
    rows = {row["kernel"]: row for row in why_rows(found)}
    assert rows["naive"]["over_least"] > 4 and rows["fused"]["over_least"] == pytest.approx(1, abs=0.01)
    assert rows["naive"]["launches"] > 4 and rows["fused"]["launches"] == 1
    assert rows["naive"]["flop_per_byte"] < rows["fused"]["flop_per_byte"]
    for entry in found:
        row = rows[entry.target.kernel]
        if entry.target.kernel == "native":
            assert "UNSUPPORTED: rmsnorm/native runs on cpu" in row["reason"] and row["predicted_us"] is None
            continue
        parts = [row[name] for name in ("least", "launch", "sustained", "bytes", "pipe", "waves", "latency")]
        assert sum(parts) == pytest.approx(entry.modelled_ms * 1e3)
        assert (row["predicted_us"] is None) == (not entry.compiled) == ("its code was not read" in row["reason"]), row


def test_a_tile_s_padding_is_work_too(monkeypatch):
    code = compiled(WGMMA, "@P0 BRA 0x0", "EXIT")
    monkeypatch.setattr(predictions, "compile_kernels", lambda wanted, store: [[code]] * len(wanted))
    config = registry.get_kernel("gemm", "tensor_core").tuning.configs(Case(M=64, N=4096, K=4096))[0]
    asked = [Case(M=rows, N=4096, K=4096, layout="NT", bias=False) for rows in (1, config.block_m)]
    chosen = [target("tensor_core", "gemm", case)._replace(config=config) for case in asked]
    one, whole = (found.prediction.works[0].turns for found in predictions.predict_all(chosen, H100))
    assert one == whole > 1


def test_json_has_the_same_content_and_without_a_kernel_all_stand_side_by_side(rooflab):
    status, out, err = rooflab("explain", "rmsnorm", "fused", "--kernel", "naive", "--gpu", "h100", "--json")
    fused, naive = json.loads(out)
    assert status == 0 and [fused["kernel"], naive["kernel"]] == ["fused", "naive"]
    assert all(sum(part["ms"] for part in entry["parts"]) >= entry["bound_ms"] for entry in (fused, naive))
    assert fused["predicted_ms"] and fused["compiled"][0]["ctas_per_sm"] >= 1
    assert naive["predicted_ms"] is None and naive["compiled"] == []
    assert "h100 is taken as h100-sxm" in err
    status, out, _ = rooflab("explain", "rmsnorm", "--gpu", "h200")
    assert status == 0 and [line.split()[0] for line in out.splitlines()[2:5]] == ["naive", "library", "cluster"]


@pytest.mark.usefixtures("own_registry")
def test_a_file_that_does_not_compile_gets_no_prediction(rooflab, tmp_path):
    (tmp_path / "wrong.py").write_text(
        "import torch, triton, triton.language as tl\nfrom rooflab.kernels.registry import register\n"
        "@triton.jit\ndef code(x, out):\n    tl.store(out, tl.load(x) + missing)\n"
        '@register(op="rmsnorm", name="test_wrong", role="optimized", backend="triton", devices=("cuda",))\n'
        "def wrong(x, weight, eps=1e-6):\n    out = torch.empty_like(x)\n    code[(1,)](x, out)\n    return out\n"
    )
    status, out, err = rooflab("explain", "rmsnorm", "fused", "--kernel", "wrong.py", "--json")
    fused, wrong = json.loads(out)
    assert status == 11 and fused["predicted_ms"] and wrong["predicted_ms"] is None
    assert wrong["reason"].startswith("COMPILE_ERROR: ") and "NameError" in wrong["reason"], err


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["gemm", "packed"], "UNSUPPORTED: gemm/packed runs on cpu"),
        (["gemm", "naive", "--case", "M=3"], "case: gemm takes the keys of M="),
        (["rmsnorm", "library", "--gpu", "a100"], "gpu: expected a Hopper GPU, .*got NVIDIA A100"),
        (["rmsnorm", "library", "--records", "none"], "records: expected a file or folder"),
        (["rmsnorm", "library", "--records", "runs"], "records: expected a measured time on h100-sxm"),
        (["rmsnorm", "library", "--records", "two"], "gpu: expected one by name, .*NVIDIA H100.*, NVIDIA H2"),
    ],
)
def test_bad_input_is_one_sentence(rooflab, tmp_path, arguments, named):
    (tmp_path / "runs").mkdir()
    other = replace(record(), environment={"gpu": {"name": "NVIDIA H200"}})
    record_files.write(tmp_path / "two" / "a.jsonl", record(), other)
    status, out, err = rooflab("explain", *arguments)
    assert status == 2 and out == "" and re.search(f"rooflab: (--)?{named}", err), err


EARLY, LATE = "2026-01-01T00:00:00+00:00", "2026-02-01T00:00:00+00:00"


@pytest.mark.parametrize(
    "changes",
    [{"metrics": {"pair": 1.0}}, {"kind": "ab"}, {"l2_state": "warm"}, {"kernel": "another"}],
    ids=["a reading of an A/B", "an A/B", "a warm L2", "another kernel"],
)
def test_a_reading_that_does_not_speak_for_the_kernel_is_left_out(changes):
    own, other = record(timestamp=EARLY), record(timestamp=LATE, latency_median_ms=0.5, **changes)
    assert measured_in([own, other], [target()], H100) == ([target()], {target(): 0.025})
    with pytest.raises(ValueError, match="records: expected a measured time on h100-sxm"):
        measured_in([other], [target()], H100)


def test_a_time_is_explained_in_the_config_in_which_it_was_measured():
    kernel = registry.get_kernel("rmsnorm", "fused")
    config = kernel.tuning.configs(CASE)[-1]
    fused, library = target("fused"), target()
    tuned = record(kernel="fused", backend="triton", config=asdict(config))
    chosen, times = measured_in([tuned], [library, fused], H100)
    assert chosen[0] == library and chosen[1].config == config and times == {chosen[1]: 0.025}
    gone = record(kernel="fused", backend="triton", config={"no_such_field": 1}, timestamp=LATE)
    assert measured_in([tuned, gone], [library, fused], H100) == (chosen, times)


@pytest.mark.parametrize("measured_ms", [None, 0.025, 1.0, 0.001])
def test_parts_sum_to_the_time_that_is_explained_and_the_largest_is_named(measured_ms):
    chosen = target()
    found = explain([chosen], H100, {} if measured_ms is None else {chosen: measured_ms})[0]
    assert sum(part.ms for part in found.parts) == pytest.approx(found.total_ms)
    assert found.total_ms == (measured_ms or found.modelled_ms) and found.predicted_ms is None, "no code was read"
    names = [part.name for part in found.parts]
    assert names[:2] == [model.LEAST_WORK, model.LAUNCH] and (UNEXPLAINED_PART in names) == (measured_ms is not None)
    assert found.rows()[-1]["us"] == pytest.approx(found.total_ms * 1e3)
    assert (f"the largest part of the rest is {UNEXPLAINED_PART}, 987 us (99%)" in found.sentence()) == (
        measured_ms == 1.0
    )
