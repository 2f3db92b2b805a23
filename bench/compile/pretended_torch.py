"""What torch answers on the pretended GPU beside the devices of tensors: streams, seeds, operators' kernels, backward.

A CPU computes what torch computes there, so a seed or a generator of the GPU is one of the CPU."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import wraps
from types import SimpleNamespace
from typing import Any, NoReturn
from unittest.mock import patch

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from rooflab.bench.compile.pretended_graph import Capture, Graph, capturing

GPU = torch.device("cuda", 0)


class Event:
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


class Stream(Event):
    """The only CUDA stream of the fake GPU."""

    cuda_stream, stream_id, priority, device_index, device = 0, 0, 0, 0, GPU

    def record_event(self, event: Any = None) -> Any:
        """Returns `event`, or a new event if `event` is None."""
        return event or Event()

    wait_stream = wait_event = Event.record

    def is_capturing(self) -> bool:
        """Tells whether a CUDA graph is being captured."""
        return capturing() is not None

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *error: Any) -> None:
        pass


class DeviceGuard(nullcontext[None]):
    """Replaces context managers such as `torch.cuda.device`; does nothing, because there is only one device."""

    idx = prev_idx = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()


class _GeneratorType(type(torch.Generator)):  # type: ignore[misc]
    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, torch._C.Generator)


class _Generator(torch.Generator, metaclass=_GeneratorType):
    """A generator of the CPU that may be asked for on the GPU."""

    def __new__(cls, device: Any = "cpu") -> Any:
        return torch._C.Generator("cpu")


class DefaultGenerator(torch._C.Generator):
    """The GPU's default generator.  The CPU's draws for it.  As on a GPU, its state is a seed and an offset."""

    _offset = 0

    def initial_seed(self) -> int:
        """Returns the seed."""
        return torch.default_generator.initial_seed()

    def manual_seed(self, seed: int) -> DefaultGenerator:
        """Sets the seed, and the offset to 0."""
        self._offset = 0
        torch.default_generator.manual_seed(seed)
        return self

    def get_offset(self) -> int:
        """Returns the offset."""
        return self._offset

    def set_offset(self, offset: int) -> DefaultGenerator:
        """Sets the offset, which only kernels that read it use."""
        self._offset = offset
        return self

    def get_state(self) -> torch.Tensor:
        """Returns 16 bytes: the seed and the offset, int64 each."""
        return torch.tensor([self.initial_seed(), self._offset]).view(torch.uint8)

    def set_state(self, new_state: torch.Tensor) -> DefaultGenerator:
        """Sets seed and offset from 16 bytes."""
        seed, offset = new_state.view(torch.int64).tolist()
        return self.manual_seed(seed).set_offset(offset)


_SEEDS: dict[str, Callable[..., Any]] = {
    "manual_seed": lambda seed: torch.default_generator.manual_seed(int(seed)) and None,
    "manual_seed_all": lambda seed: torch.default_generator.manual_seed(int(seed)) and None,
    "seed": lambda: torch.default_generator.seed() and None,
    "seed_all": lambda: torch.default_generator.seed() and None,
    "initial_seed": lambda: torch.default_generator.initial_seed(),
    "get_rng_state": lambda device="cuda": torch.get_rng_state(),
    "get_rng_state_all": lambda: [torch.get_rng_state()],
    "set_rng_state": lambda new_state, device="cuda": torch.set_rng_state(new_state),
    "set_rng_state_all": lambda new_states: torch.set_rng_state(new_states[0]),
}
_LIBRARY_KEYS = {"CUDA": "CPU", "AutogradCUDA": "AutogradCPU"}
_NVTX = ("rangePushA", "rangePop", "rangeStartA", "rangeEnd", "markA", "deviceRangeStart", "deviceRangeEnd")


def _answering(answers: Mapping[str, Any]) -> dict[str, Any]:
    """Returns functions by name.  Each takes any arguments, and returns its value in `answers`."""
    return {name: (lambda *args, value=value, **kwargs: value) for name, value in answers.items()}


def _refused(name: str) -> Callable[..., NoReturn]:
    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise RuntimeError(f"torch.cuda.{name}: the emulator cannot answer this without a card")

    return refuse


def fake_cuda(properties: SimpleNamespace) -> dict[str, Any]:
    """Returns the functions and classes of `torch.cuda` for a GPU with these properties, by name."""
    stream = Stream()
    answers = {
        "is_available": True, "is_initialized": True, "device_count": 1, "current_device": 0,
        "get_device_capability": (9, 0), "get_device_name": properties.name, "get_device_properties": properties,
        "_get_device_properties": properties,  # Inductor holds the function that calls it
        "is_bf16_supported": True, "set_device": None, "init": None, "_lazy_init": None,
        "current_stream": stream, "default_stream": stream, "set_stream": None, "synchronize": None,
        "empty_cache": None, "ipc_collect": None, "reset_peak_memory_stats": None, "reset_max_memory_allocated": None,
        "graph_pool_handle": (0, 0), "_exchange_device": 0, "_maybe_exchange_device": 0, "get_arch_list": ["sm_90"],
    }  # fmt: skip
    classes = {"Event": Event, "Stream": Stream, "ExternalStream": Stream, "CUDAGraph": Graph, "graph": Capture}
    guards = ("device", "device_of", "stream", "_DeviceGuard", "StreamContext")
    refused_names = ("memory_allocated", "max_memory_allocated", "mem_get_info", "memory_stats")
    return {
        **_answering(answers), **_SEEDS, **classes, **dict.fromkeys(guards, DeviceGuard),
        **{name: _refused(name) for name in refused_names},
        "make_graphed_callables": lambda callables, *args, **kwargs: callables,
        "is_current_stream_capturing": lambda: capturing() is not None,
        "default_generators": (DefaultGenerator(),),
    }  # fmt: skip


def _fake_accelerator() -> dict[str, Any]:
    answers = {
        "is_available": True, "device_count": 1, "current_device_index": 0, "current_device_idx": 0,
        "current_accelerator": torch.device("cuda"), "current_stream": Stream(), "set_stream": None,
        "set_device_index": None, "set_device_idx": None, "synchronize": None, "empty_cache": None,
        "reset_peak_memory_stats": None,
    }  # fmt: skip
    return _answering(answers) | {"device_index": DeviceGuard}


@contextmanager
def pretended_torch(mode: TorchFunctionMode) -> Iterator[None]:
    """Patches torch's modules beside `torch.cuda`, for the time of a `with` block in which `mode` is active."""
    set_default_device, has_torch_function = torch.set_default_device, torch.autograd.has_torch_function  # type: ignore[attr-defined]

    def default_device(device: Any) -> None:
        set_default_device(None if device is not None and torch.device(device).type == "cuda" else device)

    def has_override(tensors: Any) -> bool:
        """Tells whether a subclass of Tensor overrides autograd.  A mode does not, because it would be off inside."""
        return any(type(tensor) not in _PLAIN_TENSORS for tensor in tensors) and bool(has_torch_function(tensors))

    def backward(
        self: Any, gradient: Any = None, retain_graph: Any = None, create_graph: bool = False, inputs: Any = None
    ) -> None:
        torch.autograd.backward(self, gradient, retain_graph, create_graph, inputs=inputs)

    nvtx = SimpleNamespace(**_answering(dict.fromkeys(_NVTX, 0)))
    with (
        patch.multiple(torch.accelerator, create=True, **_fake_accelerator()),
        patch.multiple(torch, Stream=Stream, Event=Event, Generator=_Generator, set_default_device=default_device),
        patch.object(torch.cuda.nvtx, "_nvtx", nvtx),
        patch.object(torch.autograd, "has_torch_function", has_override),
        patch.multiple(torch.Tensor, create=True, backward=backward, record_stream=lambda self, stream: None),
        patch.object(torch.library.Library, "impl", _impl()),
        patch.object(torch._C._dynamo.guards, "_empty_strided_cuda", _empty_strided),
    ):
        _open_modes.append(mode)
        try:
            yield
        finally:
            _open_modes.pop()


