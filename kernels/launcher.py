"""A function that launches becomes a kernel with the op's own arguments: checked, with outputs and a config.

A launcher names the arguments and results that it wants, without defaults:

    @kernel(backend="triton", tuning=TUNING, limits={"H": 16384})
    def fused(x, weight, out, *, eps, config): ...

in `kernels/rmsnorm/fused.py` is `rmsnorm/fused`, called as `fused(x, weight, eps, out=None)`.  Arguments are checked
once for each layout (shapes, strides, dtypes, devices, options): a look costs about 1 us a tensor.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from functools import partial, wraps
from operator import itemgetter
from typing import Any, Literal, cast

import torch

from rooflab.kernels import _checks, _device
from rooflab.kernels.registry import Backend, Function, Role, add_kernel, get_op
from rooflab.kernels.takes import Takes, Unsupported
from rooflab.kernels.tuning import Tuning
from rooflab.reference.contract import Argument, Contract, Dims, Given, Packed, Result
from rooflab.reference.spec import DTYPE_NAMES, Arguments, Case, OpSpec, get_scheme
from rooflab.roofline.model import Traffic

MOST_LAYOUTS = 4096
"""Layouts that a kernel remembers: enough for the row counts of a serving engine; an entry takes about 1 KB."""
Results = tuple[tuple[str, tuple[int, ...], tuple[int, ...], torch.dtype], ...]
"""Names, shapes, strides and dtypes of what a launch writes."""
OF_TAKES = frozenset(field.name for field in fields(Takes))
"""Options of `kernel` that say what a rung takes."""
Pair = tuple[int, int, str, int, int, bool]
"""An output of the caller and what it may not overlap: its place and bytes; an input's name, or empty and the place of
another output; the bytes of that; whether the output may be that input."""


@dataclass(slots=True)
class BoundCall:
    """What was worked out for one layout."""

    results: Results
    names: tuple[str, ...]
    """Of the results."""
    device: torch.device
    gpu: int | None
    """The number of the GPU that must be the current one."""
    config: Any
    empty: bool
    """Whether every result is empty: there is nothing to launch."""
    nothing: bool
    """Whether an argument is empty, and the kernel's `empty` makes the results."""
    dims: Dims
    apart: tuple[Pair, ...] = ()
    """Of the caller's outputs."""
    more: Any = None
    """What the kernel's own `bind` worked out."""


