"""Replaces CUDA graphs on the pretended GPU.  A capture records torch's operators and kernel launches, in order, and a
replay runs them again on the same memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_open_graphs: list[Graph] = []


def capturing() -> Graph | None:
    """Returns the graph that is being captured and takes launches now, or None."""
    graph = _open_graphs[-1] if _open_graphs else None
    return graph if graph is not None and not graph.is_inside_operator else None


class Graph:
    """A fake `torch.cuda.CUDAGraph`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.calls: list[Callable[[], object]] = []
        self.is_inside_operator = False
        self._recording: _Recording | None = None

    def capture_begin(self, *args: Any, **kwargs: Any) -> None:
        """Begins to record."""
        self.calls.clear()
        self._recording = _Recording(self)
        _open_graphs.append(self)
        self._recording.__enter__()  # type: ignore[no-untyped-call]

    def capture_end(self) -> None:
        """Ends the recording.  Raises `RuntimeError` if none has begun."""
        if self._recording is None:
            raise RuntimeError("CUDAGraph.capture_end: expected capture_begin before it")
        self._recording.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        self._recording = None
        _open_graphs.remove(self)

    def replay(self) -> None:
        """Runs the recorded calls again."""
        with torch.no_grad():
            for call in self.calls:
                call()

    def reset(self) -> None:
        """Forgets the recorded calls."""
        self.calls.clear()

    def instantiate(self) -> None:
        """Does nothing, because recorded calls need no preparation."""

    def pool(self) -> tuple[int, int]:
        """Returns the handle of the only memory pool."""
        return 0, 0


class Capture:
    """A fake `torch.cuda.graph`, the context manager that captures a graph."""

    def __init__(self, cuda_graph: Graph, *args: Any, **kwargs: Any) -> None:
        self._graph = cuda_graph

    def __enter__(self) -> None:
        self._graph.capture_begin()

    def __exit__(self, *error: Any) -> None:
        self._graph.capture_end()


class _Recording(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records torch's operators.  An operator that writes its arguments runs only at replay, as on a GPU."""

    def __init__(self, graph: Graph) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._graph = graph

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        call = partial(func, *args, **(kwargs or {}))
        written_arguments = _written(func, args, kwargs or {})
        if written_arguments is not None:
            self._graph.calls.append(call)
            return written_arguments[0] if len(func._schema.returns) == 1 else tuple(written_arguments) or None
        self._graph.is_inside_operator = True
        try:
            result = call()
        finally:
            self._graph.is_inside_operator = False
        if not func._schema.name.removeprefix("aten::").startswith(("empty", "new_empty")):
            self._graph.calls.append(lambda: _refill(result, call()))
        return result


def _written(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any] | None:
    """Returns the arguments that an operator writes and returns.  Returns None if it has another result, or if it
    changes the shape of an argument."""
    schema = func._schema
    is_write = [argument.alias_info is not None and argument.alias_info.is_write for argument in schema.arguments]
    has_result = any(each.alias_info is None or not each.alias_info.is_write for each in schema.returns)
    if not any(is_write) or has_result or torch.Tag.inplace_view in func.tags:
        return None
    values = [*args, *(kwargs.get(argument.name) for argument in schema.arguments[len(args) :])]
    written_values = [value for value, written in zip(values, is_write, strict=True) if written]
    return written_values[: len(schema.returns)]


def _refill(old: Any, new: Any) -> None:
    """Copies the contents of each new tensor to the old tensor in its place."""
    if isinstance(old, torch.Tensor):
        if old.untyped_storage().data_ptr() != new.untyped_storage().data_ptr():
            old.data.copy_(new)  # `data` keeps the version that autograd checks
    elif isinstance(old, list | tuple):
        for old_item, new_item in zip(old, new, strict=True):
            _refill(old_item, new_item)
