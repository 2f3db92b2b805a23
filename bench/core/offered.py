"""Which cases a kernel takes: an option that it refuses is left out of its other checks."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch

from rooflab.kernels.registry import Kernel
from rooflab.reference.spec import Case, OpSpec, Scheme


def options_on(spec: OpSpec, inputs: Mapping[str, Any]) -> set[str]:
    """The arguments that a call may leave out, and that have another value than their default."""
    known = {each.name: each.default for each in spec.parameters if each.default is not each.empty}
    return {name for name, default in known.items() if name in inputs and not _is(inputs[name], default)}


def _is(value: object, default: object) -> bool:
    return value is default or (not isinstance(value, torch.Tensor) and value == default)


def named_in(text: str, names: Collection[str]) -> set[str]:
    """Those of the names that a text has as words."""
    return {name for name in names if re.search(rf"\b{name}\b", text)}


def _plainer(spec: OpSpec, case: Case) -> Iterator[Case]:
    """The case without one of its optional keys, each in turn, and then without all."""
    keys = [key for key in case if key in spec.optional]
    for left_out in [*([key] for key in keys), *([keys] if len(keys) > 1 else [])]:
        yield Case(**{key: value for key, value in case.items() if key not in left_out})


def taken(
    kernel: Kernel, spec: OpSpec, case: Case, schemes: Sequence[Scheme], refused: Collection[str] = ()
) -> tuple[Case, Scheme] | None:
    """The case in the first scheme, or else one without optional keys, or in another scheme, that the kernel takes.

    `refused` are options that the kernel is known not to take.  None if it takes no such case.
    """
    for scheme in schemes:
        for form in (case, *_plainer(spec, case)):
            inputs = spec.make_inputs(form, scheme, torch.device("meta"), 0)
            if options_on(spec, inputs).isdisjoint(refused) and kernel.why_not_args(inputs, spec) is None:
                return form, scheme
    return None
