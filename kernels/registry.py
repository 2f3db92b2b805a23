"""The one registry: every op and every kernel, ours and from outside.

Modules are found by listing folders, so that a new op or rung edits no list. From outside the tree a kernel or an op
comes as a file (`load_file`) or as an entry point of the group `rooflab.kernels`, and registers itself in the same way.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, Literal, TypeVar, cast, get_args

import torch

from rooflab.kernels._contract import Refusal, check_config, check_plan, check_prepare, check_signature
from rooflab.kernels._device import on_its_device
from rooflab.kernels.tuning import Tuning
from rooflab.reference import spec as spec_module
from rooflab.reference.spec import OpSpec
from rooflab.roofline.model import Traffic

Role = Literal["naive", "library", "optimized", "peer"]
Backend = Literal["torch", "triton", "gluon", "cuda"]
Function = TypeVar("Function", bound=Callable[..., Any])

ENTRY_POINT_GROUP = "rooflab.kernels"


class Arguments(SimpleNamespace):
    """An op's arguments as attributes, those that were left out with the reference's defaults.

    Beside them `config` (None leaves the choice to the kernel) and `device` (`cpu` or `cuda`; `meta` tensors do not
    say where they would be).
    """

    def but(self, **changes: Any) -> Arguments:
        """The same arguments with some replaced."""
        return Arguments(**{**vars(self), **changes})


@dataclass(frozen=True)
class Kernel:
    """One implementation of an op."""

    op: str
    name: str
    role: Role
    backend: Backend
    fn: Callable[..., Any]
    min_sm: int | None = None
    """Least compute capability, 90 for Hopper; None where any will do."""
    devices: tuple[str, ...] = ("cpu", "cuda")
    """Device types that it runs on; a Triton kernel reaches the CPU only through the interpreter."""
    requires: tuple[str, ...] = ()
    """Packages that must be importable."""
    nondeterministic: str | None = None
    """Why two runs may differ, where they may."""
    unsupported: Callable[[Arguments], str | None] | None = None
    """`unsupported(inputs)`: why these inputs are not for this kernel, or None."""
    traffic: Callable[[Arguments], Traffic] | None = None
    """`traffic(inputs)`: what it moves; reads shapes and real int tensors only."""
    prepare: Callable[..., Any] | None = None
    """Packs the op's weight once at load; the kernel then takes the packed form in its place.  Behind the weight it may
    name arguments of the op's `prepared_with`."""
    plan: Callable[[Arguments], Any] | None = None
    """`plan(inputs)`: what an engine does once for all layers of a step, waiting for the device; the kernel takes the
    result as `plan`, and with None plans in its call.  The bench plans outside of what it times, and shows values of
    integers alone: other tensors are on `meta`."""
    tuning: Tuning | None = None
    """Of a tunable kernel: its configs."""
    config: Any = None
    """The config that the kernel is held to (`configs.with_config`)."""
    accepted: frozenset[str] = field(init=False, repr=False)
    """Names of the arguments that it takes, `out` and `config` included where it takes them."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "accepted", frozenset(inspect.signature(self.fn).parameters))

    @property
    def id(self) -> str:
        """`gemm/tiled`."""
        return f"{self.op}/{self.name}"

    @property
    def takes_out(self) -> bool:
        """Whether outputs can be written to tensors that the caller allocated."""
        return "out" in self.accepted

    @property
    def takes_config(self) -> bool:
        """Whether it is tunable: its `config` is keyword-only, and None leaves the choice to the launcher."""
        return "config" in self.accepted

    def __call__(self, **inputs: Any) -> Any:
        """Calls the kernel; an argument it has not got is left out when its value means off, and else `ValueError`."""
        refusal = self.why_not_args(inputs)
        if refusal:
            raise ValueError(str(refusal))
        return self.fn(**{name: value for name, value in inputs.items() if name in self.accepted})

    def why_not_here(self, device: torch.device) -> Refusal | None:
        """Why this kernel cannot run on `device` in this process, or None."""
        for package in self.requires:
            if importlib.util.find_spec(package) is None:
                return Refusal("UNAVAILABLE", f"{package} is not installed")
        reason = self._why_not_on_cpu() if device.type == "cpu" else self._why_not_on_gpu(device)
        return Refusal("UNSUPPORTED", reason) if reason else None

    def _why_not_on_cpu(self) -> str | None:
        if os.environ.get("ROOFLAB_EMULATE") == "1" and self.backend != "torch" and self.role != "peer":
            # Only in the processes of `bench/emulate/emulation.py`, which run compiled code for sm90.
            return f"needs sm{self.min_sm}, sm90 is emulated" if (self.min_sm or 0) > 90 else None
        if self.backend == "triton" and "cpu" in self.devices:
            return None if interpreting() else "needs a CUDA device, or Triton's interpreter on the CPU"
        return "needs a CUDA device" if self.backend != "torch" or "cpu" not in self.devices else None

    def _why_not_on_gpu(self, device: torch.device) -> str | None:
        if self.backend in ("triton", "gluon") and interpreting():
            return "this process interprets Triton kernels (TRITON_INTERPRET=1), also those of a GPU"
        if device.type not in self.devices:
            return f"runs on {' and '.join(self.devices)}, found {device.type}"
        if self.min_sm is not None:
            major, minor = torch.cuda.get_device_capability(device)
            if 10 * major + minor < self.min_sm:
                return f"needs sm{self.min_sm}, found sm{10 * major + minor}"
        return None

    def why_not_args(self, inputs: Mapping[str, Any], spec: OpSpec | None = None) -> Refusal | None:
        """Why the kernel cannot take these arguments, by their names and by its own `unsupported`.

        `spec` is that of an op that is not registered.
        """
        defaults = {parameter.name: parameter.default for parameter in (spec or get_op(self.op)).parameters}
        for name, value in inputs.items():
            if name not in self.accepted and not (name in defaults and value is defaults[name]):
                return Refusal("UNSUPPORTED", f"{self.id} has no {name!r}")
        reason = self.unsupported(self._arguments(inputs, spec)) if self.unsupported is not None else None
        return Refusal("UNSUPPORTED", f"{self.id}: {reason}") if reason else None

    def traffic_of(self, inputs: Mapping[str, Any], device: str = "cuda", spec: OpSpec | None = None) -> Traffic | None:
        """What the kernel says it moves on `device` (cpu or cuda) for these inputs, real or `meta`; None if nothing."""
        return None if self.traffic is None else self.traffic(self._arguments(inputs, spec, device))

    def plan_of(self, inputs: Mapping[str, Any]) -> Any:
        """The plan of a step with these inputs; None where the kernel does not plan."""
        return None if self.plan is None else self.plan(self._arguments(inputs))

    def _arguments(self, inputs: Mapping[str, Any], spec: OpSpec | None = None, device: str = "cuda") -> Arguments:
        parameters = (spec or get_op(self.op)).parameters
        defaults = {each.name: each.default for each in parameters if each.default is not each.empty}
        return Arguments(**{**defaults, "config": self.config, "device": device, **inputs})


_ops: dict[str, OpSpec] = {}
_kernels: dict[str, dict[str, Kernel]] = {}


def interpreting() -> bool:
    """Whether Triton kernels run in its interpreter, which is a property of the whole process."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def add_op(op: OpSpec) -> OpSpec:
    """Registers an op.  Raises `ValueError` on a second op of that name."""
    known = _ops.get(op.name)
    if known is not None and known is not op:
        raise ValueError(f"op: {op.name!r} is registered already")
    _ops[op.name] = op
    return op


