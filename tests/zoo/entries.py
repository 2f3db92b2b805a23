"""The zoo: one list of kernels that are wrong, that cheat, or that are right in an odd way, and what a check must say.

An entry is data.  `Kind` is the only way into the list: as a decorator of a kernel, as one of a factory (`made`), for
what a kernel keeps between calls, or for the right kernel with other arguments or another result (`changed`,
`changes`).  The tests import a file as `zoo.strides`.  A file that `rooflab check` loads registers its kernels too:

    ROOFLAB_ZOO=rows_of_a_view rooflab check rmsnorm --kernel tests/zoo/strides.py
    ROOFLAB_ZOO=one_call_behind rooflab check project --kernel tests/zoo/cheats.py      # of a small op

Kernels of the lab's ops were written without a look at what the checker draws, and they stay so: mend the checker.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rooflab.kernels import registry
from rooflab.kernels.registry import Kernel
from rooflab.reference.spec import Arguments, OpSpec, as_tuple

Function = Callable[..., Any]
Change = Callable[[Arguments], Any]
"""What a wrong kernel returns, or a dict of arguments that it takes for others; `right(...)` is the right result."""
REFERENCES = ("gemm", "embedding")
"""Ops whose naive kernel is a Triton kernel, which is slow on a CPU: their right result is the reference's."""


@dataclass(frozen=True)
class Entry:
    """One kernel of the zoo."""

    name: str
    op: str
    kind: str
    """The mistake, the cheat or the oddity."""
    make: Callable[[], Kernel]
    """A new kernel, which has kept nothing yet."""
    verdict: tuple[str, ...]
    """A status, and words that the reason must have."""
    small: OpSpec | None
    """The op, if it is not one of the lab: the first smoke case shows the verdict.  Else the drawn checks do."""
    file: Path

    @property
    def id(self) -> str:
        return f"{self.op}/{self.name}"

    @property
    def spec(self) -> OpSpec:
        return self.small or registry.get_op(self.op)


ZOO: list[Entry] = []


class Kind:
    """Enters kernels of one kind."""

    def __init__(self, module: str, kind: str, status: str = "INCORRECT", **options: Any):
        self.module, self.kind, self.status, self.options = module, kind, status, options

    def enter(self, op: str | OpSpec, name: str, words: tuple[str, ...], make: Callable[[], Function], **options: Any):
        """Adds the kernel that `make` makes; `options` are fields of `Kernel`."""
        spec, options = None if isinstance(op, str) else op, {"backend": "torch", **self.options, **options}
        own, verdict = op if isinstance(op, str) else op.name, (self.status, *words)

        def kernel() -> Kernel:
            return Kernel(own, name, "optimized", fn=make(), **options)

        entry = Entry(name, own, self.kind, kernel, verdict, spec, Path(str(sys.modules[self.module].__file__)))
        ZOO.append(entry)
        loaded_by_the_lab = not self.module.startswith("zoo.")
        if loaded_by_the_lab and name == os.environ.get("ROOFLAB_ZOO", name):
            registry.add_op(entry.spec)
            registry.register(op=own, name=name, role="optimized", **options)(make())

    def __call__(self, op: str | OpSpec, *words: str, name: str = "", **options: Any) -> Callable[[Function], Function]:
        """Enters the decorated kernel."""

        def decorate(fn: Function) -> Function:
            self.enter(op, name or fn.__name__, words, lambda: fn, **options)
            return fn

        return decorate

    def made(self, op: str | OpSpec, *words: str, name: str = "", **options: Any) -> Callable[[Function], Function]:
        """Enters what the decorated factory makes."""

        def decorate(make: Function) -> Function:
            self.enter(op, name or make.__name__, words, make, **options)
            return make

        return decorate

    def changed(self, *ops: str) -> Callable[[Change], Change]:
        """Enters the right kernel of each op with the decorated change."""

        def decorate(change: Change) -> Change:
            self.changes({f"{op}/{change.__name__}": change for op in ops})
            return change

        return decorate

    def changes(self, of: Mapping[str, Change]) -> None:
        """Enters right kernels with a change each, by the kernel's op and name."""
        for each, change in of.items():
            op, name = each.split("/")
            options = {"unsupported": lambda inputs, op=op: registry.get_kernel(op, "naive").unsupported(inputs)}
            self.enter(op, name, (), lambda op=op, change=change: with_change(op, change), **options)


def with_change(op: str, change: Change) -> Function:
    """The right kernel of an op with a change."""
    spec, formula = registry.get_op(op), registry.get_kernel(op, "naive").fn
    signature = inspect.Signature(spec.parameters)
    if op in REFERENCES:
        formula = lambda **of: spec.reference(**of).to(next(x.dtype for x in of.values() if x.is_floating_point()))

    def kernel(*positional: Any, **named: Any) -> Any:
        bound = signature.bind(*positional, **named)
        bound.apply_defaults()

        def right(**others: Any) -> Any:
            return formula(**{**bound.arguments, **others})

        found = change(Arguments(right=right, **bound.arguments))
        return right(**found) if isinstance(found, dict) else found

    kernel.__signature__ = signature  # type: ignore[attr-defined]
    return kernel


def with_first(result: Any, change: Callable[[Any], Any]) -> Any:
    """A result whose first or only tensor is changed."""
    first, *others = as_tuple(result)
    return (change(first), *others) if others else change(first)
