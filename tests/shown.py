"""The properties of a rung's code, read from its registration: `over` names the rung below, `shows` holds expressions.

`shows={"": "loop.tma == 2 > below.loop.tma; threads == 384"}` is about the rung's launches for the largest case of
llama3_8b, in bf16 if the op has it.  Another key is a case, a scheme after `in`, a config after `with`, or several:
`"M=1,N=4096,K=4096 in fp16"`; `{1|8}` stands for either.  The names are those of `Shown`, those of the case, and

- a family of instructions (`tma`, `wgmma`; `bench/compile/sass.py`), or the beginning of an opcode with `_` for `.` and
  `__` for anything (`STG_E_128`, `LDG__128`): how many the code has;
- `launched`: kernels of a call; `second`: the second of them; `below`: the rung below; `rung("split_k")`: another one;
- `calls("naive")`: what a rung that is made of torch calls calls.
"""

from __future__ import annotations

import builtins
import itertools
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache, partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rooflab.bench.compile.cases import Query
from rooflab.bench.compile.sass import FAMILIES, parse
from rooflab.bench.compile.sass_flow import Loop, hot_loop
from rooflab.bench.compile.static import CompiledInfo, CompileFailure, compile_kernels
from rooflab.bench.compile.store import Store
from rooflab.kernels.registry import Kernel, get_kernel, ops
from rooflab.reference.spec import SCHEMES, Case

ORDER = {"HGMMA": "product", "QGMMA": "product", "MUFU": "exponential", "WARPGROUP.DEPBAR": "wait", "F2FP": "rounding"}


class Shown:
    """Instructions of a kernel, or of one of its loops."""

    def __init__(self, of: CompiledInfo | Loop):
        self._of = of

    def __getattr__(self, name: str) -> Any:
        if name in FAMILIES:
            return self._of.counts[name]
        if not name[0].isupper():
            return getattr(self._of, name)
        pattern = name.replace("__", "#").replace("_", "[._]").replace("#", r"\..*")
        return sum(n for opcode, n in self._of.opcodes.items() if re.match(rf"{pattern}(\.|$)", opcode))

    def opcode(self, name: str) -> int:
        """How many instructions have an opcode that begins so, in the form that attributes have."""
        return int(getattr(self, name))

    @property
    def loops(self) -> list[Shown]:
        """The loops of a kernel."""
        return [Shown(loop) for loop in self._of.loops]

    @property
    def loop(self) -> Shown:
        """The hot loop of a kernel, which it must have."""
        found = hot_loop(self._of.loops)
        assert found is not None, f"{self._of.name} has no loop"
        return Shown(found)

    @property
    def products(self) -> list[Shown]:
        """The innermost loops with products, those that select fewest values by a mask first."""
        inner = [loop for loop in self.loops if loop.innermost and loop.tensor_core_instructions]
        return sorted(inner, key=lambda loop: (loop.FSEL, loop.length))

    @property
    def length(self) -> int:
        """The number of instructions of a loop."""
        return len(self._of.instructions)

    @property
    def order(self) -> str:
        """Products, exponentials, roundings and waits of a loop in their order; of several that follow, one."""
        seen: list[str] = []
        for one in self._of.instructions:
            kind = next((kind for name, kind in ORDER.items() if one.opcode.startswith(name)), None)
            kind = f"wait{one.operands.rstrip(' ;')[-1]}" if kind == "wait" else kind
            if kind and kind not in seen[-1:]:
                seen.append(kind)
        return " ".join(seen)

    def before(self, first: str, then: str) -> int:
        """How many instructions of the family `first` stand in a loop before one of the family `then`."""
        return [one.family for one in self._of.instructions if one.family in (first, then)].index(then)

    def in_ptx(self, pattern: str) -> int:
        """How often a pattern stands in a kernel's PTX."""
        return len(re.findall(pattern, self._of.ptx))

    def in_sass(self, pattern: str) -> int:
        """How often a pattern stands in a kernel's SASS."""
        return len(re.findall(pattern, self._of.sass))

    @property
    def bytes_in_flight(self) -> int:
        """Bytes that a thread has asked for before it first waits for one to store; in the hot loop, if any."""
        found, total = hot_loop(self._of.loops), 0
        for one in found.instructions if found else parse(self._of.sass)[self._of.name].instructions:
            if one.family == "global_store":
                return total
            total += one.bytes_per_thread if one.family == "global_load" else 0
        raise AssertionError(f"{self._of.name} stores nothing")


