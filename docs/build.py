"""Builds the site of these pages into `build/site`, with the command line and the Python API: `make docs`.

    python docs/build.py            a link to nothing, or a page that is in no menu, ends it with 1

Pages link to files of the repository as they lie there, so the site is built from a copy of the pages and of what they
link to.
"""

from __future__ import annotations

import inspect
import os
import re
import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import click
import typer
import yaml

from rooflab.bench.cli.app import app

ROOT = Path(__file__).resolve().parent.parent
STAGE, SITE = ROOT / "build" / "pages", ROOT / "build" / "site"
LINK = re.compile(r"\]\((?!https?:|#)([^)#\s]+)")
MENU: dict[str, list[str]] = {
    "Start": ["README.md"],
    "Kernels": ["kernels", "check", "bench", "emulate", "found", "predict", "ab", "own_kernel", "own_op", "published"],
    "Ladders": [f"ladders/{name}" for name in ("gemm", "flash_attention", "paged_attention", "norms", "sampling")],
    "Engine": ["engine", "models", "speculate", "serve", "latency"],
    "Numbers": ["card", "numbers", "results/README.md", "not_shown", "rehearsal"],
    "Inside": ["architecture"],
    "Reference": ["names", "command_line", "python"],
}
PUBLIC = {
    "rooflab.kernels.registry": ("register", "Kernel", "get_kernel"),
    "rooflab.roofline.model": ("Cost",),
    "rooflab.bench.emulate": ("emulating",),
    "rooflab.bench.emulator": ("emulating", "emulate", "PtxLaunch"),
    "rooflab.bench.ab": ("compare",),
    "rooflab.engine.llm": ("LLM", "SamplingParams"),
    "rooflab.bench.core": ("Record", "read", "read_all", "Measurement", "Settings"),
    "rooflab.reference.spec": ("OpSpec", "Case", "Scheme"),
    "rooflab.reference.contract": ("Contract", "Argument", "Result"),
    "rooflab.kernels.launcher": ("kernel",),
    "rooflab.reference.domain": ("Domain",),
}
"""What a user's own file imports."""


def command_line() -> str:
    """Every command with its help and its options, as Typer has them."""
    parts = ["# The command line\n"]
    left = list(typer.main.get_command(app).commands.items())  # type: ignore[attr-defined]
    for name, command in sorted(left):
        for words, one in ((name, command), *((f"{name} {sub}", own) for sub, own in _inner(command))):
            help_text = one.get_help(click.Context(one, info_name=f"rooflab {words}")).strip()
            parts.append(f"## {words}\n\n```text\n{help_text}\n```\n")
    return "\n".join(parts)


def _inner(command: Any) -> list[tuple[str, Any]]:
    return sorted(getattr(command, "commands", {}).items())


def python() -> str:
    """The public functions and classes, by module: signature and docstring."""
    parts = ["# The Python interface\n"]
    for module, names in PUBLIC.items():
        for name in names:
            found = getattr(import_module(module), name)
            parts.append(f"## {name}\n\n```python\nfrom {module} import {name}\n\n{_signature(name, found)}\n```\n")
            parts.append(f"{inspect.getdoc(found)}\n")
    return "\n".join(parts)


def _signature(name: str, found: Any) -> str:
    """The call on one line, or with a line for each argument."""
    signature = inspect.signature(found)
    whole = f"{name}({', '.join(map(_argument, signature.parameters.values()))})"
    if len(whole) <= 90 and "*" not in str(signature):
        return whole
    lines, kinds = [], [one.kind for one in signature.parameters.values()]
    for place, one in enumerate(signature.parameters.values()):
        if one.kind is one.KEYWORD_ONLY and one.VAR_POSITIONAL not in kinds and kinds.index(one.KEYWORD_ONLY) == place:
            lines.append("*")
        lines.append(_argument(one))
    return f"{name}(\n" + "".join(f"    {line},\n" for line in lines) + ")"


def _argument(one: inspect.Parameter) -> str:
    """`name: type = default`; annotations are texts, as `from __future__ import annotations` leaves them."""
    star = {one.VAR_POSITIONAL: "*", one.VAR_KEYWORD: "**"}.get(one.kind, "")
    default = "" if one.default is one.empty else f" = {one.default!r}".replace("<factory>", "...")
    return f"{star}{one.name}: {one.annotation}{default}"


def stage() -> None:
    """Copies the pages, and every file that one of them links to."""
    shutil.rmtree(STAGE, ignore_errors=True)
    left = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]
    done: set[Path] = set()
    while left:
        path = left.pop()
        if path in done or not path.is_file():
            continue
        done.add(path)
        target = STAGE / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
        if path.suffix == ".md":
            left += [(path.parent / link).resolve() for link in LINK.findall(path.read_text())]
    for name, text in (("command_line", command_line()), ("python", python())):
        (STAGE / "docs" / f"{name}.md").write_text(text)


def main() -> None:
    """Stages the pages and builds the site."""
    stage()
    pages = [
        {title: [page if page.endswith(".md") else f"docs/{page}.md" for page in own]} for title, own in MENU.items()
    ]
    known = {page for menu in pages for own in menu.values() for page in own}
    if lost := {f"docs/{path.name}" for path in (STAGE / "docs").glob("*.md")} - known:
        sys.exit(f"docs: expected every page in MENU, not there: {', '.join(sorted(lost))}")
    config = {
        "site_name": "Rooflab",
        "docs_dir": str(STAGE),
        "site_dir": str(SITE),
        "theme": {"name": "material", "font": False},
        "nav": pages,
        "validation": {"omitted_files": "ignore", "not_found": "warn", "links": {"not_found": "warn"}},
        "markdown_extensions": ["tables", "fenced_code"],
    }
    file = ROOT / "build" / "mkdocs.yml"
    file.write_text(yaml.safe_dump(config))
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--config-file", str(file)]
    done = subprocess.run(command, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"})
    sys.exit(done.returncode)


if __name__ == "__main__":
    main()
