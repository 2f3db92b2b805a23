"""The verdict of every kernel of a small op in `tests/zoo`, as JSON, to compare two versions by.

    python results/check/verdicts.py --out before.json

Those of the lab's ops stand in check.json.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

from rooflab.bench.core.check import check_kernel
from rooflab.kernels._files import write_whole
from rooflab.reference.spec import get_scheme

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))


def entries() -> list[Any]:
    """The zoo's kernels of small ops."""
    for name in ("small", "cheats"):
        import_module(f"zoo.{name}")
    return [entry for entry in import_module("zoo.entries").ZOO if entry.small]


def main() -> None:
    """Writes a line for each kernel; addresses and times in a reason become N."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    torch.manual_seed(0)
    found = {}
    for entry in entries():
        result = check_kernel(entry.make(), entry.small, entry.small.cases["smoke"][0], get_scheme("fp32"))
        reason = re.sub(r"\d+(\.\d+)?(e[-+]\d+)?|\b(nan|inf)\b", "N", result.reason)
        found[f"{entry.kind}: {entry.id}"] = [result.status, reason, len(result.labels)]
    write_whole(given.out, json.dumps(found, indent=1, allow_nan=False) + "\n")


if __name__ == "__main__":
    main()