def get_op(name: str) -> OpSpec:
    """The op called `name`.  Raises `ValueError` naming those there are."""
    if name not in _ops and name.isidentifier() and (_folder_of(spec_module) / f"{name}.py").is_file():
        module = importlib.import_module(f"rooflab.reference.{name}")
        if hasattr(module, "SPEC"):
            add_op(module.SPEC)
    if name not in _ops:
        load_all()
    if name not in _ops:
        raise ValueError(f"op: expected one of {', '.join(sorted(_ops))}, got {name!r}")
    return _ops[name]


def register(
    *, op: str, name: str, role: Role, backend: Backend, min_sm: int | None = None, **options: Any
) -> Callable[[Function], Function]:
    """Registers the decorated function as a kernel of `op`, and returns it; one of Triton runs on its tensors' GPU.

    `options` are the other fields of `Kernel`.  Raises `TypeError` where the function's arguments are not the
    reference's (plus an optional `out` and `config`) or a tunable kernel lacks a part, `ValueError` on a second kernel
    of that name, a role or backend that is not one, or an op that is not there.
    """
    if role not in get_args(Role):
        raise ValueError(f"role: expected one of {', '.join(get_args(Role))}, got {role!r}")
    if backend not in get_args(Backend):
        raise ValueError(f"backend: expected one of {', '.join(get_args(Backend))}, got {backend!r}")
    spec = get_op(op)

    def decorate(fn: Function) -> Function:
        check_signature(spec, name, fn)
        check_config(f"{op}/{name}", inspect.signature(fn).parameters.get("config"), options.get("tuning"))
        check_prepare(f"{op}/{name}", options.get("prepare"), spec.prepared_with)
        check_plan(f"{op}/{name}", inspect.signature(fn).parameters.get("plan"), options.get("plan"))
        if (name == "naive") != (role == "naive"):
            raise ValueError(f"{op}/{name}: the kernel of role naive is the one named 'naive'")
        if name in _kernels.setdefault(op, {}):
            raise ValueError(f"kernel: {op}/{name} is registered already")
        launcher = cast(Function, on_its_device(fn)) if backend in ("triton", "gluon") else fn
        _kernels[op][name] = Kernel(op, name, role, backend, launcher, min_sm, **options)
        return launcher

    return decorate


