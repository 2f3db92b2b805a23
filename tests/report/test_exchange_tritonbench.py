"""TritonBench's JSON becomes records, and faults of a file are reported with their place."""

import os

import pytest
from test_exchange import written

from rooflab.bench.exchange.tritonbench import read_tritonbench
from rooflab.reference.spec import Case

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


def test_modes_of_one_op_are_not_one_and_a_number_that_is_none_is_named(tmp_path):
    modes = {f"tritonbench_gemm_{mode}[x_1-a]_latency": 0.5 for mode in ("fwd", "fwd_no_grad")}
    modes |= {"tritonbench_gemm_fwd[x_1-a]_speedup": float("inf")}
    found = read_tritonbench(written(tmp_path / "result.json", modes))
    assert [(each.op, each.case_id) for each in found.records] == [("gemm", "x=1"), ("gemm", "x=1,mode=fwd_no_grad")]
    assert [each.reason for each in found.skipped] == ["its speedup is inf"]


def test_an_error_takes_the_place_of_the_first_metric_and_a_wrong_result_has_no_time(tmp_path):
    values = {
        "a_latency": "CUDA out of memory.",
        "b_latency": "RuntimeError:  no kernel",
        "c_latency": 0.01,
        "c_accuracy": 0.0,
        "c_gpu_peak_mem": 2.0,
        "d_latency": 0.016,
        "d_accuracy": 1.0,
        "d_tflops": 0.25,
        "e_tflops": 0.3,
    }
    values = {f"tritonbench_gemm_fwd[x_(64, 48)-{key[0]}]_{key[2:]}": value for key, value in values.items()}
    path = written(tmp_path / "result.json", values)
    os.utime(path, (1.7e9, 1.7e9))
    found = read_tritonbench(path)
    memory, error, wrong, right = found.records
    assert (memory.status, memory.reason) == ("OUT_OF_MEMORY", "CUDA out of memory.")
    assert (error.status, error.reason) == ("RUNTIME_ERROR", "RuntimeError: no kernel")
    assert (wrong.status, wrong.peak_memory_bytes, wrong.latency_median_ms) == ("INCORRECT", 2e9, None)
    assert (right.kernel, right.latency_median_ms, right.metrics) == ("d", 0.016, {"accuracy": 1.0})
    assert right.flops_per_s == 0.25e12 and right.timer == "imported: tritonbench" and right.commit is None
    assert right.timestamp == "2023-11-14T22:13:20+00:00", "the file's time: no environment says when"
    assert right.case_id == "x0=64,x1=48" and Case.parse(right.case_id) == Case(**right.case)
    assert [each.reason for each in found.skipped] == ["it has no latency, only tflops"]


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
        ("x;aten-latency", ", column 1: not JSON: Expecting value"),
        ("{}", ": expected results of tritonbench, got none"),
        ('{"latency": 1}', ", 'latency': expected tritonbench_<op>_<mode>"),
    ],
)
def test_another_file_is_one_sentence_with_its_name(tmp_path, text, message):
    with pytest.raises(ValueError, match=f"^a.json{message}"):
        read_tritonbench(written(tmp_path / "a.json", text))
