"""The pytest plugin in users' projects: its option, its fixture, and pytest-benchmark's options with device time.

The runs are inside this process, except one that asks which modules a run imports.
"""

import json
import os

import pytest
import torch
import triton
from test_ceilings import cpu_records

# Held here, because pytester forgets what a run inside this process has imported, and torch's ops register once.
from rooflab.bench.core import ceilings
from rooflab.bench.core import functions as fixture
from rooflab.bench.core.environment import Environment
from rooflab.bench.core.noise import Samples, with_reading
from rooflab.bench.core.record import Record, unpack_samples
from rooflab.bench.exchange.pytest_benchmark import read_pytest_benchmark
from rooflab.bench.plugin import fixture_time as plugin_timing
from rooflab.bench.report.figures import placed

assert triton and fixture and plugin_timing
pytest_plugins = ["pytester"]
QUICK = ("-p", "no:xdist", "-p", "no:hypothesispytest", "-p", "no:anyio")

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
    monkeypatch.setattr("pytest_benchmark.plugin.get_cpu_info", dict)  # a second each time, in a process of its own
    for name in [name for name in os.environ if name.startswith("PYTEST_XDIST")]:
        monkeypatch.delenv(name)  # the project's own run is no worker of ours, and would not be timed
    monkeypatch.setattr(ceilings, "measure_cpu", lambda environment, budget_s: cpu_records(1e9, fp32=1e9))
    pytester.makepyfile(test_mine=KERNELS)

    def run(*arguments):
        options = ("--benchmark-max-time=0.02", "-p", "no:cacheprovider", *arguments)
        return pytester.runpytest_inprocess(*QUICK, *options)

    return run


def saved(pytester):
    """The benchmarks of the file that a run wrote, and its machine."""
    found = json.loads((pytester.path / "out.json").read_text())
    return {bench["name"]: bench for bench in found["benchmarks"]}, found["machine_info"]


def test_without_the_option_only_our_benchmarks_are_skipped_and_who_wants_results_is_told(project):
    result = project("-rs")
    result.assert_outcomes(passed=2, skipped=3)
    result.stdout.fnmatch_lines(["SKIPPED*a kernel benchmark: runs with --benchmark"])
    result.stdout.no_fnmatch_line("rooflab:*")
    result = project("--benchmark-json=out.json", "-k", "not theirs", "-q")
    result.assert_outcomes(passed=1, skipped=3, deselected=1)
    result.stdout.fnmatch_lines(["rooflab: 3 kernel benchmarks were not run: add --benchmark"])


def test_with_the_option_only_benchmarks_run_and_wrong_kernels_fail(project, pytester):
    columns = ["--benchmark-columns=median,rounds", "--benchmark-group-by=func"]
    result = project("--benchmark", "--benchmark-json=out.json", "--benchmark-save=base", *columns)
    result.assert_outcomes(passed=2, failed=2, deselected=1)
    result.stdout.fnmatch_lines(["*output 0: 64 of 64 elements off*"])
    result.stdout.fnmatch_lines(["*benchmark 'test_right': 1 tests*", "Name (time in *s)*Median*Rounds*"])
    benchmarks, machine = saved(pytester)
    assert sorted(benchmarks) == ["test_right", "test_theirs"]
    assert machine["rooflab"]["torch"] == torch.__version__
    right, info = benchmarks["test_right"], benchmarks["test_right"]["extra_info"]
    median = right["stats"]["median"]
    assert 1e-7 < median < 0.1 and right["stats"]["rounds"] == len(right["stats"]["data"]) >= 5
    assert info["device_type"] == "cpu" and info["timer"].startswith("cpu perf_counter") and info["status"] == "OK"
    assert info["flops_per_s"] == pytest.approx(1024 / median) and info["bytes_per_s"] == pytest.approx(768 / median)
    assert info["fraction_of_measured_roof"] == pytest.approx(1024e-9 / median)
    assert unpack_samples(info["samples"]) == pytest.approx(right["stats"]["data"]), "every sample, in time order"
    assert info["machine_key"] == machine["rooflab"]["machine_key"]
    (record,) = (r for r in read_pytest_benchmark(pytester.path / "out.json").records if r.op == "test_right")
    assert (record.flops, record.least_bytes, record.limiter) == (1024, 768, "tensor") and record.ceilings
    assert record.bound_fraction == pytest.approx(1024e-9 / median) and placed([record], ())[0][0].dtype == "fp32"
    strict = ["--benchmark-compare=0001", "--benchmark-compare-fail=median:100000%"]
    result = project("--benchmark", "-k", "right", *strict)
    result.assert_outcomes(passed=1, deselected=4)
    result.stdout.fnmatch_lines_random(["*test_right*(0001_*", "*test_right*(NOW)*"])


