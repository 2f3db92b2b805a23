"""Defines the data of an op: its arguments, formula, least cost, test cases, and the check of a result."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Literal

import torch

from rooflab.reference import captured
from rooflab.reference.compare import ErrorStats, elementwise
from rooflab.reference.contract import Contract
from rooflab.reference.domain import Domain
from rooflab.reference.special import common_sets
from rooflab.roofline.model import Cost, Traffic
from rooflab.roofline.names import values_by_name

CONTRACT = 6
"""The version of the interface of `kernels`, `reference` and `roofline` that `bench` uses.  An A/B comparison measures
two trees with one `bench`, so it refuses a tree with another version.  The version grows when a field, a function or a
meaning that `bench` uses changes."""
Scalar = bool | int | float | str
Inputs = dict[str, Any]
Outputs = tuple[torch.Tensor, ...]


class Case(Mapping[str, Scalar]):
    """A test case: one set of dimensions and options of an op, as a flat, ordered, hashable dict of JSON scalars.

    Its `id` (`M=64,N=48,K=32,layout=NT`) is the same on the command line, in result files and in baselines."""

    def __init__(self, **values: Scalar):
        for axis_name, axis_value in values.items():
            if not isinstance(axis_value, Scalar):
                raise ValueError(f"case: expected a JSON scalar for {axis_name!r}, got {type(axis_value).__name__}")
        self._values = values

    @property
    def id(self) -> str:
        """Returns the text form, such as `M=64,N=48`. The keys are in the op's order."""
        return ",".join(f"{axis_name}={_text(axis_value)}" for axis_name, axis_value in self._values.items())

    @classmethod
    def parse(cls, text: str) -> Case:
        """Parses a case from text such as `M=64,N=48`. Raises `ValueError` if the text has another form."""

        def read(key: str, value: str) -> Scalar:
            if not key.isidentifier():
                raise ValueError
            return scalar(value)

        expected_text = "case: expected comma-separated KEY=VALUE pairs, each key once"
        return cls(**values_by_name(text.split(","), expected_text, read))

    def __getitem__(self, key: str) -> Scalar:
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __hash__(self) -> int:
        return hash(self.id)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Case) and self.id == other.id

    def __repr__(self) -> str:
        return f"Case({self.id})"

    def but(self, **changes: Scalar) -> Case:
        """Returns a copy of the case with some values replaced."""
        return Case(**{**self._values, **changes})


def _text(value: Scalar) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def scalar(text: str) -> Scalar:
    """Parses one value of a case from `text`: a boolean, a number or a word."""
    if text in ("true", "false"):
        return text == "true"
    for number_type in (int, float):
        try:
            return number_type(text)
        except ValueError:
            continue
    return text


@dataclass(frozen=True)
class Scheme:
    """A named combination of dtypes for an op: the dtypes of its activation, its weight and its output."""

    name: str
    activation: torch.dtype
    weight: torch.dtype
    output: torch.dtype
    group: int = 0
    """The number of values along K that share a scale; 0 if a weight is not quantised in groups."""

    @property
    def unit_roundoff(self) -> float:
        """Returns the unit roundoff of the output dtype, eps / 2: the largest relative error of one rounding."""
        return torch.finfo(self.output).eps / 2


SCHEMES = {
    "fp32": Scheme("fp32", torch.float32, torch.float32, torch.float32),
    "fp16": Scheme("fp16", torch.float16, torch.float16, torch.float16),
    "bf16": Scheme("bf16", torch.bfloat16, torch.bfloat16, torch.bfloat16),
    # fp32 in memory; the tensor core keeps ten bits of the mantissa. A caller must ask for it by name.
    "tf32": Scheme("tf32", torch.float32, torch.float32, torch.float32),
    "fp8_e4m3": Scheme("fp8_e4m3", torch.float8_e4m3fn, torch.float8_e4m3fn, torch.bfloat16),
    "w8a16": Scheme("w8a16", torch.bfloat16, torch.int8, torch.bfloat16),
    # 16-bit queries over a KV cache in e4m3, with a scale for each head.
    "kv_fp8": Scheme("kv_fp8", torch.bfloat16, torch.float8_e4m3fn, torch.bfloat16),
    # 16-bit inputs; outputs in eight bits, with a scale for each row.
    "out_fp8": Scheme("out_fp8", torch.bfloat16, torch.bfloat16, torch.float8_e4m3fn),
    "out_int8": Scheme("out_int8", torch.bfloat16, torch.bfloat16, torch.int8),
    "gguf_q4": Scheme("gguf_q4", torch.bfloat16, torch.uint8, torch.bfloat16),
    "gguf_q8": Scheme("gguf_q8", torch.bfloat16, torch.int8, torch.bfloat16),
    # A byte holds two values of four bits.
    **{
        f"w4a16_g{group}": Scheme(f"w4a16_g{group}", torch.bfloat16, torch.uint8, torch.bfloat16, group)
        for group in (32, 64, 128)
    },
}
DTYPE_NAMES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
"""For each dtype, the name of the scheme in which every tensor has this dtype."""
FP32_ROUNDOFF = 2.0**-24
DEFAULT_SUITES = ("smollm2_135m", "llama3_8b")
"""The suites that commands use without `--suite`.  An op of another package may lack these suites."""


