"""Runs a study by its name.  Writes a Markdown page with all studies and a figure for each."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rooflab.bench.base.plain import Marked, markdown_cell, markdown_table
from rooflab.bench.core import Environment, why_noisy
from rooflab.bench.latency.study import Lab, Study
from rooflab.bench.report.pictures.canvas import where
from rooflab.kernels._files import write_whole
from rooflab.kernels._waiting import run_times, waiting_since


def run_study(name: str, lab: Lab) -> Study:
    """Runs the study `name` of `STUDIES`.  The verdict is NOISY if the machine was busy."""
    lab.engines.clear()
    study_module = importlib.import_module(f"rooflab.bench.latency.studies.{name.replace('-', '_')}")
    old_run_times = run_times()
    study: Study = replace(study_module.run(lab), name=name)
    # Its steps differ in any case, so that only waiting threads are noise.
    noise_reason = why_noisy((), waiting_since(old_run_times))
    return replace(study, verdict="NOISY", number=noise_reason) if noise_reason else study


def write_page(studies: Sequence[Study], lab: Lab, records: Path) -> Path:
    """Writes `README.md` beside the studies' figures and records.  Returns its path."""
    page_folder, environment = records.parent, Environment.now()
    facts: Any = environment.to_dict()
    is_on_gpu = lab.engines[-1][2] == "cuda"
    machine_name = facts["gpu"]["name"] if is_on_gpu else f"{facts['cpu']}, {facts['cores']} cores"
    # A model and a folder have their names alone, as a path means nothing to the reader.
    command_options = [f"--model {Path(lab.model).name}"] * (lab.model != Lab.model)
    command_options += ["--dummy"] * lab.dummy + ["--smoke"] * lab.quick
    command_options += [f"--device {lab.options['device']}"] * bool(lab.options.get("device"))
    command = " ".join(["rooflab study --all", *command_options, f"--out {page_folder.name}"])
    lines = [
        "# What is said of LLM inference, and what holds here",
        "",
        f"Made by `{command}` on {machine_name}, torch {facts['torch']}. {where(environment)} The numbers are also in "
        f"[{records.name}]({records.name}), a record for each study. Full lines are measured, a band is the 20th to "
        "the 80th percentile, dashed lines are predicted.",
        "",
        *(["**A run in short, for CI: its sizes are so small that its verdicts say nothing.**", ""] * lab.quick),
        *markdown_table(
            ("claim", "verdict", "with the number"),
            [
                (Marked(f"[{markdown_cell(study.claim)}](#{study.name})"), study.verdict, study.number)
                for study in studies
            ],
        ),
    ]
    for study in studies:
        lines += ["", f"## {study.name}", "", f"**{study.claim}** ({study.source}).", ""]
        lines += [f"{study.verdict.capitalize()}: {study.number}. {study.about}.", "", f"![]({study.name}.png)", "", ""]
        table_cells = [[f"{x:.4g}" if isinstance(x, float) else x for x in row.values()] for row in study.rows]
        lines += markdown_table(tuple(study.rows[0]), table_cells)
    return write_whole(page_folder / "README.md", "\n".join(lines) + "\n")
