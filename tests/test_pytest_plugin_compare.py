"""With `--benchmark`, a comparison passes only where everything of the baseline was compared, on its machine.

The runs are inside this process, because the table of ways in which a comparison is none is long; that the options work
in a process of their own is in `test_pytest_plugin.py`.
"""

import json
import os

import pytest

from rooflab.bench.plugin.compare import differences
from rooflab.bench.records import environment

pytest_plugins = ["pytester"]
pytestmark = pytest.mark.filterwarnings("ignore::pytest_benchmark.logger.PytestBenchmarkWarning")

TESTS = """
import pytest

@pytest.mark.quick
@pytest.mark.parametrize("n", [1, 2])
def test_sum(benchmark, n):
    benchmark.pedantic(sum, args=([n],), rounds=3)

def test_len(benchmark):
    benchmark.pedantic(len, args=([],), rounds=3)

def test_plain():
    pass
"""
OTHER = """
def test_max(benchmark):
    benchmark.pedantic(max, args=(1, 2), rounds=3)
"""
QUICK = ("-p", "no:cacheprovider", "-p", "no:xdist", "-p", "no:hypothesispytest", "-p", "no:anyio")
_baseline = []
GPU = {"name": "NVIDIA H200", "uuid": "GPU-1", "driver": "570.1", "max_sm_clock_mhz": 1980}