def get_scheme(name: str) -> Scheme:
    """Returns the scheme called `name`. Raises `ValueError` with a list of the known names."""
    if name not in SCHEMES:
        raise ValueError(f"scheme: expected one of {', '.join(SCHEMES)}, got {name!r}")
    return SCHEMES[name]


class Arguments(SimpleNamespace):
    """Holds the arguments of an op call as attributes. A missing argument has the default of the reference.

    A kernel also gets `config` (None: the kernel chooses) and `device` (`cpu` or `cuda`). `device` is needed because a
    `meta` tensor does not show the real device.
    """

    def but(self, **changes: Any) -> Arguments:
        """Returns a copy of the arguments with some values replaced."""
        return Arguments(**{**vars(self), **changes})


MakeInputs = Callable[[Case, Scheme, torch.device, int], Inputs]
Mistakes = Mapping[str, Callable[[Arguments], Inputs | Outputs | torch.Tensor]]
"""Functions by the names of mistakes.  Each returns the results, in fp64, of a kernel with this mistake, or the wrong
arguments with which such a kernel computes, as a dict."""


@dataclass(frozen=True)
class OpSpec:
    """The definition of an op. `tests/contracts/test_registry.py` checks every definition."""

    name: str
    reference: Callable[..., torch.Tensor | Outputs]
    """The formula in fp64.  It takes the same arguments as every kernel and changes none of them; for a mutating op the
    formula returns the values that the mutated arguments must have afterwards."""
    make_inputs: MakeInputs
    """Maps `(case, scheme, device, seed)` to keyword arguments.  With `device="meta"` large tensors are meta tensors,
    but lengths, tables and offsets are real int tensors on the CPU."""
    cost: Callable[[Arguments], Cost]
    """The least work of a call; the function reads only shapes and the real int tensors."""
    outputs: tuple[str, ...]
    """The names of the results, in order; for a mutating op, the arguments that it changes.  The last result may be
    optional (a log-sum-exp): a call without that option returns fewer results."""
    cases: Mapping[str, tuple[Case, ...]]
    """The cases by suite: `smoke`, `edge`, and one suite per model."""
    tolerance: Callable[[Inputs, Outputs, Scheme], Outputs] | None = None
    """The largest allowed error of each output element, by the arithmetic.  None if `compare` judges instead."""
    compare: Callable[[Outputs, Outputs, Inputs, Scheme], list[ErrorStats]] | None = None
    """Judges outputs against the oracle's.  None if each element must be within `tolerance`."""
    compare_own_stream: Callable[[Outputs, Outputs, Inputs, Scheme], list[ErrorStats]] | None = None
    """Judges a kernel of a sampling op that is declared non-deterministic: the kernel has its own random stream."""
    wrong: Mistakes = field(default_factory=dict)
    """Mistakes that the tolerance rejects, each on some case of each scheme (`tests/contracts/test_tolerances.py`)."""
    planted: Callable[[Case, Scheme, torch.device, int], Iterator[tuple[str, Inputs]]] | None = None
    """Adversarial inputs with labels: a dominant key, row or column at an edge; a kernel that ignores this element
    fails clearly."""
    planted_own_stream: Callable[[Case, Scheme, torch.device, int], Iterator[tuple[str, Inputs]]] | None = None
    """Adversarial inputs for a kernel with its own random stream: many draws, which `compare_own_stream` counts."""
    output_dtypes: Mapping[str, torch.dtype | Literal["activation"]] = field(default_factory=dict)
    """The dtypes of outputs that differ from the scheme's output dtype: one dtype, or the dtype of the activations."""
    mutates: tuple[str, ...] = ()
    """The arguments that the op changes; empty for a functional op."""
    in_place: Mapping[str, str] = field(default_factory=dict)
    """Maps an output to the input whose memory the caller's `out` may share, as engines call the op."""
    slots: tuple[str, ...] = ()
    """The name of the argument with slots, then the names of the caches.  A slot is the number of a row of a cache."""
    schemes: tuple[str, ...] = ("fp32", "fp16", "bf16")
    optional: Mapping[str, Scalar] = field(default_factory=dict)
    """The keys that a case may leave out, with the value that means off.  So a case keeps its id when an op gains an
    option."""
    prepared: str | None = None
    """The argument that a kernel's `prepare` packs once at load; None if the op has no weight."""
    prepared_with: tuple[str, ...] = ()
    """The arguments beside the weight in a checkpoint, such as scales; `prepare` may take these arguments by name."""
    contract: Contract | None = None
    """The contract of the op's tensors; None if the kernels of the op check the arguments themselves."""
    domain: Domain | None = None
    """All cases that the op may have; None if only the cases in `cases` are known."""
    no_library: str | None = None
    """The reason why torch has no call for this op; None if torch has one."""
    parameters: tuple[inspect.Parameter, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        parameters = tuple(inspect.signature(self.reference).parameters.values())
        object.__setattr__(self, "parameters", parameters)
        parameter_names = {parameter.name for parameter in parameters}
        prepared_names = (self.prepared,) if self.prepared else ()
        for name in (*self.mutates, *prepared_names, *self.prepared_with, *self.in_place.values(), *self.slots):
            if name not in parameter_names:
                raise ValueError(f"{self.name}: {name!r} is not an argument of its reference")
        required_parameters = [
            cost_parameter.name
            for cost_parameter in inspect.signature(self.cost).parameters.values()
            if cost_parameter.default is cost_parameter.empty
        ]
        if len(required_parameters) != 1:
            raise TypeError(
                f"{self.name}: expected a cost of one object, cost(args), got cost({', '.join(required_parameters)})"
            )
        if (self.tolerance is None) == (self.compare is None):
            raise ValueError(f"{self.name}: expected exactly one of tolerance and compare")

    def judge(self, actual: Outputs, oracle: Outputs, inputs: Inputs, scheme: Scheme) -> list[ErrorStats]:
        """Compares the outputs `actual` with the reference outputs `oracle`, and returns one result per output."""
        if self.compare is not None:
            return self.compare(actual, oracle, inputs, scheme)
        assert self.tolerance is not None, "held by __post_init__"
        output_limits = self.tolerance(inputs, oracle, scheme)
        output_rows = zip(self.outputs[: len(oracle)], actual, oracle, output_limits, strict=True)
        return [elementwise(name, out, expected_output, limit) for name, out, expected_output, limit in output_rows]

    def arguments(self, inputs: Mapping[str, Any], **more: Any) -> Arguments:
        """Returns all arguments of a call: `inputs`, the arguments in `more`, and the defaults of the reference."""
        default_values = {param.name: param.default for param in self.parameters if param.default is not param.empty}
        return Arguments(**{**default_values, **more, **inputs})

    def call(self) -> str:
        """Returns the signature of a kernel of this op as text: `rmsnorm(x, weight, eps=1e-06, *, quantize=None)`."""
        untyped_parameters = [parameter.replace(annotation=parameter.empty) for parameter in self.parameters]
        return f"{self.name}{inspect.Signature(untyped_parameters)}"

    def cost_of(self, inputs: Mapping[str, Any]) -> Cost:
        """Returns the least cost of a call with these inputs, which may be `meta` tensors."""
        return self.cost(self.arguments(inputs))

    def least(self, args: Arguments) -> Traffic:
        """Returns the least memory traffic of a kernel: each operand is read once and each result is written once."""
        cost = self.cost(args)
        return Traffic(cost.read_bytes, cost.write_bytes)

    def sets(
        self, case: Case, scheme: Scheme, device: torch.device, seed: int, own_stream: bool = False
    ) -> Iterator[tuple[str, Inputs]]:
        """Yields sets of adversarial inputs: the op's own, then those that all ops with a contract share.  With
        `own_stream`, sets for a kernel with its own random stream come first."""
        if own_stream and self.planted_own_stream is not None:
            yield from self.planted_own_stream(case, scheme, device, seed)
        if self.planted is not None:
            yield from self.planted(case, scheme, device, seed)
        if self.contract is not None:
            inputs = self.make_inputs(case, scheme, device, seed)
            yield from common_sets(self.contract, inputs, bool(self.cost_of(inputs).tensor_flops))

    def oracle(self, inputs: Inputs) -> Outputs:
        """Returns the outputs of the reference, always as a tuple."""
        return as_tuple(self.reference(**inputs))

    def mistaken(self, name: str, inputs: Inputs) -> Outputs:
        """Returns the outputs of a faulty kernel. The function `wrong[name]` imitates the fault. It returns either
        wrong outputs or wrong inputs. For wrong inputs, the reference computes the outputs."""
        wrong_result = self.wrong[name](self.arguments(inputs))
        return self.oracle({**inputs, **wrong_result}) if isinstance(wrong_result, dict) else as_tuple(wrong_result)

    def get_cases(self, suite: str) -> tuple[Case, ...]:
        """Returns the cases of a suite. Raises `ValueError` with the known suites if the suite is unknown."""
        cases = self.cases_in(suite)
        if not cases and suite not in self.cases:
            raise ValueError(f"suite: {self.name} has {', '.join(self.cases)}, got {suite!r}")
        return cases

    def cases_in(self, suite: str) -> tuple[Case, ...]:
        """Returns the test cases of a suite, or of a file that `rooflab capture` wrote. If the op lacks the suite,
        returns no cases. The suites `smollm2_135m` and `llama3_8b` are an exception: an op without them returns its
        `smoke` cases.
        """
        if captured.is_file(suite):
            return tuple(self.check_case(Case.parse(case_text)) for case_text in captured.cases_of(self.name, suite))
        return self.cases.get(suite, self.cases["smoke"] if suite in DEFAULT_SUITES else ())

    def check_case(self, case: Case) -> Case:
        """Returns `case` with its keys in the op's order. Leaves out optional keys that have their default value.

        Raises `ValueError` if a key is missing or unknown, or if a value has the wrong type or is negative."""
        template_values = {**self.cases["smoke"][0], **self.optional}
        required_keys = [axis for axis in template_values if axis not in self.optional]
        if not set(required_keys) <= set(case) <= set(template_values):
            optional_text = f" and perhaps {', '.join(self.optional)}" if self.optional else ""
            example_id = self.cases["smoke"][0].id
            wrong = [f"{axis} is missing" for axis in required_keys if axis not in case]
            wrong += [f"{axis} is unknown" for axis in case if axis not in template_values]
            expected = f"{self.name} takes the keys of {example_id}{optional_text}"
            raise ValueError(f"case: {expected}, got {case.id}: {', '.join(wrong)}")
        used_options = [axis for axis in self.optional if axis in case and case[axis] != self.optional[axis]]
        ordered_values = {axis: case[axis] for axis in (*required_keys, *used_options)}
        for axis, axis_value in ordered_values.items():
            example_value = template_values[axis]
            is_int_for_float = isinstance(example_value, float) and type(axis_value) is int
            if type(axis_value) is not type(example_value) and not is_int_for_float:
                raise ValueError(f"case: expected {axis} like {_text(example_value)!r}, got {_text(axis_value)!r}")
            if type(axis_value) is int and axis_value < 0:
                raise ValueError(f"case: expected {axis} >= 0, got {axis_value}")
        return Case(**ordered_values)


def as_tuple(result: torch.Tensor | Outputs) -> Outputs:
    """Returns the return value of a kernel or a reference as a tuple of tensors."""
    return (result,) if isinstance(result, torch.Tensor) else tuple(result)


def randn(
    *shape: int, dtype: torch.dtype, device: torch.device, seed: int, scale: float = 1.0, mean: float = 0.0
) -> torch.Tensor:
    """Draws random normal values with standard deviation `scale` and mean `mean`.

    Values are drawn in fp32 on the CPU and then rounded, so every device and dtype gets the same numbers. More than
    2**24 values are drawn on the device, because the CPU would take seconds. On the device `meta` nothing is computed,
    because torch's first operation there takes 2 s."""
    device = torch.device(device)
    if device.type == "meta":
        return torch.empty(shape, dtype=dtype, device=device)
    value_count = 1
    for dim_size in shape:
        value_count *= dim_size
    rng_device = device if value_count > 2**24 else torch.device("cpu")
    generator = torch.Generator(rng_device).manual_seed(seed)
    drawn_values = torch.randn(shape, generator=generator, device=rng_device, dtype=torch.float32)
    # In place: torch's product of (0, 1) elements has strides (1, 0), which a careful launcher refuses.
    rounded_values = drawn_values.mul_(scale).to(device=device, dtype=dtype)
    return rounded_values.add_(mean) if mean else rounded_values


def extent(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Returns the number of memory elements from the first to the last element of a tensor; 0 for an empty tensor."""
    return 0 if 0 in shape else 1 + sum((dim - 1) * stride for dim, stride in zip(shape, strides, strict=True))


def nbytes(*tensors: torch.Tensor | None) -> int:
    """Returns the total bytes of all elements of the tensors. None counts as 0."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors if tensor is not None)