class Launcher:
    """One kernel's launches, and what is known of the layouts so far."""

    def __init__(
        self,
        spec: OpSpec,
        name: str,
        fn: Callable[..., Any],
        unsupported: Unsupported,
        *,
        tuning: Tuning | None,
        contract: Contract,
        aligned: tuple[str, ...],
        bind: Callable[[Arguments], Any] | None,
        empty: Callable[[Arguments], object] | None,
        on_cpu: bool,
        own_bounds: bool,
        allocates: bool,
    ):
        self.spec, self.name, self.fn, self.unsupported, self.aligned = spec, name, fn, unsupported, aligned
        self.tuning = tuning
        self.contract, self.bind, self.empty, self.on_cpu, self.allocates = contract, bind, empty, on_cpu, allocates
        self.bounds = None if own_bounds else self.contract.bounds
        own = inspect.signature(fn).parameters
        self.results = {name: result for name, result in self.contract.results.items() if name in own}
        places = dict(zip(self.contract.results, spec.outputs, strict=False))
        self.in_place = {name: spec.in_place.get(places[name]) for name in self.results}
        self.signature = _signature(spec, own, self.results)
        parameters = self.signature.parameters.values()
        self.positional = tuple(p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD)
        self.defaults = {p.name: p.default for p in parameters if p.default is not p.empty}
        self.tensors = tuple(name for name in self.contract.arguments if name in self.signature.parameters)
        not_in_key = {*self.tensors, "out", "plan"}
        self._options_of = _getter(name for name in self.signature.parameters if name not in not_in_key)
        self._tensors_of = _getter(self.tensors)
        self._known: dict[Any, BoundCall] = {}

    def __call__(self, args: tuple[Any, ...], given: dict[str, Any]) -> Any:
        """Launches with the op's arguments."""
        if args:
            named = dict(zip(self.positional, args, strict=False))
            if len(args) > len(self.positional) or (given and not given.keys().isdisjoint(named)):
                self.signature.bind(*args, **given)
            given = {**self.defaults, **named, **given}
        else:
            given = {**self.defaults, **given}
        out = given.pop("out", None)
        bound = self.bound(given, out)
        if self.bounds is not None or _checks.CHECK_VALUES:
            self._check_values(given, bound.dims)
        own = not self.results or (self.allocates and out is None and not (bound.empty or bound.nothing))
        made = dict.fromkeys(self.results) if own else self._outputs(out, bound, given)
        if bound.empty:
            return _returned(made)
        if bound.nothing and self.empty is not None:
            self.empty(Arguments(**given, **made))
            return _returned(made)
        if made:
            given.update(made)
        if self.tuning is not None:
            given["config"] = bound.config
        if self.bind is not None:
            if bound.more is None:
                bound.more = self.bind(Arguments(**given))
            given["bound"] = bound.more
        if bound.gpu is not None and bound.gpu != torch.cuda.current_device():
            with torch.cuda.device(bound.device):
                returned = self.fn(**given)
        else:
            returned = self.fn(**given)
        return returned if own else _returned(made)

    def bound(self, given: Given, out: Any) -> BoundCall:
        """What is known for the layout of these arguments; checks them if it is new.  Raises `ValueError`."""
        try:
            key: tuple[Any, ...] = (
                self._options_of(given),
                _device.few_sms,
                *[None if x is None else (x.shape, x.stride(), x.dtype, x.device) for x in self._tensors_of(given)],
            )
            if self.on_cpu:
                key += (torch.get_num_threads(),)
            if out is not None or self.aligned:
                key += self._more_of_key(given, out)
        except (AttributeError, KeyError):
            self.signature.bind(**given)
            dims = self.contract.check(given)
            self._check_outs(out, self._results(given, dims), given, dims)
            raise
        found = self._known.get(key)
        if found is None:
            self.signature.bind(**given)
            found = self._bind(given, out)
            if len(self._known) >= MOST_LAYOUTS:
                self._known.clear()
            self._known[key] = found
        return found

    def _more_of_key(self, given: Given, out: Any) -> tuple[Any, ...]:
        """Addresses as far as they count, and the layouts of the caller's outputs."""
        if not self.aligned and isinstance(out, torch.Tensor):
            return out.shape, out.stride(), out.dtype, out.device
        key = [None if (x := given[name]) is None else x.data_ptr() % 16 for name in self.aligned]
        outs = () if out is None else out if isinstance(out, tuple) else (out,)
        layouts = [(x.shape, x.stride(), x.dtype, x.device) for x in outs]
        return (*key, *layouts, *[x.data_ptr() % 16 for x in outs if self.aligned])

    def _check_values(self, given: Given, dims: Dims) -> None:
        """Raises `ValueError` on wrong values of integers, where they are read."""
        first = given[self.tensors[0]]
        if self.bounds is not None and _checks.checks_bounds(first):
            self.bounds(given, dims)
        if self.contract.values is not None and _checks.checks_values(first):
            self.contract.values(given, dims)

    def _bind(self, given: Given, out: Any) -> BoundCall:
        """Raises `ValueError` on arguments that the op or this kernel does not take."""
        dims = self.contract.check(given)
        device = given[self.tensors[0]].device
        if self.on_cpu and device.type != "cpu":  # an address there means nothing to C++
            raise ValueError(f"{self.tensors[0]}: expected a tensor on the CPU, got one on {device}")
        everything = {p.name: p.default for p in self.spec.parameters} | dict(given)
        if reason := self.unsupported(Arguments(**{"config": None, "device": "cuda", **everything})):
            raise ValueError(reason)
        results = self._results(given, dims)
        if out is not None:
            self._check_outs(out, results, given, dims)
        config = given.get("config")
        tensors = [given[name] for name in self.tensors if given[name] is not None]
        shapes = [shape for _, shape, _, _ in results] if self.contract.results else [tensors[0].shape]
        empty = bool(shapes) and all(0 in shape for shape in shapes)
        nothing = self.empty is not None and any(0 in x.shape for x in tensors)
        if self.tuning is not None and config is None and not empty and not nothing:
            config = self.default_config(given, dims)
        apart = () if out is None else self._apart(out if isinstance(out, tuple) else (out,), results, given)
        names = tuple(name for name, *_ in results)
        return BoundCall(results, names, device, _number(device), config, empty, nothing, dims, apart)

    def default_config(self, given: Given, dims: Dims) -> Any:
        """The config of a launch with these arguments that is given none."""
        scheme, more = self.contract.scheme, self.contract.case
        first = given[self.tensors[0]]
        name = DTYPE_NAMES[first.dtype] if scheme is None else scheme(given)
        case = {key: dims[key] for key in self.spec.cases["smoke"][0] if key in dims}
        case |= {} if more is None else more(given)
        assert self.tuning is not None, "asked for where the kernel takes a config"
        return self.tuning.config_for(self.spec.name, self.name, Case(**case), get_scheme(name), first.device)

    def traffic_of(self, traffic: Callable[[Arguments], Traffic], inputs: Arguments) -> Traffic:
        """`traffic` of these inputs with the config of their launch."""
        if self.tuning is not None and inputs.config is None:
            given = vars(inputs)
            inputs = inputs.but(config=self.default_config(given, self.contract.sizes(given)))
        return traffic(inputs)

    def _results(self, given: Given, dims: Dims) -> Results:
        wanted = {name: result for name, result in self.results.items() if result.wanted(given)}
        shapes = {name: tuple(dim.size(dims) or 0 for dim in result.dims) for name, result in wanted.items()}
        return tuple(
            (name, shapes[name], _contiguous(shapes[name]), result.dtype_of(given)) for name, result in wanted.items()
        )

    def _check_outs(self, out: Any, results: Results, given: Given, dims: Dims) -> None:
        """Raises `ValueError` where the caller's outputs do not fit."""
        outs = out if isinstance(out, tuple) else (out,)
        if len(outs) != len(results):
            raise ValueError(f"out: expected {len(results)} tensors, got {len(outs)}")
        for (name, *_), tensor in zip(results, outs, strict=True):
            self.contract.check_out("out", tensor, self.results[name], given, dims)

    def _outputs(self, out: Any, bound: BoundCall, given: Given) -> dict[str, torch.Tensor | None]:
        """The results by name: the caller's, or new; None for one that is not wanted."""
        made: dict[str, torch.Tensor | None]
        if out is None:
            # 1.3 us; torch.empty takes 2.4.
            made = {
                name: torch.empty_strided(shape, strides, dtype=dtype, device=bound.device)
                for name, shape, strides, dtype in bound.results
            }
        else:
            made = self._callers(out, bound, given)
        return made if len(made) == len(self.results) else {**dict.fromkeys(self.results), **made}

    def _apart(self, outs: tuple[torch.Tensor, ...], results: Results, given: Given) -> tuple[Pair, ...]:
        """What `_callers` compares: each output with the inputs and with the outputs before it."""
        pairs = []
        for place, (out, (result, *_)) in enumerate(zip(outs, results, strict=True)):
            if out.is_meta or not out.numel():
                continue
            for name in self.tensors:
                if isinstance(x := given[name], torch.Tensor) and x.numel():
                    over = self.in_place[result] == name and (out.shape, out.stride()) == (x.shape, x.stride())
                    pairs.append((place, _span(out), name, 0, _span(x), over))
            pairs += [(place, _span(out), "", n, _span(x), False) for n, x in enumerate(outs[:place]) if x.numel()]
        return tuple(pairs)

    def _callers(self, out: Any, bound: BoundCall, given: Given) -> dict[str, torch.Tensor | None]:
        """The caller's outputs.  Raises `ValueError` where one lies over an input, or over one before it."""
        outs = out if isinstance(out, tuple) else (out,)
        for place, nbytes, name, other, other_nbytes, over in bound.apart:
            start = outs[place].data_ptr()
            begin = (given[name] if name else outs[other]).data_ptr()
            if start < begin + other_nbytes and begin < start + nbytes and not (over and start == begin):
                itself = f", or {name} itself" if name and self.in_place[bound.names[place]] == name else ""
                what = name or "another output"
                raise ValueError(f"out: expected memory of its own{itself}, got memory that overlaps {what}'s")
        return dict(zip(bound.names, outs, strict=True))


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a contiguous tensor."""
    return tuple(math.prod(max(size, 1) for size in shape[axis + 1 :]) for axis in range(len(shape)))


def _returned(made: Mapping[str, torch.Tensor | None]) -> Any:
    if len(made) == 1:
        return next(iter(made.values()))
    results = [tensor for tensor in made.values() if tensor is not None]
    return results[0] if len(results) == 1 else tuple(results) or None


def _getter(names: Iterable[str]) -> Callable[[Mapping[str, Any]], tuple[Any, ...]]:
    """The values of these names; by one call of C, if there are several."""
    every = tuple(names)
    if len(every) > 1:
        return itemgetter(*every)
    return (lambda given: (given[every[0]],)) if every else lambda given: ()


def _number(device: torch.device) -> int | None:
    """A GPU's number; None for another device."""
    if device.type != "cuda":
        return None
    return torch.cuda.current_device() if device.index is None else device.index