@pytest.fixture
def project(pytester, monkeypatch, tmp_path):
    """A user's project with a baseline, on a machine whose description is quick to read."""
    monkeypatch.setenv("ROOFLAB_CACHE", str(tmp_path / "cache"))
    for name in [name for name in os.environ if name.startswith("PYTEST_XDIST")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr("pytest_benchmark.plugin.get_cpu_info", dict)
    pytester.makeini("[pytest]\nmarkers = quick")
    pytester.makepyfile(test_mine=TESTS)
    (pytester.path / "more").mkdir()
    (pytester.path / "more" / "test_other.py").write_text(OTHER)
    project = Project(pytester)
    if not _baseline:  # saved by a run once, and laid down again for each test
        assert project.run("--benchmark-save=base").ret == 0
        file = project.baseline()
        _baseline.extend([str(file.relative_to(pytester.path)), file.read_text()])
    name, text = _baseline
    (pytester.path / name).parent.mkdir(parents=True, exist_ok=True)
    (pytester.path / name).write_text(text)
    return project


class Project:
    def __init__(self, pytester):
        self.pytester = pytester

    def run(self, *arguments, benchmark=True):
        """One run, of pytest in this process."""
        return self.pytester.runpytest_inprocess(*arguments, *(["--benchmark"] if benchmark else []), *QUICK)

    def change(self, old, new):
        """Another text in the tests."""
        file = self.pytester.path / "test_mine.py"
        assert old in file.read_text()
        file.write_text(file.read_text().replace(old, new))

    def baseline(self):
        """The file of the baseline."""
        (file,) = self.pytester.path.glob(".benchmarks/*/0001_base.json")
        return file

    def edit(self, edit):
        """Changes the baseline."""
        found = json.loads(self.baseline().read_text())
        edit(found)
        self.baseline().write_text(json.dumps(found))


def test_a_run_of_everything_in_the_baseline_passes(project):
    result = project.run("--benchmark-compare")
    assert result.ret == 0
    result.stdout.fnmatch_lines(["*rooflab: comparison with the baseline*", "compared 4 with 1 baseline"])
    result.stdout.no_fnmatch_line("MISSING*")


@pytest.mark.parametrize(
    ("old", "new", "fate"),
    [
        ("def test_len", "def test_length", "not there: renamed or removed"),
        ("def test_len(benchmark):", "def test_len(benchmark):\n    pytest.skip('no GPU')", "skipped: no GPU"),
        ("def test_len(benchmark):", "def test_len(benchmark):\n    raise ValueError", "failed"),
        ("benchmark.pedantic(len, args=([],), rounds=3)", "pass", "ran, and measured nothing"),
        ("def test_len(benchmark):\n    benchmark.pedantic(len, args=([],), rounds=3)", "def test_len(): pass", "not"),
    ],
    ids=["renamed", "skipped", "failed", "not measured", "no benchmark any more"],
)
@pytest.mark.parametrize("option", ["--benchmark-compare", "--benchmark-compare-fail=median:9999999%"])
def test_what_is_missing_fails_the_run_by_its_name(project, old, new, fate, option):
    project.change(old, new)
    result = project.run("--benchmark-compare", option)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines([f"MISSING test_mine.py::test_len: {fate}*"])
    result.stdout.fnmatch_lines(["FAILED --benchmark-compare*: 1 of 4 in the baseline are missing from this run"])
    result.stdout.no_fnmatch_line("MISSING*test_sum*")


LEFT_OUT = [
    ["-k", "not len"],
    ["-k", "sum or max"],
    ["--deselect", "test_mine.py::test_len"],
    ["test_mine.py::test_sum"],
    ["test_mine.py::test_sum[1]", "more"],
    ["more"],
    ["more/test_other.py"],
    ["--ignore", "test_mine.py"],
    ["--ignore-glob", "*mine*"],
]


@pytest.mark.parametrize(
    ("arguments", "there"),
    # Nothing tells the markers of a test that is not there.
    [*((arguments, there) for arguments in LEFT_OUT for there in (True, False)), (["-m", "quick"], True)],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "there" if value else "removed",
)
def test_what_the_command_line_leaves_out_is_not_missing(project, arguments, there):
    if not there:
        project.change("def test_len(benchmark):", "def removed(benchmark):")
    result = project.run(*arguments, "--benchmark-compare")
    assert result.ret == 0
    result.stdout.no_fnmatch_line("MISSING*")


@pytest.mark.parametrize(
    "arguments",
    [["-m", "quick"], ["-k", "len"], ["test_mine.py"], ["."], ["--pyargs", "test_mine"]],
    ids=" ".join,
)
def test_what_is_removed_is_missing_where_the_command_line_asks_for_it(project, arguments, monkeypatch):
    project.change("def test_len(benchmark):", "def removed(benchmark):")
    monkeypatch.syspath_prepend(project.pytester.path)
    result = project.run(*arguments, "--benchmark-compare")
    assert result.ret != 0
    result.stdout.fnmatch_lines(["MISSING test_mine.py::test_len: not there: renamed or removed"])


def test_a_skip_that_the_baseline_knows_is_not_missing(project):
    project.change("def test_len(benchmark):", "def test_len(benchmark):\n    pytest.skip('no GPU')")
    assert project.run("--benchmark-save=later").ret == 0
    (later,) = project.pytester.path.glob(".benchmarks/*/0002_later.json")
    assert json.loads(later.read_text())["rooflab"]["skipped"] == {"test_mine.py::test_len": "no GPU"}
    assert project.run("--benchmark-compare").ret == 0
    both = project.run("--benchmark-compare=000*")
    assert both.ret == 0, "the newest of several baselines says that it was skipped"
    both.stdout.fnmatch_lines(["compared 3 with 2 baselines"])


def test_new_benchmarks_are_counted_and_pass(project):
    project.change("def test_plain():\n    pass", "def test_new(benchmark):\n    benchmark.pedantic(len, args=([],))")
    result = project.run("--benchmark-compare")
    assert result.ret == 0
    result.stdout.fnmatch_lines(["compared 4 with 1 baseline; 1 more are in none"])


def test_a_comparison_of_nothing_fails(project):
    result = project.run("--benchmark-compare", "-k", "nothing_is_called_so")
    assert result.ret != 0
    result.stdout.fnmatch_lines(["FAILED --benchmark-compare: nothing was compared: nothing was measured"])
    project.edit(lambda found: found["benchmarks"].clear())
    result = project.run("--benchmark-compare")
    assert result.ret != 0
    result.stdout.fnmatch_lines(["*nothing was compared: nothing that was measured is in the baseline"])
    result = project.run("--benchmark-compare", "--benchmark-disable")
    assert result.ret != 0
    result.stdout.fnmatch_lines(["rooflab: benchmarks are checked and not timed: --benchmark-disable"])
    result.stdout.fnmatch_lines(["*nothing was compared: benchmarks are not timed in this run"])
    project.baseline().unlink()
    result = project.run("--benchmark-compare")
    assert result.ret != 0
    result.stdout.fnmatch_lines(["*nothing was compared: there is no baseline; save one with --benchmark-autosave"])
    result = project.run("--benchmark-compare", "test_mine.py")
    assert result.ret != 0
    result.stdout.fnmatch_lines(["*nothing was compared: there is no baseline 'test_mine.py'; *"])


def test_a_regression_fails_and_what_is_missing_is_named_all_the_same(project):
    def faster(found):
        for entry in found["benchmarks"]:
            entry["stats"]["median"] /= 1e6

    project.edit(faster)
    project.change("def test_len", "def test_length")
    result = project.run("--benchmark-compare", "--benchmark-compare-fail=median:5%")
    assert result.ret != 0
    result.stdout.fnmatch_lines(["MISSING test_mine.py::test_len: not there: renamed or removed"])
    assert "Performance has regressed" in result.stdout.str() + result.stderr.str()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda found: found["machine_info"]["rooflab"].update(gpu=GPU), "gpu: 'NVIDIA H200' in the*, none here"),
        (lambda found: found["machine_info"]["rooflab"].update(machine_key="x-2c"), "machine_key: 'x-2c' in the*"),
        (lambda found: found["machine_info"]["rooflab"].update(threads=77), "threads: 77 in the baseline, * here"),
        (lambda found: found["machine_info"].pop("rooflab"), "the baseline says nothing of its machine*"),
    ],
    ids=["gpu", "machine", "threads", "unknown"],
)
def test_a_baseline_of_another_machine_fails_where_a_regression_would(project, change, words):
    project.edit(change)
    result = project.run("--benchmark-compare", "--benchmark-compare-fail=median:9999999%")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines([f"ELSEWHERE {words}"])
    result.stdout.fnmatch_lines(["FAILED --benchmark-compare-fail: the baseline is of another machine"])
    shown = project.run("--benchmark-compare")
    assert shown.ret == 0
    shown.stdout.fnmatch_lines([f"ELSEWHERE {words}"])


