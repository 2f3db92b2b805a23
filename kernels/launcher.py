"""Turns a launcher, a function that launches device code, into a kernel.  Adds checks, outputs and a config.

A launcher's parameters are the arguments and results that it needs.  For example, this launcher becomes the kernel
`rmsnorm/fused`:

    @kernel(backend="triton", tuning=TUNING, limits={"H": 16384})
    def fused(x, weight, out, *, eps, config): ...

A caller writes `fused(x, weight, eps, out=None)`.  Arguments are checked once for each layout (shapes, strides, dtypes,
devices, options).  Later calls cost about 1 us per tensor.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import partial, wraps
from itertools import takewhile
from operator import itemgetter
from typing import Any, Literal, cast

import torch

from rooflab.kernels import _checks, _device
from rooflab.kernels.registry import Backend, Function, Kernel, Role, add_kernel, get_op, who_takes
from rooflab.kernels.takes import EXTRA_ARGUMENTS, Takes, Unsupported
from rooflab.reference.contract import Argument, CallArguments, Contract, Dims, Packed
from rooflab.reference.spec import DTYPE_NAMES, Arguments, Case, OpSpec, extent, get_scheme
from rooflab.roofline.model import Traffic

MAX_KNOWN_LAYOUTS = 4096
"""The most layouts that a kernel remembers: enough for a serving engine's row counts.  A layout takes about 1 KB."""


@dataclass(slots=True)
class BoundCall:
    """Holds the results of the checks for one layout, and the data that every call with this layout needs."""

    dims: Dims
    made: dict[str, tuple[tuple[int, ...], tuple[int, ...], torch.dtype]]
    """Shape, strides and dtype of the results to allocate before the launch, by name; empty if the kernel allocates."""
    absent: dict[str, None]
    """The results that the kernel gets as None, by name."""
    apart: list[tuple[str, int, str, int, bool, str]]
    """The pairs of tensors that may not overlap.  A pair has the name and bytes of an output of the caller, the name
    and bytes of an input or another output, whether the output may be that input, and the error."""
    device: torch.device
    gpu: int | None
    """The number of the GPU that must be the current GPU, or None on a CPU."""
    config: Any
    instead: Callable[[Arguments], object] | None
    """The function that is called instead of the kernel where a result or an argument is empty, or None."""
    more: Any = None
    """The result of the kernel's own function `bind`."""


