"""The kernels whose mutants the emulator must flag, and the mutants that are redundant, with the argument for each."""

from __future__ import annotations

import json
from pathlib import Path

from mutant_targets import attention, gemm, gemm_family, other_ops
from mutant_targets.target import Target

FILES = (attention, gemm, gemm_family, other_ops)
TARGETS: dict[str, Target] = {name: target for file in FILES for name, target in file.TARGETS.items()}
REDUNDANT: dict[str, dict[str, str]] = {
    name: {mutant: reason for reason, mutants in reasons.items() for mutant in mutants}
    for file in sorted(Path(__file__).parent.glob("redundant_*.json"))
    for names, reasons in json.loads(file.read_text()).items()
    for name in names.split(", ")
}
"""Of a target: the mutants that order nothing, each with the reason.  In the files a reason stands once for all
its mutants, and once for targets that share all reasons."""
