"""The emulator's tests know nothing of the lab: no op, no kernel, no registry, but in the files that are named here."""

from __future__ import annotations

import re
from pathlib import Path

HERE = Path(__file__).parent
HELPERS = {
    "bench.core.process": "starts the processes in which Triton compiles",
    "bench.base.plain": "writes the tables of the page",
    "bench.core.functions": "has the tolerance by which an outside kernel is judged",
    "reference.compare": "compares an outside kernel with its reference",
    "kernels._cuda": "loads CUDA C++ of others, as a GPU's process would",
    "kernels._files": "writes a file whole",
    "kernels._folders": "knows the cache's folder",
}
"""What the corpus of other projects borrows."""


def of_the_lab() -> set[str]:
    """The files that `make test-emulator` leaves out, and the process of one of them."""
    (names,) = re.findall(r"^OF_THE_LAB := (.*)$", (HERE.parents[1] / "Makefile").read_text(), re.MULTILINE)
    return {*names.split(), "mutant_worker.py"}


def test_only_named_files_know_the_lab() -> None:
    knowing: dict[str, set[str]] = {}
    for file in HERE.rglob("*.py"):
        imported = re.findall(r"^from rooflab\.(\S+) import (\w+)", file.read_text(), re.MULTILINE)
        names = {f"{module}.{name}" if module == "kernels" else module for module, name in imported}
        others = {name for name in names if not re.match(r"bench\.emulat(e|or)\b", name)}
        knowing[file.name] = others - HELPERS.keys()
    assert {name for name, others in knowing.items() if others} == of_the_lab()
