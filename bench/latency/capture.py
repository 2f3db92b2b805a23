"""What a running program asks of our ops' counterparts: the shape, dtype, calls and time of each, as a suite.

Three layers are watched.  Our engine's ops by their own names; modules called `...RMSNorm`, whatever library has them;
and torch's operators beneath: products, attention, embedding, and SiLU with the product behind it.  What one layer
has counted is not counted again beneath it.  On a GPU a call's time is that between two events.  A draw is kept as a
greedy one.
"""

from __future__ import annotations

import runpy
import shutil
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from rooflab.bench.latency.ledger import marked
from rooflab.reference.captured import VERSION
from rooflab.reference.spec import DTYPE_NAMES, Case

_ATEN = torch.ops.aten
_PRODUCTS = {_ATEN.mm: (0, 1), _ATEN.addmm: (1, 2), _ATEN.bmm: (0, 1), _ATEN.matmul: (0, 1), _ATEN.linear: (0, 1)}
"""Operators that multiply, and which arguments they multiply; the last two are whole in inference mode alone."""
_ATTENTION = {
    getattr(_ATEN, name)
    for name in (
        "scaled_dot_product_attention", "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
    )
}  # fmt: skip


class Key(NamedTuple):
    """Calls that are alike."""

    op: str
    case: str
    scheme: str


@dataclass
class Tally:
    """Calls and seconds by key, and seconds of all that was watched."""

    calls: dict[Key, int] = field(default_factory=lambda: defaultdict(int))
    seconds: dict[Key, float] = field(default_factory=lambda: defaultdict(float))
    total_s: float = 0.0

    def add(self, key: Key | None, seconds: float) -> None:
        """Adds the time of a call."""
        self.total_s += seconds
        if key is not None:
            self.seconds[key] += seconds


@dataclass
class Captured:
    """What was seen."""

    inside: Tally = field(default_factory=Tally)
    """Inside of modules and of our engine's steps."""
    outside: Tally = field(default_factory=Tally)
    """Elsewhere, such as while weights are loaded."""
    depth: int = 0
    """In how many modules or steps the program is now."""
    _events: list[tuple[Tally, Key | None, torch.cuda.Event, torch.cuda.Event]] = field(default_factory=list)

    @property
    def model(self) -> Tally:
        """What counts: what is inside; all of a program without modules and steps."""
        return self.inside if self.inside.total_s else self.outside

    @property
    def now(self) -> Tally:
        """Where a call counts."""
        return self.inside if self.depth else self.outside

    @property
    def explained(self) -> float:
        """Share of the model's time that lies in known ops.  The total is the time in all of torch's operators, our
        ops and known modules; what lies between them, Python's own time, is in no sum."""
        return sum(self.model.seconds.values()) / self.model.total_s if self.model.total_s else 0.0

    def timed(self, key: Key | None, on_gpu: bool, call: Callable[[], Any]) -> Any:
        """Makes a call and adds its time."""
        tally = self.now
        if key is not None:
            tally.calls[key] += 1
        if not on_gpu:
            began = time.perf_counter()
            result = call()
            tally.add(key, time.perf_counter() - began)
            return result
        begin = marked()
        result = call()
        self.later(tally, key, begin)
        return result

    def later(self, tally: Tally, key: Key | None, begin: torch.cuda.Event) -> None:
        """Keeps the events of a call on a GPU, whose time is read later."""
        self._events.append((tally, key, begin, marked()))
        if len(self._events) >= 10_000:
            self.settle()

    def settle(self) -> None:
        """Reads the times of events."""
        if self._events:
            torch.cuda.synchronize()
        for tally, key, begin, end in self._events:
            tally.add(key, begin.elapsed_time(end) / 1e3)
        self._events.clear()

    def suite(self, program: str) -> dict[str, Any]:
        """The content of a suite's file: the cases of each op, those with most time first."""
        model = self.model
        ops: dict[str, list[dict[str, Any]]] = defaultdict(list)
        for key in sorted(model.seconds, key=lambda key: -model.seconds[key]):
            seconds = model.seconds[key]
            row = {"case": key.case, "scheme": key.scheme, "calls": model.calls[key], "seconds": seconds}
            ops[key.op].append(row | {"share": seconds / model.total_s})
        about = {"program": program, "seconds": model.total_s, "explained": self.explained}
        return {"rooflab_suite": VERSION, **about, "ops": ops}