class Calls(TorchDispatchMode):
    """Counts the torch operators that compute: views, allocations and reading a shape are left out."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()
        self.sorted_elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        view = any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
        if not view and not name.startswith(("empty", "new_empty", "detach", "lift_fresh", "_local_scalar")):
            self.names[name] += 1
        if name == "sort":
            self.sorted_elements += args[0].numel()
        return func(*args, **(kwargs or {}))

    @property
    def total(self) -> int:
        """All calls."""
        return self.names.total()


@cache
def calls(op: str, case: str, name: str) -> Calls:
    """What `op`/`name` calls in bf16 on the CPU, at the last smoke case or at `case`."""
    spec = ops()[op]
    at = Case.parse(case) if case else spec.cases["smoke"][-1]
    inputs = spec.make_inputs(at, SCHEMES["bf16"], torch.device("cpu"), 0)
    with Calls() as found:
        get_kernel(op, name)(**inputs)
    return found


@cache
def launched(op: str, scheme: str, case: str, config: str, name: str) -> list[Shown]:
    """What `op`/`name` launches: at the most work of llama3_8b, or at `case`; those of the op at once, on all cores."""
    names = (name,) if case or config else ()
    chosen = Query(op, names, ("llama3_8b",), (case,) if case else (), (scheme,)).select()
    if config:
        made = get_kernel(op, name).tunable.make_config(Case.parse(config))
        chosen = [one._replace(config=made) for one in chosen]
    results = dict(zip([one.kernel for one in chosen], compile_kernels(chosen, Store()), strict=True))
    found = results[name]
    assert not isinstance(found, CompileFailure), found
    return [Shown(info) for info in found]


@cache
def usual_scheme(op: str, name: str, first: str = "bf16") -> str:
    """bf16; of an op or a kernel without it, the last scheme that the kernel takes."""
    spec, kernel = ops()[op], get_kernel(op, name)

    def takes(scheme: str) -> bool:
        made = (spec.make_inputs(case, SCHEMES[scheme], torch.device("meta"), 0) for case in spec.cases["smoke"])
        return any(kernel.why_not_args(inputs) is None for inputs in made)

    order = [*([first] if first in spec.schemes else []), *reversed(spec.schemes)]
    return next((scheme for scheme in order if takes(scheme)), order[0])


WHERE = re.compile(r"(?P<case>\w+=\S+)?( ?in (?P<scheme>\w+))?( ?with (?P<config>\S+))?")


class Names(dict[str, Any]):
    """The names of a rung's expressions, looked up when they are asked for."""

    def __init__(self, kernel: Kernel, where: str):
        parts = WHERE.fullmatch(where)
        assert parts is not None, (
            f"{kernel.id}: shows: expected a case, `in` a scheme and `with` a config, got {where!r}"
        )
        case, scheme, config = (parts[name] or "" for name in ("case", "scheme", "config"))
        self.launched = partial(launched, kernel.op, scheme or usual_scheme(kernel.op, kernel.name), case, config)
        self.kernel = kernel
        sizes = Case.parse(case) if case else {}
        super().__init__(calls=partial(calls, kernel.op, case), rung=self.rung, re=re, **sizes)

    def rung(self, name: str) -> Shown:
        """The first kernel that a rung of the op launches."""
        return self.launched(name)[0]

    def __missing__(self, name: str) -> Any:
        if hasattr(builtins, name):
            return getattr(builtins, name)
        if name == "below":
            return self.rung(str(self.kernel.over))
        codes = self.launched(self.kernel.name)
        return {"launched": len(codes), "second": codes[-1]}.get(name) or getattr(codes[0], name)


def not_shown(kernel: Kernel, together: bool) -> Iterator[str]:
    """The expressions of a rung that its code does not show: of `together` those of no key, whose code an op's rungs
    are compiled for at once; otherwise the others."""
    for key, expressions in kernel.shows.items():
        if together == bool(key):
            continue
        parts = [part.split("|") for part in re.split(r"[{}]", key)]
        for where in map("".join, itertools.product(*parts)):
            names = Names(kernel, where)
            wrong = [text for text in expressions.split("; ") if not eval(text, names, names)]
            yield from (f"{kernel.id} {where}: {text}" for text in wrong)
