"""The page of all studies: from each claim to its figure, in Markdown beside the figures."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rooflab.bench.latency.study import Lab, Study
from rooflab.bench.records.environment import snapshot
from rooflab.bench.records.files import write_whole

STUDIES = (
    "kv-cache", "intensity", "batching", "paging", "prefix", "chunking", "fusion", "quantisation", "launch-bound",
    "batch-invariance",
)  # fmt: skip


def run_study(name: str, lab: Lab) -> Study:
    """What a study of `STUDIES` finds.  Raises `ValueError` on another name."""
    if name not in STUDIES:
        raise ValueError(f"study: expected one of {', '.join(STUDIES)}, got {name!r}")
    module = importlib.import_module(f"rooflab.bench.latency.studies.{name.replace('-', '_')}")
    study: Study = module.run(lab)
    return study


def write_page(studies: Sequence[Study], folder: Path) -> Path:
    """Writes figures and `README.md`, and returns its path."""
    environment = snapshot()
    fields: Any = environment.record_fields()
    about = fields["environment"]
    lines = [
        "# What is said of LLM inference, and what holds here",
        "",
        f"Made by `rooflab study --all --out {folder.name}` on {about['cpu']}, {about['cores']} cores, torch "
        f"{about['torch']}, at commit {str(fields['commit'])[:7]}{' with changes' if fields['dirty'] else ''}. Full "
        "lines are measured, a band is the 20th to the 80th percentile, dashed lines are predicted. What stands "
        "under H100 is arithmetic with kernel times that others published; nothing ran on one.",
        "",
        "| claim | verdict | with the number |",
        "|---|---|---|",
        *(f"| [{study.claim}](#{study.name}) | {study.verdict} | {study.number} |" for study in studies),
    ]
    for study in studies:
        study.draw(folder)
        lines += ["", f"## {study.name}", "", f"**{study.claim}** ({study.source}).", ""]
        lines += [f"{study.verdict.capitalize()}: {study.number}. {study.about}.", "", f"![]({study.name}.png)", ""]
        lines += _table(study.rows)
    return write_whole(folder / "README.md", "\n".join(lines) + "\n")


def _table(rows: Sequence[dict[str, Any]]) -> list[str]:
    groups: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(tuple(row), []).append(row)
    lines: list[str] = []
    for names, own in groups.items():
        lines += ["", f"| {' | '.join(names)} |", f"|{'---|' * len(names)}"]
        lines += [f"| {' | '.join(_text(row[name]) for name in names)} |" for row in own]
    return lines


def _text(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
