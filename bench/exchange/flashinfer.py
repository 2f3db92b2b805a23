"""Reads flashinfer-bench's results: a folder with definitions and traces.

`definitions/<op_type>/*.json` define what a kernel computes.  `traces/**/*.jsonl` have one result per line.  The reader
recognises a definition by its type and inputs.  It never runs a definition's Python code; it only searches this code
for the epsilon of a norm.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from rooflab.bench.base.decode import decoded
from rooflab.bench.base.plain import number_of
from rooflab.bench.core import Status
from rooflab.bench.exchange import files
from rooflab.reference.spec import DTYPE_NAMES, Case

TOOL = "flashinfer-bench"
STATUS_BY_OUTCOME: Mapping[str, Status] = {
    "PASSED": "OK",
    "INCORRECT_SHAPE": "INCORRECT",
    "INCORRECT_NUMERICAL": "INCORRECT",
    "INCORRECT_DTYPE": "INCORRECT",
    "RUNTIME_ERROR": "RUNTIME_ERROR",
    "COMPILE_ERROR": "COMPILE_ERROR",
    "TIMEOUT": "TIMEOUT",
}
"""By flashinfer-bench's status, our status.  `checked_by` stays `none`: flashinfer-bench's tolerance is larger."""
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
"""By our op: the prefixes of a definition's type, and the inputs that the definition must have."""
OPTIONAL_INPUTS = frozenset({"eps", "kv_last_page_len", "qo_indptr", "top_k", "top_p", "min_p"})
"""The other inputs that a definition may have."""
EPSILON_NAMES = frozenset({"eps", "epsilon", "variance_epsilon"})
"""The names, in lower case, that a definition's text may give to an epsilon."""
AUXILIARY_INPUTS = frozenset({"lse", "cos_sin_cache", "top_p", "min_p", "eps"})
"""Small fp32 tensors that do not decide a definition's scheme."""


@dataclass(frozen=True)
class Axis:
    """Describes a dimension of a tensor in a kernel description of flashinfer-bench.  A `const` dimension has a fixed
    size.  The size of a `var` dimension depends on the benchmark's input."""

    type: Literal["const", "var"]
    value: int | None = None


@dataclass(frozen=True)
class Operand:
    """Describes an input or output in a kernel description of flashinfer-bench."""

    dtype: str
    shape: tuple[str, ...] | None = None
    """The names of the axes.  None for a Python scalar."""