@dataclass(eq=False)
class Launcher:
    """Launches one kernel, and remembers the layouts (shapes, strides, dtypes) that were checked."""

    spec: OpSpec
    contract: Contract
    fn: Callable[..., Any]
    aligned: tuple[str, ...]
    bind: Callable[[Arguments], Any] | None
    empty: Callable[[Arguments], object] | None
    on_cpu: bool
    allocates: bool
    kernel: Kernel = field(init=False)

    def __post_init__(self) -> None:
        fn_parameters = inspect.signature(self.fn).parameters
        self.results = {name: result for name, result in self.contract.results.items() if name in fn_parameters}
        self.in_place = dict(zip(self.contract.results, map(self.spec.in_place.get, self.spec.outputs), strict=False))
        self.signature = self._signature(fn_parameters)
        parameters = self.signature.parameters.values()
        self.positional = tuple(p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD)
        self.defaults = {p.name: p.default for p in parameters if p.default is not p.empty}
        self.tensors = tuple(name for name in self.contract.arguments if name in self.signature.parameters)
        names_outside_key = {*self.tensors, "out", "plan"}
        self._options_of = _getter(name for name in self.signature.parameters if name not in names_outside_key)
        self._tensors_of = _getter(self.tensors)
        self._known: dict[Any, BoundCall] = {}

    def _signature(self, fn_parameters: Mapping[str, inspect.Parameter]) -> inspect.Signature:
        """Makes the signature of the kernel: the arguments of the op, then `out`, `plan` and `config` if the kernel has
        them."""
        has_kwargs = any(parameter.kind is parameter.VAR_KEYWORD for parameter in fn_parameters.values())
        parameters = [parameter for parameter in self.spec.parameters if has_kwargs or parameter.name in fn_parameters]
        if self.results:
            parameters.append(inspect.Parameter("out", inspect.Parameter.POSITIONAL_OR_KEYWORD, default=None))
        optional_parameters = [fn_parameters[name] for name in ("plan", "config") if name in fn_parameters]
        parameters += [param.replace(kind=param.KEYWORD_ONLY, default=None) for param in optional_parameters]
        return inspect.Signature(sorted(parameters, key=lambda parameter: parameter.kind))

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        positional_values = dict(zip(self.positional, args, strict=False))
        if len(args) > len(self.positional) or (kwargs and not kwargs.keys().isdisjoint(positional_values)):
            self.signature.bind(*args, **kwargs)
        arguments = {**self.defaults, **positional_values, **kwargs}
        out_argument = arguments.pop("out", None)
        if out_argument is not None and not isinstance(out_argument, tuple):
            out_argument = (out_argument,)
        bound_call = self.bound(arguments, out_argument)
        if self.contract.bounds is not None or _checks.CHECK_VALUES:
            self._check_values(arguments, bound_call.dims)
        outputs = {} if out_argument is None else dict(zip(bound_call.made, out_argument, strict=True))
        if out_argument is None:
            for name, (shape, strides, dtype) in bound_call.made.items():  # 1.3 us; torch.empty takes 2.4
                outputs[name] = torch.empty_strided(shape, strides, dtype=dtype, device=bound_call.device)
        arguments.update(bound_call.absent)
        arguments.update(outputs)
        results = tuple(outputs.values())
        result = results[0] if len(results) == 1 else results or None
        for name, nbytes, other_name, other_size, in_place, error in bound_call.apart:
            out_ptr, arg_ptr = arguments[name].data_ptr(), arguments[other_name].data_ptr()
            if out_ptr < arg_ptr + other_size and arg_ptr < out_ptr + nbytes and not (in_place and out_ptr == arg_ptr):
                raise ValueError(error)
        if bound_call.instead is not None:
            bound_call.instead(Arguments(**arguments))
            return result
        if bound_call.config is not None:
            arguments["config"] = bound_call.config
        if self.bind is not None:
            if bound_call.more is None:
                bound_call.more = self.bind(Arguments(**arguments))
            arguments["bound"] = bound_call.more
        if bound_call.gpu is not None and bound_call.gpu != torch.cuda.current_device():
            with torch.cuda.device(bound_call.gpu):
                launcher_result = self.fn(**arguments)
        else:
            launcher_result = self.fn(**arguments)
        return result if bound_call.made else launcher_result

    def bound(self, arguments: CallArguments, outs: tuple[Any, ...] | None) -> BoundCall:
        """Returns the `BoundCall` for the layout of `arguments`.  Raises `ValueError` on a refused layout."""
        layout_key: tuple[Any, ...] | None
        try:
            tensors = self._tensors_of(arguments) if outs is None else (*self._tensors_of(arguments), None, *outs)
            layout_key = (
                self._options_of(arguments),
                _device.sm_count_override,
                *[None if x is None else (x.shape, x.stride(), x.dtype, x.device) for x in tensors],
            )
            if self.on_cpu:
                layout_key += (torch.get_num_threads(),)
            if self.aligned:
                aligned_tensors = [arguments[name] for name in self.aligned] + list(outs or ())
                layout_key += tuple([None if x is None else x.data_ptr() % 16 for x in aligned_tensors])
        except (AttributeError, KeyError):
            layout_key = None  # an argument is missing or no tensor; the checks say which
        bound_call = self._known.get(layout_key)
        if bound_call is None:
            self.signature.bind(**arguments)
            bound_call = self._bind(arguments, outs)
            assert layout_key is not None, "an argument without a layout is refused"
            if len(self._known) >= MAX_KNOWN_LAYOUTS:
                self._known.clear()
            self._known[layout_key] = bound_call
        return bound_call

    def _check_values(self, arguments: CallArguments, dims: Dims) -> None:
        """Raises `ValueError` on wrong values in integer tensors, such as page tables.  The module `_checks` decides
        which checks run."""
        first_tensor = arguments[self.tensors[0]]
        if self.contract.bounds is not None and _checks.checks_bounds(first_tensor):
            self.contract.bounds(arguments, dims)
        if self.contract.values is not None and _checks.checks_values(first_tensor):
            self.contract.values(arguments, dims)

    def _bind(self, arguments: CallArguments, outs: tuple[Any, ...] | None) -> BoundCall:
        """Checks the arguments of a call with a new layout, and returns its `BoundCall`.  Raises `ValueError` if the op
        or the kernel refuses them."""
        dims = self.contract.check(arguments)
        tensors = {name: arguments[name] for name in self.tensors if arguments[name] is not None}
        device = arguments[self.tensors[0]].device
        gpu_index = device.index if device.type == "cuda" else None
        if self.on_cpu and device.type != "cpu":  # an address there means nothing to C++
            raise ValueError(f"{self.tensors[0]}: expected a tensor on the CPU, got one on {device}")
        if refusal_text := self.kernel.unsupported(self.spec.arguments(arguments, config=None, device="cuda")):
            op_arguments = {name: arguments[name] for name in self.signature.parameters if name not in EXTRA_ARGUMENTS}
            # Nobody else takes a packed form.
            raise ValueError(refusal_text + ("" if self.kernel.prepare else who_takes(self.kernel, op_arguments)))
        results = {name: result for name, result in self.results.items() if result.wanted(arguments)}
        if outs is not None and len(outs) != len(results):
            raise ValueError(f"out: expected {len(results)} tensors, got {len(outs)}")
        for result, out in zip(results.values(), outs or (), strict=False):
            self.contract.check_out("out", out, result, arguments, dims)
        shapes = {name: tuple(dim.size(dims) or 0 for dim in result.dims) for name, result in results.items()}
        out_shapes = [*shapes.values()] if self.contract.results else [next(iter(tensors.values())).shape]
        fallback = self.empty if any(0 in x.shape for x in tensors.values()) else None
        fallback = (lambda arguments: None) if out_shapes and all(0 in shape for shape in out_shapes) else fallback
        config = arguments.get("config")
        if self.kernel.tuning is not None and config is None and fallback is None:
            config = self.default_config(arguments, dims)
        disjoint_pairs = self._apart(tensors, dict(zip(results, outs or (), strict=False)))
        if self.allocates and outs is None and fallback is None:
            results = {}
        strides = {name: torch.empty(shape, device="meta").stride() for name, shape in shapes.items()}
        outputs = {name: (shapes[name], strides[name], result.dtype_of(arguments)) for name, result in results.items()}
        absent_results = dict.fromkeys(name for name in self.results if name not in results)
        return BoundCall(dims, outputs, absent_results, disjoint_pairs, device, gpu_index, config, fallback)

    def _apart(self, inputs: CallArguments, outs: CallArguments) -> list[tuple[str, int, str, int, bool, str]]:
        """Returns the pairs of tensors that must not overlap in memory.  A pair is an output from the caller and an
        input or another output. Each entry also holds both sizes in bytes and the error message."""
        byte_counts = {
            name: extent(x.shape, x.stride()) * x.element_size()
            for name, x in {**inputs, **outs}.items()
            if isinstance(x, torch.Tensor) and x.numel() and not x.is_meta
        }
        disjoint_pairs = []
        for name in [name for name in outs if name in byte_counts]:
            for other in takewhile(name.__ne__, byte_counts):
                over = other == self.in_place[name]
                alias_text, owner_name = f", or {other} itself" * over, other if other in inputs else "another output"
                error = f"out: expected memory of its own{alias_text}, got memory that overlaps {owner_name}'s"
                over = over and (outs[name].shape, outs[name].stride()) == (inputs[other].shape, inputs[other].stride())
                disjoint_pairs.append((name, byte_counts[name], other, byte_counts[other], over, error))
        return disjoint_pairs

    def default_config(self, arguments: CallArguments, dims: Dims) -> Any:
        """Returns the config for a call with these `arguments`, if the caller passes no config."""
        contract, first_tensor = self.contract, arguments[self.tensors[0]]
        name = DTYPE_NAMES[first_tensor.dtype] if contract.scheme is None else contract.scheme(arguments)
        case_sizes = {dim_name: dims[dim_name] for dim_name in self.spec.cases["smoke"][0] if dim_name in dims}
        case_sizes |= {} if contract.case is None else contract.case(arguments)
        return self.kernel.config_for(Case(**case_sizes), get_scheme(name), first_tensor.device)

    def traffic_of(self, traffic: Callable[[Arguments], Traffic], inputs: Arguments) -> Traffic:
        """Returns `traffic(inputs)`.  If `inputs` have no config, first adds the config that a launch would use."""
        if self.kernel.tuning is not None and inputs.config is None:
            inputs = inputs.but(config=self.default_config(vars(inputs), self.contract.sizes(vars(inputs))))
        return traffic(inputs)


