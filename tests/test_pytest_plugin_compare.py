"""With `--benchmark`, a comparison passes only where everything of the baseline was compared.

The runs are inside this process.
"""

import json
import os

import pytest

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
        project.run("--benchmark-save=base")
        file = project.baseline()
        _baseline.extend([str(file.relative_to(pytester.path)), file.read_text()])
    name, text = _baseline
    (pytester.path / name).parent.mkdir(parents=True, exist_ok=True)
    (pytester.path / name).write_text(text)
    return project


class Project:
    def __init__(self, pytester):
        self.pytester = pytester

    def run(self, *arguments, benchmark=True, passes=True):
        """One run, of pytest in this process, which passes or fails; its standard output."""
        result = self.pytester.runpytest_inprocess(*arguments, *(["--benchmark"] if benchmark else []), *QUICK)
        assert (result.ret == 0) is passes, arguments
        return result.stdout

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


def test_a_run_of_everything_in_the_baseline_passes_and_new_benchmarks_are_counted(project):
    out = project.run("--benchmark-compare")
    out.fnmatch_lines(["*rooflab: comparison with the baseline*", "compared 4 with 1 baseline"])
    out.no_fnmatch_line("MISSING*")
    project.change("def test_plain():\n    pass", "def test_new(benchmark):\n    benchmark.pedantic(len, args=([],))")
    project.run("--benchmark-compare").fnmatch_lines(["compared 4 with 1 baseline; 1 more are in none"])


FATES = [
    ("def test_len", "def test_length", "not there: renamed or removed"),
    ("def test_len(benchmark):", "def test_len(benchmark):\n    pytest.skip('no GPU')", "skipped: no GPU"),
    ("def test_len(benchmark):", "def test_len(benchmark):\n    raise ValueError", "failed"),
    ("benchmark.pedantic(len, args=([],), rounds=3)", "pass", "ran, and measured nothing"),
    ("def test_len(benchmark):\n    benchmark.pedantic(len, args=([],), rounds=3)", "def test_len(): pass", "not"),
]


@pytest.mark.parametrize(("old", "new", "fate"), FATES, ids=[fate for *_, fate in FATES])
def test_what_is_missing_fails_the_run_by_its_name(project, old, new, fate):
    project.change(old, new)
    option = "--benchmark-compare-fail=median:9999999%" if fate == "failed" else "--benchmark-compare"
    out = project.run("--benchmark-compare", option, passes=False)
    out.fnmatch_lines([f"MISSING test_mine.py::test_len: {fate}*"])
    out.fnmatch_lines(["FAILED --benchmark-compare*: 1 of 4 in the baseline are missing from this run"])
    out.no_fnmatch_line("MISSING*test_sum*")


def test_what_the_command_line_leaves_out_is_not_missing_and_what_it_asks_for_is(project):
    left_out = [["-k", "not len"], ["test_mine.py::test_sum[1]", "more"], ["more"], ["--ignore", "test_mine.py"]]
    left_out.append(["--deselect", "test_mine.py::test_len"])
    for arguments in [*left_out, ["-m", "quick"]]:
        project.run(*arguments, "--benchmark-compare").no_fnmatch_line("MISSING*")
    project.change("def test_len(benchmark):", "def removed(benchmark):")
    for arguments in left_out:
        project.run(*arguments, "--benchmark-compare").no_fnmatch_line("MISSING*")
    for arguments in (["-m", "quick"], ["test_mine.py"], ["."]):
        out = project.run(*arguments, "--benchmark-compare", passes=False)
        out.fnmatch_lines(["MISSING test_mine.py::test_len: not there: renamed or removed"])
    project.run("--benchmark-compare", benchmark=False).no_fnmatch_line("*rooflab: comparison*")


def test_a_comparison_of_nothing_fails(project):
    def says(text, *arguments):
        project.run("--benchmark-compare", *arguments, passes=False).fnmatch_lines([f"*nothing was compared: {text}"])

    says("nothing was measured", "-k", "nothing_is_called_so")
    project.edit(lambda found: found["benchmarks"].clear())
    says("nothing that was measured is in the baseline")
    says("benchmarks are not timed in this run", "--benchmark-disable")
    project.baseline().unlink()
    says("there is no baseline; save one with --benchmark-autosave")
    says("there is no baseline 'test_mine.py'; *", "test_mine.py")


def test_a_regression_fails_and_what_is_missing_is_named_all_the_same(project, capsys):
    def faster(found):
        for entry in found["benchmarks"]:
            entry["stats"]["median"] /= 1e6

    project.edit(faster)
    project.change("def test_len", "def test_length")
    out = project.run("--benchmark-compare", "--benchmark-compare-fail=median:5%", passes=False)
    out.fnmatch_lines(["MISSING test_mine.py::test_len: not there: renamed or removed"])
    assert "Performance has regressed" in out.str() + capsys.readouterr().err
