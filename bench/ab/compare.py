"""`compare(my_fn, ref_fn, make_inputs)`: an A/B of any two functions, with no spec."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from rooflab.bench.ab import output
from rooflab.bench.ab.functions import make, named, pack
from rooflab.bench.ab.run import Result, Settings, run
from rooflab.bench.ab.sides import Comparison, Side
from rooflab.bench.ab.verdict import Outcome, Rules, exit_status
from rooflab.bench.records.record import Verdict

KEY = "function"


@dataclass(frozen=True)
class Compared:
    """What came of `compare`."""

    outcome: Outcome
    result: Result

    @property
    def verdict(self) -> Verdict:
        """FASTER, SLOWER, SAME, UNRESOLVED, INCORRECT, FAILED or INVALID, of the first function against the second."""
        return self.outcome.verdict

    @property
    def exit_status(self) -> int:
        """What `rooflab ab --strict` would end with: 0 for FASTER and SAME."""
        return exit_status([self.outcome], strict=True)

    def __str__(self) -> str:
        found = self.outcome
        mine, reference = self.result.comparison.b.label, self.result.comparison.a.label
        if found.effect is None:
            return f"{mine} against {reference}: {found.verdict}: {found.reason}"
        bounds = f"{output.percent(found.effect_low)} to {output.percent(found.effect_high)}"
        text = f"{mine} against {reference}: {found.verdict}: takes {output.percent(found.effect)} ({bounds}), "
        text += f"{found.pairs} pairs" + (f": {found.reason}" if found.reason else "")
        return f"{text}. {output.power([found])}" + (f" Stopped: {self.result.stopped}." if self.result.stopped else "")


def compare(
    my_fn: Callable[..., Any],
    ref_fn: Callable[..., Any],
    make_inputs: Callable[..., Any],
    *,
    pairs: int = 12,
    threshold: float = 0.02,
    floor_s: float = 0.5e-6,
    budget_s: float | None = None,
    kernel_s: float = 0.3,
    seed: int = 0,
    progress: Callable[[str], None] = lambda text: None,
) -> Compared:
    """Checks `my_fn` against `ref_fn` and says whether it is slower or faster, from pairs of fresh processes.

    `make_inputs(seed)` (or without arguments) gives a tuple, a mapping or one tensor, on the device that decides where
    both run; either function is called with the mapping's items as keywords or with the tuple in order, and returns a
    tensor or a tuple of them.  The functions must be importable by a fresh process: at the top of a module, or of a
    script whose own work stands under `if __name__ == "__main__":`; a lambda or a notebook's function travels by value.

    `threshold` is the ratio that matters, `floor_s` the absolute time; `budget_s` ends the run early with what it has,
    `kernel_s` is the time of one process' readings.  Raises `ValueError` on an argument that cannot be used; whatever
    the functions themselves do wrong becomes a verdict.
    """
    settings_rules = Rules(threshold, floor_s)
    first = named(make(make_inputs, seed))
    tensors = [value for value in first.values() if isinstance(value, torch.Tensor)]
    if not tensors:
        raise ValueError("make_inputs: expected at least one tensor, got none")
    packed = {name: pack(function) for name, function in (("reference", ref_fn), ("make_inputs", make_inputs))}
    path = [entry for entry in sys.path if entry]
    sides = [
        Side(_label(function, other), {}, functions={**packed, "fn": pack(function), "path": path})
        for function, other in ((ref_fn, "reference"), (my_fn, "mine"))
    ]
    settings = Settings(
        rules=settings_rules,
        pairs=pairs,
        budget_s=budget_s,
        kernel_s=kernel_s,
        seed=seed,
        device=str(tensors[0].device),
    )
    result = run(Comparison(sides[0], sides[1], (KEY,)), settings, progress)
    return Compared(result.outcomes[0], result)


def _label(function: Callable[..., Any], otherwise: str) -> str:
    name = getattr(function, "__name__", otherwise)
    return otherwise if name == "<lambda>" else name
