"""The verdict of every small wrong, cheating and honest kernel of the tests, as JSON, to compare two versions by.

    python results/verdicts.py > before.json

Those of `tests/attacks/` stand in check_attacks.json.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from rooflab.bench.core.check import check_kernel
from rooflab.kernels.registry import Kernel
from rooflab.reference.spec import OpSpec, get_scheme

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
import cheating_kernels
import tiny_ops
import wrong_kernels  # noqa: F401  (it adds to `tiny_ops`)


def kernels() -> Iterator[tuple[str, Kernel, OpSpec]]:
    """Each kernel with the op that it is checked as."""
    for spec, kernel in tiny_ops.RIGHT:
        yield "right", kernel, spec
    for spec, kernel, _ in tiny_ops.WRONG:
        yield "wrong", kernel, spec
    for make, spec, *_ in cheating_kernels.CHEATS:
        yield "cheat", make(), spec
    for make in cheating_kernels.HONEST.values():
        yield "honest", make(), tiny_ops.PROJECT


def main() -> None:
    """Prints a line for each kernel; addresses and times in a reason become N."""
    torch.manual_seed(0)
    found = {}
    for kind, kernel, spec in kernels():
        result = check_kernel(kernel, spec, spec.cases["smoke"][0], get_scheme("fp32"))
        reason = re.sub(r"\d+(\.\d+)?(e[-+]\d+)?", "N", result.reason)
        found[f"{kind} {spec.name}/{kernel.name}"] = [result.status, reason, len(result.labels)]
    json.dump(found, sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main()
