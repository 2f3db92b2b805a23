"""Tests that a launch of our own kernels can be captured in a CUDA graph: the launcher reads nothing from the device.

Every tensor of a call lies on torch's `meta` device, which has no values, and no launch runs.  A launcher that reads a
value, or copies between host and device, fails there.  A launcher allocates through torch, whose allocator a capture
knows.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from host_cost.make import call_of
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from rooflab.kernels import _cuda, registry
from rooflab.kernels.registry import Kernel

META = torch.device("meta")
OWN = [
    kernel
    for op in registry.ops()
    for kernel in registry.kernels(op).values()
    if kernel.backend in ("triton", "gluon", "cuda") and kernel.role != "peer"
]


class OnDevice(TorchDispatchMode):
    """Refuses operations that take or make a tensor of the host."""

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = op(*args, **(kwargs or {}))
        tensors = [value for value in (*args, made) if isinstance(value, torch.Tensor)]
        assert all(value.device == META for value in tensors), f"{op} takes or makes a tensor of the host"
        return made


@pytest.mark.parametrize("kernel", OWN, ids=lambda kernel: kernel.id)
def test_a_launcher_asks_the_device_for_nothing(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    launches: list[str] = []
    for kind in (JITFunction, InterpretedFunction):
        monkeypatch.setattr(kind, "__getitem__", lambda self, grid: lambda *args, **kw: launches.append(str(self)))
    monkeypatch.setattr(_cuda.CudaKernel, "__call__", lambda self, *args, **kw: launches.append(self.name))
    call = call_of(kernel)
    assert call is not None
    with OnDevice():
        call()
    assert launches
