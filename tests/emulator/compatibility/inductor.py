"""Kernels that torch.compile generates: Inductor's Triton for an H100, generated on a machine without a GPU."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch.nn import functional as F

from compatibility import sources
from compatibility.entries import Entry, Project, flat
from compatibility.sources import Source

SOURCE = Source("torch.compile", "torch==2.13.0")
Tensor = torch.Tensor


@contextmanager
def no_card() -> Iterator[None]:
    """What Inductor asks a card for, and `pretended_gpu` does not answer: it is only to write code."""
    from torch._dynamo.device_interface import CudaInterface
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    def first(tuner: Any, *args: Any, **kwargs: Any) -> None:
        tuner.launchers = tuner.launchers[:1]  # without a card no config is faster

    def zero(*args: Any) -> int:
        return 0

    exchange: dict[str, Any] = {"exchange_device": staticmethod(zero), "maybe_exchange_device": staticmethod(zero)}
    with (
        patch.multiple(
            torch.cuda,
            get_rng_state=lambda *args: torch.zeros(16, dtype=torch.uint8),
            set_rng_state=zero,
            _exchange_device=zero,
            _maybe_exchange_device=zero,
        ),
        patch.multiple(CudaInterface, **exchange),
        patch("torch._inductor.fx_passes.joint_graph.lazy_init", zero),
        patch("torch._inductor.runtime.triton_helpers.set_driver_to_gpu", zero),
        patch.object(CachingAutotuner, "autotune_to_one_config", first),
    ):
        yield


def _generated(function: Callable[..., Any], inputs: tuple[Tensor, ...]) -> Any:
    """`function` as Inductor compiles it for tensors of these shapes on a GPU."""
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    began = time.perf_counter()
    options: dict[str, Any] = {"use_static_triton_launcher": False, "compile_threads": 1, "force_disable_caches": True}
    with torch._C.DisableTorchFunction(), FakeTensorMode(), torch.no_grad(), config.patch(**options):
        fakes = [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cuda:0") for x in inputs]
        graph = make_fx(lambda *args: tuple(flat(function(*args))), tracing_mode="real")(*fakes)
        made = compile_fx(graph, fakes)
    sources.importing_s += time.perf_counter() - began  # to write the code is Inductor's time, not the kernel's
    return made


def _entry(name: str, inputs: str, function: Callable[..., Any], allowed: float = 1.0) -> Entry:
    """An entry whose reference is the function itself, in fp64."""

    def call(*given: Tensor) -> Any:
        with no_card():
            return _generated(function, given)(*given)

    return Entry(name, inputs, call, function, allowed=allowed)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = x.chunk(2, -1)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], -1)


ENTRIES = (
    _entry("gelu times gate", "x=7x96,y=7x96", lambda x, y: F.gelu(x) * y),
    _entry("silu times gate", "x=7x96:bf16,y=7x96:bf16", lambda x, y: F.silu(x) * y, 4),
    _entry("rms_norm", "x=7x96,w=96", lambda x, w: F.rms_norm(x, (96,), w, 1e-6)),
    _entry("rms_norm of long rows", "x=3x5000,w=5000", lambda x, w: F.rms_norm(x, (5000,), w, 1e-6)),
    _entry("add and rms_norm", "x=7x96,r=7x96,w=96", lambda x, r, w: (F.rms_norm(x + r, (96,), w, 1e-6), x + r)),
    _entry("layer_norm", "x=7x96,w=96,b=96", lambda x, w, b: F.layer_norm(x, (96,), w, b)),
    _entry("softmax", "x=7x99", lambda x: torch.softmax(x, -1)),
    _entry("softmax of long rows", "x=3x5000", lambda x: torch.softmax(x, -1)),
    _entry("log-probabilities", "x=7x99,y=7x1:i64<99", lambda x, y: F.log_softmax(x, -1).gather(1, y)),
    _entry("embedding", "w=50x96,ids=11:i64<50", lambda w, ids: F.embedding(ids, w) * 3),
    _entry("rotary", "x=5x3x32,c=5x1x16,s=5x1x16", _rotated),
    _entry("sums of columns", "x=300x70", lambda x: x.sum(0)),
    _entry("largest of rows", "x=300x70", lambda x: (x.amax(1), x.argmax(1))),
    _entry("running sum", "x=7x99", lambda x: x.cumsum(-1)),
    _entry("transposed and added", "x=37x70,y=70x37", lambda x, y: x.T * 2 + y),
)
PROJECT = Project(SOURCE, ENTRIES)
