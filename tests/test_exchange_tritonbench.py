"""tritonbench's CSV and JSON as records."""

import json
import os

import pytest

from rooflab.bench.exchange.commands import read
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


def csv_file(tmp_path, text=CSV, name="op_gemm_a1b2c3.csv"):
    path = tmp_path / name
    path.write_text(text)
    return path


def test_rows_become_records_by_implementation(tmp_path):
    path = csv_file(tmp_path)
    os.utime(path, (1.7e9, 1.7e9))
    found = read_tritonbench(path)
    first = found.records[0]
    assert (first.op, first.kernel, first.case_id) == ("gemm", "aten", "M=256,N=128,K=64")
    assert (first.latency_median_ms, first.flops_per_s, first.timer) == (0.02, 0.2e12, "imported: tritonbench")
    assert first.timestamp == "2023-11-14T22:13:20+00:00", "the file's time: the format says nothing of when"
    assert Case.parse(first.case_id) == Case(**first.case) and first.commit is None
    second = found.records[1]
    assert (second.kernel, second.latency_median_ms, second.metrics) == ("triton", 0.016, {"accuracy": 1.0})


def test_failures_are_records_without_a_time(tmp_path):
    found = read_tritonbench(csv_file(tmp_path))
    failed = {(each.status, each.case_id, each.reason) for each in found.records if each.status != "OK"}
    assert failed == {
        ("OUT_OF_MEMORY", "M=512,N=128,K=64", "CUDA out of memory."),
        ("INCORRECT", "M=512,N=256,K=64", "tritonbench found its result to differ from the baseline's"),
        ("RUNTIME_ERROR", "M=64,N=64,K=64", "RuntimeError: no kernel"),
    }
    assert all(each.latency_median_ms is None for each in found.records if each.status != "OK")


def test_what_is_no_result_is_listed(tmp_path):
    found = read_tritonbench(csv_file(tmp_path))
    listed = {each.place: each.reason for each in found.skipped}
    assert listed == {
        "op_gemm_a1b2c3.csv, line 6": "an average over inputs of different sizes",
        "op_gemm_a1b2c3.csv, line 5, aten": "it has no latency, only tflops",
    }
    assert len(found.records) == 7, "8 cells of a latency, one of them empty"


def test_the_operator_comes_from_the_name_or_the_caller(tmp_path):
    path = csv_file(tmp_path, name="results.csv")
    with pytest.raises(ValueError, match=r"^op: expected the operator of results\.csv"):
        read_tritonbench(path)
    assert {each.op for each in read("tritonbench", [path], ["rms_norm"]).imported.records} == {"rmsnorm"}


def json_file(tmp_path, values):
    path = tmp_path / "result.json"
    path.write_text(json.dumps(values))
    return path


METRICS = {
    "tritonbench_rms_norm_fwd[x_(16, 4096)-llama_rms]_latency": 0.5,
    "tritonbench_rms_norm_fwd[x_(16, 4096)-llama_rms]_gbps": 1000.0,
    "tritonbench_rms_norm_fwd[x_(16, 4096)-llama_rms]_gpu_peak_mem": 2.0,
    "tritonbench_rms_norm_fwd[x_(16, 4096)-llama_rms]_best_config": "BLOCK: 64",
    "tritonbench_rms_norm_bwd[x_(16, 4096)-llama_rms]_latency": 0.9,
    "tritonbench_rms_norm_fwd[x_-1-liger]_latency": None,
    "tritonbench_rms_norm_fwd[x_average-llama_rms]_latency": 0.5,
    "tritonbench_rms_norm_fwd[llama_rms]-latency-avg": 0.5,
}


def test_keys_of_the_json_become_records(tmp_path):
    found = read_tritonbench(json_file(tmp_path, METRICS))
    forward, backward = found.records
    assert (forward.op, forward.kernel, dict(forward.case)) == ("rmsnorm", "llama_rms", {"x0": 16, "x1": 4096})
    assert (forward.latency_median_ms, forward.bytes_per_s, forward.peak_memory_bytes) == (0.5, 1e12, 2e9)
    assert (backward.op, backward.latency_median_ms) == ("rms_norm_bwd", 0.9)
    assert [each.reason for each in found.skipped].count("an average over inputs of different sizes") == 2
    assert any("rms_norm_fwd[-1-liger]" in each.place for each in found.skipped), "a negative input, and no latency"


def test_the_environment_beside_the_metrics(tmp_path):
    environ = {
        "device": "NVIDIA H100",
        "benchmark_date": "20250815103000",
        "triton_commit": "abc",
        "cuda_version": "13.0",
    }
    environ |= {"conda_env": "unknown", "pytorch_commit": "unknown"}
    found = read_tritonbench(json_file(tmp_path, {"name": "gemm", "environ": environ, "metrics": METRICS})).records[0]
    assert found.timestamp == "2025-08-15T10:30:00+00:00" and found.environment["gpu"]["name"] == "NVIDIA H100"
    assert found.environment["imported"]["revisions"] == {"triton_commit": "abc"}
    assert found.environment["machine_key"].startswith("imported-nvidia-h100-")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "^op_gemm_a.csv, line 1: expected columns separated by ';'"),
        ("(M, N),aten-latency\n(1, 2),0.5\n", "^op_gemm_a.csv, line 1: expected columns separated by ';'"),
        ("x;aten-latency\n1;2;3\n", "^op_gemm_a.csv, line 2: expected 2 cells, got 3"),
        ("x;aten-latency\n", "^op_gemm_a.csv: expected results of tritonbench, got none"),
    ],
)
def test_a_malformed_csv_is_one_sentence_with_its_place(tmp_path, text, message):
    with pytest.raises(ValueError, match=message):
        read_tritonbench(csv_file(tmp_path, text, "op_gemm_a.csv"))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"latency": 1.0}, "^result.json, 'latency': expected tritonbench_<op>_<mode>"),
        ([], "^result.json: expected an object, got list"),
        ({"metrics": 3}, "^result.json: expected 'metrics' as dict, got int"),
        ({"metrics": METRICS, "environ": {"benchmark_date": "soon"}}, "^result.json, benchmark_date: expected a time"),
    ],
)
def test_a_malformed_json_is_one_sentence_with_its_place(tmp_path, values, message):
    with pytest.raises(ValueError, match=message):
        read_tritonbench(json_file(tmp_path, values))
