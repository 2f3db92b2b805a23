"""Simulates the presence of an H100: CPU tensors report a CUDA device, and `torch.cuda` answers as on an H100.

So a kernel's launcher works without a GPU.  Functions that need a real GPU, such as time measurements, raise an error
with the name of the function.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._mode_utils import no_dispatch

from rooflab.bench.compile.cases import SM, device_for, properties
from rooflab.bench.compile.pretended_torch import GPU, DefaultGenerator, fake_cuda, pretended_torch

_CPU_DEVICE = torch.device("cpu")
_NOOP_METHODS = (torch.Tensor.cuda, torch.Tensor.pin_memory)
"""Methods that return the tensor itself on the pretended GPU."""
_HOST_READS = (torch.Tensor.cpu, torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.item)
_DEVICE_GETTERS: dict[Any, Callable[[torch.device], Any]] = {
    torch.Tensor.device.__get__: lambda real: GPU if real == _CPU_DEVICE else real,
    torch.Tensor.is_cuda.__get__: lambda real: real == _CPU_DEVICE,  # type: ignore[attr-defined]
    torch.Tensor.is_cpu.__get__: lambda real: False,  # type: ignore[attr-defined]
    torch.Tensor.get_device: lambda real: 0 if real == _CPU_DEVICE else -1,
}


class OnGpu(TorchFunctionMode):
    """While this mode is active, CPU tensors report the device `GPU`, and tensors sent to `GPU` stay on the CPU.

    The mode remembers a tensor when a program reads its `data_ptr()`, because a kernel may use this pointer.  With
    `each_view`, it remembers each view of one memory, but none that only Triton asks of its arguments."""

    def __init__(self, each_view: bool = False) -> None:
        super().__init__()
        self._each_view = each_view
        self.addressed: dict[Hashable, torch.Tensor] = {}
        self.on_host_read: Callable[[], object] = lambda: None
        """A function that is called when the host waits for the current stream, to read a tensor."""
        self._crowded = 1024
        """The number of tensors in `addressed` from which on freed tensors are dropped."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.device:
            return func(*args, **kwargs)
        if func in _NOOP_METHODS:
            return args[0]
        if func in _HOST_READS:
            self.on_host_read()
        if func is torch.Tensor.cpu:
            return func(*args, **kwargs).clone()  # a copy, as from a GPU
        if func in _DEVICE_GETTERS:
            with torch._C.DisableTorchFunction():
                return _DEVICE_GETTERS[func](args[0].device)
        if func is torch.Tensor.data_ptr:
            self._remember(args[0])
        if func is torch.Tensor.to:
            target = kwargs["device"] if "device" in kwargs else args[1] if len(args) > 1 else None
            if isinstance(target, torch.device | str) and torch.device(target).type == "cpu":
                kwargs["copy"] = True
                self.on_host_read()
            args = (*args[:1], *(_CPU_DEVICE if type(value) is int else value for value in args[1:2]), *args[2:])
        kwargs.pop("pin_memory", None)
        if isinstance(kwargs.get("generator"), DefaultGenerator):
            kwargs["generator"] = torch.default_generator
        if "device" in kwargs:
            kwargs["device"] = _on_cpu(kwargs["device"])
        return func(*(_on_cpu(value) if isinstance(value, torch.device | str) else value for value in args), **kwargs)

    def _remember(self, tensor: torch.Tensor) -> None:
        """Holds a tensor's memory.  Of many tensors, drops those that the program has freed."""
        key: Hashable = tensor.untyped_storage().data_ptr()
        if self._each_view:
            if _is_asked_by_triton():
                return
            key = key, tensor.data_ptr(), tensor.shape, tensor.stride()
        if key in self.addressed:
            return
        with no_dispatch():  # Helion asks for an address while it computes with fake tensors
            self.addressed[key] = tensor.detach()  # so that the memory's uses count the program's tensors alone
        if len(self.addressed) > self._crowded:
            held_uses = Counter(held.untyped_storage().data_ptr() for held in self.addressed.values())
            self.addressed = {
                key: held
                for key, held in self.addressed.items()
                # One more use is the object that asks.
                if torch._C._storage_Use_Count((memory := held.untyped_storage())._cdata)
                > held_uses[memory.data_ptr()] + 1
            }
            self._crowded = max(1024, 2 * len(self.addressed))


def _is_asked_by_triton() -> bool:
    """Tells whether Triton, which looks at the alignment of each argument, called `data_ptr`."""
    caller = sys._getframe(3)  # behind `_remember` and `__torch_function__`
    return any(frame is not None and "/triton/" in frame.f_code.co_filename for frame in (caller, caller.f_back))


def _on_cpu(device: Any) -> Any:
    """Returns the CPU if `device` is a CUDA device; returns any other device unchanged."""
    if isinstance(device, int) and not isinstance(device, bool):
        return _CPU_DEVICE
    is_gpu = device.type == "cuda" if isinstance(device, torch.device) else str(device).split(":")[0] == "cuda"
    return _CPU_DEVICE if is_gpu else device


@contextmanager
def pretended_gpu(each_view: bool = False) -> Iterator[OnGpu]:
    """Makes torch see a fake H100 inside a `with` block.  `each_view` is the argument of `OnGpu`."""
    h100, gpu_properties = device_for(), properties()
    device_properties = SimpleNamespace(
        name=h100.full_name,
        major=9,
        minor=0,
        total_memory=int(h100.hbm_bytes),
        multi_processor_count=h100.sms,
        max_threads_per_multi_processor=gpu_properties["max_threads_per_sm"],
        warp_size=gpu_properties["warpSize"],
        L2_cache_size=h100.l2_bytes,
        regs_per_multiprocessor=gpu_properties["max_num_regs"],
        shared_memory_per_block=48 << 10,
        shared_memory_per_multiprocessor=gpu_properties["shared_mem_per_sm"],
        shared_memory_per_block_optin=gpu_properties["max_shared_mem"],
    )
    with (
        patch.multiple(torch.cuda, create=True, **fake_cuda(device_properties)),
        patch.object(torch.version, "cuda", "12.8"),
        patch.object(torch._C, "_get_accelerator", lambda *args: GPU),
        patch.object(torch._C, "_cuda_getCurrentRawStream", lambda *args: 0, create=True),
        OnGpu(each_view) as gpu_mode,
        pretended_torch(gpu_mode),
    ):
        yield gpu_mode


@contextmanager
def pretended_card(device: str = "cuda:0") -> Iterator[None]:
    """Makes torch and Triton see a fake H100, for files that need a GPU at import.  Triton knows it as `device`."""
    # Not at the top: the first import of Triton fixes its interpreter mode.
    from rooflab.bench.compile.capture import FakeDriver, driven_by

    with driven_by(FakeDriver(SM, properties(), device)), pretended_gpu():
        yield
