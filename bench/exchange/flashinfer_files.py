"""A flashinfer-bench data set, read: definitions, workloads and traces.

`definitions/<op_type>/*.json` say what a kernel computes, their Python `reference` text included, which nothing here
runs; `workloads/**/*.jsonl` give sizes and inputs; `traces/**/*.jsonl` hold results.  A workload line is a trace
without a solution.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rooflab.bench.exchange.files import get, parse_json, read_text

DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
    "int64": torch.int64,
    "int32": torch.int32,
    "int16": torch.int16,
    "int8": torch.int8,
    "bool": torch.bool,
}
"""float4_e2m1 has no place here: torch packs two of them in one element."""
INPUT_KINDS = ("random", "scalar", "safetensors")


@dataclass(frozen=True)
class Tensor:
    """An input or output of a definition."""

    shape: tuple[str, ...] | None
    """Names of axes; None for a scalar of Python."""
    dtype: str


@dataclass(frozen=True)
class Definition:
    """What a kernel is to compute."""

    name: str
    op_type: str
    constants: Mapping[str, int]
    """Axes of one size."""
    variables: tuple[str, ...]
    """Axes whose sizes a workload gives."""
    inputs: Mapping[str, Tensor]
    """In the order of the arguments of the reference's `run`."""
    outputs: Mapping[str, Tensor]
    reference: str
    """Python text that defines `run`."""

    def sizes(self, axes: Mapping[str, int]) -> dict[str, int]:
        """The size of every axis; `axes` has those that a workload gives."""
        return {**self.constants, **{name: axes[name] for name in self.variables}}

    def shape(self, name: str, axes: Mapping[str, int]) -> tuple[int, ...] | None:
        """The shape of an input or output; None for a scalar."""
        names = {**self.inputs, **self.outputs}[name].shape
        sizes = self.sizes(axes)
        return None if names is None else tuple(sizes[axis] for axis in names)

    def constant(self, *names: str) -> float | None:
        """The number that the reference assigns to a variable of one of these names, read and not run; None where it
        assigns none, or several that differ."""
        lowered = {name.lower() for name in names}
        found = set()
        for node in ast.walk(ast.parse(self.reference)):
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
                targets = {target.id.lower() for target in node.targets if isinstance(target, ast.Name)}
                if targets & lowered and isinstance(node.value.value, int | float):
                    found.add(float(node.value.value))
        return found.pop() if len(found) == 1 else None


@dataclass(frozen=True)
class Workload:
    """One set of sizes and inputs of a definition."""

    definition: str
    uuid: str
    axes: Mapping[str, int]
    inputs: Mapping[str, Mapping[str, Any]]
    """By input: `type` random, scalar (with `value`), or safetensors (with `path` and `tensor_key`)."""


@dataclass(frozen=True)
class Trace:
    """One result: what ran on which workload, and the evaluation as the file has it."""

    workload: Workload
    solution: str
    evaluation: Mapping[str, Any]
    place: str


@dataclass(frozen=True)
class DataSet:
    """What lies below a folder."""

    root: Path
    definitions: Mapping[str, Definition]
    workloads: Mapping[str, tuple[Workload, ...]]
    """By definition."""
    traces: tuple[Trace, ...]


def read_dataset(root: Path) -> DataSet:
    """The data set in a folder.  Raises `ValueError` naming file and place of what is malformed."""
    root = Path(root)
    if not (root / "definitions").is_dir():
        raise ValueError(f"flashinfer: expected a folder with definitions/ in it, got {str(root)!r}")
    definitions: dict[str, Definition] = {}
    for path in sorted((root / "definitions").rglob("*.json")):
        definition = _definition(parse_json(read_text(path), path.name), path.name)
        if definition.name in definitions:
            raise ValueError(f"{path.name}: a definition called {definition.name!r} was read before")
        definitions[definition.name] = definition
    workloads: dict[str, dict[str, Workload]] = {}
    traces = []
    for place, values in _lines(root / "workloads", root / "traces"):
        workload = _workload(values, place)
        known = definitions.get(workload.definition)
        missing = [name for name in (known.variables if known else ()) if name not in workload.axes]
        if missing:
            raise ValueError(f"{place}, workload.axes: expected a size of the axis {missing[0]!r}, got none")
        workloads.setdefault(workload.definition, {}).setdefault(workload.uuid, workload)
        if values.get("solution") is not None:
            evaluation = get(values, "evaluation", dict, place)
            traces.append(Trace(workload, str(values["solution"]), evaluation, place))
    listed = {name: tuple(own.values()) for name, own in workloads.items()}
    return DataSet(root, definitions, listed, tuple(traces))