@dataclass(frozen=True)
class Definition:
    """Holds the definition of a kernel's computation, read from one file."""

    name: str
    op_type: str
    axes: Mapping[str, Axis]
    inputs: Mapping[str, Operand]
    outputs: Mapping[str, Operand]
    reference: str
    """The computation as Python text."""

    def __post_init__(self) -> None:
        for name, axis_spec in self.axes.items():
            if axis_spec.type == "const" and (axis_spec.value is None or axis_spec.value < 0):
                raise ValueError(f"axes.{name}: expected a value of at least 0, got {axis_spec.value}")
        for name, tensor in {**self.inputs, **self.outputs}.items():
            if unknown_axes := set(tensor.shape or ()) - self.axes.keys():
                raise ValueError(f"{name}.shape: expected names of axes, got {min(unknown_axes)!r}")
        _ = self.eps

    @cached_property
    def eps(self) -> float | None:
        """Returns the epsilon that the definition's code assigns, or None if it does not assign exactly one number."""
        try:
            syntax_tree = ast.parse(self.reference)
        except SyntaxError as error:
            raise ValueError(f"reference, line {error.lineno}: not Python: {error.msg}") from error
        epsilons = {
            float(syntax_node.value.value)
            for syntax_node in ast.walk(syntax_tree)
            if isinstance(syntax_node, ast.Assign)
            and isinstance(syntax_node.value, ast.Constant)
            and isinstance(syntax_node.value.value, int | float)
            and {target.id.lower() for target in syntax_node.targets if isinstance(target, ast.Name)} & EPSILON_NAMES
        }
        return epsilons.pop() if len(epsilons) == 1 else None

    @property
    def op(self) -> tuple[str | None, str]:
        """Returns `(op, "")` with the Rooflab op that computes the same as this flashinfer-bench kernel.  Returns
        `(None, reason)` if Rooflab has no such op."""
        inputs_by_op = {
            op: inputs for op, (type_prefixes, inputs) in OPS.items() if self.op_type.startswith(type_prefixes)
        }
        input_names = {
            "hidden_states" if "norm" in self.op_type and name in ("input", "x") else name for name in self.inputs
        }
        if not inputs_by_op:
            return None, f"no op here computes {self.op_type!r}"
        fitting_ops = [op for op, inputs in inputs_by_op.items() if inputs <= input_names <= inputs | OPTIONAL_INPUTS]
        if not fitting_ops:
            inputs_text = " or ".join(", ".join(sorted(inputs)) for inputs in inputs_by_op.values())
            return None, f"its inputs are {', '.join(self.inputs)}, and an op here takes {inputs_text}"
        mismatch_reason = self._unlike(fitting_ops[0])
        return (None, mismatch_reason) if mismatch_reason else (fitting_ops[0], "")

    def _unlike(self, op: str) -> str:
        """Explains why `op` cannot compute this definition although it has the same inputs. Returns "" if it can."""
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
        dtypes = {tensor.dtype for name, tensor in tensors if tensor.shape is not None and name not in AUXILIARY_INPUTS}
        return sorted(name for name in dtypes if not name.startswith(("int", "bool")))

    @property
    def scheme(self) -> str | None:
        """Returns Rooflab's name of the definition's float dtype, or None for several dtypes or an unknown dtype."""
        name_by_dtype = {str(dtype).removeprefix("torch."): name for dtype, name in DTYPE_NAMES.items()}
        return name_by_dtype.get(self._dtypes[0]) if len(self._dtypes) == 1 else None

    def case(self, axes: Mapping[str, int]) -> Case:
        """Returns the case (names and sizes) of one call of the kernel.  `axes` maps names of axes to their lengths.

        A gemm, or a norm with a constant epsilon, gets Rooflab's names of sizes, such as M, N and K.  Any other kernel
        gets the definition's name and `axes`."""
        op = self.op[0]
        size_by_axis = {name: axis.value for name, axis in self.axes.items() if axis.value is not None} | {**axes}
        input_shapes = {name: tensor.shape or () for name, tensor in self.inputs.items()}
        if op == "gemm":
            (m, k), b = input_shapes["A"], input_shapes["B"]
            gemm_layout, n = ("NT", b[0]) if k == b[1] else ("NN", b[1])
            return Case(M=size_by_axis[m], N=size_by_axis[n], K=size_by_axis[k], layout=gemm_layout, bias=False)
        if op in ("rmsnorm", "fused_add_rmsnorm") and self.eps is not None and "eps" not in self.inputs:
            rows_axis, hidden_axis = next(shape for shape in input_shapes.values() if len(shape) == 2)
            offset_field = {"weight_offset": 1.0} if "gemma" in self.name else {}  # Gemma's norm adds one to the weight
            return Case(T=size_by_axis[rows_axis], H=size_by_axis[hidden_axis], eps=self.eps, **offset_field)
        return files.make_case({"definition": self.name, **axes})

    def row(self, traces: int) -> dict[str, Any]:
        """Returns the definition's table row: its name, type, number of traces and Rooflab op, or why it has no op."""
        op, no_op_reason = self.op
        summary_row = {"definition": self.name, "op_type": self.op_type, "op": op, "scheme": self.scheme}
        return summary_row | {"traces": traces, "reason": no_op_reason}


@dataclass(frozen=True)
class Workload:
    """Holds the sizes of one call of a kernel."""

    uuid: str
    axes: Mapping[str, int]


@dataclass(frozen=True)
class TraceMachine:
    """Describes the machine on which a result was measured."""

    hardware: str
    libs: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Evaluation:
    """Holds the status, the times and the machine of a result."""

    status: str
    timestamp: str
    environment: TraceMachine
    log: Any = None
    performance: Mapping[str, Any] | None = None
    correctness: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class FlashInferTrace:
    """Holds one result of flashinfer-bench."""

    definition: str
    solution: str
    workload: Workload
    evaluation: Evaluation


def read(paths: Sequence[Path]) -> files.Imported:
    """Implements the entry point `flashinfer`: reads one folder.  Raises `ValueError` unless there is just one path."""
    if len(paths) != 1:
        raise ValueError(f"path: expected one, got {len(paths)}")
    return read_dataset(paths[0])


