"""A bare checkout runs without an installation, and the packages that a GPU machine lacks are carried as wheels."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sysconfig
import venv
import zipfile
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path

import pytest
from visit.wheelhouse import name_of, normalized

ROOT = Path(__file__).parents[2]
FOLDERS = ("roofline", "reference", "kernels", "engine", "bench")


def lacking() -> set[str]:
    """The modules of the packages that `present.json` does not name: a GPU machine may have none of them."""
    names = json.loads((ROOT / "results" / "visit" / "present.json").read_text())
    there = {*names["present"], *names["never"], "pip"}

    def with_its_needs(package: str, found: set[str]) -> set[str]:
        if package not in found:
            found.add(package)
            with suppress(PackageNotFoundError):  # on this machine
                for text in requires(package) or ():
                    if "extra ==" not in text:
                        with_its_needs(name_of(text), found)
        return found

    closed = set[str]()
    for package in there:
        with_its_needs(normalized(package), closed)

    def is_there(package: str) -> bool:
        return normalized(package) in closed or normalized(package).startswith(tuple(names["never_prefix"]))

    return {module for module, packages in packages_distributions().items() if not any(map(is_there, packages))}


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    """A copy of the sources, and a Python with those of our packages that a GPU machine has.

    The Python is an environment of its own, so that what a command starts sees no more than the command does.
    """
    folder = tmp_path_factory.mktemp("bare")
    packages, without = folder / "packages", lacking()
    assert {"gguf", "junitparser", "fastapi", "uvicorn", "zmq", "ray"} <= without
    packages.mkdir()
    for entry in Path(sysconfig.get_paths()["purelib"]).iterdir():
        if "rooflab" not in entry.name.lower() and not entry.name.endswith(".pth") and entry.stem not in without:
            (packages / entry.name).symlink_to(entry)
    venv.create(folder / "venv", with_pip=False)
    site = next((folder / "venv" / "lib").glob("python*")) / "site-packages"
    (site / "packages.pth").write_text(f"{packages}\n")
    checkout = folder / "checkout"
    for name in FOLDERS:
        shutil.copytree(ROOT / name, checkout / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "results" / "published", checkout / "results" / "published")
    python = folder / "venv" / "bin" / "python"
    done = subprocess.run([str(python), "-c", "import numpy, gguf"], capture_output=True, text=True)
    assert "No module named 'gguf'" in done.stderr
    return checkout, python


COMMANDS = (
    "list gemm --json",
    "suite --plan",
    "ab --help",
    "roofline --gpu h100 --out {out}",
    "suite --dry-run --only environment --out {out}/suite",  # in processes of its own
)


def run(bare, *words, cwd=None):
    checkout, python = bare
    clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "TRITON_INTERPRET")}
    return subprocess.run(
        [str(python), str(checkout / "bench" / "run_from_checkout.py"), *words],
        capture_output=True,
        text=True,
        timeout=240,
        cwd=cwd or checkout,
        env=clean,
    )


@pytest.mark.more
@pytest.mark.parametrize("words", COMMANDS)
def test_a_command_runs_by_path_from_anywhere_and_needs_no_package_that_a_card_s_machine_lacks(bare, tmp_path, words):
    done = run(bare, *words.format(out=tmp_path).split(), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    links = bare[0] / "build" / "checkout" / "rooflab"
    assert {link.name for link in links.iterdir()} - {"__pycache__"} == {*FOLDERS, "__init__.py"}
    assert all((links / name).resolve() == bare[0] / name for name in FOLDERS)


MINE = """
import carried_demo
from rooflab.kernels.registry import register
import code  # run by path, Python looks into bench/ first, where `code` is a folder of ours
assert code.InteractiveConsole

@register(op='rmsnorm', name=f'carried_{carried_demo.PRICE}', role='optimized', backend='torch')
def rmsnorm(x, weight, eps=1e-6):
    scale = (x.double().pow(2).mean(-1, keepdim=True) + eps).rsqrt()
    return (x.double() * scale * weight.double()).to(x.dtype)
"""


@pytest.mark.more
def test_carried_wheels_are_on_the_path_of_every_process(bare):
    checkout, _ = bare
    house, info = checkout / "wheelhouse", "carried_demo-1.0.dist-info"
    house.mkdir()
    with zipfile.ZipFile(house / "carried_demo-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("carried_demo.py", "PRICE = 41\n")
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: carried-demo\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    mine = checkout / "mine.py"
    mine.write_text(MINE)
    words = ("--kernel", str(mine), "--case", "T=4,H=64,eps=1e-06", "--scheme", "fp32", "--json")
    try:
        done = run(bare, "check", "rmsnorm", *words)
        assert done.returncode == 0, done.stderr
        (row,) = json.loads(done.stdout)
        assert row["kernel"] == "carried_41" and row["status"] == "OK"
        (house / "broken-1.0-py3-none-any.whl").write_text("no archive")
        bad = run(bare, "list", "gemm")
        assert bad.returncode == 1 and bad.stderr.startswith("wheelhouse: pip cannot unpack it")
    finally:
        shutil.rmtree(house)
