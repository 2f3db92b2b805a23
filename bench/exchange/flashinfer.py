"""Reads flashinfer-bench's results: a folder with definitions and traces.

`definitions/<op_type>/*.json` define what a kernel computes; `traces/**/*.jsonl` hold one result per line.  The reader
recognises a definition by its type and inputs.  It never runs the Python text; it only finds a norm's epsilon in it.
"""

from __future__ import annotations

import ast
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from rooflab.bench.core import Record, Status
from rooflab.bench.exchange import files
from rooflab.reference.spec import DTYPE_NAMES, Case

TOOL = "flashinfer-bench"
STATUSES: Mapping[str, Status] = {
    "PASSED": "OK",
    "INCORRECT_SHAPE": "INCORRECT",
    "INCORRECT_NUMERICAL": "INCORRECT",
    "INCORRECT_DTYPE": "INCORRECT",
    "RUNTIME_ERROR": "RUNTIME_ERROR",
    "COMPILE_ERROR": "COMPILE_ERROR",
    "TIMEOUT": "TIMEOUT",
}
"""flashinfer-bench's status to our status.  `checked_by` stays `none`: its tolerance accepts more than ours."""
OPS: Mapping[str, tuple[tuple[str, ...], frozenset[str]]] = {
    "gemm": (("gemm",), frozenset({"A", "B"})),
    "rmsnorm": (("rmsnorm", "norm"), frozenset({"hidden_states", "weight"})),
    "fused_add_rmsnorm": (("rmsnorm", "norm", "fused_add"), frozenset({"hidden_states", "residual", "weight"})),
    "silu_and_mul": (("activation", "silu_and_mul"), frozenset({"input"})),
    "rope": (("rope",), frozenset({"q", "k", "cos_sin_cache", "positions"})),
    "paged_attention": (("gqa_paged",), frozenset({"q", "k_cache", "v_cache", "kv_indptr", "kv_indices", "sm_scale"})),
    "mla_decode": (
        ("mla_paged",),
        frozenset({"q_nope", "q_pe", "ckv_cache", "kpe_cache", "kv_indptr", "kv_indices", "sm_scale"}),
    ),
    "flash_attention": (("gqa_ragged",), frozenset({"q", "k", "v", "qo_indptr", "kv_indptr", "sm_scale"})),
    "sample": (("sampling",), frozenset({"probs"})),
}
"""For each of our ops: prefixes of a definition's type, and the inputs that the definition must have."""
OPTIONAL = frozenset({"eps", "kv_last_page_len", "qo_indptr", "top_k", "top_p", "min_p"})
"""Other inputs that a definition may have."""
ASIDE = frozenset({"lse", "cos_sin_cache", "top_p", "min_p", "eps"})
"""Small fp32 tensors that do not decide a definition's scheme."""


class Tensor(NamedTuple):
    """An input or output of a definition."""

    shape: tuple[str, ...] | None
    """Names of axes; None for a Python scalar."""
    dtype: str


