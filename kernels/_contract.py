"""What `registry.register` requires of a kernel: its arguments, `tuning`, `prepare` and `plan`; and `Refusal`."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin, get_type_hints

from rooflab.kernels.tuning import Tuning
from rooflab.reference.spec import OpSpec

OWN = ("out", "config", "plan")
"""Arguments that a kernel may have in addition to those of the reference."""
_SCALARS = (bool, int, float, str)


@dataclass(frozen=True)
class Refusal:
    """Why a kernel cannot run; as text `UNSUPPORTED: needs sm90, found sm80`."""

    status: Literal["UNSUPPORTED", "UNAVAILABLE"]
    reason: str

    def __str__(self) -> str:
        return f"{self.status}: {self.reason}"


def check_config(kernel_id: str, parameter: inspect.Parameter | None, tuning: Tuning | None) -> None:
    """Raises `TypeError` unless a kernel has both `tuning` and a keyword-only `config` with default None, or neither.

    `parameter` is the function's `config`.
    """
    if parameter is None:
        if tuning is not None:
            raise TypeError(f"{kernel_id}: tuning was given, and the function takes no config")
        return
    if parameter.kind is not inspect.Parameter.KEYWORD_ONLY or parameter.default is not None:
        raise TypeError(f"{kernel_id}: expected config to be keyword-only with the default None")
    if tuning is None:
        raise TypeError(f"{kernel_id}: takes a config, and tuning was not given to register")
    _check_type(kernel_id, tuning.config_type)
    _check_call(kernel_id, "configs", tuning.configs, 1)
    _check_call(kernel_id, "heuristic", tuning.heuristic, 1)
    _check_call(kernel_id, "is_legal", tuning.is_legal, 2)
    if tuning.footprint is not None:
        _check_call(kernel_id, "footprint", tuning.footprint, 2)


def _check_type(kernel_id: str, config_type: Any) -> None:
    if not (isinstance(config_type, type) and dataclasses.is_dataclass(config_type)):
        raise TypeError(f"{kernel_id}: expected config_type to be a dataclass, got {config_type!r}")
    if not config_type.__dataclass_params__.frozen:  # type: ignore[attr-defined]
        raise TypeError(f"{kernel_id}: expected {config_type.__name__} to be frozen")
    hints = get_type_hints(config_type)
    for field in dataclasses.fields(config_type):
        hint = hints[field.name]
        values = get_args(hint) if get_origin(hint) is Literal else ()
        if hint not in _SCALARS and not (values and all(isinstance(value, _SCALARS) for value in values)):
            raise TypeError(
                f"{kernel_id}: expected {config_type.__name__}.{field.name} to be a JSON scalar, got {hint}"
            )


def _check_call(kernel_id: str, name: str, function: Callable[..., Any], own: int) -> None:
    """Raises `TypeError` unless `function` takes `own` arguments and then a scheme with a default."""
    parameters = list(inspect.signature(function).parameters.values())
    fits = len(parameters) == own + 1 and parameters[own].default is not inspect.Parameter.empty
    if not fits:
        wanted = "(case, scheme=...)" if own == 1 else "(config, case, scheme=...)"
        raise TypeError(f"{kernel_id}: expected {name}{wanted}, got {name}{inspect.signature(function)}")


def check_prepare(kernel: str, prepare: Callable[..., Any] | None, allowed: Sequence[str]) -> None:
    """Raises `TypeError` where `prepare` has an argument behind the weight that is not in `allowed`."""
    for name in [] if prepare is None else list(inspect.signature(prepare).parameters)[1:]:
        if name not in allowed:
            raise TypeError(f"{kernel}: prepare asks for {name!r}, expected one of {', '.join(allowed) or 'nothing'}")


def check_plan(kernel: str, parameter: inspect.Parameter | None, plan: Callable[..., Any] | None) -> None:
    """Raises `TypeError` unless a kernel has both a `plan` and a keyword-only argument for its result, or neither."""
    if (parameter is None) != (plan is None):
        raise TypeError(f"{kernel}: expected both a plan and an argument of that name, or neither")
    keyword = inspect.Parameter.KEYWORD_ONLY
    if parameter is not None and (parameter.kind is not keyword or parameter.default is not None):
        raise TypeError(f"{kernel}: expected plan to be keyword-only with the default None")


def check_signature(spec: OpSpec, name: str, fn: Callable[..., Any]) -> None:
    """Raises `TypeError` unless `fn` takes the reference's arguments in their order; those in `OWN` are optional."""
    parameters = dict(inspect.signature(fn).parameters)
    for own in OWN:
        parameters.pop(own, None)
    wanted = {parameter.name: parameter for parameter in spec.parameters}
    unknown = [parameter for parameter in parameters if parameter not in wanted]
    if unknown:
        raise TypeError(f"{spec.name}/{name}: the reference has no argument {unknown[0]!r}; it has {', '.join(wanted)}")
    order = [key for key in wanted if key in parameters]
    if list(parameters) != order:
        raise TypeError(f"{spec.name}/{name}: expected the arguments in the order {', '.join(order)}")
    for key, parameter in wanted.items():
        if key not in parameters:
            if parameter.kind is not inspect.Parameter.KEYWORD_ONLY:
                raise TypeError(f"{spec.name}/{name}: misses the argument {key!r}")
        elif parameters[key].default != parameter.default:
            raise TypeError(
                f"{spec.name}/{name}: expected the argument {parameter.replace(annotation=parameter.empty)}, as the "
                f"reference has it, got {parameters[key].replace(annotation=parameter.empty)}"
            )
