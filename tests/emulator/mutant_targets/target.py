"""The type of a target: a kernel whose mutants are emulated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

BARRIERS = r"\bbar(rier)?\.(warp\.)?sync\b"
"""Of all warps or a partition's; Gluon emits more of them than are needed."""


@dataclass(frozen=True)
class Target:
    """A kernel of the registry, and cases that pass all of it at least three times round its pipeline."""

    op: str
    kernel: str
    cases: tuple[str, ...]
    config: dict[str, Any] | None = None
    quick: tuple[str, ...] = ()
    """Mutants that `make test` runs."""
    options: tuple[tuple[str, Any], ...] = ()
    """Of the request, beside these."""
