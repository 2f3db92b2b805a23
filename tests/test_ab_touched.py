"""Which ops a difference touches, and what each revision is measured in."""

import subprocess
import sys
from pathlib import Path

import pytest

from rooflab.bench.ab import revisions
from rooflab.bench.ab.choose_targets import Wanted, two_kernels, two_trees
from rooflab.bench.ab.harness import harness
from rooflab.bench.ab.revisions import Tree, checked_out, pins, working_tree
from rooflab.bench.ab.touched import touched_ops

ROOT = Path(__file__).parent.parent
OPS = ["gemm", "rmsnorm", "rope"]


@pytest.mark.parametrize(
    ("changed", "touched"),
    (
        (["kernels/gemm/tensor_core.py"], ["gemm"]),
        (["kernels/rope/_rotate.py", "kernels/gemm/choices.json"], ["gemm", "rope"]),
        (["reference/rmsnorm.py"], ["rmsnorm"]),
        (["kernels/_checks.py"], OPS),
        (["kernels/registry.py"], OPS),
        (["reference/spec.py"], OPS),
        (["roofline/model.py"], OPS),
        (["bench/timing.py"], OPS),
        (["bench/ab/worker.py"], OPS),
        (["constraints.txt"], OPS),
        (["roofline/plot.py", "bench/show.py", "README.md", "tests/test_gemm.py", "engine/llm.py", "results/a"], []),
        (["kernels/gemm_fp8/naive.py"], []),
        ([], []),
    ),
)
def test_a_kernels_file_touches_its_op_and_a_shared_file_all(changed, touched):
    assert touched_ops(changed, OPS, ("bench/timing.py", "bench/ab/worker.py")) == touched


def test_the_harness_is_the_measuring_process_and_what_it_imports():
    files = harness(ROOT)
    assert {"bench/ab/worker.py", "bench/timing.py", "bench/stopwatch.py", "bench/calls.py"} <= set(files)
    assert not {"bench/show.py", "bench/check.py", "kernels/registry.py", "bench/ab/verdict.py"} & set(files)


def test_a_change_of_the_timer_changes_the_harness(tmp_path):
    for file in harness(ROOT):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text((ROOT / file).read_text())
    assert harness(tmp_path) == harness(ROOT)
    (tmp_path / "bench/stopwatch.py").write_text("# another clock")
    assert harness(tmp_path) != harness(ROOT)
    assert harness(tmp_path / "nothing") == {}


def git(root, *arguments):
    settings = ["-c", "user.name=Test", "-c", "user.email=test@example.org", "-c", "init.defaultBranch=main"]
    subprocess.run(["git", *settings, *arguments], cwd=root, check=True, capture_output=True)


@pytest.fixture
def repository(tmp_path):
    root = tmp_path / "repository"
    root.mkdir()
    git(root, "init", "-q")
    for text in ("one", "two"):
        (root / "file.txt").write_text(text)
        git(root, "add", ".")
        git(root, "commit", "-qm", text)
    return root


def test_a_revision_is_checked_out_beside_the_checkout_and_gone_afterwards(repository):
    (repository / "file.txt").write_text("uncommitted")
    with checked_out(repository, "HEAD~1") as tree:
        assert (tree.path / "file.txt").read_text() == "one"
        assert tree.commit and tree.label.startswith("HEAD~1 (") and tree.python == sys.executable
    assert not tree.path.exists()
    assert (repository / "file.txt").read_text() == "uncommitted"
    listed = subprocess.run(["git", "worktree", "list"], cwd=repository, capture_output=True, text=True).stdout
    assert len(listed.splitlines()) == 1
    assert "and changes" in working_tree(repository).label


def test_a_revision_that_is_none_is_named(repository):
    with pytest.raises(ValueError, match="revision: expected a commit, branch or tag of repository, got 'nowhere'"):
        with checked_out(repository, "nowhere"):
            pass


def test_other_pins_mean_another_environment(repository, monkeypatch):
    made = []
    monkeypatch.setattr(revisions, "environment", lambda tree, done: made.append(tree) or "/other/python")
    (repository / "constraints.txt").write_text("torch==2.13.0\n")
    git(repository, "add", ".")
    git(repository, "commit", "-qm", "pins")
    with checked_out(repository, "HEAD") as same, checked_out(repository, "HEAD~1") as other:
        assert pins(same.path) == pins(repository) != pins(other.path)
        assert same.python == sys.executable and other.python == "/other/python" and made == [other.path]
    with checked_out(repository, "HEAD~1", keep_environment=True) as kept:
        assert kept.python == sys.executable


TREES = Tree("base", None, "a" * 40, False), Tree("head", None, "b" * 40, False)


def listed(**kernels):
    return {"rope": {"kernels": kernels, "cases": ["T=1", "T=512"], "schemes": ["fp32", "bf16"]}}


def test_the_baseline_decides_what_must_be_there():
    a = listed(naive=None, library=None, fused="UNSUPPORTED: needs a CUDA device", broken=None)
    b = listed(naive=None, fused="UNSUPPORTED: needs a CUDA device", fresh=None, broken="UNSUPPORTED: no longer")
    comparison, notes = two_trees(*TREES, (a, b), Wanted())
    assert comparison.keys == ("rope/naive T=512 fp32", "rope/library T=512 fp32", "rope/broken T=512 fp32")
    assert "removed or renamed" in comparison.missing("rope/library T=512 fp32")
    assert comparison.missing("rope/naive T=512 fp32") is None
    assert comparison.missing("rope/broken T=512 fp32") is None  # its check will fail, by its own reason
    assert notes == [
        "rope/fused cannot run here: UNSUPPORTED: needs a CUDA device",
        "rope/fresh is new in head: nothing to compare it with",
    ]


def test_an_op_or_a_case_that_is_gone_is_missing():
    b = {"rope": {**listed(naive=None)["rope"], "cases": ["T=1"]}}
    comparison, _ = two_trees(*TREES, (listed(naive=None), b), Wanted(suite="smollm2_135m"))
    assert [comparison.missing(key) is None for key in comparison.keys] == [True, False]
    gone, _ = two_trees(*TREES, (listed(naive=None), {}), Wanted())
    assert "removed or renamed" in gone.missing(gone.keys[0])


def test_two_kernels_of_one_op():
    comparison = two_kernels(Wanted(("rmsnorm",), ("naive", "library"), schemes=("fp32", "bf16")))
    assert len(comparison.keys) == 2 and comparison.a.label == "naive"
    assert {target.kernel for target in comparison.b.targets.values()} == {"library"}


@pytest.mark.parametrize(
    ("wanted", "named"),
    (
        (Wanted(("rmsnorm",), ("naive",)), "kernel: expected one op and two kernels"),
        (Wanted((), ("naive", "library")), "kernel: expected one op and two kernels"),
        (Wanted(("rmsnorm",), ("naive", "nothing")), "kernel: rmsnorm has"),
        (Wanted(("rmsnorm",), ("naive", "library"), suite="none"), "suite: rmsnorm has"),
        (Wanted(("rmsnorm",), ("naive", "library"), schemes=("fp8",)), "scheme: rmsnorm has"),
        (Wanted(("rmsnorm",), ("naive", "library"), cases=("K=1",)), "case: rmsnorm takes"),
    ),
)
def test_names_that_are_not_there_are_refused(wanted, named):
    with pytest.raises(ValueError, match=named):
        two_kernels(wanted)
