"""Checks that the GPU (card) works, and records machine and software: `python -m rooflab.bench.suite.card_answers`."""

from __future__ import annotations

from typing import Any

import torch

from rooflab.bench.core import Environment
from rooflab.bench.suite.entries import Context, EntryOutcome
from rooflab.bench.suite.state import ENVIRONMENT
from rooflab.bench.suite.step import context_of, end, parser, write_json
from rooflab.roofline.device import identify


def environment(context: Context) -> EntryOutcome:
    """Writes the machine and its software to the run's `environment.json`, and checks that the device works."""
    machine = Environment.now()
    if context.device == "cuda" and machine.gpu is None:
        return EntryOutcome("FAILED", "torch finds no CUDA device")
    write_json(context.run / ENVIRONMENT, machine.to_dict() | {"tree": machine.tree()})
    environment_figures: dict[str, Any] = {"python": machine.python, "torch": machine.torch, "triton": machine.triton}
    if machine.gpu is not None:
        device = identify(machine.gpu.name)
        environment_figures |= {"gpu": machine.gpu.name, "driver": machine.gpu.driver, "l2_bytes": machine.gpu.l2_bytes}
        environment_figures["l2_bytes in roofline/device.py"] = device.l2_bytes if device else None
    return _answers(context, environment_figures)


def _answers(context: Context, figures: dict[str, Any]) -> EntryOutcome:
    ones_matrix = torch.ones(1000, 1000, device=context.device)
    matrix_sum = float((ones_matrix @ ones_matrix).sum())
    if matrix_sum != 1e9:
        return EntryOutcome("FAILED", f"the device computes {matrix_sum} where 1e9 was expected", figures=figures)
    return EntryOutcome(figures=figures)


if __name__ == "__main__":
    options = parser(__doc__.splitlines()[0])
    options.add_argument("--probe", action="store_true", help="only ask whether the card answers")
    arguments = options.parse_args()
    end(context_of(arguments), (lambda context: _answers(context, {})) if arguments.probe else environment)