def _empty_strided(size: Any, stride: Any, dtype: torch.dtype) -> torch.Tensor:
    """Allocates the buffers of code that torch.compile wrote for a GPU."""
    return torch.empty_strided(size, stride, dtype=dtype)


_PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter)
_open_modes: list[TorchFunctionMode] = []
"""The modes of the open contexts.  A registered kernel outlives the context in which it was registered."""


def _impl() -> Callable[..., Any]:
    """Returns a replacement of `Library.impl`.  It registers kernels of the GPU for the CPU, and runs Python kernels in
    the mode of the pretended GPU, which torch turns off while it calls an operator."""
    original_impl = torch.library.Library.impl

    gpu_operators = set[str]()

    def impl(self: Any, op_name: Any, fn: Any, dispatch_key: str = "", **options: Any) -> None:
        own_key = dispatch_key or self.dispatch_key
        operator = f"{self.ns}::{str(op_name).rpartition('::')[2]} {_LIBRARY_KEYS.get(own_key, own_key)}"
        if own_key in _LIBRARY_KEYS:
            gpu_operators.add(operator)
        elif operator in gpu_operators:
            return  # all tensors are on the GPU, so the kernel for the CPU never runs
        wrapped_fn = fn if fn is torch.library.fallthrough_kernel or own_key == "Meta" else _in_mode(fn)
        gpu_key = _LIBRARY_KEYS.get(own_key, own_key)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Warning only once for all operators")  # one replaces that of the CPU
            original_impl(self, op_name, wrapped_fn, gpu_key, **options)  # type: ignore[no-untyped-call]

    return impl


def _in_mode(fn: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        active_modes = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
        if not _open_modes or _open_modes[-1] in active_modes:
            return fn(*args, **kwargs)
        with _open_modes[-1]:
            return fn(*args, **kwargs)

    return call
