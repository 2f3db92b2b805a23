"""Holds the registry of all ops and kernels.

The registry lists folders to find ops and kernels, so no list of them is needed.  Other packages register kernels by a
file (`load_file`) or by an entry point of the group `rooflab.kernels`.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial, update_wrapper
from importlib.metadata import entry_points, version
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any, Literal, TypeVar, cast, get_args

import torch
from packaging.version import Version

from rooflab.kernels import _card, _device
from rooflab.kernels._native import why_no_compiler
from rooflab.kernels._user_files import IMPORT_ERRORS, first_line, import_file
from rooflab.kernels.takes import EXTRA_ARGUMENTS, Refusal, Takes, Unsupported
from rooflab.kernels.traffic import counted
from rooflab.kernels.tuning import Tuning, bucket_of, recorded_choice, rows_of
from rooflab.reference.spec import Arguments, OpSpec, Scheme
from rooflab.roofline.model import Traffic
from rooflab.roofline.names import check_name

Role = Literal["naive", "library", "optimized", "peer"]
Backend = Literal["torch", "triton", "gluon", "cuda", "cpp"]
CPU_BACKENDS = ("torch", "cpp")
"""The backends whose kernels run directly on a CPU.  Other kernels need a GPU, an interpreter or an emulator."""
Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True)
class Kernel:
    """Describes one implementation of an op: all that the registry knows about this kernel."""

    op: str
    name: str
    role: Role
    backend: Backend
    fn: Callable[..., Any]
    min_sm: int | None = None
    """The smallest compute capability that the kernel needs, such as 90 for Hopper; None means any."""
    devices: tuple[str, ...] = ("cpu", "cuda")
    """The device types on which the kernel runs.  On a CPU a Triton kernel needs the interpreter."""
    requires: tuple[str, ...] = ()
    """The Python packages that the kernel needs."""
    nondeterministic: str | None = None
    """The reason why two runs may give different results, or None if they give the same result."""
    unsupported: Unsupported = lambda inputs: None
    """`unsupported(inputs)`: returns the reason why the kernel cannot take these inputs, or None."""
    takes: Takes = field(default_factory=Takes, compare=False)
    """The part of `unsupported` that is written as data."""
    traffic: Callable[[Arguments], Traffic] | Literal["counted"] | None = None
    """`traffic(inputs)`: returns the bytes of a call, from shapes and real integers.  `counted` stands for a count of
    torch's calls (`traffic.py`)."""
    prepare: Callable[..., Any] | None = None
    """Packs the op's weight once at load.  The kernel then takes the packed weight instead.  After the weight,
    `prepare` may take arguments that the op's `prepared_with` names."""
    plan: Callable[[Arguments], Any] | None = None
    """`plan(inputs)`: work that an engine does once per step for all layers, and that waits for the device.  The kernel
    gets the result as `plan`, or makes the plan in the call if `plan` is None.  The bench does not measure the plan.
    The bench calls `plan` with real integer tensors, and other tensors on `meta`."""
    fenced_since: str | None = None
    """The first Triton version, such as `3.7`, that puts a `fence.proxy.async` between the kernel's `cp.async` and
    wgmma. Without the fence, the code is a race by PTX's rules (the emulator reports it)."""
    over: str | None = None
    """The name of the rung below this rung in the ladder, or None."""
    shows: Mapping[str, str] = field(default_factory=dict, compare=False)
    """The facts that the code shows, by case: `loop.tma == 2 > below.loop.tma; threads == 384` (`tests/shown.py`)."""
    tuning: Tuning | None = None
    """The configs of a tunable kernel, or None for other kernels."""
    config: Any = None
    """The fixed config of the kernel (see `with_config`), or None."""
    file: Path | None = None
    """The file that registered the kernel, if `load_file` read it, or None."""

    @cached_property
    def accepted(self) -> frozenset[str]:
        """Returns the names of the arguments that the kernel takes, `out` and `config` included."""
        return frozenset(inspect.signature(self.fn).parameters)

    @property
    def id(self) -> str:
        """Returns the kernel's op and name, such as `gemm/tiled`."""
        return f"{self.op}/{self.name}"

    @property
    def has_code(self) -> bool:
        """Returns whether the kernel's device code is compiled from source here, so that the emulator can run it."""
        return self.backend in ("triton", "gluon") or (self.backend == "cuda" and {*self.requires} <= {"cupy"})

    def __call__(self, **inputs: Any) -> Any:
        """Calls the kernel with the arguments of the op.  Raises `ValueError` if the kernel does not support them. The
        kernel may lack an argument if its value is the default."""
        if refusal := self.why_not_args(inputs):
            raise ValueError(str(refusal))
        return self.fn(**{name: value for name, value in inputs.items() if name in self.accepted})

    def why_not_here(self, device: torch.device) -> Refusal | None:
        """Returns the reason why this kernel cannot run on `device` in this process, or None."""
        if (refusal_text := excluded().get(self.id)) is not None:
            return Refusal("UNAVAILABLE", f"excluded: {refusal_text}")
        for package in self.requires:
            if importlib.util.find_spec(package) is None:
                return Refusal("UNAVAILABLE", f"{package} is not installed")
        refusal_text = self._why_not_on_cpu() if device.type == "cpu" else self._why_not_on_gpu(device)
        return Refusal("UNSUPPORTED", refusal_text) if refusal_text else None

    def _why_not_on_cpu(self) -> str | None:
        if _device.is_emulated and self.has_code:
            return f"needs sm{self.min_sm}, sm90 is emulated" if (self.min_sm or 0) > 90 else None
        if self.backend == "triton" and "cpu" in self.devices:
            if interpreting():
                return None if Version(version("triton")) >= Version("3.7") else "Triton's interpreter needs Triton 3.7"
            return "needs a CUDA device, or Triton's interpreter on the CPU"
        if self.backend == "cpp":
            return why_no_compiler()
        return "needs a CUDA device" if self.backend != "torch" or "cpu" not in self.devices else None

    def _why_not_on_gpu(self, device: torch.device) -> str | None:
        if self.backend in ("triton", "gluon") and interpreting():
            return "this process interprets Triton kernels (TRITON_INTERPRET=1), also those of a GPU"
        if device.type not in self.devices:
            return f"runs on {' and '.join(self.devices)}, found {device.type}"
        major, minor = torch.cuda.get_device_capability(device) if self.min_sm else (0, 0)
        return f"needs sm{self.min_sm}, found sm{major}{minor}" if 10 * major + minor < (self.min_sm or 0) else None

    def why_not_served(self, device: torch.device) -> str | None:
        """Returns the reason why an engine must not use this kernel on `device`, or None.  A bench may still use it."""
        if self.nondeterministic is not None:
            return f"an answer must not depend on chance: {self.nondeterministic}"
        if device.type != "cuda" or not self.fenced_since or Version(version("triton")) >= Version(self.fenced_since):
            return None
        return f"Triton {version('triton')} compiles it with a race; {self.fenced_since} does not"

    def why_not_args(self, inputs: Mapping[str, Any], spec: OpSpec | None = None) -> Refusal | None:
        """Returns the reason why the kernel cannot take these arguments, or None.  The reason also names another kernel
        that can take them.  `spec` describes an op that is not registered.  With `spec`, no other kernel is named."""
        defaults = {parameter.name: parameter.default for parameter in (spec or get_op(self.op)).parameters}
        extras = [name for name in inputs if name not in self.accepted and inputs[name] is not defaults.get(name, self)]
        refusal_text = f"it has no {extras[0]!r}" if extras else self.unsupported(self._arguments(inputs, spec))
        alternative_text = "" if spec or not refusal_text else who_takes(self, inputs)
        return Refusal("UNSUPPORTED", f"{self.id}: {refusal_text}{alternative_text}") if refusal_text else None

    @property
    def tunable(self) -> Tuning:
        """Returns the kernel's `tuning`.  Raises `ValueError` if the kernel takes no config."""
        if self.tuning is None:
            raise ValueError(f"kernel: expected a tunable one, got {self.id}, which takes no config")
        return self.tuning

    def config_for(self, case: Mapping[str, Any], scheme: Scheme, device: torch.device) -> Any:
        """Returns the config of a launch on `device`, or None if the kernel takes no config.  It is the recorded config
        (in `choices.json`) if this is legal for `case` (sizes of the call), else the default."""
        if self.tuning is None:
            return None
        rows, gpu_name = rows_of(case), torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        saved_choice = {} if rows is None else recorded_choice(self.op, gpu_name, bucket_of(rows))
        config_values = saved_choice["configs"].get(self.name) if saved_choice.get("scheme") == scheme.name else None
        config = None if config_values is None else self.tuning.make_config(config_values)
        has_legal_record = config is not None and self.tuning.is_legal(config, case, scheme)
        return config if has_legal_record else self.tuning.heuristic(case, scheme)

    def with_config(self, config: Any) -> Kernel:
        """Returns a kernel that launches and counts traffic with `config`.  Raises `ValueError` on a wrong type."""
        if not isinstance(config, self.tunable.config_type):
            raise ValueError(f"config: expected one of {self.id}, got {config!r}")
        return replace(self, fn=update_wrapper(partial(self.fn, config=config), self.fn), config=config)

    def traffic_of(self, inputs: Mapping[str, Any], device: str = "cuda", spec: OpSpec | None = None) -> Traffic | None:
        """Returns the kernel's traffic on `device` (cpu or cuda) for real or `meta` inputs, or None if unknown."""
        if self.traffic == "counted":
            return counted(self, inputs, device)
        return None if self.traffic is None else self.traffic(self._arguments(inputs, spec, device))

    def _arguments(self, inputs: Mapping[str, Any], spec: OpSpec | None = None, device: str = "cuda") -> Arguments:
        return (spec or get_op(self.op)).arguments(inputs, config=self.config, device=device)