def _lines(*folders: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    for folder in folders:
        for path in sorted(folder.rglob("*.jsonl")):
            for number, line in enumerate(read_text(path).splitlines(), 1):
                if line.strip():
                    place = f"{path.name}, line {number}"
                    values = parse_json(line, place)
                    if not isinstance(values, dict):
                        raise ValueError(f"{place}: expected an object, got {type(values).__name__}")
                    yield place, values


def _definition(values: Any, place: str) -> Definition:
    axes = get(values, "axes", dict, place)
    constants, variables = {}, []
    for name, axis in axes.items():
        kind = get(axis, "type", str, f"{place}, axes.{name}")
        if kind == "const":
            constants[name] = get(axis, "value", int, f"{place}, axes.{name}")
            if constants[name] < 0:
                raise ValueError(f"{place}, axes.{name}: expected a size of at least 0, got {constants[name]}")
        elif kind == "var":
            variables.append(name)
        else:
            raise ValueError(f"{place}, axes.{name}: expected the type const or var, got {kind!r}")
    reference = get(values, "reference", str, place)
    try:
        tree = ast.parse(reference)
    except SyntaxError as error:
        raise ValueError(f"{place}, reference, line {error.lineno}: not Python: {error.msg}") from error
    if not any(isinstance(node, ast.FunctionDef) and node.name == "run" for node in tree.body):
        raise ValueError(f"{place}, reference: expected a function named 'run'")
    sides = []
    for side in ("inputs", "outputs"):
        tensors = get(values, side, dict, place)
        sides.append({name: _tensor(tensor, axes, f"{place}, {side}.{name}") for name, tensor in tensors.items()})
    name, op_type = get(values, "name", str, place), get(values, "op_type", str, place)
    return Definition(name, op_type, constants, tuple(variables), sides[0], sides[1], reference)


def _tensor(values: Any, axes: Mapping[str, Any], place: str) -> Tensor:
    dtype = get(values, "dtype", str, place)
    if values.get("shape") is None:
        return Tensor(None, dtype)
    shape = get(values, "shape", list, place)
    unknown = [axis for axis in shape if not isinstance(axis, str) or axis not in axes]
    if unknown:
        raise ValueError(f"{place}.shape: expected names of axes, got {unknown[0]!r}")
    return Tensor(tuple(shape), dtype)


def _workload(values: Mapping[str, Any], place: str) -> Workload:
    workload = get(values, "workload", dict, place)
    where = f"{place}, workload"
    axes = get(workload, "axes", dict, where)
    for name in axes:
        if get(axes, name, int, f"{where}.axes") < 0:
            raise ValueError(f"{where}.axes.{name}: expected a size of at least 0, got {axes[name]}")
    inputs = get(workload, "inputs", dict, where)
    for name, source in inputs.items():
        kind = get(source, "type", str, f"{where}.inputs.{name}")
        if kind not in INPUT_KINDS:
            raise ValueError(f"{where}.inputs.{name}: expected the type {' or '.join(INPUT_KINDS)}, got {kind!r}")
        for key in {"scalar": ("value",), "safetensors": ("path", "tensor_key")}.get(kind, ()):
            get(source, key, (int, float, bool) if key == "value" else str, f"{where}.inputs.{name}")
    return Workload(get(values, "definition", str, place), get(workload, "uuid", str, where), axes, inputs)


def digest_text(dataset: DataSet) -> str:
    """A text that changes where the results do, for the id of an import."""
    return json.dumps([(trace.workload.uuid, trace.solution, trace.evaluation) for trace in dataset.traces])