def _span(tensor: torch.Tensor) -> int:
    """Bytes from the first element to the end of the last."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


def _signature(spec: OpSpec, own: Mapping[str, inspect.Parameter], results: Mapping[str, Result]) -> inspect.Signature:
    """The op's own arguments that a launcher takes, then `out`, `plan` and `config`."""
    everything = any(parameter.kind is parameter.VAR_KEYWORD for parameter in own.values())
    taken = [parameter for parameter in spec.parameters if everything or parameter.name in own]
    positional = [p for p in taken if p.kind is not p.KEYWORD_ONLY]
    named = [p for p in taken if p.kind is p.KEYWORD_ONLY]
    keyword = inspect.Parameter.KEYWORD_ONLY
    own_names = [name for name in ("plan", "config") if name in own]
    last = [inspect.Parameter(name, keyword, default=None, annotation=own[name].annotation) for name in own_names]
    out = inspect.Parameter("out", inspect.Parameter.POSITIONAL_OR_KEYWORD, default=None)
    return inspect.Signature([*positional, *([out] if results else []), *named, *last])


def kernel(
    *,
    backend: Backend,
    op: str | None = None,
    role: Role | None = None,
    tuning: Tuning | None = None,
    unsupported: Unsupported | None = None,
    aligned: tuple[str, ...] = (),
    bind: Callable[[Arguments], Any] | None = None,
    empty: Callable[[Arguments], object] | None = None,
    packed: Argument | type[Packed] | None = None,
    allocates: bool = False,
    traffic: Callable[[Arguments], Traffic] | Literal["counted"] | None = None,
    own_bounds: bool = False,
    **options: Any,
) -> Callable[[Function], Function]:
    """Registers a launcher: the decorated function under its own name, as a kernel of the op of its folder.

    It is called with all arguments that it names, checked; with its results (of the contract's names) allocated; and
    with `config` chosen.  It need not return them.  Without results in its arguments it returns what it made, and with
    `**others` it gets all of the op's arguments.

    The fields of `Takes` say what it takes; `unsupported` says the rest, where arithmetic is needed.  `aligned` names
    tensors whose address counts for `unsupported` or
    `bind`, as then does that of `out`; what `bind` makes of the arguments and results, once for a layout, comes as
    `bound`.  `empty` makes the results where an argument is empty and they are not.  `packed` says what `prepare` makes
    of the op's weight.  A kernel that `allocates` gets None for a result that the caller did not pass, and returns its
    own, as a call of torch is fastest.  With `own_bounds` the function itself holds what the contract's `bounds` hold.
    `traffic` finds the launch's config in `inputs.config`; without it the calls of torch in an op's folder are
    `counted`.  A kernel named `naive` or `library` has that role, others are `optimized`.  `options` are fields of
    `Takes` and the other fields of `Kernel`.
    Raises `TypeError` and `ValueError` as `registry.register` does.
    """

    def decorate(fn: Function) -> Function:
        name = fn.__name__
        spec = get_op(op or fn.__module__.split(".")[-2])
        if spec.contract is None:
            raise TypeError(f"{spec.name}: the op declares no contract; use registry.register")
        contract = spec.contract if packed is None else spec.contract.with_packed(str(spec.prepared), packed)
        given = {option: value for option, value in options.items() if value is not None}
        takes = Takes(**{option: given.pop(option) for option in OF_TAKES & given.keys()})
        takes.check(contract, [parameter.name for parameter in spec.parameters])
        why = partial(takes.why_not, contract=contract, rest=unsupported)
        launcher = Launcher(
            spec, name, fn, why, tuning=tuning, contract=contract, aligned=(*aligned, *takes.mapped), bind=bind,
            empty=empty, on_cpu=backend == "cpp", own_bounds=own_bounds, allocates=allocates,
        )  # fmt: skip

        @wraps(fn)
        def launch(*args: Any, **kwargs: Any) -> Any:
            return launcher(args, kwargs)

        launch.__signature__ = launcher.signature  # type: ignore[attr-defined]  # what help() and the registry read
        told = "counted" if traffic is None and backend == "torch" and op is None else traffic
        roles: dict[str, Role] = {"naive": "naive", "library": "library"}
        add_kernel(
            spec, name, role or roles.get(name, "optimized"), backend, launch, tuning=tuning, unsupported=why,
            takes=takes, traffic=partial(launcher.traffic_of, traffic) if callable(traffic) else told, **given,
        )  # fmt: skip
        return cast(Function, launch)

    return decorate