_ops: dict[str, OpSpec] = {}
_kernels: dict[str, Kernel] = {}
broken_plugins: dict[str, Refusal] = {}
"""The entry points that cannot be imported, by name.  Complete after `load_plugins`."""
_load_lock = threading.RLock()


def interpreting() -> bool:
    """Returns whether Triton's interpreter runs the Triton kernels of this process."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def excluded() -> Mapping[str, str]:
    """Returns the kernels that must not run in this process, by id, with the reasons.  Such a kernel broke an earlier
    process of this bench run.  The environment variable `ROOFLAB_EXCLUDE` names the JSON file with these reasons."""
    exclude_path = os.environ.get("ROOFLAB_EXCLUDE")
    return cast(Mapping[str, str], json.loads(Path(exclude_path).read_text())) if exclude_path else {}


def add_op(op: OpSpec) -> OpSpec:
    """Registers an op.  Raises `ValueError` if another op has the same name."""
    if _ops.setdefault(op.name, op) is not op:
        raise ValueError(f"op: {op.name!r} is registered already")
    return op


def get_op(name: str) -> OpSpec:
    """Returns the op called `name`.  If the op is unknown, raises `ValueError` with the list of known ops."""
    if name not in _ops and name in _folders():
        add_op(importlib.import_module(f"rooflab.reference.{name}").SPEC)
    known_ops = _ops if name in _ops else ops()
    if name not in known_ops:
        raise _unknown(f"op: expected one of {', '.join(known_ops)}, got {name!r}")
    return known_ops[name]


def _unknown(text: str) -> ValueError:
    """Returns the error for an unknown op or kernel.  Its text lists the plug-ins that could not be imported, because
    they may define the name."""
    return ValueError("; ".join([text, *map(str, broken_plugins.values())]))


def register(*, op: str, name: str, role: Role, backend: Backend, **options: Any) -> Callable[[Function], Function]:
    """Registers the decorated function as a kernel of `op` and returns it.

    `options` are the other fields of `Kernel`.  Raises `TypeError` if the arguments differ from the reference's
    arguments (plus `EXTRA_ARGUMENTS`), or if only one of `tuning` and the argument `config` is given.  Raises
    `ValueError` on a taken name, or on an unknown role, backend or op.
    """
    spec = get_op(op)

    def decorate(fn: Function) -> Function:
        launcher = cast(Function, _device.on_its_device(fn)) if backend in ("triton", "gluon") else fn
        add_kernel(spec, name, role, backend, launcher, **options)
        return launcher

    return decorate


def add_kernel(spec: OpSpec, name: str, role: Role, backend: Backend, fn: Callable[..., Any], **options: Any) -> Kernel:
    """Registers a function as a kernel.  Raises the same errors as `register`."""
    for field_name, value, allowed_values in (("role", role, get_args(Role)), ("backend", backend, get_args(Backend))):
        if value not in allowed_values:
            raise ValueError(f"{field_name}: expected one of {', '.join(allowed_values)}, got {value!r}")
    check_name("name", name)
    kernel = Kernel(spec.name, name, role, backend, fn, **options)
    _check_arguments(kernel, spec)
    if (name == "naive") != (role == "naive"):
        raise ValueError(f"{kernel.id}: the kernel of role naive is the one named 'naive'")
    if kernel.id in _kernels:
        raise ValueError(f"kernel: {kernel.id} is registered already")
    _kernels[kernel.id] = kernel
    return kernel


def _check_arguments(kernel: Kernel, spec: OpSpec) -> None:
    """Raises `TypeError` if the kernel's arguments are not those of the reference, in the same order.  A kernel may
    lack keyword-only arguments. An argument `config` needs the option `tuning`, and an argument `plan` needs the option
    `plan`."""
    parameters = dict(inspect.signature(kernel.fn).parameters)
    extra_parameters = {name: parameters.pop(name, None) for name in EXTRA_ARGUMENTS}
    op_args = [param for param in spec.parameters if param.name in parameters or param.kind is not param.KEYWORD_ONLY]
    for op_arg, fn_arg in zip_longest(op_args, parameters.values()):
        if op_arg is None or fn_arg is None or (op_arg.name, op_arg.default) != (fn_arg.name, fn_arg.default):
            needs = "no other argument" if op_arg is None else f"the argument {op_arg.replace(annotation=op_arg.empty)}"
            got_arg = "none" if fn_arg is None else fn_arg.replace(annotation=fn_arg.empty)
            raise TypeError(f"{kernel.id}: expected {needs}, as in {spec.call()}, got {got_arg}")
    for name, option, value in (("config", "tuning", kernel.tuning), ("plan", "plan", kernel.plan)):
        param = extra_parameters[name]
        if (param is None) != (value is None) or (param and (param.kind, param.default) != (param.KEYWORD_ONLY, None)):
            raise TypeError(f"{kernel.id}: expected both {option} and a keyword-only argument {name}=None, or neither")
    for name in [] if kernel.prepare is None else [*inspect.signature(kernel.prepare).parameters][1:]:
        if name not in spec.prepared_with:
            allowed_text = ", ".join(spec.prepared_with) or "nothing"
            raise TypeError(f"{kernel.id}: prepare asks for {name!r}, expected one of {allowed_text}")


def ops() -> dict[str, OpSpec]:
    """Returns all ops by name, in alphabetical order."""
    for name in _folders():
        get_op(name)
    load_plugins()
    return dict(sorted(_ops.items()))


def kernels(op: str) -> dict[str, Kernel]:
    """Returns the kernels of `op` by name, ordered by their `Role`.  Raises `ValueError` on an unknown op."""
    get_op(op)
    _load(op)
    load_plugins()
    roles = get_args(Role)
    of_op = [kernel for kernel in _kernels.values() if kernel.op == op]
    return {kernel.name: kernel for kernel in sorted(of_op, key=lambda kernel: (roles.index(kernel.role), kernel.name))}


def every_kernel() -> list[Kernel]:
    """Returns the kernels of all ops, from this repository and from entry points of other packages."""
    return [kernel for op in ops() for kernel in kernels(op).values()]


def get_kernel(op: str, name: str) -> Kernel:
    """Returns one kernel.  Raises `ValueError`, with the list of known kernels, if the name is unknown."""
    get_op(op)
    if op in _folders() and name.isidentifier() and (Path(__file__).parent / op / f"{name}.py").is_file():
        importlib.import_module(f"rooflab.kernels.{op}.{name}")  # alone: all modules of an op take 1.5 s
    if f"{op}/{name}" not in _kernels and name not in (known_names := kernels(op)):
        raise _unknown(f"kernel: {op} has {', '.join(known_names)}, got {name!r}")
    return _kernels[f"{op}/{name}"]


def who_takes(kernel: Kernel, inputs: Mapping[str, Any]) -> str:
    """Finds another kernel for a call that `kernel` refuses.  Returns a text such as `; gemm/tma takes it`, or an empty
    text if no kernel takes the call.  Tries the simpler kernels on which `kernel` improves, then `library` and
    `naive`."""
    spec, kernel_by_name, lower_name, lower_names = get_op(kernel.op), kernels(kernel.op), kernel.over, list[str]()
    while lower_name in kernel_by_name and lower_name not in (*lower_names, "naive"):
        lower_names.append(lower_name)
        lower_name = kernel_by_name[lower_name].over
    candidates = (kernel_by_name[name] for name in (*lower_names, "library", "naive") if name in kernel_by_name)
    takers = (taker for taker in candidates if taker != kernel and taker.why_not_args(inputs, spec) is None)
    return "".join(f"; {taker.id} takes it" for taker in islice(takers, 1))


@cache
def _folders() -> tuple[str, ...]:
    """Returns the sorted names of the repository's ops.  The kernels of each op are in a folder with the op's name."""
    return tuple(sorted(init_path.parent.name for init_path in Path(__file__).parent.glob("*/__init__.py")))


@cache
def _load(op: str) -> None:
    """Imports all kernel files of the op `op`.  Does nothing if the repository has no such op."""
    with _load_lock:
        for file in sorted((Path(__file__).parent / op).glob("[!_]*.py")) if op in _folders() else ():
            importlib.import_module(f"rooflab.kernels.{op}.{file.stem}")


@cache
def load_plugins() -> None:
    """Loads all ops, then the entry points of other packages, which may extend these ops.  Notes which ones fail."""
    plugin_entries = entry_points(group="rooflab.kernels")
    for op in _folders() if plugin_entries else ():
        _load(op)
    for entry_point in plugin_entries:
        if (error := _broken(entry_point.load)) is not None:
            refusal_text = f"plug-in {entry_point.name} cannot be imported: {first_line(error)}"
            broken_plugins.setdefault(entry_point.name, Refusal("UNAVAILABLE", refusal_text))


def _broken(load: Callable[[], object]) -> BaseException | None:
    """Calls `load`, which imports kernels.  If the import fails, removes the ops and kernels that it has registered.
    Returns the error, or None."""
    registry_snapshots: list[tuple[dict[str, Any], ...]] = [(_ops, _ops.copy()), (_kernels, _kernels.copy())]
    try:
        load()
    except IMPORT_ERRORS as error:
        for registered_entries, saved_entries in registry_snapshots:
            registered_entries.clear()
            registered_entries.update(saved_entries)
        return error
    return None


def load_file(path: Path) -> list[Kernel]:
    """Imports a file that registers kernels (and ops, with `add_op`).  Returns the new kernels.

    Raises `ValueError` if there is no such Python file, or if the file registers no kernel.
    """
    if path.suffix != ".py" or not path.is_file():
        raise ValueError(f"kernel: expected a Python file, got {str(path)!r}")
    known_ids = {kernel.id for kernel in every_kernel()}
    error = _broken(partial(import_file, path))
    if error is not None and _card.make_fake_gpu is not None:  # not before: a file may ask for a GPU
        with _card.make_fake_gpu():
            error = _broken(partial(import_file, path))
    if error is not None:
        raise ValueError(f"kernel: {path.name} cannot be imported: {first_line(error)}") from error
    added = {name: replace(kernel, file=path.resolve()) for name, kernel in _kernels.items() if name not in known_ids}
    if not added:
        raise ValueError(f"kernel: {path.name} registers no kernel; use rooflab.kernels.registry.register")
    _kernels.update(added)
    return list(added.values())
