"""What a running program asks of our ops' counterparts: the shape, dtype, calls and time of each, as a suite.

Three layers are watched.  Our engine's ops by their own names; modules by the names that transformers and vLLM give
them (`_MODULES`); and torch's operators beneath: products, attention, embedding, and SiLU with the product behind it.
What one layer has counted is not counted again beneath it.  On a GPU a call's time is that between two events; a CUDA
graph makes no calls, so only what runs eagerly is seen.  A draw is kept as a greedy one.
"""

from __future__ import annotations

import re
import runpy
import shutil
import sys
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from rooflab.bench.latency.ledger import Mark, clock_of, seconds_between
from rooflab.kernels._user_files import IMPORT_ERRORS
from rooflab.reference.captured import VERSION
from rooflab.reference.spec import DTYPE_NAMES, Case

_ATEN = torch.ops.aten
_PRODUCTS = {_ATEN.mm: (0, 1), _ATEN.addmm: (1, 2), _ATEN.bmm: (0, 1), _ATEN.matmul: (0, 1), _ATEN.linear: (0, 1)}
"""Operators that multiply, and which arguments they multiply; the last two are whole in inference mode alone."""
_ATTENTION = {
    getattr(_ATEN, name)
    for name in (
        "scaled_dot_product_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
    )
}


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


Span = tuple[Mark, Mark]