def _getter(names: Iterable[str]) -> Callable[[Mapping[str, Any]], tuple[Any, ...]]:
    """Returns a function that reads the values of `names` from a mapping, as a tuple.  `operator.itemgetter` reads two
    or more values faster than a Python loop."""
    getter_keys = tuple(names)
    if len(getter_keys) > 1:
        return itemgetter(*getter_keys)
    return (lambda arguments: (arguments[getter_keys[0]],)) if getter_keys else lambda arguments: ()


def kernel(
    *,
    backend: Backend,
    op: str | None = None,
    role: Role | None = None,
    unsupported: Unsupported | None = None,
    aligned: tuple[str, ...] = (),
    bind: Callable[[Arguments], Any] | None = None,
    empty: Callable[[Arguments], object] | None = None,
    packed: Argument | type[Packed] | None = None,
    allocates: bool = False,
    traffic: Callable[[Arguments], Traffic] | Literal["counted"] | None = None,
    **options: Any,
) -> Callable[[Function], Function]:
    """Registers the decorated launcher, a function that launches device code, as a kernel with the function's name.

    Each call checks the arguments, allocates the results, and chooses the `config`.  The launcher gets the arguments
    and results that its parameters name.

    - `op`: the name of the op, by default the name of the folder.
    - `role`: by default `naive` or `library` for kernels with these names, else `optimized`.
    - `unsupported`: a further check, which returns the reason why a call is refused, or None.
    - `bind`: a function that is called once for each layout of the tensors.  The launcher gets its result as `bound`.
    - `aligned`: the names of tensors whose address matters to `unsupported` or `bind`.
    - `empty`: a function that computes the results if an argument is empty.
    - `packed`: a description of the weight that the option `prepare` makes.
    - `allocates`: whether the launcher allocates the results, for speed.
    - `traffic`: a function that computes the bytes that a call moves.
    - `options`: fields of `Takes` (the calls that the kernel takes) and of `Kernel`.

    Raises `TypeError` and `ValueError` as `registry.register` does."""
    traffic = "counted" if traffic is None and backend == "torch" and op is None else traffic

    def decorate(fn: Function) -> Function:
        name = fn.__name__
        spec = get_op(op or fn.__module__.split(".")[-2])
        if spec.contract is None:
            raise TypeError(f"{spec.name}: the op declares no contract; use registry.register")
        contract = spec.contract if packed is None else spec.contract.with_packed(str(spec.prepared), packed)
        contract = replace(contract, bounds=None) if backend == "cpp" else contract
        set_options = {option_name: value for option_name, value in options.items() if value is not None}
        rule_names = set_options.keys() & {rule_field.name for rule_field in fields(Takes)}
        takes = Takes(**{option_name: set_options.pop(option_name) for option_name in rule_names})
        takes.check(contract, [parameter.name for parameter in spec.parameters])
        get_refusal = partial(takes.why_not, contract=contract, rest=unsupported)
        aligned_names = (*aligned, *takes.whole, *takes.mapped)
        launcher = Launcher(spec, contract, fn, aligned_names, bind, empty, backend == "cpp", allocates)

        @wraps(fn)
        def launch(*args: Any, **kwargs: Any) -> Any:
            return launcher(args, kwargs)

        launch.__signature__ = launcher.signature  # type: ignore[attr-defined]  # what help() and the registry read
        default_role = name if name in ("naive", "library") else "optimized"
        launcher.kernel = add_kernel(
            spec, name, cast(Role, role or default_role), backend, launch, unsupported=get_refusal,
            takes=takes, traffic=partial(launcher.traffic_of, traffic) if callable(traffic) else traffic, **set_options,
        )  # fmt: skip
        return cast(Function, launch)

    return decorate
