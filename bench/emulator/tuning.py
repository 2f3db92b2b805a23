"""Chooses the configs of autotuned kernels in the emulator, which has no times to compare them by."""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch

Configs = Callable[[list[Any], dict[str, Any]], Iterable[Any]]
"""A function that takes the configs of an autotuned kernel and its arguments by name; returns the configs that run."""
MARKED_MS = 1.0
"""What stands for a time in milliseconds.  It is the same for all functions, so a tuner takes its first config."""
DO_BENCH_MARK = f"triton.testing.do_bench ran its function once, and returned {MARKED_MS} ms in place of a time"
PERF_REPORT_MARK = "triton.testing.perf_report ran nothing, because the emulator has no times"


@contextmanager
def tuned(configs: Configs | None, marks: Counter[str]) -> Iterator[None]:
    """Makes autotuned kernels run with their first config that compiles.

    If given, the function `configs` chooses the configs.  The kernel then runs once with each, and the last result is
    kept.  An autotuner with a `run` of its own gets one equal time for each config that compiles.  `marks` counts what
    stands in place of times."""
    from triton.compiler.errors import CompileTimeAssertionFailure
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.errors import OutOfResources, PTXASError

    not_compiled = (OutOfResources, CompileTimeAssertionFailure, PTXASError)

    def chosen(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.nargs = dict(zip(self.arg_names, args, strict=False))
        config_choices = list(self.prune_configs(kwargs) if len(self.configs) > 1 else self.configs)
        kernel, refusal = None, None
        saved_bytes = {} if configs is None else _contents([*args, *kwargs.values()])
        for run_config in config_choices if configs is None else configs(config_choices, {**self.nargs, **kwargs}):
            if kernel is not None:  # the next config starts with the same contents as the first config
                for storage_address, storage_bytes in saved_bytes.items():
                    ctypes.memmove(storage_address, storage_bytes, len(storage_bytes))
            if run_config.pre_hook is not None:
                run_config.pre_hook({**self.nargs, **kwargs, **run_config.all_kwargs()})
            try:
                kernel = self.fn.run(*args, **kwargs, **run_config.all_kwargs())
            except not_compiled as error:
                refusal = error
                continue
            self.best_config = run_config
            if configs is None:
                break
        self.nargs = None
        if kernel is None and refusal is not None:
            raise refusal
        return kernel

    def compiled(self: Any, *args: Any, config: Any, **meta: Any) -> list[float]:
        """Compiles one config of an autotuner that has its own `run`."""
        try:
            kernel = self.fn.run(*args, **{**meta, **config.all_kwargs(), "warmup": True})
            kernel._init_handles()
        except not_compiled:
            return [float("inf")] * 3
        return [MARKED_MS] * 3

    with patch.multiple(Autotuner, run=chosen, _bench=compiled), _without_times(marks):
        yield


@contextmanager
def _without_times(marks: Counter[str]) -> Iterator[None]:
    import triton.testing

    def do_bench(fn: Callable[[], Any], *args: Any, quantiles: Any = None, **kwargs: Any) -> Any:
        marks[DO_BENCH_MARK] += 1
        fn()
        if quantiles is None:
            return [MARKED_MS] if kwargs.get("return_mode") == "all" else MARKED_MS
        return [MARKED_MS] * len(quantiles) if len(quantiles) > 1 else MARKED_MS

    def no_report(self: Any, *args: Any, **kwargs: Any) -> None:
        marks[PERF_REPORT_MARK] += 1

    with (
        patch.multiple(triton.testing, do_bench=do_bench, do_bench_cudagraph=do_bench),
        patch.object(triton.testing.Mark, "run", no_report),
    ):
        yield


def _contents(values: Iterable[Any]) -> dict[int, bytes]:
    """Returns the bytes of each tensor's storage, by address. Reads memory without torch, because the emulator counts
    torch's reads."""
    storages = [tensor.untyped_storage() for tensor in values if isinstance(tensor, torch.Tensor)]
    return {each.data_ptr(): ctypes.string_at(each.data_ptr(), each.nbytes()) for each in storages if each.nbytes()}