class Captured(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """What was seen; while it is entered, it times torch's operators where no layer above has counted them."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.inside, self.outside = Tally(), Tally()
        """Inside of modules and of our engine's steps; and elsewhere, such as while weights are loaded."""
        self.depth = 0
        """In how many modules or steps the program is now."""
        self.layers = 0
        """How many layers above torch's operators are counting."""
        self._spans: list[tuple[Tally, Key | None, Span]] = []
        """Of calls whose times are not read yet: an event's time is not there at once."""
        self._silu: tuple[Tally, Key, Span, torch.Tensor] | None = None
        """A SiLU whose product has not come.  It holds the result, so that no other tensor gets its place."""

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

    def add(self, tally: Tally, key: Key | None, span: Span, calls: int = 1) -> None:
        """Adds a call, or with `calls` 0 a part of one."""
        if key is not None:
            tally.calls[key] += calls
        self._spans.append((tally, key, span))
        if len(self._spans) >= 10_000:
            self.settle()

    def settle(self) -> None:
        """Reads the times of all calls so far."""
        for tally, key, span in self._spans:
            seconds = seconds_between(*span)
            tally.total_s += seconds
            if key is not None:
                tally.seconds[key] += seconds
        self._spans.clear()

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

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.layers or _is_view(func):
            return func(*args, **kwargs)
        operator, (result, span) = func.overloadpacket, _timed(_on_gpu(args), lambda: func(*args, **kwargs))
        if operator is _ATEN.silu:
            self.end_silu()
            width = args[0].shape[-1] if args[0].ndim else 1
            key = _key("silu_and_mul", args[0].dtype, T=args[0].numel() // max(width, 1), I=width)
            if key is not None:
                self._silu = self.now, key, span, result
                return result
        if operator is _ATEN.mul and self._silu is not None and any(self._is_silu(value) for value in args):
            tally, key, first, _ = self._silu
            self._silu = None
            self.add(tally, key, first)
            self.add(tally, key, span, calls=0)
        else:
            self.add(self.now, _key_of(func, args, kwargs), span)
        return result

    def _is_silu(self, value: Any) -> bool:
        assert self._silu is not None
        return isinstance(value, torch.Tensor) and value.data_ptr() == self._silu[3].data_ptr()

    def end_silu(self) -> None:
        """Counts a SiLU without a product as an operator that is no op of ours."""
        if self._silu is not None:
            tally, _, span, _ = self._silu
            self.add(tally, None, span)
            self._silu = None


def _key_of(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Key | None:
    operator = func.overloadpacket
    if operator in _PRODUCTS:
        return _product(operator, args)
    if operator in _ATTENTION:
        names = [argument.name for argument in func._schema.arguments]
        return _attention({**dict(zip(names, args, strict=False)), **kwargs})
    if operator is _ATEN.embedding:
        weight, ids = args[:2]
        return _key("embedding", weight.dtype, T=ids.numel(), V=weight.shape[0], H=weight.shape[1])
    return None


def _timed(on_gpu: bool, call: Callable[[], Any]) -> tuple[Any, Span]:
    clock = clock_of(on_gpu)
    begin = clock()
    result = call()
    return result, (begin, clock())


def _on_gpu(values: Iterable[Any]) -> bool:
    """Whether an argument, or one in a list of arguments, lies on a GPU."""
    return any(
        value.is_cuda if isinstance(value, torch.Tensor) else isinstance(value, list | tuple) and _on_gpu(value)
        for value in values
    )


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


def _attention(given: Mapping[str, Any]) -> Key | None:
    q, k, v = given["query"], given["key"], given["value"]
    if q.ndim != 4 or v.shape[-1] != q.shape[-1]:
        return None
    (B, H, T, D), H_kv, S = q.shape, k.shape[1], k.shape[2]
    # A mask is taken for the causal one, which alone decoders use; one query sees all keys.
    masked = any(given.get(name) is not None for name in ("attn_mask", "attn_bias"))
    causal = T > 1 and (masked or given.get("is_causal") is True)
    return _key("flash_attention", q.dtype, B=B, T=T, S=S, H=H, H_kv=H_kv, D=D, causal=causal)


@contextmanager
def capturing() -> Iterator[Captured]:
    """Watches every call in the block, in this thread."""
    captured = Captured()
    with _modules(captured), _engine(captured), captured:
        yield captured
    captured.end_silu()
    captured.settle()


@contextmanager
def _modules(captured: Captured) -> Iterator[None]:
    """Counts each module of `_MODULES` as one call, and knows when any module runs."""
    begun: list[tuple[torch.nn.Module, Key, Mark]] = []

    def before(module: torch.nn.Module, args: Any) -> None:
        captured.depth += 1
        if captured.layers or not args or not isinstance(args[0], torch.Tensor):
            return
        known = next((key for end, key in _MODULES.items() if type(module).__name__.endswith(end)), None)
        if known is not None and (key := known(module, args)) is not None:
            captured.layers += 1
            begun.append((module, key, clock_of(args[0].is_cuda)()))

    def after(module: torch.nn.Module, args: Any, output: Any) -> None:
        tally = captured.now
        captured.depth -= 1
        if begun and begun[-1][0] is module:
            _, key, begin = begun.pop()
            captured.layers -= 1
            captured.add(tally, key, (begin, clock_of(not isinstance(begin, float))()))

    hooks = register_module_forward_pre_hook(before), register_module_forward_hook(after, always_call=True)
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _norm(module: Any, args: Sequence[Any]) -> Key | None:
    x = args[0]
    eps = next((value for name in ("variance_epsilon", "eps") if (value := getattr(module, name, None))), 1e-6)
    added = len(args) > 1 and isinstance(args[1], torch.Tensor)
    width = x.shape[-1]
    op = "fused_add_rmsnorm" if added else "rmsnorm"
    return _key(op, x.dtype, T=x.numel() // width, H=width, eps=float(eps))


def _gated(module: Any, args: Sequence[Any]) -> Key | None:
    width = args[0].shape[-1]
    return _key("silu_and_mul", args[0].dtype, T=args[0].numel() // width, I=width // 2)


def _rotary(module: Any, args: Sequence[Any]) -> Key | None:
    """Of a module that turns queries and keys (vLLM's); transformers' makes cosines, which is not an op here."""
    D, rotary = getattr(module, "head_size", None), getattr(module, "rotary_dim", None)
    if D is None or D != rotary or len(args) < 3 or not isinstance(args[2], torch.Tensor):
        return None
    positions, q, k = args[:3]
    T = positions.shape[-1]
    sizes = {"T": T, "H": q.numel() // (T * D), "H_kv": k.numel() // (T * D), "D": D}
    limit = module.cos_sin_cache.shape[0]
    return _key("rope", q.dtype, **sizes, max_position=limit, interleaved=not module.is_neox_style)


_MODULES = {"RMSNorm": _norm, "SiluAndMul": _gated, "RotaryEmbedding": _rotary}
"""How the name of a module's class ends, and what its call is."""


@contextmanager
def _engine(captured: Captured) -> Iterator[None]:
    """Counts the ops of our own engine, and knows when it steps."""
    from rooflab.bench.latency.engine_calls import case_of, inputs_of
    from rooflab.engine.core import Core
    from rooflab.engine.llm import LLM
    from rooflab.engine.ops import OpSet

    plain, run, init = OpSet.step, Core.step, LLM.__init__

    def wrapped(function: Callable[..., Any], op: str) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            if captured.layers:
                return function(*arguments, **options)
            captured.layers += 1
            try:
                with _disable_current_modes():  # torch makes no tensor of a class of its own while one looks on
                    on_gpu = _on_gpu((*arguments, *options.values()))
                    result, span = _timed(on_gpu, lambda: function(*arguments, **options))
            finally:
                captured.layers -= 1
            found = case_of(op, inputs_of(op, arguments, options, result))
            captured.add(captured.now, None if found is None else Key(op, found[0].id, found[1]), span)
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

    Raises `ValueError` on anything else, and on a program that fails.  The program's exit is not ours.
    """
    words = list(command)
    if words and re.fullmatch(r"python[\d.]*", Path(words[0]).name):
        words = words[1:]
    module = len(words) > 1 and words[0] == "-m"
    target = words[1] if module else words[0] if words else ""
    there = find_spec(target.partition(".")[0]) if module else Path(target).is_file()
    path = target if there else shutil.which(target) if target else None
    if not path or target.startswith("-"):
        raise ValueError(f"program: expected python app.py, python -m module, or a Python script, got {command!r}")
    if not module:
        try:
            compile(Path(path).read_bytes(), path, "exec")
        except (SyntaxError, ValueError) as error:
            raise ValueError(f"program: expected a program in Python, got {path}: {error}") from error
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
            except IMPORT_ERRORS as error:
                traceback.print_exception(error)
                raise ValueError(f"program: expected it to end well, got {type(error).__name__}: {error}") from error
    finally:
        sys.argv, sys.path[0] = before, folder
    return captured
