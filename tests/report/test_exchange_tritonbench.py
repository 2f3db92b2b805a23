"""TritonBench's CSV and JSON become records, and faults of a file are reported with their place."""

import os

import pytest
from test_exchange import written

from rooflab.bench.exchange.convert import read
from rooflab.bench.exchange.tritonbench import read_tritonbench
from rooflab.reference.spec import Case

CSV = """\
(M, N, K);flops;aten-latency;aten-tflops;aten-accuracy;triton-latency;triton-tflops;triton-accuracy
(256, 128, 64);4194304;0.02;0.2;;0.016 (±3.10%);0.25;1.0
(512, 128, 64);8388608;0.03;0.3;;CUDA out of memory.;;
(512, 256, 64);16777216;0.03;0.3;;0.01;0.4;0.0
(64, 64, 64);524288;;0.1;;RuntimeError: no kernel;;
average;;0.026;0.2;;0.013;0.3;
"""
NORM = "tritonbench_rms_norm_fwd[x_(16, 4096)-llama_rms]"
METRICS = {
    f"{NORM}_latency": 0.5,
    f"{NORM}_gbps": 1000.0,
    f"{NORM}_gpu_peak_mem": 2.0,
    f"{NORM}_best_config": "BLOCK: 64",
    "tritonbench_rms_norm_bwd[x_(16, 4096)-llama_rms]_latency": 0.9,
    "tritonbench_rms_norm_fwd[x_-1-liger]_latency": None,
    "tritonbench_rms_norm_fwd[x_average-llama_rms]_latency": 0.5,
    "tritonbench_rms_norm_fwd[llama_rms]-latency-avg": 0.5,
}


@pytest.fixture
def csv(tmp_path):
    """What is read of a CSV file of the operator gemm."""
    return lambda text: read_tritonbench(written(tmp_path / "op_gemm_a.csv", text))


def test_rows_become_records_by_implementation_and_what_is_none_is_listed(tmp_path):
    path = written(tmp_path / "op_gemm_a.csv", CSV)
    os.utime(path, (1.7e9, 1.7e9))
    found = read_tritonbench(path)
    first, second = found.records[:2]
    assert (first.op, first.kernel, first.case_id) == ("gemm", "aten", "M=256,N=128,K=64")
    assert (first.latency_median_ms, first.flops_per_s, first.timer) == (0.02, 0.2e12, "imported: tritonbench")
    assert first.timestamp == "2023-11-14T22:13:20+00:00", "the file's time: the format says nothing of when"
    assert Case.parse(first.case_id) == Case(**first.case) and first.commit is None
    assert (second.kernel, second.latency_median_ms, second.metrics) == ("triton", 0.016, {"accuracy": 1.0})
    failed = {(each.status, each.case_id): each.latency_median_ms for each in found.records if each.status != "OK"}
    assert failed == {
        ("OUT_OF_MEMORY", "M=512,N=128,K=64"): None,
        ("INCORRECT", "M=512,N=256,K=64"): None,
        ("RUNTIME_ERROR", "M=64,N=64,K=64"): None,
    }
    assert {each.place.partition(", ")[2]: each.reason for each in found.skipped} == {
        "line 6": "an average over inputs of different sizes",
        "line 5, aten": "it has no latency, only tflops",
    }
    assert len(found.records) == 7, "8 cells of a latency, one of them empty"


def test_numbers_are_read_as_they_are_written_or_named(csv):
    found = csv("x;a-latency;a-speedup;a-tflops\n1;1,234.5 (±3.10%);nan;1,000\n2;nan;;\n")
    assert [(each.latency_median_ms, each.flops_per_s) for each in found.records] == [(1234.5, 1e15), (None, None)]
    assert [each.reason for each in found.skipped] == ["its speedup is nan"]


def test_inputs_of_one_text_and_modes_of_one_op_are_not_one(csv, tmp_path):
    rows = csv("(M, M);a-latency\n(1, 2);0.5\n(1, 2);0.7\n").records
    assert [each.case_id for each in rows] == ["x0=1,x1=2", "x0=1,x1=2,number=2"]
    modes = {f"tritonbench_gemm_{mode}[x_1-a]_latency": 0.5 for mode in ("fwd", "fwd_no_grad")}
    found = read_tritonbench(written(tmp_path / "result.json", modes)).records
    assert [(each.op, each.case_id) for each in found] == [("gemm", "x=1"), ("gemm", "x=1,mode=fwd_no_grad")]


def test_the_operator_comes_from_the_name_or_the_caller(tmp_path):
    path = written(tmp_path / "results.csv", CSV)
    with pytest.raises(ValueError, match=r"^op: expected the operator of results\.csv"):
        read_tritonbench(path)
    assert {each.op for each in read("tritonbench", [path], ["rms_norm"]).records} == {"rmsnorm"}


def test_keys_of_the_json_become_records_of_its_environment(tmp_path):
    environ = {"device": "NVIDIA H100", "benchmark_date": "20250815103000", "triton_commit": "abc"}
    environ |= {"cuda_version": "13.0", "conda_env": "unknown", "pytorch_commit": "unknown"}
    for values in (METRICS, {"name": "gemm", "environ": environ, "metrics": METRICS}):
        found = read_tritonbench(written(tmp_path / "result.json", values))
        forward, backward = found.records
        assert (forward.op, forward.kernel, dict(forward.case)) == ("rmsnorm", "llama_rms", {"x0": 16, "x1": 4096})
        assert (forward.latency_median_ms, forward.bytes_per_s, forward.peak_memory_bytes) == (0.5, 1e12, 2e9)
        assert (backward.op, backward.latency_median_ms) == ("rms_norm_bwd", 0.9)
        assert [each.reason for each in found.skipped].count("an average over inputs of different sizes") == 2
        assert any("rms_norm_fwd[-1-liger]" in each.place for each in found.skipped), "a negative input, no latency"
    assert forward.timestamp == "2025-08-15T10:30:00+00:00" and forward.environment["gpu"]["name"] == "NVIDIA H100"
    assert forward.environment["imported"]["revisions"] == {"triton_commit": "abc"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", ", line 1: expected columns separated by ';'"),
        ("x;aten-latency\n1;2;3\n", ", line 2: expected 2 cells, got 3"),
        ("x;aten-latency\n", ": expected results of tritonbench, got none"),
        ("x;a-latency;a-latency\n1;2;3\n", ", line 1: expected each column once, got 'a-latency' twice"),
        ("x;a-latency\n1;0,5\n", ", line 2, a, latency: expected a number with a decimal point, got '0,5'"),
    ],
)
def test_a_malformed_csv_is_one_sentence_with_its_place(csv, text, message):
    with pytest.raises(ValueError, match=f"^op_gemm_a.csv{message}"):
        csv(text)