@dataclass(frozen=True)
class Definition:
    """The definition of a kernel's computation."""

    name: str
    op_type: str
    constants: Mapping[str, int]
    """Axes with a fixed size, and that size."""
    variables: tuple[str, ...]
    """Axes whose sizes come from a workload."""
    inputs: Mapping[str, Tensor]
    outputs: Mapping[str, Tensor]
    eps: float | None
    """The number that the Python text assigns to an epsilon; None if it assigns no number, or different numbers."""

    @property
    def op(self) -> tuple[str | None, str]:
        """Our op that computes the definition, and ""; or None, and the reason why no op does."""
        of_type = {op: inputs for op, (types, inputs) in OPS.items() if self.op_type.startswith(types)}
        names = {"hidden_states" if "norm" in self.op_type and name in ("input", "x") else name for name in self.inputs}
        if not of_type:
            return None, f"no op here computes {self.op_type!r}"
        fitting = [op for op, inputs in of_type.items() if inputs <= names <= inputs | OPTIONAL]
        if not fitting:
            wanted = " or ".join(", ".join(sorted(inputs)) for inputs in of_type.values())
            return None, f"its inputs are {', '.join(self.inputs)}, and an op here takes {wanted}"
        reason = self._unlike(fitting[0])
        return (None, reason) if reason else (fitting[0], "")

    def _unlike(self, op: str) -> str:
        """Why the definition is not `op` although its inputs match; "" if the definition is `op`."""
        shapes = {name: tensor.shape or () for name, tensor in self.inputs.items()}
        if op == "gemm" and not (len(shapes["A"]) == len(shapes["B"]) == 2 and shapes["A"][1] in shapes["B"]):
            return f"A {list(shapes['A'])} and B {list(shapes['B'])} share no axis to sum over"
        if "norm" in op and not any(len(shape) == 2 for shape in shapes.values()):
            return "none of its inputs has two axes, rows and hidden size"
        if op == "silu_and_mul" and not self.name.startswith(op):
            return f"{self.name} is not silu_and_mul"
        return "" if self.scheme else f"its dtypes are {', '.join(self._dtypes)}, which no scheme here has"

    @property
    def _dtypes(self) -> list[str]:
        tensors = {**self.inputs, **self.outputs}.items()
        counted = {tensor.dtype for name, tensor in tensors if tensor.shape is not None and name not in ASIDE}
        return sorted(name for name in counted if not name.startswith(("int", "bool")))

    @property
    def scheme(self) -> str | None:
        """The scheme whose tensors all have the definition's one float dtype; None if there is no such scheme."""
        known = {str(dtype).removeprefix("torch."): name for dtype, name in DTYPE_NAMES.items()}
        return known.get(self._dtypes[0]) if len(self._dtypes) == 1 else None

    def case(self, axes: Mapping[str, int]) -> Case:
        """Our case with these sizes; or, for an op without one, a case with the definition's name and sizes."""
        op, sizes = self.op[0], {**self.constants, **axes}
        shapes = {name: tensor.shape or () for name, tensor in self.inputs.items()}
        if op == "gemm":
            (m, k), b = shapes["A"], shapes["B"]
            layout, n = ("NT", b[0]) if k == b[1] else ("NN", b[1])
            return Case(M=sizes[m], N=sizes[n], K=sizes[k], layout=layout, bias=False)
        if op in ("rmsnorm", "fused_add_rmsnorm") and self.eps is not None and "eps" not in self.inputs:
            rows, hidden = next(shape for shape in shapes.values() if len(shape) == 2)
            offset = {"weight_offset": 1.0} if "gemma" in self.name else {}  # Gemma's norm adds one to the weight
            return Case(T=sizes[rows], H=sizes[hidden], eps=self.eps, **offset)
        return files.make_case({"definition": self.name, **axes})

    def row(self, traces: int) -> dict[str, Any]:
        """Its name and type, and our op that computes it or the reason why no op does."""
        op, reason = self.op
        row = {"definition": self.name, "op_type": self.op_type, "op": op, "scheme": self.scheme}
        return row | {"traces": traces, "reason": reason}


class FlashInferTrace(NamedTuple):
    """One result, and its place in the files."""

    definition: str
    solution: str
    uuid: str
    axes: Mapping[str, int]
    evaluation: Mapping[str, Any]
    timestamp: str
    place: str


def read_dataset(root: Path, ops: Sequence[str] = ()) -> files.Imported:
    """One record for each trace in a folder, and a row for each definition, of `ops` alone if any are named.

    Skipped with its reason: a trace without its definition in the data set, and a workload that lacks an axis or has
    one of size 0, such as no pages: nothing is computed there.  Workloads with equal sizes, whose inputs differ, are
    cases of their own: such a case has the workload's id too.  Raises `ValueError` with the file and place of a
    malformed value.
    """
    definitions, traces = definitions_in(root), []
    for path in sorted((root / "traces").rglob("*.jsonl")):
        for number, line in enumerate(files.read_text(path).splitlines(), 1):
            if line.strip():
                place = f"{path.name}, line {number}"
                traces.append(_trace(files.parse_json(line, place), place))
    skipped = list[files.Skipped]()
    taken: list[tuple[FlashInferTrace, Definition, Case]] = []
    workloads: dict[tuple[str | None, str], set[str]] = {}
    for trace in traces:
        definition = definitions.get(trace.definition)
        if definition is None:
            skipped.append(files.Skipped(trace.place, f"no definition called {trace.definition!r} is there"))
        elif empty := [axis for axis in definition.variables if not trace.axes.get(axis)]:
            skipped.append(files.Skipped(trace.place, f"its workload has no {', '.join(empty)}"))
        else:
            taken.append((trace, definition, definition.case(trace.axes)))
            workloads.setdefault((definition.op[0], taken[-1][2].id), set()).add(trace.uuid)
    content = json.dumps([(trace.uuid, trace.solution, trace.evaluation) for trace in traces], allow_nan=False)
    source, records = files.ResultFile(TOOL, max((trace.timestamp for trace in traces), default=""), content, {}), []
    for trace, definition, case in taken:
        several = len(workloads[definition.op[0], case.id]) > 1
        own = case.but(**files.make_case({"workload": trace.uuid})) if several else case
        records.append(_record(trace, definition, own, source, skipped))
    counts = Counter(trace.definition for trace in traces)
    rows = [each.row(counts[each.name]) for each in definitions.values() if not ops or each.op[0] in ops]
    return files.Imported(tuple(records), tuple(skipped), tuple(rows))


def definitions_in(root: Path) -> dict[str, Definition]:
    """The definitions in a folder by name.  Raises `ValueError` with the file and place of a malformed value."""
    if not (root / "definitions").is_dir():
        raise ValueError(f"flashinfer: expected a folder with definitions/ in it, got {str(root)!r}")
    found: dict[str, Definition] = {}
    for path in sorted((root / "definitions").rglob("*.json")):
        definition = _definition(files.parse_json(files.read_text(path), path.name), path.name)
        if definition.name in found:
            raise ValueError(f"{path.name}: a definition called {definition.name!r} was read before")
        found[definition.name] = definition
    return found