def ops() -> dict[str, OpSpec]:
    """Every op by name, in alphabetical order."""
    load_all()
    return dict(sorted(_ops.items()))


def kernels(op: str) -> dict[str, Kernel]:
    """Every kernel of `op` by name: naive, library, then the ladder by name.  Raises `ValueError` on an unknown op."""
    get_op(op)
    load_all()
    roles = get_args(Role)
    of_op = _kernels.get(op, {}).values()
    return {kernel.name: kernel for kernel in sorted(of_op, key=lambda kernel: (roles.index(kernel.role), kernel.name))}


def get_kernel(op: str, name: str) -> Kernel:
    """One kernel.  Raises `ValueError` naming those there are."""
    known = kernels(op)
    if name not in known:
        raise ValueError(f"kernel: {op} has {', '.join(known)}, got {name!r}")
    return known[name]


def registered(op: str, name: str) -> Kernel:
    """A kernel whose own module is imported, when the others may not be; for a launcher that asks about itself."""
    return _kernels[op][name]


@cache
def load_all() -> None:
    """Imports every op and kernel module of the tree, then every entry point."""
    for file in sorted(_folder_of(spec_module).glob("*.py")):
        module = importlib.import_module(f"rooflab.reference.{file.stem}")
        if hasattr(module, "SPEC"):
            add_op(module.SPEC)
    for folder in sorted(path for path in Path(__file__).parent.iterdir() if (path / "__init__.py").is_file()):
        for file in sorted(folder.glob("*.py")):
            if not file.stem.startswith("_"):
                importlib.import_module(f"rooflab.kernels.{folder.name}.{file.stem}")
    for entry_point in entry_points(group=ENTRY_POINT_GROUP):
        entry_point.load()


def load_file(path: Path) -> list[Kernel]:
    """Imports a file that registers kernels (and ops, with `add_op`), and returns what it added.

    Raises `ValueError` where there is no such Python file or it registers no kernel.
    """
    path = Path(path)
    if path.suffix != ".py" or not path.is_file():
        raise ValueError(f"kernel: expected a Python file, got {str(path)!r}")
    load_all()
    before = {kernel.id for named in _kernels.values() for kernel in named.values()}
    # A module name that no import can reach, and one per file, so that two users' `mine.py` do not collide.
    name = f"rooflab_file_{abs(hash(path.resolve()))}"
    found_spec = importlib.util.spec_from_file_location(name, path)
    assert found_spec is not None and found_spec.loader is not None, "a .py file always has a loader"
    module = importlib.util.module_from_spec(found_spec)
    sys.modules[name] = module  # Triton reads a kernel's source through its module
    try:
        found_spec.loader.exec_module(module)
    except (SyntaxError, ImportError, NameError, AttributeError, TypeError) as error:
        raise ValueError(f"kernel: {path.name} cannot be imported: {type(error).__name__}: {error}") from error
    added = [kernel for named in _kernels.values() for kernel in named.values() if kernel.id not in before]
    if not added:
        raise ValueError(
            f"kernel: {path.name} registers none; decorate a function with rooflab.kernels.registry.register"
        )
    return added


def _folder_of(module: ModuleType) -> Path:
    assert module.__file__ is not None, "our own modules are files"
    return Path(module.__file__).parent
