"""`make wheelhouse`: puts the wheels that a GPU machine without a network lacks into `wheelhouse/`.

pip resolves what Rooflab needs for that machine's Python, with the pins of `constraints.txt`.  Packages that
`present.json` lists are left out, except those with an exact pin in pyproject.toml: another version may be there.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
LIMIT_BYTES = 64 * 2**20
"""The most bytes that a machine may receive at once, all wheels together."""
PYTHON = "3.12"
PLATFORMS = tuple(f"manylinux_2_{minor}_x86_64" for minor in (34, 28, 27, 24, 17)) + (
    "manylinux2014_x86_64",
    "manylinux1_x86_64",
)


def normalized(name: str) -> str:
    """The name of a package in the form of the index: `markdown_it.py` is `markdown-it-py`."""
    return re.sub(r"[-_.]+", "-", name).lower()


def requirements(pyproject: Path) -> list[str]:
    """The dependencies of Rooflab, and those of its extras `engine` and `report`."""
    project = tomllib.loads(pyproject.read_text())["project"]
    extras = project["optional-dependencies"]
    return [*project["dependencies"], *extras["engine"], *extras["report"]]


def name_of(requirement: str) -> str:
    """The package that a requirement names."""
    return normalized(re.split(r"[=<>!~\[; ]", requirement, maxsplit=1)[0])


def lacking(wanted: Sequence[str], resolved: Mapping[str, str], present: Mapping[str, Any]) -> dict[str, str]:
    """Names and versions of the packages to carry: those that `wanted` needs and that the machine lacks."""
    exact = {name_of(text) for text in wanted if "==" in text}
    there = ({normalized(name) for name in present["present"]} - exact) | {*map(normalized, present["never"])}
    prefixes, also = tuple(present["never_prefix"]), {name_of(text) for text in present.get("also", ())}
    carried = {name for name in resolved if not name.startswith(prefixes) or name in also} - there
    return {name: resolved[name] for name in sorted(carried)}


def target_options() -> list[str]:
    """pip's options for the GPU machine."""
    words = ["--only-binary=:all:", "--implementation", "cp", "--python-version", PYTHON]
    return [*words, *(word for platform in PLATFORMS for word in ("--platform", platform))]


def resolve(wanted: Sequence[str], constraints: Path) -> dict[str, str]:
    """The version of every package that `wanted` needs on the GPU machine.  Downloads only metadata.

    Raises `ValueError` with pip's message if pip cannot resolve them.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        words = ["install", "--dry-run", "--ignore-installed", "--report", str(report), "--target", folder]
        _pip([*words, *target_options(), "-c", str(constraints), *wanted])
        found = [package["metadata"] for package in json.loads(report.read_text())["install"]]
    return {normalized(metadata["name"]): metadata["version"] for metadata in found}


def download(packages: Mapping[str, str], folder: Path) -> list[Path]:
    """Puts wheels of `packages` into `folder` and removes all others.  Raises `ValueError` above the limit."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as part:
        words = [f"{name}=={version}" for name, version in packages.items()]
        if words:
            _pip(["download", "--no-deps", "-d", part, *target_options(), *words])
        wheels = sorted(Path(part).glob("*.whl"))
        total = sum(wheel.stat().st_size for wheel in wheels)
        if total > LIMIT_BYTES:
            raise ValueError(f"wheelhouse: expected at most {LIMIT_BYTES / 2**20:.0f} MiB, got {total / 2**20:.0f}")
        for old in folder.glob("*.whl"):
            old.unlink()
        return [wheel.replace(folder / wheel.name) for wheel in wheels]


def _pip(words: Sequence[str]) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", *words]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise ValueError(f"wheelhouse: pip {words[0]} failed: {done.stderr.strip()[-1500:]}")


def fill(also: Sequence[str] = ()) -> list[Path]:
    """Fills `wheelhouse/` with what Rooflab needs there, and with `also`, requirements such as `liger-kernel==0.8.5`.

    Raises `ValueError` as `resolve` and `download` do.
    """
    present = json.loads((Path(__file__).parent / "present.json").read_text())
    # torch and its CUDA libraries are never carried: to resolve them, pip requests gigabytes of candidates.
    wanted = [text for text in requirements(ROOT / "pyproject.toml") if name_of(text) not in present["never"]]
    packages = lacking(wanted + present["also"], resolve(wanted + present["also"], ROOT / "constraints.txt"), present)
    more = {name_of(text): text.partition("==")[2] for text in also}  # without dependencies: they are there
    return download(packages | more, ROOT / "wheelhouse")


def main() -> None:
    """Fills `wheelhouse/`."""
    argparse.ArgumentParser(description="Fills wheelhouse/ with what a GPU machine lacks.").parse_args()
    try:
        wheels = fill()
    except ValueError as error:
        raise SystemExit(str(error)) from error
    total = sum(wheel.stat().st_size for wheel in wheels)
    print(f"{len(wheels)} wheels, {total / 2**20:.1f} MiB, in {ROOT / 'wheelhouse'}")


if __name__ == "__main__":
    main()