def _definition(values: Any, place: str) -> Definition:
    axes = files.get(values, "axes", dict, place)
    constants = {}
    for name, axis in axes.items():
        kind = files.get(axis, "type", str, f"{place}, axes.{name}")
        if kind == "const":
            constants[name] = _size(axis, "value", f"{place}, axes.{name}")
        elif kind != "var":
            raise ValueError(f"{place}, axes.{name}: expected the type const or var, got {kind!r}")
    name, op_type, reference = (files.get(values, key, str, place) for key in ("name", "op_type", "reference"))
    try:
        tree = ast.parse(reference)
    except SyntaxError as error:
        raise ValueError(f"{place}, reference, line {error.lineno}: not Python: {error.msg}") from error
    inputs, outputs = (
        {
            key: _tensor(tensor, axes, f"{place}, {side}.{key}")
            for key, tensor in files.get(values, side, dict, place).items()
        }
        for side in ("inputs", "outputs")
    )
    variables = tuple(axis for axis in axes if axis not in constants)
    return Definition(name, op_type, constants, variables, inputs, outputs, _epsilon(tree))


def _size(values: Mapping[str, Any], key: str, place: str) -> int:
    size: int = files.get(values, key, int, place)
    if size < 0:
        raise ValueError(f"{place}: expected {key!r} of at least 0, got {size}")
    return size


def _tensor(values: Any, axes: Mapping[str, Any], place: str) -> Tensor:
    dtype = files.get(values, "dtype", str, place)
    if values.get("shape") is None:
        return Tensor(None, dtype)
    shape = files.get(values, "shape", list, place)
    unknown = [axis for axis in shape if not isinstance(axis, str) or axis not in axes]
    if unknown:
        raise ValueError(f"{place}.shape: expected names of axes, got {unknown[0]!r}")
    return Tensor(tuple(shape), dtype)


def _epsilon(tree: ast.Module) -> float | None:
    found = {
        float(node.value.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, int | float)
        and {target.id.lower() for target in node.targets if isinstance(target, ast.Name)}
        & {"eps", "epsilon", "variance_epsilon"}
    }
    return found.pop() if len(found) == 1 else None


def _trace(values: Any, place: str) -> FlashInferTrace:
    name, workload = files.get(values, "definition", str, place), files.get(values, "workload", dict, place)
    axes = files.get(workload, "axes", dict, f"{place}, workload")
    for axis in axes:
        _size(axes, axis, f"{place}, workload.axes")
    uuid = files.get(workload, "uuid", str, f"{place}, workload")
    evaluation = files.get(values, "evaluation", dict, place)
    timestamp = files.when(files.get(evaluation, "timestamp", str, place), place)
    solution = files.get(values, "solution", str, place)
    return FlashInferTrace(name, solution, uuid, axes, evaluation, timestamp, place)


def _record(
    trace: FlashInferTrace, definition: Definition, case: Case, source: files.ResultFile, skipped: list[files.Skipped]
) -> Record:
    place, evaluation = f"{trace.place}, evaluation", trace.evaluation
    theirs = files.get(evaluation, "status", str, place)
    if theirs not in STATUSES:
        raise ValueError(f"{place}.status: expected one of {', '.join(STATUSES)}, got {theirs!r}")
    performance = files.get_object(evaluation, "performance", place)
    latency, reason = None, ""
    if STATUSES[theirs] == "OK":
        latency = float(files.get(performance, "latency_ms", (int, float), f"{place}.performance"))
    else:
        log = str(evaluation.get("log") or "").strip() or "no log"
        reason = f"{theirs}: {log.splitlines()[-1].strip()}"
    both = {**performance, **files.get_object(evaluation, "correctness", place)}
    values = {
        "timestamp": trace.timestamp,
        "status": STATUSES[theirs],
        "reason": reason,
        "environment": _environment(evaluation, place, trace.uuid),
        "op": definition.op[0] or definition.op_type,
        "kernel": trace.solution,
        "scheme": definition.scheme,
        "metrics": files.finite({name: both[name] for name in METRICS if both.get(name) is not None}, place, skipped),
    }
    return source.record(place, case, latency, values)


def _environment(evaluation: Mapping[str, Any], place: str, workload: str) -> dict[str, Any]:
    found = files.get(evaluation, "environment", dict, place)
    hardware = files.get(found, "hardware", str, f"{place}.environment")
    libs = files.get_object(found, "libs", f"{place}.environment")
    known = {name: libs.get(name) for name in ("torch", "triton", "numpy")}
    others = {name: version for name, version in libs.items() if name not in known}
    return files.environment(
        TOOL, hardware, hardware.replace("_", " "), **known, libs=others or None, workload=workload
    )


METRICS = ("reference_latency_ms", "speedup_factor", "max_relative_error", "max_absolute_error")
"""The numbers that flashinfer-bench gives besides the latency."""
