"""Copies of the tree into which a fault can be planted, each with its own .venv, and runs of pytest in the copies.

A copy's .venv has hard links to the packages, but names the copy wherever the original names the checkout.  So every
child process imports the faulty file, whatever environment a test gives it.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from tracing import DATA, ONLY, REPORT

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
TEST_S = 60.0
"""The seconds after which a test fails: a fault may make a test wait for ever."""
PLUGIN = "rooflab_faults"
"""The name under which a copy's processes import `tracing.py`."""
BY_CONTENT = ("models", "static", "cubins", "native")
"""The parts of the lab's cache whose names depend on their content, so that a fault cannot get another one's part."""


def make_tree(folder: Path, place: int) -> Path:
    """Makes the copy with this number; it has the same commit as the first copy in `folder`."""
    tree = folder / f"tree-{place}"
    if (tree / ".venv" / ".copied").exists():
        return tree
    shutil.rmtree(tree, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    commit = folder / "commit"
    if not commit.exists():
        head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, check=True, capture_output=True, text=True)
        commit.write_text(head.stdout.strip())
    subprocess.run(["git", "clone", "-q", "--shared", "--no-checkout", str(ROOT), str(tree)], check=True)
    subprocess.run(["git", "checkout", "-q", "--detach", commit.read_text()], cwd=tree, check=True)
    shutil.copytree(ROOT / ".venv", tree / ".venv", symlinks=True, copy_function=_link)
    packages = next((tree / ".venv" / "lib").glob("python3*/site-packages"))
    named = [
        *(tree / ".venv" / "bin").iterdir(),
        *packages.glob("__editable__*rooflab*"),
        tree / ".venv" / "pyvenv.cfg",
    ]
    for file in (file for file in named if not file.is_symlink()):
        content, mode = file.read_bytes(), file.stat().st_mode
        file.unlink()  # removes the link, not the original
        file.write_bytes(content.replace(str(ROOT).encode(), str(tree).encode()))
        file.chmod(mode)
    for file in (packages / "__pycache__").glob("__editable__*rooflab*"):
        file.unlink()
    shutil.copy(HERE / "tracing.py", packages / f"{PLUGIN}.py")
    (packages / f"{PLUGIN}.pth").write_text(f"import os; '{DATA}' in os.environ and __import__('{PLUGIN}').trace()\n")
    (tree / ".venv" / ".copied").touch()
    return tree


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # OSError: another file system
        shutil.copy2(source, target)


def restore(tree: Path) -> None:
    """Undoes every change of the tree, and removes the bytecode that Python compiled from it."""
    subprocess.run(["git", "checkout", "-q", "--", "."], cwd=tree, check=True)
    subprocess.run(["git", "clean", "-fdq"], cwd=tree, check=True)
    for layer in ("bench", "engine", "kernels", "reference", "roofline"):
        for folder in (tree / layer).rglob("__pycache__"):
            shutil.rmtree(folder)


@dataclass
class Outcome:
    """The outcome that pytest reported."""

    failed: list[str] = field(default_factory=list)
    passed: set[str] = field(default_factory=set)
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    ended: bool = False
    """Whether the time limit ended the run."""
    why_not: str = ""
    """The end of pytest's output, if pytest did not run the tests to their end."""


def run_pytest(
    tree: Path,
    files: Sequence[str],
    limit_s: float,
    *,
    names: Iterable[str] = (),
    marks: str = "",
    workers: int = 0,
    keywords: str = "",
    first: bool = False,
    data: Path | None = None,
) -> Outcome:
    """Runs the tests of these files: all, or `names` in this order if there are any, or those with `keywords`; with
    `first` only up to the first failure.  `data` takes traced lines."""
    with tempfile.TemporaryDirectory(prefix="faults-") as temporary:
        folder = Path(temporary)
        (folder / "cache").mkdir()
        for name in BY_CONTENT:
            kept = Path.home() / ".cache" / "rooflab" / name
            kept.mkdir(parents=True, exist_ok=True)
            (folder / "cache" / name).symlink_to(kept)
        (folder / "report").touch()
        variables = {
            name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV", DATA)
        }
        variables |= {"ROOFLAB_CACHE": str(folder / "cache"), REPORT: str(folder / "report"), "OMP_NUM_THREADS": "1"}
        if data is not None:
            variables[DATA] = str(data)
        if names := list(names):
            (folder / "only").write_text("\n".join(names))
            variables[ONLY] = str(folder / "only")
        command = [str(tree / ".venv" / "bin" / "python"), "-m", "pytest", "-q", "-p", PLUGIN, "-p", "no:cacheprovider"]
        command += ["-n", str(workers), "--timeout", str(TEST_S), *(["-m", marks] if marks else []), *files]
        command += [*(["-k", keywords] if keywords else []), *(["-x"] if first else [])]
        with (folder / "log").open("w+") as log:
            process = subprocess.Popen(
                command,
                cwd=tree,
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
            outcome = Outcome()
            try:
                process.wait(limit_s)
            except subprocess.TimeoutExpired:
                outcome.ended = True
            finally:
                end_all(tree)
                process.wait()
            log.seek(0)
            if process.returncode not in (0, 1, 5) and not outcome.ended:
                outcome.why_not = log.read()[-2000:]
        lines = [json.loads(line) for line in (folder / "report").read_text().splitlines()]
    for name, _, _, seconds in lines:
        outcome.seconds[name] += seconds
    outcome.failed = sorted({name for name, _, result, _ in lines if result == "failed"})
    passed = {name for name, phase, result, _ in lines if phase == "call" and result == "passed"}
    outcome.passed = passed - set(outcome.failed)
    return outcome


def end_all(tree: Path) -> None:
    """Ends the processes that a copy's Python started, also in sessions of their own."""
    python = str(tree / ".venv")
    for process in psutil.process_iter(["cmdline"]):
        if (process.info["cmdline"] or [""])[0].startswith(python):
            with suppress(psutil.NoSuchProcess):
                for one in [*process.children(recursive=True), process]:
                    one.kill()
