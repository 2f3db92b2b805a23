import json
import math
import os
import subprocess
import sys

import pytest
import torch

from rooflab.bench import ceilings, fixture
from rooflab.bench.environment import snapshot
from rooflab.bench.pytest_plugin import Replay
from rooflab.roofline.model import Ceilings

pytest_plugins = ["pytester"]

KERNELS = """
import torch
from rooflab.roofline.model import Cost

def oracle(a, b):
    return a.double() @ b.double()

def test_plain():
    pass

def test_theirs(benchmark):
    benchmark.pedantic(len, args=([],), rounds=3)

def test_right(kernel_benchmark):
    a = torch.randn(8, 8)
    c = kernel_benchmark(torch.mm, a, a, reference=oracle, cost=Cost(512, 256, {"fp32": 1024.0}))
    assert torch.equal(c, a @ a)

def test_wrong(kernel_benchmark):
    a = torch.randn(8, 8)
    kernel_benchmark(lambda a, b: a @ b * 1.001, a, a, reference=oracle)

def test_nan(kernel_benchmark):
    a = torch.randn(8, 8)
    kernel_benchmark(lambda a, b: (a @ b) / 0 * 0, a, a, reference=lambda a, b: (a @ b) / 0 * 0)
"""


@pytest.fixture
def project(pytester, monkeypatch, tmp_path):
    """A user's project, on a machine whose ceilings are known: 1 GB/s and 1 GFLOP/s."""
    monkeypatch.setenv("ROOFLAB_CACHE", str(tmp_path / "cache"))
    for name in [name for name in os.environ if name.startswith("PYTEST_XDIST")]:
        monkeypatch.delenv(name)  # the project's own run is no worker of ours, and would not be timed
    environment = snapshot()
    known = Ceilings("this", "measured", 1e9, {"fp32": 1e9}, 1e9)
    ceilings._save(ceilings._path(None, environment), environment, known)
    pytester.makepyfile(KERNELS)

    def run(*arguments):
        return pytester.runpytest_subprocess("--benchmark-max-time=0.02", "-p", "no:cacheprovider", *arguments)

    return run


def test_without_the_option_only_our_benchmarks_are_skipped(project):
    result = project("-rs")
    result.assert_outcomes(passed=2, skipped=3)
    result.stdout.fnmatch_lines(["SKIPPED*a kernel benchmark: runs with --benchmark"])


def test_with_the_option_only_benchmarks_run_and_wrong_kernels_fail(project, pytester):
    result = project("--benchmark", "--benchmark-json=out.json")
    result.assert_outcomes(passed=2, failed=2, deselected=1)
    result.stdout.fnmatch_lines(["*output 0: 64 of 64 elements off*"])
    result.stdout.no_fnmatch_line("*fixture was not used*")
    found = json.loads((pytester.path / "out.json").read_text())
    assert sorted(bench["name"] for bench in found["benchmarks"]) == ["test_right", "test_theirs"]
    assert found["machine_info"]["rooflab"]["torch"] == torch.__version__
    (right,) = (bench for bench in found["benchmarks"] if bench["name"] == "test_right")
    median, info = right["stats"]["median"], right["extra_info"]
    assert 1e-7 < median < 0.1 and right["stats"]["rounds"] == len(right["stats"]["data"]) >= 5
    assert right["stats"]["iterations"] == 1 and right["options"]["timer"] == "rooflab_samples"
    assert info["device_type"] == "cpu" and info["timer"] == "cpu perf_counter" and info["status"] == "OK"
    assert info["flops_per_s"] == pytest.approx(1024 / median) and info["bytes_per_s"] == pytest.approx(768 / median)
    assert info["intensity_flop_per_byte"] == pytest.approx(4 / 3) and info["limiter"] == "tensor"
    assert info["fraction_of_measured_roof"] == pytest.approx(1024e-9 / median)
    assert info["fraction_of_measured_memory_roof"] == pytest.approx(768e-9 / median)


def test_results_can_be_saved_and_compared(project):
    project("--benchmark", "-k", "right", "--benchmark-autosave").assert_outcomes(passed=1, deselected=4)
    result = project("--benchmark", "-k", "right", "--benchmark-compare", "--benchmark-compare-fail=median:100000%")
    result.assert_outcomes(passed=1, deselected=4)
    result.stdout.fnmatch_lines_random(["*test_right*(0001_*", "*test_right*(NOW)*"])
    result.stderr.no_fnmatch_line("*machine_info is different*")


@pytest.mark.parametrize("disabled", [["--benchmark-disable"], ["-n", "1"]])
def test_where_pytest_benchmark_is_disabled_kernels_are_checked_and_not_timed(project, pytester, disabled):
    pytest.importorskip("xdist")
    result = project("--benchmark", "-k", "right or wrong", "--benchmark-json=out.json", *disabled)
    assert {name: result.parseoutcomes()[name] for name in ("passed", "failed")} == {"passed": 1, "failed": 1}
    assert not (pytester.path / "out.json").exists()


def test_without_pytest_benchmark_the_option_is_refused_and_nothing_else_changes(project, pytester):
    pytester.makepyfile(KERNELS.replace("benchmark.pedantic(len, args=([],), rounds=3)", "pass"))
    off = ["-p", "no:benchmark", "-p", "no:cacheprovider"]
    result = pytester.runpytest_subprocess("--benchmark", *off)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*--benchmark: needs the plugin pytest-benchmark*"])
    pytester.runpytest_subprocess("-k", "not theirs", *off).assert_outcomes(passed=1, skipped=3, deselected=1)


