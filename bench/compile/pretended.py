"""Simulates the presence of an H100: CPU tensors report a CUDA device, and `torch.cuda` answers as on an H100.

So a kernel's launcher works without a GPU.  Functions that need a real GPU, such as time measurements, raise an error
with the name of the function.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any, NoReturn
from unittest.mock import patch

import torch
from torch.overrides import TorchFunctionMode

from rooflab.bench.compile.cases import SM, device_for, properties

GPU = torch.device("cuda", 0)
_CPU_DEVICE = torch.device("cpu")
_NOOP_METHODS = (torch.Tensor.cuda, torch.Tensor.pin_memory)
"""Methods that return the tensor itself on the pretended GPU."""
_DEVICE_GETTERS: dict[Any, Callable[[torch.device], Any]] = {
    torch.Tensor.device.__get__: lambda real: GPU if real == _CPU_DEVICE else real,
    torch.Tensor.is_cuda.__get__: lambda real: real == _CPU_DEVICE,  # type: ignore[attr-defined]
    torch.Tensor.is_cpu.__get__: lambda real: False,  # type: ignore[attr-defined]
    torch.Tensor.get_device: lambda real: 0 if real == _CPU_DEVICE else -1,
}


class OnGpu(TorchFunctionMode):
    """While this mode is active, CPU tensors report the device `GPU`, and tensors sent to `GPU` stay on the CPU.

    The mode remembers a tensor when a program reads its `data_ptr()`, because a kernel may use this pointer."""

    def __init__(self) -> None:
        super().__init__()
        self.addressed: dict[int, torch.Tensor] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.device:
            return func(*args, **kwargs)
        if func in _NOOP_METHODS:
            return args[0]
        if func in _DEVICE_GETTERS:
            with torch._C.DisableTorchFunction():
                return _DEVICE_GETTERS[func](args[0].device)
        if func is torch.Tensor.data_ptr:
            self.addressed[args[0].untyped_storage().data_ptr()] = args[0]
        if "device" in kwargs:
            kwargs["device"] = _on_cpu(kwargs["device"])
        return func(*(_on_cpu(value) if isinstance(value, torch.device | str) else value for value in args), **kwargs)


def _on_cpu(device: Any) -> Any:
    """Returns the CPU if `device` is a CUDA device; returns any other device unchanged."""
    if isinstance(device, int) and not isinstance(device, bool):
        return _CPU_DEVICE
    is_gpu = device.type == "cuda" if isinstance(device, torch.device) else str(device).split(":")[0] == "cuda"
    return _CPU_DEVICE if is_gpu else device


class _Event:
    """A CUDA event of the fake GPU.  All work before the event is already finished."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def record(self, stream: Any = None) -> None:
        """Does nothing, because there is no pending work."""

    wait = synchronize = record

    def query(self) -> bool:
        """Returns True, because the event has already happened."""
        return True

    def elapsed_time(self, other: Any) -> NoReturn:
        """Raises `RuntimeError`, because the emulator measures no times."""
        raise RuntimeError("torch.cuda.Event.elapsed_time: the emulator has no times")


class _Stream(_Event):
    """The only CUDA stream of the fake GPU."""

    cuda_stream, stream_id, device = 0, 0, GPU

    def record_event(self, event: Any = None) -> Any:
        """Returns `event`, or a new event if `event` is None."""
        return event or _Event()

    wait_stream = wait_event = _Event.record


class _Guard(nullcontext[None]):
    """Replaces context managers such as `torch.cuda.device`; does nothing, because there is only one device."""

    idx = prev_idx = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()


def _refused(name: str) -> Callable[..., NoReturn]:
    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise RuntimeError(f"torch.cuda.{name}: the emulator cannot answer this without a card")

    return refuse


@contextmanager
def pretended_gpu() -> Iterator[OnGpu]:
    """Makes torch see a fake H100 inside a `with` block."""
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
    stream = _Stream()
    fake_results: dict[str, Any] = {
        "is_available": True, "is_initialized": True, "device_count": 1, "current_device": 0,
        "get_device_capability": (9, 0), "get_device_name": h100.full_name, "get_device_properties": device_properties,
        "is_bf16_supported": True, "is_current_stream_capturing": False, "synchronize": None, "set_device": None,
        "empty_cache": None, "init": None, "_lazy_init": None, "current_stream": stream, "default_stream": stream,
    }  # fmt: skip
    refused_names = ("memory_allocated", "max_memory_allocated", "mem_get_info", "memory_stats", "get_rng_state")
    fake_calls: dict[str, Any] = {name: _refused(name) for name in refused_names}
    fake_calls |= {name: (lambda *args, value=value, **kwargs: value) for name, value in fake_results.items()}
    fake_calls |= dict.fromkeys(("device", "device_of", "stream"), _Guard)
    # Inductor holds the function that calls it.
    fake_calls |= {"_get_device_properties": lambda *args: device_properties, "Event": _Event, "Stream": _Stream}
    # A class, because annotations name it.
    fake_calls["CUDAGraph"] = type("CUDAGraph", (), {"__init__": _refused("CUDAGraph")})
    with (
        patch.multiple(torch.cuda, create=True, **fake_calls),
        patch.object(torch.version, "cuda", "12.8"),
        patch.object(torch._C, "_get_accelerator", lambda *args: GPU),
        patch.object(torch._C, "_cuda_getCurrentRawStream", lambda *args: 0, create=True),
        patch.object(torch.accelerator, "device_index", _Guard),
        OnGpu() as gpu_mode,
    ):
        yield gpu_mode


@contextmanager
def pretended_card(device: str = "cuda:0") -> Iterator[None]:
    """Makes torch and Triton see a fake H100, for files that need a GPU at import.  Triton knows it as `device`."""
    # Not at the top: the first import of Triton fixes its interpreter mode.
    from rooflab.bench.compile.capture import FakeDriver, driven_by

    with driven_by(FakeDriver(SM, properties(), device)), pretended_gpu():
        yield
