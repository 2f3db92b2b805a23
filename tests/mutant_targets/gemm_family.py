"""Products in fp8, of packed weights, fused and grouped."""

from __future__ import annotations

from mutant_targets.target import Target

TARGETS: dict[str, Target] = {}