def test_noise_decides_no_comparison_and_alone_ends_with_13(project, pytester, monkeypatch):
    here = Environment.now().to_dict()

    def time_kernel(checked, *_, **limits):
        seconds = checked.result
        samples = Samples((seconds,) * 5, "a fake clock", "cold", noise="busy" if seconds > 0.01 else "")
        noisy = ("NOISY", "busy") if samples.noise else ("OK", "")
        made = Record(kind="bench", run_id="r", status=noisy[0], reason=noisy[1], environment=here, device="cpu")
        return with_reading(made, samples, None)

    monkeypatch.setattr(plugin_timing, "time_kernel", time_kernel)
    pytester.makepyfile(
        test_mine="""
        import os, pytest

        @pytest.mark.parametrize("name", ["nap", "steady"])
        def test_sleeps(kernel_benchmark, name):
            kernel_benchmark(abs, float(os.environ[name]))
    """
    )

    def run(nap, steady, *options):
        for name, seconds in (("nap", nap), ("steady", steady)):
            monkeypatch.setenv(name, str(seconds))
        found = project("--benchmark", "-q", *options)
        return found.ret, [line for line in found.outlines if line.startswith("rooflab: ")]

    fail = ("--benchmark-compare=0001", "--benchmark-compare-fail=median:1000%")
    assert run(1e-4, 1e-5, "--benchmark-save=a") == (0, [])
    noisy = "rooflab: test_mine.py::test_sleeps[nap]: NOISY: busy"
    left_out = "rooflab: NOISY readings are left out of --benchmark-compare-fail: 1"
    assert run(0.02, 1e-4, *fail, "--benchmark-save=b") == (0, [noisy, left_out])
    assert run(0.02, 1e-4, *fail, "-k", "nap") == (13, [noisy, left_out])
    assert run(0.02, 6e-3, *fail) == (pytest.ExitCode.INTERNAL_ERROR, [noisy, left_out]), "named, and it has regressed"
    small = "rooflab: test_mine.py::test_sleeps[nap]: {} slower, as two processes differ by themselves"
    tight = ("--benchmark-compare=0001", "--benchmark-compare-fail=median:1%", "-k", "nap")
    assert run(1.04e-4, 1e-4, *tight) == (0, [small.format("4 us (4%)")])
    assert run(1.99e-4, 1e-4, *tight) == (0, [small.format("99 us (99%)")])
    assert run(2.01e-4, 1e-4, *tight)[0] == pytest.ExitCode.INTERNAL_ERROR
    assert run(1e-4, 2.1e-5, *tight[:2])[0] == pytest.ExitCode.INTERNAL_ERROR, "11 us are more than processes differ by"
    after = ("--benchmark-compare=0002", "--benchmark-compare-fail=median:1%", "-k", "nap")
    before = "rooflab: test_mine.py::test_sleeps[nap]: its baseline 0002_b.json is NOISY: busy"
    assert run(1e-4, 1e-4, *after) == (13, [before, left_out])


@pytest.mark.parametrize("option", ["--benchmark", "--benchmark-only"])
def test_another_tool_that_takes_the_fixture_over_is_refused_before_the_run(project, pytester, monkeypatch, option):
    pytester.makeconftest("def pytest_addoption(parser): parser.addoption('--codspeed', action='store_true')")
    for arguments, variable in (([option, "--codspeed"], None), ([option], "CODSPEED_ENV")):
        if variable:
            monkeypatch.setenv(variable, "1")
        result = project(*arguments)
        assert result.ret == pytest.ExitCode.USAGE_ERROR and not result.outlines
        result.stderr.fnmatch_lines(["ERROR: --benchmark: expected no --codspeed or CODSPEED_ENV beside it*"])


