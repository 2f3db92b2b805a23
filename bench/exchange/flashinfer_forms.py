"""The words of the flashinfer-bench mapping: what a family of definitions is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from rooflab.bench.exchange.flashinfer_files import DTYPES, Definition
from rooflab.reference.spec import DTYPE_NAMES, Case, Inputs, Outputs

Given = Mapping[str, Any]
"""A definition's inputs by name: tensors, and scalars of Python."""
Sizes = Mapping[str, tuple[int, ...]]
"""Shapes of a definition's tensors by name."""


def _only_one(parts: list[Outputs]) -> Outputs:
    return parts[0]


def _accepts(definition: Definition) -> str:
    return ""


def _nothing(definition: Definition, sizes: Sizes, generator: torch.Generator) -> dict[str, torch.Tensor]:
    return {}


@dataclass(frozen=True)
class Family:
    """Definitions of one form, and how their arguments become those of an op of ours."""

    name: str
    op: str
    op_types: tuple[str, ...]
    """Beginnings of `op_type`."""
    needs: Mapping[str, int]
    """Inputs that it has, each with its number of axes; 0 for a scalar of Python."""
    calls: Callable[[Definition, Given], list[Inputs]]
    """Our op's arguments: for one call, or for one per sequence."""
    outputs: int = 1
    """How many of the definition's first outputs ours stand for, in the order of ours; others are not compared.  A
    definition may have fewer."""
    may_have: Mapping[str, int] = field(default_factory=dict)
    """Inputs that it can have besides."""
    join: Callable[[list[Outputs]], Outputs] = _only_one
    """What each call gave, as the definition's outputs."""
    refuses: Callable[[Definition], str] = _accepts
    """Why a definition of this form is not mapped, or nothing."""
    random: Callable[[Definition, Sizes, torch.Generator], dict[str, torch.Tensor]] = _nothing
    """Inputs that a workload leaves to chance and that must mean something: offsets, probabilities, angles."""
    case: Callable[[Definition, Mapping[str, int]], Case | None] | None = None
    """The case of ours that a workload's sizes are, where they are one."""
    drawn: bool = False
    """Whether the outputs are draws, so that only their distribution can be compared."""
    slack: float = 0.0
    """Unit roundoffs of the value that outputs may differ by besides: where a definition rounds elsewhere than ours."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Our name here of an input, by its name in some definitions."""

    def given(self, inputs: Given) -> dict[str, Any]:
        """A definition's inputs under the names used here."""
        return {self.aliases.get(name, name): value for name, value in inputs.items()}

    def fits(self, definition: Definition) -> bool:
        """Whether a definition has these inputs."""
        names = {self.aliases.get(name, name) for name in definition.inputs}
        return self.needs.keys() <= names <= self.needs.keys() | self.may_have.keys()

    def why_not(self, definition: Definition) -> str:
        """Why a definition that has these inputs is not mapped, or nothing."""
        for name, tensor in definition.inputs.items():
            wanted = {**self.needs, **self.may_have}[self.aliases.get(name, name)]
            if len(tensor.shape or ()) != wanted:
                return f"{name} has {len(tensor.shape or ())} axes; an op here takes {wanted}"
        return scheme_of(definition)[1] or self.refuses(definition)


ASIDE = frozenset({"lse", "cos_sin_cache", "top_p", "min_p", "eps"})
"""Small fp32 companions that do not decide a definition's scheme."""


def scheme_of(definition: Definition) -> tuple[str, str]:
    """The scheme of a definition, or nothing and why it has none: one float dtype over all its tensors."""
    tensors = {**definition.inputs, **definition.outputs}
    unknown = [name for name, tensor in tensors.items() if tensor.dtype not in DTYPES]
    if unknown:
        return "", f"{unknown[0]} is of the dtype {tensors[unknown[0]].dtype!r}"
    found = {
        tensor.dtype
        for name, tensor in tensors.items()
        if tensor.shape is not None and name not in ASIDE and DTYPES[tensor.dtype].is_floating_point
    }
    names = [name for dtype, name in DTYPE_NAMES.items() if found == {str(dtype).removeprefix("torch.")}]
    return (names[0], "") if names else ("", f"its dtypes are {', '.join(sorted(found))}, which no scheme here has")
