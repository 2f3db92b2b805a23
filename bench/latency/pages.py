"""The page of all studies: from each claim to its figure, in Markdown beside the figures."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rooflab.bench.base.plain import Marked, markdown_cell, markdown_table
from rooflab.bench.core import Environment, why_noisy
from rooflab.bench.latency.study import Lab, Study
from rooflab.kernels._files import write_whole
from rooflab.kernels._waiting import run_times, waiting_since


def run_study(name: str, lab: Lab) -> Study:
    """What a study of `STUDIES` finds."""
    lab.engines.clear()
    module = importlib.import_module(f"rooflab.bench.latency.studies.{name.replace('-', '_')}")
    began = run_times()
    study: Study = replace(module.run(lab), name=name)
    # Its steps differ in any case, so that only waiting threads are noise.
    why = why_noisy((), waiting_since(began))
    return replace(study, verdict="NOISY", number=why) if why and study.verdict != "not tested" else study


def write_page(studies: Sequence[Study], lab: Lab, records: Path) -> Path:
    """Writes `README.md` beside the figures and the records of the studies, and returns its path."""
    folder = records.parent
    fields: Any = Environment.now().record_fields()
    about = fields["environment"]
    gpu = lab.engines[-1][2] == "cuda"
    machine = about["gpu"]["name"] if gpu else f"{about['cpu']}, {about['cores']} cores"
    lines = [
        "# What is said of LLM inference, and what holds here",
        "",
        f"Made by `{_command(lab, folder)}` on {machine}, torch {about['torch']}, at commit "
        f"{str(fields['commit'])[:7]}{' with changes' if fields['dirty'] else ''}. The numbers are also in "
        f"[{records.name}]({records.name}), a record for each study. Full lines are measured, a band is the 20th to "
        "the 80th percentile, dashed lines are predicted. What stands under H100 is arithmetic with kernel times that "
        "others published.",
        "",
        *(["**A run in short, for CI: its sizes are so small that its verdicts say nothing.**", ""] * lab.quick),
        *markdown_table(
            ("claim", "verdict", "with the number"),
            [(Marked(f"[{markdown_cell(own.claim)}](#{own.name})"), own.verdict, own.number) for own in studies],
        ),
    ]
    for study in studies:
        lines += ["", f"## {study.name}", "", f"**{study.claim}** ({study.source}).", ""]
        lines += [f"{study.verdict.capitalize()}: {study.number}. {study.about}.", "", f"![]({study.name}.png)", ""]
        for names, rows in study.tables():
            cells = [[f"{value:.4g}" if isinstance(value, float) else value for value in row.values()] for row in rows]
            lines += ["", *markdown_table(names, cells)]
    return write_whole(folder / "README.md", "\n".join(lines) + "\n")


def _command(lab: Lab, folder: Path) -> str:
    """Makes the page again; a model and a folder by name, because a path means nothing to the reader."""
    words = ["rooflab study --all"]
    words += [f"--model {Path(lab.model).name}"] if lab.model != Lab.model else []
    words += [f"--{name}" for name, given in (("dummy", lab.dummy), ("smoke", lab.quick)) if given]
    words += [f"--device {lab.options['device']}"] if lab.options.get("device") else []
    return " ".join([*words, f"--out {folder.name}"])
