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
from rooflab.kernels._user_files import IMPORT_ERRORS, import_file
from rooflab.reference.spec import Case, get_scheme, scalar
from rooflab.roofline.names import values_by_name

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_TENSOR_PATTERN = re.compile(rf"\d+(x\d+)*:({'|'.join(DTYPES)})")


def function_of(text: str) -> Callable[..., Any]:
    """Returns the function at `path.py::name`.  Raises `ValueError` if the file or the function is missing."""
    source_file, _, name = text.partition("::")
    path = Path(source_file)
    if not name or path.suffix != ".py" or not path.is_file():
        raise ValueError(f"function: expected path.py::name with a Python file that is there, got {text!r}")
    function = getattr(_module(path.resolve()), name, None)
    if not callable(function):
        raise ValueError(f"function: expected a function {name!r} in {source_file}, got none")
    return function  # type: ignore[no-any-return]


@cache
def _module(path: Path) -> ModuleType:
    try:
        with pretended_card():
            return import_file(path)
    except IMPORT_ERRORS as error:
        raise ValueError(f"function: {path.name} cannot be imported: {type(error).__name__}: {error}") from error


def selected(text: str, shapes: Iterable[str] | None, arguments: str, dtype: str) -> KernelCase:
    """Returns the user's launcher as a `KernelCase`.  Its `op` is the file, and its `case` holds the arguments.

    An example of `shapes` is `x=64x96,weight=96:bf16`; a tensor without a dtype gets `dtype`.  An example of
    `arguments` is `eps=1e-6,n=3,causal=true,scale=none,sizes=[1,2,3]`.  Raises `ValueError` on another format.
    """
    dtype = dtype or "fp32"
    if dtype not in DTYPES:
        raise ValueError(f"dtype: expected one of {', '.join(DTYPES)}, got {dtype!r}")

    def shape(name: str, text: str) -> str:
        tensor_text = text if ":" in text else f"{text}:{dtype}"
        if not _TENSOR_PATTERN.fullmatch(tensor_text):
            raise ValueError
        return tensor_text

    expected_text = f"shape: expected name=64x96 or name=64x96:{'|'.join(DTYPES)}, each name once"
    tensors = values_by_name(filter(None, ",".join(shapes or ()).split(",")), expected_text, shape)
    value_texts = texts_of(arguments)
    if repeated_names := tensors.keys() & value_texts.keys():
        raise ValueError(f"argument: expected {repeated_names.pop()} here or in --shape, got both")
    source_file, _, name = text.partition("::")
    dtype_names = {tensor_spec.partition(":")[2] for tensor_spec in tensors.values()}
    scheme = get_scheme(dtype_names.pop() if len(dtype_names) == 1 else dtype)
    return KernelCase(Path(source_file).name, name, Case(**tensors, **value_texts), scheme, Path(source_file).resolve())


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
    """Returns the arguments of an input case: CPU tensors of normally distributed numbers, and the other values."""
    generator, inputs = torch.Generator().manual_seed(seed), dict[str, Any]()
    for name, case_value in case.items():
        if not _TENSOR_PATTERN.fullmatch(case_value):
            inputs[name] = _value(case_value)
            continue
        shape_text, _, dtype = case_value.partition(":")
        inputs[name] = torch.randn([*map(int, shape_text.split("x"))], generator=generator).to(DTYPES[dtype])
    return inputs


def check_named(function: Callable[..., Any], inputs: Mapping[str, Any]) -> None:
    """Raises `ValueError` if the names in `inputs` do not match the parameters of `function`."""
    try:
        inspect.signature(function).bind(**inputs)
    except TypeError as error:
        name = getattr(function, "__name__", str(function))
        raise ValueError(f"shape: expected the arguments of {name}{inspect.signature(function)}: {error}") from None