def test_the_markers_limits_are_kept_and_its_group_too(project, pytester):
    pytester.makepyfile("""
        import pytest, time

        @pytest.mark.benchmark(group="naps", max_time=1e-6, min_rounds=7)
        def test_nap(kernel_benchmark):
            kernel_benchmark(time.sleep, 0.002)
    """)
    project("--benchmark", "--benchmark-json=out.json").assert_outcomes(passed=1)
    (bench,) = json.loads((pytester.path / "out.json").read_text())["benchmarks"]
    assert bench["group"] == "naps" and bench["stats"]["rounds"] == 7 and bench["stats"]["min"] >= 0.002


def test_an_interpreted_triton_kernel_is_checked_and_not_timed(project, pytester):
    pytester.makepyfile("""
        import torch, triton
        import triton.language as tl

        @triton.jit
        def double(x_ptr, BLOCK: tl.constexpr):
            places = tl.arange(0, BLOCK)
            tl.store(x_ptr + places, tl.load(x_ptr + places) * 2)

        def run(x):
            double[(1,)](x, BLOCK=16)
            return x

        def test_double(kernel_benchmark):
            x = torch.ones(16)
            kernel_benchmark(run, x, reference=lambda x: x * 2)

        def test_triple(kernel_benchmark):
            kernel_benchmark(run, torch.ones(16), reference=lambda x: x * 3)
    """)
    result = project("--benchmark", "-rs")
    result.assert_outcomes(skipped=1, failed=1)
    result.stdout.fnmatch_lines(["SKIPPED*ran in Triton's interpreter*"])


def test_loading_the_plugin_imports_nothing_heavy():
    code = (
        "import sys; before = set(sys.modules); import rooflab.bench.pytest_plugin; "
        "print([name for name in ('torch', 'numpy', 'triton', 'matplotlib', 'psutil') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_a_whole_pytest_run_without_kernels_imports_no_torch(pytester):
    pytester.makepyfile("import sys\ndef test_it():\n    assert 'torch' not in sys.modules")
    pytester.runpytest_subprocess("-p", "no:cacheprovider").assert_outcomes(passed=1)


def test_the_suite_lists_kernels_only_when_asked(pytester, request):
    suite = request.config.rootpath / "bench" / "bench_kernels.py"
    arguments = ["--import-mode=importlib", "--collect-only", "-q", "-p", "no:cacheprovider", str(suite)]
    quiet = pytester.runpytest_subprocess(*arguments)
    quiet.stdout.fnmatch_lines(["1 test collected*"])
    asked = pytester.runpytest_subprocess(*arguments, "--benchmark", "-k", "gemm")
    asked.stdout.fnmatch_lines(["*test_kernel?gemm/library-M=*"])
    asked.stdout.no_fnmatch_line("*rmsnorm*")


def test_replay_gives_each_round_its_duration():
    replay = Replay()
    assert replay() <= replay(), "a clock until durations are loaded"
    replay.load([0.5, 3e-6])
    start, end, next_start, next_end = (replay() for _ in range(4))
    assert (end - start, next_end - next_start) == (0.5, 3e-6)


X = torch.tensor([1.0, -2.0, 0.0])


@pytest.mark.parametrize(
    ("actual", "expected", "passes"),
    [
        (X, X.double(), True),
        (X * (1 + 1e-6), X.double(), True),
        (X * (1 + 1e-4), X.double(), False),
        ((X * 1.01).bfloat16(), X, True),
        ((X * 1.1).bfloat16(), X, False),
        (X * math.nan, X * math.nan, False),
        (X / 0, X / 0, False),
        (torch.tensor([math.inf, 1.0]), torch.tensor([math.inf, 1.0]), True),
        (torch.tensor([1e30, 1.0]), torch.tensor([math.inf, 1.0]), False),
        (torch.tensor([math.inf, 1.0]), torch.tensor([1.0, 1.0]), False),
        (torch.tensor([1, 2]), torch.tensor([1, 2]), True),
        (torch.tensor([1, 3]), torch.tensor([1, 2]), False),
        (torch.tensor([True]), torch.tensor([False]), False),
        (torch.zeros(3, 1), torch.zeros(1, 3), False),
        (torch.zeros(0), torch.zeros(0), True),
        (torch.zeros(3), X, False),
        ((X, X), (X, X + 1), False),
        ((X, X), [X, X], True),
    ],
)
def test_the_gate_passes_what_is_right_to_a_few_roundings(actual, expected, passes):
    assert all(stats.passed for stats in fixture.judge(actual, expected)) is passes


@pytest.mark.parametrize(
    ("actual", "expected", "text"),
    [
        (None, X, "fn: expected a tensor or a tuple of tensors, got NoneType"),
        (X, 3.0, "reference: expected a tensor or a tuple of tensors, got float"),
        ((X, X), X, "fn: expected 1 outputs as of the reference, got 2"),
    ],
)
def test_what_cannot_be_compared_is_named(actual, expected, text):
    with pytest.raises(ValueError, match=text):
        fixture.judge(actual, expected)


def test_neither_side_of_the_gate_changes_the_callers_tensors():
    x = torch.ones(4)
    result, faults, interpreted = fixture.check(lambda x: x.add_(1), [x], lambda x: x.add_(1))
    assert torch.equal(x, torch.ones(4)) and torch.equal(result, torch.full((4,), 2.0))
    assert faults == [] and not interpreted
