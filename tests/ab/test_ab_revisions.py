"""Git revisions as sides of an A/B: their worktrees, which are removed afterwards, and the pins that count."""

import os
from dataclasses import replace
from itertools import chain
from pathlib import Path

import pytest
from commands_in_process import run_command
from git_repository import git

from rooflab.bench.ab import pairs
from rooflab.bench.ab.sides import Target
from rooflab.bench.revisions.changes import touched_files
from rooflab.bench.revisions.trees import changed_files, check_contract, checked_out, pins, working_tree


def worktrees(root):
    return git(root, "worktree", "list").splitlines()


@pytest.fixture
def repository(tmp_path):
    root = tmp_path / "repository"
    root.mkdir()
    git(root, "init", "--quiet", "--initial-branch=main")
    for text in ("one", "two"):
        (root / "file.txt").write_text(text)
        git(root, "add", ".")
        git(root, "commit", "-qm", text)
    return root


def test_a_revision_is_checked_out_beside_the_checkout_and_gone_afterwards(repository):
    (repository / "file.txt").write_text("uncommitted")
    with checked_out(repository, "HEAD~1") as tree:
        assert (tree.path / "file.txt").read_text() == "one"
        assert tree.commit and tree.label.startswith("HEAD~1 (")
    assert not tree.path.exists()
    assert (repository / "file.txt").read_text() == "uncommitted"
    assert len(worktrees(repository)) == 1
    assert "and changes" in working_tree(repository).label


def test_both_names_of_a_renamed_file_are_seen(repository):
    git(repository, "mv", "file.txt", "renamed.txt")
    git(repository, "commit", "-qm", "renamed")
    (repository / "new file.txt").write_text("not yet known")
    assert sorted(changed_files(repository, "HEAD~1")) == ["file.txt", "new file.txt", "renamed.txt"]
    assert sorted(changed_files(repository, "HEAD~1", "HEAD")) == ["file.txt", "renamed.txt"]


def test_a_revision_that_is_none_is_named(repository):
    words = "revision: expected a commit, branch or tag of repository, got 'nowhere'"
    with pytest.raises(ValueError, match=words), checked_out(repository, "nowhere"):
        pass


def test_only_pins_that_can_change_a_time_count(tmp_path):
    def tree(name, *lines):
        (tmp_path / name).mkdir()
        (tmp_path / name / "constraints.txt").write_text("\n".join(("# all pins", *lines)))
        return pins(tmp_path / name)

    base = tree("base", "torch==2.13.0", "nvidia_cuda_nvrtc==13.5", "ruff==0.17.5")
    assert base == tree("lints", "torch==2.13.0", "nvidia_cuda_nvrtc==13.5", "ruff==0.18", "typer==1")
    assert base != tree("nvrtc", "torch==2.13.0", "nvidia_cuda_nvrtc==13.6", "ruff==0.17.5")
    assert base != tree("torch", "torch==2.14.0", "nvidia_cuda_nvrtc==13.5", "ruff==0.17.5")


LAZY = "def kernel():\n    from pkg import helper\n"


@pytest.fixture
def own(tmp_path, monkeypatch):
    """Another repository, in which a file of kernels imports a module of a package."""
    root = tmp_path / "own"
    (root / "pkg").mkdir(parents=True)
    git(root, "init", "--quiet")
    texts = {"mine.py": LAZY, "pkg/__init__.py": "", "pkg/helper.py": "from . import deeper", "pkg/deeper.py": ""}
    for name, text in (texts | {"pkg/table.json": "{}", "app.py": "", "app/data.json": "", "notes.md": ""}).items():
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text(text)
    git(root, "add", ".")
    git(root, "commit", "-qm", "one")
    monkeypatch.chdir(root)
    return root


@pytest.mark.parametrize(
    ("changed", "touched"),
    [("mine.py", True), ("pkg/helper.py", True), ("pkg/deeper.py", True), ("pkg/table.json", True)]
    + [("pyproject.toml", True), ("app.py", False), ("notes.md", False), ("new.json", False), ("new.py", False)],
)
def test_a_change_touches_the_kernels_whose_file_it_reaches(own, changed, touched):
    with (own / changed).open("a") as file:
        file.write("\n")
    changes = changed_files(own, "HEAD")
    assert changes == [changed] and (touched_files(changes, ["mine.py"], [own], own) == {"mine.py"}) is touched


def test_a_tree_of_another_contract_is_refused(tmp_path):
    check_contract(Path(__file__).parents[2], "here")
    (tmp_path / "reference").mkdir()
    with pytest.raises(ValueError, match=r"^base: expected .*contract \d in .*spec.py.*, got none in v0$"):
        check_contract(tmp_path, "v0")
    (tmp_path / "reference" / "spec.py").write_text("CONTRACT = 12\n")
    with pytest.raises(ValueError, match="got contract 12 in v12$"):
        check_contract(tmp_path, "v12")


def test_another_repository_is_compared_by_its_own_files(own, monkeypatch):
    """Each side lists and measures what its own tree has, and imports from there."""
    asked = []

    def answers(side, job, limit_s):
        asked.append((side.within, os.path.commonpath(side.import_path.split(os.pathsep)[:2])))
        names = sorted(file.stem for file in side.files if file.is_file())
        entry = {"cases": ["T=1"], "largest": ["T=1"], "taken": [], "schemes": ["fp32"]}
        entry |= {"kernels": dict.fromkeys(names), "files": [f"{name}.py" for name in names]}
        yield {"list": {"rmsnorm": entry} if names else {}}
        for key, values in job["targets"].items():
            record = replace(Target(**values).record("cpu", 0), basis="measured", latency_median_ms=1e3)
            yield {"key": key, "record": record.to_json()}

    def compared(*words):
        status, found, err = run_command(["ab", "--base", "HEAD", "--pairs", "1", "--json", *words])
        verdicts = {one["key"].split()[0]: one["verdict"] for one in chain(*found["tables"].values())} if found else {}
        return status, verdicts, found["notes"][0] if found else err

    monkeypatch.setattr(pairs, "ask_process", answers)
    assert compared("--kernel", "mine.py", "--changed") == (0, {}, "the difference touches no kernel")
    (base, first), (head, second) = asked
    assert (base, head) == (Path(first), Path(second)) and head == own and base != own
    (own / "new.py").write_text(LAZY)
    git(own, "mv", "app.py", "gone.py")
    status, verdicts, said = compared("--kernel", "mine.py", "--kernel", "new.py", "--kernel", "app.py")
    assert (status, verdicts) == (13, {"rmsnorm/mine": "UNRESOLVED", "rmsnorm/app": "MISSING"})
    assert said.startswith("rmsnorm/new is new in working tree")
    lacks = "rooflab: --kernel: expected a file of one of the two revisions, got 'no.py'"
    assert compared("--kernel", "no.py")[::2] == (2, lacks)
    assert "expected a file, or an installed package, of own with kernels" in compared()[2]
    assert compared("--kernel", "mine.py", "--kernel", "../other.py")[0] == 2
