"""Compares any two functions in an A/B run: `compare(my_fn, ref_fn, make_inputs)`.

The functions become an op, so the usual check and timer apply.  A fresh process imports a function from its module or
script, so that Triton finds a kernel's source.  A lambda, or a function in a notebook, is sent by value with
cloudpickle.
"""

from __future__ import annotations

import base64
import inspect
import pickle
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle
import torch

from rooflab.bench.ab.ab_run import AbResult, run
from rooflab.bench.ab.output import power
from rooflab.bench.ab.pairs import AbSettings
from rooflab.bench.ab.sides import Comparison, Side, Target
from rooflab.bench.ab.verdict import Outcome, Rules, exit_status
from rooflab.bench.core import FunctionOp, Verdict
from rooflab.kernels._user_files import import_file
from rooflab.roofline.numbers import change

COMPARISON_KEY, SCHEME = "function", "as made"
"""Names of the comparison of two functions and of its scheme.  The caller chooses the dtypes of the tensors."""


@dataclass(frozen=True)
class Compared:
    """Holds the result of `compare`."""

    outcome: Outcome
    result: AbResult

    @property
    def verdict(self) -> Verdict:
        """Returns the verdict on `my_fn`: FASTER, SLOWER, SAME, UNRESOLVED, INCORRECT, FAILED or INVALID."""
        return self.outcome.verdict

    @property
    def exit_status(self) -> int:
        """Returns the exit status of `rooflab ab --strict`: 0 for FASTER and SAME."""
        return exit_status([self.outcome], strict=True)

    def __str__(self) -> str:
        outcome = self.outcome
        headline = f"{self.result.comparison.b.label} against {self.result.comparison.a.label}: {outcome.verdict}"
        if outcome.effect is None:
            return f"{headline}: {outcome.reason}"
        bounds_text = f"{change(outcome.effect_low)} to {change(outcome.effect_high)}"
        result_text = f"{headline}: takes {change(outcome.effect)} ({bounds_text}), {outcome.pairs} pairs"
        result_text += f": {outcome.reason}" if outcome.reason else ""
        stopped_note = f" Stopped: {self.result.stopped}." if self.result.stopped else ""
        return f"{result_text}. {power([outcome])}{stopped_note}"


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
    progress: Callable[[str], None] | None = None,
) -> Compared:
    """Checks `my_fn` against `ref_fn`, and measures in pairs of fresh processes whether `my_fn` is slower or faster.

    `make_inputs(seed)` or `make_inputs()` returns one tensor, a tuple of positional arguments, or a mapping of keyword
    arguments.  Both functions run on the device of these inputs.  They return a tensor or a tuple of tensors.  A script
    must guard its own work with `if __name__ == "__main__":`, because the fresh processes import it.

    A difference counts if it exceeds the ratio `threshold` and the time `floor_s`.  Each process measures for
    `kernel_s` seconds.  After `budget_s` seconds the run ends with fewer pairs.  `progress` is called with a line for
    each process; by default the lines go to standard error.

    Raises `ValueError` on an argument that cannot be used.  A fault of the functions becomes a verdict."""
    from rooflab.bench.show import note  # not in the processes that measure

    verdict_rules = Rules(threshold, floor_s)
    items = make(make_inputs, seed)
    values = items.values() if isinstance(items, Mapping) else items if isinstance(items, tuple | list) else (items,)
    tensors = [input_value for input_value in values if isinstance(input_value, torch.Tensor)]
    if not tensors:
        raise ValueError("make_inputs: expected at least one tensor, got none")
    functions = {name: pack(function) for name, function in (("reference", ref_fn), ("make_inputs", make_inputs))}
    path = [path_entry for path_entry in sys.path if path_entry]
    sides = [
        Side(
            function_label := _label(function, default_label),
            {COMPARISON_KEY: Target(COMPARISON_KEY, function_label, "", SCHEME)},
            functions={**functions, "fn": pack(function), "path": path},
        )
        for function, default_label in ((ref_fn, "reference"), (my_fn, "mine"))
    ]
    ab_settings = AbSettings(verdict_rules, pairs, budget_s, kernel_s, seed, str(tensors[0].device))
    ab_result = run(Comparison(sides[0], sides[1]), ab_settings, progress or note)
    return Compared(ab_result.outcomes[0], ab_result)


def _label(function: Callable[..., Any], otherwise: str) -> str:
    name = getattr(function, "__name__", otherwise)
    return otherwise if name == "<lambda>" else name


def prepare_functions(functions: Mapping[str, Any], seed: int) -> FunctionOp:
    """Makes an op from three user functions that another process sent: `fn`, `reference` and `make_inputs`.  Raises
    `ValueError` if no input is a tensor."""
    fn, reference, make_inputs = (unpack(functions[name]) for name in ("fn", "reference", "make_inputs"))
    return FunctionOp.of(fn, reference, partial(make, make_inputs), seed)


SCRIPT_MODULE = "__rooflab_script__"
"""The name of a script's module in the fresh process.  It is not `__main__`, so the guarded code does not run."""


def pack(function: Callable[..., Any]) -> dict[str, str]:
    """Returns data from which a fresh process rebuilds the function.  Raises `ValueError` if this is not possible."""
    name = getattr(function, "__qualname__", "")
    main_module = sys.modules["__main__"]
    file = Path(getattr(main_module, "__file__", None) or "")
    if name and "<" not in name and _find(main_module, name) is function and file.is_file():
        return {"script": str(file.resolve()), "name": name}
    try:  # by its name if it is at the top of a module, else by value
        return {"pickle": base64.b64encode(cloudpickle.dumps(function)).decode()}
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        expected_text = f"{name or function!r} at the top of a module or script, so that a fresh process can import it"
        raise ValueError(f"function: expected {expected_text}, got one that cannot travel: {error}") from error


def unpack(packed: Mapping[str, str]) -> Callable[..., Any]:
    """Rebuilds a function, in another process, from the data that `pack` returned."""
    if "pickle" in packed:
        function: Callable[..., Any] = pickle.loads(base64.b64decode(packed["pickle"]))
        return function
    if SCRIPT_MODULE not in sys.modules:
        sys.modules[SCRIPT_MODULE] = import_file(Path(packed["script"]))
    script_function: Callable[..., Any] = _find(sys.modules[SCRIPT_MODULE], packed["name"])
    return script_function


def _find(module: Any, name: str) -> Any:
    for attribute_name in name.split("."):
        module = getattr(module, attribute_name, None)
    return module


def make(make_inputs: Callable[..., Any], seed: int) -> Any:
    """Returns `make_inputs(seed)`, or `make_inputs()` if it takes no argument.  Seeds torch's generators first."""
    torch.manual_seed(seed)
    return make_inputs(seed) if inspect.signature(make_inputs).parameters else make_inputs()
