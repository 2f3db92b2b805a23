"""Functions as sides of an A/B: how they reach a fresh process, and how they are called there.

A function of an importable module travels by its name, one at the top of a script by the script's path, so that a
Triton kernel finds its source; any other (a lambda, a notebook's) travels by value, through cloudpickle.
"""

from __future__ import annotations

import base64
import importlib
import importlib.util
import inspect
import pickle
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import cloudpickle
import torch

SCRIPT = "__rooflab_script__"
"""What a script is called in the fresh process: not `__main__`, so that what it guards by that name does not run."""
Function = Callable[..., Any]


def pack(function: Function) -> dict[str, str]:
    """What a fresh process needs to have the same function.  Raises `ValueError` where it cannot travel."""
    name = getattr(function, "__qualname__", "")
    module = sys.modules.get(getattr(function, "__module__", "") or "")
    if module is not None and "<" not in name and _find(module, name) is function:
        if module.__name__ != "__main__":
            return {"module": module.__name__, "name": name}
        file = getattr(module, "__file__", None)
        if file is not None and Path(file).is_file():
            return {"script": str(Path(file).resolve()), "name": name}
    try:
        return {"pickle": base64.b64encode(cloudpickle.dumps(function)).decode()}
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise ValueError(
            f"function: expected {name or function!r} at the top of a module or script, so that a fresh process can "
            f"import it, got one that cannot travel: {error}"
        ) from error


def unpack(packed: Mapping[str, str]) -> Function:
    """The inverse of `pack`, in another process."""
    if "pickle" in packed:
        function: Function = pickle.loads(base64.b64decode(packed["pickle"]))
        return function
    if "module" in packed:
        module = importlib.import_module(packed["module"])
    else:
        module = sys.modules.get(SCRIPT) or _load_script(Path(packed["script"]))
    found: Function = _find(module, packed["name"])
    return found


def _load_script(path: Path) -> Any:
    sys.path.insert(0, str(path.parent))  # as Python does for a script
    spec = importlib.util.spec_from_file_location(SCRIPT, path)
    assert spec is not None and spec.loader is not None, "a script that ran is a file of Python"
    module = importlib.util.module_from_spec(spec)
    sys.modules[SCRIPT] = module
    spec.loader.exec_module(module)
    return module


def _find(module: Any, name: str) -> Any:
    for part in name.split("."):
        module = getattr(module, part, None)
    return module


def make(make_inputs: Function, seed: int) -> Any:
    """Inputs for a seed; a `make_inputs` without arguments is called with torch's own generators seeded."""
    torch.manual_seed(seed)
    return make_inputs(seed) if inspect.signature(make_inputs).parameters else make_inputs()


def named(inputs: Any) -> dict[str, Any]:
    """Inputs by name: a mapping's own, `arg0`, `arg1`... for a sequence or for the one argument."""
    if isinstance(inputs, Mapping):
        return dict(inputs)
    values = inputs if isinstance(inputs, tuple | list) else (inputs,)
    return {f"arg{index}": value for index, value in enumerate(values)}


def by_name(function: Function, made: Any) -> Function:
    """`function` as one of keyword arguments, called with a mapping's items as they are, and else in order."""
    keywords = isinstance(made, Mapping)

    def call(**inputs: Any) -> Any:
        return function(**inputs) if keywords else function(*inputs.values())

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    call.__signature__ = inspect.Signature([inspect.Parameter(name, kind) for name in named(made)])  # type: ignore[attr-defined]
    return call