def test_the_markers_limits_are_kept(project, pytester):
    pytester.makepyfile(
        test_mine="""
        import pytest, time

        @pytest.mark.benchmark(group="naps", max_time=1e-6, min_rounds=7)
        def test_nap(kernel_benchmark):
            kernel_benchmark(time.sleep, 0.002)
    """
    )
    project("--benchmark", "--benchmark-json=out.json").assert_outcomes(passed=1)
    nap = saved(pytester)[0]["test_nap"]
    assert nap["group"] == "naps" and nap["stats"]["rounds"] == 7 and nap["stats"]["min"] >= 0.002


def test_interpreted_kernels_are_not_timed_and_what_is_wrong_before_or_after_the_timing_is_not_saved(project, pytester):
    pytester.makepyfile(
        test_mine="""
        import pytest, torch, triton
        import triton.language as tl

        @triton.jit
        def double(x_ptr, BLOCK: tl.constexpr):
            places = tl.arange(0, BLOCK)
            tl.store(x_ptr + places, tl.load(x_ptr + places) * 2)

        def run(x):
            double[(1,)](x, BLOCK=16)
            return x

        def test_double(kernel_benchmark):
            kernel_benchmark(run, torch.ones(16), reference=lambda x: x * 2)

        def test_named(kernel_benchmark):
            kernel_benchmark(torch.neg, torch.ones(4), afterwards=lambda: "c: 3 of 4 elements off")

        def test_tired(kernel_benchmark, calls=[]):
            def tires(x):
                calls.append(1)
                return x * 2 if len(calls) < 12 else x * 0

            kernel_benchmark(tires, torch.ones(4), reference=lambda x: x * 2)

        def test_by_shape(kernel_benchmark, kept={}):
            cached = lambda x: kept.setdefault(x.shape, x * 2)
            kernel_benchmark(cached, torch.arange(4.0), reference=lambda x: x * 2)

        def test_skips(kernel_benchmark):
            kernel_benchmark(lambda x: pytest.skip("not today"), torch.ones(4))
    """
    )
    result = project("--benchmark", "-rs", "--benchmark-json=out.json")
    result.assert_outcomes(skipped=1, failed=4)
    for line in (
        "INCORRECT: after timing: c: 3 of 4 elements off",
        "INCORRECT: after timing: output 0: 4 of 4 elements off*",
        "other data: output 0: 4 of 4 elements off*",
        "fn: expected a result, got Skipped: not today",
        "SKIPPED*ran in Triton's interpreter*",
    ):
        result.stdout.fnmatch_lines([line])
    assert saved(pytester)[0] == {}


def test_a_test_has_one_result_and_the_second_timing_is_refused_before_it_is_made(project, pytester):
    pytester.makepyfile(
        test_mine="""
        import torch

        def test_two(kernel_benchmark):
            kernel_benchmark(torch.neg, torch.ones(4))
            kernel_benchmark(lambda: 1 / 0)

        def test_both(kernel_benchmark, benchmark):
            benchmark.pedantic(len, args=([],))
            kernel_benchmark(lambda: 1 / 0)
    """
    )
    result = project("--benchmark", "--benchmark-json=out.json")
    result.assert_outcomes(failed=2)
    assert "\n".join(result.outlines).count("\nkernel_benchmark: expected one timing in a test, got a second") == 2
    assert saved(pytester)[0] == {}


def test_a_whole_pytest_run_without_kernels_imports_nothing_heavy(pytester):
    heavy = {"torch", "numpy", "triton", "matplotlib", "psutil"}
    pytester.makepyfile(f"import sys\ndef test_it():\n    assert not {heavy} & set(sys.modules)")
    pytester.runpytest_subprocess("-p", "no:cacheprovider", "-p", "no:randomly").assert_outcomes(passed=1)
