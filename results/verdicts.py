"""The verdict of every small wrong, cheating and honest kernel of the tests, as JSON, to compare two versions by.

    python results/verdicts.py --out before.json

Those of `tests/attacks/` stand in check_attacks.json.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import torch

os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

from rooflab.bench.core.check import check_kernel
from rooflab.kernels._files import write_whole
from rooflab.kernels.registry import Kernel
from rooflab.reference.spec import OpSpec, get_scheme

TESTS = Path(__file__).resolve().parent.parent / "tests"


def kernels() -> Iterator[tuple[str, Kernel, OpSpec]]:
    """Each kernel with the op that it is checked as."""
    sys.path.insert(0, str(TESTS))
    tiny_ops, cheating_kernels, _ = map(import_module, ("tiny_ops", "cheating_kernels", "wrong_kernels"))
    for spec, kernel in tiny_ops.RIGHT:
        yield "right", kernel, spec
    for spec, kernel, _ in tiny_ops.WRONG:
        yield "wrong", kernel, spec
    for make, spec, *_ in cheating_kernels.CHEATS:
        yield "cheat", make(), spec
    for make in cheating_kernels.HONEST.values():
        yield "honest", make(), tiny_ops.PROJECT


def main() -> None:
    """Writes a line for each kernel; addresses and times in a reason become N."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    torch.manual_seed(0)
    found = {}
    for kind, kernel, spec in kernels():
        result = check_kernel(kernel, spec, spec.cases["smoke"][0], get_scheme("fp32"))
        reason = re.sub(r"\d+(\.\d+)?(e[-+]\d+)?|\b(nan|inf)\b", "N", result.reason)
        found[f"{kind} {spec.name}/{kernel.name}"] = [result.status, reason, len(result.labels)]
    write_whole(given.out, json.dumps(found, indent=1, allow_nan=False) + "\n")


if __name__ == "__main__":
    main()
