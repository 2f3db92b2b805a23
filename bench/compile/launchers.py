"""Finds a kernel launcher of any project by `path.py::function`, and makes its arguments from shapes and values."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from rooflab.bench.compile.cases import KernelCase
from rooflab.bench.compile.pretended import pretended_card
from rooflab.bench.compile.tensor_text import DTYPES, TENSOR_PATTERN, TensorText
from rooflab.kernels._user_files import IMPORT_ERRORS, import_file
from rooflab.reference.spec import SCHEMES, Case, get_scheme, scalar
from rooflab.roofline.names import values_by_name

INPUTS = "--inputs"
"""The name in a `Case` of the function that makes the arguments.  No parameter of a function has such a name."""


def function_of(text: str) -> Callable[..., Any]:
    """Returns the function at `path.py::name`.  Raises `ValueError` if the file or the function is missing."""
    path, name = check_launcher(text)
    function = getattr(_module(path.resolve()), name, None)
    if not callable(function):
        raise ValueError(f"function: expected a function {name!r} in {path}, got none")
    return function  # type: ignore[no-any-return]


def check_launcher(text: str) -> tuple[Path, str]:
    """Splits `path.py::name`.  Raises `ValueError` if the file is missing, or is not a program in Python."""
    source_file, _, name = text.partition("::")
    path = Path(source_file)
    if not name or path.suffix != ".py" or not path.is_file():
        raise ValueError(f"function: expected path.py::name with a Python file that is there, got {text!r}")
    try:
        compile(path.read_bytes(), path.name, "exec")
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"function: {path.name} cannot be compiled: {type(error).__name__}: {error}") from error
    return path, name


@cache
def _module(path: Path) -> ModuleType:
    try:
        with pretended_card():
            return import_file(path)
    except IMPORT_ERRORS as error:
        raise ValueError(f"function: {path.name} cannot be imported: {type(error).__name__}: {error}") from error


def selected(
    text: str, shapes: Iterable[str] | None, arguments: str, dtype: str, inputs: str | None = None
) -> KernelCase:
    """Returns the user's launcher as a `KernelCase`.  Its `op` is the file, and its `case` holds the arguments.

    An example of `shapes` is `x=64x96,weight=96:bf16`; a tensor without a dtype gets `dtype`.  `TensorText` describes
    the format of a tensor.  An example of `arguments` is `eps=1e-6,n=3,causal=true,scale=none,sizes=[1,2,3]`.
    `inputs` is a function `path.py::name` that makes all arguments instead.  Raises `ValueError` on another format.
    """
    dtype = dtype or "fp32"
    if dtype not in DTYPES:
        raise ValueError(f"dtype: expected one of {', '.join(DTYPES)}, got {dtype!r}")
    shape_texts = [tensor_text for tensor_text in ",".join(shapes or ()).split(",") if tensor_text]
    tensors = values_by_name(
        shape_texts, "shape: expected name=64x96 or name=64x96:bf16, each name once", lambda name, text: text
    )
    tensors = {name: str(TensorText.parse(name, text, dtype)) for name, text in tensors.items()}
    value_texts = texts_of(arguments)
    if repeated_names := tensors.keys() & value_texts.keys():
        raise ValueError(f"argument: expected {repeated_names.pop()} here or in --shape, got both")
    made_by = {} if inputs is None else {INPUTS: _maker(inputs, bool(tensors or value_texts))}
    source_file, _, name = text.partition("::")
    dtype_names = {tensor_spec.split(":")[1] for tensor_spec in tensors.values()}
    scheme_name = dtype_names.pop() if len(dtype_names) == 1 else dtype
    scheme = get_scheme(scheme_name if scheme_name in SCHEMES else "fp32")
    case = Case(**tensors, **value_texts, **made_by)
    return KernelCase(Path(source_file).name, name, case, scheme, Path(source_file).resolve())


def _maker(text: str, has_arguments: bool) -> str:
    """Returns `path.py::name` with an absolute path. Raises `ValueError` if there are other arguments beside it."""
    if has_arguments:
        raise ValueError(f"inputs: expected it without --shape and --argument, got both with {text!r}")
    source_file, _, name = text.partition("::")
    return f"{Path(source_file).resolve()}::{name}"


def texts_of(arguments: str) -> dict[str, str]:
    """Splits a text such as `eps=1e-6,causal=true,sizes=[1,2,3]` into a mapping from names to the texts of values."""

    def read(name: str, value: str) -> str:
        _value(value)
        return value

    expected_text = "argument: expected name=value, each name once"
    return values_by_name(filter(None, re.split(r",(?![^\[]*\])", arguments)), expected_text, read)


def _value(text: str) -> Any:
    try:
        return ast.literal_eval({"true": "True", "false": "False", "none": "None"}.get(text, text))
    except (ValueError, SyntaxError):
        if text.startswith("["):
            raise ValueError(f"expected a list, got {text!r}") from None
        return scalar(text)


def inputs_of(case: Mapping[str, str], seed: int) -> dict[str, Any]:
    """Returns the arguments of an input case: CPU tensors with random values, and the other values.

    If the case names a function that makes the arguments, calls it.  Raises `ValueError` if it does not make them."""
    if INPUTS in case:
        return _made(case[INPUTS], seed)
    generator, inputs = torch.Generator().manual_seed(seed), dict[str, Any]()
    for name, case_value in case.items():
        is_tensor = TENSOR_PATTERN.fullmatch(case_value) is not None
        inputs[name] = TensorText.parse(name, case_value).filled(generator) if is_tensor else _value(case_value)
    return inputs


def _made(text: str, seed: int) -> dict[str, Any]:
    """Calls the function at `path.py::name` with `seed`, if it takes one, and returns the arguments that it makes."""
    try:
        function = function_of(text)
    except ValueError as error:
        raise ValueError(f"inputs: {str(error).removeprefix('function: ')}") from error
    torch.manual_seed(seed)
    takes_seed = "seed" in inspect.signature(function).parameters
    try:
        with pretended_card():
            made_inputs = function(seed=seed) if takes_seed else function()
    except IMPORT_ERRORS as error:
        raise ValueError(f"inputs: {text.rpartition('/')[2]} raised {type(error).__name__}: {error}") from error
    if not isinstance(made_inputs, dict) or not all(isinstance(name, str) for name in made_inputs):
        got_text = f"a value of type {type(made_inputs).__name__}"
        raise ValueError(f"inputs: expected a dict of arguments by name from {text.rpartition('/')[2]}, got {got_text}")
    return made_inputs


def check_named(function: Callable[..., Any], inputs: Mapping[str, Any]) -> None:
    """Raises `ValueError` if the names in `inputs` do not match the parameters of `function`."""
    try:
        inspect.signature(function).bind(**inputs)
    except TypeError as error:
        name = getattr(function, "__name__", str(function))
        raise ValueError(f"shape: expected the arguments of {name}{inspect.signature(function)}: {error}") from None
