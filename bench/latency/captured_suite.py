"""Records each call of a program that a Rooflab op could compute, in a suite: a file of shapes, counts and times.

It watches known modules of transformers and vLLM (`_MODULES`), and torch's matrix products, attention and embedding
elsewhere.  On a GPU, two events give the time of a call.  Only eager code is counted, because a CUDA graph calls no
module or operator.
"""

from __future__ import annotations

import re
import runpy
import sys
import traceback
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from rooflab.bench.latency.ledger import TimeMark, clock_of, seconds_between
from rooflab.kernels._user_files import IMPORT_ERRORS
from rooflab.reference.captured import FILE_VERSION
from rooflab.reference.spec import DTYPE_NAMES, Case

_ATEN = torch.ops.aten
_OPERANDS = {_ATEN.mm: (0, 1), _ATEN.addmm: (1, 2), _ATEN.bmm: (0, 1), _ATEN.matmul: (0, 1), _ATEN.linear: (0, 1)}
"""The operators that multiply, and the positions of their factors.  The last two appear only in inference mode."""
_ATTENTION_OPERATORS = {
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
    """Identifies the calls of an op that are counted together: the op, its case (sizes) and its scheme (dtypes)."""

    op: str
    case: str
    scheme: str


@dataclass
class Tally:
    """Holds the calls and the seconds of each case (op, sizes, dtypes), and the seconds of all watched calls."""

    calls: dict[Key, int] = field(default_factory=lambda: defaultdict(int))
    seconds: dict[Key, float] = field(default_factory=lambda: defaultdict(float))
    total_s: float = 0.0


class Captured(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts and times a running program's calls in a `with` block.  By itself, it records torch's operators, such as
    matrix products.  The function `capturing` also records known modules of transformers and vLLM, each as one call."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.inside, self.outside = Tally(), Tally()
        """The calls inside modules; and all other calls, such as calls that load weights."""
        self.depth = 0
        """The number of nested modules that are running now."""
        self.module: tuple[torch.nn.Module, Key, TimeMark] | None = None
        """The module of `_MODULES` that is running now, its case, and its start time."""
        self._spans: list[tuple[Tally, Key | None, TimeMark, TimeMark]] = []
        """The calls whose times are not read yet, because a GPU's event has no time before it completes."""

    @property
    def model(self) -> Tally:
        """Returns the counts and times of the model's calls.  These are all calls inside torch modules.  If the program
        has no calls inside modules, returns the counts and times of its other calls."""
        return self.inside if self.inside.total_s else self.outside

    @property
    def explained(self) -> float:
        """Returns the share of the model's time in calls that Rooflab's ops could compute, and so explain.

        The model's time is the sum over all torch operators and known modules, without Python's time between them."""
        return sum(self.model.seconds.values()) / self.model.total_s if self.model.total_s else 0.0

    def add(self, key: Key | None, begin: TimeMark, end: TimeMark) -> None:
        """Adds a call.  `key` is None if no op of Rooflab computes the call."""
        call_tally = self.inside if self.depth else self.outside
        if key is not None:
            call_tally.calls[key] += 1
        self._spans.append((call_tally, key, begin, end))
        if len(self._spans) >= 10_000:
            self.settle()

    def settle(self) -> None:
        """Reads the times of all calls so far, and adds them to the tallies."""
        for call_tally, key, start_mark, end_mark in self._spans:
            seconds = seconds_between(start_mark, end_mark)
            call_tally.total_s += seconds
            if key is not None:
                call_tally.seconds[key] += seconds
        self._spans.clear()

    def suite(self, program: str) -> dict[str, Any]:
        """Returns the content of a suite file: each op's cases (sizes, dtypes), the case with the most time first."""
        model = self.model
        ops: dict[str, list[dict[str, Any]]] = defaultdict(list)
        for key, seconds in sorted(model.seconds.items(), key=itemgetter(1), reverse=True):
            row = {"case": key.case, "scheme": key.scheme, "calls": model.calls[key], "seconds": seconds}
            ops[key.op].append(row | {"share": seconds / model.total_s})
        suite_summary = {"program": program, "seconds": model.total_s, "explained": self.explained}
        return {"rooflab_suite": FILE_VERSION, **suite_summary, "ops": ops}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.module or func.is_view:
            return func(*args, **kwargs)
        clock = clock_of(_on_gpu(args))
        start_mark = clock()
        call_result = func(*args, **kwargs)
        self.add(_key_of(func, args, kwargs), start_mark, clock())
        return call_result


def _key_of(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Key | None:
    operator = func.overloadpacket
    if operator in _OPERANDS:
        return _product(operator, args)
    if operator in _ATTENTION_OPERATORS:
        argument_names = [argument.name for argument in func._schema.arguments]
        return _attention({**dict(zip(argument_names, args, strict=False)), **kwargs})
    if operator is _ATEN.embedding:
        vocab_table, token_ids = args[:2]
        return _key("embedding", vocab_table.dtype, T=token_ids.numel(), V=vocab_table.shape[0], H=vocab_table.shape[1])
    return None


def _on_gpu(values: Iterable[Any]) -> bool:
    """Tells whether any tensor in `values` is on a GPU. Looks into nested lists too."""
    return any(
        value.is_cuda if isinstance(value, torch.Tensor) else isinstance(value, list | tuple) and _on_gpu(value)
        for value in values
    )


def _key(op: str, dtype: torch.dtype, **sizes: Any) -> Key | None:
    scheme = DTYPE_NAMES.get(dtype)
    return None if scheme is None else Key(op, Case(**sizes).id, scheme)


def _product(operator: Any, args: Sequence[Any]) -> Key | None:
    a, b = (args[operand_index] for operand_index in _OPERANDS[operator])
    b = b.mT if operator is _ATEN.linear else b
    if b.ndim == 3 and b.shape[0] == 1:
        b = b[0]
    if b.ndim != 2 or not a.numel() * b.numel():
        return None
    (K, N), M = b.shape, a.numel() // b.shape[0]
    gemm_layout = "NT" if b.stride(0) == 1 and K > 1 else "NN"
    bias = operator is _ATEN.addmm or (operator is _ATEN.linear and len(args) > 2 and args[2] is not None)
    return _key("gemm", a.dtype, M=M, N=N, K=K, layout=gemm_layout, bias=bias)


def _attention(arguments: Mapping[str, Any]) -> Key | None:
    q, k, v = (arguments[argument_name] for argument_name in ("query", "key", "value"))
    if q.ndim != 4 or v.shape[-1] != q.shape[-1]:
        return None
    (B, H, T, D), H_kv, S = q.shape, k.shape[1], k.shape[2]
    # A mask is taken for the causal one, which alone decoders use; one query sees all keys.
    has_mask = any(arguments.get(argument_name) is not None for argument_name in ("attn_mask", "attn_bias"))
    is_causal = T > 1 and (has_mask or arguments.get("is_causal") is True)
    return _key("flash_attention", q.dtype, B=B, T=T, S=S, H=H, H_kv=H_kv, D=D, causal=is_causal)


@contextmanager
def capturing() -> Iterator[Captured]:
    """Records this thread's calls in the `with` block: each module of `_MODULES` as one call, and torch's operators."""
    captured_calls = Captured()

    def before(module: torch.nn.Module, args: Any) -> None:
        captured_calls.depth += 1
        if captured_calls.module or not args or not isinstance(args[0], torch.Tensor):
            return
        key_function = next(
            (key for name_suffix, key in _MODULES.items() if type(module).__name__.endswith(name_suffix)), None
        )
        if key_function is not None and (key := key_function(module, args)) is not None:
            captured_calls.module = module, key, clock_of(args[0].is_cuda)()

    def after(module: torch.nn.Module, args: Any, output: Any) -> None:
        if captured_calls.module and captured_calls.module[0] is module:
            _, key, start_mark = captured_calls.module
            captured_calls.module = None
            captured_calls.add(key, start_mark, clock_of(not isinstance(start_mark, float))())
        captured_calls.depth -= 1

    module_hooks = register_module_forward_pre_hook(before), register_module_forward_hook(after, always_call=True)
    try:
        with captured_calls:
            yield captured_calls
    finally:
        for module_hook in module_hooks:
            module_hook.remove()
    captured_calls.settle()


def _norm(module: Any, args: Sequence[Any]) -> Key | None:
    norm_input = args[0]
    norm_eps = next((value for name in ("variance_epsilon", "eps") if (value := getattr(module, name, None))), 1e-6)
    has_residual = len(args) > 1 and isinstance(args[1], torch.Tensor)
    row_width = norm_input.shape[-1]
    op = "fused_add_rmsnorm" if has_residual else "rmsnorm"
    return _key(op, norm_input.dtype, T=norm_input.numel() // row_width, H=row_width, eps=float(norm_eps))


def _gated(module: Any, args: Sequence[Any]) -> Key | None:
    double_width = args[0].shape[-1]
    return _key("silu_and_mul", args[0].dtype, T=args[0].numel() // double_width, I=double_width // 2)


_MODULES = {"RMSNorm": _norm, "SiluAndMul": _gated}
"""The end of a module class's name, and the function that makes the case of a call."""


def run_program(command: Sequence[str]) -> Captured:
    """Runs and watches a Python program in this process.  `command` is `python app.py ...` or `python -m module ...`.

    Raises `ValueError` on any other command, and if the program fails.  The program's exit does not end this process.
    """
    command_words = list(command)
    if command_words and re.fullmatch(r"python[\d.]*", Path(command_words[0]).name):
        command_words = command_words[1:]
    module = len(command_words) > 1 and command_words[0] == "-m"
    command_words = command_words[1:] if module else command_words
    program_target = command_words[0] if command_words else ""
    if not (find_spec(program_target.partition(".")[0]) if module else Path(program_target).is_file()):
        missing = f"no {'module' if module else 'file'} {program_target!r}" if program_target else "nothing"
        raise ValueError(f"program: expected python app.py or python -m module, got {missing}")
    if not module:
        try:
            compile(Path(program_target).read_bytes(), program_target, "exec")
        except (SyntaxError, ValueError) as error:
            raise ValueError(f"program: expected a program in Python, got {program_target}: {error}") from error
    old_argv, old_folder = sys.argv, sys.path[0]
    sys.argv = command_words
    try:
        with capturing() as captured_calls:
            try:
                if module:
                    runpy.run_module(program_target, run_name="__main__", alter_sys=True)
                else:
                    sys.path[0] = str(Path(program_target).resolve().parent)
                    runpy.run_path(program_target, run_name="__main__")
            except SystemExit as ended:
                if ended.code not in (None, 0):
                    raise ValueError(f"program: expected it to end well, got exit status {ended.code}") from None
            except IMPORT_ERRORS as error:
                traceback.print_exception(error)
                raise ValueError(f"program: expected it to end well, got {type(error).__name__}: {error}") from error
    finally:
        sys.argv, sys.path[0] = old_argv, old_folder
    return captured_calls