def read_dataset(root: Path) -> files.Imported:
    """Reads a FlashInfer data set: returns a record for each trace in a folder, and a row for each definition.

    A trace is skipped, with the reason, if its definition is missing, or if an axis is missing or 0.  Workloads with
    equal sizes but different inputs become separate cases.  Raises `ValueError` with the place of a malformed value."""
    definitions, all_traces, content, newest = definitions_in(root), list[tuple[str, FlashInferTrace]](), "", ""
    for trace_path in sorted((root / "traces").rglob("*.jsonl")):
        for line_number, line in enumerate(files.read_text(trace_path).splitlines(), 1):
            if line.strip():
                line_place = f"{trace_path.name}, line {line_number}"
                trace = decoded(FlashInferTrace, files.parse_json(line, line_place), line_place)
                newest, content = max(newest, files.when(trace.evaluation.timestamp, line_place)), f"{content}{line}\n"
                all_traces.append((line_place, trace))
    result_file = files.ResultFile(TOOL, newest, content, {})
    usable_traces: list[tuple[str, FlashInferTrace, Definition, Case]] = []
    workloads: dict[tuple[str | None, str], set[str]] = {}
    for line_place, trace in all_traces:
        definition, axes = definitions.get(trace.definition), trace.workload.axes
        if definition is None:
            result_file.skip(line_place, f"no definition called {trace.definition!r} is there")
        elif zero_axes := [
            name for name, axis_spec in definition.axes.items() if axis_spec.type == "var" and axes.get(name, 0) <= 0
        ]:
            result_file.skip(line_place, f"its workload has no {', '.join(zero_axes)}")
        else:
            op_case = definition.case(axes)
            usable_traces.append((line_place, trace, definition, op_case))
            workloads.setdefault((definition.op[0], op_case.id), set()).add(trace.workload.uuid)
    for line_place, trace, definition, op_case in usable_traces:
        uuid = trace.workload.uuid
        has_variants = len(workloads[definition.op[0], op_case.id]) > 1
        unique_case = op_case.but(**files.make_case({"workload": uuid})) if has_variants else op_case
        _add(trace, definition, unique_case, result_file, f"{line_place}, evaluation")
    trace_counts = Counter(trace.definition for _, trace in all_traces)
    return result_file.imported([op_def.row(trace_counts[op_def.name]) for op_def in definitions.values()])


def definitions_in(root: Path) -> dict[str, Definition]:
    """Returns a folder's definitions by name.  Raises `ValueError` with the file and place of a malformed value."""
    if not (root / "definitions").is_dir():
        raise ValueError(f"flashinfer: expected a folder with definitions/ in it, got {str(root)!r}")
    definitions: dict[str, Definition] = {}
    for json_path in sorted((root / "definitions").rglob("*.json")):
        definition = decoded(Definition, files.parse_json(files.read_text(json_path), json_path.name), json_path.name)
        if definition.name in definitions:
            raise ValueError(f"{json_path.name}: a definition called {definition.name!r} was read before")
        definitions[definition.name] = definition
    return definitions


def _add(trace: FlashInferTrace, definition: Definition, case: Case, source: files.ResultFile, place: str) -> None:
    evaluation, libs = trace.evaluation, dict(trace.evaluation.environment.libs or {})
    performance, hardware = evaluation.performance or {}, evaluation.environment.hardware
    if evaluation.status not in STATUS_BY_OUTCOME:
        raise ValueError(f"{place}.status: expected one of {', '.join(STATUS_BY_OUTCOME)}, got {evaluation.status!r}")
    status, latency_ms, fail_reason = STATUS_BY_OUTCOME[evaluation.status], None, ""
    if status == "OK":
        latency_ms = float(number_of(f"{place}.performance.latency_ms", performance.get("latency_ms")))
    else:
        fail_reason = f"{evaluation.status}: {(str(evaluation.log or '').strip() or 'no log').splitlines()[-1].strip()}"
    tools = {name: libs.pop(name, None) for name in ("torch", "triton", "numpy")}
    gpu = hardware.replace("_", " ")
    results = {**performance, **(evaluation.correctness or {})}
    record_values = {
        "timestamp": files.when(evaluation.timestamp, place),
        "status": status,
        "reason": fail_reason,
        "environment": files.environment(TOOL, hardware, gpu, **tools, libs=libs or None, workload=trace.workload.uuid),
        "op": definition.op[0] or definition.op_type,
        "kernel": trace.solution,
        "scheme": definition.scheme,
        "metrics": source.finite({name: results[name] for name in METRICS if results.get(name) is not None}, place),
    }
    source.add(place, case, latency_ms, record_values)


METRICS = ("reference_latency_ms", "speedup_factor", "max_relative_error", "max_absolute_error")
"""The numbers that flashinfer-bench gives in addition to the latency."""