@pytest.mark.parametrize(
    ("then", "differs"),
    [
        ({"timer": "cuda events, 9 calls per sample", "l2_state": "warm"}, False),
        ({"timer": "cuda events, 4 calls per sample", "l2_state": "cold"}, True),
        ({"timer": "cuda graph", "l2_state": "warm"}, True),
        ({}, False),
    ],
)
def test_a_baseline_that_was_timed_otherwise_fails_where_a_regression_would(project, then, differs):
    info = {"timer": "cuda events, 4 calls per sample", "l2_state": "warm"}
    project.change("def test_len(benchmark):", f"def test_len(benchmark):\n    benchmark.extra_info.update({info})")

    def edit(found):
        (entry,) = [entry for entry in found["benchmarks"] if entry["name"] == "test_len"]
        entry["extra_info"] = then

    project.edit(edit)
    result = project.run("--benchmark-compare", "--benchmark-compare-fail=median:9999999%")
    assert (result.ret != 0) is differs
    words = f"OTHERWISE test_mine.py::test_len: timed by {then.get('timer')}*"
    if not differs:
        return result.stdout.no_fnmatch_line("OTHERWISE*")
    result.stdout.fnmatch_lines([words.replace("4 calls", "several calls")])
    result.stdout.fnmatch_lines(["FAILED --benchmark-compare-fail: 1 of 4 were timed otherwise in the baseline"])
    assert project.run("--benchmark-compare").ret == 0


def test_without_our_option_the_plugin_leaves_pytest_benchmark_alone(project):
    project.change("def test_len", "def test_length")
    result = project.run("--benchmark-compare", benchmark=False)
    assert result.ret == 0, "pytest-benchmark passes a renamed test"
    result.stdout.no_fnmatch_line("*rooflab: comparison*")


def test_cards_of_one_kind_are_one_machine_and_a_driver_makes_two():
    here = {"machine_key": "k", "threads": 2, "gpu": GPU, "torch": "2.13", "triton": "3.7"}
    assert differences(here | {"gpu": GPU | {"uuid": "GPU-2"}, "torch": "2.11"}, here) == []
    other = differences(here | {"gpu": GPU | {"driver": "560.9", "max_sm_clock_mhz": 1755}}, here)
    assert other == [
        "gpu driver: '560.9' in the baseline, '570.1' here",
        "gpu max_sm_clock_mhz: 1755 in the baseline, 1980 here",
    ]


def test_the_machine_is_described_as_far_as_a_comparison_needs(project):
    found = json.loads(project.baseline().read_text())["machine_info"]["rooflab"]
    assert found["machine_key"] == environment.snapshot().machine_key
    assert {"torch", "triton", "threads", "gpu"} <= set(found)
