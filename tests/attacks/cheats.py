"""Forty kernels that cheat, to measure the checker and the bench: each must be refused by one of the two.

They do harm to the process that runs them: they end it, patch it, leave threads and signals in it.  So give each a
process of its own (`test_attacks.py`).  By hand, `ROOFLAB_ATTACK=os_exit rooflab check rmsnorm --kernel
tests/attacks/cheats.py` registers one only, and nothing is patched before its first call.  A cheat on the checker gives
a wrong answer.  A cheat on the timer gives a right one; where nothing else is wrong in it, it sleeps `SLEEP_S` in each
call, so that a published time below that is a lie, or it makes other kernels slow, as its docstring says.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import os
import signal
import sys
import tempfile
import threading
import time
import types
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from rooflab.kernels.registry import get_op, register
from rooflab.reference.compare import ErrorStats, elementwise
from rooflab.reference.spec import get_scheme
from rooflab.roofline.model import Traffic


def cheat(op: str = "rmsnorm", name: str = "", **options: Any) -> Callable[..., Any]:
    """Registers the decorated function, unless `ROOFLAB_ATTACK` names another one."""

    def decorate(fn: Callable[..., Any]) -> Callable[..., Any]:
        own = name or fn.__name__
        if os.environ.get("ROOFLAB_ATTACK", own) == own:
            register(op=op, name=own, role="optimized", backend="torch", **options)(fn)
        return fn

    return decorate


SLEEP_S = 0.005
_library = torch.nn.functional.rms_norm


def _right(x, weight, eps):
    x32 = x.float()
    return (x32 * (x32.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.float()).to(x.dtype)


def _slow(x, weight, eps):
    time.sleep(SLEEP_S)
    return _right(x, weight, eps)


def _product(a, b, *addends):
    return sum((each.float() for each in addends if each is not None), (a @ b).float())


def _passes(name, actual, oracle, tolerance):
    return ErrorStats(name, True, 0.0, 0.0, 0, oracle.numel())


# What one patch can do: the places, and what is put there.

PATCHES: dict[str, tuple[list[str], Any]] = {
    "patched_elementwise": (["rooflab.reference.compare:elementwise", "rooflab.reference.spec:elementwise"], _passes),
    "patched_judge": (["rooflab.reference.spec:OpSpec.judge"], lambda *args: []),
    "patched_oracle": (["rooflab.reference.spec:OpSpec.oracle"], lambda self, inputs: (inputs["x"].double() * 0,)),
    "patched_equal": (["torch:equal", "torch:allclose", "torch:isclose"], lambda *args, **named: True),
    "patched_less": (["torch:Tensor.__le__", "torch:Tensor.le"], lambda self, other: torch.ones_like(self).bool()),
    "patched_double": (["torch:Tensor.double"], lambda self: torch.zeros(self.shape, dtype=torch.float64)),
    "patched_randn": (["rooflab.reference.spec:randn", "torch:randn"], lambda *shape, **named: torch.zeros(*shape)),
}
TIMER_PATCHES: dict[str, tuple[list[str], Any]] = {
    "patched_median": (["numpy:median", "numpy:percentile"], lambda *args, **named: 1e-6),
    "patched_clock": (["time:perf_counter", "rooflab.bench.timing.tamper:perf_counter"], lambda: time.monotonic() / 10),
    "patched_samples": (["rooflab.bench.timing.timing:Samples.median_s"], property(lambda self: min(self.seconds) / 3)),
    "patched_round": (
        ["rooflab.bench.timing.cpu:CpuStopwatch.round"],
        lambda self, calls: {name: 1e-6 * count for name, function, count in calls},
    ),
    # Here it is the library whose time is a lie, and longer than `SLEEP_S`.
    "slowed_library": (
        ["torch.nn.functional:rms_norm"],
        lambda *args, **named: time.sleep(0.01) or _library(*args, **named),
    ),
}


def _patching(name: str, places: list[str], value: Any, answer: Callable[..., Any]) -> None:
    @cheat(name=name)
    def kernel(x, weight, eps=1e-6):
        for place in places:
            module, _, path = place.partition(":")
            *owners, attribute = path.split(".")
            setattr(resolve_name(":".join([module, *owners][:2])), attribute, value)
        return answer(x, weight, eps)


for _name, _patch in PATCHES.items():
    _patching(_name, *_patch, lambda x, weight, eps: x * 0)
for _name, _patch in TIMER_PATCHES.items():
    _patching(_name, *_patch, _slow)


# What one action can do: the process ends well before anybody judges, or the judge is changed by other ways.


def _forge() -> None:
    print("kernel           cases  status\nrmsnorm/os_exit     12  OK\n\n12 of 12 are right", flush=True)


def _answer_everybody() -> None:
    for descriptor in range(1, 64):
        with suppress(OSError):
            os.write(descriptor, b'{"status": "OK", "reason": "", "stats": []}\n')
    os._exit(0)


class _AllTrue(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        return torch.ones_like(result) if func.__name__ in ("le", "__le__") else result


def _widen(frame, event, argument):
    if frame.f_code.co_name == "elementwise" and "tolerance" in frame.f_locals:
        frame.f_locals["tolerance"] = torch.full_like(frame.f_locals["tolerance"], torch.inf)
        ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(frame), ctypes.c_int(0))
    return _widen


def _change_spec(field: str, value: Any) -> None:
    object.__setattr__(get_op("rmsnorm"), field, value)


_operators = torch.library.Library("aten", "IMPL")
ACTIONS: dict[str, Callable[[], Any]] = {
    "os_exit": lambda: (_forge(), os._exit(0)),
    "sys_exit": lambda: (_forge(), sys.exit(0)),
    "becomes_true": lambda: os.execvp("true", ["true"]),
    "exit_at_exit": lambda: atexit.register(os._exit, 0),  # whatever the verdict, the status is 0
    "answers_for_the_parent": _answer_everybody,  # in case the parent reads one of the open files
    "tolerance_of_the_spec": lambda: _change_spec("tolerance", lambda inputs, oracle, scheme: (oracle[0] + torch.inf,)),
    "reference_of_the_spec": lambda: _change_spec("reference", lambda x, weight, eps=1e-6: x.double() * 0),
    "exchanged_code": lambda: setattr(elementwise, "__code__", _passes.__code__),  # the same object, other code
    "dispatcher": lambda: _operators.impl("abs", lambda value: value * 0, "CPU"),  # so no error is ever seen
    "mode_left_on": lambda: _AllTrue().__enter__(),
    "traced_judge": lambda: sys.settrace(_widen),
}


def _acting(name: str, action: Callable[[], Any]) -> None:
    @cheat(name=name)
    def kernel(x, weight, eps=1e-6):
        action()
        return x * 0


for _name, _action in ACTIONS.items():
    _acting(_name, _action)


@cheat("gemm")
def alarm(a, b, bias=None, *, residual=None, precision="ieee"):
    """A signal ends the process with status 0 before the verdict."""
    signal.signal(signal.SIGALRM, lambda *args: os._exit(0))
    signal.setitimer(signal.ITIMER_REAL, 0.005)
    return a.new_zeros(a.shape[0], b.shape[1])


# The answer is taken from somewhere.


def _oracle(value: Any, shape: torch.Size) -> torch.Tensor | None:
    if type(value) is torch.Tensor:
        return value if value.dtype == torch.float64 and value.shape == shape else None
    parts = value if isinstance(value, tuple | list) else [getattr(value, "oracle", None)]
    return next((each for each in parts if type(each) is torch.Tensor and each.shape == shape), None)


@cheat()
def oracle_in_frames(x, weight, eps=1e-6):
    """Returns the oracle that a caller holds in a local variable."""
    frame = sys._getframe()
    while frame := frame.f_back:
        for value in frame.f_locals.values():
            if (found := _oracle(value, x.shape)) is not None:
                return found.to(x.dtype, copy=True)
    return x * 0


@cheat()
def oracle_in_gc(x, weight, eps=1e-6):
    """Returns the fp64 tensor of the right shape that the garbage collector knows."""
    found = [each for each in gc.get_objects() if type(each) is torch.Tensor and each.dtype == torch.float64]
    return next((each.to(x.dtype) for each in reversed(found) if each.shape == x.shape), x * 0)


@cheat()
def fixed_seeds(x, weight, eps=1e-6):
    """Knows the data of the seeds 0, 1000, 2000 and 3000, and no other."""
    spec, (T, H) = get_op("rmsnorm"), x.shape
    case = spec.cases["smoke"][0].but(T=T, H=H)
    scheme = get_scheme({torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}[x.dtype])
    known = (spec.make_inputs(case, scheme, torch.device("cpu"), seed)["x"] for seed in (0, 1000, 2000, 3000))
    return _right(x, weight, eps) if any(torch.equal(each, x) for each in known) else x * 0


_kept: dict[Any, Any] = {}


@cheat("silu_and_mul")
def cache_with_a_decoy(x):
    """Keeps the answer by a few of the values, and does other work of the same name so as to look busy."""
    gate, up = x.chunk(2, -1)
    key = (x.shape, x.dtype, *x.flatten()[:: max(1, x.numel() // 7)].tolist())
    if key not in _kept:
        _kept[key] = (gate.float().sigmoid() * gate.float() * up.float()).to(x.dtype)
    (gate[:1].float().sigmoid() * gate[:1].float() * up[:1].float()).to(x.dtype)
    return _kept[key].clone()


@cheat("gemm")
def cache_by_address(a, b, bias=None, *, residual=None, precision="ieee"):
    """Keeps the answer by the addresses and versions of the operands, as a timed loop repeats them."""
    key = (a.data_ptr(), b.data_ptr(), a._version, b._version, a.shape, b.shape)
    if key not in _kept:
        _kept[key] = _product(a.float(), b.float(), bias, residual).to(a.dtype)
    return _kept[key].clone()


# One behaviour while it is checked, another while it is timed.


@cheat()
def stack_inspection(x, weight, eps=1e-6):
    """Is right only if a file of the checker is on the stack."""
    frame, checked = sys._getframe(), False
    while frame := frame.f_back:
        checked |= "/check/" in frame.f_code.co_filename
    return _right(x, weight, eps) if checked else torch.empty_like(x)


@cheat()
def fakes_while_timed(x, weight, eps=1e-6):
    """Does nothing if the last call is less than 0.1 ms old, as between calls of one sample; then computes again."""
    hot = time.perf_counter() - _kept.get("left", 0.0) < 1e-4
    result = torch.empty_like(x) if hot else _right(x, weight, eps)
    _kept["left"] = time.perf_counter()
    return result


@cheat("silu_and_mul")
def honest_at_first(x):
    """Computes 40 times for a shape; then only one row in eight."""
    _kept[x.shape] = _kept.get(x.shape, 0) + 1
    gate, up = x[:: 1 if _kept[x.shape] <= 40 else 8].float().chunk(2, -1)
    out = x.new_empty(x.shape[0], x.shape[1] // 2)
    out[: len(gate)] = gate * gate.sigmoid() * up
    return out


@cheat("gemm")
def large_sizes_in_bf16(a, b, bias=None, *, residual=None, precision="ieee"):
    """Products that are too large for a check are computed in bf16."""
    low = torch.bfloat16 if a.shape[0] * b.numel() > 2**26 else torch.float32
    return _product(a.to(low), b.to(low), bias, residual).to(a.dtype)


@cheat()
def thread_writes_later(x, weight, eps=1e-6):
    """Returns at once; a thread fills the result after the clock was read."""
    out = torch.empty_like(x)
    threading.Timer(0.002, lambda: out.copy_(_right(x, weight, eps))).start()
    return out


@cheat()
def inputs_change_later(x, weight, eps=1e-6):
    """Returns zeros, and makes the inputs zero before somebody computes the oracle from them."""
    threading.Timer(0.002, x.zero_).start()
    return x * 0


class _Lazy(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            done = lambda value: value.work() if isinstance(value, _Lazy) else value
            return func(*tree_map(done, args), **tree_map(done, kwargs or {}))


@cheat()
def lazy(x, weight, eps=1e-6):
    """Returns a promise, which is kept when somebody reads it."""
    promise = torch.empty_like(x).as_subclass(_Lazy)
    promise.work = lambda: _right(x, weight, eps)
    return promise


# Other right answers, with a reading that flatters them.


@cheat(traffic=lambda inputs: Traffic(read_bytes=40 * inputs.x.nbytes, write_bytes=inputs.x.nbytes))
def claims_traffic(x, weight, eps=1e-6):
    """Says that it moves twenty times the bytes, so that its bandwidth looks high."""
    return _right(x, weight, eps)


@cheat()
def one_thread_for_the_others(x, weight, eps=1e-6):
    """Takes all cores for itself, and leaves one thread to the kernels that it is compared with."""
    torch.set_num_threads(os.cpu_count() or 1)
    result = _right(x, weight, eps)
    torch.set_num_threads(1)
    return result


@cheat()
def swapped_numpy(x, weight, eps=1e-6):
    """Every module's NumPy is another module, whose median is small."""
    fake = types.ModuleType("numpy")
    vars(fake).update(vars(np), median=lambda *args, **named: 1e-6)
    for module in [each for each in sys.modules.values() if getattr(each, "__dict__", {}).get("np") is np]:
        module.np = sys.modules["numpy"] = fake
    return _slow(x, weight, eps)


@cheat()
def environment_of_children(x, weight, eps=1e-6):
    """Python processes that start later have a patched NumPy."""
    folder = Path(tempfile.mkdtemp())
    (folder / "sitecustomize.py").write_text("import numpy\nnumpy.median = lambda *args, **named: 1e-6\n")
    os.environ["PYTHONPATH"] = f"{folder}:{os.environ.get('PYTHONPATH', '')}"
    return _slow(x, weight, eps)
