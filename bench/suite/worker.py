"""The process in which entries run: the runner asks it for one outcome at a time.

On a GPU it serves one entry and ends, so that a poisoned context ends with it.  Before the entry, it imports no torch
and no kernel of its own accord: the runner names the imports at the start, and tests name no imports.
"""

from __future__ import annotations

import importlib
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rooflab.bench.records.plain import plain
from rooflab.bench.suite.entries import Context, Outcome
from rooflab.bench.suite.running import ContextBroken


def answer(request: Mapping[str, Any]) -> Any:
    """The `Outcome` of a request, as JSON values.  An exception of the entry becomes its failure."""
    values = request["context"]
    verified = values["verified"]
    typed = {"out": Path(values["out"]), "earlier": tuple(values["earlier"])}
    context = Context(**{**values, **typed, "verified": None if verified is None else tuple(verified)})
    try:
        outcome = find(request["call"])(context, **request["arguments"])
    except ContextBroken as broken:
        outcome = Outcome("FAILED", str(broken), again=True)
    except importlib.import_module("rooflab.bench.check.failed").known_errors() as error:  # imports torch
        where = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{Path(where.filename).name}:{where.lineno} in {where.name}"
        traceback.print_exc()
        outcome = Outcome("FAILED", f"{type(error).__name__}: {error} ({place})")
    return plain(asdict(outcome))


def find(call: str) -> Callable[..., Any]:
    """The function that `module:function` names.  Raises `ValueError` if there is none."""
    module, _, name = call.partition(":")
    function: Callable[..., Any] | None = getattr(importlib.import_module(module), name, None)
    if function is None:
        raise ValueError(f"call: expected a function of {module}, got {name!r}")
    return function