class _Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Times torch's operators where no layer above has counted them."""

    def __init__(self, captured: Captured) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.captured = captured
        self.inside = 0
        """How many layers above are counting."""
        self._activated: tuple[Key, int] | None = None
        """The SiLU whose product comes next, and where its result is."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.inside or _is_view(func):
            return func(*args, **kwargs)
        key = self._key(func.overloadpacket, args, kwargs)
        on_gpu = any(isinstance(value, torch.Tensor) and value.is_cuda for value in args)
        result = self.captured.timed(key, on_gpu, lambda: func(*args, **kwargs))
        if func.overloadpacket is _ATEN.silu and key is not None:
            self._activated = key, result.data_ptr()
        return result

    def _key(self, operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Key | None:
        if operator in _PRODUCTS:
            return _product(operator, args)
        if operator in _ATTENTION:
            return _attention(args, kwargs)
        if operator is _ATEN.embedding:
            weight, ids = args[:2]
            return _key("embedding", weight.dtype, T=ids.numel(), V=weight.shape[0], H=weight.shape[1])
        if operator is _ATEN.silu and args[0].ndim:
            width = args[0].shape[-1]
            return _key("silu_and_mul", args[0].dtype, T=args[0].numel() // max(width, 1), I=width)
        if operator is _ATEN.mul and self._activated is not None:
            key, place = self._activated
            if any(isinstance(value, torch.Tensor) and value.data_ptr() == place for value in args):
                self._activated = None
                self.captured.now.calls[key] -= 1  # SiLU and its product are one call
                return key
        return None


def _is_view(func: Any) -> bool:
    returns = [item.alias_info for item in func._schema.returns]
    return bool(returns) and all(info is not None and not info.is_write for info in returns)


def _key(op: str, dtype: torch.dtype, **sizes: Any) -> Key | None:
    scheme = DTYPE_NAMES.get(dtype)
    return None if scheme is None else Key(op, Case(**sizes).id, scheme)


def _product(operator: Any, args: Sequence[Any]) -> Key | None:
    a, b = (args[place] for place in _PRODUCTS[operator])
    b = b.mT if operator is _ATEN.linear else b
    if b.ndim == 3 and b.shape[0] == 1:
        b = b[0]
    if b.ndim != 2 or not a.numel() * b.numel():
        return None
    (K, N), M = b.shape, a.numel() // b.shape[0]
    layout = "NT" if b.stride(0) == 1 and K > 1 else "NN"
    bias = operator is _ATEN.addmm or operator is _ATEN.linear and len(args) > 2 and args[2] is not None
    return _key("gemm", a.dtype, M=M, N=N, K=K, layout=layout, bias=bias)


def _attention(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Key | None:
    q, k = args[:2]
    (B, H, T, D), H_kv, S = q.shape, k.shape[1], k.shape[2]
    if args[2].shape[-1] != D:
        return None
    # A mask is taken for the causal one, which alone decoders use; one query sees all keys.
    causal = T > 1 and (True in args[3:] or kwargs.get("attn_mask") is not None or kwargs.get("is_causal") is True)
    return _key("flash_attention", q.dtype, B=B, T=T, S=S, H=H, H_kv=H_kv, D=D, causal=causal)


@contextmanager
def capturing() -> Iterator[Captured]:
    """Watches every call in the block, in this thread."""
    captured = Captured()
    operators = _Operators(captured)
    with _modules(captured, operators), _engine(captured, operators), operators:
        yield captured
    captured.settle()


@contextmanager
def _modules(captured: Captured, operators: _Operators) -> Iterator[None]:
    """Counts modules called RMSNorm as one call each, and knows when any module runs."""
    begun: list[Any] = []

    def before(module: torch.nn.Module, args: Any) -> None:
        captured.depth += 1
        norm = type(module).__name__.endswith("RMSNorm") and bool(args) and isinstance(args[0], torch.Tensor)
        if norm and not operators.inside:
            operators.inside += 1
            begun.append((module, time.perf_counter(), marked() if args[0].is_cuda else None))

    def after(module: torch.nn.Module, args: Any, output: Any) -> None:
        tally = captured.now
        captured.depth -= 1
        if not begun or begun[-1][0] is not module:
            return
        _, began, event = begun.pop()
        operators.inside -= 1
        key = _norm(module, args)
        if key is not None:
            tally.calls[key] += 1
        if event is None:
            tally.add(key, time.perf_counter() - began)
        else:
            captured.later(tally, key, event)

    hooks = register_module_forward_pre_hook(before), register_module_forward_hook(after, always_call=True)
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _norm(module: torch.nn.Module, args: Any) -> Key | None:
    x = args[0]
    eps = next((value for name in ("variance_epsilon", "eps") if (value := getattr(module, name, None))), 1e-6)
    added = len(args) > 1 and isinstance(args[1], torch.Tensor)
    width = x.shape[-1]
    op = "fused_add_rmsnorm" if added else "rmsnorm"
    return _key(op, x.dtype, T=x.numel() // width, H=width, eps=float(eps))


@contextmanager
def _engine(captured: Captured, operators: _Operators) -> Iterator[None]:
    """Counts the ops of our own engine, and knows when it steps."""
    from rooflab.bench.latency.engine_calls import case_of, inputs_of
    from rooflab.engine.core import Core
    from rooflab.engine.llm import LLM
    from rooflab.engine.ops import OpSet

    plain, run, init = OpSet.step, Core.step, LLM.__init__

    def wrapped(function: Callable[..., Any], op: str) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            if operators.inside:
                return function(*arguments, **options)
            operators.inside += 1
            try:
                with _disable_current_modes():  # torch makes no tensor of a class of its own while one looks on
                    began = time.perf_counter()
                    result = function(*arguments, **options)
                    took = time.perf_counter() - began
            finally:
                operators.inside -= 1
            found = case_of(op, inputs_of(op, arguments, options, result))
            key = None if found is None else Key(op, found[0].id, found[1])
            if key is not None:
                captured.now.calls[key] += 1
            captured.now.add(key, took)
            return result

        return call

    def ops(self: OpSet, *sizes: int) -> Any:
        product = "gemm_w8a16" if any(one.op == "gemm_w8a16" for one in self.choices) else "gemm"
        names = {"decode_attention": "paged_attention", "gemm": product}
        own = vars(plain(self, *sizes))
        return SimpleNamespace(**{name: wrapped(one, names.get(name, name)) for name, one in own.items()})

    def step(self: Core) -> Any:
        captured.depth += 1
        try:
            return run(self)
        finally:
            captured.depth -= 1

    def load(self: LLM, *arguments: Any, **options: Any) -> None:
        with _disable_current_modes():
            init(self, *arguments, **options)

    OpSet.step, Core.step, LLM.__init__ = ops, step, load  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        OpSet.step, Core.step, LLM.__init__ = plain, run, init  # type: ignore[method-assign]


def run_program(command: Sequence[str]) -> Captured:
    """Runs a Python program in this process, watched: `python app.py ...`, `python -m module ...`, or a script on PATH.

    Raises `ValueError` on what is none of these.  The program's exit is not ours.
    """
    words = list(command)
    if words and Path(words[0]).name.startswith("python"):
        words = words[1:]
    module = len(words) > 1 and words[0] == "-m"
    target = words[1] if module else words[0] if words else ""
    path = target if module or Path(target).is_file() else shutil.which(target) if target else None
    if not path or target.startswith("-"):
        raise ValueError(f"program: expected python app.py, python -m module, or a Python script, got {command!r}")
    before, folder = sys.argv, sys.path[0]
    sys.argv = [path, *words[2 if module else 1 :]]
    try:
        with capturing() as captured:
            try:
                if module:
                    runpy.run_module(path, run_name="__main__", alter_sys=True)
                else:
                    sys.path[0] = str(Path(path).resolve().parent)
                    runpy.run_path(path, run_name="__main__")
            except SystemExit as ended:
                if ended.code not in (None, 0):
                    raise ValueError(f"program: expected it to end well, got exit status {ended.code}") from None
    finally:
        sys.argv, sys.path[0] = before, folder
    return captured
